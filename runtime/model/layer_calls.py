"""Layers of a decoder as native calls.

A call computes a standard layer whole: grouped-query attention, rms norms, a router, routed experts in memory, and a
shared or dense expert. Consecutive ones are one call. If only a layer's second half is standard, as in hybrid models,
its call computes that. If only the first half is, or experts are not in memory, the call ends after the router, or
before it, and Python goes on with `layers`. All other layers are computed by `layers` alone, which is the reference; a
call gives the same bits.
"""

from contextlib import suppress
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.runtime import cpu
from moe_pack.runtime.model import layers, passes
from moe_pack.runtime.model.attention import shared
from moe_pack.runtime.model.caches import Angles, layer_cache
from moe_pack.runtime.model.compute.matrices import DivisibleMatrix
from moe_pack.runtime.model.compute.operations import NativeOperations, hartley_array
from moe_pack.runtime.model.compute.router import least_sum
from moe_pack.runtime.model.compute.weights import Weights
from moe_pack.runtime.model.pack_weights import MappedPackWeights

_PREPARED_AT_ONCE = 2  # experts whose panels are made, or wait for that, so that the thread never waits

_Step = tuple[cpu.Floats, cpu.Floats, cpu.SequenceCaches]  # angles and caches of a layer
_NO_FLOATS = np.empty(0, np.float32)
_Neurons = tuple[cpu.LayerMatrix | None, cpu.LayerMatrix | None, cpu.LayerMatrix | None]  # up, gate and down


@dataclass(frozen=True, slots=True)
class BegunLayer:
    """The last layer of a call, and the results of the call."""

    x: Tensor  # hidden states float32 [T, d]: after the layer if it is complete, else after its first half
    layer: int
    is_complete: bool
    # What follows is there unless the layer is complete.
    inputs: Tensor  # float32 [T, d], the `mlp_input`
    route: tuple[Tensor, Tensor] | None  # experts int64 and weights float32 [T, k]; None if the call does not route
    has_unrouted: bool
    unrouted: Tensor | None  # float32 [T, d], where `has_unrouted`; None if nothing runs for every token


@dataclass(frozen=True, slots=True)
class _Kind:
    """The extent of a layer's call."""

    spec: parts.GroupedQuerySpec | None  # None: Python runs the first half
    is_rotated: bool
    num_chosen: int
    routes: bool  # the router's choice
    has_unrouted: bool  # all that runs for every token, which may be nothing
    runs_neurons: bool  # something does
    completes: bool  # the layer to its end, if the chosen experts are set


