"""The tiers: fast memory over slower memory, as a planner sees it; before them, the choices of formats for an expert.

A tier estimates how fast a pack would be within its budget, and what an expert costs to run and to fetch. `CpuTier` is
host memory over the disk, as `moe-run --budget` runs a pack. `GpuTier` is the memory of a GPU over host memory, as
`moe-run --device cuda` runs it with `--misses auto`; it was not yet compared with measurements on a GPU.

The tiers do not divide a budget themselves. They call the runtime's functions (`divide_budget`; `divide_gpu` and
`place_experts`). A run on the CPU allocates what was planned. On a GPU it measures the parts that are not experts.

Format choices (`expert_choices`): a choice is kept if, for a mean expert, it loses little more than the best choice of
at most its bytes, so that a planner compares hundreds of choices, not tens of thousands. Bytes are exact, with the CRC
and the padding of rows.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moe_pack.calib import forward
from moe_pack.calib.profile import Losses, Profile
from moe_pack.convert.plan import machines, speed
from moe_pack.formats import PlanError
from moe_pack.formats.pack import layouts, plans
from moe_pack.formats.parts import specs
from moe_pack.runtime import offload
from moe_pack.runtime.gpu import fit, placements
from moe_pack.runtime.model.caches import KvDtype
from moe_pack.runtime.offload import budgets
from moe_pack.runtime.offload.budgets import extent_bytes

MAX_CHOICES, LEAST_CHOICES = 320, 64
_MOST_CELLS = 600_000  # of all experts: with more experts each needs fewer choices, because different ones can be mixed
_FEWEST = 1e-12  # nats: the loss of a lossless choice, where losses are compared by their ratio

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class FormatChoices:
    """C ways to store an expert with one selector and one quantizer, in ascending order of bytes."""

    selector: specs.Selector
    quantizer: plans.Quantizer
    formats: tuple[plans.ExpertFormat, ...]
    parts: Ints  # int64 [C, 3], the formats of gate, up and down as indices of the losses' formats of this quantizer
    # selector_bytes, record_bytes, extent_bytes: int64 [C], of a whole expert
    selector_bytes: Ints
    record_bytes: Ints
    extent_bytes: Ints
    is_fused: bool = False  # whether all experts of a layer have the same choice, and all of their neurons run

    def losses(self, losses: Losses) -> Floats:
        """Returns the loss of each expert with each choice in nats: float64 [L * E, C]."""
        _, lost = losses.of(self.quantizer)
        total = lost[:, :, 0, self.parts[:, 0]]  # [L, E, C]
        for matrix in (1, 2):
            total = total + lost[:, :, matrix, self.parts[:, matrix]]
        return total.reshape(-1, len(self.formats))


def expert_choices(spec: specs.ModelSpec, selector: specs.Selector, losses: Losses) -> FormatChoices:
    """Returns the combinations of formats that a planner compares, for the quantizer of the losses."""
    known, quantized = losses.of(losses.quantizer)
    mean = quantized.mean(axis=(0, 1))  # [3, F]
    sizes = np.array([part.part_bytes(spec.hidden_size) for part in known])
    by_matrix = [
        _undominated(sizes, mean[m]) if matrix in spec.expert.matrices else np.zeros(1, np.int64)
        for m, matrix in enumerate(specs.MATRICES)
    ]
    parts = np.stack(np.meshgrid(*by_matrix, indexing="ij"), axis=-1).reshape(-1, 3)
    selector_bytes, record_bytes, extent = _sizes(parts, spec, selector, known)
    lost = mean[np.arange(3), parts].sum(axis=1)
    num_experts = len(spec.moe_layers) * spec.router.num_experts
    kept = _near_the_best(extent, lost, max(LEAST_CHOICES, min(_MOST_CELLS // num_experts, MAX_CHOICES)))
    formats = tuple(_format(row, spec, known) for row in parts[kept].tolist())
    return FormatChoices(
        selector, losses.quantizer, formats, parts[kept], selector_bytes[kept], record_bytes[kept], extent[kept]
    )


FUSED_WIDTHS, FUSED_GROUPS = (4, 8), (128, 64, 32)  # that vLLM's kernels for layers of experts have


def fused_choices(spec: specs.ModelSpec, selector: specs.Selector, losses: Losses) -> FormatChoices:
    """Returns the formats in which all matrices of a layer's experts may be stored for vLLM's fused layers.

    Raises:  PlanError if no such format fits the model's rows.
    """
    known, _ = losses.of(losses.quantizer)
    sizes = (spec.hidden_size, spec.expert.source_size)
    usable = [number for number, part in enumerate(known) if is_fused_format(part, sizes)]
    if not usable:
        raise PlanError(
            f"--for vllm: groups of {', '.join(map(str, FUSED_GROUPS))} weights do not divide rows of {sizes[0]} and "
            f"{sizes[1]}, as this model's experts have; remove --for"
        )
    usable.sort(key=lambda number: known[number].part_bytes(spec.hidden_size))
    parts = np.array([[number if m in spec.expert.matrices else 0 for m in specs.MATRICES] for number in usable])
    formats = tuple(_format(row, spec, known) for row in parts.tolist())
    return FormatChoices(
        selector, losses.quantizer, formats, parts, *_sizes(parts, spec, selector, known), is_fused=True
    )


def is_fused_format(part: plans.PartFormat, sizes: tuple[int, int]) -> bool:
    """Returns whether codes of this format, for rows of both sizes, are such as vLLM's fused layers have."""
    is_known = part.codec == "affine" and part.width in FUSED_WIDTHS and part.group in FUSED_GROUPS
    return is_known and all(size % part.group == 0 for size in sizes)


