"""The cost model: estimates how fast a pack decodes before the pack exists, from measured rates.

    seconds of a token = fixed + dense bytes / rate + sum over layers of (experts / rate, while missing bytes are read)

Which experts are missing comes from a replay of routes with the policy that the runtime would choose, by the runtime's
own decisions and without weights (`visits`). `runtime.offload.replay` only counts hits; the cost model also needs to
know which experts of a layer were chosen together, and how long each has been resident.

An estimate is of the steady state: tokens are decoded one by one, after the cache has filled. Prefill is not estimated.
The budget's division is an argument (`BudgetPlan`, `GpuMemoryPlan`): `runtime/offload/budget.py` makes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack.convert.plan.machines import Machine, rate_of
from moe_pack.formats import DISK_BLOCK_BYTES, ExpertLayout, PackLayout, RowLayout
from moe_pack.formats.layout import whole_blocks
from moe_pack.formats.spec import cache_values, first_moe_layers
from moe_pack.runtime import DiskFacts
from moe_pack.runtime.machine import disk_cutover
from moe_pack.runtime.offload import (
    GPU_PAGE_BYTES,
    BudgetPlan,
    CacheFacts,
    ExpertCache,
    GpuMemoryPlan,
    Passes,
    PolicyName,
    Preset,
    auto_preset,
    expert_cache_for,
    expert_pages,
)
from moe_pack.runtime.offload.budget import begin_block, best_gpu_plan, resident_selectors, selector_heat
from moe_pack.runtime.offload.cache import ComputeEvent, FetchEvent
from moe_pack.runtime.offload.disk import MAX_READ_BYTES

Array = NDArray[Any]

_SURE_VISITS = 16  # with so many visits, an expert's own miss rate counts half; with none, only that of all experts
MAX_AGE = 15  # higher ages count as this one


@dataclass(frozen=True, slots=True, eq=False)
class Visits:
    """The experts that some tokens visited, V visits in all.

    `steps`: int64 [V], token * L + layer.   `keys`: int64 [V], layer * E + expert.   `ages`: int64 [V], the number of
    visits since the expert was fetched: 0 for the visit that fetches it, at most MAX_AGE.
    """

    num_tokens: int
    steps: Array
    keys: Array
    ages: Array

    @property
    def hit_rate(self) -> float:
        """Returns the share of visits whose expert was resident; 1 if there was no visit."""
        return float((self.ages > 0).mean()) if len(self.ages) else 1.0


def visits(passes: Passes, facts: CacheFacts, preset: Preset, num_warm: int, is_filled: bool = False) -> Visits:
    """Replays tokens that are decoded one by one, without prefetch, and returns the visits after `num_warm` tokens.

    The first `num_warm` tokens fill the cache. If all experts fit, every visit has age MAX_AGE.
    Args:    is_filled: whether the cache begins with the most popular experts, so that few tokens warm it.
    """
    L, E = facts.pages.shape
    routes = np.sort(passes.routes.astype(np.int64), axis=2)  # [T, L, k]
    if int(facts.pages.sum()) <= facts.num_pages:
        warm = routes[num_warm:]
        steps = np.repeat(np.arange(len(warm) * L), routes.shape[2])
        keys = (warm + E * np.arange(L)[:, None]).ravel()
        return Visits(len(warm), steps, keys, np.full(len(keys), MAX_AGE))
    expert_cache = expert_cache_for(preset, facts)
    ages = expert_cache.is_resident.astype(np.int64)  # experts that are there before the run were fetched before
    if is_filled:
        _fill(expert_cache, facts)
        ages[expert_cache.is_resident] = MAX_AGE
    visited: list[tuple[int, int, int]] = []
    for token, layers in enumerate(routes.tolist()):
        for l, experts in enumerate(layers):
            for event in expert_cache.schedule(l, experts):
                if isinstance(event, FetchEvent):
                    ages[event.key] = 0
                elif isinstance(event, ComputeEvent):
                    if token >= num_warm:
                        visited.append(((token - num_warm) * L + l, l * E + event.key.expert, int(ages[event.key])))
                    ages[event.key] += 1
    columns = np.array(visited, np.int64).reshape(-1, 3).T
    return Visits(max(len(routes) - num_warm, 0), columns[0], columns[1], np.minimum(columns[2], MAX_AGE))


def _fill(expert_cache: ExpertCache, facts: CacheFacts) -> None:
    """Fetches experts by falling popularity while they fit, as if they had been predicted."""
    order = np.argsort(-facts.popularity, axis=None, kind="stable").tolist()
    for layer_idx, expert in (divmod(place, facts.pages.shape[1]) for place in order):
        if facts.pages[layer_idx, expert] <= expert_cache.free_pages:
            for _ in expert_cache.prefetch(layer_idx, [expert], during=layer_idx):
                pass  # no bytes are moved in a replay


def expected_misses(visited: Visits, runs: Array) -> Array:
    """Estimates how often each expert is missing for a token: float64 [L, E].

    Meaning: runs * (missed + n * m) / (came + n), where m is the share of all visits that missed and n is _SURE_VISITS.
             Experts with few visits get nearly the same rate, because a plan for exactly these visits would be bad for
             other text.
    Args:    runs: [L, E], how often a token chooses the expert.
    """
    came, missed = (np.bincount(keys, minlength=runs.size) for keys in (visited.keys, visited.keys[visited.ages == 0]))
    of_all = missed.sum() / max(came.sum(), 1)
    expected: Array = runs * ((missed + _SURE_VISITS * of_all) / (came + _SURE_VISITS)).reshape(runs.shape)
    return expected


def drawn_passes(popularity: Array, num_active: int, num_tokens: int, seed: int = 0) -> Passes:
    """Draws routes independently: for each token and layer, k different experts by the layer's popularity [L, E]."""
    shares = popularity / popularity.sum(axis=1, keepdims=True)
    generator = np.random.default_rng(seed)
    # The k largest of log p + Gumbel noise: draws without replacement.
    noise = generator.gumbel(size=(num_tokens, *shares.shape))
    with np.errstate(divide="ignore"):
        scores = np.log(shares) + noise
    routes = np.argsort(-scores, axis=2, kind="stable")[:, :, :num_active].astype("<u2")
    return Passes(routes, np.ones(num_tokens, np.uint32), None, shares.astype("<f4"))


