"""The division of a memory budget, in bytes: fixed parts first, the rest for experts. Nothing is allocated here.

Every engine describes its needs as `MemoryNeeds`, and `divide` is the one division. Each engine has its own rule for
the bytes that experts get: `divide_budget` on the CPU, runtime/gpu/placements.py on a GPU.

A new part is a field of `FixedParts`, its bytes in `cpu_needs`, its name in `BudgetPlan.parts`, and a row of a table in
docs/streaming.md.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.formats.pack import layouts
from moe_pack.formats.parts import heads, specs
from moe_pack.runtime.model import PREFILL_TOKENS, caches, compute, kv_cache
from moe_pack.runtime.model.attention import kinds
from moe_pack.runtime.model.compute import operations, softmax
from moe_pack.runtime.offload.presets import ROUTING_FILE

LEAST_PREFILL_TOKENS = 16  # with shorter passes a prompt would read every expert again and again
MAX_PAGE_BYTES = 1 << 20
LEAST_PAGE_BYTES = 64 << 10  # smaller pages lose more to their heads; smaller only if an expert has less than four
# Workspace of the kernels (runtime/cpu/native): partial sums of many tokens and of few; the threads' decoded rows.
_ROUNDED_TOKENS = 128  # of an expert at once, where inputs are rounded
_PIECES = heads.PieceBytes(softmax.MAX_SCORE_BYTES, operations.MAX_DECODED_BYTES)
_MANY_TOKENS, _MANY_SUMS, _FEW_SUMS, _MOST_FEW_BYTES, _THREADS_BYTES = 64, 19, 96, 16 << 20, 4 << 20


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """A part of a budget, in bytes, under the name in reports."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences that run at once."""

    number: int = 1
    checkpoints: int = 0  # that each has room for
    kv_dtype: caches.KvDtype = "f32"  # of keys and values
    draft_bytes: int = 0  # of a prediction layer; 0 if nothing needs memory to draft


ONE_SEQUENCE: Sequences = Sequences()


@dataclass(frozen=True, slots=True)
class FixedParts:
    """The parts of a budget other than experts, in bytes; 0 for a part that an engine does not have."""

    dense: int = 0
    cache: int = 0
    workspace: int = 0  # hidden states, scores, outputs and the kernels' buffers
    predictors: int = 0  # of experts
    overhead: int = 0  # of the GPU's driver
    drafts: int = 0  # of a prediction layer

    @property
    def num_bytes(self) -> int:
        """The sum of all parts."""
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True, slots=True)
class Division:
    """A budget's fixed parts, for forward passes of `chunk_tokens` at most."""

    budget: int
    fixed: FixedParts
    chunk_tokens: int

    @property
    def experts(self) -> int:
        """The bytes left for experts; negative if the fixed parts alone are more than the budget."""
        return self.budget - self.fixed.num_bytes


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """The memory that an engine needs, whatever the budget."""

    fixed: Callable[[int], FixedParts]  # for forward passes of at most so many tokens
    longest_chunk: int  # tokens of a pass if there is enough memory
    shortest_chunk: int  # and if there is little
    largest: int  # bytes in which the largest expert runs
    all_experts: int  # bytes with all experts resident
    usual_share: int  # passes become shorter if experts would get less than the budget divided by this

    @property
    def least_experts(self) -> int:
        """The least bytes with which experts can run."""
        return min(self.largest, self.all_experts)

    @property
    def least_budget(self) -> int:
        """The smallest budget that can be divided: the shortest passes and the least bytes for experts."""
        return self.fixed(self.shortest_chunk).num_bytes + self.least_experts