def _sizes(
    parts: Ints, spec: specs.ModelSpec, selector: specs.Selector, known: tuple[plans.PartFormat, ...]
) -> tuple[Ints, Ints, Ints]:
    """Returns the bytes of selectors, records and extents for combinations [C, 3], as `expert_layout` has them."""
    expert, extra = spec.expert, layouts.extra_layout(spec.expert.extra_floats)
    codes = np.array([part.code_bytes(spec.hidden_size) for part in known])[parts]  # [C, 3]
    sizes = np.array([part.part_bytes(spec.hidden_size) for part in known])[parts]
    sizes += 4 * np.array([matrix in expert.row_bias for matrix in specs.MATRICES])

    def all_rows(matrices: tuple[specs.Matrix, ...]) -> Ints:
        idx = [specs.MATRICES.index(matrix) for matrix in matrices]
        gaps = (-codes[:, idx[:-1]] % layouts.ROW_ALIGN).sum(axis=1)  # between codes: all but the last are padded
        row_bytes = -(-(sizes[:, idx].sum(axis=1) + gaps + layouts.CRC_BYTES) // layouts.ROW_ALIGN) * layouts.ROW_ALIGN
        num_bytes: Ints = expert.intermediate_size * row_bytes * bool(idx)
        return num_bytes

    selectors = all_rows(specs.selector_matrices(selector, expert.matrices))
    records = all_rows(specs.record_matrices(selector, expert.matrices))
    return selectors, records, selectors + records + (extra.row_bytes if extra else 0)


def _format(parts: list[int], spec: specs.ModelSpec, known: tuple[plans.PartFormat, ...]) -> plans.ExpertFormat:
    gate, up, down = (known[number] for number in parts)
    return plans.ExpertFormat(gate if "gate" in spec.expert.matrices else None, up, down)


def _undominated(sizes: Ints, lost: Floats) -> Ints:
    """Returns the indices of those that lose less than all others of at most their size: int64 [n], by rising size."""
    order = np.lexsort((lost, sizes))
    best = np.minimum.accumulate(np.concatenate(([np.inf], lost[order][:-1])))
    kept: Ints = order[lost[order] < best]
    return kept


def _near_the_best(sizes: Ints, lost: Floats, most: int) -> Ints:
    """Returns at most `most` indices, those nearest to the best of at most their size: int64 [n], by rising size.

    If there are more than `most` best ones, it takes them evenly spread, with the first and the last.
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
    """The heat of slices of an expert's rows in the pack's order, hottest first, read from the profile on demand.

    Args:    profile: if None, all neurons run equally often.
    """

    def __init__(self, profile: Profile | None) -> None:
        self._profile = profile
        self._known: dict[int, Floats] = {}

    def at(self, selector: specs.Selector, sparsity: Floats) -> Floats:
        """Returns the share of an expert's tokens for which a row of each slice is read: float64 [L, E, slices].

        Meaning: interpolated between the counted sparsities, then scaled so that the mean is 1 - sparsity. Without a
                 selector every row is read: 1.
        Args:    sparsity: [L, E].
        """
        if selector == "none":
            return np.ones((*sparsity.shape, 1))
        running = 1 - sparsity[:, :, None]
        if self._profile is None:
            return running
        levels = np.array((0.0, *forward.HOT_SPARSITIES))
        counted = self._counted(forward.KINDS.index(selector), self._profile)  # [L, E, levels, slices]
        above = np.clip(np.searchsorted(levels, sparsity, side="right"), 1, len(levels) - 1)
        part = np.clip((sparsity - levels[above - 1]) / (levels[above] - levels[above - 1]), 0, 1)[:, :, None]
        low, high = (np.take_along_axis(counted, n[:, :, None, None], axis=2)[:, :, 0] for n in (above - 1, above))
        heat = low + (high - low) * part
        mean = heat.mean(axis=2, keepdims=True)
        scaled: Floats = heat * np.divide(running, mean, out=np.ones_like(mean), where=mean > 0)
        return np.minimum(scaled, 1.0)

    def _counted(self, kind_idx: int, profile: Profile) -> Floats:
        """Returns the means of slices at sparsity 0 and at all counted sparsities: float64 [L, E, levels, slices]."""
        if kind_idx not in self._known:
            layers = []
            for layer_idx in range(len(profile.spec.moe_layers)):
                statistics = profile.statistics(layer_idx)
                shares = np.stack(
                    [statistics.hot_share(kind_idx, sparsity) for sparsity in forward.HOT_SPARSITIES], axis=1
                )
                ordered = -np.sort(-shares.astype(np.float64), axis=2)  # [E, levels, f]
                ends = np.linspace(0, ordered.shape[2], min(NUM_SLICES, ordered.shape[2]) + 1).astype(np.int64)
                sums = np.concatenate([np.zeros((*ordered.shape[:2], 1)), np.cumsum(ordered, axis=2)], axis=2)
                means = np.diff(sums[:, :, ends], axis=2) / np.diff(ends)
                layers.append(np.concatenate([np.ones_like(means[:, :1]), means], axis=1))
            self._known[kind_idx] = np.stack(layers)
        return self._known[kind_idx]


@dataclass(frozen=True, slots=True, eq=False)
class SpeedEstimate:
    """The estimated speed of a pack within a budget, in the steady state of decode."""

    shares: tuple[budgets.MemoryPart, ...]  # the budget's parts; their sum is at most the budget
    seconds: float  # a token
    fetched_bytes: float  # a token, from slower memory
    read_bytes: float  # a token, of weights in fast memory
    hit_rate: float  # of experts
    misses: Floats  # float64 [L, E], how often the expert is missing for a token
    policy: str  # of the runtime

    @property
    def tokens_per_second(self) -> float:
        """Returns the tokens a second of decode."""
        return 1 / self.seconds


class MemoryTier(Protocol):
    """Fast memory of `budget_bytes` over slower memory."""

    budget_bytes: int

    def estimate(
        self, layout: layouts.PackLayout, sparsity: Floats, less_bytes: int = 0, is_rough: bool = False
    ) -> SpeedEstimate:
        """Estimates the speed of a pack of this layout.

        Args:    sparsity: [L, E].   less_bytes: to take away from the budget.   is_rough: faster and less exact, for a
                 search.
        Raises:  RunError if the pack does not fit; it says how many bytes are needed.
        """
        ...

    def least_bytes(self, layout: layouts.PackLayout) -> int:
        """Returns the smallest budget in which a pack of this layout runs."""
        ...

    def run_seconds(self, expert: layouts.ExpertLayout, sparsity: float) -> float:
        """Returns the seconds to run a resident expert for one token."""
        ...

    def fetch_seconds(self, expert: layouts.ExpertLayout, sparsity: float) -> float:
        """Returns the seconds for which a token waits while an expert is fetched."""
        ...

    def dense_seconds(self, num_bytes: int, width: int) -> float:
        """Returns the seconds to read a dense matrix of this size and width, for each token."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class RoutingFacts:
    """The facts about routes and predictors that an estimate uses."""

    popularity: Floats  # float64 [L, E]
    # Routes to replay, of text not used for calibration; if None, routes are drawn independently
    passes: offload.Passes | None = None
    # The share of the next layer's experts that the best predictor finds; None if no profile says it
    recall: float | None = None
    predictor_bytes: int = 0  # host memory of the predictors


_SEEN_TOKENS = 512  # tokens in the key-value cache, or half of the context if that is less


class MachineTier:
    """The part of a `MemoryTier` that does not depend on the slower memory."""

    def __init__(
        self, machine: machines.Machine, routing: RoutingFacts, budget_bytes: int, context_tokens: int
    ) -> None:
        self.budget_bytes = budget_bytes
        self._machine = machine
        self._routing = routing
        self._context_tokens = context_tokens
        self._seen_tokens = min(context_tokens // 2, _SEEN_TOKENS)

    def run_seconds(self, expert: layouts.ExpertLayout, sparsity: float) -> float:
        """Returns the seconds to run a resident expert for one token."""
        return speed.expert_seconds(expert, 1 - sparsity, self._machine)[0]

    def dense_seconds(self, num_bytes: int, width: int) -> float:
        """Returns the seconds to read a dense matrix of this size and width, for each token."""
        return num_bytes / machines.rate_of(self._machine.dense_rates, width)


def speed_estimate(shares: tuple[budgets.MemoryPart, ...], token: speed.TokenEstimate) -> SpeedEstimate:
    """Returns the estimate of a token together with the budget's parts."""
    return SpeedEstimate(
        shares, token.seconds.total, token.fetched_bytes, token.read_bytes, token.hit_rate, token.misses, token.policy
    )


class CpuTier(MachineTier):
    """Host memory over the disk: the tier of `--device cpu`.

    Args:    kv_dtype: of the key-value cache.
    """

    def __init__(
        self,
        machine: machines.Machine,
        routing: RoutingFacts,
        budget_bytes: int,
        context_tokens: int,
        kv_dtype: KvDtype = "f32",
    ) -> None:
        super().__init__(machine, routing, budget_bytes, context_tokens)
        self._sequences = offload.Sequences(kv_dtype=kv_dtype)

    def estimate(
        self, layout: layouts.PackLayout, sparsity: Floats, less_bytes: int = 0, is_rough: bool = False
    ) -> SpeedEstimate:
        """Estimates the speed of a pack of this layout on the CPU; arguments and errors as `MemoryTier.estimate`."""
        routing = self._routing
        heat = speed.planned_heat(layout, routing.popularity, sparsity, self._machine.disk)
        plan = offload.divide_budget(
            layout,
            self.budget_bytes - less_bytes,
            self._context_tokens,
            routing.predictor_bytes,
            budgets.AS_TARGET,
            heat,
            self._sequences,
        )
        token = speed.estimate_on_cpu(
            layout,
            plan,
            self._machine,
            routing.popularity,
            sparsity,
            routing.passes,
            routing.recall,
            self._seen_tokens,
            is_rough,
            self._sequences.kv_dtype,
        )
        return speed_estimate(plan.parts, token)

    def least_bytes(self, layout: layouts.PackLayout) -> int:
        """Returns the smallest budget in which a pack of this layout runs."""
        return offload.least_budget(layout, self._context_tokens, self._routing.predictor_bytes, self._sequences)

    def fetch_seconds(self, expert: layouts.ExpertLayout, sparsity: float) -> float:
        """Returns the seconds to read an expert whole, or its selector and running rows if that is faster."""
        return speed.disk_seconds(expert, 1 - sparsity, self._machine.disk)


class GpuTier(MachineTier):
    """GPU memory over host memory, and that over the disk: the tier of `--device cuda`."""

    def __init__(
        self, machine: machines.Machine, routing: RoutingFacts, heats: RowHeat, budget_bytes: int, context_tokens: int
    ) -> None:
        super().__init__(machine, routing, budget_bytes, context_tokens)
        self._heats = heats

    def estimate(
        self, layout: layouts.PackLayout, sparsity: Floats, less_bytes: int = 0, is_rough: bool = False
    ) -> SpeedEstimate:
        """Estimates the speed of a pack of this layout on the GPU; arguments and errors as `MemoryTier.estimate`.

        Rows are placed as in a run, which does not know how often each runs (`usual_heat`). All estimates are exact.
        """
        routing, machine = self._routing, self._machine
        needs = fit.gpu_needs(layout, self._context_tokens)
        division = fit.divide_gpu(needs, self.budget_bytes - less_bytes, self._context_tokens)
        fits_host = speed.disk_share(int(extent_bytes(layout).sum()), machine) == 0
        placement = placements.place_experts(
            layout,
            division.experts,
            "split" if fits_host else "disk",
            routing.popularity,
            placements.usual_heat(layout, sparsity),
            is_pulled=fits_host,
            offset_bytes=placements.offset_bytes_for(layout, self.budget_bytes),
        )
        heat = self._heats.at(_selector_of(layout), sparsity)
        token = speed.estimate_on_gpu(
            layout, placement, machine, routing.popularity, heat, routing.passes, self._seen_tokens
        )
        return speed_estimate(_gpu_parts(division, placement), token)

    def least_bytes(self, layout: layouts.PackLayout) -> int:
        """Returns the smallest budget in which a pack of this layout runs."""
        return fit.least_gpu_budget(layout, self._context_tokens)

    def fetch_seconds(self, expert: layouts.ExpertLayout, sparsity: float) -> float:
        """Returns the seconds in which the CPU computes an expert that is not resident, and reads it from the disk.

        A part is from the disk if experts do not fit in host memory. The link's share does not count: it brings
        nothing of an expert whose selector is not resident.
        """
        assert self._machine.host is not None, "a GPU has a host"
        on_disk = speed.disk_share(
            expert.num_bytes * self._routing.popularity.size, self._machine
        )  # if all were like this
        computing = speed.expert_seconds(expert, 1 - sparsity, self._machine.host)[0]
        return computing + on_disk * speed.disk_seconds(expert, 1 - sparsity, self._machine.disk)


def _gpu_parts(division: budgets.Division, placement: placements.GpuPlacement) -> tuple[budgets.MemoryPart, ...]:
    """Returns the parts of a GPU's memory with their names; their sum is the budget."""
    fixed = division.fixed
    return (
        budgets.MemoryPart("dense weights", fixed.dense),
        budgets.MemoryPart("key-value cache", fixed.cache),
        budgets.MemoryPart("workspace", fixed.workspace),
        budgets.MemoryPart("overhead", fixed.overhead),
        budgets.MemoryPart("static rows", int(placement.static_bytes.sum())),
        budgets.MemoryPart("slots", placement.dynamic_bytes),
        budgets.MemoryPart("tables of rows", placement.other_bytes),
        budgets.MemoryPart("left over", division.experts - placement.num_bytes),
    )


def _selector_of(layout: layouts.PackLayout) -> specs.Selector:
    selected = layout.experts[0][0].selector
    if selected is None:
        return "none"
    names = {part.name for part in selected.parts}
    return "both" if len(names) == 2 else "gate" if "gate" in names else "up"
