"""The division of a memory budget: fixed parts first, the rest for experts; and the search for the size of their pages.

    budget = dense weights + key-value cache + workspace + predictors + ... + experts + left over

Every engine describes what it needs as `MemoryNeeds`, and `divide` is the one division. What engines do with the bytes
that experts get is their own rule: the CPU's is here (`divide_budget`: all of it is pages), a GPU's is in `card_budget`
and `card_placement` (the hottest rows stay, the rest comes and goes in pages) and in `staged_weights` (all pages).

What a GPU's memory is spent on: fixed parts, what is read most, and pages for the rest.

Rows are ordered by heat, so that what to keep is a fractional knapsack: of selectors and rows those that a token reads
with the highest probability come first; they all cost their bytes. Nothing here allocates; parts are in bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import (
    DISK_BLOCK_BYTES,
    ExpertLayout,
    GroupedQuerySpec,
    ModelSpec,
    PackLayout,
    RunError,
    dense_roles,
    size_text,
)
from moe_pack.formats.layout import whole_blocks
from moe_pack.formats.spec import RelativeSpec, cache_values
from moe_pack.runtime.model import PREFILL_TOKENS
from moe_pack.runtime.model.operations import MAX_DECODED_BYTES
from moe_pack.runtime.offload.routing_file import ROUTING_FILE

LEAST_PREFILL_TOKENS = 16  # below, a prompt would read every expert again and again
MAX_PAGE_BYTES = 1 << 20
LEAST_PAGE_BYTES = 64 << 10  # smaller pages lose more to the room before each; experts of less than four have smaller
# Of the kernels' own (runtime/native): unfinished sums of many tokens, of few; what threads decode rows into.
_MANY_TOKENS, _MANY_SUMS, _FEW_SUMS, _MOST_FEW_BYTES, _THREADS_BYTES = 64, 19, 96, 16 << 20, 4 << 20


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """A part of a budget, in bytes, under the name that people read."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class FixedParts:
    """What a budget is spent on before experts get any, in bytes; 0 for a part that an engine does not have.

    `workspace`: hidden states, scores, outputs and what the kernels need.   `predictors`: of experts.   `staging`:
    copies on their way to a GPU.   `overhead`: the driver's own.   `tables`: where experts' rows lie.
    """

    dense: int = 0
    cache: int = 0
    workspace: int = 0
    predictors: int = 0
    staging: int = 0
    overhead: int = 0
    tables: int = 0

    @property
    def num_bytes(self) -> int:
        """All parts together."""
        before = self.dense + self.cache + self.workspace + self.predictors
        return before + self.staging + self.overhead + self.tables


