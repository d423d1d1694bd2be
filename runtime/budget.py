"""A memory budget, divided: what is always held, what a forward pass needs, and the pages that are left for experts."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import (
    DISK_BLOCK_BYTES,
    GroupedQuerySpec,
    ModelSpec,
    PackLayout,
    RelativeSpec,
    RunError,
    cache_values,
    dense_roles,
    size_text,
)
from moe_pack.runtime.matrix import MAX_DECODED_BYTES
from moe_pack.runtime.routing import ROUTING_FILE

LEAST_PREFILL_TOKENS = 16  # below, a prompt would read every expert again and again
MAX_PAGE_BYTES = 1 << 20
LEAST_PAGE_BYTES = 64 << 10  # smaller pages lose more to the room before each; experts of less than four have smaller
# Of the kernels' own (runtime/native): unfinished sums of many tokens, of few; what threads decode rows into.
_MANY_TOKENS, _MANY_SUMS, _FEW_SUMS, _MOST_FEW_BYTES, _THREADS_BYTES = 64, 19, 96, 16 << 20, 4 << 20


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """What a budget is spent on, in bytes, but for `num_pages` and `chunk_tokens` (of a forward pass at most).

    `arena`: all pages, each with `head_bytes` before its `page_bytes`.   `workspace`: hidden states, scores, outputs
    and what the kernels need.   `predictors`: what foretells experts.
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
    def left(self) -> int:
        """Bytes that are not spent: less than a page, or all experts have theirs."""
        return self.budget - self.dense - self.cache - self.workspace - self.predictors - self.arena


@dataclass(frozen=True, slots=True)
class Asked:
    """The options that a budget and a context were asked for with."""

    budget: str
    context: str


AS_BUDGET = Asked("--budget", "--max-tokens")


def expert_pages(layout: PackLayout, page_bytes: int) -> NDArray[np.int64]:
    """How many pages each expert takes: int64 [L, E]."""
    return -(-_extent_bytes(layout) // page_bytes)


def divide_budget(
    layout: PackLayout, budget_bytes: int, context_tokens: int, predictor_bytes: int, asked_as: Asked = AS_BUDGET
) -> BudgetPlan:
    """How a budget is spent on running a pack, which need not exist yet.

    Meaning: dense weights, key-value cache, workspace and what foretells first, all else in pages. Where less than a
             quarter would be left for these, forward passes are made shorter, down to LEAST_PREFILL_TOKENS.
    Args:    predictor_bytes: `routing_bytes` of a pack, or `routing_file_bytes` of what will lie beside it.
             asked_as: the options that a person can change, for the message.
    Raises:  RunError if the largest expert would have no room; it says what is needed, and for what.
    """
    dense, spec = layout.dense_file.num_bytes, layout.spec
    page_bytes, head_bytes = page_sizes(layout)
    largest = int(expert_pages(layout, page_bytes).max()) * (page_bytes + head_bytes)
    chunk = min(PREFILL_TOKENS, max(context_tokens, LEAST_PREFILL_TOKENS))
    while True:
        cache, workspace = cache_bytes(spec, context_tokens, chunk), workspace_bytes(spec, chunk)
        workspace += whole_pass_bytes(spec, chunk, context_tokens)
        left = budget_bytes - dense - cache - workspace - predictor_bytes
        if chunk <= LEAST_PREFILL_TOKENS or left >= max(largest, budget_bytes // 4):
            break
        chunk = max(chunk // 2, LEAST_PREFILL_TOKENS)
    if left < largest:
        least = budget_bytes - left + largest
        foretelling = f", {size_text(predictor_bytes)} of what foretells experts" if predictor_bytes else ""
        raise RunError(
            f"{asked_as.budget}: {size_text(budget_bytes)}, needed are at least {size_text(least)}: {size_text(dense)} "
            f"of dense weights, {size_text(cache)} of key-value cache for {context_tokens} tokens, "
            f"{size_text(workspace)} to work in{foretelling}, and {size_text(largest)} for experts; give more, or a "
            f"shorter context with {asked_as.context}"
        )
    most = int(expert_pages(layout, page_bytes).sum())
    num_pages = min(left // (page_bytes + head_bytes), most)
    return BudgetPlan(budget_bytes, dense, cache, workspace, predictor_bytes, page_bytes, head_bytes, num_pages, chunk)


def least_budget(layout: PackLayout, context_tokens: int, predictor_bytes: int) -> int:
    """The smallest budget that `divide_budget` divides: shortest forward passes, and room for the largest expert."""
    page_bytes, head_bytes = page_sizes(layout)
    largest = int(expert_pages(layout, page_bytes).max()) * (page_bytes + head_bytes)
    cache = cache_bytes(layout.spec, context_tokens, LEAST_PREFILL_TOKENS)
    workspace = workspace_bytes(layout.spec, LEAST_PREFILL_TOKENS)
    workspace += whole_pass_bytes(layout.spec, LEAST_PREFILL_TOKENS, context_tokens)
    return layout.dense_file.num_bytes + cache + workspace + predictor_bytes + largest


def whole_bytes(layout: PackLayout, context_tokens: int, predictor_bytes: int) -> int:
    """The least budget with room for all experts, and for the longest forward passes."""
    page_bytes, head_bytes = page_sizes(layout)
    pages = int(expert_pages(layout, page_bytes).sum()) * (page_bytes + head_bytes)
    cache = cache_bytes(layout.spec, context_tokens, PREFILL_TOKENS)
    workspace = workspace_bytes(layout.spec, PREFILL_TOKENS)
    workspace += whole_pass_bytes(layout.spec, PREFILL_TOKENS, context_tokens)
    return pages + layout.dense_file.num_bytes + cache + predictor_bytes + workspace


def routing_bytes(folder: Path) -> int:
    """What the routing beside a pack takes, all of it in memory; 0 where there is none."""
    routing = folder / ROUTING_FILE
    return routing.stat().st_size if routing.exists() else 0


def page_sizes(layout: PackLayout) -> tuple[int, int]:
    """The bytes of a page and of the room before it that waste least over a pack's experts.

    Both are whole blocks, the room as long as the longest row at least. Of equally good ones, the largest page.
    """
    extents = _extent_bytes(layout).ravel()
    sizes, counts = np.unique(extents, return_counts=True)
    longest = max(rows.row_bytes for layer in layout.experts for expert in layer for rows in expert.rows())
    head = -(-longest // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES
    least = max(
        head, min(LEAST_PAGE_BYTES, int(sizes.min()) // 4 // DISK_BLOCK_BYTES * DISK_BLOCK_BYTES), DISK_BLOCK_BYTES
    )
    pages = np.arange(least, max(MAX_PAGE_BYTES, least) + 1, DISK_BLOCK_BYTES)[::-1]
    costs = ((-(-sizes[None] // pages[:, None])) * counts).sum(axis=1) * (pages + head)
    return int(pages[costs.argmin()]), head


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


def _extent_bytes(layout: PackLayout) -> NDArray[np.int64]:
    return np.array([[expert.num_bytes for expert in layer] for layer in layout.experts], np.int64)