USUAL_RECALL = 0.75  # of the next layer's experts if no profile says it: the lowest of CORM's figures
# A replay has at most so many tokens: more change hit rates by less than the routes of another text do.
_MOST_TOKENS, _LEAST_TOKENS, _MOST_VISITS = 4096, 64, 50_000
_LEAST_ROUGH_TOKENS, _ROUGH_VISITS = 16, 6000
PAGE_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the experts' part of the GPU's memory
_WARM_SHARE = 0.25  # of the replayed tokens: they only fill the cache


@dataclass(frozen=True, slots=True)
class TokenSeconds:
    """The seconds of a token. `waiting`: for fetched bytes, as far as computation does not hide it."""

    fixed: float
    dense: float
    experts: float
    waiting: float

    @property
    def total(self) -> float:
        """Returns the sum of all."""
        return self.fixed + self.dense + self.experts + self.waiting


@dataclass(frozen=True, slots=True, eq=False)
class TokenEstimate:
    """The estimate for a decoded token.

    `hit_rate`: the share of experts that were resident when the router chose them, without prefetch.   `misses`:
    float64 [L, E], how often the expert is missing for a token.   `fetched_bytes`: from the disk or over the link.
    `read_bytes`: of weights in fast memory.
    """

    policy: PolicyName
    hit_rate: float
    misses: Array
    fetched_bytes: float
    read_bytes: float
    seconds: TokenSeconds

    @property
    def tokens_per_second(self) -> float:
        """Returns the tokens a second of decode."""
        return 1 / self.seconds.total


@dataclass(frozen=True, slots=True, eq=False)
class FetchCosts:
    """The cost of the fetches of one visit, by age and expert: float64 [MAX_AGE + 1, L, E].

    `seconds`: if other experts are fetched at the same time.   `alone`: the shortest time, if it is the only one.
    `handling`: what the processor does for it, in addition to the computation.
    """

    num_bytes: Array
    seconds: Array
    alone: Array
    handling: Array


