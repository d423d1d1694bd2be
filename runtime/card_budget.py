"""What a card's memory is spent on: what is always there, what is read most, and pages for the rest.

Rows are ordered by heat, so that what to hold is a fractional knapsack: of selectors and rows those that a token reads
with the highest probability come first; they all cost their bytes. Nothing here allocates; parts are in bytes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import ExpertLayout, PackLayout, RunError, cache_values, size_text
from moe_pack.runtime.budget import Asked, workspace_bytes

Array = NDArray[Any]

OVERHEAD_BYTES = 500_000_000  # of the driver's context and the libraries' kernels; assumed where none is measured
STAGING_BYTES = 32 << 20  # two copies of 16 MiB on their way
CARD_PAGE_BYTES = 256 << 10
BF16_BYTES = 2
AS_TARGET = Asked("--target-vram", "--context")
_MOST_CHUNK, _LEAST_CHUNK = 512, 16  # tokens of a forward pass


@dataclass(frozen=True, slots=True, eq=False)
class CardPlan:
    """A card's memory, divided. All but the last four are bytes.

    `selectors`, `hot_rows`: that are always there; `pages`: for what comes and goes.   `selector_share` float64 [L, E]:
    of each selector's rows that are there; `row_shares` [L, E, H]: of each slice of an expert's records.
    """

    target: int
    dense: int
    cache: int
    workspace: int
    predictors: int
    staging: int
    overhead: int
    selectors: int
    hot_rows: int
    pages: int
    chunk_tokens: int
    page_bytes: int
    selector_share: Array
    row_shares: Array

    @property
    def spent(self) -> int:
        """All parts together: never more than the target."""
        fixed = self.dense + self.cache + self.workspace + self.predictors + self.staging + self.overhead
        return fixed + self.selectors + self.hot_rows + self.pages

    @property
    def experts(self) -> int:
        """What is left for experts."""
        fixed = self.dense + self.cache + self.workspace + self.predictors + self.staging + self.overhead
        return self.target - fixed

    @property
    def num_pages(self) -> int:
        """Pages for what comes and goes."""
        return self.pages // self.page_bytes


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
    """What a card spends whatever lies in the pack, and what the options are called that change it.

    `value_bytes`: of a number in the key-value cache.   `overhead_bytes`: what the driver charges a process that has
    allocated nothing yet; measured where there is a card.
    """

    value_bytes: int = BF16_BYTES
    overhead_bytes: int = OVERHEAD_BYTES
    asked_as: Asked = AS_TARGET


PLANNED_COSTS = CardCosts()


def divide_card(
    layout: PackLayout,
    target_bytes: int,
    context_tokens: int,
    predictor_bytes: int,
    popularity: Array,
    heat: Array,
    page_share: float,
    costs: CardCosts = PLANNED_COSTS,
) -> CardPlan:
    """How a card's memory is divided.

    Meaning: dense weights, cache, workspace, predictors, staging and overhead first; where all experts fit beside them,
             they are all there. Else `page_share` of the room, and the largest expert at least, goes to pages, and the
             rest to what is read most per byte: a selector with its expert's popularity, a row with that times its
             heat.
    Args:    popularity: [L, E], any unit.   heat: [L, E, H], the share of its tokens for which a row runs, of H equal
             slices of an expert's rows, hottest first.
    Raises:  RunError if the largest expert would have no room; it says what is needed, and for what.
    """
    dense = layout.dense_file.num_bytes
    total, largest = _experts_and_largest(layout)
    fixed = dense + predictor_bytes + STAGING_BYTES + costs.overhead_bytes
    chunk = min(_MOST_CHUNK, max(context_tokens, _LEAST_CHUNK))
    while True:
        cache = costs.value_bytes * cache_values(layout.spec, context_tokens, chunk)
        workspace = workspace_bytes(layout.spec, chunk)
        room = target_bytes - fixed - cache - workspace
        if chunk <= _LEAST_CHUNK or room >= max(largest, target_bytes // 8):
            break
        chunk = max(chunk // 2, _LEAST_CHUNK)
    if room < min(largest, total):
        least = least_card(layout, context_tokens, predictor_bytes, costs)
        raise RunError(
            f"{costs.asked_as.budget}: {size_text(target_bytes)}, needed are at least {size_text(least)}: "
            f"{size_text(dense)} of dense weights, {size_text(cache)} of key-value cache for {context_tokens} tokens, "
            f"{size_text(workspace + STAGING_BYTES)} to work in, {size_text(predictor_bytes)} of what foretells "
            f"experts, {size_text(costs.overhead_bytes)} of the driver's, and {size_text(largest)} for experts; give "
            f"more, fewer bits for dense weights, or a shorter context with {costs.asked_as.context}"
        )
    pages = 0 if total <= room else max(largest, int(page_share * room) // CARD_PAGE_BYTES * CARD_PAGE_BYTES)
    selector_share, row_shares, selectors, rows = hold(layout, popularity, heat, room - pages)
    return CardPlan(
        target_bytes,
        dense,
        cache,
        workspace,
        predictor_bytes,
        STAGING_BYTES,
        costs.overhead_bytes,
        selectors,
        rows,
        pages,
        chunk,
        CARD_PAGE_BYTES,
        selector_share,
        row_shares,
    )


def least_card(layout: PackLayout, context_tokens: int, predictor_bytes: int, costs: CardCosts = PLANNED_COSTS) -> int:
    """The smallest target that `divide_card` divides: shortest forward passes, and room for the largest expert."""
    total, largest = _experts_and_largest(layout)
    cache = costs.value_bytes * cache_values(layout.spec, context_tokens, _LEAST_CHUNK)
    fixed = layout.dense_file.num_bytes + cache + predictor_bytes + STAGING_BYTES + costs.overhead_bytes
    return fixed + workspace_bytes(layout.spec, _LEAST_CHUNK) + min(largest, total)


def _experts_and_largest(layout: PackLayout) -> tuple[int, int]:
    """The bytes of all experts, and of the largest one's pages."""
    sizes = np.array([[expert.num_bytes for expert in layer] for layer in layout.experts], np.int64)
    return int(sizes.sum()), -(-int(sizes.max()) // CARD_PAGE_BYTES) * CARD_PAGE_BYTES


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
