"""The speed of a pack on a CPU: the disk is read while experts are computed.

A replay of routes with the policy that the runtime would choose says which experts are missing, which experts of a
layer were chosen together, and how long each has been resident (`visits`).
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.convert.plan import machines, speed
from moe_pack.formats.pack import layouts
from moe_pack.formats.parts.specs import first_moe_layers
from moe_pack.runtime import DiskFacts, offload
from moe_pack.runtime.cpu.reads import MAX_READ_BYTES
from moe_pack.runtime.engine.machine import disk_cutover
from moe_pack.runtime.engine.offloaded import auto_preset
from moe_pack.runtime.model.caches import KvDtype
from moe_pack.runtime.offload import budgets, cache, replay

Array = NDArray[Any]
Floats = NDArray[np.float64]

_SURE_VISITS = 16  # with so many visits, an expert's own miss rate counts half; with none, only that of all experts
MAX_AGE = 15  # higher ages count as this one


@dataclass(frozen=True, slots=True, eq=False)
class Visits:
    """The experts that some tokens visited, V visits in all."""

    num_tokens: int
    steps: Array  # int64 [V], token * L + layer
    keys: Array  # int64 [V], layer * E + expert
    # int64 [V], the number of visits since the expert was fetched: 0 for the visit that fetches it, at most MAX_AGE
    ages: Array

    @property
    def hit_rate(self) -> float:
        """The share of visits whose expert was resident; 1 if there was no visit."""
        return float((self.ages > 0).mean()) if len(self.ages) else 1.0


def visits(
    passes: offload.Passes, facts: offload.CacheFacts, preset: offload.Preset, num_warm: int, is_filled: bool = False
) -> Visits:
    """Replays tokens that are decoded one by one, without prefetch, and returns the visits after `num_warm` tokens.

    The first `num_warm` tokens fill the cache. If all experts fit, every visit has age MAX_AGE.
    Args:    is_filled: whether the cache begins with the most popular experts, so that few tokens warm it.
    """
    L, E = facts.pages.shape
    if int(facts.pages.sum()) <= facts.num_pages:
        warm = np.sort(passes.routes[num_warm:].astype(np.int64), axis=2)  # [T, L, k]
        steps = np.repeat(np.arange(len(warm) * L), warm.shape[2])
        keys = (warm + E * np.arange(L)[:, None]).ravel()
        return Visits(len(warm), steps, keys, np.full(len(keys), MAX_AGE))
    expert_cache = offload.expert_cache_for(preset, facts)
    ages = expert_cache.is_resident.astype(np.int64)  # experts that are there before the run were fetched before
    if is_filled:
        _fill(expert_cache, facts)
        ages[expert_cache.is_resident] = MAX_AGE
    visited: list[tuple[int, int, int]] = []
    for token, l, event, _ in replay.played(passes, expert_cache):
        if isinstance(event, cache.FetchEvent):
            ages[event.key] = 0
        elif isinstance(event, cache.ComputeEvent):
            if token >= num_warm:
                visited.append(((token - num_warm) * L + l, l * E + event.key.expert, int(ages[event.key])))
            ages[event.key] += 1
    columns = np.array(visited, np.int64).reshape(-1, 3).T
    return Visits(max(len(passes.routes) - num_warm, 0), columns[0], columns[1], np.minimum(columns[2], MAX_AGE))


def _fill(expert_cache: offload.ExpertCache, facts: offload.CacheFacts) -> None:
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


USUAL_RECALL = 0.75  # of the next layer's experts if no profile says it: the lowest of CORM's figures
_WARM_SHARE = 0.25  # of the replayed tokens: they only fill the cache


@dataclass(frozen=True, slots=True, eq=False)
class FetchCosts:
    """The cost of the fetches of one visit, by age and expert: float64 [MAX_AGE + 1, L, E]."""

    num_bytes: Array
    seconds: Array  # if other experts are fetched at the same time
    alone: Array  # the shortest time, if it is the only one
    handling: Array  # what the processor does for it, in addition to the computation


def estimate_on_cpu(
    layout: formats.PackLayout,
    plan: offload.BudgetPlan,
    machine: machines.Machine,
    routing: speed.RoutingFacts,
    sparsity: Array,
    seen_tokens: int = 0,
    is_rough: bool = False,
    kv_dtype: KvDtype = "f32",
) -> speed.SpeedEstimate:
    """Estimates how fast a pack of this layout decodes on the CPU within a budget.

    Args:    plan: the budget's division.   sparsity: [L, E], the share of neurons that do not run.   seen_tokens: in
             the key-value cache.   is_rough: replays few tokens and one policy, for a search among plans.
             kv_dtype: of that cache.
    Not modelled: that neighbouring neurons run together more often than others; tokens that attend to a window.
    """
    assert machine.kind == "cpu", "a GPU has `estimate_on_gpu`"
    L, k, popularity = len(layout.experts), layout.spec.router.num_experts_per_tok, routing.popularity
    shares = popularity / popularity.sum(axis=1, keepdims=True)
    heat = planned_heat(layout, popularity, sparsity, machine.disk)
    has_selector = budgets.resident_selectors(layout, heat, plan.num_selectors)
    pages = offload.expert_pages(layout, plan.page_bytes, has_selector)
    first_layers = first_moe_layers(layout.spec)
    facts = offload.CacheFacts(pages, plan.num_pages, k, shares.astype(np.float32), first_layers[-1])
    routed, is_drawn = speed.routed(layout, popularity, routing.passes, is_rough)
    preset = auto_preset(None if is_drawn or is_rough else routed, facts, budgets.extent_bytes(layout))
    visited = visits(routed, facts, preset, int(_WARM_SHARE * len(routed.routes)), is_rough)
    running = 1.0 - sparsity
    recall = USUAL_RECALL if routing.recall is None else routing.recall
    predicted = np.full(L, 0.0 if preset.prediction == "none" else recall)
    predicted[list(first_layers)] = 0.0
    has_all = int(pages.sum()) <= plan.num_pages and not has_selector.any()
    read = np.ones_like(running) if has_all else running
    fetching = fetched_from_disk(layout, read, machine, plan.page_bytes, has_selector, predicted)
    dense_s, dense_bytes = speed.dense_seconds(layout, machine, seen_tokens, kv_dtype)
    computing, reading = speed.expert_table(layout, running, lambda e, share: speed.expert_seconds(e, share, machine))
    fixed, num_layers, num_tokens = machine.fixed, layout.spec.num_hidden_layers, max(visited.num_tokens, 1)
    between_s = fixed.layer_s + dense_s / num_layers  # between the experts of one layer and those of the next
    waiting = waited(visited, computing + fixed.expert_s, fetching, predicted, between_s)
    # For each expert that was not predicted, a wrongly predicted one is read too.
    wrong = np.where(predicted > 0, 1 - predicted, 0.0)[visited.steps % L]
    cells = (visited.ages, visited.keys)
    fetched = fetching.num_bytes.reshape(MAX_AGE + 1, -1)[cells]
    handling = float(fetching.handling.reshape(MAX_AGE + 1, -1)[cells].sum())
    return speed.SpeedEstimate(
        policy=preset.name,
        hit_rate=visited.hit_rate,
        misses=expected_misses(visited, shares * k),
        fetched_bytes=float((fetched * (1 + wrong)).sum()) / num_tokens,
        read_bytes=float(reading.ravel()[visited.keys].sum()) / num_tokens + dense_bytes,
        seconds=speed.TokenSeconds(
            fixed.token_s + num_layers * fixed.layer_s + L * k * fixed.expert_s + handling / num_tokens,
            dense_s,
            float(computing.ravel()[visited.keys].sum()) / num_tokens,
            waiting / num_tokens,
        ),
    )


def planned_heat(layout: formats.PackLayout, popularity: Array, sparsity: Array, disk: DiskFacts) -> Array | None:
    """Returns `selector_heat` of a pack that need not exist yet; None if no single rows are read.

    Args:    popularity, sparsity: [L, E].
    """
    reads_rows = layout.experts[0][0].selector is not None and sparsity.any() and disk_cutover(layout, disk) > 0
    return budgets.selector_heat(popularity, sparsity > 0) if reads_rows else None


def fetched_from_disk(
    layout: formats.PackLayout,
    running: Array,
    machine: machines.Machine,
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
    costs = np.zeros((4, MAX_AGE + 1, *running.shape))  # the fields of `FetchCosts`
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
            costs[:, :, l, e] = known[key]
    return FetchCosts(*costs)


def _whole(expert: formats.ExpertLayout, machine: machines.Machine, page_bytes: int, stays: bool) -> Array:
    """Returns the values of `FetchCosts` at each age, [4, ages], of an expert that is read whole.

    Args:    stays: whether its selector stays in memory, and is not read.
    """
    disk = machine.disk
    num_bytes = layouts.whole_blocks(expert.num_bytes - stays * budgets.begin_block(expert) * formats.DISK_BLOCK_BYTES)
    size = min(num_bytes, page_bytes)
    table = np.zeros((4, MAX_AGE + 1))
    table[:3, 0] = num_bytes, disk.seconds(num_bytes / size, size), disk.seconds_for_few(num_bytes / size, size)
    num_reads = -(-num_bytes // MAX_READ_BYTES)
    table[3, 0] = machine.fixed.miss_s + disk.cpu_seconds(num_reads, num_bytes) / machine.cores
    return table


def _by_rows(
    expert: formats.ExpertLayout, share: float, machine: machines.Machine, stays: bool, predicted: float
) -> Array:
    """Returns the values of `FetchCosts` of an expert by rows: its selector first, then missing rows at each visit.

    Meaning: neurons run independently; n visits need 1 - (1 - share)^n of all rows.
    """
    assert expert.selector is not None, "an expert without a selector is read whole"
    disk, row_bytes = machine.disk, expert.records.row_bytes
    table = np.zeros((4, MAX_AGE + 1))
    if not stays:
        size = float(expert.selector_bytes)
        table[:3, 0] = size, disk.seconds(1, size), disk.seconds_for_few(1, size)
        table[3, 0] = disk.cpu_seconds(1, size) / machine.cores
    num_blocks, gap_blocks = (
        expert.records_bytes / formats.DISK_BLOCK_BYTES,
        disk.gap_bytes() // formats.DISK_BLOCK_BYTES,
    )
    read = _share_read(share, row_bytes, gap_blocks)
    select_s, _ = speed.row_seconds(expert, machine)
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
    """Returns the probability that none of so many consecutive blocks is needed: no row with bytes in them runs."""
    return float((1 - share) ** ((num_blocks * formats.DISK_BLOCK_BYTES + row_bytes) / row_bytes))


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


class CpuTier(speed.MemoryTier):
    """Host memory over the disk: the tier of `--device cpu`. `kv_dtype`: of the key-value cache."""

    def __init__(
        self,
        machine: machines.Machine,
        routing: speed.RoutingFacts,
        budget_bytes: int,
        context_tokens: int,
        kv_dtype: KvDtype = "f32",
    ) -> None:
        super().__init__(machine, routing, budget_bytes, context_tokens)
        self._sequences = offload.Sequences(kv_dtype=kv_dtype)

    def estimate(
        self, layout: layouts.PackLayout, sparsity: Floats, less_bytes: int = 0, is_rough: bool = False
    ) -> speed.SpeedEstimate:
        routing = self._routing
        heat = planned_heat(layout, routing.popularity, sparsity, self._machine.disk)
        plan = offload.divide_budget(
            layout, self.budget_bytes - less_bytes, self._context_tokens, routing.predictor_bytes, heat, self._sequences
        )
        token = estimate_on_cpu(
            layout, plan, self._machine, routing, sparsity, self._seen_tokens, is_rough, self._sequences.kv_dtype
        )
        return replace(token, shares=plan.parts)

    def least_bytes(self, layout: layouts.PackLayout) -> int:
        return offload.least_budget(layout, self._context_tokens, self._routing.predictor_bytes, self._sequences)

    def fetch_seconds(self, expert: layouts.ExpertLayout, sparsity: float) -> float:
        """Returns the seconds to read an expert whole, or its selector and running rows if that is faster."""
        return speed.disk_seconds(expert, 1 - sparsity, self._machine.disk)