def estimate_on_cpu(
    layout: PackLayout,
    plan: BudgetPlan,
    machine: Machine,
    popularity: Array,
    sparsity: Array,
    passes: Passes | None = None,
    recall: float | None = None,
    seen_tokens: int = 0,
    is_rough: bool = False,
) -> TokenEstimate:
    """Estimates how fast a pack of this layout decodes on the CPU within a budget.

    Args:    plan: the budget's division.   popularity: [L, E], any unit.   sparsity: [L, E], the share of neurons that
             do not run.   passes: routes to replay, of text not used for calibration; if None, independent draws from
             `popularity`.   recall: the share of the next layer's experts that the best predictor finds; None if no
             profile says it.   seen_tokens: tokens in the key-value cache.   is_rough: replays few tokens and one
             policy, for a search among plans.
    Not modelled: that neighbouring neurons run together more often than others; tokens that attend to a window.
    """
    assert machine.kind == "cpu", "a GPU has `estimate_on_gpu`"
    k = layout.spec.router.num_experts_per_tok
    heat = planned_heat(layout, popularity, sparsity, machine.disk)
    has_selector = resident_selectors(layout, heat, plan.num_selectors)
    facts = CacheFacts(
        expert_pages(layout, plan.page_bytes, has_selector),
        plan.num_pages,
        k,
        (popularity / popularity.sum(axis=1, keepdims=True)).astype(np.float32),
        first_moe_layers(layout.spec)[-1],
    )
    extents = np.array([[expert.num_bytes for expert in layer] for layer in layout.experts])
    routed, is_drawn = _routed(layout, popularity, passes, is_rough)
    preset = auto_preset(None if is_drawn or is_rough else routed, facts, extents)
    visited = visits(routed, facts, preset, int(_WARM_SHARE * len(routed.routes)), is_rough)
    running = 1.0 - sparsity
    recall = 0.0 if preset.prediction == "none" else USUAL_RECALL if recall is None else recall
    predicted = np.full(len(layout.experts), recall)
    predicted[list(first_moe_layers(layout.spec))] = 0.0
    has_all = int(facts.pages.sum()) <= facts.num_pages and not has_selector.any()
    fetching = fetched_from_disk(
        layout, np.ones_like(running) if has_all else running, machine, plan.page_bytes, has_selector, predicted
    )
    return _token_estimate(layout, machine, running, popularity, visited, fetching, predicted, preset.name, seen_tokens)


def planned_heat(layout: PackLayout, popularity: Array, sparsity: Array, disk: DiskFacts) -> Array | None:
    """Returns `selector_heat` of a pack that need not exist yet; None if no single rows are read.

    Args:    popularity, sparsity: [L, E].
    """
    reads_rows = layout.experts[0][0].selector is not None and sparsity.any() and disk_cutover(layout, disk) > 0
    return selector_heat(popularity, sparsity > 0) if reads_rows else None


