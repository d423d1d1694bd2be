"""What routers find in fast memory, token by token: replayed with the runtime's own decisions, without weights.

`runtime.replay` counts hits; a cost model also has to know which of a layer's experts came together, and how long each
has been there.

How fast a pack would be, before it exists: bytes fetched and seconds a decoded token, from measured rates.

    token = fixed + dense bytes / rate + sum over layers of (experts / rate, while what is missing is read)

What is missing comes out of a replay of routes with the policy the runtime would take. A prediction is of the steady
state: tokens decoded one by one, after the cache has filled. Prompts are not predicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack.convert.plan.machines import Machine, rate_of
from moe_pack.formats import DISK_BLOCK_BYTES, ExpertLayout, PackLayout, RowLayout
from moe_pack.formats.layout import whole_blocks
from moe_pack.formats.spec import cache_values
from moe_pack.runtime import DiskFacts
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
from moe_pack.runtime.offload.budget import best_gpu_plan
from moe_pack.runtime.offload.cache import ComputeEvent, FetchEvent

Array = NDArray[Any]

_SURE_VISITS = 16  # of an expert: with so many its own rate of misses counts half, with none that of all
MAX_AGE = 15  # visits are not told apart beyond


@dataclass(frozen=True, slots=True, eq=False)
class Visits:
    """Experts visited by some tokens: `steps` int64 [V], token * L + layer; `keys` int64 [V], layer * E + expert.

    `ages` int64 [V]: visits since the expert was brought in, 0 for the one that brings it in, at most MAX_AGE.
    """

    num_tokens: int
    steps: Array
    keys: Array
    ages: Array

    @property
    def hit_rate(self) -> float:
        """The share of visits that found their expert there; 1 where there was no visit."""
        return float((self.ages > 0).mean()) if len(self.ages) else 1.0


def visits(passes: Passes, facts: CacheFacts, preset: Preset, num_warm: int, is_filled: bool = False) -> Visits:
    """The visits of tokens decoded one by one, nothing foretold, but for the first `num_warm`, which fill the cache.

    Where all experts have room, every visit finds its expert after as many as are told apart.
    Args:    is_filled: the cache begins with the most popular experts instead of empty: few tokens then warm it.
    """
    L, E = facts.pages.shape
    routes = np.sort(passes.routes.astype(np.int64), axis=2)  # [T, L, k]
    if int(facts.pages.sum()) <= facts.num_pages:
        warm = routes[num_warm:]
        steps = np.repeat(np.arange(len(warm) * L), routes.shape[2])
        keys = (warm + E * np.arange(L)[:, None]).ravel()
        return Visits(len(warm), steps, keys, np.full(len(keys), MAX_AGE))
    expert_cache = expert_cache_for(preset, facts)
    ages = np.zeros((L, E), np.int64)
    if is_filled:
        _fill(expert_cache, facts)
        ages[expert_cache.is_resident] = MAX_AGE
    found: list[tuple[int, int, int]] = []
    for token, layers in enumerate(routes.tolist()):
        for l, experts in enumerate(layers):
            for event in expert_cache.schedule(l, experts):
                if isinstance(event, FetchEvent):
                    ages[event.key] = 0
                elif isinstance(event, ComputeEvent):
                    if token >= num_warm:
                        found.append(((token - num_warm) * L + l, l * E + event.key.expert, int(ages[event.key])))
                    ages[event.key] += 1
    columns = np.array(found, np.int64).reshape(-1, 3).T
    return Visits(max(len(routes) - num_warm, 0), columns[0], columns[1], np.minimum(columns[2], MAX_AGE))


def _fill(expert_cache: ExpertCache, facts: CacheFacts) -> None:
    """Brings in experts by falling popularity while there is room, as if they had been foretold."""
    order = np.argsort(-facts.popularity, axis=None, kind="stable").tolist()
    for layer_idx, expert in (divmod(place, facts.pages.shape[1]) for place in order):
        if facts.pages[layer_idx, expert] <= expert_cache.free_pages:
            for _ in expert_cache.prefetch(layer_idx, [expert], during=layer_idx):
                pass  # nothing is carried out


def expected_misses(found: Visits, runs: Array) -> Array:
    """How often a token will find each expert missing: float64 [L, E].

    Meaning: runs * (missed + n * m) / (came + n), m being the share of all visits that missed, n _SURE_VISITS. Experts
             that few visits came to are not told apart: a plan made for these visits alone would be bad for others.
    Args:    runs: [L, E], how often a token chooses the expert.
    """
    came, missed = (np.bincount(keys, minlength=runs.size) for keys in (found.keys, found.keys[found.ages == 0]))
    of_all = missed.sum() / max(came.sum(), 1)
    expected: Array = runs * ((missed + _SURE_VISITS * of_all) / (came + _SURE_VISITS)).reshape(runs.shape)
    return expected


def drawn_passes(popularity: Array, num_active: int, num_tokens: int, seed: int = 0) -> Passes:
    """Routes of independent draws: each layer's experts by its popularity [L, E], k different ones a token."""
    shares = popularity / popularity.sum(axis=1, keepdims=True)
    generator = np.random.default_rng(seed)
    # The k largest of log p + Gumbel noise: draws without replacement.
    noise = generator.gumbel(size=(num_tokens, *shares.shape))
    with np.errstate(divide="ignore"):
        scores = np.log(shares) + noise
    routes = np.argsort(-scores, axis=2, kind="stable")[:, :, :num_active].astype("<u2")
    return Passes(routes, np.ones(num_tokens, np.uint32), None, shares.astype("<f4"))


