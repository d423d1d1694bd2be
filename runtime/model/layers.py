"""The parts of a forward pass, each a function of hidden states; decoders and layer-by-layer passes put them together.

    x = embed(ids);  each layer: x += attention(norm(x)),  x += mlp(norm(x));  logits = head(norm(x))
    mlp(x) = sum over the token's experts of weight * expert(x),  + shared(x);  or one dense expert

Between layers, hidden states are float32 [T, w]; halves of layers read and change them as `residuals` says. A half gets
and returns float32 [T, d].
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack import formats
from moe_pack.runtime.model import caches, compute, residuals
from moe_pack.runtime.model.attention import kinds
from moe_pack.runtime.model.compute import matrices
from moe_pack.runtime.model.compute.expert import run_expert
from moe_pack.runtime.model.compute.router import expert_scores, identity_share, router_weights
from moe_pack.runtime.model.compute.weights import Weights, from_experts, to_experts

PREFILL_TOKENS = 512  # of a forward pass, where memory allows

# ---- checks ---------------------------------------------------------------------------------------------------------


def check_context(context_tokens: int, spec: formats.ModelSpec) -> None:
    """Raises RunError if the model does not have so many positions."""
    if not 0 < context_tokens <= spec.max_position_embeddings:
        most = spec.max_position_embeddings
        raise formats.RunError(f"a context of {context_tokens} tokens is not possible; this model has {most} positions")


def check_vocabulary(ids: list[int], spec: formats.ModelSpec) -> None:
    """Raises RunError if a token is not in the model's vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < spec.vocab_size:
        raise formats.RunError(f"token {max(ids)} is not in the model's vocabulary of {spec.vocab_size} tokens")


# ---- before the layers, and the first half of a layer ---------------------------------------------------------------


def embed(ids: Tensor, weights: Weights) -> Tensor:
    """Returns the hidden states before the first layer, for tokens int64 [T]."""
    x = residuals.scaled(matrices.gather_rows(weights.matrix("embed"), ids), weights.spec.embedding_multiplier)
    return residuals.residual_of(weights.spec.residual).begin(x)


def add_ngrams(
    x: Tensor, rows: "compute.NgramRows | None", weights: Weights, layer: int, state: caches.LayerState | None
) -> Tensor:
    """Adds a layer's n-grams, if it has any, to hidden states; new tokens enter the state; raises as `NgramRows.of`."""
    if rows is None or state is None:
        return x
    from moe_pack.runtime.model import mixers  # most models have none

    return x + mixers.ngram_output(x, rows.of(layer), weights, layer, state)


def add_attention(
    x: Tensor,
    weights: Weights,
    layer: int,
    cache: caches.LayerCache | caches.LayerState | caches.Batch[caches.LayerCache] | caches.Batch[caches.LayerState],
    angles: caches.Angles,
) -> Tensor:
    """Adds a layer's attention, or its mixer, to hidden states, if it has either; new tokens enter the cache."""
    if not weights.spec.has_first(layer):
        return x
    residual = residuals.residual_of(weights.spec.residual)
    normed = residual.half_input(x, weights, layer, "attention")
    mixer = weights.spec.mixer_of(layer)
    if mixer is None:
        y = kinds.attend(
            normed, weights, layer, cast(caches.LayerCache | caches.Batch[caches.LayerCache], cache), angles
        )
    else:
        from moe_pack.runtime.model import mixers  # most models have none

        y = mixers.mix(normed, weights, layer, mixer, cast(caches.LayerState | caches.Batch[caches.LayerState], cache))
    return residual.enter(x, y, weights, layer, "attention")


# ---- the second half of a layer: routing ----------------------------------------------------------------------------


def mlp_input(x: Tensor, weights: Weights, layer: int) -> Tensor:
    """Returns the input of a layer's router and experts, float32 [T, d], from hidden states [T, w]."""
    return residuals.residual_of(weights.spec.residual).half_input(x, weights, layer, "mlp")


