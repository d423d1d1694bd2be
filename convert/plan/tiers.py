"""The ways one expert may be stored: combinations of its matrices' formats worth weighing, with their bytes and losses.

Of all combinations those are kept that, for a mean expert, lose little more than the best of at most their bytes: a
planner then weighs hundreds, not tens of thousands. Bytes are exact: rows end in a CRC and padding.

How hot the slices of an expert's rows are, at every selector kind and sparsity that a plan may take.

What a planner asks of the memory it plans for: how a budget divides, what bytes cost, how fast a pack would be.

What tiers of every kind of machine share: what is known of routes, and what computing takes.

Memory of the CPU over a drive, as `moe-run --budget` runs a pack: the tier of `--device cpu`.

The budget is divided by the runtime's own function, so that what is planned is what is allocated.

A card's memory over host memory: the tier of `--device cuda`.

Rows are pulled over the link as `card_budget` holds them, which `moe-run`'s graph engine does; no figure from a GPU
exists yet.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moe_pack.calib.forward import HOT_SPARSITIES, KINDS
from moe_pack.calib.profile import Losses, Profile
from moe_pack.convert.plan.machines import Machine, rate_of
from moe_pack.convert.plan.speed import TokenEstimate, best_card_plan, expert_seconds, link_seconds, predict
from moe_pack.formats import (
    MATRICES,
    ExpertFormat,
    ExpertLayout,
    Matrix,
    ModelSpec,
    PackLayout,
    PartFormat,
    Quantizer,
    Selector,
)
from moe_pack.formats.layout import CRC_BYTES, ROW_ALIGN, extra_layout
from moe_pack.formats.spec import record_matrices, selector_matrices
from moe_pack.runtime.offload import BudgetPlan, GpuMemoryPlan, Passes, divide_budget, least_budget
from moe_pack.runtime.offload.budget import AS_TARGET, MemoryPart, least_gpu_budget

MAX_CHOICES, LEAST_CHOICES = 320, 64
_MOST_CELLS = 600_000  # of all experts' choices: more experts need fewer each, they mix finely enough
_FEWEST = 1e-12  # nats: what a lossless choice is counted as, where losses are compared by their ratio

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class FormatChoices:
    """C ways to store an expert under a selector kind, rounded by `quantizer`, by rising bytes.

    `parts`: int64 [C, 3], gate's, up's and down's format as a number in the losses' formats of this quantizer.
    `selector_bytes`, `record_bytes`, `extent_bytes`: int64 [C], of a whole expert.
    """

    selector: Selector
    quantizer: Quantizer
    formats: tuple[ExpertFormat, ...]
    parts: Ints
    selector_bytes: Ints
    record_bytes: Ints
    extent_bytes: Ints

    def losses(self, losses: Losses) -> Floats:
        """What each expert loses by each choice, nats: float64 [L * E, C]."""
        _, lost = losses.of(self.quantizer)
        found = lost[:, :, 0, self.parts[:, 0]]  # [L, E, C]
        for matrix in (1, 2):
            found = found + lost[:, :, matrix, self.parts[:, matrix]]
        return found.reshape(-1, len(self.formats))


def expert_choices(
    spec: ModelSpec, selector: Selector, losses: Losses, allowed: tuple[PartFormat, ...] | None = None
) -> FormatChoices:
    """The combinations worth weighing for a selector kind, of the quantizer that the losses name.

    Args:    allowed: the formats to choose from; all that losses are known of by default.
    """
    known, quantized = losses.of(losses.quantizer)
    usable = [n for n, part in enumerate(known) if allowed is None or part in allowed]
    mean = quantized.mean(axis=(0, 1))  # [3, F]
    sizes = np.array([part.part_bytes(spec.hidden_size) for part in known])
    by_matrix = [
        _undominated(sizes[usable], mean[m, usable]) if matrix in spec.expert.matrices else np.zeros(1, np.int64)
        for m, matrix in enumerate(MATRICES)
    ]
    parts = np.stack(np.meshgrid(*(np.array(usable)[kept] for kept in by_matrix), indexing="ij"), axis=-1).reshape(
        -1, 3
    )
    selector_bytes, record_bytes, extent = _sizes(parts, spec, selector, known)
    lost = mean[np.arange(3), parts].sum(axis=1)
    num_experts = len(spec.moe_layers) * spec.router.num_experts
    kept = _near_the_best(extent, lost, max(LEAST_CHOICES, min(_MOST_CELLS // num_experts, MAX_CHOICES)))
    formats = tuple(_format(row, spec, known) for row in parts[kept].tolist())
    return FormatChoices(
        selector, losses.quantizer, formats, parts[kept], selector_bytes[kept], record_bytes[kept], extent[kept]
    )


def _sizes(parts: Ints, spec: ModelSpec, selector: Selector, known: tuple[PartFormat, ...]) -> tuple[Ints, Ints, Ints]:
    """What `expert_layout` makes of combinations [C, 3], without making thousands: selectors, records, extents."""
    expert, extra = spec.expert, extra_layout(spec.expert.extra_floats)
    by_format = np.array([part.part_bytes(spec.hidden_size) for part in known])
    sizes = by_format[parts] + 4 * np.array([matrix in expert.row_bias for matrix in MATRICES])  # [C, 3]

    def all_rows(matrices: tuple[Matrix, ...]) -> Ints:
        held = [MATRICES.index(matrix) for matrix in matrices]
        row_bytes = -(-(sizes[:, held].sum(axis=1) + CRC_BYTES) // ROW_ALIGN) * ROW_ALIGN
        found: Ints = expert.intermediate_size * row_bytes * bool(held)
        return found

    selectors = all_rows(selector_matrices(selector, expert.matrices))
    records = all_rows(record_matrices(selector, expert.matrices))
    return selectors, records, selectors + records + (extra.row_bytes if extra else 0)


def _format(parts: list[int], spec: ModelSpec, known: tuple[PartFormat, ...]) -> ExpertFormat:
    gate, up, down = (known[number] for number in parts)
    return ExpertFormat(gate if "gate" in spec.expert.matrices else None, up, down)


def _undominated(sizes: Ints, lost: Floats) -> Ints:
    """Those that lose less than all that are no larger: int64 [n], by rising size."""
    order = np.lexsort((lost, sizes))
    best = np.minimum.accumulate(np.concatenate(([np.inf], lost[order][:-1])))
    kept: Ints = order[lost[order] < best]
    return kept


def _near_the_best(sizes: Ints, lost: Floats, most: int) -> Ints:
    """At most so many, those that lose least beside the best of at most their size: int64 [n], by rising size.

    Where even the best of each size are more, evenly many of these, the first and the last among them.
    """
    order = np.lexsort((lost, sizes))
    best = np.minimum.accumulate(lost[order])
    worse = (lost[order] + _FEWEST) / (best + _FEWEST)
    leading = np.flatnonzero(np.diff(best, prepend=np.inf) < 0)
    if len(leading) > most:
        return order[leading[np.linspace(0, len(leading) - 1, most).round().astype(np.int64)]]
    nearest: Ints = np.sort(np.argsort(worse, kind="stable")[:most])
    kept: Ints = order[nearest]
    return kept


NUM_SLICES = 16


class RowHeat:
    """The heat of slices of rows as they lie in a pack, hottest first; read from the profile when it is asked for.

    Args:    profile: None: all neurons run as often.
    """

    def __init__(self, profile: Profile | None) -> None:
        self._profile = profile
        self._known: dict[int, Floats] = {}

    def at(self, selector: Selector, sparsity: Floats) -> Floats:
        """The share of an expert's tokens for which a row of each slice is read: float64 [L, E, slices].

        Meaning: between the sparsities that were counted, interpolated, and scaled to the one asked for on the mean.
                 Without a selector nobody knows what runs before it is there: 1.
        Args:    sparsity: [L, E].
        """
        if selector == "none":
            return np.ones((*sparsity.shape, 1))
        running = 1 - sparsity[:, :, None]
        if self._profile is None:
            return running
        levels = np.array((0.0, *HOT_SPARSITIES))
        counted = self._counted(KINDS.index(selector), self._profile)  # [L, E, levels, slices]
        above = np.clip(np.searchsorted(levels, sparsity, side="right"), 1, len(levels) - 1)
        part = np.clip((sparsity - levels[above - 1]) / (levels[above] - levels[above - 1]), 0, 1)[:, :, None]
        low, high = (np.take_along_axis(counted, n[:, :, None, None], axis=2)[:, :, 0] for n in (above - 1, above))
        found = low + (high - low) * part
        mean = found.mean(axis=2, keepdims=True)
        scaled: Floats = found * np.divide(running, mean, out=np.ones_like(mean), where=mean > 0)
        return np.minimum(scaled, 1.0)

    def _counted(self, kind_idx: int, profile: Profile) -> Floats:
        """The means of slices at sparsity 0 and all that were counted."""
        if kind_idx not in self._known:
            layers = []
            for layer_idx in range(len(profile.spec.moe_layers)):
                statistics = profile.statistics(layer_idx)
                shares = np.stack([statistics.hot_share(kind_idx, sparsity) for sparsity in HOT_SPARSITIES], axis=1)
                ordered = -np.sort(-shares.astype(np.float64), axis=2)  # [E, levels, f]
                ends = np.linspace(0, ordered.shape[2], min(NUM_SLICES, ordered.shape[2]) + 1).astype(np.int64)
                sums = np.concatenate([np.zeros((*ordered.shape[:2], 1)), np.cumsum(ordered, axis=2)], axis=2)
                means = np.diff(sums[:, :, ends], axis=2) / np.diff(ends)
                layers.append(np.concatenate([np.ones_like(means[:, :1]), means], axis=1))
            self._known[kind_idx] = np.stack(layers)
        return self._known[kind_idx]


@dataclass(frozen=True, slots=True, eq=False)
class SpeedEstimate:
    """A pack inside a budget, before it exists: the steady state of decoding token by token.

    `shares` of the budget sum to no more than it.   `seconds` a token.   `fetched_bytes`, `read_bytes` a token: from
    the tier below, and of weights in fast memory.   `hit_rate`: of experts.   `misses`: float64 [L, E], how often a
    token finds the expert missing.   `policy`: of the runtime.
    """

    shares: tuple[MemoryPart, ...]
    seconds: float
    fetched_bytes: float
    read_bytes: float
    hit_rate: float
    misses: Floats
    policy: str

    @property
    def tokens_per_second(self) -> float:
        """Of decoding, one token after the other."""
        return 1 / self.seconds


class MemoryTier(Protocol):
    """Fast memory of so many bytes over a slower tier."""

    budget_bytes: int

    def foretell(
        self, layout: PackLayout, sparsity: Floats, less_bytes: int = 0, is_rough: bool = False
    ) -> SpeedEstimate:
        """What a pack of this layout, so sparse [L, E], would do; in a budget smaller by some bytes, if given.

        Args:    is_rough: sooner, and less exactly: for a search.
        Raises:  RunError if it does not fit; it says what is needed.
        """
        ...

    def least_bytes(self, layout: PackLayout) -> int:
        """The smallest budget that a pack of this layout runs in."""
        ...

    def run_seconds(self, expert: ExpertLayout, sparsity: float) -> float:
        """What running an expert that is there takes for one token."""
        ...

    def fetch_seconds(self, expert: ExpertLayout, sparsity: float) -> float:
        """What bringing an expert takes, and a token waits for."""
        ...

    def dense_seconds(self, num_bytes: int, width: int) -> float:
        """What a dense matrix of so many bytes takes, every token."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class RoutingFacts:
    """What is known of routes. `popularity`: float64 [L, E].

    `passes`: routes of text not used for calibration, to replay; None: independent draws.   `recall`: how many of the
    next layer's experts the best predictor foretells; None where no profile says it.   `predictor_bytes`: what
    foretells takes in memory.
    """

    popularity: Floats
    passes: Passes | None = None
    recall: float | None = None
    predictor_bytes: int = 0


