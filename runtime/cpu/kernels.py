"""The native kernels: operations on rows straight from their codes, with threads of their own.

Each has a twin in plain torch, which it is tested against: `expert` for experts, `operations` for attention, norms and
products, `router`, `moe_pack.formats.codecs` for decoding. Products of few tokens take inputs as 24-bit fixed point
relative to the token's largest magnitude, which is as precise as float32 (docs/kernels.md, "Numerics"). The extension
is built with the package where there is a compiler; without it, or on another device than the CPU, torch serves.

The native search for trellis codes. What it finds, and its twin in plain torch, are in `calib/quantize/trellis.py`.
"""

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import ExpertLayout, GroupedQuerySpec, NeuronFunction, RouterSpec, RowLayout, RunError, Selector
from moe_pack.formats.layout import Part

_why_unavailable: str | None = None
try:
    import moe_pack.runtime.cpu._native as _native
except ModuleNotFoundError:
    _native = None  # type: ignore[assignment]  # a module or nothing
    _why_unavailable = "were not built: install again where a C++ compiler is found"
except ImportError as fault:  # built elsewhere: torch serves, and whoever asks hears why
    _native = None  # type: ignore[assignment]
    _why_unavailable = f"cannot be loaded here: {fault}"

InstructionSet = Literal["portable", "avx2", "avx512", "avx512vbmi"]
Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int32]

_CODECS = {"bf16": 0, "affine": 1, "fp8": 4, "e5m2": 5, "mxfp4": 6, "trellis": 7}
_DTYPES = {torch.bfloat16: 0, torch.float16: 2, torch.float32: 3}
_ROUTERS = {"softmax_topk": 0, "topk_softmax": 1, "sigmoid_topk": 2, "sparsemixer": 3}
_FUNCTIONS: dict[NeuronFunction, int] = {"silu": 0, "relu": 1, "clamped_swiglu": 2}
_SELECTORS = {"none": 0, "up": 1, "gate": 2, "both": 3}
_SELECTOR_ROW, _RECORD = 1, 2


class MapCutError(RunError):
    """A file was cut while its map was read."""


def is_available() -> bool:
    """Whether this installation has the extension."""
    return _native is not None


def why_unavailable() -> str | None:
    """What keeps the kernels from being used, as the end of a sentence; None where nothing does."""
    return _why_unavailable


def num_cpus() -> int:
    """The CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class PagedRows(NamedTuple):
    """Rows of an extent that lies in pages of an arena.

    Page p of the extent, `page_bytes` of it, lies in slot `slots[p]` (int32) of the arena (u8), a slot being
    `slot_bytes` long, behind `head_bytes` of room for the beginning of a row that ends in it. Row 0 lies at byte
    `begin` of the extent.
    """

    arena: Bytes
    slots: Numbers
    slot_bytes: int
    head_bytes: int
    page_bytes: int
    begin: int


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """An expert as the kernels see it.

    `layout` from `expert_numbers`; `selector` (None where the kind has none) and `records`: u8 [f, row bytes] in one
    piece, or in pages; `threshold` on `abs(a)`. `extra`, where the layout has it: u8 [1, row bytes], likewise.
    """

    layout: Numbers
    selector: Bytes | PagedRows | None
    records: Bytes | PagedRows
    threshold: float
    extra: Bytes | PagedRows | None = None


@dataclass(frozen=True, slots=True)
class SelectedNeurons:
    """What a selector tells: `a` float32 [T, f]; `runs` bool [T, f]; `neurons` int32 [n]: any token's, rising."""

    a: Tensor
    runs: Tensor
    neurons: Tensor


