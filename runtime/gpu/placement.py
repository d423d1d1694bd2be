"""What of a pack's experts is always on a card, and how many pages each layer has for the rest.

Numbers alone: nothing is allocated here. What is held is `card_budget`'s fractional knapsack, in whole selectors and
whole records; a layer's pages hold the most that one token can need of it, so that the device never has to decide more
than who was used least recently.
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

REACH_BYTES = 16 * (2**31 - 1)  # of an arena: offsets are int32 in units of 16 bytes
PAGE_SHARE = 0.25  # of the room for experts, where nobody has found a better one
_LEAST_PAGE_BYTES, _PAGE_STEP = 4096, 4096
# Where the two ways to use pages are expected to be about equal, pages that keep experts are better: routes repeat.
_REPEATED = 1.1
_NUM_SLICES = 64  # of an expert's rows, of like heat
_FEWEST_PAGES = 4  # of the smallest expert: larger pages would waste more


@dataclass(frozen=True, slots=True, eq=False)
class GpuPlacement:
    """Where experts are to be; L layers of E experts of f neurons.

    `selector_is_dynamic` bool [L, E]; `first_dynamic` int64 [L, E]: the records before it, the hottest, are always
    there.   `num_pages_of` int64 [L, E]: what an expert takes when it is in.   `num_pages` int64 [L].   `num_active`:
    experts of a token.   `resident_bytes` int64 [L]: of what is always there, as it is laid out.
    `other_bytes`: of the tables and of who has which pages.   `is_shared`: all layers use the same pages, and keep
    nothing in them: what is not always there is pulled for every token.
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
        """Of all pages."""
        return int(self.num_pages.max() if self.is_shared else self.num_pages.sum()) * self.page_bytes

    @property
    def num_bytes(self) -> int:
        """All that the card needs for experts."""
        return int(self.resident_bytes.sum()) + self.pages_bytes + self.other_bytes

    def link_bytes(self, layout: PackLayout, popularity: Array, heat: Array) -> float:
        """Bytes that a token is expected to pull: its experts' dynamic rows, as often as they run.

        Pages of a layer's own are taken to keep the share of its dynamic rows that they hold.
        Args:    popularity, heat: as `place_experts` takes them.
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
    room_bytes: int,
    popularity: Array | None = None,
    heat: Array | None = None,
    page_share: float = PAGE_SHARE,
) -> GpuPlacement:
    """How so much room on a card is used for experts.

    Meaning: all of them, where they fit. Else each layer has pages of its own, `page_share` of the room and what one
             token's experts need at least, and more is there of what is read most; or all layers share one token's
             pages, which keep nothing, and more is always there: of the two, what is expected to take fewer bytes a
             token over the link.
    Args:    popularity: [L, E], any unit; None: all alike.   heat: [L, E, H], as `divide_card` takes it; None: all
             rows are read.
    Raises:  RunError if one token's experts of a layer have no room; it says what is needed.
    """
    shape = (len(layout.experts), len(layout.experts[0]))
    popularity = np.ones(shape) if popularity is None else popularity
    heat = np.ones((*shape, 1)) if heat is None else np.minimum.accumulate(heat, axis=2)  # hottest first
    sizes = _ExpertSizes.of(layout)
    whole, least = sizes.whole(), sizes.least(is_shared=True)
    needs = sizes.needs(whole, least)
    room = divide(room_bytes, needs).experts
    if room >= needs.all_experts:
        return whole
    if room < needs.least_experts:
        raise RunError(
            f"{size_text(room_bytes)} for experts on the card, needed are at least {size_text(least.num_bytes)}: "
            f"{size_text(least.pages_bytes)} for the {least.num_active} largest experts of a layer, and "
            f"{size_text(least.other_bytes)} for tables; give more with --budget, or take --engine staged"
        )
    shared = sizes.shared_pages(layout, min(room_bytes, REACH_BYTES), popularity, heat)
    own = sizes.own_pages(layout, room_bytes, popularity, heat, page_share)
    if own is None:
        return shared
    bytes_shared, bytes_own = (placement.link_bytes(layout, popularity, heat) for placement in (shared, own))
    return own if bytes_own <= _REPEATED * bytes_shared else shared


def usual_heat(layout: PackLayout, thresholds: Array) -> Array:
    """How often rows are read where nobody has counted: [L, E, H], as `divide_card` takes it.

    Rows lie hottest first, so that it is taken to fall evenly; without a selector, or a threshold, all are read.
    Args:    thresholds: [L, E].
    """
    falling = (np.arange(_NUM_SLICES, 0, -1) - 0.5) / _NUM_SLICES
    drops = (thresholds > 0) & (layout.experts[0][0].selector is not None)
    return np.where(drops[:, :, None], falling, 1.0)


def least_placement(layout: PackLayout) -> GpuPlacement:
    """Nothing always there, and pages for what one token needs: the least room that experts can run in."""
    return _ExpertSizes.of(layout).least(is_shared=True)


@dataclass(frozen=True, slots=True, eq=False)
class _ExpertSizes:
    """Experts' sizes, [L, E] in bytes, and what follows from what is held of them."""

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
        """Of tables and states: two offsets a row at most, biases of down, kinds, lists of pages, counters."""
        L, E = self.record_rows.shape
        offsets: int = 4 * self.num_rows * L * E * (1 + bool(self.selector_rows.any()))
        most_pages = int(_pages(self.selector_rows, self.num_rows, self.page_bytes).max())
        most_pages += int(_pages(self.record_rows, self.num_rows, self.page_bytes).max())
        # A layer has 15 tensors, each on a line of its own, most of one number an expert; the list of free pages is no
        # longer than the largest layer's lists of pages together.
        others = L * (16 * LINE_BYTES + 48 * E)
        lists = 8 * L * E * max(most_pages, 1)
        return int(offsets + lists + others + self.extra_bytes * L * E)

    def needs(self, whole: GpuPlacement, least: GpuPlacement) -> MemoryNeeds:
        """What the engine needs of its room for experts: tables, and one token's experts of a layer at least."""
        tables = FixedParts(tables=self.other_bytes)
        largest, all_experts = least.num_bytes - self.other_bytes, whole.num_bytes - self.other_bytes
        return MemoryNeeds(lambda _: tables, 1, 1, largest, all_experts, usual_share=1)

    def whole(self) -> GpuPlacement:
        """All experts always there."""
        shape = self.record_rows.shape
        return self.placement(np.zeros(shape, bool), np.full(shape, self.num_rows), is_shared=False)

    def least(self, is_shared: bool) -> GpuPlacement:
        """Nothing always there."""
        return self.placement(self.selector_rows > 0, np.zeros_like(self.selector_rows), is_shared)

    def held(self, selector_share: Array, row_shares: Array, is_shared: bool) -> GpuPlacement:
        """What `resident_rows` found, in whole selectors and in records from the first on."""
        H = row_shares.shape[2]
        edges = np.diff(np.linspace(0, self.num_rows, H + 1).astype(np.int64))
        records = np.rint(row_shares * edges).astype(np.int64)
        is_full = np.cumprod(records == edges, axis=2)
        before = np.concatenate([np.ones_like(is_full[:, :, :1]), is_full[:, :, :-1]], axis=2)
        first = (records * before).sum(axis=2)
        return self.placement((selector_share < 1) & (self.selector_rows > 0), first, is_shared)

    def placement(self, selector_is_dynamic: Array, first_dynamic: Array, is_shared: bool) -> GpuPlacement:
        """With as many pages as a token needs at most."""
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

    def shared_pages(self, layout: PackLayout, room: int, popularity: Array, heat: Array) -> GpuPlacement:
        """With one token's pages, which all layers use in turn."""
        return self._hottest(layout, room, self.least(is_shared=True).pages_bytes, popularity, heat, True)

    def own_pages(
        self, layout: PackLayout, room: int, popularity: Array, heat: Array, page_share: float
    ) -> GpuPlacement | None:
        """With pages of each layer's own; None where one token's experts of each have no room."""
        least = self.least(is_shared=False)
        if least.num_bytes > room:
            return None
        # Pages for a token's experts suffice whatever is always there: it takes none.
        pages = max(least.pages_bytes, int(page_share * room))
        hottest = self._hottest(layout, room, pages, popularity, heat, False)
        return self.shared_out(hottest, room - hottest.num_bytes)

    def _hottest(
        self, layout: PackLayout, room: int, pages: int, popularity: Array, heat: Array, is_shared: bool
    ) -> GpuPlacement:
        """What is read most beside so many bytes of pages."""
        L, E = self.record_rows.shape
        # `resident_rows` leaves room for biases itself.
        slack = LINE_BYTES * L * E + self.other_bytes - self.extra_bytes * L * E
        return self.held(*resident_rows(layout, popularity, heat, max(room - slack - pages, 0))[:2], is_shared)

    def shared_out(self, held: GpuPlacement, room: int) -> GpuPlacement:
        """With the pages of the room that is left, too."""
        more = held.num_pages_of.sum(axis=1) - held.num_pages
        num_more = min(room // self.page_bytes, int(more.sum()))
        shares = num_more * more // max(int(more.sum()), 1)
        return replace(held, num_pages=held.num_pages + shares)


def page_bytes_for(row_bytes: Array, num_rows: int) -> int:
    """The bytes of a page that wastes least over experts with so many rows; of equally good ones the largest.

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
    """Pages for so many rows, of which none straddles two."""
    pages: Array = -(-num_rows // (page_bytes // np.maximum(row_bytes, 1))) * (row_bytes > 0)
    return pages


def _row_sizes(layout: PackLayout) -> Array:
    """Bytes of selector rows (0 for none) and of records: int64 [L, E, 2]."""
    return np.array([[_row_bytes(expert) for expert in layer] for layer in layout.experts], np.int64)


def _row_bytes(expert: ExpertLayout) -> tuple[int, int]:
    return expert.selector.row_bytes if expert.selector else 0, expert.records.row_bytes
