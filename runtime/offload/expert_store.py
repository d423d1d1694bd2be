"""What happened when, for Perfetto (ui.perfetto.dev) or chrome://tracing: one event a line, as it happens.

Source:  the Trace Event Format of Chromium's catapult: `X` has a duration; `b` and `e` begin and end what may overlap.

An expert's extent in pages of the arena: which of its blocks are there, and what can be computed from them.

Blocks are what drives are read in, DISK_BLOCK_BYTES of the extent each. Nothing is read here: `streaming` does that.

What computes with experts in pages: plain torch with a copy of each; native kernels where they lie, by rows too.

The experts that are in pages, or on their way: fetched whole or by rows, checked when they first arrive.

What is fetched and dropped is `Residency`'s to decide; what is computed, `streaming`'s.
"""

import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import (
    DISK_BLOCK_BYTES,
    ExpertLayout,
    NeuronFunction,
    Pack,
    PackError,
    RowLayout,
    RunError,
    Selector,
)
from moe_pack.runtime.cpu import ExpertRows, Kernels, PagedRows, SelectedNeurons, expert_numbers
from moe_pack.runtime.model import NativeOperations, NeuronBlock, Operations, PackedExpert, run_expert
from moe_pack.runtime.offload.budget import BudgetPlan
from moe_pack.runtime.offload.cache import ExpertKey
from moe_pack.runtime.offload.disk import PageArena, Reads

_EVENTS_AT_ONCE = 1000  # kept in memory between two writes


