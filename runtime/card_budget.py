"""What a GPU's memory is spent on: fixed parts, what is read most, and pages for the rest.

Rows are ordered by heat, so that what to keep is a fractional knapsack: of selectors and rows those that a token reads
with the highest probability come first; they all cost their bytes. Nothing here allocates; parts are in bytes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import ExpertLayout, PackLayout, cache_values
from moe_pack.runtime.budget import (
    AS_TARGET,
    LEAST_PREFILL_TOKENS,
    Asked,
    Division,
    FixedParts,
    MemoryNeeds,
    MemoryPart,
    divide_or_refuse,
    extent_bytes,
    most_chunk_tokens,
    workspace_bytes,
)

Array = NDArray[Any]

OVERHEAD_BYTES = 500_000_000  # of the driver's context and the libraries' kernels; assumed where none is measured
STAGING_BYTES = 32 << 20  # two copies of 16 MiB on their way
CARD_PAGE_BYTES = 256 << 10
BF16_BYTES = 2


@dataclass(frozen=True, slots=True, eq=False)
class CardPlan:
    """A GPU's memory, divided, in bytes but for the last four.

    `selectors`, `hot_rows`: that are always there; `pages`: for what comes and goes.   `chunk_tokens`: of a forward
    pass, at most.   `selector_share` float64 [L, E]: of each selector's rows that are there; `row_shares` [L, E, H]: of
    each slice of an expert's records.
    """

    budget: int
    fixed: FixedParts
    selectors: int
    hot_rows: int
    pages: int
    chunk_tokens: int
    page_bytes: int
    selector_share: Array
    row_shares: Array

    @property
    def spent(self) -> int:
        """All parts together: never more than the budget."""
        return self.fixed.num_bytes + self.selectors + self.hot_rows + self.pages

    @property
    def experts(self) -> int:
        """What is left for experts."""
        return self.budget - self.fixed.num_bytes

    @property
    def num_pages(self) -> int:
        """Pages for what comes and goes."""
        return self.pages // self.page_bytes

    @property
    def parts(self) -> tuple[MemoryPart, ...]:
        """The parts by name; they sum to the budget."""
        return (
            MemoryPart("dense weights", self.fixed.dense),
            MemoryPart("key-value cache", self.fixed.cache),
            MemoryPart("workspace", self.fixed.workspace),
            MemoryPart("predictors", self.fixed.predictors),
            MemoryPart("staging", self.fixed.staging),
            MemoryPart("overhead", self.fixed.overhead),
            MemoryPart("resident selectors", self.selectors),
            MemoryPart("hot rows", self.hot_rows),
            MemoryPart("pages of experts", self.pages),
            MemoryPart("left over", self.budget - self.spent),
        )


@dataclass(frozen=True, slots=True)
class Compression:
    """How many times less of an expert crosses the link than its 16-bit weights: codes alone, and as stored."""

    codes: float
    stored: float


def expert_compression(expert: ExpertLayout, sparsity: float) -> Compression:
    """What an expert's selector and running records come to, by its three matrices in 16 bit.

    `codes` leaves out scales, zeros, CRC and padding.
    Source:  FloE §1 and §4.3, whose 9.3 for Mixtral at 90% is of codes; theirs of 2 bits for up, 16 for the rest.
    """
    halves = [(rows, share) for rows, share in ((expert.selector, 1.0), (expert.records, 1 - sparsity)) if rows]
    num_cols, num_parts = expert.records.num_cols, sum(len(rows.parts) for rows, _ in halves)
    source = 2 * num_parts * num_cols
    codes = sum(share * part.format.code_bytes(num_cols) for rows, share in halves for part in rows.parts)
    return Compression(source / codes, source / sum(share * rows.row_bytes for rows, share in halves))


@dataclass(frozen=True, slots=True)
class CardCosts:
    """What a GPU spends whatever lies in the pack.

    `value_bytes`: of a number in the key-value cache.   `overhead_bytes`: what the driver charges a process that has
    allocated nothing yet; measured where there is a GPU.
    """

    value_bytes: int = BF16_BYTES
    overhead_bytes: int = OVERHEAD_BYTES


PLANNED_COSTS = CardCosts()


def gpu_needs(
    layout: PackLayout, context_tokens: int, predictor_bytes: int, costs: CardCosts = PLANNED_COSTS
) -> MemoryNeeds:
    """Returns what an engine of a GPU needs, before anything is measured."""
    dense, spec, sizes = layout.dense_file.num_bytes, layout.spec, extent_bytes(layout)
    largest = -(-int(sizes.max()) // CARD_PAGE_BYTES) * CARD_PAGE_BYTES

    def fixed(chunk_tokens: int) -> FixedParts:
        cache = costs.value_bytes * cache_values(spec, context_tokens, chunk_tokens)
        workspace = workspace_bytes(spec, chunk_tokens)
        return FixedParts(dense, cache, workspace, predictor_bytes, STAGING_BYTES, costs.overhead_bytes)

    longest = most_chunk_tokens(context_tokens)
    return MemoryNeeds(fixed, longest, LEAST_PREFILL_TOKENS, largest, int(sizes.sum()), usual_share=8)


def divide_gpu(needs: MemoryNeeds, budget_bytes: int, context_tokens: int, asked_as: Asked = AS_TARGET) -> Division:
    """Divides a GPU's memory into fixed parts and what is left for experts.

    Args:    needs: of `gpu_needs` for as many tokens.
    Raises:  RunError if the largest expert would have no room; it says what is needed, and for what.
    """
    advice = "give more, fewer bits for dense weights"
    return divide_or_refuse(budget_bytes, needs, context_tokens, asked_as, advice)


def divide_card(
    layout: PackLayout,
    budget_bytes: int,
    context_tokens: int,
    predictor_bytes: int,
    popularity: Array,
    heat: Array,
    page_share: float,
    costs: CardCosts = PLANNED_COSTS,
) -> CardPlan:
    """Divides a GPU's memory, as a plan of a pack expects it.

    Where all experts fit after the fixed parts, all of them stay. Otherwise `page_share` of the experts' bytes, and the
    largest expert at least, goes to pages, and the rest to what is read most per byte: a selector with its expert's
    popularity, a row with that times its heat. The CPU's division differs: its rows are read from disk by whole blocks,
    so that everything is in pages.
    Args:    popularity: [L, E], any unit.   heat: [L, E, H], the share of its tokens for which a row runs, of H equal
             slices of an expert's rows, hottest first.
    Raises:  RunError if the largest expert would have no room; it says what is needed, and for what.
    """
    needs = gpu_needs(layout, context_tokens, predictor_bytes, costs)
    division = divide_gpu(needs, budget_bytes, context_tokens)
    room, pages = division.experts, 0
    if needs.all_experts > room:
        pages = max(needs.largest, int(page_share * room) // CARD_PAGE_BYTES * CARD_PAGE_BYTES)
    selector_share, row_shares, selectors, rows = hold(layout, popularity, heat, room - pages)
    return CardPlan(
        budget_bytes,
        division.fixed,
        selectors,
        rows,
        pages,
        division.chunk_tokens,
        CARD_PAGE_BYTES,
        selector_share,
        row_shares,
    )


def least_card(layout: PackLayout, context_tokens: int, predictor_bytes: int, costs: CardCosts = PLANNED_COSTS) -> int:
    """Returns the smallest budget that `divide_card` divides."""
    return gpu_needs(layout, context_tokens, predictor_bytes, costs).least_budget


def hold(layout: PackLayout, popularity: Array, heat: Array, room: int) -> tuple[Array, Array, int, int]:
    """The shares of selectors [L, E] and of slices [L, E, H] to hold in so many bytes, and what both come to.

    Args:    popularity, heat: as `divide_card` takes them.
    """
    L, E, H = heat.shape
    row_bytes = np.array([[[e.selector.row_bytes if e.selector else 0, e.records.row_bytes] for e in layer]
                          for layer in layout.experts], np.int64)  # fmt: skip
    num_rows = layout.experts[0][0].num_rows
    edges = np.linspace(0, num_rows, H + 1).astype(np.int64)
    chances = (popularity / popularity.sum(axis=1, keepdims=True))[:, :, None]
    # Of each expert: its selector's rows, with the few extra values, then its slices.
    counts = np.concatenate([np.full((L, E, 1), num_rows), np.broadcast_to(np.diff(edges), (L, E, H))], axis=2)
    sizes = np.concatenate([row_bytes[:, :, :1], np.repeat(row_bytes[:, :, 1:], H, axis=2)], axis=2)
    worth = np.concatenate([np.broadcast_to(chances, (L, E, 1)), chances * heat], axis=2)
    extra = layout.experts[0][0].extra_bytes * L * E
    order = np.argsort(-worth.ravel(), kind="stable")
    num_bytes = (counts * sizes).ravel()[order]
    before = np.cumsum(num_bytes) - num_bytes
    left = np.clip(max(room - extra, 0) - before, 0, num_bytes)
    held: Array = np.zeros(counts.size, np.int64)
    held[order] = left // np.maximum(sizes.ravel()[order], 1)  # whole rows
    held = held.reshape(counts.shape)
    shares = np.where(sizes > 0, held / np.maximum(counts, 1), 1.0)
    spent = held * sizes
    selectors = int(spent[:, :, 0].sum()) + (extra if room >= extra else 0)
    return shares[:, :, 0], shares[:, :, 1:], selectors, int(spent[:, :, 1:].sum())
