"""An expert's extent in pages of the arena: which of its blocks are there, and what can be computed from them.

Blocks are what drives are read in, DISK_BLOCK_BYTES of the extent each. Nothing is read here: `streaming` does that.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import DISK_BLOCK_BYTES, ExpertLayout, NeuronFunction, PackError, RowLayout, Selector
from moe_pack.runtime.arena import PageArena
from moe_pack.runtime.expert import NeuronBlock
from moe_pack.runtime.native_kernels import ExpertRows, Kernels, PagedRows, expert_numbers
from moe_pack.runtime.packed_expert import PackedExpert

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
