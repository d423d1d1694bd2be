"""How experts' extents lie in pages of the device: every row in one page, so that a table of offsets finds each."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import ExpertLayout, PackLayout
from moe_pack.runtime.budget import best_page_bytes

UNIT_BYTES = 16  # what rows are found in units of
_LEAST_PAGE_BYTES, _MOST_PAGE_BYTES = 64 << 10, 4 << 20
# What a link moves in the time that asking for one more copy takes: 10 us at 25 GB/s, assumed.
_COPY_BYTES = 256 << 10
_MOST_UNITS = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class PagePlan:
    """Where an extent's rows come to lie: page p holds its bytes `begins[p]` to `ends[p]`.

    `selector`, `records`: int64 [f] (`selector` int64 [0] where none is stored), where each row lies if the expert's
    pages are laid one after the other.
    """

    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    selector: NDArray[np.int64]
    records: NDArray[np.int64]


@lru_cache(maxsize=64)
def page_plan(layout: ExpertLayout, page_bytes: int) -> PagePlan:
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
    return PagePlan(np.array(begins), np.array(ends), places[:num_selector], places[num_selector:])


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
