"""The parts of a forward pass, each a function of hidden states; decoders and layer-by-layer passes put them together.

    x = embed(ids);  each layer: x += attention(norm(x)),  x += mlp(norm(x));  logits = head(norm(x))
    mlp(x) = sum over the token's experts of weight * expert(x),  + shared(x);  or one dense expert

Between layers, hidden states are float32 [T, w], where w is d, or with a residual of several streams (`spec.residual`)
a multiple of it. Halves of layers read them and change them through `first_input`, `enter_first`, `mlp_input` and
`enter_second` alone. What a half gets and returns is float32 [T, d].
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.parts.residual import Half, has_input_gates, has_input_norm, has_output_norm
from moe_pack.runtime.cpu import ExpertRows
from moe_pack.runtime.model import caches, matrices, mixers
from moe_pack.runtime.model.attention import attend
from moe_pack.runtime.model.expert import run_expert
from moe_pack.runtime.model.router import expert_scores, identity_share, router_weights
from moe_pack.runtime.model.weights import Weights, from_experts, norm, to_experts

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


# ---- how the halves of a layer read and change hidden states --------------------------------------------------------


def first_input(x: Tensor, weights: Weights, layer: int) -> Tensor:
    """Returns what a layer's attention or mixer gets, float32 [T, d], of hidden states [T, w]."""
    return _half_input(x, weights, layer, "attention")


def mlp_input(x: Tensor, weights: Weights, layer: int) -> Tensor:
    """Returns what a layer's router and experts get, float32 [T, d], of hidden states [T, w]."""
    return _half_input(x, weights, layer, "mlp")


def _half_input(x: Tensor, weights: Weights, layer: int, half: Half) -> Tensor:
    spec, role = weights.spec, f"layers.{layer}.{half}"
    residual, d = spec.residual, spec.hidden_size
    if residual is None or isinstance(residual, parts.ShortcutResidualSpec):
        return norm(x[:, :d], weights, f"{role}_norm")
    if isinstance(residual, parts.ParallelResidualSpec):
        return norm(x[:, :d], weights, f"layers.{layer}.attention_norm")
    if isinstance(residual, parts.GatedStreamsSpec):
        return _gated_average(x, weights, residual, f"{role}_streams")
    if isinstance(residual, parts.MixedStreamsSpec):
        read, _, _ = _stream_weights(x, weights, residual, f"{role}_streams")
        return norm(_weighted(x, read), weights, f"{role}_norm")
    if has_input_norm(residual, half, layer in spec.moe_layers):
        normed = norm(x, weights, f"{role}_norm")
        return (
            _gated(normed, weights, f"{role}_gates")
            if has_input_gates(residual, half, layer in spec.moe_layers)
            else normed
        )
    is_apart = isinstance(residual, parts.NormedResidualSpec) and residual.apart
    return _unit(x, weights) if is_apart and half == "mlp" else x


def enter_first(x: Tensor, y: Tensor, weights: Weights, layer: int) -> Tensor:
    """Returns hidden states [T, w] after a layer's first half, whose output is y float32 [T, d]."""
    spec, residual, d = weights.spec, weights.spec.residual, weights.spec.hidden_size
    if isinstance(residual, parts.ShortcutResidualSpec):
        return torch.cat((x[:, :d] + y, x[:, d:]), dim=1)
    if isinstance(residual, parts.ParallelResidualSpec):
        return torch.cat((x[:, :d], y), dim=1)
    if isinstance(residual, parts.GatedStreamsSpec | parts.MixedStreamsSpec):
        return _enter_streams(x, y, weights, residual, f"layers.{layer}.attention_streams")
    if isinstance(residual, parts.NormedStateSpec):
        factors = residual.attention if spec.mixer_of(layer) is None else residual.mixer
        assert factors is not None, "a checked spec"
        return _on_normed(x, y, weights, f"layers.{layer}.attention_norm", factors)
    if has_output_norm(residual, "attention", False):
        y = norm(y, weights, f"layers.{layer}.attention_post_norm")
    if isinstance(residual, parts.NormedResidualSpec) and residual.by_depth:
        return _by_depth(x, y, 2 * layer + 2)
    return x + scaled(y, spec.residual_multiplier)


