"""A pack's weights on a GPU: dense matrices as they are stored, and the graph engine's cache of experts.

`DeviceMatrix` is a dense matrix that Triton kernels multiply as it is stored. `GpuExpertCache` is the GPU's memory for
experts: rows that are resident for the whole run, and pages for the others, each layer with its own. It owns the arena
on the device; host memory (`HostArena`) stays the caller's. `placement` decides what is resident,
`kernels.cache.lru_update` which experts have pages, and `kernels.cache` copies rows. `GpuWeights` has the dense part in
one allocation, and experts in a `GpuExpertCache`. Importing this needs Triton.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import Pack, RunError, size_text
from moe_pack.formats.layout import DenseLayout, check_rows
from moe_pack.runtime.gpu.device import LINE_BYTES, HostArena
from moe_pack.runtime.gpu.kernels.cache import (
    NUM_PROGRAMS,
    CacheState,
    Selection,
    gather_records_from_host,
    gather_selectors_from_host,
    lru_update,
)
from moe_pack.runtime.gpu.kernels.experts import expert_many, workspace_floats
from moe_pack.runtime.gpu.kernels.matmul import gather_row, gemm, gemv
from moe_pack.runtime.gpu.kernels.rotation import GpuOperations
from moe_pack.runtime.gpu.kernels.rows import RowPart, part_of, stored_part
from moe_pack.runtime.gpu.kernels.tables import ExpertKind, HostRows, LayerTables, kind_of
from moe_pack.runtime.gpu.placement import GpuPlacement
from moe_pack.runtime.model import (
    ExpertRunner,
    Matrix,
    PackWeights,
    PartialState,
    RowMatrix,
    StoredMatrix,
    tokens_by_expert,
)
from moe_pack.runtime.model.matrix import TORCH_DTYPES, InMemoryMatrix
from moe_pack.runtime.model.weights import from_experts, to_experts


class DeviceMatrix(InMemoryMatrix):
    """A matrix [num_rows, num_cols] in the pack's row layout, or in plain values; see `Matrix`.

    Args:    raw: u8, all bytes of the matrix, on the device.
    """

    def __init__(self, dense: DenseLayout, raw: Tensor) -> None:
        self.num_rows, self.num_cols = dense.role.shape
        self._plain: RowMatrix | StoredMatrix
        if dense.rows is not None:
            self._stored = raw.view(-1, dense.rows.row_bytes)
            self.part: RowPart = part_of(dense.rows, dense.rows.parts[0].name)
            self._plain = RowMatrix(dense.rows, self._stored)
        else:
            self._stored = raw.view(TORCH_DTYPES[dense.dtype]).view(-1, self.num_cols)
            self.part = stored_part(dense.dtype, self.num_cols)
            self._plain = StoredMatrix(self._stored)

    @property
    def stored(self) -> Tensor:
        """The rows as they are stored: u8 [num_rows, row bytes], or values [num_rows, num_cols]."""
        return self._stored

    def rows(self, start: int, stop: int) -> Tensor:
        """Returns rows `start` to `stop`: float32 [stop - start, num_cols]."""
        return self._plain.rows(start, stop)

    def take(self, ids: Tensor) -> Tensor:
        """Returns the rows with these numbers: float32 [n, num_cols]."""
        return self._plain.take(ids)

    def product(self, x: Tensor) -> Tensor:
        """Returns `x @ matrix.T`, float32 [T, num_rows], for x float32 [T, num_cols]."""
        out = torch.empty((len(x), self.num_rows), device=x.device)
        if len(x) == 1:
            gemv(x[0].contiguous(), self._stored, self.part, out[0])
        else:
            row_units = self._stored.stride(0) * self._stored.element_size() // 16
            gemm(x.contiguous(), self._stored.view(torch.uint8), self.part, row_units, out)
        return out

    def times(
        self, x: Tensor, out: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, scale: float = 1.0
    ) -> None:
        """Writes `residual + scale * (matrix @ x + bias)` to `out`, float32 [num_rows], for x float32 [num_cols]."""
        gemv(x, self._stored, self.part, out, bias=bias, residual=residual, scale=scale)

    def gather(self, row_id: Tensor, out: Tensor, scale: float) -> None:
        """Writes the row whose number is in `row_id`, int32 [1], times `scale` to `out`, float32 [num_cols]."""
        gather_row(self._stored, self.part, row_id, out, scale=scale)


def down_biases(pack: Pack, layer_idx: int) -> Tensor | None:
    """Returns the biases of down of a layer's experts, float32 [E, d] in host memory; None if the family has none.

    Raises:  PackError if they are damaged or cannot be read.
    """
    extra = pack.layout.experts[layer_idx][0].extra
    if extra is None:
        return None
    entries = {entry.name: entry for entry in pack.layout.expert_files[layer_idx].entries}
    file_name, num_experts = pack.manifest.expert_files[layer_idx].name, len(pack.layout.experts[layer_idx])
    rows = np.stack([pack.read_range(layer_idx, entries[f"{expert}.extra"]) for expert in range(num_experts)])
    check_rows(extra, rows, f"{file_name}: biases of down")
    return torch.from_numpy(rows[:, : extra.crc_offset].copy()).view(torch.float32)


NUM_COUNTERS = 4


@dataclass(frozen=True, slots=True, eq=False)
class GpuCacheLayer:
    """A layer's experts on the device: `tables` for kernels that compute, `state` and `host` for kernels that copy.

    If layers share their pages (`state.keeps` is False), copied rows stay until another layer's `lru_update`.

    `kind_of`: each expert's kind, known to the host.   `has_dynamic_selectors`, `has_dynamic_records`: whether any rows
    have to be copied at all.
    """

    tables: LayerTables
    state: CacheState
    host: HostRows
    kind_of: tuple[ExpertKind, ...]
    has_dynamic_selectors: bool
    has_dynamic_records: bool

    def lru_update(self, experts: Tensor) -> None:
        """Gives these experts their pages and counts hits (`kernels.cache.lru_update`); only launches a kernel.

        Args:    experts: int32 [n], each once, on the device; n is at most k.
        """
        lru_update(experts, self.state, self.tables)

    def gather_selectors_from_host(self, experts: Tensor, num_programs: int = NUM_PROGRAMS) -> None:
        """Copies these experts' missing selector rows, after `lru_update`; only launches a kernel."""
        if self.has_dynamic_selectors:
            gather_selectors_from_host(experts, self.tables, self.state, self.host, num_programs)

    def gather_records_from_host(
        self, experts: Tensor, selection: Selection | None, num_programs: int = NUM_PROGRAMS
    ) -> None:
        """Copies their selected missing records (all, for None), after `lru_update`; only launches a kernel."""
        if self.has_dynamic_records:
            gather_records_from_host(experts, selection, self.tables, self.state, self.host, num_programs)


