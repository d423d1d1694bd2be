"""Where the staged engine's experts are: in pages of the device, and before that in host memory or on disk.

`page_plan` says how an expert's extent lies in pages: every row is in one page, so that a table of offsets finds it.

`HostExperts` are the experts' bytes in host memory: `HostArenaExperts` has all of them, `DiskExperts` reads them from
disk into the slots of a ring.

`GpuExpertStore` has the experts that are on the device or on their way, whole or by rows, and the tables of each row's
place. It is the twin of `runtime.offload.expert_store`; `ExpertCache` decides what is copied and evicted. No call waits
for the device: queues wait for marks. Rows that are copied alone fill an expert's pages in the order of their copies;
the tables find them.
"""

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import DISK_BLOCK_BYTES, ExpertLayout, Pack, PackError, PackLayout
from moe_pack.formats.layout import whole_blocks
from moe_pack.runtime.gpu.device import ChunkRing, Device, HostArena, RowRange, StreamMark
from moe_pack.runtime.gpu.kernels.tables import ExpertKind, LayerTables, kind_of
from moe_pack.runtime.gpu.weights import down_biases
from moe_pack.runtime.offload import ExpertKey, Reads, best_page_bytes
from moe_pack.runtime.offload.expert_store import RunningShares

UNIT_BYTES = 16  # tables have rows' offsets in these units
_LEAST_PAGE_BYTES, _MOST_PAGE_BYTES = 64 << 10, 4 << 20
# What a link copies in the time that one more request takes: 10 us at 25 GB/s, assumed.
_COPY_BYTES = 256 << 10
_MOST_UNITS = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class RowPlacement:
    """Where an extent's rows lie: page p has its bytes `begins[p]` to `ends[p]`.

    `selector`, `records`: int64 [f] (`selector` int64 [0] if none is stored), where each row lies if the expert's pages
    followed each other.
    """

    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    selector: NDArray[np.int64]
    records: NDArray[np.int64]