def enter_second(x: Tensor, unrouted: Tensor | None, routed: Tensor | None, weights: Weights, layer: int) -> Tensor:
    """Returns hidden states [T, w] after a layer.

    Args:    x: after its first half.   unrouted: the output of its shared or dense expert, float32 [T, d]; None if
             there is none.   routed: the weighted sum of its routed experts likewise. One of both is there.
    """
    spec, residual, d = weights.spec, weights.spec.residual, weights.spec.hidden_size
    if isinstance(residual, parts.ShortcutResidualSpec):
        waiting = routed if layer in residual.layers else None
        y = _sum(_sum(unrouted, None if waiting is not None else routed), x[:, d:])
        return torch.cat((x[:, :d] + y, torch.zeros_like(y) if waiting is None else waiting), dim=1)
    if isinstance(residual, parts.ParallelResidualSpec):
        y = _sum(unrouted, routed)
        if residual.averaged and unrouted is not None and routed is not None:
            y = y / 2
        x = x[:, :d] + x[:, d:] + y
        return torch.cat((x, torch.zeros_like(x)), dim=1)
    if isinstance(residual, parts.GatedStreamsSpec | parts.MixedStreamsSpec):
        return _enter_streams(x, _sum(unrouted, routed), weights, residual, f"layers.{layer}.mlp_streams")
    if isinstance(residual, parts.NormedStateSpec):
        return _on_normed(x, _sum(unrouted, routed), weights, f"layers.{layer}.mlp_norm", residual.mlp)
    if isinstance(residual, parts.NormedResidualSpec):
        return _enter_normed(x, unrouted, routed, weights, residual, layer)
    return x + scaled(_sum(unrouted, routed), spec.residual_multiplier)


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor:
    given = [each for each in (second, first) if each is not None]
    assert given, "a layer with a second half has an output"
    return given[0] if len(given) == 1 else given[0] + given[1]


def _enter_normed(
    x: Tensor,
    unrouted: Tensor | None,
    routed: Tensor | None,
    weights: Weights,
    spec: parts.NormedResidualSpec,
    layer: int,
) -> Tensor:
    role = f"layers.{layer}"
    if spec.apart and unrouted is not None and routed is not None:
        unrouted = norm(unrouted, weights, f"{role}.shared_post_norm")
        routed = norm(routed, weights, f"{role}.experts_post_norm")
    y = _sum(unrouted, routed)
    if has_output_norm(spec, "mlp", layer in weights.spec.moe_layers):
        y = norm(y, weights, f"{role}.mlp_post_norm")
    x = _by_depth(x, y, 2 * layer + 3) if spec.by_depth else x + scaled(y, weights.spec.residual_multiplier)
    return x * weights.vector(f"{role}.scale") if spec.scaled else x


def _by_depth(x: Tensor, y: Tensor, number: int) -> Tensor:
    """Returns the sum of hidden states and an output, in which all outputs so far, and the embedding, weigh the same.

    Args:    number: of these together.
    """
    return x * math.sqrt((number - 1) / number) + y * math.sqrt(1 / number)


def _on_normed(x: Tensor, y: Tensor, weights: Weights, role: str, factors: parts.FactorsSpec) -> Tensor:
    """Returns hidden states after a half that read `norm(x)` and returned y: the sum of both, by their factors."""
    return scaled(norm(x, weights, role), factors.state) + scaled(y, factors.output)


def _gated(x: Tensor, weights: Weights, role: str) -> Tensor:
    """Returns x float32 [T, d], each value behind a gate that comes from x: `x * sigmoid(up silu(down x))`."""
    gates = torch.nn.functional.silu(matrices.linear(x, weights.matrix(f"{role}.down")))
    return x * matrices.linear(gates, weights.matrix(f"{role}.up")).sigmoid()


def _unit(x: Tensor, weights: Weights) -> Tensor:
    """Returns x float32 [..., n] over the rms of its rows, with the model's eps."""
    return weights.operations.rms_norm(x, torch.ones(x.shape[-1], device=x.device), weights.spec.norm.eps)


# ---- several residual streams ---------------------------------------------------------------------------------------


def _gated_average(x: Tensor, weights: Weights, spec: parts.GatedStreamsSpec, role: str) -> Tensor:
    """Returns the average of the normed streams, each value behind a gate: float32 [T, d]."""
    normed = _normed_streams(x, weights, spec, role)
    gates = torch.nn.functional.silu(matrices.linear(normed, weights.matrix(f"{role}.down")) / spec.streams)
    gates = matrices.linear(gates, weights.matrix(f"{role}.up")).sigmoid()
    return (gates * normed).view(len(x), spec.streams, -1).mean(dim=1)