class LayerCalls:
    """The calls of a decoder's layers; they are prepared when a layer first runs, and experts when they are chosen."""

    def __init__(self, weights: Weights, operations: NativeOperations) -> None:
        self._weights = weights
        self._layer_idx = {layer: idx for idx, layer in enumerate(weights.spec.moe_layers)}
        self._kinds: dict[int, _Kind | None] = {}
        self._set_experts: set[tuple[int, int]] = set()
        self._has_panels: set[tuple[int, int]] = set()
        self._num_panels = 0  # of those made that were looked at
        self._unprepared = product(weights.spec.moe_layers, range(weights.spec.router.num_experts))
        self._bytes = _CacheBytes()
        self._native = cpu.NativeLayers(operations.kernels, weights.spec.num_hidden_layers)

    def prepare_next(self) -> bool:
        """Checks and sets another expert, and asks for its panels, before it is chosen; returns whether more follow.

        It waits until few panels are left to make, and ends where memory has no room for more.
        """
        weights = self._weights
        if not isinstance(weights, MappedPackWeights):
            return False
        if weights.panels.num_waiting >= _PREPARED_AT_ONCE:
            return True
        layer, expert = next(self._unprepared, (None, 0))
        if layer is None or not weights.panels.left_bytes:
            return False
        layer_idx, kind = self._layer_idx[layer], self._kind(layer)
        with suppress(formats.PackError):  # a request that needs a damaged expert says so
            rows = weights.expert_rows(layer_idx, expert)
            if kind is not None and kind.completes:
                self._set_expert(layer, expert)
            return weights.panels.want((layer_idx, expert), rows)
        return True

    def run_layers(self, x: Tensor, batch: passes.Pass, ids: Tensor, ends_early: bool) -> Tensor:
        """Does the same as `Decoder.run_layers`, by calls where layers have them."""
        spec, layer = self._weights.spec, 0
        while layer < spec.num_hidden_layers:
            x = batch.add_ngrams(x, layer)
            begun = self.begin(x, layer, batch)
            if begun is not None:
                x, layer = begun.x, begun.layer
                if not begun.is_complete:
                    x = self._add_mlp(begun, ids, batch.partial_state(x, layer))
            else:
                x = batch.add_attention(x, layer)
                if ends_early and layer == spec.num_hidden_layers - 1:
                    x, ids = x[-1:], ids[-1:]
                x = layers.add_mlp(x, self._weights, layer, ids, batch.partial_state(x, layer))
            layer += 1
        return x

    def _add_mlp(self, begun: BegunLayer, ids: Tensor, partial_state: layers.PartialState | None) -> Tensor:
        weights, layer, inputs, route = self._weights, begun.layer, begun.inputs, begun.route
        unrouted = begun.unrouted if begun.has_unrouted else layers.run_unrouted(inputs, weights, layer)
        if route is None and layer in self._layer_idx:
            route = layers.route_tokens(inputs, weights, layer, ids)
        return layers.run_mlp(begun.x, inputs, unrouted, route, weights, layer, partial_state)

    def begin(self, x: Tensor, layer: int, batch: passes.Pass) -> BegunLayer | None:
        """Runs a layer of x float32 [T, d], and those after it as far as calls complete them; None: `layers` has to.

        Raises:  PackError if an expert is damaged or its file is truncated.
        """
        kind = self._kind(layer)
        if kind is None or len(x) > passes.MAX_CALL_TOKENS * batch.num_sequences:
            return None
        if kind.spec is None:
            return self._run_span(batch.add_attention(x, layer), layer, batch)
        caches = batch.caches(layer)
        if not _fits(kind.spec, caches, len(x)):
            return None
        if kind.completes:
            return self._run_span(x, layer, batch)
        arrays = _arrays(x, kind)
        self._native.begin(layer, arrays, *_given(kind, caches, batch.angles(layer), self._bytes))
        route = None
        if arrays.experts is not None and arrays.weights is not None:
            route = torch.from_numpy(arrays.experts), torch.from_numpy(arrays.weights)
        unrouted = None if arrays.unrouted is None else torch.from_numpy(arrays.unrouted)
        hidden, inputs = torch.from_numpy(arrays.x), torch.from_numpy(arrays.inputs)
        return BegunLayer(hidden, layer, False, inputs, route, kind.has_unrouted, unrouted)

    def _span(self, first: int, batch: passes.Pass, num_tokens: int) -> list[tuple[_Kind, _Step]]:
        """Returns consecutive layers that one call completes, from this one on."""
        span, spec = list[tuple[_Kind, _Step]](), self._weights.spec
        for layer in range(first, spec.num_hidden_layers):
            kind = self._kind(layer)
            if kind is None or not kind.completes or (span and spec.ngrams_of(layer) is not None):
                break
            if kind.spec is None:
                if layer > first:
                    break
                span.append((kind, (_NO_FLOATS, _NO_FLOATS, [])))
                continue
            caches = batch.caches(layer)
            if not _fits(kind.spec, caches, num_tokens):
                break
            angles, kept = _given(kind, caches, batch.angles(layer), self._bytes)
            span.append((kind, (*angles, kept)))
        return span

    def _run_span(self, x: Tensor, first: int, batch: passes.Pass) -> BegunLayer:
        """Runs consecutive layers to their end, in one call if all experts that they choose are set."""
        self._set_panels()
        span = self._span(first, batch, len(x))
        kinds, steps = [kind for kind, _ in span], [step for _, step in span]
        num_routes = sum(kind.routes for kind in kinds)
        chosen = num_routes, len(x), self._weights.spec.router.num_experts_per_tok
        experts, router_weights = np.empty(chosen, np.int64), np.empty(chosen, np.float32)
        hidden = x.numpy().copy()
        inputs, unrouted = np.empty_like(hidden), np.empty_like(hidden)
        done = route_idx = 0
        try:
            while done < len(kinds):
                left = cpu.LayerPass(hidden, inputs, unrouted, experts[route_idx:], router_weights[route_idx:])
                complete = self._native.run(first + done, left, steps[done:])
                route_idx += sum(kind.routes for kind in kinds[done : done + complete])
                done += complete
                if done < len(kinds):
                    own = unrouted if kinds[done].runs_neurons else None
                    route = experts[route_idx], router_weights[route_idx]
                    self._end(first + done, cpu.LayerPass(hidden, inputs, own, *route))
                    route_idx += 1
                    done += 1
        except cpu.LayerCutError as fault:
            assert isinstance(self._weights, MappedPackWeights), "only experts in memory are mapped"
            raise self._weights.cut_error(self._layer_idx[fault.layer]) from fault
        if num_routes and isinstance(self._weights, MappedPackWeights):
            routing = [self._layer_idx[first + number] for number, kind in enumerate(kinds) if kind.routes]
            self._weights.note_run(routing, experts, router_weights)
        last = first + len(kinds) - 1
        return BegunLayer(torch.from_numpy(hidden), last, True, torch.from_numpy(inputs), None, True, None)

    def _end(self, layer: int, arrays: cpu.LayerPass) -> None:
        self._set_chosen(layer, arrays)
        self._native.end(layer, arrays)

    def _set_chosen(self, layer: int, arrays: cpu.LayerPass) -> None:
        assert arrays.experts is not None and isinstance(self._weights, MappedPackWeights)
        experts = [e for e in np.unique(arrays.experts).tolist() if (layer, e) not in self._set_experts]
        self._weights.read_ahead(self._layer_idx[layer], experts)
        for expert in experts:
            self._set_expert(layer, expert)

    def _set_expert(self, layer: int, expert: int) -> None:
        """Gives the native side an expert, unless it has it."""
        assert isinstance(self._weights, MappedPackWeights)
        if (layer, expert) not in self._set_experts:
            rows = self._weights.expert_rows(self._layer_idx[layer], expert)
            self._native.set_expert(layer, expert, rows)
            self._set_experts.add((layer, expert))
            self._give_panels(layer, expert, rows.panels)

    def _set_panels(self) -> None:
        """Gives the native side the panels that were made of experts that it has."""
        if not isinstance(self._weights, MappedPackWeights):
            return
        for (layer_idx, expert), panels in self._weights.panels.made_since(self._num_panels):
            layer = self._weights.spec.moe_layers[layer_idx]
            if (layer, expert) in self._set_experts:
                self._give_panels(layer, expert, panels)
            self._num_panels += 1

    def _give_panels(self, layer: int, expert: int, panels: cpu.Bytes | None) -> None:
        if panels is not None and (layer, expert) not in self._has_panels:
            self._native.set_panels(layer, expert, panels)
            self._has_panels.add((layer, expert))

    def _kind(self, layer: int) -> _Kind | None:
        if layer not in self._kinds:
            self._kinds[layer] = self._prepare(layer)
        return self._kinds[layer]

    def _prepare(self, layer: int) -> _Kind | None:
        """Sets a layer on the native side, as much of it as is standard."""
        weights, spec, role = self._weights, self._weights.spec, f"layers.{layer}"
        attention = spec.attention_of(layer)
        if not _has_standard_norms(weights, layer):
            return None
        q = k = v = o = standard = None
        if isinstance(attention, parts.GroupedQuerySpec) and _is_standard(weights, layer, attention):
            q, k, v, o = (_projection(weights, layer, name, attention) for name in parts.PROJECTIONS)
            if q is None or k is None or v is None or o is None:
                return None
            standard = attention
        has_experts = layer in self._layer_idx
        router = None
        if has_experts and _routes(weights, layer):
            bias = f"{role}.router_logit_bias" if spec.router.logit_bias else None
            router = _matrix(weights, f"{role}.router", bias)
        neurons, shared_router, has_unrouted = _unrouted(weights, layer)
        kind = _Kind(
            standard,
            standard is not None and standard.rotates(layer),
            spec.router.num_experts_per_tok,
            router is not None,
            has_unrouted,
            neurons[0] is not None,
            has_unrouted and (not has_experts or (router is not None and self._runs_experts(layer))),
        )
        if standard is None and not kind.completes:
            return None
        vectors = _vectors(weights, layer, standard, self._layer_idx.get(layer) if kind.completes else None)
        matrices = cpu.LayerMatrices(q, k, v, o, router, *neurons, shared_router)
        self._native.set(layer, _facts(weights, layer, standard), vectors, matrices)
        return kind

    def _runs_experts(self, layer: int) -> bool:
        """Returns whether a layer's routed experts are in memory and get the `mlp_input`, rotated or not."""
        weights = self._weights
        if not isinstance(weights, MappedPackWeights) or not weights.runs_in_place or weights.spec.router.on_input:
            return False
        rotation = weights.rotation(self._layer_idx[layer])
        return rotation is None or hartley_array(weights.spec.hidden_size) is not None


