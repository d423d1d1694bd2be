"""The routed experts of a layer: weights that can run them together do, else they run one by one as `expert` says.

The parts of a decoder layer, each a function of hidden states: what the decoder and layer-by-layer passes share.

    x = embed(ids);  each layer: x += attention(norm(x)),  x += mlp(norm(x));  logits = head(norm(x))
    mlp(x) = sum over the token's experts of weight * expert(x),  + shared(x);  or one dense expert

All hidden states are float32 [T, d].
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from moe_pack.formats import NeuronFunction
from moe_pack.runtime.model.attention import attend
from moe_pack.runtime.model.expert import NEURONS, run_expert
from moe_pack.runtime.model.kv_cache import Angles, LayerCache
from moe_pack.runtime.model.matrix import gather_rows, linear
from moe_pack.runtime.model.weights import Weights, norm

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


PREFILL_TOKENS = 512  # of a forward pass, where memory allows


def scaled(x: Tensor, factor: float) -> Tensor:
    """`x * factor`; `x` itself where that is 1, as most families have it."""
    return x if factor == 1.0 else x * factor


def embed(ids: Tensor, weights: Weights) -> Tensor:
    """The hidden states before the first layer, for tokens int64 [T]."""
    return scaled(gather_rows(weights.matrix("embed"), ids), weights.spec.embedding_multiplier)


def add_attention(x: Tensor, weights: Weights, layer: int, cache: LayerCache, angles: Angles) -> Tensor:
    """The first half of a layer: hidden states with its attention added."""
    normed = norm(x, weights, f"layers.{layer}.attention_norm")
    return x + scaled(attend(normed, weights, layer, cache, angles), weights.spec.residual_multiplier)


def mlp_input(x: Tensor, weights: Weights, layer: int) -> Tensor:
    """What the second half of a layer sees: the input of its router and its experts."""
    return norm(x, weights, f"layers.{layer}.mlp_norm")


def route_tokens(x: Tensor, weights: Weights, layer: int) -> tuple[Tensor, Tensor]:
    """The experts of tokens and their weights, int64 and float32 [T, k], from `mlp_input`."""
    router = weights.spec.router
    bias = weights.vector(f"layers.{layer}.router_bias") if router.bias else None
    return weights.operations.route(router_logits(x, weights, layer), router, bias)


def router_logits(x: Tensor, weights: Weights, layer: int) -> Tensor:
    """What a layer's router says of its experts for inputs float32 [T, d]: float32 [T, E]."""
    role = f"layers.{layer}"
    bias = weights.vector(f"{role}.router_logit_bias") if weights.spec.router.logit_bias else None
    return linear(x, weights.matrix(f"{role}.router"), bias)


def router_scores(x: Tensor, weights: Weights, layer: int) -> Tensor:
    """What ranks a layer's experts for inputs float32 [T, d], groups apart: float32 [T, E].

    Of the input of the layer before it is a prediction. Source: CORM §4.2.
    """
    spec, logits = weights.spec.router, router_logits(x, weights, layer)
    if not spec.bias:
        return logits
    scores = logits.sigmoid() if spec.kind == "sigmoid_topk" else logits.softmax(dim=-1)
    return scores + weights.vector(f"layers.{layer}.router_bias")


def run_unrouted(x: Tensor, weights: Weights, layer: int) -> Tensor | None:
    """What every token gets beside its routed experts, or None: the shared expert, or the layer's one dense expert."""
    spec, role = weights.spec, f"layers.{layer}"
    if layer not in spec.moe_layers:
        return run_dense_expert(x, weights, f"{role}.mlp", spec.expert.function)
    if spec.shared_expert is None:
        return None
    output = run_dense_expert(x, weights, f"{role}.shared", spec.expert.function)
    if spec.shared_expert.gated:
        output = output * torch.sigmoid(linear(x, weights.matrix(f"{role}.shared_router")))
    return output


def run_dense_expert(x: Tensor, weights: Weights, role: str, function: NeuronFunction) -> Tensor:
    """The output of an expert that every token goes to and that is kept as dense matrices: all its neurons run.

    Args:    x: float32 [T, d].   role: what its matrices' roles begin with (`layers.{i}.shared`).
    Returns: float32 [T, d].
    """
    up = linear(x, weights.matrix(f"{role}.up"))
    gate = linear(x, weights.matrix(f"{role}.gate")) if "gate" in weights.spec.expert.matrices else None
    return linear(NEURONS[function].h(gate, up), weights.matrix(f"{role}.down"))


def head(x: Tensor, weights: Weights) -> Tensor:
    """The logits of hidden states after the last layer, float32 [T, vocabulary]."""
    spec = weights.spec
    matrix = weights.matrix("embed" if spec.tied_head else "head")
    bias = weights.vector("head_bias") if spec.head_bias else None
    logits = linear(norm(x, weights, "norm"), matrix, bias)
    return logits if spec.logits_scaling == 1.0 else logits / spec.logits_scaling