class Trace:
    """A trace's file, in the place of one that is there. `close` it: what was not written is.

    It is whole JSON once closed, whatever ended the run. Where the drive refuses, the file goes: it would be none.
    Raises:  RunError if the file cannot be written, now or later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start_ns = time.perf_counter_ns()
        self._lines: list[str] = []
        self._num_reads = 0
        try:
            self._file = path.open("w", encoding="ascii")
        except OSError as fault:
            raise self._error(fault) from fault
        tracks = (
            {"name": "thread_name", "ph": "M", "ts": 0, "pid": 1, "tid": track, "args": {"name": name}}
            for track, name in enumerate(("computing", "waiting for reads"))
        )
        # Written now: a drive that refuses says so before the model runs, and each later line can stand alone.
        self._put('{"displayTimeUnit": "ms", "traceEvents": [\n' + ",\n".join(map(json.dumps, tracks)))

    def __enter__(self) -> "Trace":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def computing(self, name: str, **facts: object) -> Iterator[None]:
        """Something computed."""
        yield from self._during(0, name, facts)

    @contextmanager
    def waiting(self, name: str, **facts: object) -> Iterator[None]:
        """Something waited for."""
        yield from self._during(1, name, facts)

    def read_begins(self, name: str, num_bytes: int, is_urgent: bool) -> int:
        """A read was asked for; its number."""
        self._num_reads += 1
        facts = {"bytes": num_bytes, "urgent": is_urgent}
        self._add({"name": name, "cat": "read", "ph": "b", "id": self._num_reads, "tid": 2, "args": facts})
        return self._num_reads

    def read_ends(self, name: str, number: int) -> None:
        """A read has come, as far as it was waited for, or was dropped."""
        self._add({"name": name, "cat": "read", "ph": "e", "id": number, "tid": 2})

    def close(self) -> None:
        """Writes what is left, and ends the file."""
        if self._file.closed:
            return
        self._write()
        self._put("\n]}\n")
        try:
            self._file.close()
        except OSError as fault:
            raise self._failed(fault) from fault

    def _during(self, track: int, name: str, facts: dict[str, object]) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self._add({"name": name, "ph": "X", "ts": start, "dur": self._now() - start, "tid": track, "args": facts})

    def _now(self) -> float:
        return (time.perf_counter_ns() - self._start_ns) / 1000

    def _add(self, event: dict[str, Any]) -> None:
        if self._file.closed:  # the drive has refused: what ends now has no place
            return
        self._lines.append(",\n" + json.dumps({"ts": self._now(), "pid": 1} | event))
        if len(self._lines) > _EVENTS_AT_ONCE:
            self._write()

    def _write(self) -> None:
        lines, self._lines = self._lines, []
        self._put("".join(lines))

    def _put(self, text: str) -> None:
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as fault:
            raise self._failed(fault) from fault

    def _failed(self, fault: OSError) -> RunError:
        """Gives the file up."""
        with suppress(OSError):  # of what could not be written, again; the descriptor is closed all the same
            self._file.close()
        if self._path.is_file():  # not a device or a pipe
            self._path.unlink()
        return self._error(fault)

    def _error(self, fault: OSError) -> RunError:
        return RunError(f"--trace: {self._path}: cannot be written ({fault.strerror}); give another place")


Blocks = NDArray[np.int64]


class PagedExpert:
    """An expert whose extent begins at `offset` of its file and lies, as far as it is there, in pages of its own.

    `has_block` bool [blocks]; `ticket`: the read under way, None where there is none. Owns its pages: `close` it.
    """

    def __init__(
        self,
        arena: PageArena,
        layout: ExpertLayout,
        selector: Selector,
        function: NeuronFunction,
        threshold: float,
        offset: int,
        place: str,
    ) -> None:
        self.layout, self.offset, self.place = layout, offset, place
        self.num_blocks = -(-layout.num_bytes // DISK_BLOCK_BYTES)
        self.has_block = np.zeros(self.num_blocks, bool)
        self.is_whole = self.is_selector_checked = False
        self.ticket: int | None = None
        self._arena = arena
        self._slots = arena.take(-(-layout.num_bytes // arena.page_bytes))
        self._row_is_checked = np.zeros(layout.num_rows, bool)
        selector_rows = arena.rows(self._slots, 0) if layout.selector else None
        self.records = arena.rows(self._slots, layout.selector_bytes)
        self.extra = arena.rows(self._slots, layout.num_bytes - layout.extra_bytes) if layout.extra else None
        numbers = expert_numbers(layout, selector, function)
        self.rows = ExpertRows(numbers, selector_rows, self.records, threshold, self.extra)

    def close(self) -> None:
        """Gives the pages back."""
        self._arena.give(self._slots)

    def missing(self, blocks: Blocks) -> Blocks:
        """Those of some blocks that are not there, rising."""
        absent: Blocks = blocks[~self.has_block[blocks]]
        return absent

    def all_blocks(self) -> Blocks:
        """Every block."""
        return np.arange(self.num_blocks)

    def selector_blocks(self) -> Blocks:
        """Those that are wanted whichever neurons run: they hold selector rows, and what is added to outputs."""
        selector = np.arange(-(-self.layout.selector_bytes // DISK_BLOCK_BYTES))
        if self.layout.extra is None:
            return selector
        extra = np.arange((self.layout.num_bytes - self.layout.extra_bytes) // DISK_BLOCK_BYTES, self.num_blocks)
        return np.union1d(selector, extra)

    def record_blocks(self, neurons: NDArray[np.int32]) -> Blocks:
        """Those that hold the records of some neurons, rising."""
        row_bytes = self.layout.records.row_bytes
        begin = self.layout.selector_bytes + neurons.astype(np.int64) * row_bytes
        first, last = begin // DISK_BLOCK_BYTES, (begin + row_bytes - 1) // DISK_BLOCK_BYTES
        most = int((last - first).max(initial=0)) + 1
        held = first[:, None] + np.arange(most)
        return np.unique(held[held <= last[:, None]])

    def present(self, neurons: NDArray[np.int32]) -> NDArray[np.int32]:
        """Those of some neurons whose records are there."""
        row_bytes = self.layout.records.row_bytes
        begin = self.layout.selector_bytes + neurons.astype(np.int64) * row_bytes
        num_there = np.concatenate([[0], np.cumsum(self.has_block)])
        first, end = begin // DISK_BLOCK_BYTES, (begin + row_bytes - 1) // DISK_BLOCK_BYTES + 1
        there: NDArray[np.int32] = neurons[num_there[end] - num_there[first] == end - first]
        return there

    def pieces(self, blocks: Blocks) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Where blocks (rising) lie in the file, where in the arena, and how many bytes: one piece a run in a page."""
        page_blocks = self._arena.page_bytes // DISK_BLOCK_BYTES
        follows = (np.diff(blocks, prepend=-2) == 1) & (blocks % page_blocks != 0)
        starts = np.flatnonzero(~follows)
        lengths = np.diff(starts, append=len(blocks))
        first = blocks[starts]
        places = self._arena.places(self._slots[first // page_blocks]) + first % page_blocks * DISK_BLOCK_BYTES
        return self.offset + first * DISK_BLOCK_BYTES, places, lengths * DISK_BLOCK_BYTES

    def arrived(self, blocks: Blocks) -> None:
        """Blocks have been read."""
        self.has_block[blocks] = True
        self.is_whole = bool(self.has_block.all())

    def stitch(self, kernels: Kernels) -> None:
        """Makes rows whole that cross from page to page: after each arrival, before anything is computed."""
        if self.layout.selector and self.rows.selector is not None:
            assert isinstance(self.rows.selector, PagedRows), "an arena's"
            kernels.stitch(self.rows.selector, self.layout.selector, self.layout.num_rows)
        kernels.stitch(self.records, self.layout.records, self.layout.num_rows)
        if self.layout.extra and self.extra is not None:
            kernels.stitch(self.extra, self.layout.extra, 1)

    def check_rows(self, kernels: Kernels, rows: NDArray[np.int32], number: int) -> None:
        """Checks those records of some neurons that have not been checked.

        Raises:  PackError naming the first that is damaged.
        """
        unchecked = rows[~self._row_is_checked[rows]]
        self._check(kernels, self.records, self.layout.records, unchecked, number)
        self._row_is_checked[unchecked] = True

    def check_selector(self, kernels: Kernels, number: int) -> None:
        """Checks every selector row, and what is added to outputs.

        Raises:  PackError naming the first that is damaged.
        """
        assert self.layout.selector is not None and isinstance(self.rows.selector, PagedRows), "a kind with a selector"
        every = np.arange(self.layout.num_rows, dtype=np.int32)
        self._check(kernels, self.rows.selector, self.layout.selector, every, number)
        if self.layout.extra and self.extra is not None:
            self._check(kernels, self.extra, self.layout.extra, every[:1], number)
        self.is_selector_checked = True

    def _check(
        self, kernels: Kernels, rows: PagedRows, layout: RowLayout, wanted: NDArray[np.int32], number: int
    ) -> None:
        found = kernels.damaged_row(rows, layout, wanted)
        if found is not None:
            raise PackError(
                f"{self.place}: expert {number}: CRC-32 of row {found} does not match its bytes; the file is damaged"
            )

    def extent(self) -> Tensor:
        """All bytes in one piece, u8, in memory of their own: for what cannot use them where they are."""
        page_bytes, places = self._arena.page_bytes, self._arena.places(self._slots)
        out = np.empty(len(places) * page_bytes, np.uint8)
        for page, place in enumerate(places.tolist()):
            out[page * page_bytes : (page + 1) * page_bytes] = self._arena.memory[place : place + page_bytes]
        return torch.from_numpy(out[: self.layout.num_bytes])

    def blocks(self) -> Iterator[NeuronBlock]:
        """All neurons once, in stored order, dequantized."""
        return PackedExpert(self.layout, self.extent()).blocks()

    def down_bias(self) -> Tensor | None:
        """What is added to the output of a token that comes here, float32 [d]; None where the family has none."""
        return PackedExpert(self.layout, self.extent()).down_bias()


@dataclass(frozen=True, slots=True)
class PagedWork:
    """An expert to run: its tokens int64 [n], their weights float32 [n], and the rows int64 [n] of its outputs."""

    expert: PagedExpert
    tokens: NDArray[np.int64]
    weights: NDArray[np.float32]
    places: NDArray[np.int64]


class PagedOperations:
    """Experts are used whole, and copied into one piece for that."""

    def __init__(self, function: NeuronFunction, selector: Selector) -> None:
        self._function: NeuronFunction = function
        self._selector: Selector = selector

    def stitch(self, expert: PagedExpert) -> None:
        """Makes rows whole that cross from page to page, after each arrival."""

    def checksum(self, expert: PagedExpert) -> int:
        """Returns the CRC-32 of an expert that is there whole."""
        return zlib.crc32(expert.extent().numpy().data)

    def run(self, x: Tensor, works: Sequence[PagedWork], outputs: NDArray[np.float32]) -> None:
        """Runs experts that are there whole over x float32 [T, d]; each fills its rows of `outputs`, weighted."""
        for work in works:
            some, threshold = x[torch.from_numpy(work.tokens)], work.expert.rows.threshold
            y = run_expert(some, work.expert, self._function, self._selector, threshold)
            outputs[work.places] = work.weights[:, None] * y.numpy()


class NativePagedOperations(PagedOperations):
    """Experts are used where they lie; of one with a selector the rows of running neurons are enough."""

    def __init__(self, function: NeuronFunction, selector: Selector, kernels: Kernels) -> None:
        super().__init__(function, selector)
        self._kernels = kernels

    def stitch(self, expert: PagedExpert) -> None:
        """Makes rows whole in the memory that each page has before it."""
        expert.stitch(self._kernels)

    def checksum(self, expert: PagedExpert) -> int:
        """Returns the CRC-32 of an expert, read page by page."""
        return self._kernels.checksum_pages(expert.records, expert.layout.num_bytes)

    def run(self, x: Tensor, works: Sequence[PagedWork], outputs: NDArray[np.float32]) -> None:
        """Runs experts that are there whole, all of them in one call."""
        given = [(work.expert.rows, work.tokens, work.weights, work.places) for work in works]
        self._kernels.experts_apart(x, given, outputs)

    def check_selector(self, expert: PagedExpert, number: int) -> None:
        """Checks every selector row. Raises PackError naming the first that is damaged."""
        expert.check_selector(self._kernels, number)

    def check_rows(self, expert: PagedExpert, neurons: NDArray[np.int32], number: int) -> None:
        """Checks the records of some neurons. Raises PackError naming the first that is damaged."""
        expert.check_rows(self._kernels, neurons, number)

    def select(self, x: Tensor, expert: PagedExpert) -> SelectedNeurons:
        """Returns which neurons of an expert run for tokens float32 [T, d], by its selector."""
        return self._kernels.select(x, expert.rows)

    def run_rows(self, x: Tensor, expert: PagedExpert, selected: SelectedNeurons) -> Tensor:
        """Returns the output float32 [T, d] of an expert of which the selected neurons' records are there."""
        h = self._kernels.neurons(x, expert.rows, selected)
        return self._kernels.accumulate(h, expert.rows, selected.neurons)


def paged_operations(operations: Operations, function: NeuronFunction, selector: Selector) -> PagedOperations:
    """Returns what computes with experts in pages where these operations compute the rest."""
    if isinstance(operations, NativeOperations):
        return NativePagedOperations(function, selector, operations.kernels)
    return PagedOperations(function, selector)


USUAL_GAP_BYTES = 32 << 10  # what a drive reads in the time that one more read costs, where nobody has measured it
_SHARE_MEMORY = 0.9  # of what a layer's experts ran before, in the running mean of the share that runs


class ExpertStore:
    """Pages and reads of a pack's experts. Owns both: `close` it.

    `stall_ns`: how long was waited for reads.   `asked_bytes`: of whole blocks that were to be read.
    `operations`: what computes with experts.   `by_rows`: what computes with some rows of one; None: all are read.
    `rows_below`: where fewer of an expert's neurons run, their rows are read instead of all; 0 for never.
    `gap_bytes`: what is read over between two rows rather than read apart.
    """

    def __init__(
        self,
        pack: Pack,
        operations: Operations,
        plan: BudgetPlan,
        open_reads: Callable[[NDArray[np.uint8]], Reads],
        verify: bool,
        rows_below: float = 0.0,
        gap_bytes: int = USUAL_GAP_BYTES,
        trace: Trace | None = None,
    ) -> None:
        self.stall_ns = self.asked_bytes = 0
        self._trace = trace
        self._traced: dict[ExpertKey, int] = {}
        self._pack, self._verify = pack, verify
        self.operations = paged_operations(operations, pack.spec.expert.function, pack.manifest.selector)
        self.by_rows = self.operations if isinstance(self.operations, NativePagedOperations) else None
        self._gap_blocks = gap_bytes // DISK_BLOCK_BYTES
        self._rows_below = 0.0 if self.by_rows is None else rows_below
        self._share_running = np.zeros(len(pack.layout.experts))
        self._checked = np.zeros(pack.index.size.shape, bool)
        self._held: dict[ExpertKey, PagedExpert] = {}
        self._reading: dict[ExpertKey, Blocks] = {}
        self._arena = PageArena(plan.num_pages, plan.page_bytes, plan.head_bytes)
        with ExitStack() as opened:
            opened.callback(self._arena.close)
            self._reads = open_reads(self._arena.memory)
            opened.callback(self._reads.close)  # first, as threads may not read into pages that are gone
            self._files = [self._reads.open(pack.folder / file.name) for file in pack.manifest.expert_files]
            opened.pop_all()

    def close(self) -> None:
        """Ends the reads and gives the pages back."""
        self._reads.close()
        self._held.clear()
        self._arena.close()

    @property
    def peak_pages(self) -> int:
        """The most pages that experts had at once."""
        return self._arena.peak_pages

    def fetch(self, key: ExpertKey, urgent: bool) -> None:
        """Gives an expert its pages and begins to read it: whole, or its selector where few of its neurons will run."""
        layer_idx, expert = key
        layout = self._pack.layout.experts[layer_idx][expert]
        held = PagedExpert(
            self._arena,
            layout,
            self._pack.manifest.selector,
            self._pack.spec.expert.function,
            float(self._pack.thresholds[key]),
            self._pack.layout.offsets[layer_idx][expert],
            self._pack.manifest.expert_files[layer_idx].name,
        )
        self._held[key] = held
        self._begin(key, held.selector_blocks() if self._by_rows(key, held) else held.all_blocks(), urgent)

    def evict(self, key: ExpertKey) -> None:
        """Takes an expert's pages back, and ends its read."""
        self.stop(key)
        self._held.pop(key).close()

    def stop(self, key: ExpertKey) -> None:
        """Ends what is being read of an expert, which stays with what it has."""
        held = self._held[key]
        if held.ticket is None:
            return
        self._reads.cancel(held.ticket)
        held.ticket = None
        del self._reading[key]
        self._read_ended(key)

    def promote(self, key: ExpertKey) -> None:
        """Reads an expert, whose turn it was not, before all that is not needed yet."""
        held = self._held[key]
        if held.ticket is not None:
            self._reads.promote(held.ticket)

    def is_here(self, key: ExpertKey) -> bool:
        """Whether nothing of what was asked for of an expert is still to come."""
        held = self._held[key]
        return held.ticket is None or self._reads.is_done(held.ticket)

    def arrive(self, key: ExpertKey) -> PagedExpert:
        """The expert, once what was asked for of it is there: checked, and every row in one piece.

        Raises:  PackError if it is damaged or cannot be read.
        """
        held = self._held[key]
        if held.ticket is None:
            return held
        if self._trace is not None and not self._reads.is_done(held.ticket):
            with self._trace.waiting(_name(key)):
                self._wait(held.ticket)
        else:
            self._wait(held.ticket)
        self._read_ended(key)
        held.ticket = None
        held.arrived(self._reading.pop(key))
        self.operations.stitch(held)
        self._check(key, held)
        return held

    def running(self, key: ExpertKey, share: float) -> None:
        """Takes note of the share of an expert's neurons that ran."""
        mean = self._share_running[key.layer_idx]
        self._share_running[key.layer_idx] = _SHARE_MEMORY * mean + (1 - _SHARE_MEMORY) * share

    def fetch_records(self, key: ExpertKey, neurons: NDArray[np.int32], urgent: bool) -> None:
        """Begins to read the records of some neurons of an expert that is there in part, or all it lacks."""
        held = self._held[key]
        assert held.ticket is None, "one read of an expert at a time"
        if len(neurons) < self._rows_below * held.layout.num_rows:
            blocks = held.missing(_bridged(held.record_blocks(neurons), self._gap_blocks))
        else:
            blocks = held.missing(held.all_blocks())
        if len(blocks):
            self._begin(key, blocks, urgent)

    def check_records(self, key: ExpertKey, neurons: NDArray[np.int32]) -> None:
        """Checks the records of some neurons, where they have not been.

        Raises:  PackError naming a row that is damaged.
        """
        if self._verify and not self._checked[key] and self.by_rows is not None:
            self.by_rows.check_rows(self._held[key], neurons, key.expert)

    def _wait(self, ticket: int) -> None:
        started = time.perf_counter_ns()
        self._reads.wait(ticket)
        self.stall_ns += time.perf_counter_ns() - started

    def _read_ended(self, key: ExpertKey) -> None:
        if self._trace is not None:
            self._trace.read_ends(_name(key), self._traced.pop(key))

    def _begin(self, key: ExpertKey, blocks: Blocks, urgent: bool) -> None:
        held = self._held[key]
        if self._trace is not None:
            self._traced[key] = self._trace.read_begins(_name(key), len(blocks) * DISK_BLOCK_BYTES, urgent)
        self.asked_bytes += len(blocks) * DISK_BLOCK_BYTES
        held.ticket = self._reads.submit(self._files[key.layer_idx], *held.pieces(blocks), urgent)
        self._reading[key] = blocks

    def _by_rows(self, key: ExpertKey, held: PagedExpert) -> bool:
        has_threshold = self._pack.thresholds[key] > 0 and held.layout.selector is not None
        return bool(has_threshold and self._share_running[key.layer_idx] < self._rows_below)

    def _check(self, key: ExpertKey, held: PagedExpert) -> None:
        """Checks an extent the first time it is there whole, selector rows as often as they come alone."""
        if not self._verify or self._checked[key]:
            return
        expected = int(self._pack.index.crc32[key])
        if held.is_whole:
            if self.operations.checksum(held) != expected:
                raise PackError(
                    f"{held.place}: expert {key.expert}: CRC-32 does not match its bytes; the file is damaged"
                )
            self._checked[key] = True
        elif self.by_rows is not None and not held.is_selector_checked:
            self.by_rows.check_selector(held, key.expert)


def _name(key: ExpertKey) -> str:
    return f"layer {key.layer_idx} expert {key.expert}"


def _bridged(blocks: Blocks, gap_blocks: int) -> Blocks:
    """Blocks (rising) with those between that are read over, where they are few."""
    gaps = np.diff(blocks) - 1
    over = np.flatnonzero((gaps > 0) & (gaps <= gap_blocks))
    between = [np.arange(blocks[place] + 1, blocks[place + 1]) for place in over.tolist()]
    return np.sort(np.concatenate([blocks, *between])) if between else blocks
