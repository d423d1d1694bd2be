"""How experts' extents lie in pages of the device: every row in one page, so that a table of offsets finds each.

Where experts on their way to the device come from: memory that holds all of them, or the drive by way of a ring.

The experts that are in pages of the device, or on their way: whole or by rows, and where each row came to lie.

The twin of `expert_store` for a device beside the host. What is copied and dropped is `Residency`'s to decide. Nothing
here waits for the device: queues wait for marks. Rows that come alone fill an expert's pages in the order in which they
come, as the tables find them wherever they are.
"""

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import DISK_BLOCK_BYTES, ExpertLayout, Pack, PackError, PackLayout
from moe_pack.formats.layout import whole_blocks
from moe_pack.runtime.gpu.device import ChunkRing, Device, HostArena, RowRange, StreamMark
from moe_pack.runtime.gpu.kernels.cache import ExpertKind, LayerTables, kind_of
from moe_pack.runtime.gpu.weights import down_biases
from moe_pack.runtime.offload import ExpertKey, Reads, best_page_bytes

UNIT_BYTES = 16  # what rows are found in units of
_LEAST_PAGE_BYTES, _MOST_PAGE_BYTES = 64 << 10, 4 << 20
# What a link moves in the time that asking for one more copy takes: 10 us at 25 GB/s, assumed.
_COPY_BYTES = 256 << 10
_MOST_UNITS = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class RowPlacement:
    """Where an extent's rows come to lie: page p holds its bytes `begins[p]` to `ends[p]`.

    `selector`, `records`: int64 [f] (`selector` int64 [0] where none is stored), where each row lies if the expert's
    pages are laid one after the other.
    """

    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    selector: NDArray[np.int64]
    records: NDArray[np.int64]