def router_logits(x: Tensor, weights: Weights, layer: int) -> Tensor:
    """Returns the logits of a layer's router for `mlp_input` x: float32 [T, E], or more with `num_identity`."""
    role, spec = f"layers.{layer}", weights.spec
    bias = weights.vector(f"{role}.router_logit_bias") if spec.router.logit_bias else None
    if spec.router.input_scale:
        x = x * (weights.vector(f"{role}.router_scale") * spec.hidden_size**-0.5)
    return matrices.linear(x, weights.matrix(f"{role}.router"), bias)


def route_tokens(x: Tensor, weights: Weights, layer: int, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the experts of each token, int64 [T, k], and their weights, float32 [T, k], for `mlp_input` x.

    Args:    ids: the tokens, int64 [T]; needed in a layer in which a table names experts.
    Raises:  RunError if the table does not name different experts for each of the tokens.
    """
    if layer in weights.spec.router.table_layers:
        assert ids is not None, f"layer {layer} needs the tokens"
        experts = experts_of_tokens(ids, weights, layer).to(x.device)
        return experts, weights_of_experts(router_logits(x, weights, layer), experts, weights, layer)
    logits, bias = router_logits(x, weights, layer), _router_bias(weights, layer)
    experts, router_weights = weights.operations.route(logits, weights.spec.router, bias)
    return experts, _scaled_by_expert(router_weights, experts, weights, layer)


def experts_of_tokens(ids: Tensor, weights: Weights, layer: int) -> Tensor:
    """Returns the experts of a layer's table for tokens int64 [T]: int64 [T, k]; raises RunError if they are wrong."""
    named = matrices.gather_rows(weights.matrix(f"layers.{layer}.router_table"), ids.cpu()).long()
    ordered = named.sort(dim=1).values
    is_known = (ordered[:, 0] >= 0) & (ordered[:, -1] < weights.spec.router.num_experts)
    is_sound = is_known & (ordered[:, 1:] != ordered[:, :-1]).all(dim=1)
    if not is_sound.all():
        place = int((~is_sound).nonzero()[0, 0])
        raise formats.RunError(
            f"layer {layer}: the router's table names experts {named[place].tolist()} for token {int(ids[place])}, "
            f"expected different ones from 0 to {weights.spec.router.num_experts - 1}"
        )
    return named


def weights_of_experts(logits: Tensor, experts: Tensor, weights: Weights, layer: int) -> Tensor:
    """Returns the weights float32 [T, k] of given experts int64 [T, k], from `router_logits`."""
    return _scaled_by_expert(router_weights(logits, experts, weights.spec.router), experts, weights, layer)


def _scaled_by_expert(router_weights: Tensor, experts: Tensor, weights: Weights, layer: int) -> Tensor:
    if not weights.spec.router.expert_scale:
        return router_weights
    return router_weights * weights.vector(f"layers.{layer}.router_expert_scale")[experts]


def _router_bias(weights: Weights, layer: int) -> Tensor | None:
    router = weights.spec.router
    has_bias = router.bias and layer not in router.table_layers
    return weights.vector(f"layers.{layer}.router_bias") if has_bias else None


def router_scores(x: Tensor, weights: Weights, layer: int) -> Tensor:
    """Returns the scores that rank a layer's experts without regard to groups, float32 [T, E] (CORM §4.2)."""
    spec, logits, bias = weights.spec.router, router_logits(x, weights, layer), _router_bias(weights, layer)
    if bias is None:
        return logits[:, : spec.num_experts]
    scores = logits if spec.kind == "topk_sigmoid" else expert_scores(logits, spec)
    return scores + bias[: spec.num_experts]


# ---- the second half of a layer: experts ----------------------------------------------------------------------------

# Takes the outputs of some of a layer's experts, weighted and added up, float32 [T, d]. Returns the hidden states after
# the next layer's attention as they would be if only these experts had run, float32 [T, d]. A prediction of the next
# layer's experts uses it before all experts have run. The keys and values that it writes into the next layer's cache
# are overwritten when that layer runs.
PartialState = Callable[[Tensor], Tensor]


class ExpertRunner(ABC):
    """Weights that run the routed experts of a layer themselves, rotation included, wherever the experts are."""

    is_batch = False  # each token of the running pass is the next one of a sequence of its own; the decoder sets both
    is_prompt = False  # the pass is of several tokens of one sequence, even if a layer's experts run for one of them

    def begin_pass(self, ids: Tensor, num_last: int) -> None:
        """Notes the tokens int64 [T] of a pass that begins; the last `num_last` of them run in the last layer."""
        return None

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

        Args:    layer_idx: counts MoE layers.   experts, router_weights: int64 and float32 [T, k].   partial_state:
                 None where the next layer has no experts.
        """


class ExpertObserver(Protocol):
    """Observes a run from the thread that computes; it must not wait."""

    def routed(self, layer_idx: int, experts: NDArray[np.int64]) -> None:
        """Takes note of the experts int64 [T, k] that run in a layer. `layer_idx`: counts MoE layers."""

    def fetched(self, layer_idx: int, expert: int) -> None:
        """Takes note that an expert is read from the disk, because it is needed or predicted."""


class ObservedWeights:
    """Weights on the CPU that may have an observer."""

    observer: ExpertObserver | None = None


def run_experts(
    x: Tensor,
    experts: Tensor,
    router_weights: Tensor,
    weights: Weights,
    layer_idx: int,
    partial_state: PartialState | None = None,
) -> Tensor:
    """Does the same as `ExpertRunner.run_experts` for any weights; each expert is brought once."""
    if isinstance(weights, ExpertRunner):
        return weights.run_experts(layer_idx, x, experts, router_weights, partial_state)
    if isinstance(weights, ObservedWeights) and weights.observer is not None:
        weights.observer.routed(layer_idx, experts.numpy())
    return run_one_by_one(x, experts, router_weights, weights, layer_idx)


def expert_inputs(x: Tensor, router_weights: Tensor, weights: Weights, layer_idx: int) -> tuple[Tensor, Tensor]:
    """Returns the input of a layer's experts for `mlp_input` x, float32 [T, d], and the weights of their outputs."""
    own = residuals.residual_of(weights.spec.residual).experts_norm(weights, weights.spec.moe_layers[layer_idx])
    if own is not None:
        x = x * own
    if not weights.spec.router.on_input:
        return x, router_weights
    return x * router_weights, torch.ones_like(router_weights)  # there is one expert a token


def run_one_by_one(x: Tensor, experts: Tensor, router_weights: Tensor, weights: Weights, layer_idx: int) -> Tensor:
    """Does the same by the reference semantics (`run_expert`), one expert after the other."""
    y, function = torch.zeros_like(x), weights.spec.expert_function(layer_idx)
    x, router_weights = expert_inputs(x, router_weights, weights, layer_idx)
    x = to_experts(x, weights, layer_idx)
    for number in torch.unique(experts).tolist():  # in rising order, so that sums have one order
        token_idx, place = torch.where((experts == number) & (router_weights != 0))  # zero: it does not run
        if not len(token_idx):
            continue
        expert, threshold = weights.expert(layer_idx, number), weights.threshold(layer_idx, number)
        output = run_expert(x[token_idx], expert, function, weights.selector, threshold)
        y[token_idx] += router_weights[token_idx, place, None] * output
    return from_experts(y, weights, layer_idx)


def with_returned(routed: Tensor | None, x: Tensor, weights: Weights, layer: int) -> Tensor | None:
    """Adds the experts that return their input to the routed sum, float32 [T, d]; their weights are computed again."""
    router = weights.spec.router
    if not router.num_identity or layer not in weights.spec.moe_layers:
        return routed
    returned = x * identity_share(router_logits(x, weights, layer), router, _router_bias(weights, layer))
    return returned if routed is None else routed + returned


def run_unrouted(x: Tensor, weights: Weights, layer: int, most_tokens: int | None = None) -> Tensor | None:
    """Returns the output of the shared or dense expert, float32 [T, d], `most_tokens` at a time; None without one."""
    if most_tokens is not None and len(x) > most_tokens:
        each = [run_unrouted(piece, weights, layer) for piece in torch.split(x, most_tokens)]
        pieces = [piece for piece in each if piece is not None]
        return torch.cat(pieces) if pieces else None
    spec, role = weights.spec, f"layers.{layer}"
    function = spec.expert.unrouted_function(layer)
    if layer not in spec.moe_layers:
        return run_dense_expert(x, weights, f"{role}.mlp", function)
    if spec.shared_expert is None:
        return None
    own = residuals.residual_of(spec.residual).shared_norm(weights, layer)
    x = x if own is None else x * own
    output = run_dense_expert(x, weights, f"{role}.shared", function)
    if spec.shared_expert.gated:
        logits = matrices.linear(x, weights.matrix(f"{role}.shared_router"))
        output = weights.operations.scale_by_sigmoid(output, logits)
    return output


def run_dense_expert(x: Tensor, weights: Weights, role: str, function: formats.NeuronFunction) -> Tensor:
    """Returns the output of an expert stored as dense matrices of `{role}.`, float32 [T, d]; all its neurons run."""
    up = matrices.linear(x, weights.matrix(f"{role}.up"))
    gate = matrices.linear(x, weights.matrix(f"{role}.gate")) if "gate" in weights.spec.expert.matrices else None
    return matrices.linear(weights.operations.activate(gate, up, function), weights.matrix(f"{role}.down"))


def enter_second(x: Tensor, unrouted: Tensor | None, routed: Tensor | None, weights: Weights, layer: int) -> Tensor:
    """Returns hidden states [T, w] after a layer, from those after its first half and the outputs of its experts."""
    return residuals.residual_of(weights.spec.residual).enter_second(x, unrouted, routed, weights, layer)


def run_mlp(
    x: Tensor,
    inputs: Tensor,
    unrouted: Tensor | None,
    route: tuple[Tensor, Tensor] | None,
    weights: Weights,
    layer: int,
    partial_state: PartialState | None,
) -> Tensor:
    """Returns hidden states after a layer, from x after its first half; `route` is None without routed experts."""
    routed = None
    if route is not None:
        layer_idx = weights.spec.moe_layers.index(layer)
        routed = run_experts(inputs, *route, weights, layer_idx, partial_state)
        routed = with_returned(routed, inputs, weights, layer)
    return enter_second(x, unrouted, routed, weights, layer)


def add_mlp(
    x: Tensor,
    weights: Weights,
    layer: int,
    ids: Tensor | None,
    partial_state: PartialState | None = None,
    most_tokens: int | None = None,
) -> Tensor:
    """Returns hidden states [T, w] after a layer's second half; ids, int64 [T], are for a table of experts."""
    if not weights.spec.has_second(layer):
        return x
    inputs = mlp_input(x, weights, layer)
    unrouted = run_unrouted(inputs, weights, layer, most_tokens)
    route = route_tokens(inputs, weights, layer, ids) if layer in weights.spec.moe_layers else None
    return run_mlp(x, inputs, unrouted, route, weights, layer, partial_state)


def partial_state(
    x: Tensor, weights: Weights, layer: int, then: Callable[[Tensor], Tensor], most_tokens: int | None = None
) -> PartialState | None:
    """Returns the `PartialState` of the next layer, or None; `then` runs that layer's first half, on trial."""
    if layer + 1 not in weights.spec.moe_layers:
        return None

    def state(y: Tensor) -> Tensor:
        inputs = mlp_input(x, weights, layer)
        routed = with_returned(y, inputs, weights, layer)
        return then(enter_second(x, run_unrouted(inputs, weights, layer, most_tokens), routed, weights, layer))

    return state


# ---- after the layers -----------------------------------------------------------------------------------------------


def head(x: Tensor, weights: Weights) -> Tensor:
    """Returns the logits of hidden states [T, w] after the last layer, float32 [T, vocabulary]."""
    spec = weights.spec
    matrix = weights.matrix("embed" if spec.tied_head else "head")
    bias = weights.vector("head_bias") if spec.head_bias else None
    logits = matrices.linear(residuals.residual_of(spec.residual).end(x, weights), matrix, bias)
    if spec.logits_scaling != 1.0:
        logits = logits / spec.logits_scaling
    cap = spec.logits_softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)
