"""The layers of a decoder, computed by one native call instead of one for each of their operations.

A decoded token takes a dozen operations a layer, some of which take microseconds. Between two of them Python would take
as long, and the kernels' threads would wait. `NativeLayers` keeps addresses and layouts of a layer's matrices, vectors
and experts on the native side. A call gets hidden states and caches, and computes the same operations in the same
order, with the same results to the bit (runtime/cpu/native/layers.h). The separate operations are its twin:
`runtime/model/layers.py`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.formats.parts import GroupedQuerySpec
from moe_pack.runtime.cpu.kernels import (
    Bytes,
    ExpertRows,
    Kernels,
    MapCutError,
    Numbers,
    function_numbers,
    router_number,
)

try:
    import moe_pack.runtime.cpu._native as _native
except ImportError:  # then there are no kernels either
    _native = None  # type: ignore[assignment]  # a module or nothing

Floats = NDArray[np.float32]


class LayerCutError(MapCutError):
    """The file of a decoder layer's experts was cut while its map was read."""

    def __init__(self, layer: int) -> None:
        super().__init__(f"layer {layer}: a file was cut while its map was read")
        self.layer = layer


class LayerMatrix(NamedTuple):
    """A dense matrix: rows u8 [rows, row bytes] in one piece, their layout (`row_numbers`), a bias float32 [rows]."""

    layout: Numbers
    rows: Bytes
    bias: Floats | None


class LayerVectors(NamedTuple):
    """The vectors of a layer, float32, in the order of `set_layer`."""

    attention_norm: Floats
    mlp_norm: Floats
    q_norm: Floats | None  # of each head, or of whole projections, and so is the next
    k_norm: Floats | None
    sinks: Floats | None
    router_bias: Floats | None  # for choosing alone
    rotation_in: Floats | None
    rotation_out: Floats | None
    hartley: Floats | None  # [m, m], of the odd factor m of the hidden size


class LayerMatrices(NamedTuple):
    """The dense matrices of a layer, in the order of `set_layer`."""

    q: LayerMatrix | None  # None: Python runs the first half; and so are the next
    k: LayerMatrix | None
    v: LayerMatrix | None
    o: LayerMatrix | None
    router: LayerMatrix | None  # None: the layer does not route
    up: LayerMatrix | None  # None: nothing runs for every token
    gate: LayerMatrix | None
    down: LayerMatrix | None
    shared_router: LayerMatrix | None  # [1, d], of a gated shared expert


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Facts of a layer's computation, apart from its weights."""

    hidden_size: int
    attention: GroupedQuerySpec | None  # None: Python runs the first half
    window: int | None  # the most positions that a token sees; None: all
    interleaved: bool
    eps: float
    residual_multiplier: float
    router: formats.RouterSpec
    least_sum: float  # as for `Kernels.route`
    function: formats.NeuronFunction  # of what runs for every token: the shared expert, or a dense one

    def numbers(self) -> Numbers:
        """Returns the whole numbers in the order of `LayerNumber` in module_decode.cpp."""
        of, router, numbers = self.attention, self.router, [self.hidden_size]
        if of is None:
            numbers += [1, 1, 1, 0, 0, 0, 0]
        else:
            numbers += [of.num_heads, of.num_kv_heads, of.head_dim, self.window or 0]
            numbers += [of.chunked and self.window is not None, self.interleaved, of.qk_norm == "projection"]
        numbers += [*function_numbers(self.function), router_number(router), router.num_experts]
        return np.array([*numbers, router.num_experts_per_tok, router.n_group, router.topk_group], np.int32)

    def floats(self) -> Floats:
        """Returns the other numbers in the order of `LayerFloat` in module_decode.cpp."""
        router = self.router
        least_sum = self.least_sum if router.normalize else -1.0
        scale = 1.0 if self.attention is None else self.attention.scale
        of_layer = [scale, self.eps, self.residual_multiplier]
        return np.array([*of_layer, least_sum, router.scaling_factor, router.jitter], np.float32)


@dataclass(frozen=True, slots=True)
class LayerPass:
    """The arrays of a pass through a layer of T tokens, equally many of each sequence; the call writes them."""

    x: Floats  # [T, d], hidden states, which the call changes
    inputs: Floats  # [T, d], the input of router and experts
    unrouted: Floats | None  # [T, d], the output of what runs for every token; None if nothing does
    experts: NDArray[np.int64] | None  # [T, k], the router's choice; None in a layer without a router
    weights: Floats | None  # [T, k]

    @property
    def all(self) -> tuple[object, ...]:
        return self.x, self.inputs, self.unrouted, self.experts, self.weights


# Of each sequence: keys and values u8 [heads, places, bytes of a row], the number of positions before the new ones, and
# how rows are stored, a place in CACHE_KINDS.
SequenceCaches = list[tuple[Bytes, Bytes, int, int]]
FloatAngles = tuple[Floats, Floats]


class NativeLayers:
    """The layers of a decoder on the native side, which borrow arrays and kernels; wrong sizes raise ValueError."""

    def __init__(self, kernels: Kernels, num_layers: int) -> None:
        self._kernels = kernels
        self._layers = _native.open_layers(num_layers)

    def set(self, layer: int, facts: LayerFacts, vectors: LayerVectors, matrices: LayerMatrices) -> None:
        """Sets the weights and facts of a layer, once."""
        given = tuple(None if one is None else tuple(one) for one in matrices)
        _native.set_layer(self._layers, layer, facts.numbers(), facts.floats(), tuple(vectors), given)

    def set_expert(self, layer: int, expert: int, rows: ExpertRows) -> None:
        """Sets the rows of an expert, in one piece each, once."""
        own = rows.layout, rows.selector, rows.records, rows.extra, rows.threshold
        _native.set_layer_expert(self._layers, layer, expert, *own)

    def set_panels(self, layer: int, expert: int, panels: Bytes) -> None:
        """Sets the panels of an expert that is set, once."""
        _native.set_layer_panels(self._layers, layer, expert, panels)

    def begin(self, layer: int, arrays: LayerPass, angles: FloatAngles, caches: SequenceCaches) -> None:
        """Computes the first half of a layer, and the norm, the router and the shared or dense expert of the second."""
        self._kernels.call("begin_layer", self._layers, layer, *arrays.all, *angles, caches)

    def run(self, first: int, arrays: LayerPass, steps: list[tuple[Floats, Floats, SequenceCaches]]) -> int:
        """Computes consecutive layers until one has chosen an expert that is not set; that one is left as by `begin`.

        Args:    arrays: `unrouted` is there whether it is used or not; `experts` and `weights` are of all layers with a
                 router, one after the other.   steps: angles and caches of each layer, empty where
                 Python has run its first half.
        Returns: how many layers are complete.
        Raises:  LayerCutError if rows are mapped from a file that was cut.
        """
        complete = int(self._kernels.call("run_layers", self._layers, first, *arrays.all, steps))
        if complete < 0:
            raise LayerCutError(first - 1 - complete)
        return complete

    def end(self, layer: int, arrays: LayerPass) -> None:
        """Computes the rest of a layer whose chosen experts are all set; raises LayerCutError if its file was cut."""
        try:
            self._kernels.call("end_layer", self._layers, layer, *arrays.all)
        except MapCutError as fault:
            raise LayerCutError(layer) from fault