@lru_cache(maxsize=64)
def page_plan(layout: ExpertLayout, page_bytes: int) -> RowPlacement:
    """How experts of this layout lie in pages of so many bytes, as many rows in each as fit."""
    sizes = np.repeat(
        [layout.selector_bytes // layout.num_rows, layout.records.row_bytes],
        [layout.num_rows if layout.selector else 0, layout.num_rows],
    )
    row_ends = np.cumsum(sizes)
    row_begins = row_ends - sizes
    assert sizes.max() <= page_bytes, "a page holds a row at least"
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
    """How many pages of so many bytes each expert takes: int64 [L, E]."""
    return np.array([[len(page_plan(e, page_bytes).begins) for e in layer] for layer in layout.experts], np.int64)


def staged_page_bytes(layout: PackLayout) -> int:
    """The bytes of a page that waste least over a pack's experts, a copy a page counted as so many bytes."""
    kinds = {e for layer in layout.experts for e in layer}
    row_bytes = max(rows.row_bytes for e in kinds for rows in (e.selector, e.records) if rows)
    least = -(-max(row_bytes, _LEAST_PAGE_BYTES) // 128) * 128
    # Whole extents, and shares of them, fit some sizes better than round ones.
    largest = max(e.num_bytes for e in kinds)
    sizes = {least, *(-(-(largest + (n - 1) * row_bytes) // (128 * n)) * 128 for n in range(1, 65))}
    fitting = np.array(sorted(size for size in sizes if least <= size <= max(_MOST_PAGE_BYTES, least)))
    pages = np.array([sum(len(page_plan(e, size).begins) for e in kinds) for size in fitting.tolist()])
    return best_page_bytes(fitting, pages * (fitting + _COPY_BYTES))


def most_pages(page_bytes: int) -> int:
    """The most pages that offsets of 32 bits reach."""
    return _MOST_UNITS * UNIT_BYTES // page_bytes


class HostExperts(Protocol):
    """Experts' bytes in page-locked memory of the host. `holds_all`: always there, without being asked for."""

    holds_all: bool

    def begin(self, key: ExpertKey, urgent: bool) -> None:
        """Asks for an expert's bytes; to be called where there `has_room`."""
        ...

    def has_room(self) -> bool:
        """Whether one more expert can be asked for before another is given back."""
        ...

    def promote(self, key: ExpertKey) -> None:
        """Makes what was asked for urgent."""
        ...

    def is_there(self, key: ExpertKey) -> bool:
        """Whether `extent` would not wait."""
        ...

    def extent(self, key: ExpertKey) -> Tensor:
        """The bytes of an expert that was asked for, u8 [num_bytes], once they are there; the memory stays the host's.

        Raises:  PackError if they are damaged or cannot be read.
        """
        ...

    def give_back(self, key: ExpertKey, mark: StreamMark | None) -> None:
        """Takes note that an expert's bytes are not needed once a mark is reached; None: not at all."""
        ...


class HostArenaExperts:
    """All experts in one place: `layers[l]` u8, an extent of layer l beginning at byte `offsets[l][e]` of it.

    The memory stays the caller's, who has checked what lies in it; page-locked, if copies are to overlap.
    Args:    sizes: int64 [L, E], extents' bytes.
    """

    holds_all = True

    def __init__(
        self, layers: Sequence[Tensor], offsets: Sequence[NDArray[np.int64]], sizes: NDArray[np.int64]
    ) -> None:
        self._layers, self._offsets, self._sizes = layers, offsets, sizes

    def begin(self, key: ExpertKey, urgent: bool) -> None:
        """Nothing: all are there."""

    def has_room(self) -> bool:
        """Always."""
        return True

    def promote(self, key: ExpertKey) -> None:
        """Nothing."""

    def is_there(self, key: ExpertKey) -> bool:
        """Always."""
        return True

    def extent(self, key: ExpertKey) -> Tensor:
        """An expert's bytes where they lie."""
        begin = int(self._offsets[key.layer_idx][key.expert])
        return self._layers[key.layer_idx][begin : begin + int(self._sizes[key])]

    def give_back(self, key: ExpertKey, mark: StreamMark | None) -> None:
        """Nothing."""


@dataclass(slots=True)
class _PendingRead:
    slot: int
    ticket: int | None  # None once it is there


class DiskExperts:
    """Experts read from the pack's files into slots of a ring, each as large as the largest; whole ones alone.

    Args:    open_reads: into this memory; `close` ends them.   verify: whether experts are checked when they are first
             read.
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
        memory = device.on_host(num_slots * self._slot_bytes + DISK_BLOCK_BYTES)
        first = -memory.data_ptr() % DISK_BLOCK_BYTES  # direct reads begin on whole units
        self._memory = memory[first : first + num_slots * self._slot_bytes]
        self._free: list[tuple[int, StreamMark | None]] = [(slot, None) for slot in range(num_slots)]
        self._asked: dict[ExpertKey, _PendingRead] = {}
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
        self._asked[key] = _PendingRead(slot, ticket)

    def has_room(self) -> bool:
        """Whether a slot is free, or soon is."""
        return bool(self._free)

    def promote(self, key: ExpertKey) -> None:
        """Reads an expert before all that is not needed yet."""
        ticket = self._asked[key].ticket
        if ticket is not None:
            self._reads.promote(ticket)

    def is_there(self, key: ExpertKey) -> bool:
        """Whether an expert has been read."""
        ticket = self._asked[key].ticket
        return ticket is None or self._reads.is_done(ticket)

    def extent(self, key: ExpertKey) -> Tensor:
        """An expert's bytes, once they have been read."""
        asked = self._asked[key]
        begin = asked.slot * self._slot_bytes
        held = self._memory[begin : begin + self._pack.layout.experts[key.layer_idx][key.expert].num_bytes]
        if asked.ticket is not None:
            self._reads.wait(asked.ticket)
            asked.ticket = None
            self._check(key, held)
        return held

    def give_back(self, key: ExpertKey, mark: StreamMark | None) -> None:
        """Frees an expert's slot; its read ends."""
        asked = self._asked.pop(key)
        if asked.ticket is not None:
            self._reads.cancel(asked.ticket)
        self._free.append((asked.slot, mark))

    def _check(self, key: ExpertKey, held: Tensor) -> None:
        if not self._verify or self._checked[key]:
            return
        if zlib.crc32(held.numpy().data) != int(self._pack.index.crc32[key]):
            place = self._pack.manifest.expert_files[key.layer_idx].name
            raise PackError(f"{place}: expert {key.expert}: CRC-32 does not match its bytes; the file is damaged")
        self._checked[key] = True


def disk_slot_bytes(pack: Pack) -> int:
    """The bytes of a slot of `DiskExperts`: of the largest expert, in whole units of reading."""
    return whole_blocks(int(pack.index.size.max()))


def arena_experts(pack: Pack, arena: HostArena) -> HostArenaExperts:
    """A pack's experts in an arena, which stays the caller's."""
    layers = [arena.rows(layer_idx) for layer_idx in range(len(pack.layout.experts))]
    return HostArenaExperts(layers, arena.extent_at, pack.index.size)


_SHARE_MEMORY = 0.9  # as in `expert_store`


@dataclass(slots=True, eq=False)
class GpuExpert:
    """An expert in pages of the device, which begin at bytes `pages` int64 [n] of the arena.

    `record_at`: int32 [f], the host's copy of its row of the table.   `num_records`: that are there or on their
    way.   `is_asked`: whether its host was asked for bytes that have not been sent yet.   `mark`: after all copies.
    """

    layout: ExpertLayout
    plan: RowPlacement
    pages: NDArray[np.int64]
    record_at: NDArray[np.int32]
    num_records: int = 0
    is_asked: bool = True
    mark: StreamMark | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all of it is there or on its way."""
        return not self.is_asked and self.num_records == self.layout.num_rows

    def present(self, neurons: NDArray[np.int32]) -> NDArray[np.int32]:
        """Those of some neurons whose records are there or on their way."""
        there: NDArray[np.int32] = neurons[self.record_at[neurons] >= 0]
        return there


class GpuExpertStore:
    """Pages of the device, tables of what lies where, and copies. Memory is taken once, here.

    `tables`: by layer.   `asked_bytes`: that were to be copied.   `stall_ns`: how long the host waited for its own
    memory to be filled.   `peak_pages`: the most that experts had at once.
    Args:    num_pages: all layers'.   rows_below: where a smaller share of an expert's neurons runs for one token,
             their rows are copied instead of all; 0 for never.   ring: what rows go through; may be None where it is 0.
    Raises:  RunError if there is not so much memory.
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
        assert num_pages <= most_pages(page_bytes), "more than offsets reach"
        assert ring is not None or rows_below == 0, "rows go through a ring"
        self.host, self.device, self.page_bytes = host, device, page_bytes
        self.stall_ns = self.asked_bytes = self.peak_pages = 0
        self._pack, self._ring, self._num_pages = pack, ring, num_pages
        self._rows_below = rows_below if host.holds_all else 0.0
        self._share_running = np.zeros(len(pack.layout.experts))
        self._held: dict[ExpertKey, GpuExpert] = {}
        self._asked: dict[ExpertKey, GpuExpert] = {}  # of these, whose bytes have not been sent yet
        self._arena = device.on_device(num_pages * page_bytes)
        self._free = list(range(num_pages - 1, -1, -1))
        self._freed_at: list[StreamMark | None] = [None] * num_pages
        self.tables, self._mirrors = _make_tables(pack, device, self._arena)
        self._kind_numbers = [tables.kind.tolist() for tables in self.tables]
        self._tables_at: dict[ExpertKey, StreamMark] = {}
        self._dropped_at: dict[ExpertKey, StreamMark] = {}
        device.wait("copy", device.record("compute"))  # tables are made before they are written to

    def fetch(self, key: ExpertKey, urgent: bool) -> None:
        """Gives an expert its pages and begins to copy it: whole, or its selector where few of its neurons will run."""
        layout = self._pack.layout.experts[key.layer_idx][key.expert]
        plan = page_plan(layout, self.page_bytes)
        self._wait_for_tables(key)
        record_at = self._mirrors[key.layer_idx][1][key.expert].numpy()
        record_at.fill(-1)
        held = self._held[key] = GpuExpert(layout, plan, self._take(key, len(plan.begins)), record_at)
        while not self.host.has_room():
            self._send(next(iter(self._asked)))
        self.host.begin(key, urgent)
        self._asked[key] = held
        self.send_what_came()

    def send_what_came(self) -> None:
        """Begins to copy what the host has got meanwhile."""
        for key in [key for key in self._asked if self.host.is_there(key)]:
            self._send(key)

    def evict(self, key: ExpertKey) -> None:
        """Takes an expert's pages back; what has been asked to compute with it still does."""
        held = self._held.pop(key)
        if held.is_asked:
            del self._asked[key]
            self.host.give_back(key, None)
        mark = self._dropped_at[key] = self.device.record("compute")
        for page in (held.pages // self.page_bytes).tolist():
            self._freed_at[page] = mark
            self._free.append(page)

    def stop(self, key: ExpertKey) -> None:
        """Nothing: rows on their way stay on it."""

    def promote(self, key: ExpertKey) -> None:
        """Reads an expert, whose turn it was not, before all that is not needed yet; copies keep their order."""
        if self._held[key].is_asked:
            self.host.promote(key)

    def is_here(self, key: ExpertKey) -> bool:
        """Whether all that was asked for of an expert has been copied."""
        self.send_what_came()
        held = self._held[key]
        return not held.is_asked and (held.mark is None or self.device.is_done(held.mark))

    def arrive(self, key: ExpertKey) -> GpuExpert:
        """The expert; what is launched from now on has all that was asked for of it.

        Raises:  PackError if it is damaged or cannot be read.
        """
        held = self._held[key]
        if held.is_asked:
            self._send(key)
        if held.mark is not None:
            self.device.wait("compute", held.mark)
            if self.device.is_done(held.mark):
                held.mark = None
        return held

    def kind(self, key: ExpertKey) -> ExpertKind:
        """How an expert is stored and run, which the host knows without asking the device."""
        kind: ExpertKind = self.tables[key.layer_idx].kinds[self._kind_numbers[key.layer_idx][key.expert]]
        return kind

    def running(self, key: ExpertKey, share: float) -> None:
        """Takes note of the share of an expert's neurons that ran."""
        mean = self._share_running[key.layer_idx]
        self._share_running[key.layer_idx] = _SHARE_MEMORY * mean + (1 - _SHARE_MEMORY) * share

    def fetch_records(self, key: ExpertKey, neurons: NDArray[np.int32], urgent: bool) -> None:
        """Begins to copy the records of some neurons (rising) of an expert whose selector is there, or all it lacks."""
        held = self._held[key]
        assert not held.is_asked, "its selector first"
        wanted = neurons if len(neurons) < self._rows_below * held.layout.num_rows else np.arange(held.layout.num_rows)
        missing = wanted[held.record_at[wanted] < 0].astype(np.int32)
        if not len(missing):
            return
        assert self._ring is not None, "rows go through a ring"
        first = held.num_records
        places = self._places(held, held.plan.records[first : first + len(missing)])
        begin, row_bytes = held.layout.selector_bytes, held.layout.records.row_bytes
        rows = self.host.extent(key)[begin : begin + held.layout.records_bytes].numpy().reshape(-1, row_bytes)
        started = time.perf_counter_ns()
        self._ring.send(rows, missing, self._pieces(places, row_bytes, self._ring.rows_per_chunk(row_bytes)))
        self.stall_ns += time.perf_counter_ns() - started
        self.asked_bytes += len(missing) * row_bytes
        self._wait_for_tables(key)
        held.record_at[missing] = places // UNIT_BYTES
        held.num_records += len(missing)
        self._send_table(key, held, with_selector=False)

    def _send(self, key: ExpertKey) -> None:
        """Copies what has been asked of the host, once it is there: whole, or the selector alone."""
        held = self._held[key]
        started = time.perf_counter_ns()
        extent = self.host.extent(key)
        self.stall_ns += time.perf_counter_ns() - started
        by_rows = self._by_rows(key, held)
        stop = held.layout.selector_bytes if by_rows else int(held.plan.ends[-1])
        for place, begin, end in zip(held.pages, held.plan.begins, np.minimum(held.plan.ends, stop), strict=True):
            if begin < end:
                self.device.copy(self._arena[place : place + end - begin], extent[begin:end], "copy")
        self.asked_bytes += stop
        held.is_asked = False
        del self._asked[key]
        selector_at = self._mirrors[key.layer_idx][0]
        if selector_at is not None:
            selector_at[key.expert].numpy()[:] = self._places(held, held.plan.selector) // UNIT_BYTES
        if not by_rows:
            held.record_at[:] = self._places(held, held.plan.records) // UNIT_BYTES
            held.num_records = held.layout.num_rows
        self._send_table(key, held, with_selector=selector_at is not None)
        self.host.give_back(key, held.mark)

    def _send_table(self, key: ExpertKey, held: GpuExpert, with_selector: bool) -> None:
        tables, (selector_at, record_at) = self.tables[key.layer_idx], self._mirrors[key.layer_idx]
        if with_selector:
            assert tables.selector_at is not None and selector_at is not None, "asked only then"
            self.device.copy(tables.selector_at[key.expert], selector_at[key.expert], "copy")
        self.device.copy(tables.record_at[key.expert], record_at[key.expert], "copy")
        held.mark = self._tables_at[key] = self.device.record("copy")

    def _wait_for_tables(self, key: ExpertKey) -> None:
        """Lets the host write an expert's tables anew: the last copy of them has read them."""
        mark = self._tables_at.get(key)
        if mark is not None and not self.device.is_done(mark):
            self.device.synchronize(mark, "host memory is reused")

    def _take(self, key: ExpertKey, count: int) -> NDArray[np.int64]:
        """Pages, which copies asked for from now on may write to, as they may to the expert's tables."""
        assert count <= len(self._free), "the residency keeps to the pages there are"
        pages = [self._free.pop() for _ in range(count)]
        self.peak_pages = max(self.peak_pages, self._num_pages - len(self._free))
        since = (self._dropped_at.pop(key, None), *(self._freed_at[page] for page in pages))
        marks = [mark for mark in since if mark is not None]
        if marks:  # whoever had them may still be computing
            self.device.wait("copy", max(marks))
        for page in pages:
            self._freed_at[page] = None
        return np.array(pages, np.int64) * self.page_bytes

    def _places(self, held: GpuExpert, laid: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where in the arena rows lie, by where they would if the expert's pages were laid one after the other."""
        places: NDArray[np.int64] = held.pages[laid // self.page_bytes] + laid % self.page_bytes
        return places

    def _pieces(self, places: NDArray[np.int64], row_bytes: int, most_rows: int) -> list[RowRange]:
        """Rows at these places of the arena in pieces that lie in a row, `most_rows` each at most."""
        breaks = [0, *(np.flatnonzero(np.diff(places) != row_bytes) + 1).tolist(), len(places)]
        pieces = []
        for run, end in pairwise(breaks):
            for first in range(run, end, most_rows):
                stop, begin = min(first + most_rows, end), int(places[first])
                pieces.append(RowRange(first, stop, self._arena[begin : begin + (stop - first) * row_bytes]))
        return pieces

    def _by_rows(self, key: ExpertKey, held: GpuExpert) -> bool:
        has_threshold = self._pack.thresholds[key] > 0 and held.layout.selector is not None
        return bool(has_threshold and self._share_running[key.layer_idx] < self._rows_below)


_Mirror = tuple[Tensor | None, Tensor]


def store_bytes(pack: Pack, num_pages: int, page_bytes: int) -> int:
    """What a store takes on the device."""
    # Kinds, thresholds, biases of down.
    small = sum((8 + 4 * pack.spec.expert.extra_floats) * len(layer) for layer in pack.layout.experts)
    return num_pages * page_bytes + small + 2 * _table_values(pack) * 4


def pages_of(pack: Pack, page_bytes: int) -> NDArray[np.int64]:
    """How many pages each expert takes in a store: int64 [L, E]."""
    return staged_pages(pack.layout, page_bytes)


def _table_values(pack: Pack) -> int:
    return sum(expert.num_rows for layer in pack.layout.experts for expert in layer)


def _make_tables(pack: Pack, device: Device, arena: Tensor) -> tuple[list[LayerTables], list[_Mirror]]:
    """Tables in which nothing is there, and page-locked copies of them."""
    selector, function = pack.manifest.selector, pack.spec.expert.function
    count = _table_values(pack)
    on_device, on_host = (take(8 * count).view(torch.int32).view(2, -1) for take in (device.on_device, device.on_host))
    on_device.fill_(-1)
    on_host.fill_(-1)
    tables, mirrors, first = list[LayerTables](), list[_Mirror](), 0
    for layer_idx, layer in enumerate(pack.layout.experts):
        shape = (len(layer), layer[0].num_rows)
        stop = first + shape[0] * shape[1]
        each = [kind_of(expert, selector, function) for expert in layer]
        kinds = list[ExpertKind](dict.fromkeys(each))
        numbers = [kinds.index(kind) for kind in each]
        stored, biases = layer[0].selector is not None, down_biases(pack, layer_idx)
        at = [values[:, first:stop].view(2, *shape) for values in (on_device, on_host)]
        tables.append(
            LayerTables(
                arena,
                at[0][0] if stored else None,
                at[0][1],
                torch.tensor(numbers, dtype=torch.int32, device=device.device),
                torch.from_numpy(pack.thresholds[layer_idx].astype(np.float32)).to(device.device),
                tuple(kinds),
                None if biases is None else biases.to(device.device),
            )
        )
        mirrors.append((at[1][0] if stored else None, at[1][1]))
        first = stop
    return tables, mirrors
