"""Which rows of experts are resident on a GPU for the whole run, and how many pages each layer has for the others.

Only numbers: nothing is allocated here. The fractional knapsack of `runtime.offload.budget` chooses resident rows, in
whole selectors and whole records. A layer's pages have space for all experts of one token, so that the device only has
to know which experts were used least recently.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import ExpertLayout, PackLayout, RunError, size_text
from moe_pack.runtime.gpu.device import LINE_BYTES
from moe_pack.runtime.offload import GPU_PAGE_BYTES, FixedParts, MemoryNeeds, best_page_bytes, divide
from moe_pack.runtime.offload.budget import resident_rows

Array = NDArray[Any]

REACH_BYTES = 16 * (2**31 - 1)  # the largest arena: offsets are int32 in units of 16 bytes
PAGE_SHARE = 0.25  # of the memory for experts; not tuned
_LEAST_PAGE_BYTES, _PAGE_STEP = 4096, 4096
# If both uses of pages are estimated to be about equal, pages that keep experts are better, because routes repeat.
_REPEATED = 1.1
_NUM_SLICES = 64  # of an expert's rows; those of a slice are read equally often
_FEWEST_PAGES = 4  # of the smallest expert; larger pages waste more


@dataclass(frozen=True, slots=True, eq=False)
class GpuPlacement:
    """The division of the GPU's memory for L layers of E experts with f neurons.

    `selector_is_dynamic` bool [L, E].   `first_dynamic` int64 [L, E]: the records before it, the hottest, are resident.
    `num_pages_of` int64 [L, E]: pages of an expert.   `num_pages` int64 [L].   `num_active`: experts of a token.
    `resident_bytes` int64 [L]: of resident rows as they are laid out.   `other_bytes`: of tables and the state of the
    cache.   `is_shared`: whether all layers use the same pages and keep nothing in them, so that every token copies all
    dynamic rows that it needs.
    """

    selector_is_dynamic: Array
    first_dynamic: Array
    num_pages_of: Array
    num_pages: Array
    page_bytes: int
    num_active: int
    resident_bytes: Array
    other_bytes: int
    is_shared: bool

    @property
    def pages_bytes(self) -> int:
        """The bytes of all pages."""
        return int(self.num_pages.max() if self.is_shared else self.num_pages.sum()) * self.page_bytes

    @property
    def num_bytes(self) -> int:
        """All memory of the GPU for experts."""
        return int(self.resident_bytes.sum()) + self.pages_bytes + self.other_bytes

    def link_bytes(self, layout: PackLayout, popularity: Array, heat: Array) -> float:
        """Returns the estimated bytes that a token copies: its experts' dynamic rows, as often as they run.

        A layer's own pages are assumed to keep as large a share of its dynamic rows as fits into them.
        Args:    popularity, heat: as for `place_experts`.
        """
        rows, f = _row_sizes(layout), layout.experts[0][0].num_rows
        chances = self.num_active * popularity / popularity.sum(axis=1, keepdims=True)
        edges = np.linspace(0, f, heat.shape[2] + 1)
        dynamic = np.clip(edges[1:] - np.maximum(edges[:-1], self.first_dynamic[:, :, None]), 0, None)
        read = (dynamic * heat).sum(axis=2) * rows[:, :, 1] + self.selector_is_dynamic * f * rows[:, :, 0]
        kept = 0.0 if self.is_shared else self.num_pages / np.maximum(self.num_pages_of.sum(axis=1), 1)
        return float(((chances * read).sum(axis=1) * (1 - np.minimum(kept, 1.0))).sum())


def place_experts(
    layout: PackLayout,
    expert_bytes: int,
    popularity: Array | None = None,
    heat: Array | None = None,
    page_share: float = PAGE_SHARE,
) -> GpuPlacement:
    """Divides a GPU's memory for experts between resident rows and pages.

    Meaning: all experts are resident, if they fit. Otherwise each layer has its own pages, `page_share` of the memory
             or the least for one token's experts, and the rows that are read most are resident; or all layers share the
             pages of one token's experts, which keep nothing, and more rows are resident. The division with fewer
             estimated bytes a token over the link is returned.
    Args:    popularity: [L, E], in any unit; None: all equal.   heat: [L, E, H], as for `divide_gpu`; None: all rows
             are read equally often.
    Raises:  RunError if one token's experts of a layer do not fit; it says what is needed.
    """
    shape = (len(layout.experts), len(layout.experts[0]))
    popularity = np.ones(shape) if popularity is None else popularity
    heat = np.ones((*shape, 1)) if heat is None else np.minimum.accumulate(heat, axis=2)  # hottest first
    sizes = _ExpertSizes.of(layout)
    whole, least = sizes.whole(), sizes.least(is_shared=True)
    needs = sizes.needs(whole, least)
    available = divide(expert_bytes, needs).experts
    if available >= needs.all_experts:
        return whole
    if available < needs.least_experts:
        raise RunError(
            f"--engine graph: {size_text(expert_bytes)} of the GPU are left for experts, which need at least "
            f"{size_text(least.num_bytes)}: {size_text(least.pages_bytes)} for the {least.num_active} largest experts "
            f"of a layer, and {size_text(least.other_bytes)} for tables; give more with --budget, or use "
            "--engine staged"
        )
    shared = sizes.shared_pages(layout, min(expert_bytes, REACH_BYTES), popularity, heat)
    own = sizes.own_pages(layout, expert_bytes, popularity, heat, page_share)
    if own is None:
        return shared
    bytes_shared, bytes_own = (placement.link_bytes(layout, popularity, heat) for placement in (shared, own))
    return own if bytes_own <= _REPEATED * bytes_shared else shared


def usual_heat(layout: PackLayout, thresholds: Array) -> Array:
    """Returns how often rows are read, if it was not measured: [L, E, H], as for `divide_gpu`.

    Rows lie hottest first, so the frequency is assumed to fall evenly. Without a selector or a threshold all are read.
    Args:    thresholds: [L, E].
    """
    falling = (np.arange(_NUM_SLICES, 0, -1) - 0.5) / _NUM_SLICES
    drops = (thresholds > 0) & (layout.experts[0][0].selector is not None)
    return np.where(drops[:, :, None], falling, 1.0)


def least_placement(layout: PackLayout) -> GpuPlacement:
    """Returns the placement with the least memory: no resident rows, and pages for one token's experts of a layer."""
    return _ExpertSizes.of(layout).least(is_shared=True)