USUAL_RECALL = 0.75  # of the next layer's experts, where no profile says: CORM's least
# What is replayed at most; more changes hit rates by less than routes of another text do.
_MOST_TOKENS, _LEAST_TOKENS, _MOST_VISITS = 4096, 64, 50_000
_LEAST_ROUGH_TOKENS, _ROUGH_VISITS = 16, 6000
PAGE_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of what experts have of a card
_WARM_SHARE = 0.25  # of the tokens replayed: they fill the cache


@dataclass(frozen=True, slots=True)
class TokenSeconds:
    """Where the seconds of a token go. `waiting`: for what is fetched, and is not behind computation."""

    fixed: float
    dense: float
    experts: float
    waiting: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.fixed + self.dense + self.experts + self.waiting


@dataclass(frozen=True, slots=True, eq=False)
class TokenEstimate:
    """A decoded token: `fetched_bytes` from the drive or over the link, `read_bytes` of weights in fast memory.

    `hit_rate`: of experts that were there when their router spoke, nothing foretold.   `misses`: float64 [L, E], how
    often a token is expected to find the expert missing.
    """

    policy: PolicyName
    hit_rate: float
    misses: Array
    fetched_bytes: float
    read_bytes: float
    seconds: TokenSeconds

    @property
    def tokens_per_second(self) -> float:
        """Of decoding, one token after the other."""
        return 1 / self.seconds.total


@dataclass(frozen=True, slots=True, eq=False)
class FetchCosts:
    """What visits fetch, by age and expert: float64 [MAX_AGE + 1, L, E].

    `num_bytes`; `seconds` where others are fetched too; `alone`: the least that it takes, were it the only one.
    """

    num_bytes: Array
    seconds: Array
    alone: Array