# ---- what is standard -----------------------------------------------------------------------------------------------


def _has_standard_norms(weights: Weights, layer: int) -> bool:
    """Returns whether a layer has two halves, which norm hidden states and add to them as calls do."""
    spec = weights.spec
    is_plain = spec.residual is None and spec.norm.kind == "rms" and spec.encoder is None
    return is_plain and spec.has_first(layer) and spec.has_second(layer)


def _is_standard(weights: Weights, layer: int, attention: parts.GroupedQuerySpec) -> bool:
    """Returns whether a call computes what a layer's first half has between its norm and its sum."""
    if weights.spec.mixer_of(layer) is not None:
        return False
    is_plain = attention.temperature is None and attention.gate is None and attention.indexer is None
    is_plain = is_plain and not (attention.gated or attention.keys_as_values or attention.v_norm)
    is_plain = is_plain and attention.clip is None and attention.value_scale == 1.0
    return (
        is_plain and attention.value_dim == attention.head_dim and attention.qk_norm in ("none", "head", "projection")
    )


def _routes(weights: Weights, layer: int) -> bool:
    router = weights.spec.router
    is_plain = not (router.num_identity or router.zero_outside or router.input_scale or router.expert_scale)
    return is_plain and router.capacity is None and layer not in router.table_layers