@dataclass(frozen=True, slots=True, eq=False)
class _ExpertSizes:
    """Sizes of experts' rows, [L, E] in bytes, and the placements that follow from them."""

    selector_rows: Array
    record_rows: Array
    num_rows: int
    page_bytes: int
    num_active: int
    extra_bytes: int

    @classmethod
    def of(cls, layout: PackLayout) -> "_ExpertSizes":
        rows = _row_sizes(layout)
        num_rows = layout.experts[0][0].num_rows
        page_bytes = page_bytes_for(rows.reshape(-1, 2), num_rows)
        num_active = layout.spec.router.num_experts_per_tok
        extra_bytes = layout.experts[0][0].extra_bytes
        return cls(rows[:, :, 0], rows[:, :, 1], num_rows, page_bytes, num_active, extra_bytes)

    @property
    def other_bytes(self) -> int:
        """Bytes of tables and states: two offsets a row at most, biases of down, kinds, lists of pages, counters."""
        L, E = self.record_rows.shape
        offsets: int = 4 * self.num_rows * L * E * (1 + bool(self.selector_rows.any()))
        most_pages = int(_pages(self.selector_rows, self.num_rows, self.page_bytes).max())
        most_pages += int(_pages(self.record_rows, self.num_rows, self.page_bytes).max())
        # A layer has 15 tensors, each beginning on a line of its own, most with one number an expert. The list of free
        # pages is no longer than the largest layer's lists of pages together.
        others = L * (16 * LINE_BYTES + 48 * E)
        lists = 8 * L * E * max(most_pages, 1)
        return int(offsets + lists + others + self.extra_bytes * L * E)

    def needs(self, whole: GpuPlacement, least: GpuPlacement) -> MemoryNeeds:
        """Returns the engine's needs of memory for experts: tables, and at least one token's experts of a layer."""
        tables = FixedParts(tables=self.other_bytes)
        largest, all_experts = least.num_bytes - self.other_bytes, whole.num_bytes - self.other_bytes
        return MemoryNeeds(lambda _: tables, 1, 1, largest, all_experts, usual_share=1)

    def whole(self) -> GpuPlacement:
        """Returns the placement with all experts resident."""
        shape = self.record_rows.shape
        return self.placement(np.zeros(shape, bool), np.full(shape, self.num_rows), is_shared=False)

    def least(self, is_shared: bool) -> GpuPlacement:
        """Returns the placement without resident rows."""
        return self.placement(self.selector_rows > 0, np.zeros_like(self.selector_rows), is_shared)

    def with_resident(self, selector_share: Array, row_shares: Array, is_shared: bool) -> GpuPlacement:
        """Returns the placement with the shares of `resident_rows`, in whole selectors and first records."""
        H = row_shares.shape[2]
        edges = np.diff(np.linspace(0, self.num_rows, H + 1).astype(np.int64))
        records = np.rint(row_shares * edges).astype(np.int64)
        is_full = np.cumprod(records == edges, axis=2)
        before = np.concatenate([np.ones_like(is_full[:, :, :1]), is_full[:, :, :-1]], axis=2)
        first = (records * before).sum(axis=2)
        return self.placement((selector_share < 1) & (self.selector_rows > 0), first, is_shared)

    def placement(self, selector_is_dynamic: Array, first_dynamic: Array, is_shared: bool) -> GpuPlacement:
        """Returns the placement with these dynamic rows, and pages for one token's largest experts."""
        f = self.num_rows
        num_pages_of = np.where(selector_is_dynamic, _pages(self.selector_rows, f, self.page_bytes), 0)
        num_pages_of += _pages(self.record_rows, f - first_dynamic, self.page_bytes)
        resident = np.where(selector_is_dynamic, 0, self.selector_rows * f) + first_dynamic * self.record_rows
        num_pages = np.sort(num_pages_of, axis=1)[:, -self.num_active :].sum(axis=1)
        return GpuPlacement(
            selector_is_dynamic,
            first_dynamic,
            num_pages_of,
            np.full_like(num_pages, num_pages.max()) if is_shared else num_pages,
            self.page_bytes,
            self.num_active,
            (-(-resident // LINE_BYTES) * LINE_BYTES).sum(axis=1),
            self.other_bytes,
            is_shared,
        )

    def shared_pages(self, layout: PackLayout, num_bytes: int, popularity: Array, heat: Array) -> GpuPlacement:
        """Returns the placement in which all layers share the pages of one token's experts."""
        return self._hottest(layout, num_bytes, self.least(is_shared=True).pages_bytes, popularity, heat, True)

    def own_pages(
        self, layout: PackLayout, num_bytes: int, popularity: Array, heat: Array, page_share: float
    ) -> GpuPlacement | None:
        """Returns the placement with pages for each layer; None if one token's experts of all layers do not fit."""
        least = self.least(is_shared=False)
        if least.num_bytes > num_bytes:
            return None
        # Resident rows take no pages, so pages for a token's experts suffice with any of them.
        pages = max(least.pages_bytes, int(page_share * num_bytes))
        hottest = self._hottest(layout, num_bytes, pages, popularity, heat, False)
        return self.with_more_pages(hottest, num_bytes - hottest.num_bytes)

    def _hottest(
        self, layout: PackLayout, num_bytes: int, pages: int, popularity: Array, heat: Array, is_shared: bool
    ) -> GpuPlacement:
        """Returns the placement whose resident rows are those read most, next to so many bytes of pages."""
        L, E = self.record_rows.shape
        # `resident_rows` itself leaves memory for biases.
        slack = LINE_BYTES * L * E + self.other_bytes - self.extra_bytes * L * E
        return self.with_resident(
            *resident_rows(layout, popularity, heat, max(num_bytes - slack - pages, 0))[:2], is_shared
        )

    def with_more_pages(self, placement: GpuPlacement, num_bytes: int) -> GpuPlacement:
        """Returns a placement with more pages for its layers, in so many bytes that are left."""
        more = placement.num_pages_of.sum(axis=1) - placement.num_pages
        num_more = min(num_bytes // self.page_bytes, int(more.sum()))
        shares = num_more * more // max(int(more.sum()), 1)
        return replace(placement, num_pages=placement.num_pages + shares)


def page_bytes_for(row_bytes: Array, num_rows: int) -> int:
    """Returns the bytes of a page that waste least over experts with so many rows; of equally good sizes the largest.

    Rows never straddle pages.
    Args:    row_bytes: int64 [n, 2], of selector rows (0 for none) and records of each expert.
    """
    kinds, counts = np.unique(row_bytes, axis=0, return_counts=True)
    least = -(-max(int(kinds.max()), _LEAST_PAGE_BYTES) // _PAGE_STEP) * _PAGE_STEP
    most = min(GPU_PAGE_BYTES, int(kinds.sum(axis=1).min()) * num_rows // _FEWEST_PAGES)
    sizes = np.arange(least, max(most, least) + 1, _PAGE_STEP)[::-1]
    costs = [int((_pages(kinds, num_rows, size).sum(axis=1) * counts).sum()) * size for size in sizes.tolist()]
    return best_page_bytes(sizes, np.array(costs), tolerance=1.01)  # smaller pages make longer lists


def _pages(row_bytes: Array, num_rows: Array | int, page_bytes: int) -> Array:
    """Returns the pages for so many rows, of which none straddles two pages."""
    pages: Array = -(-num_rows // (page_bytes // np.maximum(row_bytes, 1))) * (row_bytes > 0)
    return pages


def _row_sizes(layout: PackLayout) -> Array:
    """Returns the bytes of selector rows (0 for none) and of records: int64 [L, E, 2]."""
    return np.array([[_row_bytes(expert) for expert in layer] for layer in layout.experts], np.int64)


def _row_bytes(expert: ExpertLayout) -> tuple[int, int]:
    return expert.selector.row_bytes if expert.selector else 0, expert.records.row_bytes