def _normed_streams(x: Tensor, weights: Weights, spec: parts.GatedStreamsSpec, role: str) -> Tensor:
    return _unit(x.view(len(x), spec.streams, -1), weights).flatten(1) * weights.vector(f"{role}.norm")


def _stream_weights(
    x: Tensor, weights: Weights, spec: parts.MixedStreamsSpec, role: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns with what weights streams are read, float32 [T, n], an output enters them, [T, n], and they are mixed.

    The last, float32 [T, n, n], is of stream j in stream k; None if streams are not mixed.
    """
    n, scale = spec.streams, weights.vector(f"{role}.scale")
    found = matrices.linear(_unit(x, weights), weights.matrix(f"{role}.weights"))
    base = weights.vector(f"{role}.base")
    read = (found[:, :n] * scale[0] + base[:n]).sigmoid() + spec.eps
    enter = spec.magnitude * (found[:, n : 2 * n] * scale[1] + base[n : 2 * n]).sigmoid()
    if not spec.mixing:
        return read, enter + spec.eps, None
    mix = (found[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n).softmax(dim=-1) + spec.eps
    mix = mix / (mix.sum(dim=-2, keepdim=True) + spec.eps)
    for _ in range(spec.mixing - 1):
        mix = mix / (mix.sum(dim=-1, keepdim=True) + spec.eps)
        mix = mix / (mix.sum(dim=-2, keepdim=True) + spec.eps)
    return read, enter, mix


def _weighted(x: Tensor, shares: Tensor) -> Tensor:
    """Returns the sum of streams [T, n d] by shares [T, n]: float32 [T, d]."""
    return (x.view(*shares.shape, -1) * shares[:, :, None]).sum(dim=1)


def _enter_streams(
    x: Tensor, y: Tensor, weights: Weights, spec: parts.GatedStreamsSpec | parts.MixedStreamsSpec, role: str
) -> Tensor:
    """Returns streams [T, n d] after an output y float32 [T, d] entered them."""
    if isinstance(spec, parts.GatedStreamsSpec):
        normed, mix = _normed_streams(x, weights, spec, role), None
        enter = 2 * (matrices.linear(normed, weights.matrix(f"{role}.inject")) / spec.streams).sigmoid()
    else:
        _, enter, mix = _stream_weights(x, weights, spec, role)
    if mix is not None:
        x = (mix.transpose(1, 2) @ x.view(len(x), spec.streams, -1)).flatten(1)
    return x + (enter[:, :, None] * y[:, None]).flatten(1)


def _final_stream(x: Tensor, weights: Weights) -> Tensor:
    """Returns one stream of those after the last layer, float32 [T, d], normed."""
    residual = weights.spec.residual
    if isinstance(residual, parts.GatedStreamsSpec):
        return _gated_average(x, weights, residual, "streams")
    if isinstance(residual, parts.MixedStreamsSpec):
        found = matrices.linear(_unit(x, weights), weights.matrix("streams.weights")) * weights.vector("streams.scale")
        x = _weighted(x, (found + weights.vector("streams.base")).sigmoid() + residual.eps)
    return norm(x[:, : weights.spec.hidden_size], weights, "norm")


# ---- before the layers, and the first half of a layer ---------------------------------------------------------------


def scaled(x: Tensor, factor: float) -> Tensor:
    """Returns `x * factor`; x itself if the factor is 1, as in most families."""
    return x if factor == 1.0 else x * factor


def embed(ids: Tensor, weights: Weights) -> Tensor:
    """Returns the hidden states before the first layer, for tokens int64 [T]."""
    x, residual = (
        scaled(matrices.gather_rows(weights.matrix("embed"), ids), weights.spec.embedding_multiplier),
        weights.spec.residual,
    )
    if isinstance(residual, parts.GatedStreamsSpec | parts.MixedStreamsSpec):
        return x.repeat(1, residual.streams)
    return x if residual is None or residual.streams == 1 else torch.cat((x, torch.zeros_like(x)), dim=1)


def add_ngrams(
    x: Tensor, rows: "mixers.NgramRows | None", weights: Weights, layer: int, state: mixers.LayerState | None
) -> Tensor:
    """Returns hidden states with a layer's n-grams added; x itself in a layer without. New tokens enter the state.

    Args:    rows: of the tokens; None in a model without n-grams.
    Raises:  as `NgramRows.of`.
    """
    if rows is None or state is None:
        return x
    from moe_pack.runtime.model.mixer import ngram_output

    return x + ngram_output(x, rows.of(layer), weights, layer, state)


def add_attention(
    x: Tensor,
    weights: Weights,
    layer: int,
    cache: caches.LayerCache | mixers.LayerState | caches.Batch[caches.LayerCache] | caches.Batch[mixers.LayerState],
    angles: caches.Angles,
) -> Tensor:
    """Returns hidden states with a layer's attention, or its mixer, added; new tokens enter the cache.

    They stay as they are in a layer with neither.
    Args:    cache: of one sequence, or of several with their tokens.
    """
    if not weights.spec.has_first(layer):
        return x
    normed = first_input(x, weights, layer)
    mixer = weights.spec.mixer_of(layer)
    if mixer is None:
        y = attend(normed, weights, layer, cast(caches.LayerCache | caches.Batch[caches.LayerCache], cache), angles)
    else:
        from moe_pack.runtime.model.mixer import mix

        y = mix(normed, weights, layer, mixer, cast(mixers.LayerState | caches.Batch[mixers.LayerState], cache))
    return enter_first(x, y, weights, layer)


# ---- the second half of a layer: routing ----------------------------------------------------------------------------


def router_logits(x: Tensor, weights: Weights, layer: int) -> Tensor:
    """Returns the logits of a layer's router for `mlp_input` x: float32 [T, E], or more with `num_identity`."""
    role, spec = f"layers.{layer}", weights.spec
    bias = weights.vector(f"{role}.router_logit_bias") if spec.router.logit_bias else None
    if spec.router.input_scale:
        x = x * (weights.vector(f"{role}.router_scale") * spec.hidden_size**-0.5)
    return matrices.linear(x, weights.matrix(f"{role}.router"), bias)


def route_tokens(x: Tensor, weights: Weights, layer: int, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the experts of each token, int64 [T, k], and their weights, float32 [T, k], for `mlp_input` x.

    An expert with the weight 0 does not run for the token.
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
    """Returns the experts that a layer's table names for tokens int64 [T]: int64 [T, k].

    Raises:  RunError if they are not different experts of the model.
    """
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
    """Returns the scores that rank a layer's experts without regard to groups, float32 [T, E], for `mlp_input` x.

    For the input of the layer before, they predict this layer's experts. Source: CORM §4.2.
    """
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
    """Weights that run the routed experts of a layer themselves, wherever the experts are.

    They rotate the input of a rotated layer, and its output back (`to_experts`, `from_experts`).
    `is_batch`: whether each token of the running pass is the next one of a sequence of its own.   `is_prompt`: whether
    the pass is of several tokens of one sequence, even if a layer's experts run for one of them. The decoder sets both.
    """

    is_batch = False
    is_prompt = False

    def begin_pass(self, ids: Tensor, num_last: int) -> None:
        """Takes note of the tokens int64 [T] of a pass, before its first layer; here, nothing follows from them.

        Args:    num_last: so many of them, the last, run in the model's last layer.
        """
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

        Args:    layer_idx: counts MoE layers.   experts, router_weights: int64 and float32 [T, k].
                 partial_state: None where the next layer has no experts.
        """


class RowsInMemory(ABC):
    """Weights whose routed experts are in memory, in rows that native layers use where they are."""

    @property
    @abstractmethod
    def runs_in_place(self) -> bool:
        """Whether native layers may run the experts instead of `run_experts`: not where a class overrides that."""

    @abstractmethod
    def expert_rows(self, layer_idx: int, expert: int) -> ExpertRows:
        """Returns the rows of an expert, which stay where they are; it is checked the first time.

        Args:    layer_idx: counts MoE layers, here and below.
        Raises:  PackError if the expert is damaged.
        """

    @abstractmethod
    def note_run(self, layer_idx: int, experts: NDArray[np.int64], router_weights: NDArray[np.float32]) -> None:
        """Takes note that a layer's experts have run: int64 and float32 [T, k] as `run_experts` gets them.

        Raises:  PackError with the last layer, if a file is truncated.
        """

    @abstractmethod
    def cut_error(self, layer_idx: int) -> formats.PackError:
        """Returns the error for a layer whose file was cut while its map was read."""


class ExpertObserver(Protocol):
    """Observes a run from the thread that computes; it must not wait."""

    def routed(self, layer_idx: int, experts: NDArray[np.int64]) -> None:
        """Takes note of the experts int64 [T, k] that run in a layer. `layer_idx`: counts MoE layers."""
        ...

    def fetched(self, layer_idx: int, expert: int) -> None:
        """Takes note that an expert is read from the disk, because it is needed or predicted."""
        ...


class ObservedWeights:
    """Weights on the CPU that have an observer if somebody sets one."""

    observer: ExpertObserver | None = None


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
    if isinstance(weights, ObservedWeights) and weights.observer is not None:
        weights.observer.routed(layer_idx, experts.numpy())
    return run_one_by_one(x, experts, router_weights, weights, layer_idx)


def expert_inputs(x: Tensor, router_weights: Tensor, weights: Weights, layer_idx: int) -> tuple[Tensor, Tensor]:
    """Returns what a layer's experts get for `mlp_input` x float32 [T, d], and the weights of their outputs [T, k]."""
    own = experts_norm(weights, weights.spec.moe_layers[layer_idx])
    if own is not None:
        x = x * own
    if not weights.spec.router.on_input:
        return x, router_weights
    return x * router_weights, torch.ones_like(router_weights)  # there is one expert a token


def experts_norm(weights: Weights, layer: int) -> Tensor | None:
    """Returns the weights of the norm that a layer's routed experts have of their own, float32 [d]; None if none."""
    residual = weights.spec.residual
    is_apart = isinstance(residual, parts.NormedResidualSpec) and residual.apart
    return weights.vector(f"layers.{layer}.experts_norm") if is_apart else None


def run_one_by_one(x: Tensor, experts: Tensor, router_weights: Tensor, weights: Weights, layer_idx: int) -> Tensor:
    """Returns the same by the reference semantics (`run_expert`), one expert after the other."""
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
    """Returns the sum of all routed experts of a layer, float32 [T, d], from that of the experts that have weights.

    The others return their input. Their weights are computed again, so that a pass that runs experts elsewhere, or
    later, needs nothing more than the `mlp_input` x.
    Args:    routed: None in a layer without routed experts, and for their part alone.
    """
    router = weights.spec.router
    if not router.num_identity or layer not in weights.spec.moe_layers:
        return routed
    returned = x * identity_share(router_logits(x, weights, layer), router, _router_bias(weights, layer))
    return returned if routed is None else routed + returned


def run_unrouted(x: Tensor, weights: Weights, layer: int) -> Tensor | None:
    """Returns what every token gets without a router: the shared expert, or the dense expert of a layer without others.

    Returns: float32 [T, d]; None where the family has no shared expert.
    """
    spec, role = weights.spec, f"layers.{layer}"
    function = spec.expert.unrouted_function(layer)
    if layer not in spec.moe_layers:
        return run_dense_expert(x, weights, f"{role}.mlp", function)
    if spec.shared_expert is None:
        return None
    if isinstance(spec.residual, parts.NormedResidualSpec) and spec.residual.apart:
        x = x * weights.vector(f"{role}.shared_norm")
    output = run_dense_expert(x, weights, f"{role}.shared", function)
    if spec.shared_expert.gated:
        output = output * torch.sigmoid(matrices.linear(x, weights.matrix(f"{role}.shared_router")))
    return output


def run_dense_expert(x: Tensor, weights: Weights, role: str, function: formats.NeuronFunction) -> Tensor:
    """Returns the output of an expert that is stored as dense matrices; all its neurons run.

    Args:    x: float32 [T, d].   role: the beginning of its matrices' roles (`layers.{i}.shared`).
    Returns: float32 [T, d].
    """
    up = matrices.linear(x, weights.matrix(f"{role}.up"))
    gate = matrices.linear(x, weights.matrix(f"{role}.gate")) if "gate" in weights.spec.expert.matrices else None
    return matrices.linear(weights.operations.activate(gate, up, function), weights.matrix(f"{role}.down"))


# ---- after the layers -----------------------------------------------------------------------------------------------


def head(x: Tensor, weights: Weights) -> Tensor:
    """Returns the logits of hidden states [T, w] after the last layer, float32 [T, vocabulary]."""
    spec = weights.spec
    matrix = weights.matrix("embed" if spec.tied_head else "head")
    bias = weights.vector("head_bias") if spec.head_bias else None
    logits = matrices.linear(_final_stream(x, weights), matrix, bias)
    if spec.logits_scaling != 1.0:
        logits = logits / spec.logits_scaling
    cap = spec.logits_softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)
