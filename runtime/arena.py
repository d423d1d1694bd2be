"""Fast memory without a GPU: one anonymous mapping in pages, which experts' extents are read into.

Page p of an extent holds `page_bytes` of it, behind room for the beginning of a row that ends in it, so that every row
can be had in one piece (`Kernels.stitch`). Nothing is allocated after the arena is.
"""

import mmap

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import DISK_BLOCK_BYTES, RunError
from moe_pack.runtime.native_kernels import PagedRows


class PageArena:
    """`num_pages` pages of `page_bytes` each, with `head_bytes` of room before each; both whole disk blocks.

    `memory` is all of it, u8.   `peak_pages`: the most that were taken at once.
    Raises:  RunError if there is not so much memory.
    """

    def __init__(self, num_pages: int, page_bytes: int, head_bytes: int) -> None:
        assert num_pages > 0 and head_bytes > 0, "pages, and heads"
        assert page_bytes % DISK_BLOCK_BYTES == head_bytes % DISK_BLOCK_BYTES == 0, "whole blocks"
        self.num_pages, self.page_bytes, self.head_bytes = num_pages, page_bytes, head_bytes
        self.slot_bytes = page_bytes + head_bytes
        try:
            pages = mmap.mmap(-1, num_pages * self.slot_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as fault:
            raise RunError(f"--budget: {num_pages * self.slot_bytes:,} bytes cannot be had ({fault})") from fault
        # Huge pages are not asked for: a virtual machine may take seconds a gigabyte to get them back from its host.
        self.memory: NDArray[np.uint8] = np.frombuffer(pages, np.uint8)
        self._free = list(range(num_pages - 1, -1, -1))
        self.peak_pages = 0  # that were taken at once

    def take(self, count: int) -> NDArray[np.int32]:
        """The slots of `count` pages, which are the caller's until given back: int32 [count]."""
        assert count <= len(self._free), "the budget is kept by whoever asks"
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        self.peak_pages = max(self.peak_pages, self.num_pages - len(self._free))
        return np.array(taken[::-1], np.int32)

    def give(self, slots: NDArray[np.int32]) -> None:
        """Takes pages back."""
        self._free += slots[::-1].tolist()

    def rows(self, slots: NDArray[np.int32], begin: int) -> PagedRows:
        """Rows from byte `begin` on of the extent in these pages, as the kernels see them."""
        return PagedRows(self.memory, slots, self.slot_bytes, self.head_bytes, self.page_bytes, begin)

    def places(self, slots: NDArray[np.int32]) -> NDArray[np.int64]:
        """Where in `memory` pages' bytes begin: int64 [n]."""
        return slots.astype(np.int64) * self.slot_bytes + self.head_bytes

    def close(self) -> None:
        """Lets go of the memory, which goes with the last array that refers to it."""
        self.memory = np.empty(0, np.uint8)