@dataclass(frozen=True, slots=True)
class Division:
    """A budget's fixed parts, for forward passes of `chunk_tokens` at most."""

    budget: int
    fixed: FixedParts
    chunk_tokens: int

    @property
    def experts(self) -> int:
        """Bytes that are left for experts; negative where the fixed parts alone are more than the budget."""
        return self.budget - self.fixed.num_bytes


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What an engine needs of a memory, whatever the budget.

    `fixed`: the fixed parts for forward passes of so many tokens at most.   `longest_chunk`, `shortest_chunk`: the
    tokens of a pass, where memory suffices and where it is short.   `largest`: bytes of the pages that must be there at
    once.   `all_experts`: bytes of all experts, where all are always there.   `usual_share`: passes are made shorter
    where experts would get less than the budget divided by it.
    """

    fixed: Callable[[int], FixedParts]
    longest_chunk: int
    shortest_chunk: int
    largest: int
    all_experts: int
    usual_share: int

    @property
    def least_experts(self) -> int:
        """The least bytes that experts run in."""
        return min(self.largest, self.all_experts)

    @property
    def least_budget(self) -> int:
        """The smallest budget that can be divided: shortest forward passes, and the least that experts run in."""
        return self.fixed(self.shortest_chunk).num_bytes + self.least_experts


def divide(budget_bytes: int, needs: MemoryNeeds) -> Division:
    """Divides a budget into fixed parts and what is left for experts.

    Passes are halved until experts get their usual share and the largest of them fits, but not below the shortest. The
    caller compares `experts` with `needs.least_experts`, and says in its own words what is missing.
    """
    chunk = needs.longest_chunk
    while True:
        division = Division(budget_bytes, needs.fixed(chunk), chunk)
        is_enough = division.experts >= max(needs.largest, budget_bytes // needs.usual_share)
        if is_enough or chunk <= needs.shortest_chunk:
            return division
        chunk = max(chunk // 2, needs.shortest_chunk)


def best_page_bytes(sizes: NDArray[np.int64], costs: NDArray[np.int64], tolerance: float = 1.0) -> int:
    """Returns the first size of a page that costs at most `tolerance` times the least: the search of every engine.

    Engines differ in what they give to it, because their pages are filled in different ways. The CPU reads disk blocks
    into pages and lets rows straddle them, so that an expert takes `ceil(bytes / page)` pages, each with a head. The
    staged engine copies whole rows, and a copy costs as much as moving so many bytes. The graph engine keeps selectors
    and records in pages apart, and takes a larger page that costs a hundredth more, for shorter lists.
    Args:    sizes: [n], the preferred ones first.   costs: [n], bytes of all experts in pages of this size.
    """
    return int(sizes[np.argmax(costs <= tolerance * costs.min())])


def most_chunk_tokens(context_tokens: int) -> int:
    """Returns how many tokens a forward pass has where there is memory for it."""
    return min(PREFILL_TOKENS, max(context_tokens, LEAST_PREFILL_TOKENS))


@dataclass(frozen=True, slots=True)
class BudgetOptionNames:
    """The options that a budget and a context were asked for with."""

    budget: str
    context: str


AS_BUDGET = BudgetOptionNames("--budget", "--max-tokens")
AS_TARGET = BudgetOptionNames("--target-vram", "--context")


def divide_or_refuse(
    budget_bytes: int, needs: MemoryNeeds, context_tokens: int, asked_as: BudgetOptionNames, advice: str = "give more"
) -> Division:
    """Divides the budget of a whole engine.

    Args:    advice: what helps beside a shorter context.
    Raises:  RunError if experts would get too little; it says what is needed, and for what.
    """
    division = divide(budget_bytes, needs)
    if division.experts >= needs.least_experts:
        return division
    fixed = division.fixed
    parts = [
        f"{size_text(fixed.dense)} of dense weights",
        f"{size_text(fixed.cache)} of key-value cache for {context_tokens} tokens",
        f"{size_text(fixed.workspace + fixed.staging)} to work in",
    ]
    if fixed.predictors:
        parts.append(f"{size_text(fixed.predictors)} of what foretells experts")
    if fixed.overhead:
        parts.append(f"{size_text(fixed.overhead)} of the driver's")
    raise RunError(
        f"{asked_as.budget}: {size_text(budget_bytes)}, needed are at least {size_text(needs.least_budget)}: "
        f"{', '.join(parts)}, and {size_text(needs.largest)} for experts; {advice}, or a shorter context with "
        f"{asked_as.context}"
    )


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """What a budget of the CPU's memory is spent on, in bytes, but for `num_pages` and `chunk_tokens`.

    `workspace`, `predictors`: as in `FixedParts`.   `page_bytes`: of a page, each behind `head_bytes`.
    `chunk_tokens`: of a forward pass, at most.
    """

    budget: int
    dense: int
    cache: int
    workspace: int
    predictors: int
    page_bytes: int
    head_bytes: int
    num_pages: int
    chunk_tokens: int

    @property
    def arena(self) -> int:
        """Bytes of all pages."""
        return self.num_pages * (self.page_bytes + self.head_bytes)

    @property
    def spent(self) -> int:
        """All parts together: never more than the budget."""
        return self.dense + self.cache + self.workspace + self.predictors + self.arena

    @property
    def left(self) -> int:
        """Bytes that are not spent: less than a page, or all experts have theirs."""
        return self.budget - self.spent

    @property
    def parts(self) -> tuple[MemoryPart, ...]:
        """The parts by name; they sum to the budget."""
        return (
            MemoryPart("dense weights", self.dense),
            MemoryPart("key-value cache", self.cache),
            MemoryPart("workspace", self.workspace),
            MemoryPart("predictors", self.predictors),
            MemoryPart("pages of experts", self.arena),
            MemoryPart("left over", self.left),
        )


def cpu_needs(layout: PackLayout, pages: tuple[int, int], context_tokens: int, predictor_bytes: int) -> MemoryNeeds:
    """Returns what the engine needs that streams experts into the CPU's memory.

    Args:    pages: of `page_sizes`.   predictor_bytes: `routing_bytes` of a pack, or `routing_file_bytes` of the file
             that the pack will have.
    """
    dense, spec = layout.dense_file.num_bytes, layout.spec
    page_bytes, head_bytes = pages
    experts = expert_pages(layout, page_bytes) * (page_bytes + head_bytes)

    def fixed(chunk_tokens: int) -> FixedParts:
        workspace = workspace_bytes(spec, chunk_tokens) + whole_pass_bytes(spec, chunk_tokens, context_tokens)
        return FixedParts(dense, cache_bytes(spec, context_tokens, chunk_tokens), workspace, predictor_bytes)

    longest, largest = most_chunk_tokens(context_tokens), int(experts.max())
    return MemoryNeeds(fixed, longest, LEAST_PREFILL_TOKENS, largest, int(experts.sum()), usual_share=4)


def divide_budget(
    layout: PackLayout,
    budget_bytes: int,
    context_tokens: int,
    predictor_bytes: int,
    asked_as: BudgetOptionNames = AS_BUDGET,
) -> BudgetPlan:
    """Divides the budget of the CPU's memory for running a pack, which need not exist yet: all that is left is pages.

    Args:    predictor_bytes: as in `cpu_needs`.   asked_as: the options that a person can change, for the message.
    Raises:  RunError if the largest expert would have no room; it says what is needed, and for what.
    """
    page_bytes, head_bytes = pages = page_sizes(layout)
    needs = cpu_needs(layout, pages, context_tokens, predictor_bytes)
    division = divide_or_refuse(budget_bytes, needs, context_tokens, asked_as)
    num_pages = min(division.experts, needs.all_experts) // (page_bytes + head_bytes)
    fixed, chunk = division.fixed, division.chunk_tokens
    return BudgetPlan(
        budget_bytes,
        fixed.dense,
        fixed.cache,
        fixed.workspace,
        fixed.predictors,
        page_bytes,
        head_bytes,
        num_pages,
        chunk,
    )


def least_budget(layout: PackLayout, context_tokens: int, predictor_bytes: int) -> int:
    """Returns the smallest budget that `divide_budget` divides."""
    return cpu_needs(layout, page_sizes(layout), context_tokens, predictor_bytes).least_budget


def whole_bytes(layout: PackLayout, context_tokens: int, predictor_bytes: int) -> int:
    """Returns the least budget that holds all experts, and the longest forward passes."""
    needs = cpu_needs(layout, page_sizes(layout), context_tokens, predictor_bytes)
    return needs.fixed(PREFILL_TOKENS).num_bytes + needs.all_experts


def expert_pages(layout: PackLayout, page_bytes: int) -> NDArray[np.int64]:
    """Returns how many pages each expert takes: int64 [L, E]."""
    return -(-extent_bytes(layout) // page_bytes)


def routing_bytes(folder: Path) -> int:
    """What the routing beside a pack takes, all of it in memory; 0 where there is none."""
    routing = folder / ROUTING_FILE
    return routing.stat().st_size if routing.exists() else 0


def page_sizes(layout: PackLayout) -> tuple[int, int]:
    """Returns the bytes of a page and of the head before it that waste least over a pack's experts.

    Both are whole blocks, the head as long as the longest row at least. Of equally good ones, the largest page.
    """
    sizes, counts = np.unique(extent_bytes(layout), return_counts=True)
    head = whole_blocks(max(rows.row_bytes for layer in layout.experts for expert in layer for rows in expert.rows()))
    quarter = int(sizes.min()) // 4 // DISK_BLOCK_BYTES * DISK_BLOCK_BYTES
    least = max(head, min(LEAST_PAGE_BYTES, quarter), DISK_BLOCK_BYTES)
    pages = np.arange(least, max(MAX_PAGE_BYTES, least) + 1, DISK_BLOCK_BYTES)[::-1]
    costs = ((-(-sizes[None] // pages[:, None])) * counts).sum(axis=1) * (pages + head)
    return best_page_bytes(pages, costs), head


def cache_bytes(spec: ModelSpec, context_tokens: int, chunk_tokens: int) -> int:
    """What the key-value cache takes, in float32, for forward passes of so many tokens at most."""
    return 4 * cache_values(spec, context_tokens, chunk_tokens)


def workspace_bytes(spec: ModelSpec, chunk_tokens: int) -> int:
    """What a forward pass of so many tokens holds beside weights and cache, at most."""
    d, k, E = spec.hidden_size, spec.router.num_experts_per_tok, spec.router.num_experts
    attention = spec.attention
    if isinstance(attention, GroupedQuerySpec):
        width = (2 * attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    elif isinstance(attention, RelativeSpec):
        width = 4 * attention.num_heads * attention.head_dim
    else:
        width = 4 * attention.num_heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
    hidden = [role.shape[0] for role in dense_roles(spec) if role.name.endswith((".up", ".gate"))]
    widest = max([spec.expert.intermediate_size, *hidden])
    floats = 6 * d + width + 3 * widest + 2 * E + k * d
    few = min(4 * E * _FEW_SUMS * d, _MOST_FEW_BYTES)
    many = _MANY_TOKENS * (4 * _MANY_SUMS * d + 5 * spec.expert.intermediate_size)
    return 4 * (chunk_tokens * floats + 4 * spec.vocab_size) + few + many + _THREADS_BYTES


def whole_pass_bytes(spec: ModelSpec, chunk_tokens: int, context_tokens: int) -> int:
    """What a model with an encoder holds besides, because a layer has all tokens of a pass before the next begins."""
    attention = spec.attention
    if spec.encoder is None or not isinstance(attention, RelativeSpec):
        return 0
    # Hidden states, normed, halves' outputs in pieces and whole, experts' outputs apart; routers' logits and scores.
    held = context_tokens * (6 * spec.hidden_size + 3 * spec.router.num_experts)
    biases = 2 * attention.num_heads * 2 * context_tokens
    scores = min(12 * attention.num_heads * chunk_tokens * context_tokens, 2 * MAX_DECODED_BYTES)
    return 4 * (held + biases) + scores


def extent_bytes(layout: PackLayout) -> NDArray[np.int64]:
    """Returns what each expert takes as it is stored: int64 [L, E]."""
    return np.array([[expert.num_bytes for expert in layer] for layer in layout.experts], np.int64)


Array = NDArray[Any]

OVERHEAD_BYTES = 500_000_000  # of the driver's context and the libraries' kernels; assumed where none is measured
STAGING_BYTES = 32 << 20  # two copies of 16 MiB on their way
GPU_PAGE_BYTES = 256 << 10
BF16_BYTES = 2


@dataclass(frozen=True, slots=True, eq=False)
class GpuMemoryPlan:
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
class LinkCompression:
    """How many times less of an expert crosses the link than its 16-bit weights: codes alone, and as stored."""

    codes: float
    stored: float


def expert_compression(expert: ExpertLayout, sparsity: float) -> LinkCompression:
    """What an expert's selector and running records come to, by its three matrices in 16 bit.

    `codes` leaves out scales, zeros, CRC and padding.
    Source:  FloE §1 and §4.3, whose 9.3 for Mixtral at 90% is of codes; theirs of 2 bits for up, 16 for the rest.
    """
    halves = [(rows, share) for rows, share in ((expert.selector, 1.0), (expert.records, 1 - sparsity)) if rows]
    num_cols, num_parts = expert.records.num_cols, sum(len(rows.parts) for rows, _ in halves)
    source = 2 * num_parts * num_cols
    codes = sum(share * part.format.code_bytes(num_cols) for rows, share in halves for part in rows.parts)
    return LinkCompression(source / codes, source / sum(share * rows.row_bytes for rows, share in halves))


@dataclass(frozen=True, slots=True)
class GpuCosts:
    """What a GPU spends whatever lies in the pack.

    `value_bytes`: of a number in the key-value cache.   `overhead_bytes`: what the driver charges a process that has
    allocated nothing yet; measured where there is a GPU.
    """

    value_bytes: int = BF16_BYTES
    overhead_bytes: int = OVERHEAD_BYTES


PLANNED_COSTS = GpuCosts()


def gpu_needs(
    layout: PackLayout, context_tokens: int, predictor_bytes: int, costs: GpuCosts = PLANNED_COSTS
) -> MemoryNeeds:
    """Returns what an engine of a GPU needs, before anything is measured."""
    dense, spec, sizes = layout.dense_file.num_bytes, layout.spec, extent_bytes(layout)
    largest = -(-int(sizes.max()) // GPU_PAGE_BYTES) * GPU_PAGE_BYTES

    def fixed(chunk_tokens: int) -> FixedParts:
        cache = costs.value_bytes * cache_values(spec, context_tokens, chunk_tokens)
        workspace = workspace_bytes(spec, chunk_tokens)
        return FixedParts(dense, cache, workspace, predictor_bytes, STAGING_BYTES, costs.overhead_bytes)

    longest = most_chunk_tokens(context_tokens)
    return MemoryNeeds(fixed, longest, LEAST_PREFILL_TOKENS, largest, int(sizes.sum()), usual_share=8)


def divide_gpu(
    needs: MemoryNeeds, budget_bytes: int, context_tokens: int, asked_as: BudgetOptionNames = AS_TARGET
) -> Division:
    """Divides a GPU's memory into fixed parts and what is left for experts.

    Args:    needs: of `gpu_needs` for as many tokens.
    Raises:  RunError if the largest expert would have no room; it says what is needed, and for what.
    """
    advice = "give more, fewer bits for dense weights"
    return divide_or_refuse(budget_bytes, needs, context_tokens, asked_as, advice)


def best_gpu_plan(
    layout: PackLayout,
    budget_bytes: int,
    context_tokens: int,
    predictor_bytes: int,
    popularity: Array,
    heat: Array,
    page_share: float,
    costs: GpuCosts = PLANNED_COSTS,
) -> GpuMemoryPlan:
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
        pages = max(needs.largest, int(page_share * room) // GPU_PAGE_BYTES * GPU_PAGE_BYTES)
    selector_share, row_shares, selectors, rows = with_kept_bytes(layout, popularity, heat, room - pages)
    return GpuMemoryPlan(
        budget_bytes,
        division.fixed,
        selectors,
        rows,
        pages,
        division.chunk_tokens,
        GPU_PAGE_BYTES,
        selector_share,
        row_shares,
    )


def least_gpu_budget(
    layout: PackLayout, context_tokens: int, predictor_bytes: int, costs: GpuCosts = PLANNED_COSTS
) -> int:
    """Returns the smallest budget that `best_gpu_plan` divides."""
    return gpu_needs(layout, context_tokens, predictor_bytes, costs).least_budget


def with_kept_bytes(layout: PackLayout, popularity: Array, heat: Array, room: int) -> tuple[Array, Array, int, int]:
    """The shares of selectors [L, E] and of slices [L, E, H] to hold in so many bytes, and what both come to.

    Args:    popularity, heat: as `best_gpu_plan` takes them.
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