def _fits(spec: parts.GroupedQuerySpec, caches: layer_cache.Batch[layer_cache.LayerCache], num_tokens: int) -> bool:
    """Returns whether a call takes these tokens: those of chunks one of a sequence at a time."""
    return not spec.chunked or num_tokens == len(caches)


# ---- what a call gets -----------------------------------------------------------------------------------------------


class _CacheBytes:
    """The bytes of caches as a call takes them; each cache's are made once, because that takes a while."""

    def __init__(self) -> None:
        self._bytes: dict[int, tuple[Tensor, NDArray[np.uint8]]] = {}  # by the id of a tensor, which stays alive

    def of(self, rows: Tensor) -> NDArray[np.uint8]:
        known = self._bytes.get(id(rows))
        if known is None:
            known = self._bytes[id(rows)] = (rows, rows.view(torch.uint8).numpy())
        return known[1]


def _given(
    kind: _Kind, caches: layer_cache.Batch[layer_cache.LayerCache], angles: Angles, stored: _CacheBytes
) -> tuple[cpu.FloatAngles, cpu.SequenceCaches]:
    cosines, sines = angles
    if not kind.is_rotated:
        cosines, sines = torch.ones_like(cosines), torch.zeros_like(sines)
    kept = []
    for each in caches:
        cache, (rows, _) = each.cache, each.cache.rows
        kept.append(
            (stored.of(cache.keys), stored.of(cache.values), cache.num_tokens, cpu.CACHE_KINDS.index(rows.dtype))
        )
    return (np.ascontiguousarray(cosines.numpy()), np.ascontiguousarray(sines.numpy())), kept