def predict(
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
    """How fast a pack of this layout decodes on the CPU inside a budget.

    Args:    popularity: [L, E], any unit.   sparsity: [L, E], the share of neurons that do not run.   passes: routes to
             replay, of text not used for calibration; without, independent draws from `popularity`.   recall: how many
             of the next layer's experts the best predictor foretells; None where no profile says it.   seen_tokens:
             that are in the key-value cache.   is_rough: replays few tokens, and one policy: for a search among plans.
    Not modelled: that neighbouring neurons run together more often than others; tokens that attend to a window.
    """
    assert machine.kind == "cpu", "a card has `predict_on_card`"
    k = layout.spec.router.num_experts_per_tok
    facts = CacheFacts(
        expert_pages(layout, plan.page_bytes),
        plan.num_pages,
        k,
        (popularity / popularity.sum(axis=1, keepdims=True)).astype(np.float32),
    )
    extents = np.array([[expert.num_bytes for expert in layer] for layer in layout.experts])
    routed, is_drawn = _routed(layout, popularity, passes, is_rough)
    preset = auto_preset(None if is_drawn or is_rough else routed, facts, extents)
    found = visits(routed, facts, preset, int(_WARM_SHARE * len(routed.routes)), is_rough)
    running = 1.0 - sparsity
    fetching = fetched_from_drive(layout, running, machine.drive, plan.page_bytes)
    foretold = 0.0 if preset.prediction == "none" else USUAL_RECALL if recall is None else recall
    return _prediction(layout, machine, running, popularity, found, fetching, foretold, preset.name, seen_tokens)


def _routed(layout: PackLayout, popularity: Array, passes: Passes | None, is_rough: bool) -> tuple[Passes, bool]:
    """Routes to replay, as many as are worth their time; and whether they are drawn."""
    k = layout.spec.router.num_experts_per_tok
    most_visits, least = (_ROUGH_VISITS, _LEAST_ROUGH_TOKENS) if is_rough else (_MOST_VISITS, _LEAST_TOKENS)
    num_tokens = min(_MOST_TOKENS, max(least, most_visits // (k * len(layout.experts))))
    if passes is None:
        return drawn_passes(popularity, k, num_tokens), True
    routes = passes.routes[:num_tokens]
    return Passes(routes, np.ones(len(routes), np.uint32), None, passes.popularity), False


def predict_on_card(
    layout: PackLayout,
    plan: GpuMemoryPlan,
    machine: Machine,
    popularity: Array,
    heat: Array,
    passes: Passes | None = None,
    seen_tokens: int = 0,
    is_rough: bool = False,
) -> TokenEstimate:
    """How fast a pack of this layout decodes on a card whose memory is divided so, rows pulled over the link.

    What host memory cannot hold is read from the drive. No engine that works so was measured yet.
    Args:    heat: [L, E, H], as in `best_gpu_plan`; the others as in `predict`.
    """
    assert machine.kind == "cuda", "of a card"
    if layout.experts[0][0].selector is None:
        heat = np.ones_like(heat)  # nothing tells which rows a token needs
    k = layout.spec.router.num_experts_per_tok
    missing = _missing_bytes(layout, plan)
    pages = -(-missing // plan.page_bytes)
    shares = (popularity / popularity.sum(axis=1, keepdims=True)).astype(np.float32)
    num_pages = plan.num_pages or int(pages.sum())  # none where all is there
    facts = CacheFacts(pages, num_pages, k, shares)
    extents = np.array([[expert.num_bytes for expert in layer] for layer in layout.experts])
    routed, is_drawn = _routed(layout, popularity, passes, is_rough)
    preset = auto_preset(None if is_drawn or is_rough else routed, facts, extents)
    found = visits(routed, facts, preset, int(_WARM_SHARE * len(routed.routes)), is_rough)
    fetching = fetched_over_link(layout, plan, heat, machine)
    return _prediction(layout, machine, heat.mean(axis=2), popularity, found, fetching, 0.0, preset.name, seen_tokens)


def best_card_plan(
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
    """The division of a card's memory that decodes fastest, of a few shares for pages; and how fast.

    Args:    page_shares: to try, of what experts have.
    Raises:  RunError as `best_gpu_plan`.
    """
    plans = [
        best_gpu_plan(layout, target_bytes, context_tokens, predictor_bytes, popularity, heat, share)
        for share in page_shares
    ]
    tried = [
        (plan, predict_on_card(layout, plan, machine, popularity, heat, passes, context_tokens, is_rough))
        for plan in (plans if plans[0].pages else plans[:1])
    ]
    return min(tried, key=lambda one: one[1].seconds.total)


def fetched_over_link(layout: PackLayout, plan: GpuMemoryPlan, heat: Array, machine: Machine) -> FetchCosts:
    """What a card pulls: of selectors what it does not hold, and running rows that have not come since.

    Meaning: row i, where it is not held, is pulled at the n-th visit with probability heat_i * (1 - heat_i)^n.
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
    return FetchCosts(num_bytes, seconds, np.zeros_like(seconds))


def link_seconds(machine: Machine, total_bytes: int, read_bytes: int = GPU_PAGE_BYTES) -> float:
    """What a byte of experts takes to come to a card, where they take so many bytes in all, read so many at a time.

    What host memory cannot hold comes from the drive.
    """
    assert machine.link_rate is not None, "a card has a link"
    on_drive = 0.0 if machine.ram_bytes is None else max(0.0, 1 - machine.ram_bytes / total_bytes)
    from_drive = min(machine.drive.rate(read_bytes), machine.link_rate)
    return (1 - on_drive) / machine.link_rate + on_drive / from_drive


def _missing_bytes(layout: PackLayout, plan: GpuMemoryPlan) -> Array:
    """What of each expert is not held, int64 [L, E]: it comes and goes."""
    selectors = np.array([[e.selector_bytes for e in layer] for layer in layout.experts])
    records = np.array([[e.records_bytes for e in layer] for layer in layout.experts])
    missing = (1 - plan.selector_share) * selectors + (1 - plan.row_shares.mean(axis=2)) * records
    whole: Array = np.ceil(missing - 1e-6).astype(np.int64)
    return whole


def expert_seconds(expert: ExpertLayout, running: float, machine: Machine) -> tuple[float, float]:
    """What an expert with this share of its neurons running takes to compute for one token; and the bytes it reads.

    Without a selector nothing tells before the record is read: all of it is.
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
    """Of each of a row's parts; its CRC and padding, which lie beside them, are shared out."""
    of_parts = sum(part.num_bytes for part in rows.parts)
    scale = rows.row_bytes / of_parts
    return [scale * part.num_bytes / machine.expert_rate(part.format) + machine.row_s for part in rows.parts]


def dense_seconds(layout: PackLayout, machine: Machine, seen_tokens: int) -> tuple[float, float]:
    """What all but the routed experts takes for one token, and the bytes it reads.

    Of the embedding one row is read, unless it is the head too.
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


def fetched_from_drive(layout: PackLayout, running: Array, drive: DiskFacts, page_bytes: int) -> FetchCosts:
    """What the engine reads of experts: whole, or selectors and running rows where those pay (`Engine`'s cutover).

    Args:    running: [L, E], the share of neurons that run.   page_bytes: the longest read.
    """
    kinds = {(e.records.row_bytes, e.num_rows, e.records_bytes) for layer in layout.experts for e in layer}
    cutover = min(drive.cutover(*kind) for kind in kinds)
    gap_blocks = drive.gap_bytes() // DISK_BLOCK_BYTES
    shape = (MAX_AGE + 1, *running.shape)
    fetching = FetchCosts(np.zeros(shape), np.zeros(shape), np.zeros(shape))
    known: dict[tuple[int, float, bool], Array] = {}  # experts stored alike are one object, told apart at once
    for l, layer in enumerate(layout.experts):
        by_rows = bool(running[l].mean() < cutover)
        for e, expert in enumerate(layer):
            share = float(running[l, e])
            key = (id(expert), share, by_rows and share < 1 and expert.selector is not None)
            if key not in known:
                known[key] = _by_rows(expert, share, drive, gap_blocks) if key[2] else _whole(expert, drive, page_bytes)
            fetching.num_bytes[:, l, e], fetching.seconds[:, l, e], fetching.alone[:, l, e] = known[key]
    return fetching


def _whole(expert: ExpertLayout, drive: DiskFacts, page_bytes: int) -> Array:
    """Bytes, seconds and seconds alone at each age, [3, ages], of an expert that is read as it is."""
    num_bytes = whole_blocks(expert.num_bytes)
    size = min(num_bytes, page_bytes)
    table = np.zeros((3, MAX_AGE + 1))
    table[:, 0] = num_bytes, drive.seconds(num_bytes / size, size), drive.seconds_for_few(num_bytes / size, size)
    return table


def _by_rows(expert: ExpertLayout, share: float, drive: DiskFacts, gap_blocks: int) -> Array:
    """The same of one whose selector comes first, and at each visit the rows that run and are not there yet.

    Meaning: neurons run independently; rows that n visits have asked for are 1 - (1 - share)^n of all.
    """
    assert expert.selector is not None, "what has none is read whole"
    table = np.zeros((3, MAX_AGE + 1))
    table[:, 0] = (
        expert.selector_bytes,
        drive.seconds(1, expert.selector_bytes),
        drive.seconds_for_few(1, expert.selector_bytes),
    )
    row_bytes = expert.records.row_bytes
    rows_in_block = (DISK_BLOCK_BYTES + row_bytes) / row_bytes  # that begin in it, or end
    num_blocks = expert.records_bytes / DISK_BLOCK_BYTES
    ages = np.arange(MAX_AGE + 2)
    touched = _bridged(1 - (1 - share) ** (rows_in_block * ages), gap_blocks)
    table[0] += DISK_BLOCK_BYTES * num_blocks * np.diff(touched)
    for age in range(MAX_AGE + 1):
        seconds = drive.seconds_for_rows(share * (1 - share) ** age, row_bytes, expert.num_rows)
        table[1:, age] += seconds
    return table


def _bridged(touched: Array, gap_blocks: int) -> Array:
    """The share of blocks that is read where a share is wanted, and up to `gap_blocks` between two are read over.

    Meaning: blocks are wanted independently; of the others, those in gaps of up to g are 1 - (1 - q)^g * (1 + g q).
    """
    over = 1 - (1 - touched) ** gap_blocks * (1 + gap_blocks * touched)
    return np.where(touched > 0, touched + (1 - touched) * over, 0.0)


def _prediction(
    layout: PackLayout,
    machine: Machine,
    running: Array,
    popularity: Array,
    found: Visits,
    fetching: FetchCosts,
    foretold: float,
    policy: PolicyName,
    seen_tokens: int,
) -> TokenEstimate:
    L = len(layout.experts)
    computing, reading = _expert_table(layout, running, machine)
    dense_s, dense_bytes = dense_seconds(layout, machine, seen_tokens)
    k, fixed = layout.spec.router.num_experts_per_tok, machine.fixed
    num_layers, num_tokens = layout.spec.num_hidden_layers, max(found.num_tokens, 1)
    fixed_s = fixed.token_s + num_layers * fixed.layer_s + L * k * fixed.expert_s
    missed = np.bincount(found.keys[found.ages == 0], minlength=running.size).reshape(running.shape) / num_tokens
    beside = fixed.layer_s + dense_s / num_layers  # between a layer's experts and the next one's
    waiting = waited(found, computing + fixed.expert_s, fetching, foretold, beside)
    fetched = float(fetching.num_bytes.reshape(MAX_AGE + 1, -1)[found.ages, found.keys].sum()) / num_tokens
    return TokenEstimate(
        policy=policy,
        hit_rate=found.hit_rate,
        misses=expected_misses(found, popularity * (k / popularity.sum(axis=1, keepdims=True))),
        # What is foretold wrongly is read beside, as often as what is foretold is missing.
        fetched_bytes=fetched * (1 + (1 - foretold) * (foretold > 0)),
        read_bytes=float(reading.ravel()[found.keys].sum()) / num_tokens + dense_bytes,
        seconds=TokenSeconds(
            fixed_s + float(missed.sum()) * fixed.miss_s,
            dense_s,
            float(computing.ravel()[found.keys].sum()) / num_tokens,
            waiting / num_tokens,
        ),
    )


def _expert_table(layout: PackLayout, running: Array, machine: Machine) -> tuple[Array, Array]:
    """`expert_seconds` of all experts: seconds and bytes, float64 [L, E]."""
    known: dict[tuple[int, float], tuple[float, float]] = {}  # by object, as above
    computing, reading = np.zeros(running.shape), np.zeros(running.shape)
    for l, layer in enumerate(layout.experts):
        for e, expert in enumerate(layer):
            key = (id(expert), float(running[l, e]))
            if key not in known:
                known[key] = expert_seconds(expert, key[1], machine)
            computing[l, e], reading[l, e] = known[key]
    return computing, reading


def waited(found: Visits, computing: Array, fetching: FetchCosts, foretold: float, beside: float) -> float:
    """Seconds that all tokens together wait for what they fetch.

    Meaning: of a layer's m reads, R seconds together, the i-th has come after i R / m; what was there is computed
             meanwhile, then each as it comes:   end = max(H + M, R + M / m, R / m + M),   wait = end - H - M,
             H and M being the computing of what was there and of what was missing. Of what is foretold the reads go on
             through all of the layer before: it waits for what of R does not fit into that.
    Args:    beside: seconds of a layer that are not of its experts.
    """
    if not len(found.steps):
        return 0.0
    num_steps = int(found.steps.max()) + 1
    cells = (found.ages, found.keys)
    ages = len(fetching.seconds)

    def summed(values: Array) -> Array:
        return np.bincount(found.steps, values, num_steps)

    seconds = fetching.seconds.reshape(ages, -1)[cells]
    is_late = seconds > 0
    num_late, read = summed(is_late), summed(seconds)
    alone = np.zeros(num_steps)
    np.maximum.at(alone, found.steps, fetching.alone.reshape(ages, -1)[cells])
    read = np.maximum(read, alone)
    compute = computing.ravel()[found.keys]
    all_of_it, late = summed(compute), summed(compute * is_late)
    m = np.maximum(num_late, 1)
    end = np.maximum(all_of_it, np.maximum(read + late / m, read / m + late))
    at_once = np.where(num_late > 0, end - all_of_it, 0.0)
    ahead = np.maximum(foretold * read - (all_of_it + beside), 0.0)
    return float((ahead + (1 - foretold) * at_once).sum())
