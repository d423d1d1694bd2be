"""The expert store of the CPU: experts in pages of the arena, fetched whole or by rows, and checked."""

import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack import formats
from moe_pack.formats.pack.layouts import whole_blocks
from moe_pack.runtime import cpu, model
from moe_pack.runtime.cpu.reads import Reads
from moe_pack.runtime.offload import budgets, disk
from moe_pack.runtime.offload.cache import ExpertKey
from moe_pack.runtime.offload.disk import pieces_of_rows

_MAX_EVENTS = 1000  # in memory between two writes
_TRACKS = ("computing", "waiting for reads")


class Trace:
    """The file of `--trace`, for Perfetto (ui.perfetto.dev) or chrome://tracing; it replaces a file of that name.

    `close` writes the rest; the file is then whole JSON, however the run ended. If a write fails, the file is deleted.
    Raises:  RunError if the file cannot be written, now or later.
    Source:  the Trace Event Format of Chromium's catapult: `X` has a duration; `b` and `e` begin and end events that
             may overlap. One event a line.
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
            for track, name in enumerate(_TRACKS)
        )
        # Written now: a disk error comes before the model runs, and each later line is complete in itself.
        self._put('{"displayTimeUnit": "ms", "traceEvents": [\n' + ",\n".join(map(json.dumps, tracks)))

    def __enter__(self) -> "Trace":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def during(self, track: Literal["computing", "waiting for reads"], name: str, **facts: object) -> Iterator[None]:
        """Records the time of the block on a track."""
        start = self._now()
        try:
            yield
        finally:
            event = {"name": name, "ph": "X", "ts": start, "dur": self._now() - start, "tid": _TRACKS.index(track)}
            self._add(event | {"args": facts})

    def read_begins(self, name: str, num_bytes: int, is_urgent: bool) -> int:
        """Records that a read was requested; returns its number."""
        self._num_reads += 1
        facts = {"bytes": num_bytes, "urgent": is_urgent}
        self._add({"name": name, "cat": "read", "ph": "b", "id": self._num_reads, "tid": 2, "args": facts})
        return self._num_reads

    def read_ends(self, name: str, number: int) -> None:
        """Records that a read has been waited for, or has been cancelled."""
        self._add({"name": name, "cat": "read", "ph": "e", "id": number, "tid": 2})

    def close(self) -> None:
        """Writes the rest and ends the file."""
        if self._file.closed:
            return
        self._write()
        self._put("\n]}\n")
        try:
            self._file.close()
        except OSError as fault:
            raise self._failed(fault) from fault

    def _now(self) -> float:
        return (time.perf_counter_ns() - self._start_ns) / 1000

    def _add(self, event: dict[str, Any]) -> None:
        if self._file.closed:  # a write has failed: events that end now are lost
            return
        self._lines.append(",\n" + json.dumps({"ts": self._now(), "pid": 1} | event))
        if len(self._lines) > _MAX_EVENTS:
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

    def _failed(self, fault: OSError) -> formats.RunError:
        """Closes and deletes the file; returns the error to raise."""
        with suppress(OSError):  # the failed write fails again; the descriptor is closed anyway
            self._file.close()
        if self._path.is_file():  # not a device or a pipe
            self._path.unlink()
        return self._error(fault)

    def _error(self, fault: OSError) -> formats.RunError:
        return formats.RunError(f"--trace: {self._path}: cannot be written ({fault.strerror}); give another path")


Blocks = NDArray[np.int64]
_NO_BLOCKS = np.zeros(0, np.int64)


class ResidentSelectors:
    """The selectors that stay in memory: each has its place, is read when its expert is first fetched, and stays.

    Args:    memory: u8 [at least the selectors' whole blocks].   places: int64 [L, E], in this memory; -1 for experts
             whose selector is in pages.
    """

    def __init__(self, memory: NDArray[np.uint8], places: NDArray[np.int64]) -> None:
        self._memory, self._places = memory, places
        self._is_read = np.zeros(places.shape, bool)
        self._is_checked = np.zeros(places.shape, bool)

    @classmethod
    def laid_out(cls, memory: NDArray[np.uint8], layout: formats.PackLayout, is_resident: NDArray[np.bool_]) -> Self:
        """Returns places for the selectors of some experts, bool [L, E], one after the other."""
        sizes = np.array([[whole_blocks(expert.selector_bytes) for expert in layer] for layer in layout.experts])
        ends = np.cumsum(np.where(is_resident, sizes, 0)).reshape(sizes.shape)
        return cls(memory, np.where(is_resident, ends - sizes, -1))

    def has(self, key: ExpertKey) -> bool:
        """Returns whether an expert's selector stays here."""
        return bool(self._places[key] >= 0)

    def rows(self, key: ExpertKey, layout: formats.ExpertLayout) -> NDArray[np.uint8] | None:
        """Returns the place of an expert's selector rows, u8 [f, row bytes], read or not; None if it has none."""
        if not self.has(key) or layout.selector is None:
            return None
        start = int(self._places[key])
        return self._memory[start : start + layout.selector_bytes].reshape(layout.num_rows, -1)

    def place_to_read(self, key: ExpertKey) -> int | None:
        """Returns where to read an expert's selector, in whole blocks; None if that was done, or is not to be done."""
        return int(self._places[key]) if self.has(key) and not self._is_read[key] else None

    def arrived(self, key: ExpertKey) -> None:
        """Marks a selector as read."""
        self._is_read[key] = True

    def to_check(self, key: ExpertKey) -> bool:
        """Returns whether an expert's selector stays here and was not checked yet; from now on it was."""
        is_new = self.has(key) and not self._is_checked[key]
        self._is_checked[key] = True
        return is_new


class PagedExpert:
    """An expert's extent in pages of the arena: which blocks have arrived, and the rows that kernels compute with.

    Disks are read in blocks of DISK_BLOCK_BYTES of the extent, which begins at `offset` of its file. `ExpertStore`
    reads. Owns its pages: `close` it.
    Args:    selector_rows: u8 [f, row bytes], of a selector that stays in memory: the pages then have the blocks with
             records only. None: the selector is in the pages, too.   row_is_checked: bool [f], the records that have
             been checked; it is updated. None: none has been.
    """

    def __init__(
        self,
        arena: disk.PageArena,
        layout: formats.ExpertLayout,
        selector: formats.Selector,
        function: formats.NeuronFunction,
        threshold: float,
        offset: int,
        place: str,
        selector_rows: NDArray[np.uint8] | None = None,
        row_is_checked: NDArray[np.bool_] | None = None,
    ) -> None:
        self.layout, self.offset, self.place = layout, offset, place
        self.function: formats.NeuronFunction = function
        self.num_blocks = -(-layout.num_bytes // formats.DISK_BLOCK_BYTES)
        self._selector_stays = selector_rows is not None
        self._first_block = budgets.begin_block(layout) if self._selector_stays else 0
        self.has_block = np.arange(self.num_blocks) < self._first_block  # bool, the blocks that have arrived
        self.is_whole = self.is_selector_checked = False
        self.ticket: int | None = None  # of the read under way
        self._arena = arena
        first = self._first_block * formats.DISK_BLOCK_BYTES
        self._slots = arena.take(-(-(layout.num_bytes - first) // arena.page_bytes))
        self._places = arena.places(self._slots)
        self._row_is_checked = np.zeros(layout.num_rows, bool) if row_is_checked is None else row_is_checked
        rows = arena.rows(self._slots, 0) if layout.selector else None
        self.records = arena.rows(self._slots, layout.selector_bytes - first)
        self.extra = arena.rows(self._slots, layout.num_bytes - layout.extra_bytes - first) if layout.extra else None
        numbers = cpu.expert_numbers(layout, selector, function)
        self.rows = cpu.ExpertRows(
            numbers, rows if selector_rows is None else selector_rows, self.records, threshold, self.extra
        )

    def close(self) -> None:
        """Gives the pages back."""
        self._arena.give(self._slots)

    def all_blocks(self) -> Blocks:
        """Returns every block of the pages."""
        return np.arange(self._first_block, self.num_blocks)

    def selector_blocks(self) -> Blocks:
        """Returns the blocks of the pages with selector rows, unless these stay elsewhere, and the bias of down."""
        num_blocks = -(-self.layout.selector_bytes // formats.DISK_BLOCK_BYTES)
        selector = _NO_BLOCKS if self._selector_stays else np.arange(num_blocks)
        if self.layout.extra is None:
            return selector
        first_extra = (self.layout.num_bytes - self.layout.extra_bytes) // formats.DISK_BLOCK_BYTES
        return np.union1d(selector, np.arange(first_extra, self.num_blocks))

    def pieces_of_rows(self, neurons: NDArray[np.int32], gap_blocks: int) -> disk.Pieces:
        """Returns the pieces to read for the records of some neurons (rising), as far as they have not arrived.

        Args:    gap_blocks: gaps of at most so many blocks are read too.
        """
        return pieces_of_rows(
            neurons,
            self.has_block,
            self._places,
            self.layout.selector_bytes,
            self.layout.records.row_bytes,
            self._first_block,
            self._arena.page_bytes // formats.DISK_BLOCK_BYTES,
            gap_blocks,
            self.offset,
        )

    def present(self, neurons: NDArray[np.int32]) -> NDArray[np.int32]:
        """Returns those of some neurons whose records have arrived."""
        num_before = np.concatenate([[0], np.cumsum(self.has_block)])
        row_bytes = self.layout.records.row_bytes
        begin = self.layout.selector_bytes + neurons.astype(np.int64) * row_bytes
        first, last = begin // formats.DISK_BLOCK_BYTES, (begin + row_bytes - 1) // formats.DISK_BLOCK_BYTES
        present: NDArray[np.int32] = neurons[num_before[last + 1] - num_before[first] == last + 1 - first]
        return present

    def pieces(self, blocks: Blocks) -> disk.Pieces:
        """Returns the pieces to read for those of `blocks` (rising) that have not arrived: runs within a page."""
        blocks = blocks[~self.has_block[blocks]]
        page_blocks = self._arena.page_bytes // formats.DISK_BLOCK_BYTES
        page, within = np.divmod(blocks - self._first_block, page_blocks)
        is_new = within == 0
        is_new[:1] = True
        is_new[1:] |= blocks[1:] - blocks[:-1] != 1
        starts = np.flatnonzero(is_new)
        lengths = np.append(starts[1:], len(blocks)) - starts
        places = self._places[page[starts]] + within[starts] * formats.DISK_BLOCK_BYTES
        offsets = self.offset + blocks[starts] * formats.DISK_BLOCK_BYTES
        return disk.Pieces(blocks, offsets, places, lengths * formats.DISK_BLOCK_BYTES)

    def arrived(self, blocks: Blocks) -> None:
        """Marks blocks as read."""
        self.has_block[blocks] = True
        self.is_whole = bool(self.has_block.all())

    def stitch(self, kernels: cpu.Kernels) -> None:
        """Copies rows together that cross from page to page: after each arrival, before anything is computed."""
        if self.layout.selector and isinstance(self.rows.selector, cpu.PagedRows):
            kernels.stitch(self.rows.selector, self.layout.selector, self.layout.num_rows)
        kernels.stitch(self.records, self.layout.records, self.layout.num_rows)
        if self.layout.extra and self.extra is not None:
            kernels.stitch(self.extra, self.layout.extra, 1)

    def check_rows(self, kernels: cpu.Kernels, rows: NDArray[np.int32], number: int) -> None:
        """Checks the records of some neurons that have not been checked before.

        Raises:  PackError, which names the first damaged row.
        """
        unchecked = rows[~self._row_is_checked[rows]]
        if not len(unchecked):
            return
        self._check(kernels, self.records, self.layout.records, unchecked, number)
        self._row_is_checked[unchecked] = True

    def check_selector(self, kernels: cpu.Kernels, number: int) -> None:
        """Checks every selector row and the bias of down; raises as `check_rows`."""
        assert self.layout.selector is not None and self.rows.selector is not None, "an expert with a selector"
        every = np.arange(self.layout.num_rows, dtype=np.int32)
        self._check(kernels, self.rows.selector, self.layout.selector, every, number)
        self._check_bias(kernels, number)
        self.is_selector_checked = True

    def check_all_rows(self, kernels: cpu.Kernels, number: int) -> None:
        """Checks every record that has not been checked before, and the bias of down, of an expert that is whole."""
        self.check_rows(kernels, np.arange(self.layout.num_rows, dtype=np.int32), number)
        self._check_bias(kernels, number)

    def _check_bias(self, kernels: cpu.Kernels, number: int) -> None:
        if self.layout.extra and self.extra is not None:
            self._check(kernels, self.extra, self.layout.extra, np.zeros(1, np.int32), number)

    def _check(
        self,
        kernels: cpu.Kernels,
        rows: cpu.PagedRows | NDArray[np.uint8],
        layout: formats.RowLayout,
        neurons: NDArray[np.int32],
        number: int,
    ) -> None:
        damaged = kernels.damaged_row(rows, layout, neurons)
        if damaged is not None:
            raise formats.PackError(
                f"{self.place}: expert {number}: CRC-32 of row {damaged} does not match its bytes; the file is damaged"
            )

    def extent(self) -> Tensor:
        """Returns a copy of all bytes in one piece, u8: for operations that cannot use pages."""
        page_bytes = self._arena.page_bytes
        out = np.empty(len(self._places) * page_bytes, np.uint8)
        for page, place in enumerate(self._places.tolist()):
            out[page * page_bytes : (page + 1) * page_bytes] = self._arena.memory[place : place + page_bytes]
        return torch.from_numpy(out[: self.layout.num_bytes])


@dataclass(frozen=True, slots=True)
class ExpertJob:
    """An expert to run for n tokens."""

    key: ExpertKey
    tokens: NDArray[np.int64]  # [n]
    weights: NDArray[np.float32]  # [n]
    places: NDArray[np.int64]  # [n], the rows of its outputs


# With the neurons that run, if the expert has their records and perhaps no others.
PagedWork = tuple[ExpertJob, PagedExpert, cpu.SelectedNeurons | None]


class PagedOperations:
    """Computes in plain torch with a copy of each expert, which must be resident whole."""

    def __init__(self, selector: formats.Selector) -> None:
        self._selector: formats.Selector = selector

    def stitch(self, expert: PagedExpert) -> None:
        """Copies rows together that cross from page to page, after each arrival; here, experts are copied anyway."""

    def checksum(self, expert: PagedExpert) -> int:
        """Returns the CRC-32 of an expert that is resident whole."""
        return zlib.crc32(expert.extent().numpy().data)

    def run(self, x: Tensor, works: Sequence[PagedWork], outputs: NDArray[np.float32]) -> None:
        """Runs experts over x float32 [T, d]; each writes its rows of `outputs`, weighted."""
        for job, expert, _ in works:
            some = x[torch.from_numpy(job.tokens)]
            packed = model.PackedExpert(expert.layout, expert.extent())
            y = model.run_expert(some, packed, expert.function, self._selector, expert.rows.threshold)
            outputs[job.places] = job.weights[:, None] * y.numpy()


class NativePagedOperations(PagedOperations):
    """Computes with native kernels on the pages; with a selector, the rows of running neurons suffice."""

    def __init__(self, selector: formats.Selector, kernels: cpu.Kernels) -> None:
        super().__init__(selector)
        self.kernels = kernels

    def stitch(self, expert: PagedExpert) -> None:
        """Copies the beginning of a row that crosses pages into the head of its last page."""
        expert.stitch(self.kernels)

    def checksum(self, expert: PagedExpert) -> int:
        """Returns the CRC-32 of an expert, read page by page."""
        return self.kernels.checksum_pages(expert.records, expert.layout.num_bytes)

    def run(self, x: Tensor, works: Sequence[PagedWork], outputs: NDArray[np.float32]) -> None:
        """Runs experts, all in one call."""
        jobs = [cpu.ExpertWork(e.rows, job.tokens, job.weights, job.places, some) for job, e, some in works]
        self.kernels.experts_apart(x, jobs, outputs)

    def select(self, x: Tensor, works: Sequence[tuple[PagedExpert, NDArray[np.int64]]]) -> list[cpu.SelectedNeurons]:
        """Returns which neurons of experts run, each for some tokens, int64 [n], of x float32 [T, d]."""
        return self.kernels.select_each(x, [(expert.rows, tokens) for expert, tokens in works])


def paged_operations(operations: model.Operations, selector: formats.Selector) -> PagedOperations:
    """Returns the operations on experts in pages that go with those of the dense part."""
    if isinstance(operations, model.NativeOperations):
        return NativePagedOperations(selector, operations.kernels)
    return PagedOperations(selector)


_SHARE_MEMORY = 0.9  # the weight of the past in a layer's running mean of the share of neurons that run
_FORGETTING = 0.99  # so that rows are tried again after some hundred whole experts at most


class RunningShares:
    """The mean share of an expert's neurons that ran lately, by layer: it decides whether rows or whole experts come.

    A pass of many tokens runs more neurons of an expert than one token, so prefill and decode have means of their own.
    """

    def __init__(self, num_layers: int) -> None:
        self.is_decoding = False  # whether the running pass has one token; the owner of the passes sets it
        self._means = np.zeros((2, num_layers))

    def ran(self, layer_idx: int, share: float) -> None:
        """Adds the share of an expert's neurons that ran for any token of the pass."""
        means = self._means[int(self.is_decoding)]
        means[layer_idx] = _SHARE_MEMORY * means[layer_idx] + (1 - _SHARE_MEMORY) * share

    def is_below(self, layer_idx: int, cutover: float) -> bool:
        """Returns whether so few neurons of a layer's experts run that their rows are to be brought alone."""
        means = self._means[int(self.is_decoding)]
        if means[layer_idx] < cutover:
            return True
        means[layer_idx] *= _FORGETTING  # a whole expert does not say how many of its neurons run
        return False


class ExpertStore:
    """Experts of a pack in pages of the arena, and their reads. Owns both: `close` it.

    Args:    verify: whether experts are checked when they first arrive.   rows_below: the cutover, a share of neurons:
             if fewer of an expert's neurons run, only their rows are read; 0 for never.   gap_bytes: two rows are read
             together if no more bytes are between them.   has_selector: bool [L, E], the experts whose selectors stay
             in memory, as in the plan; None: no expert's does.
    """

    def __init__(
        self,
        pack: formats.Pack,
        operations: model.Operations,
        plan: budgets.BudgetPlan,
        open_reads: Callable[[NDArray[np.uint8]], Reads],
        verify: bool,
        rows_below: float = 0.0,
        gap_bytes: int = 0,
        has_selector: NDArray[np.bool_] | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.stall_ns = 0  # time that the computation waited for reads
        self.asked_bytes = 0  # of requested blocks
        self._trace = trace
        self._traced: dict[ExpertKey, int] = {}
        self._pack, self._verify = pack, verify
        self.operations = paged_operations(operations, pack.manifest.selector)
        # The same object if it can compute with some rows of an expert; None: experts are read whole.
        self.by_rows = self.operations if isinstance(self.operations, NativePagedOperations) else None
        self._gap_blocks = gap_bytes // formats.DISK_BLOCK_BYTES
        self._rows_below = 0.0 if self.by_rows is None else rows_below
        self.shares = RunningShares(len(pack.layout.experts))
        self._checked = np.zeros(pack.index.size.shape, bool)
        self._rows_checked: dict[ExpertKey, NDArray[np.bool_]] = {}
        self._experts: dict[ExpertKey, PagedExpert] = {}
        self._reading: dict[ExpertKey, tuple[Blocks, bool]] = {}  # blocks under way, and whether the selector is too
        self._arena = disk.PageArena(plan.num_pages, plan.page_bytes, plan.head_bytes, plan.selectors)
        if has_selector is None:
            has_selector = np.zeros(pack.index.size.shape, bool)
        assert self.by_rows is not None or not has_selector.any(), "torch needs whole experts"
        self._selectors = ResidentSelectors.laid_out(self._arena.memory, pack.layout, has_selector)
        with ExitStack() as opened:
            opened.callback(self._arena.close)
            self.reads = open_reads(self._arena.memory)
            opened.callback(self.reads.close)  # closed first: threads must not read into freed pages
            self._files = [self.reads.open(pack.folder / file.name) for file in pack.manifest.expert_files]
            opened.pop_all()

    def close(self) -> None:
        """Ends the reads and gives the pages back."""
        self.reads.close()
        self._experts.clear()
        self._arena.close()

    @property
    def peak_pages(self) -> int:
        """The most pages that experts had at once."""
        return self._arena.peak_pages

    def fetch(self, key: ExpertKey, urgent: bool) -> None:
        """Gives an expert its pages and begins to read it: whole, or its selector if few neurons probably run."""
        layer_idx = key.layer_idx
        layout = self._pack.layout.experts[layer_idx][key.expert]
        expert = PagedExpert(
            self._arena,
            layout,
            self._pack.manifest.selector,
            self._pack.spec.expert_function(layer_idx),
            float(self._pack.thresholds[key]),
            self._pack.layout.offsets[layer_idx][key.expert],
            self._pack.manifest.expert_files[layer_idx].name,
            self._selectors.rows(key, layout),
            self._rows_checked.setdefault(key, np.zeros(layout.num_rows, bool)),
        )
        self._experts[key] = expert
        blocks = expert.selector_blocks() if self._by_rows(key, expert) else expert.all_blocks()
        self._begin(key, expert.pieces(blocks), urgent)

    def evict(self, key: ExpertKey) -> None:
        """Ends an expert's read and takes its pages away."""
        self.stop(key)
        self._experts.pop(key).close()

    def stop(self, key: ExpertKey) -> None:
        """Ends the read of an expert, which stays resident with the bytes that it has."""
        expert = self._experts[key]
        if expert.ticket is None:
            return
        self.reads.cancel(expert.ticket)
        expert.ticket = None
        del self._reading[key]
        self._read_ended(key)

    def promote(self, key: ExpertKey) -> None:
        """Makes the read of a prefetched expert urgent: it overtakes all prefetches."""
        expert = self._experts[key]
        if expert.ticket is not None:
            self.reads.promote(expert.ticket)

    def is_here(self, key: ExpertKey) -> bool:
        """Returns whether an expert has all bytes that were requested."""
        expert = self._experts[key]
        return expert.ticket is None or self.reads.is_done(expert.ticket)

    def arrive(self, key: ExpertKey) -> PagedExpert:
        """Waits for the requested bytes of an expert and returns it, checked and with every row in one piece.

        Raises:  PackError if it is damaged or cannot be read.
        """
        expert = self._experts[key]
        if expert.ticket is None:
            return expert
        trace = None if self.reads.is_done(expert.ticket) else self._trace
        with nullcontext() if trace is None else trace.during("waiting for reads", _name(key)):
            started = time.perf_counter_ns()
            self.reads.wait(expert.ticket)
            self.stall_ns += time.perf_counter_ns() - started
        self._read_ended(key)
        expert.ticket = None
        blocks, with_selector = self._reading.pop(key)
        if with_selector:
            self._selectors.arrived(key)
        expert.arrived(blocks)
        self.operations.stitch(expert)
        self._check(key, expert)
        return expert

    def fetch_records(self, key: ExpertKey, neurons: NDArray[np.int32], urgent: bool) -> None:
        """Begins to read the records of some neurons of an expert, or all its missing blocks."""
        expert = self._experts[key]
        assert expert.ticket is None, "one read of an expert at a time"
        by_rows = len(neurons) < self._rows_below * expert.layout.num_rows
        pieces = expert.pieces_of_rows(neurons, self._gap_blocks) if by_rows else expert.pieces(expert.all_blocks())
        self._begin(key, pieces, urgent)

    def check_records(self, key: ExpertKey, neurons: NDArray[np.int32]) -> None:
        """Checks the records of some neurons that have not been checked before; raises as `PagedExpert.check_rows`."""
        if self._verify and not self._checked[key] and self.by_rows is not None:
            self._experts[key].check_rows(self.by_rows.kernels, neurons, key.expert)

    def _read_ended(self, key: ExpertKey) -> None:
        if self._trace is not None:
            self._trace.read_ends(_name(key), self._traced.pop(key))

    def _begin(self, key: ExpertKey, pieces: disk.Pieces, urgent: bool) -> None:
        """Requests pieces of an expert, and its selector if that stays in memory and was not read yet."""
        expert = self._experts[key]
        blocks, offsets, places, sizes = pieces
        num_bytes = len(blocks) * formats.DISK_BLOCK_BYTES
        place = self._selectors.place_to_read(key)
        if place is not None:
            size = whole_blocks(expert.layout.selector_bytes)
            offsets, places, sizes = np.r_[expert.offset, offsets], np.r_[place, places], np.r_[size, sizes]
            num_bytes += size
        if not num_bytes:
            return
        if self._trace is not None:
            self._traced[key] = self._trace.read_begins(_name(key), num_bytes, urgent)
        self.asked_bytes += num_bytes
        expert.ticket = self.reads.submit(self._files[key.layer_idx], offsets, places, sizes, urgent)
        self._reading[key] = blocks, place is not None

    def _by_rows(self, key: ExpertKey, expert: PagedExpert) -> bool:
        has_threshold = self._pack.thresholds[key] > 0 and expert.layout.selector is not None
        return bool(has_threshold and self._rows_below > 0 and self.shares.is_below(key.layer_idx, self._rows_below))

    def _check(self, key: ExpertKey, expert: PagedExpert) -> None:
        """Checks an extent when it is whole for the first time, and selector rows whenever they come alone."""
        if not self._verify or self._checked[key]:
            return
        if self.by_rows is not None and self._selectors.has(key):
            if self._selectors.to_check(key):
                expert.check_selector(self.by_rows.kernels, key.expert)
            if expert.is_whole:
                expert.check_all_rows(self.by_rows.kernels, key.expert)
                self._checked[key] = True
            return
        expected = int(self._pack.index.crc32[key])
        if expert.is_whole:
            if self.operations.checksum(expert) != expected:
                raise formats.PackError(
                    f"{expert.place}: expert {key.expert}: CRC-32 does not match its bytes; the file is damaged"
                )
            self._checked[key] = True
        elif self.by_rows is not None and not expert.is_selector_checked:
            expert.check_selector(self.by_rows.kernels, key.expert)


def _name(key: ExpertKey) -> str:
    return f"layer {key.layer_idx} expert {key.expert}"