class Kernels:
    """The kernels with `threads` threads, the caller's among them; one operation at a time. `close` ends them.

    Results do not depend on the number of threads. All tensors are on the CPU. `limit` keeps to an older instruction
    set than the machine's best.
    """

    def __init__(self, threads: int | None = None, limit: InstructionSet | None = None) -> None:
        if _native is None:
            raise RunError(f"native kernels {_why_unavailable}")
        self.threads = num_cpus() if threads is None else threads
        self._pool = _native.open_pool(self.threads, limit)
        self.instruction_set: str = _native.instruction_set(self._pool)

    def close(self) -> None:
        """Ends the threads; the object cannot be used any more."""
        self._pool = None

    def experts(self, x: Tensor, works: list[tuple[ExpertRows, NDArray[np.int64], NDArray[np.float32]]]) -> Tensor:
        """Experts over tokens, weighted and added up.

        Args:    x: float32 [T, d].   works: for each expert its rows, its tokens int64 [n] and their router weights
                 float32 [n].
        Returns: float32 [T, d]: `y[token] = sum of weight * expert(x[token])`.
        Raises:  MapCutError if rows are mapped from a file that was cut.
        """
        y = np.zeros(x.shape, np.float32)
        given = [
            (rows.layout, rows.selector, rows.records, rows.extra, rows.threshold, tokens, weights)
            for rows, tokens, weights in works
        ]
        self._call("experts", given, _array(x), y, x.shape[1])
        return torch.from_numpy(y)

    def experts_apart(
        self,
        x: Tensor,
        works: list[tuple[ExpertRows, NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]],
        out: NDArray[np.float32],
    ) -> None:
        """Experts over tokens, weighted; what `experts` adds up, each output in a row of its own.

        Args:    works: as in `experts`, with the rows int64 [n] of `out` float32 [rows, d] to add to.
        """
        given = [
            (rows.layout, rows.selector, rows.records, rows.extra, rows.threshold, tokens, weights, places)
            for rows, tokens, weights, places in works
        ]
        self._call("experts", given, _array(x), out, x.shape[1], True)

    def select(self, x: Tensor, rows: ExpertRows) -> SelectedNeurons:
        """Which neurons of an expert run for tokens float32 [T, d], by its selector; all, where it has none."""
        f, x = int(rows.layout[1]), x.contiguous()
        a, runs = torch.zeros((len(x), f)), torch.zeros((len(x), f), dtype=torch.uint8)
        neurons = torch.empty(f + 1, dtype=torch.int32)
        count = self._call(
            "select", rows.layout, rows.selector, rows.threshold, x.numpy(), a.numpy(), runs.numpy(), neurons.numpy()
        )
        return SelectedNeurons(a, runs.view(torch.bool), neurons[:count])

    def neurons(self, x: Tensor, rows: ExpertRows, selected: SelectedNeurons, places: Tensor | None = None) -> Tensor:
        """What selected neurons do: h float32 [T, n], zero where one does not run.

        Args:    x: float32 [T, d].   places: int32 [n], the row of `rows.records` that each neuron's record lies in;
                 without it, its own.
        """
        x, n = x.contiguous(), len(selected.neurons)
        h = torch.empty((len(x), n))
        has_selector = rows.selector is not None
        self._call(
            "neurons",
            rows.layout,
            rows.records,
            selected.neurons.numpy(),
            (selected.neurons if places is None else places.contiguous()).numpy(),
            rows.threshold,
            x.numpy(),
            selected.a.numpy() if has_selector else None,
            selected.runs.view(torch.uint8).numpy() if has_selector else None,
            h.numpy(),
        )
        return h

    def accumulate(self, h: Tensor, rows: ExpertRows, neurons: Tensor, places: Tensor | None = None) -> Tensor:
        """The sum of down rows, float32 [T, d], for h float32 [T, n] of `neurons` int32 [n]; `places` as above.

        The expert's extra values, where it has any, are in each token's sum.
        """
        y = torch.zeros((len(h), int(rows.layout[0])))
        where = (neurons if places is None else places.contiguous()).numpy()
        inputs, outputs = _array(h.contiguous()), y.numpy()
        self._call("accumulate", rows.layout, rows.records, neurons.numpy(), where, rows.extra, inputs, outputs)
        return y

    def product(self, x: Tensor, layout: Numbers, rows: Bytes) -> Tensor:
        """`x @ rows.T`, float32 [T, rows], for x float32 [T, columns] and rows u8 [rows, row bytes] in one piece."""
        y, out = _room(len(x), len(rows))
        self._call("dense", layout, rows, _array(x), out)
        return y

    def attend(
        self,
        projected: tuple[Tensor, Tensor, Tensor],
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        angles: tuple[Tensor, Tensor],
        interleaved: bool,
        cached: tuple[Tensor, Tensor],
        num_cached: int,
        spec: GroupedQuerySpec,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention of new tokens, whose keys and values enter the cache, all queries and keys normed and rotated.

        Args:    projected: queries, keys and values, float32 [T, heads * head_dim], before norms of heads and rotation.
                 norms: weights float32 [head_dim] of the rms norms of each head's query and key, with `eps`.   angles:
                 cosine and sine, float32 [T, rotary_dim / 2] each.   cached: keys and values float32 [heads, places,
                 head_dim] after `num_cached` positions, position p in place `p % places`.
                 window: how many positions one sees at most; None: all before it.   sinks: float32 [num_heads], logits
                 that no value belongs to.
        Returns: float32 [T, num_heads * head_dim].
        """
        y, out = _room(*projected[0].shape)
        self._call(
            "attend",
            *(_array(each) for each in projected),
            *((None, None) if norms is None else (each.numpy() for each in norms)),
            *(_array(each) for each in angles),
            *(each.numpy() for each in cached),
            None if sinks is None else sinks.numpy(),
            out,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            num_cached,
            window or 0,
            spec.scale,
            0.0 if norms is None else eps,
            interleaved,
        )
        return y

    def route(self, logits: Tensor, spec: RouterSpec, bias: Tensor | None, least_sum: float) -> tuple[Tensor, Tensor]:
        """The experts of tokens, int64 [T, k], best first, and their weights, float32 [T, k]; `router` says how.

        Args:    logits: float32 [T, E].   bias: float32 [E], for choosing alone.   least_sum: added to the sum that
                 weights are divided by, where they are.
        """
        shape = (len(logits), spec.num_experts_per_tok)
        experts, weights = np.empty(shape, np.int64), np.empty(shape, np.float32)
        self._call(
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

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / rms(x) * weight` over the last dimension of x float32 [..., n], for weight float32 [n]."""
        y, out = _room(*x.shape)
        self._call("rms_norm", _array(x), weight.numpy(), eps, out)
        return y

    def decode(self, layout: Numbers, rows: Bytes) -> Tensor:
        """Rows in float32 [rows, columns], bit for bit those of the codec."""
        y, out = _room(len(rows), int(layout[0]))
        self._call("decode", layout, rows, out)
        return y

    def checksum(self, held: Bytes) -> int:
        """The CRC-32 of bytes in one piece."""
        return int(self._call("checksum", held))

    def read(self, held: Bytes) -> int:
        """Reads bytes and does nothing with them (their parity comes back): how fast the machine could be."""
        return int(self._call("read", held))

    def row_checksums(self, layout: RowLayout, rows: Bytes) -> NDArray[np.uint32]:
        """The CRC-32 of each row's bytes before its CRC field: u32 [rows], for u8 [rows, row bytes]."""
        out = np.empty(len(rows), np.uint32)
        self._call("row_checksums", rows, layout.row_bytes, layout.crc_offset, out)
        return out

    def checksum_pages(self, extent: PagedRows, num_bytes: int) -> int:
        """The CRC-32 of the first bytes of the extent that these rows are of."""
        return int(self._call("checksum_pages", extent._replace(begin=0), num_bytes))

    def stitch(self, rows: PagedRows, layout: RowLayout, num_rows: int) -> None:
        """Makes rows whole that cross from page to page, once the pages' bytes are there."""
        assert _native is not None, "kernels are open"
        _native.stitch(rows, num_rows, layout.row_bytes)

    def damaged_row(self, rows: PagedRows, layout: RowLayout, wanted: Numbers) -> int | None:
        """The first of some rows, int32 [n], whose CRC-32 is not that of its bytes; None if all are."""
        found = int(self._call("damaged_row", rows, wanted, layout.row_bytes, layout.crc_offset))
        return None if found < 0 else found

    def gather(self, rows: Bytes, places: NDArray[np.int32], out: Bytes | None = None) -> Bytes:
        """The rows at these places side by side: u8 [n, row bytes], into `out` where it is given."""
        staged = np.empty((len(places), rows.shape[1]), np.uint8) if out is None else out
        self._call("gather", rows, rows.shape[1], places, staged)
        return staged

    def _call(self, name: str, *arguments: object) -> int:
        assert _native is not None and self._pool is not None, "kernels are open"
        try:
            return getattr(_native, name)(self._pool, *arguments)  # type: ignore[no-any-return]  # an untyped module
        except _native.MapCutError as fault:
            raise MapCutError("a file was cut while its map was read") from fault


def open_kernels(threads: int | None = None) -> Kernels | None:
    """Kernels with so many threads (all CPUs if None), or None where the extension was not built."""
    return Kernels(threads) if is_available() else None


@lru_cache(maxsize=4096)
def expert_numbers(layout: ExpertLayout, selector: Selector, function: NeuronFunction) -> Numbers:
    """An expert's layout and neuron function in the numbers that the kernels take."""
    numbers = [layout.records.num_cols, layout.num_rows, _SELECTORS[selector]]
    numbers += [layout.selector.row_bytes if layout.selector else 0, layout.records.row_bytes, layout.extra_bytes]
    numbers.append(_FUNCTIONS[function])
    for name in ("gate", "up", "down"):
        selected = layout.selector.part(name) if layout.selector else None
        part = selected or layout.records.part(name)
        numbers += _part_numbers(part, _SELECTOR_ROW if selected else _RECORD) if part else [0] * 7
    return _frozen(numbers)


def extent_rows(
    layout: ExpertLayout, selector: Selector, function: NeuronFunction, threshold: float, extent: Bytes
) -> ExpertRows:
    """An expert as the kernels see it whose extent, u8, lies in one piece; the threshold is on `abs(a)`."""
    begin, end, f = layout.selector_bytes, layout.selector_bytes + layout.records_bytes, layout.num_rows
    numbers = expert_numbers(layout, selector, function)
    selector_rows = extent[:begin].reshape(f, -1) if begin else None
    extra = extent[end : layout.num_bytes].reshape(1, -1) if layout.extra else None
    return ExpertRows(numbers, selector_rows, extent[begin:end].reshape(f, -1), threshold, extra)


@lru_cache(maxsize=4096)
def row_numbers(layout: RowLayout, name: str) -> Numbers:
    """The layout of rows, of which one part is wanted, in the numbers that the kernels take."""
    part = layout.part(name)
    assert part is not None, name
    return _frozen([layout.num_cols, layout.row_bytes, *_part_numbers(part, _RECORD)])


@lru_cache(maxsize=4096)
def stored_numbers(dtype: torch.dtype, num_cols: int) -> Numbers:
    """The layout of rows of plain 16- or 32-bit values in the numbers that the kernels take."""
    return _frozen([num_cols, num_cols * dtype.itemsize, _DTYPES[dtype], 8 * dtype.itemsize, 0, 16, 0, 0, _RECORD])


def _part_numbers(part: Part, place: int) -> list[int]:
    stored = part.format
    codec = _CODECS[stored.codec]
    return [codec, stored.width, stored.group, stored.scale_bits, part.offset, int(part.has_bias), place]


def _frozen(numbers: list[int]) -> Numbers:
    array = np.asarray(numbers, np.int32)
    array.flags.writeable = False
    return array


def _array(values: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = values.numpy()
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _room(*shape: int) -> tuple[Tensor, NDArray[np.float32]]:
    """Room for float32 values as a tensor and as an array, in a third of the time that torch takes to make both."""
    array = np.empty(shape, np.float32)
    return torch.from_numpy(array), array


if is_available():
    import moe_pack.runtime.cpu._native as _native


class TrellisRows(NamedTuple):
    """What is searched: weights, targets, scales float32 [R, n]; importance float32 [n] or [R, n]; factor float32
    [n, n], or None: no feedback; starts u8 [R]."""

    weights: Tensor
    targets: Tensor
    scales: Tensor
    importance: Tensor
    factor: Tensor | None
    starts: Tensor


def search_trellis(
    rows: TrellisRows, width: int, tables: Tensor, num_kept: int, limit: InstructionSet | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes u8 and values float32 [R, num_kept], and windows u8 [R] of rows of 1 to 65,536 columns.

    In the caller's thread alone, without the interpreter's lock: callers run several. `tables`: float32 [2, 128], of
    even columns and of odd ones. `limit` keeps to an older instruction set than the machine's best; all find the same.
    Some 320 bytes a column are held beside what comes back.
    """
    if not is_available():
        raise RunError(f"native kernels {why_unavailable()}")
    num_rows, n = rows.weights.shape
    codes = np.empty((num_rows, num_kept), np.uint8)
    values = np.empty((num_rows, num_kept), np.float32)
    windows = np.empty(num_rows, np.uint8)
    weights, targets, scales, importance = (_contiguous(each) for each in rows[:4])
    factor = None if rows.factor is None else _contiguous(rows.factor)
    starts, looked_up = rows.starts.contiguous().numpy(), _contiguous(tables)
    shape = (limit, n, num_kept, width)
    found = (codes, values, windows)
    _native.search_trellis(*shape, weights, targets, scales, importance, factor, looked_up, starts, *found)
    return torch.from_numpy(codes), torch.from_numpy(values), torch.from_numpy(windows)


def _contiguous(values: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = values.contiguous().numpy()
    return array
