"""The native CPU kernels, which compute on rows straight from their codes, and the native search for trellis codes.

This is the only Python face of the C++ in runtime/cpu/native/, and it takes and returns arrays. The kernels have
threads of their own. Each kernel is tested against a twin in plain torch: `expert` for experts, `operations` for
attention, norms and products, `recurrence` for recurrences and convolutions, `router`, `moe_pack.formats.pack.codecs`
for decoding, and `calib/quantize/trellis.py` for the search. Products of few tokens take inputs as 24-bit fixed point
relative to the token's largest magnitude, which is as precise as float32 (docs/kernels.md, "Numerics").

The extension is built with the package if there is a compiler; without it, and on other devices than the CPU, torch
computes.

Layouts of rows go to C++ as int32 arrays; `expert_numbers`, `row_numbers` and `stored_numbers` write them, and
runtime/cpu/native/layout.h reads them. A part has 8 numbers: codec, width, group (0: the row), scale_bits, the offsets
of its codes and of its scales in the row, has_bias, place (0: the expert has no such part, 1: selector, 2: record).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack import formats
from moe_pack.formats.base.limits import num_cores
from moe_pack.formats.pack.layouts import Part
from moe_pack.formats.parts import GroupedQuerySpec

if TYPE_CHECKING:
    from moe_pack.formats.parts import GatedDeltaSpec  # most models have no mixers

_why_unavailable: str | None = None
try:
    import moe_pack.runtime.cpu._native as _native
except ModuleNotFoundError:
    _native = None  # type: ignore[assignment]  # a module or nothing
    _why_unavailable = "were not built; install a C++ compiler, then install moe-pack again"
except ImportError as fault:  # built for another machine: torch computes, `why_unavailable` says so
    _native = None  # type: ignore[assignment]
    _why_unavailable = f"cannot be loaded here: {fault}"

InstructionSet = Literal["portable", "neon", "avx2", "avx512", "avx512vbmi"]
Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int32]
PANEL_ROWS = 16  # kPanelRows in panels.h
MOST_PRODUCTS = 4  # of one input, side by side: kMostProducts in products.h
MAX_ODD_FACTOR = 1023  # of a hidden size that is rotated: kMaxOdd in kernels.h
_PART_NUMBERS = 8  # kPartNumbers in layout.h

_DTYPES = {torch.bfloat16: 1, torch.float16: 64, torch.float32: 65}  # numbers of the native Codec
CACHE_KINDS = ("f32", "bf16", "q8", "q4")  # in the order of the native CacheKind
_ROUTERS = {
    "softmax_topk": 0,
    "topk_softmax": 1,
    "sigmoid_topk": 2,
    "sparsemixer": 3,
    "sqrtsoftplus_topk": 4,
    "topk_sigmoid": 5,
}
_FUNCTIONS: dict[formats.NeuronFunction, int] = {
    "silu": 0,
    "relu": 1,
    "clamped_swiglu": 2,
    "relu2": 3,
    "gelu_tanh": 4,
    "clipped_silu": 5,
    "capped_silu": 6,
}
_SELECTORS = {"none": 0, "up": 1, "gate": 2, "both": 3}
_SELECTOR_ROW, _RECORD = 1, 2  # places of a part


class MapCutError(formats.RunError):
    """A file was cut while its map was read."""


def is_available() -> bool:
    """Returns whether this installation has the extension."""
    return _native is not None


def why_unavailable() -> str | None:
    """Returns why the kernels cannot be used, as the end of a sentence ("native kernels ..."); None if they can."""
    return _why_unavailable


class PagedRows(NamedTuple):
    """Rows of an extent that lies in pages of an arena."""

    arena: Bytes
    slots: Numbers  # of the arena, in which the pages of the extent are
    slot_bytes: int  # the head, then the page
    head_bytes: int  # for the beginning of a row that ends in the page
    page_bytes: int
    begin: int  # of row 0 in the extent


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """An expert's rows, u8 [f, row bytes] in one piece or in pages, and their layout."""

    layout: Numbers  # from `expert_numbers`
    selector: Bytes | PagedRows | None  # None if the kind has none
    records: Bytes | PagedRows
    threshold: float  # on `abs(a)`
    extra: Bytes | PagedRows | None = None  # [1, row bytes]
    panels: Bytes | None = None  # the same selector and records in panels (`panel_expert`), for few tokens


