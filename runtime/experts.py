"""The routed experts of a layer: weights that can run them together do, else they run one by one as `expert` says."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from moe_pack.runtime.expert import run_expert
from moe_pack.runtime.weights import Weights

# The hidden states float32 [T, d] after the next layer's attention, had only some of this layer's experts run, from the
# sum of these, float32 [T, d]: what a prediction of the next layer's experts may look at meanwhile. The keys and values
# that it writes are overwritten when the next layer runs.
PartialState = Callable[[Tensor], Tensor]


class ExpertRunner(ABC):
    """Weights that run the routed experts of a layer themselves, wherever these lie."""

    @abstractmethod
    def run_experts(
        self,
        layer_idx: int,
        x: Tensor,
        experts: Tensor,
        router_weights: Tensor,
        partial_state: PartialState | None = None,
    ) -> Tensor:
        """Returns the outputs of a layer's routed experts over x float32 [T, d], weighted and added up.

        Args:    layer_idx: counts MoE layers.   experts, router_weights: int64 and float32 [T, k].
                 partial_state: None where the next layer has no experts.
        """


def run_experts(
    x: Tensor,
    experts: Tensor,
    router_weights: Tensor,
    weights: Weights,
    layer_idx: int,
    partial_state: PartialState | None = None,
) -> Tensor:
    """The outputs of a layer's routed experts, weighted and added up; each expert is brought once.

    Args:    x: float32 [T, d].   experts, router_weights: int64 and float32 [T, k].   layer_idx: counts MoE layers.
             partial_state: None where the next layer has no experts.
    Returns: float32 [T, d].
    """
    if isinstance(weights, ExpertRunner):
        return weights.run_experts(layer_idx, x, experts, router_weights, partial_state)
    return run_one_by_one(x, experts, router_weights, weights, layer_idx)


def run_one_by_one(x: Tensor, experts: Tensor, router_weights: Tensor, weights: Weights, layer_idx: int) -> Tensor:
    """The same by the reference semantics, wherever `weights.expert` brings each expert to."""
    y = torch.zeros_like(x)
    for expert in torch.unique(experts).tolist():  # rising, so that sums are made in one order
        token_idx, place = torch.where((experts == expert) & (router_weights != 0))  # zero: beyond its capacity
        held, threshold = weights.expert(layer_idx, expert), weights.threshold(layer_idx, expert)
        output = run_expert(x[token_idx], held, weights.spec.expert.function, weights.selector, threshold)
        y[token_idx] += router_weights[token_idx, place, None] * output
    return y