def divide(budget_bytes: int, needs: MemoryNeeds) -> Division:
    """Divides a budget into fixed parts and the rest for experts.

    Passes are halved until experts get their usual share and the largest of them fits, but not below the shortest. The
    caller compares `experts` with `needs.least_experts` and raises its own error.
    """
    chunk = needs.longest_chunk
    while True:
        division = Division(budget_bytes, needs.fixed(chunk), chunk)
        is_enough = division.experts >= max(needs.largest, budget_bytes // needs.usual_share)
        if is_enough or chunk <= needs.shortest_chunk:
            return division
        chunk = max(chunk // 2, needs.shortest_chunk)


def most_chunk_tokens(context_tokens: int) -> int:
    """Returns the tokens of a forward pass if there is enough memory."""
    return min(PREFILL_TOKENS, max(context_tokens, LEAST_PREFILL_TOKENS))


class BudgetTooSmall(formats.RunError):
    """A budget that leaves experts too little. `named_budget` words it by the names that the user knows.

    Args:    needs: a clause that says how much is needed, and for what.   advice: apart from a shorter context.
    """

    def __init__(self, given_bytes: int, needed_bytes: int, needs: str, advice: str) -> None:
        super().__init__(given_bytes, needed_bytes, needs, advice)
        self.given_bytes, self.needed_bytes, self._needs, self._advice = given_bytes, needed_bytes, needs, advice

    def __str__(self) -> str:
        return self.worded("budget", None)

    def worded(self, budget: str, context: str | None) -> str:
        """Returns the message for a user who sets budget and context by these names; `context` None: not at all."""
        advice = self._advice if context is None else f"{self._advice} or shorten the context with {context}"
        return f"{budget}: {formats.size_text(self.given_bytes)} is too little; {self._needs}; {advice}"


@contextmanager
def named_budget(budget: str, context: str | None) -> Iterator[None]:
    """Words the refusal of a budget inside the block by the names of what sets budget and context.

    Raises:  RunError in place of BudgetTooSmall.
    """
    try:
        yield
    except BudgetTooSmall as fault:
        raise formats.RunError(fault.worded(budget, context)) from fault


def divide_or_refuse(budget_bytes: int, needs: MemoryNeeds, context_tokens: int, advice: str = "raise it") -> Division:
    """Divides the budget of a whole engine.

    Raises:  BudgetTooSmall.
    """
    division = divide(budget_bytes, needs)
    if division.experts >= needs.least_experts:
        return division
    fixed = division.fixed
    parts = [
        f"{formats.size_text(fixed.dense)} of dense weights",
        f"{formats.size_text(fixed.cache)} of key-value cache for {context_tokens} tokens",
        f"{formats.size_text(fixed.workspace)} of workspace",
    ]
    if fixed.predictors:
        parts.append(f"{formats.size_text(fixed.predictors)} of predictors")
    if fixed.drafts:
        parts.append(f"{formats.size_text(fixed.drafts)} of the prediction layer")
    if fixed.overhead:
        parts.append(f"{formats.size_text(fixed.overhead)} for the GPU's driver")
    least, largest = formats.size_text(needs.least_budget), formats.size_text(needs.largest)
    needed = f"the model needs at least {least}: {', '.join(parts)} and {largest} for experts"
    raise BudgetTooSmall(budget_bytes, needs.least_budget, needed, advice)


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """A division of a budget of host memory, in bytes except for `num_pages` and `chunk_tokens`."""

    budget: int
    fixed: FixedParts
    page_bytes: int  # without the head before it
    head_bytes: int
    num_pages: int
    chunk_tokens: int  # the most of a forward pass
    selectors: int = 0  # of those that stay in memory
    num_selectors: int = 0

    @property
    def arena(self) -> int:
        """The bytes of all pages with their heads."""
        return self.num_pages * (self.page_bytes + self.head_bytes)

    @property
    def spent(self) -> int:
        """The sum of all parts; never more than the budget."""
        return self.fixed.num_bytes + self.selectors + self.arena

    @property
    def left(self) -> int:
        """The bytes that are not spent: less than a page, unless all experts have their pages."""
        return self.budget - self.spent

    @property
    def parts(self) -> tuple[MemoryPart, ...]:
        """The parts with their names; their sum is the budget."""
        fixed = self.fixed
        drafts = (MemoryPart("prediction layer", fixed.drafts),) if fixed.drafts else ()
        return (
            MemoryPart("dense weights", fixed.dense),
            MemoryPart("key-value cache", fixed.cache),
            MemoryPart("workspace", fixed.workspace),
            MemoryPart("predictors", fixed.predictors),
            *drafts,
            MemoryPart("resident selectors", self.selectors),
            MemoryPart("pages of experts", self.arena),
            MemoryPart("left over", self.left),
        )


class PageSizes(NamedTuple):
    """The sizes of a page in memory."""

    page_bytes: int
    head_bytes: int  # before the page, where a row that ends in it begins


def cpu_needs(
    layout: formats.PackLayout,
    pages: PageSizes,
    context_tokens: int,
    predictor_bytes: int,
    sequences: Sequences = ONE_SEQUENCE,
) -> MemoryNeeds:
    """Returns the memory that the CPU's engine needs to offload experts to a disk.

    Args:    pages: of `page_sizes`.   context_tokens: of each sequence.
             predictor_bytes: `routing_bytes` of a pack, or `routing_file_bytes` of the file that a pack will have.
    """
    dense, spec = layout.dense_file.num_bytes + layout.rotation_bytes, layout.spec
    experts = expert_pages(layout, pages.page_bytes) * (pages.page_bytes + pages.head_bytes)

    def fixed(chunk_tokens: int) -> FixedParts:
        workspace = workspace_bytes(spec, chunk_tokens, sequences.number)
        workspace += whole_pass_bytes(spec, chunk_tokens, context_tokens)
        workspace += decoded_cache_bytes(spec, context_tokens, chunk_tokens, sequences.kv_dtype)
        cache = cache_bytes(spec, context_tokens, chunk_tokens, sequences.kv_dtype)
        cache += sequences.checkpoints * checkpoint_bytes(spec, context_tokens, chunk_tokens, sequences.kv_dtype)
        return FixedParts(dense, sequences.number * cache, workspace, predictor_bytes, drafts=sequences.draft_bytes)

    longest, shortest = most_chunk_tokens(context_tokens), max(LEAST_PREFILL_TOKENS, sequences.number)
    return MemoryNeeds(fixed, max(longest, shortest), shortest, int(experts.max()), int(experts.sum()), usual_share=4)


def divide_budget(
    layout: formats.PackLayout,
    budget_bytes: int,
    context_tokens: int,
    predictor_bytes: int,
    heat: NDArray[np.floating[Any]] | None = None,
    sequences: Sequences = ONE_SEQUENCE,
) -> BudgetPlan:
    """Divides a budget of host memory for a pack, which need not exist yet.

    A token needs all of a chosen expert's selector and only some of its records. So if not all experts fit, selectors
    stay in memory first, the hottest, and records get the rest as pages: at least enough for two layers' experts of a
    token. Experts whose selector stays have pages for their records alone.
    Args:    predictor_bytes: as in `cpu_needs`.   heat: [L, E], how often experts are chosen, 0 for those that are
             always read whole; None: no single rows are read, and no selector stays.
    Raises:  BudgetTooSmall if the largest expert does not fit.
    """
    page_bytes, head_bytes = pages = page_sizes(layout)
    needs = cpu_needs(layout, pages, context_tokens, predictor_bytes, sequences)
    division = divide_or_refuse(budget_bytes, needs, context_tokens)
    slot_bytes, num_selectors, selectors = page_bytes + head_bytes, 0, 0
    if heat is not None and division.experts < needs.all_experts:
        each = np.array([layouts.whole_blocks(e.selector_bytes) for layer in layout.experts for e in layer], np.int64)
        sizes = np.cumsum(each[_hottest_first(heat)[: np.count_nonzero(heat)]])
        records = expert_pages(layout, page_bytes, np.ones(heat.shape, bool)) * slot_bytes
        working = 2 * layout.spec.router.num_experts_per_tok * int(records.max()) + needs.largest
        num_selectors = int(np.searchsorted(sizes, division.experts - working, side="right"))
        selectors = int(sizes[num_selectors - 1]) if num_selectors else 0
    has_selector = resident_selectors(layout, heat, num_selectors)
    most_pages = int(expert_pages(layout, page_bytes, has_selector).sum())
    num_pages = min((division.experts - selectors) // slot_bytes, most_pages)
    chunk = division.chunk_tokens
    return BudgetPlan(budget_bytes, division.fixed, page_bytes, head_bytes, num_pages, chunk, selectors, num_selectors)


def selector_heat(popularity: NDArray[np.floating[Any]], skips: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Returns how often experts are chosen of which single rows may be read, 0 for the others: float32 [L, E].

    Args:    popularity: [L, E], in any unit.   skips: bool [L, E], whether not all neurons of an expert run.
    """
    shares = (popularity / popularity.sum(axis=1, keepdims=True)).astype(np.float32)
    heat: NDArray[np.float32] = shares * skips
    return heat


def resident_selectors(
    layout: formats.PackLayout, heat: NDArray[np.floating[Any]] | None, num_selectors: int
) -> NDArray[np.bool_]:
    """Returns the experts whose selectors stay in memory, the hottest: bool [L, E].

    Args:    heat, num_selectors: as given to, and returned by, `divide_budget`.
    """
    shape = (len(layout.experts), layout.spec.router.num_experts)
    resident = np.zeros(shape, bool)
    if heat is not None:
        resident.ravel()[_hottest_first(heat)[:num_selectors]] = True
    return resident


def _hottest_first(heat: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
    """Returns the flat indices of experts by falling heat; equally hot ones take turns between layers."""
    L, E = heat.shape
    order: NDArray[np.int64] = np.lexsort((np.repeat(np.arange(L), E), np.tile(np.arange(E), L), -heat.ravel()))
    return order


def least_budget(
    layout: formats.PackLayout, context_tokens: int, predictor_bytes: int, sequences: Sequences = ONE_SEQUENCE
) -> int:
    """Returns the smallest budget that `divide_budget` divides."""
    return cpu_needs(layout, page_sizes(layout), context_tokens, predictor_bytes, sequences).least_budget


def whole_bytes(
    layout: formats.PackLayout, context_tokens: int, predictor_bytes: int, sequences: Sequences = ONE_SEQUENCE
) -> int:
    """Returns the smallest budget with all experts resident and the longest forward passes."""
    needs = cpu_needs(layout, page_sizes(layout), context_tokens, predictor_bytes, sequences)
    return needs.fixed(PREFILL_TOKENS).num_bytes + needs.all_experts


def expert_pages(
    layout: formats.PackLayout, page_bytes: int, has_selector: NDArray[np.bool_] | None = None
) -> NDArray[np.int64]:
    """Returns the number of pages of each expert: int64 [L, E].

    Args:    has_selector: bool [L, E], the experts whose selector stays elsewhere in memory; None: no expert's does.
    """
    num_bytes = extent_bytes(layout)
    if has_selector is not None:
        before = np.array([[begin_block(expert) for expert in layer] for layer in layout.experts], np.int64)
        num_bytes = num_bytes - before * formats.DISK_BLOCK_BYTES * has_selector
    return -(-num_bytes // page_bytes)


def begin_block(expert: formats.ExpertLayout) -> int:
    """Returns the block of an extent in which its records begin."""
    return expert.selector_bytes // formats.DISK_BLOCK_BYTES


def routing_bytes(folder: Path) -> int:
    """Returns the bytes of the routing file in a pack's folder, which is in memory as a whole; 0 without one."""
    routing = folder / ROUTING_FILE
    return routing.stat().st_size if routing.exists() else 0


def page_sizes(layout: formats.PackLayout) -> PageSizes:
    """Returns the page size that wastes least over a pack's experts; of equally good ones the largest.

    Both sizes are whole blocks, and the head is at least as long as the longest row.
    """
    sizes, counts = np.unique(extent_bytes(layout), return_counts=True)
    head = layouts.whole_blocks(
        max(rows.row_bytes for layer in layout.experts for expert in layer for rows in expert.rows())
    )
    quarter = int(sizes.min()) // 4 // formats.DISK_BLOCK_BYTES * formats.DISK_BLOCK_BYTES
    least = max(head, min(LEAST_PAGE_BYTES, quarter), formats.DISK_BLOCK_BYTES)
    pages = np.arange(least, max(MAX_PAGE_BYTES, least) + 1, formats.DISK_BLOCK_BYTES)[::-1]
    costs = ((-(-sizes[None] // pages[:, None])) * counts).sum(axis=1) * (pages + head)
    return PageSizes(int(pages[np.argmin(costs)]), head)


def cache_bytes(
    spec: formats.ModelSpec, context_tokens: int, chunk_tokens: int, kv_dtype: caches.KvDtype = "f32"
) -> int:
    """Returns the bytes of the key-value cache, and of states with their copy, for passes of at most `chunk_tokens`.

    States are float32, and so is the cache of a model with an encoder.
    """
    if spec.encoder is not None:
        return 4 * (specs.cache_values(spec, context_tokens, chunk_tokens) + 2 * specs.state_values(spec))
    layers = range(spec.num_hidden_layers)
    cached = sum(kv_cache.layer_cache_bytes(spec, layer, context_tokens, chunk_tokens, kv_dtype) for layer in layers)
    return cached + 4 * 2 * specs.state_values(spec)


def checkpoint_bytes(
    spec: formats.ModelSpec, context_tokens: int, chunk_tokens: int, kv_dtype: caches.KvDtype = "f32"
) -> int:
    """Returns the bytes of a checkpoint of a sequence: its states, and the windows of layers that cache a ring."""
    num_bytes = 4 * specs.state_values(spec)
    for layer in range(spec.num_hidden_layers):
        attention, places = spec.attention_of(layer), specs.cached_tokens(spec, layer, context_tokens, chunk_tokens)
        if 0 < places < context_tokens:
            window = specs.cached_tokens(spec, layer, context_tokens, 0)
            num_bytes += window * kinds.cache_shape(attention, kv_dtype).row_bytes
        if places:
            values = attention.checkpoint_values(context_tokens, chunk_tokens)
            num_bytes += values * caches.plain_dtype(kv_dtype).itemsize
    return num_bytes


def decoded_cache_bytes(
    spec: formats.ModelSpec, context_tokens: int, chunk_tokens: int, kv_dtype: caches.KvDtype, has_kernels: bool = True
) -> int:
    """Returns the most bytes of keys and values that are dequantized at once, with their scores and sums, by torch.

    Kernels dequantize a few rows at a time, in the threads' memory; float32 is read as it is.
    Args:    has_kernels: whether native kernels compute what they can; on a GPU torch does, for several tokens.
    """
    if kv_dtype == "f32":
        return 0
    most = 0
    for attention, _ in spec.attention_kinds:
        if has_kernels and attention.kernels_attend:
            continue
        positions = 2 * context_tokens * kinds.cache_shape(attention, "f32").row_bytes
        scores = 2 * 4 * attention.num_heads * chunk_tokens * context_tokens
        width = 2 * 4 * chunk_tokens * attention.num_heads * attention.mixed_width
        most = max(
            most, min(positions, operations.MAX_DECODED_BYTES) + min(scores, 2 * operations.MAX_DECODED_BYTES) + width
        )
    return most


def workspace_bytes(
    spec: formats.ModelSpec, chunk_tokens: int, num_sequences: int = 1, has_kernels: bool = True
) -> int:
    """Returns the most bytes that a pass of `chunk_tokens` tokens needs besides weights and cache.

    Args:    num_sequences: that get logits from a pass.   has_kernels: whether the CPU's kernels run experts; if not,
             memory for experts is not counted.
    """
    d, k, E = spec.hidden_size, spec.router.num_experts_per_tok, spec.router.num_experts
    width = max(attention.width for attention, _ in spec.attention_kinds)
    hidden = [role.shape[0] for role in formats.dense_roles(spec) if role.name.endswith((".up", ".gate"))]
    widest = max([spec.expert.intermediate_size if has_kernels else 0, *hidden])
    # While experts run, there are x, its norm, both rotated, the sum of outputs, and its rotation: 6 d.
    mixing = 0 if spec.mixer is None else spec.mixer.width
    mixing = mixing if spec.ngrams is None else max(mixing, spec.ngrams.width(spec.stream_width))
    streams = 0 if spec.residual is None else 6 * spec.stream_width  # normed, gated, weighted, and before and after
    floats = 6 * d + streams + max(width, mixing) + 3 * widest + 2 * E + (k * d if has_kernels else 0)
    few = min(4 * E * _FEW_SUMS * d, _MOST_FEW_BYTES)
    many = _MANY_TOKENS * (4 * _MANY_SUMS * d + 5 * spec.expert.intermediate_size)
    # Where inputs are rounded: an expert's inputs and the outputs of its neurons, or a dense matrix's inputs.
    rounded = max(9 * (spec.expert.intermediate_size + d), 3 * max(d, width, widest))
    many = max(many, _ROUNDED_TOKENS * rounded)
    floats = chunk_tokens * floats + 4 * num_sequences * spec.vocab_size + _mixer_floats(spec)
    positions, pieces = spec.max_position_embeddings, _PIECES
    scores = max(attention.score_bytes(chunk_tokens, positions, pieces) for attention, _ in spec.attention_kinds)
    kernels = few + many + _THREADS_BYTES if has_kernels else 0
    return 4 * floats + kernels + scores + ngram_bytes(spec)


def most_verified_tokens(spec: formats.ModelSpec, chunk_tokens: int, most: int) -> int:
    """Returns how many tokens of a sequence, 1 to `most`, may get logits in the workspace of `chunk_tokens` tokens."""
    workspace = workspace_bytes(spec, chunk_tokens)
    fits = (n for n in range(most, 1, -1) if workspace_bytes(spec, n) + 4 * (n - 1) * spec.vocab_size <= workspace)
    return next(fits, 1)


def _mixer_floats(spec: formats.ModelSpec) -> int:
    """Returns the floats that mixers need, however many tokens there are.

    They are the tables of a chunk; three copies of a layer's state, one of them for predictions; and the vectors of all
    layers, which the dense part has in 16 bit.
    """
    if spec.mixer is None:
        return 0
    vectors = sum(role.shape[0] for role in spec.mixer.roles(spec.hidden_size) if len(role.shape) == 1)
    return spec.mixer.chunk_floats + 3 * spec.mixer.state.num_values + len(spec.mixer.layers) * vectors


def ngram_bytes(spec: formats.ModelSpec) -> int:
    """Returns the bytes that n-grams need, however many tokens there are: nothing of their tables but rows being read.

    They are the buffers of these rows; a copy of a layer's state for predictions, and of its last inputs and outputs;
    and the vectors of all layers, which the dense part has in 16 bit.
    """
    if spec.ngrams is None:
        return 0
    ngrams, width = spec.ngrams, spec.stream_width
    row_bytes = layouts.plain_layout(ngrams.row_values, "F32").row_bytes
    buffers = compute.SLOTS_PER_TABLE * len(ngrams.layers) * compute.SLOT_TOKENS * ngrams.num_heads * row_bytes
    vectors = sum(role.shape[0] for role in ngrams.roles(spec.hidden_size, width, 0.0) if len(role.shape) == 1)
    return buffers + 4 * (len(ngrams.layers) * vectors + 3 * ngrams.state(width).num_values)


def whole_pass_bytes(spec: formats.ModelSpec, chunk_tokens: int, context_tokens: int) -> int:
    """Returns the additional bytes of a pass in which each token has something of each position of the context.

    With an encoder, a layer runs for all tokens before the next begins.
    """
    kinds = [attention for attention, _ in spec.attention_kinds]
    num_bytes = max(each.position_bytes(chunk_tokens, context_tokens, _PIECES) for each in kinds)
    if spec.encoder is None:
        return num_bytes
    # Hidden states, normed ones, halves' outputs in pieces and whole, experts' outputs; routers' logits and scores.
    return num_bytes + 4 * context_tokens * (6 * spec.hidden_size + 3 * spec.router.num_experts)


def extent_bytes(layout: formats.PackLayout) -> NDArray[np.int64]:
    """Returns the bytes of each expert's extent: int64 [L, E]."""
    return np.array([[expert.num_bytes for expert in layer] for layer in layout.experts], np.int64)


Array = NDArray[Any]


def expert_compression(expert: formats.ExpertLayout, sparsity: float) -> tuple[float, float]:
    """Returns the size of an expert's matrices in 16 bit over that of its selector and running records.

    The first figure counts codes alone, the second also scales, zeros, CRC and padding.
    Source:  FloE §1 and §4.3: 9.3 for Mixtral at 90% sparsity counts codes alone, 2 bits for up and 16 for the rest.
    """
    halves = [(rows, share) for rows, share in ((expert.selector, 1.0), (expert.records, 1 - sparsity)) if rows]
    num_cols, num_parts = expert.records.num_cols, sum(len(rows.parts) for rows, _ in halves)
    source = 2 * num_parts * num_cols
    codes = sum(share * part.format.code_bytes(num_cols) for rows, share in halves for part in rows.parts)
    return source / codes, source / sum(share * rows.row_bytes for rows, share in halves)


class ResidentRows(NamedTuple):
    """The shares of rows that are resident for the whole run."""

    selector_share: Array  # float64 [L, E]
    row_shares: Array  # float64 [L, E, H], of slices of records


def resident_rows(layout: formats.PackLayout, popularity: Array, heat: Array, num_bytes: int) -> ResidentRows:
    """Chooses the selectors and rows to keep in `num_bytes`: those that a token reads with the highest probability.

    A fractional knapsack: every item is worth its probability for each of its bytes.
    Args:    popularity: [L, E], any unit.   heat: [L, E, H], the share of its tokens for which a row runs, in each of H
             equal slices of an expert's rows, hottest first.
    """
    L, E, H = heat.shape
    row_bytes = np.array([[[e.selector.row_bytes if e.selector else 0, e.records.row_bytes] for e in layer]
                          for layer in layout.experts], np.int64)  # fmt: skip
    num_rows = layout.experts[0][0].num_rows
    edges = np.linspace(0, num_rows, H + 1).astype(np.int64)
    chances = (popularity / popularity.sum(axis=1, keepdims=True))[:, :, None]
    # [L, E, 1 + H]: of each expert its selector's rows, then the slices of its records.
    counts = np.concatenate([np.full((L, E, 1), num_rows), np.broadcast_to(np.diff(edges), (L, E, H))], axis=2)
    sizes = np.concatenate([row_bytes[:, :, :1], np.repeat(row_bytes[:, :, 1:], H, axis=2)], axis=2)
    worth = np.concatenate([np.broadcast_to(chances, (L, E, 1)), chances * heat], axis=2)
    extra = layout.experts[0][0].extra_bytes * L * E
    order = np.argsort(-worth.ravel(), kind="stable")
    item_bytes = (counts * sizes).ravel()[order]
    before = np.cumsum(item_bytes) - item_bytes
    left = np.clip(max(num_bytes - extra, 0) - before, 0, item_bytes)
    resident: Array = np.zeros(counts.size, np.int64)  # whole rows
    resident[order] = left // np.maximum(sizes.ravel()[order], 1)
    resident = resident.reshape(counts.shape)
    shares = np.where(sizes > 0, resident / np.maximum(counts, 1), 1.0)
    return ResidentRows(shares[:, :, 0], shares[:, :, 1:])