def _routed(layout: PackLayout, popularity: Array, passes: Passes | None, is_rough: bool) -> tuple[Passes, bool]:
    """Returns the routes to replay, not more than are worth their time, and whether they were drawn."""
    k = layout.spec.router.num_experts_per_tok
    most_visits, least = (_ROUGH_VISITS, _LEAST_ROUGH_TOKENS) if is_rough else (_MOST_VISITS, _LEAST_TOKENS)
    num_tokens = min(_MOST_TOKENS, max(least, most_visits // (k * len(layout.experts))))
    if passes is None:
        return drawn_passes(popularity, k, num_tokens), True
    routes = passes.routes[:num_tokens]
    return Passes(routes, np.ones(len(routes), np.uint32), None, passes.popularity), False


def estimate_on_gpu(
    layout: PackLayout,
    plan: GpuMemoryPlan,
    machine: Machine,
    popularity: Array,
    heat: Array,
    passes: Passes | None = None,
    seen_tokens: int = 0,
    is_rough: bool = False,
) -> TokenEstimate:
    """Estimates how fast a pack of this layout decodes on a GPU that reads rows from host memory over the link.

    Experts that do not fit in host memory are read from the disk. The estimate was not yet compared with a measurement.
    Args:    plan: the division of the GPU's memory.   heat: [L, E, H], as in `best_gpu_plan`; the others as in
             `estimate_on_cpu`.
    """
    assert machine.kind == "cuda", "the rates of a GPU"
    if layout.experts[0][0].selector is None:
        heat = np.ones_like(heat)  # without a selector a token needs all rows
    k = layout.spec.router.num_experts_per_tok
    missing = _missing_bytes(layout, plan)
    pages = -(-missing // plan.page_bytes)
    shares = (popularity / popularity.sum(axis=1, keepdims=True)).astype(np.float32)
    num_pages = plan.num_pages or int(pages.sum())  # 0 if all experts are resident
    facts = CacheFacts(pages, num_pages, k, shares, first_moe_layers(layout.spec)[-1])
    extents = np.array([[expert.num_bytes for expert in layer] for layer in layout.experts])
    routed, is_drawn = _routed(layout, popularity, passes, is_rough)
    preset = auto_preset(None if is_drawn or is_rough else routed, facts, extents)
    visited = visits(routed, facts, preset, int(_WARM_SHARE * len(routed.routes)), is_rough)
    fetching = fetched_over_link(layout, plan, heat, machine)
    return _token_estimate(
        layout,
        machine,
        heat.mean(axis=2),
        popularity,
        visited,
        fetching,
        np.zeros(len(layout.experts)),
        preset.name,
        seen_tokens,
    )


def fastest_gpu_plan(
    layout: PackLayout,
    target_bytes: int,
    context_tokens: int,
    predictor_bytes: int,
    machine: Machine,
    popularity: Array,
    heat: Array,
    passes: Passes | None = None,
    is_rough: bool = False,
    page_shares: Sequence[float] = PAGE_SHARES,
) -> tuple[GpuMemoryPlan, TokenEstimate]:
    """Returns the division of a GPU's memory with the fastest estimate, of a few shares for pages, and the estimate.

    Args:    page_shares: to try, of the experts' memory.
    Raises:  RunError as `best_gpu_plan`.
    """
    plans = [
        best_gpu_plan(layout, target_bytes, context_tokens, predictor_bytes, popularity, heat, share)
        for share in page_shares
    ]
    tried = [
        (plan, estimate_on_gpu(layout, plan, machine, popularity, heat, passes, context_tokens, is_rough))
        for plan in (plans if plans[0].pages else plans[:1])
    ]
    return min(tried, key=lambda pair: pair[1].seconds.total)


def fetched_over_link(layout: PackLayout, plan: GpuMemoryPlan, heat: Array, machine: Machine) -> FetchCosts:
    """Returns what a GPU fetches: the selectors that are not resident, and running rows that did not run before.

    Meaning: row i, if it is not resident, is fetched at the n-th visit with probability heat_i * (1 - heat_i)^n.
    """
    num_rows = layout.experts[0][0].num_rows
    row_bytes = np.array([[e.records.row_bytes for e in layer] for layer in layout.experts])
    selector_bytes = np.array([[e.selector_bytes for e in layer] for layer in layout.experts])
    wanted = (1 - plan.row_shares) * heat
    num_bytes = np.stack(
        [num_rows * row_bytes * (wanted * (1 - heat) ** age).mean(axis=2) for age in range(MAX_AGE + 1)]
    )
    num_bytes[0] += (1 - plan.selector_share) * selector_bytes
    total = sum(expert.num_bytes for layer in layout.experts for expert in layer)
    seconds = num_bytes * link_seconds(machine, total, plan.page_bytes)
    return FetchCosts(num_bytes, seconds, np.zeros_like(seconds), np.zeros_like(seconds))


def link_seconds(machine: Machine, total_bytes: int, read_bytes: int = GPU_PAGE_BYTES) -> float:
    """Returns the mean seconds to bring a byte of an expert to the GPU.

    Experts that do not fit in host memory come from the disk.
    Args:    total_bytes: of all experts.   read_bytes: of one read from the disk.
    """
    assert machine.link_rate is not None, "a GPU has a link"
    on_disk = 0.0 if machine.ram_bytes is None else max(0.0, 1 - machine.ram_bytes / total_bytes)
    from_disk = min(machine.disk.rate(read_bytes), machine.link_rate)
    return (1 - on_disk) / machine.link_rate + on_disk / from_disk


def _missing_bytes(layout: PackLayout, plan: GpuMemoryPlan) -> Array:
    """Returns the bytes of each expert that are not always resident, int64 [L, E]; they share the pages."""
    selectors = np.array([[e.selector_bytes for e in layer] for layer in layout.experts])
    records = np.array([[e.records_bytes for e in layer] for layer in layout.experts])
    missing = (1 - plan.selector_share) * selectors + (1 - plan.row_shares.mean(axis=2)) * records
    whole: Array = np.ceil(missing - 1e-6).astype(np.int64)
    return whole


def expert_seconds(expert: ExpertLayout, running: float, machine: Machine) -> tuple[float, float]:
    """Returns the seconds to compute an expert for one token, and the bytes that this reads from fast memory.

    Args:    running: the share of neurons that run. Without a selector all of the record is read.
    """
    seconds = num_bytes = 0.0
    running = 1.0 if expert.selector is None else running
    for rows, share in ((expert.selector, 1.0), (expert.records, running)):
        if rows is None:
            continue
        num_rows = share * expert.num_rows
        num_bytes += num_rows * rows.row_bytes
        seconds += num_rows * sum(_row_seconds(rows, machine))
    return seconds, num_bytes


def _row_seconds(rows: RowLayout, machine: Machine) -> list[float]:
    """Returns the seconds of each of a row's parts, with their share of the row's CRC and padding."""
    of_parts = sum(part.num_bytes for part in rows.parts)
    scale = rows.row_bytes / of_parts
    return [scale * part.num_bytes / machine.expert_rate(part.format) + machine.row_s for part in rows.parts]


def dense_seconds(layout: PackLayout, machine: Machine, seen_tokens: int) -> tuple[float, float]:
    """Returns the seconds of the dense part for one token, and the bytes that it reads.

    The embedding does not count, unless it is the head too: a token reads one row of it.
    """
    seconds = num_bytes = 0.0
    for dense in layout.dense:
        if dense.role.name == "embed" and not layout.spec.tied_head:
            continue
        width = dense.rows.parts[0].format.width if dense.rows else {"F32": 32}.get(dense.dtype, 16)
        rate = machine.memory_rate if width == 32 else rate_of(machine.dense_rates, width)
        seconds += dense.entry.num_bytes / rate
        num_bytes += dense.entry.num_bytes
    cached = 4 * cache_values(layout.spec, seen_tokens, 1)
    return seconds + cached / machine.memory_rate, num_bytes + cached


def fetched_from_disk(
    layout: PackLayout,
    running: Array,
    machine: Machine,
    page_bytes: int,
    has_selector: NDArray[np.bool_],
    predicted: Array | None = None,
) -> FetchCosts:
    """Returns what the engine reads of experts: all bytes, or selectors and running rows if that is faster.

    Args:    running: [L, E], the share of neurons that run.   page_bytes: the longest read.   has_selector: bool
             [L, E], the experts whose selectors stay in memory.   predicted: [L], the share of experts that are
             predicted; where single rows are read, their selectors are computed twice.
    """
    cutover = disk_cutover(layout, machine.disk)
    shape = (MAX_AGE + 1, *running.shape)
    fetching = FetchCosts(np.zeros(shape), np.zeros(shape), np.zeros(shape), np.zeros(shape))
    # Experts with one layout are one object, which is found quickly.
    known: dict[tuple[int, float, bool, bool, float], Array] = {}
    for l, layer in enumerate(layout.experts):
        by_rows = bool(running[l].mean() < cutover)
        for e, expert in enumerate(layer):
            share, stays = float(running[l, e]), bool(has_selector[l, e])
            read_by_rows = by_rows and share < 1 and expert.selector is not None
            key = (id(expert), share, read_by_rows, stays, 0.0 if predicted is None else float(predicted[l]))
            if key not in known:
                if key[2]:
                    known[key] = _by_rows(expert, share, machine, stays, key[4])
                else:
                    known[key] = _whole(expert, machine, page_bytes, stays)
            for table, values in zip(_tables(fetching), known[key], strict=True):
                table[:, l, e] = values
    return fetching


def _tables(fetching: FetchCosts) -> tuple[Array, Array, Array, Array]:
    return fetching.num_bytes, fetching.seconds, fetching.alone, fetching.handling


def _whole(expert: ExpertLayout, machine: Machine, page_bytes: int, stays: bool) -> Array:
    """Returns the values of `FetchCosts` at each age, [4, ages], of an expert that is read whole.

    Args:    stays: whether its selector stays in memory, and is not read.
    """
    disk = machine.disk
    num_bytes = whole_blocks(expert.num_bytes - stays * begin_block(expert) * DISK_BLOCK_BYTES)
    size = min(num_bytes, page_bytes)
    table = np.zeros((4, MAX_AGE + 1))
    table[:3, 0] = num_bytes, disk.seconds(num_bytes / size, size), disk.seconds_for_few(num_bytes / size, size)
    num_reads = -(-num_bytes // MAX_READ_BYTES)
    table[3, 0] = machine.fixed.miss_s + disk.cpu_seconds(num_reads, num_bytes) / machine.cores
    return table


def _by_rows(expert: ExpertLayout, share: float, machine: Machine, stays: bool, predicted: float) -> Array:
    """Returns the same for an expert whose selector is read first, then at each visit the missing rows that run.

    Meaning: neurons run independently; n visits need 1 - (1 - share)^n of all rows.
    """
    assert expert.selector is not None, "an expert without a selector is read whole"
    disk, row_bytes = machine.disk, expert.records.row_bytes
    table = np.zeros((4, MAX_AGE + 1))
    if not stays:
        size = float(expert.selector_bytes)
        table[:3, 0] = size, disk.seconds(1, size), disk.seconds_for_few(1, size)
        table[3, 0] = disk.cpu_seconds(1, size) / machine.cores
    num_blocks, gap_blocks = expert.records_bytes / DISK_BLOCK_BYTES, disk.gap_bytes() // DISK_BLOCK_BYTES
    read = _share_read(share, row_bytes, gap_blocks)
    select_s = expert.num_rows * sum(_row_seconds(expert.selector, machine))
    for age in range(MAX_AGE + 1):
        # Each visit reads such a share of all blocks, wherever those of the visits before are.
        untouched = (1 - read) ** age
        num_bytes = expert.records_bytes * read * untouched
        num_reads = _num_reads(share * untouched, row_bytes, num_blocks, gap_blocks)
        num_reads = max(num_reads, num_bytes / MAX_READ_BYTES)
        size = num_bytes / num_reads if num_reads else 0.0
        in_part = 1 - (1 - untouched) ** num_blocks
        table[:, age] += (
            num_bytes,
            disk.seconds(num_reads, size),
            disk.seconds_for_few(num_reads, size),
            in_part * (machine.fixed.rows_s + predicted * select_s)
            + disk.cpu_seconds(num_reads, num_bytes) / machine.cores,
        )
    return table


def _unneeded(share: float, row_bytes: int, num_blocks: int) -> float:
    """Returns the probability that none of so many consecutive blocks is needed: no row with bytes in them runs.

    Args:    share: the probability of each row to run.
    """
    return float((1 - share) ** ((num_blocks * DISK_BLOCK_BYTES + row_bytes) / row_bytes))


def _share_read(share: float, row_bytes: int, gap_blocks: int) -> float:
    """Returns the share of blocks that is read if each row runs with probability `share`.

    Meaning: none of g consecutive blocks is needed with probability u(g). Gaps of exactly g blocks have a share
             g * (u(g) - 2 u(g + 1) + u(g + 2)) of all; those of up to G blocks are read too, so that
             1 - (G + 1) u(G + 1) + G u(G + 2) of all are read.
    """
    left, next_left = (_unneeded(share, row_bytes, gap_blocks + number) for number in (1, 2))
    return 1 - (gap_blocks + 1) * left + gap_blocks * next_left


def _num_reads(share: float, row_bytes: int, num_blocks: float, gap_blocks: int) -> float:
    """Returns how many reads `_share_read` takes, of so many blocks.

    Meaning: a read begins at a needed block if none of the G + 1 blocks before it is needed. With u(g) as there, that
             happens at each block with probability u(G + 1) - u(G + 2). The first G + 1 blocks have fewer before them:
             there one read begins with probability 1 - u(G + 1).
    """
    left, next_left = (_unneeded(share, row_bytes, gap_blocks + number) for number in (1, 2))
    return 1 - left + max(num_blocks - gap_blocks - 1, 0.0) * (left - next_left)


def _token_estimate(
    layout: PackLayout,
    machine: Machine,
    running: Array,
    popularity: Array,
    visited: Visits,
    fetching: FetchCosts,
    predicted: Array,
    policy: PolicyName,
    seen_tokens: int,
) -> TokenEstimate:
    L = len(layout.experts)
    computing, reading = _expert_table(layout, running, machine)
    dense_s, dense_bytes = dense_seconds(layout, machine, seen_tokens)
    k, fixed = layout.spec.router.num_experts_per_tok, machine.fixed
    num_layers, num_tokens = layout.spec.num_hidden_layers, max(visited.num_tokens, 1)
    fixed_s = fixed.token_s + num_layers * fixed.layer_s + L * k * fixed.expert_s
    between_s = fixed.layer_s + dense_s / num_layers  # between the experts of one layer and those of the next
    waiting = waited(visited, computing + fixed.expert_s, fetching, predicted, between_s)
    # For each expert that was not predicted, a wrongly predicted one is read too.
    wrong = np.where(predicted > 0, 1 - predicted, 0.0)[visited.steps % L]
    fetched = fetching.num_bytes.reshape(MAX_AGE + 1, -1)[visited.ages, visited.keys]
    return TokenEstimate(
        policy=policy,
        hit_rate=visited.hit_rate,
        misses=expected_misses(visited, popularity * (k / popularity.sum(axis=1, keepdims=True))),
        fetched_bytes=float((fetched * (1 + wrong)).sum()) / num_tokens,
        read_bytes=float(reading.ravel()[visited.keys].sum()) / num_tokens + dense_bytes,
        seconds=TokenSeconds(
            fixed_s + float(fetching.handling.reshape(MAX_AGE + 1, -1)[visited.ages, visited.keys].sum()) / num_tokens,
            dense_s,
            float(computing.ravel()[visited.keys].sum()) / num_tokens,
            waiting / num_tokens,
        ),
    )


def _expert_table(layout: PackLayout, running: Array, machine: Machine) -> tuple[Array, Array]:
    """Returns `expert_seconds` of all experts: seconds and bytes, float64 [L, E] each."""
    known: dict[tuple[int, float], tuple[float, float]] = {}  # by layout object, as in `fetched_from_disk`
    computing, reading = np.zeros(running.shape), np.zeros(running.shape)
    for l, layer in enumerate(layout.experts):
        for e, expert in enumerate(layer):
            key = (id(expert), float(running[l, e]))
            if key not in known:
                known[key] = expert_seconds(expert, key[1], machine)
            computing[l, e], reading[l, e] = known[key]
    return computing, reading


def waited(visited: Visits, computing: Array, fetching: FetchCosts, predicted: Array, between_s: float) -> float:
    """Returns the seconds that all tokens together wait for fetched bytes.

    Meaning: a layer's m reads take R seconds together, which is the sum of their times and the latency of the first;
             the i-th ends after i R / m. Resident experts are computed meanwhile, then missing ones as they arrive:
                 end = max(H + M, R + M / m, R / m + M),   wait = end - H - M,
             where H and M are the seconds to compute the resident and the missing experts. Predicted experts are read
             during the whole layer before: the wait is the part of R that does not fit into it.
    Args:    computing: float64 [L, E], seconds of each expert without its handling.   predicted: [L], the share of
             experts that are predicted.   between_s: seconds of a layer without its experts.
    """
    if not len(visited.steps):
        return 0.0
    num_steps = int(visited.steps.max()) + 1
    cells = (visited.ages, visited.keys)
    ages = len(fetching.seconds)

    def summed(values: Array) -> Array:
        return np.bincount(visited.steps, values, num_steps)

    seconds = fetching.seconds.reshape(ages, -1)[cells]
    is_late = seconds > 0
    num_late, read = summed(is_late), summed(seconds)
    latency = np.zeros(num_steps)
    np.maximum.at(latency, visited.steps, fetching.alone.reshape(ages, -1)[cells] - seconds)
    read = read + latency
    compute = computing.ravel()[visited.keys] + fetching.handling.reshape(ages, -1)[cells]
    compute_all, late = summed(compute), summed(compute * is_late)
    m = np.maximum(num_late, 1)
    end = np.maximum(compute_all, np.maximum(read + late / m, read / m + late))
    at_once = np.where(num_late > 0, end - compute_all, 0.0)
    share = predicted[np.arange(num_steps) % len(predicted)]
    prefetched = np.maximum(share * read - (compute_all + between_s), 0.0)
    return float((prefetched + (1 - share) * at_once).sum())