@lru_cache(maxsize=64)
def page_plan(layout: ExpertLayout, page_bytes: int) -> RowPlacement:
    """Returns how experts of this layout lie in pages of so many bytes, as many rows in each as fit."""
    sizes = np.repeat(
        [layout.selector_bytes // layout.num_rows, layout.records.row_bytes],
        [layout.num_rows if layout.selector else 0, layout.num_rows],
    )
    row_ends = np.cumsum(sizes)
    row_begins = row_ends - sizes
    assert sizes.max() <= page_bytes, "a page has space for a row"
    begins, ends, places, first = list[int](), list[int](), np.empty(len(sizes), np.int64), 0
    while first < len(sizes):
        begin = int(row_begins[first])
        stop = int(np.searchsorted(row_ends, begin + page_bytes, side="right"))
        places[first:stop] = len(begins) * page_bytes + row_begins[first:stop] - begin
        begins.append(begin)
        ends.append(int(row_ends[stop - 1]))
        first = stop
    num_selector = len(sizes) - layout.num_rows
    return RowPlacement(np.array(begins), np.array(ends), places[:num_selector], places[num_selector:])


def staged_pages(layout: PackLayout, page_bytes: int) -> NDArray[np.int64]:
    """Returns how many pages of so many bytes each expert takes: int64 [L, E]."""
    return np.array([[len(page_plan(e, page_bytes).begins) for e in layer] for layer in layout.experts], np.int64)


def staged_page_bytes(layout: PackLayout) -> int:
    """Returns the bytes of a page that waste least over a pack's experts; a page's copy counts as `_COPY_BYTES`."""
    kinds = {e for layer in layout.experts for e in layer}
    row_bytes = max(rows.row_bytes for e in kinds for rows in (e.selector, e.records) if rows)
    least = -(-max(row_bytes, _LEAST_PAGE_BYTES) // 128) * 128
    # Extents and equal shares of them are candidates: they waste less than round sizes.
    largest = max(e.num_bytes for e in kinds)
    sizes = {least, *(-(-(largest + (n - 1) * row_bytes) // (128 * n)) * 128 for n in range(1, 65))}
    fitting = np.array(sorted(size for size in sizes if least <= size <= max(_MOST_PAGE_BYTES, least)))
    pages = np.array([sum(len(page_plan(e, size).begins) for e in kinds) for size in fitting.tolist()])
    return best_page_bytes(fitting, pages * (fitting + _COPY_BYTES))


def most_pages(page_bytes: int) -> int:
    """Returns the most pages that offsets of 32 bits reach."""
    return _MOST_UNITS * UNIT_BYTES // page_bytes


class HostExperts(Protocol):
    """Experts' bytes in page-locked host memory. `holds_all`: whether all are there at all times."""

    holds_all: bool

    def begin(self, key: ExpertKey, urgent: bool) -> None:
        """Requests an expert's bytes; call it only if `has_free_slot`."""
        ...

    def has_free_slot(self) -> bool:
        """Whether one more expert can be requested before another is returned."""
        ...

    def promote(self, key: ExpertKey) -> None:
        """Makes a request urgent."""
        ...

    def is_ready(self, key: ExpertKey) -> bool:
        """Whether `extent` returns without waiting."""
        ...

    def extent(self, key: ExpertKey) -> Tensor:
        """Waits for a requested expert and returns its bytes, u8 [num_bytes]; the memory stays the host's.

        Raises:  PackError if they are damaged or cannot be read.
        """
        ...

    def release(self, key: ExpertKey, mark: StreamMark | None) -> None:
        """Says that an expert's bytes are not needed after a mark is reached; None: not needed at all."""
        ...


class HostArenaExperts:
    """All experts in one place: `layers[l]` u8, with expert e of layer l at byte `offsets[l][e]`.

    The memory stays the caller's, who has checked its bytes; page-locked, if copies are to overlap with computing.
    Args:    sizes: int64 [L, E], extents' bytes.
    """

    holds_all = True

    def __init__(
        self, layers: Sequence[Tensor], offsets: Sequence[NDArray[np.int64]], sizes: NDArray[np.int64]
    ) -> None:
        self._layers, self._offsets, self._sizes = layers, offsets, sizes

    def begin(self, key: ExpertKey, urgent: bool) -> None:
        """Does nothing: all experts are in memory."""

    def has_free_slot(self) -> bool:
        """Returns True."""
        return True

    def promote(self, key: ExpertKey) -> None:
        """Does nothing."""

    def is_ready(self, key: ExpertKey) -> bool:
        """Returns True."""
        return True

    def extent(self, key: ExpertKey) -> Tensor:
        """Returns an expert's bytes where they lie."""
        begin = int(self._offsets[key.layer_idx][key.expert])
        return self._layers[key.layer_idx][begin : begin + int(self._sizes[key])]

    def release(self, key: ExpertKey, mark: StreamMark | None) -> None:
        """Does nothing."""


@dataclass(slots=True)
class _PendingRead:
    slot: int
    ticket: int | None  # None after the read


class DiskExperts:
    """Experts that are read whole from the pack's files into slots, each as large as the largest expert.

    Args:    open_reads: starts reads into this memory; `close` ends them.   verify: whether each
             expert is checked when it is read first.
    """

    holds_all = False

    def __init__(
        self,
        pack: Pack,
        device: Device,
        open_reads: Callable[[NDArray[np.uint8]], Reads],
        num_slots: int,
        verify: bool,
    ) -> None:
        self._pack, self._device, self._verify = pack, device, verify
        self._slot_bytes = disk_slot_bytes(pack)
        memory = device.allocate_host(num_slots * self._slot_bytes + DISK_BLOCK_BYTES)
        first = -memory.data_ptr() % DISK_BLOCK_BYTES  # direct reads begin on whole blocks
        self._memory = memory[first : first + num_slots * self._slot_bytes]
        self._free: list[tuple[int, StreamMark | None]] = [(slot, None) for slot in range(num_slots)]
        self._pending: dict[ExpertKey, _PendingRead] = {}
        self._checked = np.zeros(pack.index.size.shape, bool)
        self._reads = open_reads(self._memory.numpy())
        self._files = [self._reads.open(pack.folder / file.name) for file in pack.manifest.expert_files]

    def close(self) -> None:
        """Ends the reads."""
        self._reads.close()

    def begin(self, key: ExpertKey, urgent: bool) -> None:
        """Begins to read an expert."""
        slot, mark = self._free.pop(0)
        if mark is not None and not self._device.is_done(mark):
            self._device.synchronize(mark, "host memory is reused")
        num_bytes = whole_blocks(self._pack.layout.experts[key.layer_idx][key.expert].num_bytes)
        offset = self._pack.layout.offsets[key.layer_idx][key.expert]
        offsets, places, sizes = np.array([[offset], [slot * self._slot_bytes], [num_bytes]], np.int64)
        ticket = self._reads.submit(self._files[key.layer_idx], offsets, places, sizes, urgent)
        self._pending[key] = _PendingRead(slot, ticket)

    def has_free_slot(self) -> bool:
        """Whether a slot is free, or is so after a wait."""
        return bool(self._free)

    def promote(self, key: ExpertKey) -> None:
        """Reads an expert before all experts that are not urgent."""
        ticket = self._pending[key].ticket
        if ticket is not None:
            self._reads.promote(ticket)

    def is_ready(self, key: ExpertKey) -> bool:
        """Whether an expert has been read."""
        ticket = self._pending[key].ticket
        return ticket is None or self._reads.is_done(ticket)

    def extent(self, key: ExpertKey) -> Tensor:
        """Waits until an expert has been read, and returns its bytes."""
        read = self._pending[key]
        begin = read.slot * self._slot_bytes
        extent = self._memory[begin : begin + self._pack.layout.experts[key.layer_idx][key.expert].num_bytes]
        if read.ticket is not None:
            self._reads.wait(read.ticket)
            read.ticket = None
            self._check(key, extent)
        return extent

    def release(self, key: ExpertKey, mark: StreamMark | None) -> None:
        """Frees an expert's slot and ends its read."""
        read = self._pending.pop(key)
        if read.ticket is not None:
            self._reads.cancel(read.ticket)
        self._free.append((read.slot, mark))

    def _check(self, key: ExpertKey, extent: Tensor) -> None:
        if not self._verify or self._checked[key]:
            return
        if zlib.crc32(extent.numpy().data) != int(self._pack.index.crc32[key]):
            file_name = self._pack.manifest.expert_files[key.layer_idx].name
            raise PackError(f"{file_name}: expert {key.expert}: CRC-32 does not match its bytes; the file is damaged")
        self._checked[key] = True


def disk_slot_bytes(pack: Pack) -> int:
    """Returns the bytes of a slot of `DiskExperts`: the largest expert in whole blocks of the disk."""
    return whole_blocks(int(pack.index.size.max()))


def arena_experts(pack: Pack, arena: HostArena) -> HostArenaExperts:
    """Returns a pack's experts in an arena, which stays the caller's."""
    layers = [arena.rows(layer_idx) for layer_idx in range(len(pack.layout.experts))]
    return HostArenaExperts(layers, arena.extent_at, pack.index.size)


@dataclass(slots=True, eq=False)
class GpuExpert:
    """An expert in pages of the device, which begin at bytes `pages` int64 [n] of the arena.

    `record_at`: int32 [f], the host's copy of the expert's row of the table.   `num_records`: on the device or on their
    way.   `is_pending`: whether its bytes were requested from the host and not sent yet.   `mark`: after all copies.
    """

    layout: ExpertLayout
    plan: RowPlacement
    pages: NDArray[np.int64]
    record_at: NDArray[np.int32]
    num_records: int = 0
    is_pending: bool = True
    mark: StreamMark | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all rows are on the device or on their way."""
        return not self.is_pending and self.num_records == self.layout.num_rows

    def present(self, neurons: NDArray[np.int32]) -> NDArray[np.int32]:
        """Returns those of some neurons whose records are on the device or on their way."""
        present: NDArray[np.int32] = neurons[self.record_at[neurons] >= 0]
        return present


class GpuExpertStore:
    """Pages of the device, tables of rows' offsets, and copies. All memory is allocated here, once.

    `tables`: by layer.   `asked_bytes`: that were given to copies.   `stall_ns`: how long the host waited for host
    memory to be filled.   `peak_pages`: the most pages that experts had at once.   `shares`: of running neurons.
    Args:    num_pages: of all layers.   rows_below: if a smaller share of an expert's neurons runs for one token, only
             their rows are copied; 0 for never.   ring: sends rows; may be None if `rows_below` is 0.
    Raises:  RunError if there is not enough memory.
    """

    def __init__(
        self,
        pack: Pack,
        host: HostExperts,
        device: Device,
        num_pages: int,
        page_bytes: int,
        rows_below: float = 0.0,
        ring: ChunkRing | None = None,
    ) -> None:
        assert num_pages <= most_pages(page_bytes), "offsets of 32 bits reach all pages"
        assert ring is not None or rows_below == 0, "rows go through a ring"
        self.host, self.device, self.page_bytes = host, device, page_bytes
        self.stall_ns = self.asked_bytes = self.peak_pages = 0
        self._pack, self._ring, self._num_pages = pack, ring, num_pages
        self._rows_below = rows_below if host.holds_all else 0.0
        self.shares = RunningShares(len(pack.layout.experts))
        self._experts: dict[ExpertKey, GpuExpert] = {}
        self._pending: dict[ExpertKey, GpuExpert] = {}  # those whose bytes have not been sent yet
        self._arena = device.allocate(num_pages * page_bytes)
        self._free = list(range(num_pages - 1, -1, -1))
        self._freed_at: list[StreamMark | None] = [None] * num_pages
        self.tables, self._host_tables = _make_tables(pack, device, self._arena)
        self._kind_numbers = [tables.kind.tolist() for tables in self.tables]
        self._tables_at: dict[ExpertKey, StreamMark] = {}
        self._dropped_at: dict[ExpertKey, StreamMark] = {}
        device.wait("copy", device.record("compute"))  # tables are filled before copies write to them

    def fetch(self, key: ExpertKey, urgent: bool) -> None:
        """Gives an expert its pages and begins to copy it: whole, or its selector where few of its neurons will run."""
        layout = self._pack.layout.experts[key.layer_idx][key.expert]
        plan = page_plan(layout, self.page_bytes)
        self._wait_for_tables(key)
        record_at = self._host_tables[key.layer_idx].record_at[key.expert].numpy()
        record_at.fill(-1)
        expert = self._experts[key] = GpuExpert(layout, plan, self._take(key, len(plan.begins)), record_at)
        while not self.host.has_free_slot():
            self._send(next(iter(self._pending)))
        self.host.begin(key, urgent)
        self._pending[key] = expert
        self.send_what_came()

    def send_what_came(self) -> None:
        """Begins to copy the requested experts that have reached host memory."""
        for key in [key for key in self._pending if self.host.is_ready(key)]:
            self._send(key)

    def evict(self, key: ExpertKey) -> None:
        """Takes an expert's pages; launches that use it still run before others overwrite them."""
        expert = self._experts.pop(key)
        if expert.is_pending:
            del self._pending[key]
            self.host.release(key, None)
        mark = self._dropped_at[key] = self.device.record("compute")
        for page in (expert.pages // self.page_bytes).tolist():
            self._freed_at[page] = mark
            self._free.append(page)

    def stop(self, key: ExpertKey) -> None:
        """Does nothing: copies that have begun are not stopped."""

    def promote(self, key: ExpertKey) -> None:
        """Makes an expert's read urgent; copies keep their order."""
        if self._experts[key].is_pending:
            self.host.promote(key)

    def is_here(self, key: ExpertKey) -> bool:
        """Whether all requested bytes of an expert have been copied."""
        self.send_what_came()
        expert = self._experts[key]
        return not expert.is_pending and (expert.mark is None or self.device.is_done(expert.mark))

    def arrive(self, key: ExpertKey) -> GpuExpert:
        """Returns an expert; later launches wait until its requested bytes have been copied.

        Raises:  PackError if it is damaged or cannot be read.
        """
        expert = self._experts[key]
        if expert.is_pending:
            self._send(key)
        if expert.mark is not None:
            self.device.wait("compute", expert.mark)
            if self.device.is_done(expert.mark):
                expert.mark = None
        return expert

    def kind(self, key: ExpertKey) -> ExpertKind:
        """Returns how an expert is stored and run, from the host's own tables."""
        kind: ExpertKind = self.tables[key.layer_idx].kinds[self._kind_numbers[key.layer_idx][key.expert]]
        return kind

    def fetch_records(self, key: ExpertKey, neurons: NDArray[np.int32], urgent: bool) -> None:
        """Begins to copy records of ascending neurons of an expert, or all missing ones; its selector must be sent."""
        expert = self._experts[key]
        assert not expert.is_pending, "its selector comes first"
        num_rows = expert.layout.num_rows
        chosen = neurons if len(neurons) < self._rows_below * num_rows else np.arange(num_rows)
        missing = chosen[expert.record_at[chosen] < 0].astype(np.int32)
        if not len(missing):
            return
        assert self._ring is not None, "rows go through a ring"
        first = expert.num_records
        places = self._places(expert, expert.plan.records[first : first + len(missing)])
        begin, row_bytes = expert.layout.selector_bytes, expert.layout.records.row_bytes
        rows = self.host.extent(key)[begin : begin + expert.layout.records_bytes].numpy().reshape(-1, row_bytes)
        started = time.perf_counter_ns()
        self._ring.send(rows, missing, self._pieces(places, row_bytes, self._ring.rows_per_chunk(row_bytes)))
        self.stall_ns += time.perf_counter_ns() - started
        self.asked_bytes += len(missing) * row_bytes
        self._wait_for_tables(key)
        expert.record_at[missing] = places // UNIT_BYTES
        expert.num_records += len(missing)
        self._send_table(key, expert, with_selector=False)

    def _send(self, key: ExpertKey) -> None:
        """Waits for a requested expert in host memory and begins to copy it: whole, or only the selector."""
        expert = self._experts[key]
        started = time.perf_counter_ns()
        extent = self.host.extent(key)
        self.stall_ns += time.perf_counter_ns() - started
        by_rows = self._by_rows(key, expert)
        stop = expert.layout.selector_bytes if by_rows else int(expert.plan.ends[-1])
        for place, begin, end in zip(expert.pages, expert.plan.begins, np.minimum(expert.plan.ends, stop), strict=True):
            if begin < end:
                self.device.copy(self._arena[place : place + end - begin], extent[begin:end], "copy")
        self.asked_bytes += stop
        expert.is_pending = False
        del self._pending[key]
        selector_at = self._host_tables[key.layer_idx].selector_at
        if selector_at is not None:
            selector_at[key.expert].numpy()[:] = self._places(expert, expert.plan.selector) // UNIT_BYTES
        if not by_rows:
            expert.record_at[:] = self._places(expert, expert.plan.records) // UNIT_BYTES
            expert.num_records = expert.layout.num_rows
        self._send_table(key, expert, with_selector=selector_at is not None)
        self.host.release(key, expert.mark)

    def _send_table(self, key: ExpertKey, expert: GpuExpert, with_selector: bool) -> None:
        tables, (selector_at, record_at) = self.tables[key.layer_idx], self._host_tables[key.layer_idx]
        if with_selector:
            assert tables.selector_at is not None and selector_at is not None, "both tables exist"
            self.device.copy(tables.selector_at[key.expert], selector_at[key.expert], "copy")
        self.device.copy(tables.record_at[key.expert], record_at[key.expert], "copy")
        expert.mark = self._tables_at[key] = self.device.record("copy")

    def _wait_for_tables(self, key: ExpertKey) -> None:
        """Waits until the last copy of an expert's tables has read them, so that the host may overwrite them."""
        mark = self._tables_at.get(key)
        if mark is not None and not self.device.is_done(mark):
            self.device.synchronize(mark, "host memory is reused")

    def _take(self, key: ExpertKey, count: int) -> NDArray[np.int64]:
        """Returns free pages; later copies may write to them and to the expert's tables."""
        assert count <= len(self._free), "the cache gives out no more pages than there are"
        pages = [self._free.pop() for _ in range(count)]
        self.peak_pages = max(self.peak_pages, self._num_pages - len(self._free))
        last_uses = (self._dropped_at.pop(key, None), *(self._freed_at[page] for page in pages))
        marks = [mark for mark in last_uses if mark is not None]
        if marks:  # launches with their former experts may still run
            self.device.wait("copy", max(marks))
        for page in pages:
            self._freed_at[page] = None
        return np.array(pages, np.int64) * self.page_bytes

    def _places(self, expert: GpuExpert, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns where rows lie in the arena, from their offsets if the expert's pages followed each other."""
        places: NDArray[np.int64] = expert.pages[offsets // self.page_bytes] + offsets % self.page_bytes
        return places

    def _pieces(self, places: NDArray[np.int64], row_bytes: int, most_rows: int) -> list[RowRange]:
        """Returns rows at these places of the arena in contiguous pieces of at most `most_rows`."""
        breaks = [0, *(np.flatnonzero(np.diff(places) != row_bytes) + 1).tolist(), len(places)]
        pieces = []
        for run, end in pairwise(breaks):
            for first in range(run, end, most_rows):
                stop, begin = min(first + most_rows, end), int(places[first])
                pieces.append(RowRange(first, stop, self._arena[begin : begin + (stop - first) * row_bytes]))
        return pieces

    def _by_rows(self, key: ExpertKey, expert: GpuExpert) -> bool:
        """Whether only the running neurons' rows of an expert are copied."""
        has_threshold = self._pack.thresholds[key] > 0 and expert.layout.selector is not None
        return bool(has_threshold and self._rows_below > 0 and self.shares.is_below(key.layer_idx, self._rows_below))


class _HostTables(NamedTuple):
    """A layer's tables in page-locked host memory, as `LayerTables` has them on the device."""

    selector_at: Tensor | None
    record_at: Tensor


def store_bytes(pack: Pack, num_pages: int, page_bytes: int) -> int:
    """Returns the bytes that a store takes on the device."""
    # Kinds, thresholds, biases of down.
    small = sum((8 + 4 * pack.spec.expert.extra_floats) * len(layer) for layer in pack.layout.experts)
    return num_pages * page_bytes + small + 2 * _table_values(pack) * 4


def pages_of(pack: Pack, page_bytes: int) -> NDArray[np.int64]:
    """Returns how many pages each expert takes in a store: int64 [L, E]."""
    return staged_pages(pack.layout, page_bytes)


def _table_values(pack: Pack) -> int:
    return sum(expert.num_rows for layer in pack.layout.experts for expert in layer)


def _make_tables(pack: Pack, device: Device, arena: Tensor) -> tuple[list[LayerTables], list[_HostTables]]:
    """Returns tables in which all rows are missing, and page-locked copies of them."""
    selector, function = pack.manifest.selector, pack.spec.expert.function
    count = _table_values(pack)
    all_device, all_host = (
        take(8 * count).view(torch.int32).view(2, -1) for take in (device.allocate, device.allocate_host)
    )
    all_device.fill_(-1)
    all_host.fill_(-1)
    tables, host_tables, first = list[LayerTables](), list[_HostTables](), 0
    for layer_idx, layer in enumerate(pack.layout.experts):
        shape = (len(layer), layer[0].num_rows)
        stop = first + shape[0] * shape[1]
        each = [kind_of(expert, selector, function) for expert in layer]
        kinds = list[ExpertKind](dict.fromkeys(each))
        numbers = [kinds.index(kind) for kind in each]
        is_stored, biases = layer[0].selector is not None, down_biases(pack, layer_idx)
        on_device, on_host = (values[:, first:stop].view(2, *shape) for values in (all_device, all_host))
        tables.append(
            LayerTables(
                arena=arena,
                selector_at=on_device[0] if is_stored else None,
                record_at=on_device[1],
                kind=torch.tensor(numbers, dtype=torch.int32, device=device.device),
                thresholds=torch.from_numpy(pack.thresholds[layer_idx].astype(np.float32)).to(device.device),
                kinds=tuple(kinds),
                down_bias=None if biases is None else biases.to(device.device),
            )
        )
        host_tables.append(_HostTables(on_host[0] if is_stored else None, on_host[1]))
        first = stop
    return tables, host_tables
