"""The arena, which is the CPU's fast memory for experts, and the pieces of files that are read into it."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.formats.base import anonymous_memory
from moe_pack.runtime import cpu
from moe_pack.runtime.cpu.reads import Numbers


class PageArena:
    """`num_pages` pages of `page_bytes`, each after a head of `head_bytes`, in one anonymous mapping.

    A head is for the beginning of a row that ends in the page, so that kernels have every row in one piece
    (`Kernels.stitch`). All sizes are whole disk blocks.
    Args:    front_bytes: before the pages, for what stays.
    Raises:  RunError if the memory cannot be allocated.
    """

    def __init__(self, num_pages: int, page_bytes: int, head_bytes: int, front_bytes: int = 0) -> None:
        assert num_pages > 0 and head_bytes > 0, "pages, and heads"
        assert not any(size % formats.DISK_BLOCK_BYTES for size in (page_bytes, head_bytes, front_bytes)), (
            "whole blocks"
        )
        self.num_pages, self.page_bytes, self.head_bytes = num_pages, page_bytes, head_bytes
        self.slot_bytes = page_bytes + head_bytes
        self._front_bytes = front_bytes
        num_bytes = front_bytes + num_pages * self.slot_bytes
        try:
            pages = anonymous_memory(num_bytes)
        except (OSError, OverflowError) as fault:
            raise formats.RunError(
                f"--budget: cannot allocate {num_bytes:,} bytes ({fault}); give a smaller budget"
            ) from fault
        # No huge pages: a virtual machine may need seconds for each gigabyte that it gets back from its host.
        self.memory: NDArray[np.uint8] = np.frombuffer(pages, np.uint8)
        self._free = list(range(num_pages - 1, -1, -1))
        self.peak_pages = 0  # the most that were taken at once

    def take(self, count: int) -> NDArray[np.int32]:
        """Returns the slots of `count` pages, int32 [count], which belong to the caller until `give`."""
        assert count <= len(self._free), "the cache evicts before it fetches"
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        self.peak_pages = max(self.peak_pages, self.num_pages - len(self._free))
        return np.array(taken[::-1], np.int32)

    def give(self, slots: NDArray[np.int32]) -> None:
        """Gives pages back to the arena."""
        self._free += slots[::-1].tolist()

    def rows(self, slots: NDArray[np.int32], begin: int) -> cpu.PagedRows:
        """Returns the rows from byte `begin` of the extent in these pages, for the kernels."""
        pages = self.memory[self._front_bytes :]
        return cpu.PagedRows(pages, slots, self.slot_bytes, self.head_bytes, self.page_bytes, begin)

    def places(self, slots: NDArray[np.int32]) -> NDArray[np.int64]:
        """Returns the positions in `memory` where pages begin: int64 [n]."""
        return self._front_bytes + slots.astype(np.int64) * self.slot_bytes + self.head_bytes

    def close(self) -> None:
        """Drops the memory, which is freed with the last array that refers to it."""
        self.memory = np.empty(0, np.uint8)


if cpu.is_available():
    import moe_pack.runtime.cpu._native as _native


class Pieces(NamedTuple):
    """Pieces to read: blocks of an extent, rising; offsets in the file, positions in memory, sizes. All are int64."""

    blocks: Numbers
    offsets: Numbers
    places: Numbers
    sizes: Numbers


def pieces_of_rows(
    neurons: NDArray[np.int32],
    has_block: NDArray[np.bool_],
    page_places: Numbers,
    begin: int,
    row_bytes: int,
    first_block: int,
    page_blocks: int,
    gap_blocks: int,
    offset: int,
) -> Pieces:
    """Returns the pieces with the missing blocks of some rows, by the extension.

    Args:    neurons: int32 [n], rising, the rows.   has_block: bool [blocks], those of the extent that are there.
             page_places: int64 [pages], the positions in memory of the pages, each of `page_blocks` blocks from
             `first_block` on.   begin: of row 0 in the extent.   gap_blocks: gaps of at most so many blocks are read
             too.   offset: of the extent in its file.
    Raises:  ValueError if a row is not in the extent.
    """
    found = _native.row_pieces(
        neurons, has_block, page_places, begin, row_bytes, first_block, page_blocks, gap_blocks, offset
    )
    return Pieces(*(np.frombuffer(part, np.int64) for part in found))
