"""The parts of a forward pass, each a function of hidden states; decoders and layer-by-layer passes put them together.

    x = embed(ids);  each layer: x += attention(norm(x)),  x += mlp(norm(x));  logits = head(norm(x))
    mlp(x) = sum over the token's experts of weight * expert(x),  + shared(x);  or one dense expert

All hidden states are float32 [T, d].
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from moe_pack.formats import ModelSpec, NeuronFunction, RunError
from moe_pack.runtime.model.attention import attend
from moe_pack.runtime.model.expert import NEURONS, run_expert
from moe_pack.runtime.model.kv_cache import Angles, LayerCache
from moe_pack.runtime.model.matrix import gather_rows, linear
from moe_pack.runtime.model.mixer import mix
from moe_pack.runtime.model.mixers import LayerState
from moe_pack.runtime.model.weights import Weights, from_experts, norm, to_experts

PREFILL_TOKENS = 512  # of a forward pass, where memory allows

# ---- checks ---------------------------------------------------------------------------------------------------------


def check_context(context_tokens: int, spec: ModelSpec) -> None:
    """Raises RunError if the model does not have so many positions."""
    if not 0 < context_tokens <= spec.max_position_embeddings:
        most = spec.max_position_embeddings
        raise RunError(f"a context of {context_tokens} tokens is not possible; this model has {most} positions")


def check_vocabulary(ids: list[int], spec: ModelSpec) -> None:
    """Raises RunError if a token is not in the model's vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < spec.vocab_size:
        raise RunError(f"token {max(ids)} is not in the model's vocabulary of {spec.vocab_size} tokens")


# ---- before the layers, and the first half of a layer ---------------------------------------------------------------


def scaled(x: Tensor, factor: float) -> Tensor:
    """Returns `x * factor`; x itself if the factor is 1, as in most families."""
    return x if factor == 1.0 else x * factor


def embed(ids: Tensor, weights: Weights) -> Tensor:
    """Returns the hidden states before the first layer, for tokens int64 [T]."""
    return scaled(gather_rows(weights.matrix("embed"), ids), weights.spec.embedding_multiplier)


def add_attention(x: Tensor, weights: Weights, layer: int, cache: LayerCache | LayerState, angles: Angles) -> Tensor:
    """Returns hidden states with a layer's attention, or its mixer, added; new tokens enter the cache.

    They stay as they are in a layer with neither.
    """
    if not weights.spec.has_first(layer):
        return x
    normed = norm(x, weights, f"layers.{layer}.attention_norm")
    mixer = weights.spec.mixer_of(layer)
    if mixer is None:
        assert isinstance(cache, LayerCache), "of a layer with attention"
        y = attend(normed, weights, layer, cache, angles)
    else:
        assert isinstance(cache, LayerState), "of a layer with a mixer"
        y = mix(normed, weights, layer, mixer, cache)
    return x + scaled(y, weights.spec.residual_multiplier)


# ---- the second half of a layer: routing ----------------------------------------------------------------------------


def mlp_input(x: Tensor, weights: Weights, layer: int) -> Tensor:
    """Returns the normed hidden states that a layer's router and experts get."""
    return norm(x, weights, f"layers.{layer}.mlp_norm")


def router_logits(x: Tensor, weights: Weights, layer: int) -> Tensor:
    """Returns the logits of a layer's router, float32 [T, E], for `mlp_input` x."""
    role = f"layers.{layer}"
    bias = weights.vector(f"{role}.router_logit_bias") if weights.spec.router.logit_bias else None
    return linear(x, weights.matrix(f"{role}.router"), bias)


def route_tokens(x: Tensor, weights: Weights, layer: int) -> tuple[Tensor, Tensor]:
    """Returns the experts of each token, int64 [T, k], and their weights, float32 [T, k], for `mlp_input` x."""
    router = weights.spec.router
    bias = weights.vector(f"layers.{layer}.router_bias") if router.bias else None
    return weights.operations.route(router_logits(x, weights, layer), router, bias)


def router_scores(x: Tensor, weights: Weights, layer: int) -> Tensor:
    """Returns the scores that rank a layer's experts without regard to groups, float32 [T, E], for `mlp_input` x.

    For the input of the layer before, they predict this layer's experts. Source: CORM §4.2.
    """
    spec, logits = weights.spec.router, router_logits(x, weights, layer)
    if not spec.bias:
        return logits
    scores = logits.sigmoid() if spec.kind == "sigmoid_topk" else logits.softmax(dim=-1)
    return scores + weights.vector(f"layers.{layer}.router_bias")


