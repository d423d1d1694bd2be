"""The experts that are in pages, or on their way: fetched whole or by rows, checked when they first arrive.

What is fetched and dropped is `Residency`'s to decide; what is computed, `streaming`'s.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import DISK_BLOCK_BYTES, Pack, PackError
from moe_pack.runtime.arena import PageArena
from moe_pack.runtime.budget import BudgetPlan
from moe_pack.runtime.operations import Operations
from moe_pack.runtime.paged_expert import Blocks, PagedExpert
from moe_pack.runtime.paged_operations import NativePagedOperations, paged_operations
from moe_pack.runtime.reads import Reads
from moe_pack.runtime.residency import Key
from moe_pack.runtime.trace import Trace

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
        self._traced: dict[Key, int] = {}
        self._pack, self._verify = pack, verify
        self.operations = paged_operations(operations, pack.spec.expert.function, pack.manifest.selector)
        self.by_rows = self.operations if isinstance(self.operations, NativePagedOperations) else None
        self._gap_blocks = gap_bytes // DISK_BLOCK_BYTES
        self._rows_below = 0.0 if self.by_rows is None else rows_below
        self._share_running = np.zeros(len(pack.layout.experts))
        self._checked = np.zeros(pack.index.size.shape, bool)
        self._held: dict[Key, PagedExpert] = {}
        self._reading: dict[Key, Blocks] = {}
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

    def fetch(self, key: Key, urgent: bool) -> None:
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

    def drop(self, key: Key) -> None:
        """Takes an expert's pages back, and ends its read."""
        self.stop(key)
        self._held.pop(key).close()

    def stop(self, key: Key) -> None:
        """Ends what is being read of an expert, which stays with what it has."""
        held = self._held[key]
        if held.ticket is None:
            return
        self._reads.cancel(held.ticket)
        held.ticket = None
        del self._reading[key]
        self._read_ended(key)

    def promote(self, key: Key) -> None:
        """Reads an expert, whose turn it was not, before all that is not needed yet."""
        held = self._held[key]
        if held.ticket is not None:
            self._reads.promote(held.ticket)

    def is_here(self, key: Key) -> bool:
        """Whether nothing of what was asked for of an expert is still to come."""
        held = self._held[key]
        return held.ticket is None or self._reads.is_done(held.ticket)

    def arrive(self, key: Key) -> PagedExpert:
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

    def running(self, key: Key, share: float) -> None:
        """Takes note of the share of an expert's neurons that ran."""
        mean = self._share_running[key.layer_idx]
        self._share_running[key.layer_idx] = _SHARE_MEMORY * mean + (1 - _SHARE_MEMORY) * share

    def fetch_records(self, key: Key, neurons: NDArray[np.int32], urgent: bool) -> None:
        """Begins to read the records of some neurons of an expert that is there in part, or all it lacks."""
        held = self._held[key]
        assert held.ticket is None, "one read of an expert at a time"
        if len(neurons) < self._rows_below * held.layout.num_rows:
            blocks = held.missing(_bridged(held.record_blocks(neurons), self._gap_blocks))
        else:
            blocks = held.missing(held.all_blocks())
        if len(blocks):
            self._begin(key, blocks, urgent)

    def check_records(self, key: Key, neurons: NDArray[np.int32]) -> None:
        """Checks the records of some neurons, where they have not been.

        Raises:  PackError naming a row that is damaged.
        """
        if self._verify and not self._checked[key] and self.by_rows is not None:
            self.by_rows.check_rows(self._held[key], neurons, key.expert)

    def _wait(self, ticket: int) -> None:
        started = time.perf_counter_ns()
        self._reads.wait(ticket)
        self.stall_ns += time.perf_counter_ns() - started

    def _read_ended(self, key: Key) -> None:
        if self._trace is not None:
            self._trace.read_ends(_name(key), self._traced.pop(key))

    def _begin(self, key: Key, blocks: Blocks, urgent: bool) -> None:
        held = self._held[key]
        if self._trace is not None:
            self._traced[key] = self._trace.read_begins(_name(key), len(blocks) * DISK_BLOCK_BYTES, urgent)
        self.asked_bytes += len(blocks) * DISK_BLOCK_BYTES
        held.ticket = self._reads.submit(self._files[key.layer_idx], *held.pieces(blocks), urgent)
        self._reading[key] = blocks

    def _by_rows(self, key: Key, held: PagedExpert) -> bool:
        has_threshold = self._pack.thresholds[key] > 0 and held.layout.selector is not None
        return bool(has_threshold and self._share_running[key.layer_idx] < self._rows_below)

    def _check(self, key: Key, held: PagedExpert) -> None:
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


def _name(key: Key) -> str:
    return f"layer {key.layer_idx} expert {key.expert}"


def _bridged(blocks: Blocks, gap_blocks: int) -> Blocks:
    """Blocks (rising) with those between that are read over, where they are few."""
    gaps = np.diff(blocks) - 1
    over = np.flatnonzero((gaps > 0) & (gaps <= gap_blocks))
    between = [np.arange(blocks[place] + 1, blocks[place + 1]) for place in over.tolist()]
    return np.sort(np.concatenate([blocks, *between])) if between else blocks