def _arrays(x: Tensor, kind: _Kind) -> cpu.LayerPass:
    """Returns the arrays of a pass; hidden states are copied, because the call changes them."""
    hidden, chosen = x.numpy().copy(), (len(x), kind.num_chosen)
    return cpu.LayerPass(
        hidden,
        np.empty_like(hidden),
        np.empty_like(hidden) if kind.runs_neurons else None,
        np.empty(chosen, np.int64) if kind.routes else None,
        np.empty(chosen, np.float32) if kind.routes else None,
    )


def _projection(
    weights: Weights, layer: int, name: parts.Projection, attention: parts.GroupedQuerySpec
) -> cpu.LayerMatrix | None:
    role = f"layers.{layer}.attention.{name}"
    return _matrix(weights, role, f"{role}_bias" if name in attention.bias else None)


def _matrix(weights: Weights, role: str, bias: str | None = None) -> cpu.LayerMatrix | None:
    """Returns a dense matrix as a call takes it, with the bias of a role; None if no kernel multiplies it."""
    matrix = weights.matrix(role)
    product = matrix.native if isinstance(matrix, DivisibleMatrix) else None
    if product is None:
        return None
    return cpu.LayerMatrix(product.layout, product.rows, None if bias is None else weights.vector(bias).numpy())


def _unrouted(weights: Weights, layer: int) -> tuple[_Neurons, cpu.LayerMatrix | None, bool]:
    """Returns a shared or dense expert, the shared one's router, and whether a call computes all that is there."""
    spec, nothing, shared_router = weights.spec, (None, None, None), None
    if layer in spec.moe_layers:
        if spec.shared_expert is None:
            return nothing, None, True
        if spec.shared_expert.gated:
            shared_router = _matrix(weights, f"layers.{layer}.shared_router")
            if shared_router is None:
                return nothing, None, False
    name = "shared" if layer in spec.moe_layers else "mlp"
    role = f"layers.{layer}.{name}"
    up, down = _matrix(weights, f"{role}.up"), _matrix(weights, f"{role}.down")
    has_gate = "gate" in spec.expert.matrices
    gate = _matrix(weights, f"{role}.gate") if has_gate else None
    if up is None or down is None or (has_gate and gate is None):
        return nothing, None, False
    return (up, gate, down), shared_router, True


def _facts(weights: Weights, layer: int, attention: parts.GroupedQuerySpec | None) -> cpu.LayerFacts:
    spec = weights.spec
    return cpu.LayerFacts(
        spec.hidden_size,
        attention,
        None if attention is None else attention.window(layer),
        attention is not None and shared.is_interleaved(spec, layer),
        spec.norm.eps,
        spec.residual_multiplier,
        spec.router,
        least_sum(spec.router),
        spec.expert.unrouted_function(layer),
    )


def _vectors(
    weights: Weights, layer: int, attention: parts.GroupedQuerySpec | None, layer_idx: int | None
) -> cpu.LayerVectors:
    """Returns the vectors of a layer. `layer_idx`: of a MoE layer whose experts the call runs."""
    spec, role = weights.spec, f"layers.{layer}"
    normed, router = attention is not None and attention.qk_norm != "none", spec.router
    has_bias = router.bias and layer in spec.moe_layers and layer not in router.table_layers
    rotation = None if layer_idx is None else weights.rotation(layer_idx)
    return cpu.LayerVectors(
        weights.vector(f"{role}.attention_norm").numpy(),
        weights.vector(f"{role}.mlp_norm").numpy(),
        weights.vector(f"{role}.attention.q_norm").numpy() if normed else None,
        weights.vector(f"{role}.attention.k_norm").numpy() if normed else None,
        weights.vector(f"{role}.attention.sinks").numpy() if attention is not None and attention.sinks else None,
        weights.vector(f"{role}.router_bias").numpy() if has_bias else None,
        None if rotation is None else rotation.input.numpy(),
        None if rotation is None else rotation.output.numpy(),
        None if rotation is None else hartley_array(spec.hidden_size),
    )