@dataclass(frozen=True, slots=True)
class SelectedNeurons:
    """The result of a selector."""

    a: Tensor  # float32 [T, f]
    runs: Tensor  # bool [T, f]
    neurons: Tensor  # int32 [n], that run for any token, rising

    def arrays(self) -> tuple[NDArray[np.float32], NDArray[np.uint8], NDArray[np.int32]]:
        return self.a.numpy(), self.runs.view(torch.uint8).numpy(), self.neurons.numpy()


class ExpertWork(NamedTuple):
    """An expert to run for some tokens."""

    rows: ExpertRows
    tokens: NDArray[np.int64]
    weights: NDArray[np.float32]  # the router's
    places: NDArray[np.int64]  # the rows of its outputs
    selected: SelectedNeurons | None = None  # which neurons run; None: the selector is asked


class CachedRows(NamedTuple):
    """The keys and values that a layer has cached, as `runtime.model.caches.storage` describes rows."""

    keys: Tensor  # [heads, places, n], position p in place `p % places`
    values: Tensor
    dtype: Literal["f32", "bf16", "q8", "q4"]
    num_tokens: int  # before the new ones


class Kernels:
    """The kernels with their threads: `threads` including the caller's. Owns the threads: `close` it.

    Only one operation runs at a time. Results do not depend on the number of threads. All tensors are on the CPU.
    Args:    threads: None for one a CPU.   limit: an older instruction set than the machine's best.
    Raises:  RunError if the extension cannot be used.
    """

    def __init__(self, threads: int | None = None, limit: InstructionSet | None = None) -> None:
        if _native is None:
            raise formats.RunError(f"native kernels {_why_unavailable}")
        self.threads = num_cores() if threads is None else threads
        self._pool = _native.open_pool(self.threads, limit)
        self.instruction_set: str = _native.instruction_set(self._pool)

    def close(self) -> None:
        """Ends the threads."""
        self._pool = None

    @contextmanager
    def tokens_alone(self) -> Iterator[None]:
        """Computes each token as if it were alone, to the bit; sums of several tokens have another order otherwise."""
        _native.take_tokens_alone(self._pool, True)
        try:
            yield
        finally:
            _native.take_tokens_alone(self._pool, False)

    def take_digits(self, digits: int) -> int:
        """Rounds inputs of many tokens, unless weights are floats, to 1 or 2 digits of 8 bits; 0: does not.

        Returns: what these kernels do: 0 for any number if their instruction set has no such products.
        """
        return int(_native.take_digits(self._pool, digits))

    def experts(self, x: Tensor, works: list[tuple[ExpertRows, NDArray[np.int64], NDArray[np.float32]]]) -> Tensor:
        """Computes experts for tokens and adds up their weighted outputs.

        Args:    x: float32 [T, d].   works: for each expert its rows, its tokens int64 [n] and their router weights
                 float32 [n].
        Returns: float32 [T, d]: `y[token] = sum of weight * expert(x[token])`.
        Raises:  MapCutError if rows are mapped from a file that was cut.
        """
        y = np.zeros(x.shape, np.float32)
        borrowed = [
            (rows.layout, rows.selector, rows.records, rows.extra, rows.panels, rows.threshold, tokens, weights)
            for rows, tokens, weights in works
        ]
        self.call("experts", borrowed, _array(x), y, x.shape[1])
        return torch.from_numpy(y)

    def experts_apart(self, x: Tensor, works: Sequence[ExpertWork], out: NDArray[np.float32]) -> None:
        """Computes experts for tokens x float32 [T, d] and adds weighted outputs to rows of `out`, float32 [n, d]."""
        borrowed: list[tuple[object, ...]] = []
        for rows, tokens, weights, places, selected in works:
            given = (rows.layout, rows.selector, rows.records, rows.extra, rows.panels)
            of_expert = (*given, rows.threshold, tokens, weights, places)
            borrowed.append(of_expert if selected is None else (*of_expert, *selected.arrays()))
        self.call("experts", borrowed, _array(x), out, x.shape[1], True)

    def select_each(self, x: Tensor, works: Sequence[tuple[ExpertRows, NDArray[np.int64]]]) -> list[SelectedNeurons]:
        """Selects the running neurons of experts, each for tokens int64 [n] of x float32 [T, d]."""
        borrowed, found = [], []
        for rows, tokens in works:
            f, n = int(rows.layout[1]), len(tokens)
            into = np.zeros((n, f), np.float32), np.zeros((n, f), np.uint8), np.empty(f, np.int32)
            borrowed.append((rows.layout, rows.selector, rows.threshold, tokens, *into))
            found.append(into)
        counts = self.call("select", borrowed, _array(x), x.shape[1])
        return [
            SelectedNeurons(torch.from_numpy(a), torch.from_numpy(runs).view(torch.bool), torch.from_numpy(ids[:count]))
            for (a, runs, ids), count in zip(found, counts, strict=True)
        ]

    def product(self, x: Tensor, layout: Numbers, rows: Bytes) -> Tensor:
        """Computes `x @ rows.T`, float32 [T, rows], for x float32 [T, columns] and u8 [rows, row bytes] in a piece."""
        y, out = _empty(len(x), len(rows))
        self.call("dense", layout, rows, _array(x), out)
        return y

    def products(self, x: Tensor, matrices: Sequence[tuple[Numbers, Bytes]]) -> list[Tensor]:
        """Computes `product` with each of up to `MOST_PRODUCTS` layouts and rows, side by side, with the same bits."""
        found = [_empty(len(x), len(rows)) for _, rows in matrices]
        given = [(layout, rows, out) for (layout, rows), (_, out) in zip(matrices, found, strict=True)]
        self.call("dense_each", given, _array(x))
        return [y for y, _ in found]

    def attend(
        self,
        projected: tuple[Tensor, Tensor, Tensor],
        norms: tuple[Tensor, Tensor, float] | None,
        angles: tuple[Tensor, Tensor],
        interleaved: bool,
        cached: CachedRows,
        spec: GroupedQuerySpec,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Computes attention of new tokens: norms and rotates queries and keys, writes keys and values to the cache.

        Args:    projected: queries, keys and values, float32 [T, heads * head_dim], before norms of heads and rotation.
                 norms: weights float32 [head_dim] of the rms norms of each head's query and key, and eps.   angles:
                 cosine and sine, float32 [T, rotary_dim / 2] each.   window: the most positions that a token sees;
                 None: all.   sinks: float32 [num_heads], logits without values.
        Returns: float32 [T, num_heads * head_dim].
        """
        y, out = _empty(*projected[0].shape)
        self.call(
            "attend",
            *(_array(each) for each in projected),
            *((None, None) if norms is None else (each.numpy() for each in norms[:2])),
            *(_array(each) for each in angles),
            *((each if cached.dtype == "f32" else each.view(torch.uint8)).numpy() for each in cached[:2]),
            None if sinks is None else sinks.numpy(),
            out,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            cached.num_tokens,
            window or 0,
            spec.scale,
            0.0 if norms is None else norms[2],
            interleaved,
            CACHE_KINDS.index(cached.dtype),
        )
        return y

    def route(
        self, logits: Tensor, spec: formats.RouterSpec, bias: Tensor | None, least_sum: float
    ) -> tuple[Tensor, Tensor]:
        """Chooses experts for logits float32 [T, E] as `router` does; `least_sum` is added to a sum that divides."""
        shape = (len(logits), spec.num_experts_per_tok)
        experts, weights = np.empty(shape, np.int64), np.empty(shape, np.float32)
        self.call(
            "route",
            _array(logits),
            None if bias is None else bias.numpy(),
            experts,
            weights,
            _ROUTERS[spec.kind],
            spec.num_experts,
            spec.num_experts_per_tok,
            spec.n_group,
            spec.topk_group,
            least_sum if spec.normalize else -1.0,
            spec.scaling_factor,
            spec.jitter,
        )
        return torch.from_numpy(experts), torch.from_numpy(weights)

    def recur(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor | None, recurrent: Tensor
    ) -> Tensor:
        """Computes `recurrence.recur`, float32 [T, heads, values], for a state `recurrent`, [heads, keys, values]."""
        y, out = _empty(*v.shape)
        rates = None if rate is None else _array(rate)
        given = (_array(q), _array(k), _array(v), _array(log_decay), rates, recurrent.numpy(), out)
        self.call("recur", *given, k.shape[1], v.shape[1], k.shape[2], v.shape[2])
        return y

    def convolve(self, x: Tensor, kernel: Tensor, bias: Tensor | None, state: Tensor) -> Tensor:
        """Computes `recurrence.convolve`, float32 [T, channels]; the state has the last inputs [taps - 1, channels]."""
        y, out = _empty(*x.shape)
        biases = None if bias is None else bias.numpy()
        self.call("convolve", _array(x), kernel.numpy(), biases, state.numpy(), out, len(state) + 1)
        return y

    def gated_delta(
        self,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor],
        vectors: tuple[Tensor, Tensor, Tensor, Tensor],
        spec: "GatedDeltaSpec",
        eps: float,
        conv: Tensor,
        recurrent: Tensor,
    ) -> Tensor:
        """Computes `Operations.gated_delta`, float32 [T, heads * values]; the states are updated.

        Args:    inputs: queries, keys and values together, gates, steps and rates, float32 [T, ...].   vectors: the
                 convolution's kernel, `a_log`, `dt_bias` and the norm's weights.   eps: of the norm.
        """
        y, out = _empty(*inputs[1].shape)
        _, mixed = _empty(*inputs[0].shape)
        given = (*map(_array, inputs), *(each.numpy() for each in (*vectors, conv, recurrent)), mixed, out)
        heads = spec.num_key_heads, spec.num_value_heads, spec.key_head_dim, spec.value_head_dim
        self.call("gated_delta", *given, *heads, spec.conv_kernel, spec.gate == "sigmoid", eps)
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Computes `x / rms(x) * weight` over the last dimension of x float32 [..., n], for weight float32 [n]."""
        y, out = _empty(*x.shape)
        self.call("rms_norm", _array(x), weight.numpy(), eps, out)
        return y

    def rotate(self, x: Tensor, scale: Tensor, is_scaled_first: bool, hartley: NDArray[np.float32]) -> Tensor:
        """Computes `R (scale * x)` or `scale * R x` of x float32 [..., d]; `hartley` is that of d's odd factor."""
        y, out = _empty(*x.shape)
        self.call("rotate", _array(x), scale.numpy(), is_scaled_first, hartley, out)
        return y

    def decode(self, layout: Numbers, rows: Bytes) -> Tensor:
        """Decodes rows to float32 [rows, columns], bit for bit as the codec does."""
        y, out = _empty(len(rows), int(layout[0]))
        self.call("decode", layout, rows, out)
        return y

    def put_in_panels(self, layout: Numbers, rows: Bytes) -> bool:
        """Puts rows u8 [rows, row bytes] of a dense matrix into panels, in place: the form that multiplies fastest.

        Returns: whether it did; kernels may have no panels for a layout, an instruction set, or a number of rows.
        """
        return bool(self.call("put_in_panels", layout, rows))

    def expert_panel_bytes(self, rows: ExpertRows) -> int:
        """Returns the bytes of an expert's panels; 0 if it has none: where neurons are skipped, or in other formats."""
        return int(self.call("expert_panel_bytes", rows.layout, rows.threshold))

    def take_rows(self, layout: Numbers, rows: Bytes, numbers: NDArray[np.int32]) -> Bytes:
        """Returns some rows of a matrix in panels (`panel_numbers`) as they were, but for CRCs: u8 [n, row bytes]."""
        taken = np.zeros((len(numbers), int(layout[1])), np.uint8)
        self.call("take_rows", layout, rows, numbers, taken)
        return taken

    def checksum(self, raw: Bytes) -> int:
        """Computes the CRC-32 of bytes in one piece."""
        return int(self.call("checksum", raw))

    def read(self, raw: Bytes) -> int:
        """Reads bytes and returns their parity: a measure of the memory's speed."""
        return int(self.call("read", raw))

    def checksum_pages(self, extent: PagedRows, num_bytes: int) -> int:
        """Computes the CRC-32 of the first `num_bytes` of the extent to which these rows belong."""
        return int(self.call("checksum_pages", extent._replace(begin=0), num_bytes))

    def stitch(self, rows: PagedRows, layout: formats.RowLayout, num_rows: int) -> None:
        """Copies the beginnings of rows that cross pages before the next page; the pages must have been read."""
        assert _native is not None, "kernels are open"
        _native.stitch(rows, num_rows, layout.row_bytes)

    def damaged_row(self, rows: PagedRows | Bytes, layout: formats.RowLayout, wanted: Numbers) -> int | None:
        """Returns the first of the rows `wanted`, int32 [n], with a wrong CRC-32; None if all are right."""
        row = int(self.call("damaged_row", rows, wanted, layout.row_bytes, layout.crc_offset))
        return None if row < 0 else row

    def gather(self, rows: Bytes, places: NDArray[np.int32], out: Bytes | None = None) -> Bytes:
        """Copies the rows at these places, one after another: u8 [n, row bytes], into `out` if it is given."""
        gathered = np.empty((len(places), rows.shape[1]), np.uint8) if out is None else out
        self.call("gather", rows, rows.shape[1], places, gathered)
        return gathered

    def open_share(
        self, layers: Sequence[Sequence[ExpertRows]], num_tokens: int, buffers: Sequence[NDArray[Any]]
    ) -> object:
        """Opens the native side of `HostShare` for the experts of each layer and the arrays of its buffers."""
        experts = [(rows.layout, rows.selector, rows.records, rows.threshold) for layer in layers for rows in layer]
        num_experts = np.array([len(layer) for layer in layers], np.int32)
        return self.call("open_share", experts, num_experts, num_tokens, *buffers)

    def activate(self, gate: Tensor | None, up: Tensor, function: formats.NeuronFunction) -> Tensor:
        """Computes h of neurons from `gate_i . x` (None without a gate) and `up_i . x`, float32 in one shape."""
        y, out = _empty(*up.shape)
        self.call("activate", None if gate is None else _array(gate), _array(up), *function_numbers(function), out)
        return y

    def scale_by_sigmoid(self, y: Tensor, logits: Tensor) -> Tensor:
        """Computes `y * sigmoid(logits)` for y float32 [T, d] and logits float32 [T, 1]."""
        scaled = y.clone(memory_format=torch.contiguous_format)
        self.call("scale_by_sigmoid", _array(logits), scaled.numpy(), y.shape[1])
        return scaled

    def call(self, name: str, *arguments: object) -> Any:
        """Calls a native function with the threads. Raises MapCutError if a file was cut while its map was read."""
        assert _native is not None and self._pool is not None, "kernels are open"
        try:
            return getattr(_native, name)(self._pool, *arguments)
        except _native.MapCutError as fault:
            raise MapCutError("a file was cut while its map was read") from fault


def panel_expert(rows: ExpertRows, out: Bytes) -> None:
    """Writes an expert's panels, u8 [expert_panel_bytes], in the caller's thread, without the interpreter's lock.

    Raises:  MapCutError if rows are mapped from a file that was cut.
    """
    assert _native is not None
    try:
        _native.panel_expert(rows.layout, rows.selector, rows.records, out)
    except _native.MapCutError as fault:
        raise MapCutError("a file was cut while its map was read") from fault


def open_kernels(threads: int | None = None) -> Kernels | None:
    """Opens kernels with so many threads (None: one a CPU); None if the extension cannot be used."""
    return Kernels(threads) if is_available() else None


@lru_cache(maxsize=4096)
def expert_numbers(
    layout: formats.ExpertLayout, selector: formats.Selector, function: formats.NeuronFunction
) -> Numbers:
    """Returns an expert's layout and neuron function as the kernels take them: int32 [32], read-only.

    The numbers: d, f, selector kind, bytes of a selector row, of a record, of the row of extra values (0: none), neuron
    function, the bits of its limit as a float32 (0: none); then the parts gate, up and down.
    """
    numbers = [layout.records.num_cols, layout.num_rows, _SELECTORS[selector]]
    numbers += [layout.selector.row_bytes if layout.selector else 0, layout.records.row_bytes, layout.extra_bytes]
    numbers += function_numbers(function)
    for name in ("gate", "up", "down"):
        selected = layout.selector.part(name) if layout.selector else None
        part = selected or layout.records.part(name)
        numbers += _part_numbers(part, _SELECTOR_ROW if selected else _RECORD) if part else [0] * _PART_NUMBERS
    return _frozen(numbers)


def function_numbers(function: formats.NeuronFunction) -> tuple[int, int]:
    """Returns a neuron function as the kernels take it, and the bits of its limit as a float32; 0: none."""
    if isinstance(function, formats.LimitedFunction):
        return _FUNCTIONS[function.name], int(np.float32(function.limit).view(np.int32))
    return _FUNCTIONS[function], 0


def router_number(spec: formats.RouterSpec) -> int:
    """Returns the kind of a router as the kernels take it."""
    return _ROUTERS[spec.kind]


def extent_rows(
    layout: formats.ExpertLayout,
    selector: formats.Selector,
    function: formats.NeuronFunction,
    threshold: float,
    extent: Bytes,
) -> ExpertRows:
    """Returns the rows of an expert whose extent, u8, is in one piece; the threshold is on `abs(a)`."""
    begin, end, f = layout.selector_bytes, layout.selector_bytes + layout.records_bytes, layout.num_rows
    numbers = expert_numbers(layout, selector, function)
    selector_rows = extent[:begin].reshape(f, -1) if begin else None
    extra = extent[end : layout.num_bytes].reshape(1, -1) if layout.extra else None
    return ExpertRows(numbers, selector_rows, extent[begin:end].reshape(f, -1), threshold, extra)


@lru_cache(maxsize=4096)
def row_numbers(layout: formats.RowLayout, name: str) -> Numbers:
    """Returns the layout of the part `name` of rows as the kernels take it: int32 [11], read-only.

    The numbers: columns, bytes of a row, 0 (`panel_numbers`: 1), the part.
    """
    part = layout.part(name)
    assert part is not None, name
    return _frozen([layout.num_cols, layout.row_bytes, 0, *_part_numbers(part, _RECORD)])


def panel_numbers(rows: Numbers) -> Numbers:
    """Returns the layout of rows (`row_numbers`) that `Kernels.put_in_panels` has put into panels."""
    return _frozen([*rows[:2].tolist(), 1, *rows[3:].tolist()])


@lru_cache(maxsize=4096)
def stored_numbers(dtype: torch.dtype, num_cols: int) -> Numbers:
    """Returns the layout of rows of plain 16- or 32-bit values as the kernels take it: like `row_numbers`."""
    row_bytes = num_cols * dtype.itemsize
    part = [_DTYPES[dtype], 8 * dtype.itemsize, 0, 16, 0, row_bytes, 0, _RECORD]
    return _frozen([num_cols, row_bytes, 0, *part])


def _part_numbers(part: Part, place: int) -> list[int]:
    stored = part.format
    numbers = [stored.facts.number, stored.width, stored.group, stored.scale_bits]
    return [*numbers, part.offset, part.scales_offset, int(part.has_bias), place]


def _frozen(numbers: list[int]) -> Numbers:
    array = np.asarray(numbers, np.int32)
    array.flags.writeable = False
    return array


def _array(values: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = values.numpy()
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _empty(*shape: int) -> tuple[Tensor, NDArray[np.float32]]:
    """Allocates float32 memory as a tensor and as an array, in a third of the time that torch takes."""
    array = np.empty(shape, np.float32)
    return torch.from_numpy(array), array


class TrellisTables(NamedTuple):
    """The tables of a trellis: hash u8 [3, 16], of the newest nibble first; levels float32 [16 n] of either weight."""

    hash: Tensor
    first_levels: Tensor
    second_levels: Tensor


class TrellisRows(NamedTuple):
    """The rows of a search through S steps."""

    weights: Tensor  # float32 [R, 2 S], and so are targets and scales
    targets: Tensor
    scales: Tensor
    importance: Tensor  # float32 [2 S]
    factor: Tensor | None  # float32 [2 S, 2 S]; None to carry no errors
    starts: Tensor  # u8 [R], the states before the first step


def search_trellis(
    rows: TrellisRows, tables: TrellisTables, num_kept: int, limit: InstructionSet | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Searches the trellis codes of rows of 1 to 32,768 steps, in the caller's thread, without the interpreter's lock.

    Needs up to 650 bytes a step in addition to the result.
    Args:    num_kept: steps to return.   limit: an older instruction set than the machine's best; all give the same.
    Returns: codes u8 [R, num_kept], values float32 [R, 2 num_kept], and the states after these steps, u8 [R].
    Raises:  RunError if the extension cannot be used.
    """
    if not is_available():
        raise formats.RunError(f"native kernels {why_unavailable()}")
    num_rows, n = rows.weights.shape
    codes = np.empty((num_rows, num_kept), np.uint8)
    values = np.empty((num_rows, 2 * num_kept), np.float32)
    ends = np.empty(num_rows, np.uint8)
    factor = None if rows.factor is None else _array(rows.factor)
    _native.search_trellis(
        limit,
        n // 2,
        num_kept,
        _array(rows.weights),
        _array(rows.targets),
        _array(rows.scales),
        _array(rows.importance),
        factor,
        tables.hash.contiguous().numpy(),
        _array(tables.first_levels),
        _array(tables.second_levels),
        rows.starts.contiguous().numpy(),
        codes,
        values,
        ends,
    )
    return torch.from_numpy(codes), torch.from_numpy(values), torch.from_numpy(ends)