class GpuExpertCache:
    """All layers' experts on a device, in one allocation. Owns it: `close` it.

    `layers`: one for each MoE layer.   `placement`: its division of memory.   `counters`: int64 [L, 4] on the device:
    NEEDED, HITS, ROWS, BYTES of `CacheState`, summed since the start.   `num_bytes`: the size of the allocation, equal
    to the placement's `num_bytes`.
    """

    def __init__(self, pack: Pack, placement: GpuPlacement, host: HostArena, device: torch.device) -> None:
        """Allocates memory, copies resident rows, and fills the tables.

        Args:    placement: of `place_experts`.   host: all experts' extents; page-locked, if the GPU reads some later.
        Raises:  RunError if the device has too little memory, or host memory that it would read is not page-locked.
        """
        if device.type == "cuda" and placement.num_pages.any() and not host.is_locked:
            raise RunError(
                f"--engine graph: only {size_text(host.locked_bytes)} of {size_text(host.num_bytes)} of host memory "
                "could be page-locked, and the GPU reads all of it; use --engine staged"
            )
        memory = _Memory(placement.num_bytes, device)
        num_layers = len(placement.num_pages)
        self.placement, self.num_bytes = placement, placement.num_bytes
        self.counters = memory.put(torch.zeros((num_layers, NUM_COUNTERS), dtype=torch.int64))
        shared = memory.take(placement.pages_bytes) if placement.is_shared else None
        self.layers: tuple[GpuCacheLayer, ...] = tuple(
            _layer(pack, l, placement, host, memory, shared, self.counters[l]) for l in range(num_layers)
        )

    def close(self) -> None:
        """Releases the device's memory, which is freed with the last tensor that refers to it."""
        self.layers = ()
        self.counters = torch.empty(0, dtype=torch.int64)