# ---- the second half of a layer: experts ----------------------------------------------------------------------------

# Takes the outputs of some of a layer's experts, weighted and added up, float32 [T, d]. Returns the hidden states after
# the next layer's attention as they would be if only these experts had run, float32 [T, d]. A prediction of the next
# layer's experts uses it before all experts have run. The keys and values that it writes into the next layer's cache
# are overwritten when that layer runs.
PartialState = Callable[[Tensor], Tensor]


class ExpertRunner(ABC):
    """Weights that run the routed experts of a layer themselves, wherever the experts are.

    They rotate the input of a rotated layer, and its output back (`to_experts`, `from_experts`).
    """

    @abstractmethod
    def run_experts(
        self,
        layer_idx: int,
        x: Tensor,
        experts: Tensor,
        router_weights: Tensor,
        partial_state: PartialState | None = None,
    ) -> Tensor:
        """Returns the outputs of a layer's routed experts for x float32 [T, d], weighted and added up: float32 [T, d].

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
    """Returns the outputs of a layer's routed experts, weighted and added up; each expert is brought once.

    Args:    x: float32 [T, d].   experts, router_weights: int64 and float32 [T, k].   layer_idx: counts MoE layers.
             partial_state: None where the next layer has no experts.
    Returns: float32 [T, d].
    """
    if isinstance(weights, ExpertRunner):
        return weights.run_experts(layer_idx, x, experts, router_weights, partial_state)
    return run_one_by_one(x, experts, router_weights, weights, layer_idx)


def expert_inputs(x: Tensor, router_weights: Tensor, spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """Returns what a layer's experts get for x float32 [T, d], and the weights of their outputs, float32 [T, k]."""
    if not spec.router.on_input:
        return x, router_weights
    return x * router_weights, torch.ones_like(router_weights)  # there is one expert a token


def run_one_by_one(x: Tensor, experts: Tensor, router_weights: Tensor, weights: Weights, layer_idx: int) -> Tensor:
    """Returns the same by the reference semantics (`run_expert`), one expert after the other."""
    y, function = torch.zeros_like(x), weights.spec.expert.function
    x, router_weights = expert_inputs(x, router_weights, weights.spec)
    x = to_experts(x, weights, layer_idx)
    for number in torch.unique(experts).tolist():  # in rising order, so that sums have one order
        token_idx, place = torch.where((experts == number) & (router_weights != 0))  # zero: beyond its capacity
        expert, threshold = weights.expert(layer_idx, number), weights.threshold(layer_idx, number)
        output = run_expert(x[token_idx], expert, function, weights.selector, threshold)
        y[token_idx] += router_weights[token_idx, place, None] * output
    return from_experts(y, weights, layer_idx)


def run_unrouted(x: Tensor, weights: Weights, layer: int) -> Tensor | None:
    """Returns what every token gets without a router: the shared expert, or the dense expert of a layer without others.

    Returns: float32 [T, d]; None where the family has no shared expert.
    """
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
    """Returns the output of an expert that is stored as dense matrices; all its neurons run.

    Args:    x: float32 [T, d].   role: the beginning of its matrices' roles (`layers.{i}.shared`).
    Returns: float32 [T, d].
    """
    up = linear(x, weights.matrix(f"{role}.up"))
    gate = linear(x, weights.matrix(f"{role}.gate")) if "gate" in weights.spec.expert.matrices else None
    return linear(NEURONS[function].h(gate, up), weights.matrix(f"{role}.down"))


# ---- after the layers -----------------------------------------------------------------------------------------------


def head(x: Tensor, weights: Weights) -> Tensor:
    """Returns the logits of hidden states after the last layer, float32 [T, vocabulary]."""
    spec = weights.spec
    matrix = weights.matrix("embed" if spec.tied_head else "head")
    bias = weights.vector("head_bias") if spec.head_bias else None
    logits = linear(norm(x, weights, "norm"), matrix, bias)
    return logits if spec.logits_scaling == 1.0 else logits / spec.logits_scaling