class MachineTier:
    """A budget of a machine's fast memory: the part of a `MemoryTier` that does not depend on what lies below."""

    def __init__(self, machine: Machine, traffic: RoutingFacts, budget_bytes: int, context_tokens: int) -> None:
        self.budget_bytes = budget_bytes
        self._machine = machine
        self._traffic = traffic
        self._context_tokens = context_tokens

    def run_seconds(self, expert: ExpertLayout, sparsity: float) -> float:
        """What running an expert that is there takes for one token."""
        return expert_seconds(expert, 1 - sparsity, self._machine)[0]

    def dense_seconds(self, num_bytes: int, width: int) -> float:
        """What a dense matrix of so many bytes takes, every token."""
        return num_bytes / rate_of(self._machine.dense_rates, width)


def speed_estimate(shares: tuple[MemoryPart, ...], found: TokenEstimate, misses: Floats) -> SpeedEstimate:
    """A prediction as planners take it, with the shares of the budget it was made for.

    Args:    misses: [L, E], of whole experts.
    """
    return SpeedEstimate(
        shares, found.seconds.total, found.fetched_bytes, found.read_bytes, found.hit_rate, misses, found.policy
    )


_SEEN_TOKENS = 512  # in the cache, where the context is no shorter


class CpuTier(MachineTier):
    """A budget of memory on this machine, or one of the same rates."""

    def foretell(
        self, layout: PackLayout, sparsity: Floats, less_bytes: int = 0, is_rough: bool = False
    ) -> SpeedEstimate:
        """What a pack of this layout, so sparse [L, E], would do; in a budget smaller by some bytes, if given.

        Args:    is_rough: sooner, and less exactly: for a search.
        Raises:  RunError if it does not fit; it says what is needed.
        """
        traffic = self._traffic
        plan = self._divided(layout, self.budget_bytes - less_bytes)
        routes, recall, seen = traffic.passes, traffic.recall, min(self._context_tokens // 2, _SEEN_TOKENS)
        found = predict(layout, plan, self._machine, traffic.popularity, sparsity, routes, recall, seen, is_rough)
        return speed_estimate(plan.parts, found, found.misses)

    def least_bytes(self, layout: PackLayout) -> int:
        """The smallest budget that a pack of this layout runs in."""
        return least_budget(layout, self._context_tokens, self._traffic.predictor_bytes)

    def fetch_seconds(self, expert: ExpertLayout, sparsity: float) -> float:
        """What bringing an expert takes: whole, or its selector and running rows, whichever is less."""
        drive = self._machine.drive
        whole = drive.seconds(1, expert.num_bytes)
        if expert.selector is None or sparsity == 0:
            return whole
        rows = drive.seconds_for_rows(1 - sparsity, expert.records.row_bytes, expert.num_rows)
        return min(whole, drive.seconds(1, expert.selector_bytes) + rows)

    def _divided(self, layout: PackLayout, budget_bytes: int) -> BudgetPlan:
        return divide_budget(layout, budget_bytes, self._context_tokens, self._traffic.predictor_bytes, AS_TARGET)


_ROUGH_PAGE_SHARES = (0.25,)  # of what experts have: with it alone plans are told apart


class GpuTier(MachineTier):
    """A budget of a card's memory; what it cannot hold comes from host memory, and what that cannot from the drive."""

    def __init__(
        self, machine: Machine, traffic: RoutingFacts, heats: RowHeat, budget_bytes: int, context_tokens: int
    ) -> None:
        assert machine.link_rate is not None, "a card has a link"
        super().__init__(machine, traffic, budget_bytes, context_tokens)
        self._heats = heats

    def foretell(
        self, layout: PackLayout, sparsity: Floats, less_bytes: int = 0, is_rough: bool = False
    ) -> SpeedEstimate:
        """What a pack of this layout, so sparse [L, E], would do; in a budget smaller by some bytes, if given.

        Args:    is_rough: sooner, and less exactly: for a search.
        Raises:  RunError if it does not fit; it says what is needed.
        """
        traffic, heat = self._traffic, self._heats.at(_selector_of(layout), sparsity)
        plan, found = best_card_plan(
            layout,
            self.budget_bytes - less_bytes,
            self._context_tokens,
            traffic.predictor_bytes,
            self._machine,
            traffic.popularity,
            heat,
            traffic.passes,
            is_rough,
            *((_ROUGH_PAGE_SHARES,) if is_rough else ()),
        )
        return speed_estimate(plan.parts, found, found.misses * _missing_share(layout, plan, heat))

    def least_bytes(self, layout: PackLayout) -> int:
        """The smallest budget that a pack of this layout runs in."""
        return least_gpu_budget(layout, self._context_tokens, self._traffic.predictor_bytes)

    def fetch_seconds(self, expert: ExpertLayout, sparsity: float) -> float:
        """What pulling an expert takes of which nothing is held: its selector and running rows, or all of it."""
        running = 1.0 if expert.selector is None else 1 - sparsity
        total = expert.num_bytes * self._traffic.popularity.size  # were all experts stored so
        return (expert.selector_bytes + running * expert.records_bytes) * link_seconds(self._machine, total)


def _selector_of(layout: PackLayout) -> Selector:
    selected = layout.experts[0][0].selector
    if selected is None:
        return "none"
    names = {part.name for part in selected.parts}
    return "both" if len(names) == 2 else "gate" if "gate" in names else "up"


def _missing_share(layout: PackLayout, plan: GpuMemoryPlan, heat: Floats) -> Floats:
    """Of what a token reads of each expert, the share that is not always there: float64 [L, E]."""
    selectors, records = (
        np.array([[getattr(expert, name) for expert in layer] for layer in layout.experts], np.float64)
        for name in ("selector_bytes", "records_bytes")
    )
    missing = (1 - plan.selector_share) * selectors + ((1 - plan.row_shares) * heat).mean(axis=2) * records
    found: Floats = missing / np.maximum(selectors + heat.mean(axis=2) * records, 1)
    return found