class _Memory:
    """One allocation that is given out from its beginning, in pieces that begin at multiples of `LINE_BYTES`."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        try:
            self._bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as fault:
            raise RunError(f"--budget: cannot allocate {size_text(num_bytes)} on the GPU; give less") from fault
        self._bytes = self._bytes[-self._bytes.data_ptr() % LINE_BYTES :]  # host memory may begin anywhere
        self._end = 0

    def take(self, num_bytes: int) -> Tensor:
        """Returns the next piece, u8, zeros."""
        begin, self._end = self._end, -(-(self._end + num_bytes) // LINE_BYTES) * LINE_BYTES
        assert begin + num_bytes <= len(self._bytes), "the placement counts all pieces"
        return self._bytes[begin : begin + num_bytes]

    def around(self, piece: Tensor) -> tuple[Tensor, int]:
        """Returns the whole allocation, and where a piece begins in it."""
        return self._bytes, piece.data_ptr() - self._bytes.data_ptr()

    def put(self, values: Tensor) -> Tensor:
        """Returns a copy of a tensor in the next piece."""
        return self.take(values.nbytes).view(values.dtype).view(values.shape).copy_(values)


def _layer(
    pack: Pack,
    l: int,
    placement: GpuPlacement,
    host: HostArena,
    memory: _Memory,
    shared: Tensor | None,
    counters: Tensor,
) -> GpuCacheLayer:
    layouts, num_pages = pack.layout.experts[l], int(placement.num_pages[l])
    is_dynamic, first = placement.selector_is_dynamic[l], placement.first_dynamic[l]
    resident = int(placement.resident_bytes[l])
    if shared is None:
        arena, begin, pages_begin = memory.take(resident + num_pages * placement.page_bytes), 0, resident
    else:  # the shared pages lie before the resident rows of all layers
        arena, begin = memory.around(memory.take(resident))
        pages_begin = memory.around(shared)[1]
    selector_at, record_at = _copy_resident(pack, l, placement, host, arena, begin)
    kinds, biases = list(dict.fromkeys(layouts)), down_biases(pack, l)
    tables = LayerTables(
        arena=arena,
        selector_at=memory.put(torch.from_numpy(selector_at)) if layouts[0].selector is not None else None,
        record_at=memory.put(torch.from_numpy(record_at)),
        kind=memory.put(torch.tensor([kinds.index(layout) for layout in layouts], dtype=torch.int32)),
        thresholds=memory.put(torch.from_numpy(pack.thresholds[l].copy())),
        kinds=tuple(kind_of(layout, pack.manifest.selector, pack.spec.expert.function) for layout in kinds),
        down_bias=None if biases is None else memory.put(biases),
    )
    kind = tuple(tables.kinds[kinds.index(layout)] for layout in layouts)
    pages_of, dynamic, first_dynamic = (
        torch.from_numpy(values.astype(np.int32)) for values in (placement.num_pages_of[l], is_dynamic, first)
    )
    state = CacheState.empty(
        pages_of,
        dynamic,
        first_dynamic,
        num_pages,
        pages_begin // 16,
        placement.page_bytes // 16,
        placement.num_active,
        keeps=not placement.is_shared,
    )
    state = state.put(memory.put, counters)
    rows = HostRows(host.rows(l), memory.put(torch.from_numpy(host.extent_at[l] // 16)))
    return GpuCacheLayer(
        tables=tables,
        state=state,
        host=rows,
        kind_of=kind,
        has_dynamic_selectors=bool(is_dynamic.any()),
        has_dynamic_records=bool((first < layouts[0].num_rows).any()),
    )


def _copy_resident(
    pack: Pack, l: int, placement: GpuPlacement, host: HostArena, arena: Tensor, begin: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Copies a layer's resident rows to the arena, from `begin` on; returns rows' offsets for `LayerTables`."""
    layouts, source = pack.layout.experts[l], host.rows(l)
    f = layouts[0].num_rows
    selector_at, record_at = (np.full((len(layouts), f), -1, np.int32) for _ in range(2))
    for e, layout in enumerate(layouts):
        # They are one piece of an extent: the selector, if it is resident, and the first records.
        is_dynamic, first = bool(placement.selector_is_dynamic[l, e]), int(placement.first_dynamic[l, e])
        start = layout.selector_bytes if is_dynamic else 0
        stop = layout.selector_bytes + first * layout.records.row_bytes
        extent = int(host.extent_at[l][e])
        arena[begin : begin + stop - start].copy_(source[extent + start : extent + stop])
        if layout.selector is not None and not is_dynamic:
            selector_at[e] = (begin + np.arange(f) * layout.selector.row_bytes) // 16
        records = begin + layout.selector_bytes - start
        record_at[e, :first] = (records + np.arange(first) * layout.records.row_bytes) // 16
        begin += -(-(stop - start) // LINE_BYTES) * LINE_BYTES
    return selector_at, record_at


class GpuWeights(PackWeights, ExpertRunner):
    """The weights of an open pack on a device; the cache of its experts stays the caller's.

    Many tokens run here, one expert after the other, each with all its rows. One token runs in `TokenStep`, without the
    host.
    Args:    chunk_tokens: of a forward pass, at most.
    """

    def __init__(self, pack: Pack, device: torch.device, cache: GpuExpertCache, chunk_tokens: int) -> None:
        super().__init__(pack, device, GpuOperations())
        self.cache = cache
        self._numbers = torch.arange(pack.spec.router.num_experts, dtype=torch.int32, device=device)
        floats = workspace_floats(chunk_tokens, pack.spec.expert.intermediate_size)
        self._workspace = torch.empty(floats, device=device)

    def _keep(self, held: Tensor) -> None:
        super()._keep(held.to(self._device))  # one allocation, whose size is counted

    def _matrix(self, dense: DenseLayout, raw: Tensor) -> Matrix:
        return DeviceMatrix(dense, raw)

    def run_experts(
        self,
        layer_idx: int,
        x: Tensor,
        experts: Tensor,
        router_weights: Tensor,
        partial_state: PartialState | None = None,
    ) -> Tensor:
        """Returns the weighted sum of a layer's routed experts for tokens x float32 [T, d].

        Args:    experts, router_weights: int64 and float32 [T, k].
        """
        layer, y = self.cache.layers[layer_idx], torch.zeros_like(x)
        x = to_experts(x, self, layer_idx)
        # The host waits once a layer, because it has to know which experts have tokens.
        jobs = list(tokens_by_expert(experts.cpu(), router_weights.cpu()))
        tokens = torch.from_numpy(np.concatenate([job[1] for job in jobs]).astype(np.int32)).to(self._device)
        weights = torch.from_numpy(np.concatenate([job[2] for job in jobs])).to(self._device)
        first = 0
        for number, expert_tokens, _ in jobs:
            some = slice(first, first + len(expert_tokens))
            one = self._numbers[number : number + 1]
            layer.lru_update(one)
            layer.gather_selectors_from_host(one)
            layer.gather_records_from_host(one, None)
            kind = layer.kind_of[number]
            expert_many(x, tokens[some], weights[some], layer.tables, number, kind, y, self._workspace)
            self.bytes_read += self._pack.layout.experts[layer_idx][number].num_bytes
            first = some.stop
        return from_experts(y, self, layer_idx)
