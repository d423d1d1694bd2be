"""The experts that are in pages of the device, or on their way: whole or by rows, and where each row came to lie.

The twin of `expert_store` for a device beside the host. What is copied and dropped is `Residency`'s to decide. Nothing
here waits for the device: queues wait for marks. Rows that come alone fill an expert's pages in the order in which they
come, as the tables find them wherever they are.
"""

import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import ExpertLayout, Pack
from moe_pack.runtime.chunk_ring import ChunkRing, Piece
from moe_pack.runtime.device import Device, Mark
from moe_pack.runtime.down_bias import down_biases
from moe_pack.runtime.kernels.tables import ExpertKind, LayerTables, kind_of
from moe_pack.runtime.residency import Key
from moe_pack.runtime.staged_host import HostExperts
from moe_pack.runtime.staged_pages import UNIT_BYTES, PagePlan, most_pages, page_plan, staged_pages

_SHARE_MEMORY = 0.9  # as in `expert_store`


@dataclass(slots=True, eq=False)
class DeviceExpert:
    """An expert in pages of the device, which begin at bytes `pages` int64 [n] of the arena.

    `record_at`: int32 [f], the host's copy of its row of the table.   `num_records`: that are there or on their
    way.   `is_asked`: whether its host was asked for bytes that have not been sent yet.   `mark`: after all copies.
    """

    layout: ExpertLayout
    plan: PagePlan
    pages: NDArray[np.int64]
    record_at: NDArray[np.int32]
    num_records: int = 0
    is_asked: bool = True
    mark: Mark | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all of it is there or on its way."""
        return not self.is_asked and self.num_records == self.layout.num_rows

    def present(self, neurons: NDArray[np.int32]) -> NDArray[np.int32]:
        """Those of some neurons whose records are there or on their way."""
        there: NDArray[np.int32] = neurons[self.record_at[neurons] >= 0]
        return there


class DeviceStore:
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
        self._held: dict[Key, DeviceExpert] = {}
        self._asked: dict[Key, DeviceExpert] = {}  # of these, whose bytes have not been sent yet
        self._arena = device.on_device(num_pages * page_bytes)
        self._free = list(range(num_pages - 1, -1, -1))
        self._freed_at: list[Mark | None] = [None] * num_pages
        self.tables, self._mirrors = _make_tables(pack, device, self._arena)
        self._kind_numbers = [tables.kind.tolist() for tables in self.tables]
        self._tables_at: dict[Key, Mark] = {}
        self._dropped_at: dict[Key, Mark] = {}
        device.wait("copy", device.record("compute"))  # tables are made before they are written to

    def fetch(self, key: Key, urgent: bool) -> None:
        """Gives an expert its pages and begins to copy it: whole, or its selector where few of its neurons will run."""
        layout = self._pack.layout.experts[key.layer_idx][key.expert]
        plan = page_plan(layout, self.page_bytes)
        self._wait_for_tables(key)
        record_at = self._mirrors[key.layer_idx][1][key.expert].numpy()
        record_at.fill(-1)
        held = self._held[key] = DeviceExpert(layout, plan, self._take(key, len(plan.begins)), record_at)
        while not self.host.has_room():
            self._send(next(iter(self._asked)))
        self.host.begin(key, urgent)
        self._asked[key] = held
        self.send_what_came()

    def send_what_came(self) -> None:
        """Begins to copy what the host has got meanwhile."""
        for key in [key for key in self._asked if self.host.is_there(key)]:
            self._send(key)

    def drop(self, key: Key) -> None:
        """Takes an expert's pages back; what has been asked to compute with it still does."""
        held = self._held.pop(key)
        if held.is_asked:
            del self._asked[key]
            self.host.give_back(key, None)
        mark = self._dropped_at[key] = self.device.record("compute")
        for page in (held.pages // self.page_bytes).tolist():
            self._freed_at[page] = mark
            self._free.append(page)

    def stop(self, key: Key) -> None:
        """Nothing: rows on their way stay on it."""

    def promote(self, key: Key) -> None:
        """Reads an expert, whose turn it was not, before all that is not needed yet; copies keep their order."""
        if self._held[key].is_asked:
            self.host.promote(key)

    def is_here(self, key: Key) -> bool:
        """Whether all that was asked for of an expert has been copied."""
        self.send_what_came()
        held = self._held[key]
        return not held.is_asked and (held.mark is None or self.device.is_done(held.mark))

    def arrive(self, key: Key) -> DeviceExpert:
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

    def kind(self, key: Key) -> ExpertKind:
        """How an expert is stored and run, which the host knows without asking the device."""
        kind: ExpertKind = self.tables[key.layer_idx].kinds[self._kind_numbers[key.layer_idx][key.expert]]
        return kind

    def running(self, key: Key, share: float) -> None:
        """Takes note of the share of an expert's neurons that ran."""
        mean = self._share_running[key.layer_idx]
        self._share_running[key.layer_idx] = _SHARE_MEMORY * mean + (1 - _SHARE_MEMORY) * share

    def fetch_records(self, key: Key, neurons: NDArray[np.int32], urgent: bool) -> None:
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

    def _send(self, key: Key) -> None:
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

    def _send_table(self, key: Key, held: DeviceExpert, with_selector: bool) -> None:
        tables, (selector_at, record_at) = self.tables[key.layer_idx], self._mirrors[key.layer_idx]
        if with_selector:
            assert tables.selector_at is not None and selector_at is not None, "asked only then"
            self.device.copy(tables.selector_at[key.expert], selector_at[key.expert], "copy")
        self.device.copy(tables.record_at[key.expert], record_at[key.expert], "copy")
        held.mark = self._tables_at[key] = self.device.record("copy")

    def _wait_for_tables(self, key: Key) -> None:
        """Lets the host write an expert's tables anew: the last copy of them has read them."""
        mark = self._tables_at.get(key)
        if mark is not None and not self.device.is_done(mark):
            self.device.synchronize(mark, "host memory is reused")

    def _take(self, key: Key, count: int) -> NDArray[np.int64]:
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

    def _places(self, held: DeviceExpert, laid: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where in the arena rows lie, by where they would if the expert's pages were laid one after the other."""
        places: NDArray[np.int64] = held.pages[laid // self.page_bytes] + laid % self.page_bytes
        return places

    def _pieces(self, places: NDArray[np.int64], row_bytes: int, most_rows: int) -> list[Piece]:
        """Rows at these places of the arena in pieces that lie in a row, `most_rows` each at most."""
        breaks = [0, *(np.flatnonzero(np.diff(places) != row_bytes) + 1).tolist(), len(places)]
        pieces = []
        for run, end in pairwise(breaks):
            for first in range(run, end, most_rows):
                stop, begin = min(first + most_rows, end), int(places[first])
                pieces.append(Piece(first, stop, self._arena[begin : begin + (stop - first) * row_bytes]))
        return pieces

    def _by_rows(self, key: Key, held: DeviceExpert) -> bool:
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
