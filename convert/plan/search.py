"""The search for formats: a multiple-choice knapsack that finds the least time within a loss, and the prices it needs.

Time is linear in bytes at given prices; the planner finds prices by estimates and asks again (`planner`).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack.calib.profile import Losses
from moe_pack.convert.plan import planned, speed
from moe_pack.convert.plan.plan_file import Decision
from moe_pack.formats.base import errors
from moe_pack.formats.pack import layouts, plans
from moe_pack.formats.pack.safetensors import DTYPE_BYTES
from moe_pack.formats.parts import DenseRole, specs

Floats = NDArray[np.float64]
MAX_CHOICES, LEAST_CHOICES = 320, 64
_MOST_CELLS = 600_000  # of all experts: with more experts each needs fewer choices, because different ones can be mixed
_FEWEST = 1e-12  # nats: the loss of a lossless choice, where losses are compared by their ratio
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
    """Returns the combinations of formats that a planner compares, for the quantizer of the losses.

    A choice is kept if, for a mean expert, it loses little more than the best choice of at most its bytes. Bytes are
    exact, with the CRC and the padding of rows.
    """
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
        raise errors.PlanError(
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
    expert = spec.expert
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
    extra = layouts.plain_layout(expert.extra_floats, "F32").row_bytes if expert.extra_floats else 0
    return selectors, records, selectors + records + extra


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


KnapsackChoices = NDArray[np.int64]
_MAX_PRICES = 60  # the search for the price ends long before
_MAX_PASSES = 40  # over all items to spend the rest of the limit
_NEAR_ENOUGH = 1e-5  # of the cost: the search ends if the bound is so near


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """A solution of the knapsack."""

    choice: KnapsackChoices  # int64 [N], of each item
    # cost, weight: sums
    cost: float
    weight: float
    bound: float  # no solution within the limit costs less
    price: float  # the cost of a unit of weight

    @property
    def gap(self) -> float:
        """The most that the best solution may cost less, as a share of this one's cost."""
        return max(self.cost - self.bound, 0.0) / self.cost if self.cost > 0 else 0.0


class KnapsackProblem:
    """The cost and weight of every choice of every item.

    Args:    cost, weight: float64 [N, C], not negative; infinite cost marks choices that an item does not have.
    """

    def __init__(self, cost: Floats, weight: Floats) -> None:
        assert cost.shape == weight.shape and cost.shape[1] > 0, "a cost and a weight for each choice"
        self.cost = cost
        self.weight = np.where(np.isinf(cost), 0.0, weight)
        self._items = np.arange(len(cost))

    def of(self, choice: KnapsackChoices) -> tuple[float, float]:
        """Returns the cost and the weight of choices, int64 [N]."""
        return float(self.cost[self._items, choice].sum()), float(self.weight[self._items, choice].sum())

    def at(self, price: float) -> tuple[KnapsackChoices, float]:
        """Returns the choices with the least `cost + price * weight`, and its sum."""
        priced = self.cost + price * self.weight
        choice = priced.argmin(axis=1)
        return choice, float(priced[self._items, choice].sum())


def solve(table: KnapsackProblem, limit: float) -> Solution | None:
    """Returns the cheapest solution that it finds within `limit`; None if even the lightest choices weigh more.

    By Lagrangian relaxation: for a price `p` of weight, every item takes the choice with the least `cost + p * weight`.
    The price at which the limit is just kept bounds the cost of any solution from below. The rest of the limit is spent
    greedily. The *duality gap* says how far the solution may be from the best.
    """
    # The cheapest choice of each item, of equal ones the lightest, and the lightest, of equal ones the cheapest.
    low = _least(table.cost, table.weight)
    high = _least(np.where(np.isinf(table.cost), np.inf, table.weight), table.cost)
    (low_cost, low_weight), (high_cost, high_weight) = table.of(low), table.of(high)
    if low_weight <= limit:
        return Solution(low, low_cost, low_weight, low_cost, 0.0)
    if high_weight > limit:
        return None
    bound, price = low_cost, 0.0
    for _ in range(_MAX_PRICES):
        price = (high_cost - low_cost) / (low_weight - high_weight)  # at this price both are equally good
        choice, least = table.at(price)
        bound = max(bound, least - price * limit)
        cost, weight = table.of(choice)
        if least >= (high_cost + price * high_weight) * (1 - 1e-12):
            break
        if weight <= limit:
            high, high_cost, high_weight = choice, cost, weight
        else:
            low_cost, low_weight = cost, weight
    choice = _spend(table, high, limit - high_weight, bound * (1 + _NEAR_ENOUGH))
    cost, weight = table.of(choice)
    return Solution(choice, cost, weight, min(bound, cost), price)


def _spend(table: KnapsackProblem, choice: KnapsackChoices, left: float, enough: float) -> KnapsackChoices:
    """Spends the rest of the limit: takes each item's best saving, the best for its weight first, again and again.

    Args:    left: the rest of the limit.   enough: a cost at which it ends.
    """
    choice, items = choice.copy(), np.arange(len(choice))
    for _ in range(_MAX_PASSES):
        more = table.weight - table.weight[items, choice][:, None]
        saved = table.cost[items, choice][:, None] - table.cost
        worth = np.where((saved > 0) & (more <= left), saved / np.maximum(more, 1e-300), 0.0)
        best = worth.argmax(axis=1)
        begun = left
        for item in np.argsort(-worth[items, best], kind="stable").tolist():
            if worth[item, best[item]] <= 0:
                break
            needed = float(more[item, best[item]])
            if needed <= left:
                choice[item], left = best[item], left - needed
        if left == begun or table.of(choice)[0] <= enough:
            break
    return choice


def _least(first: NDArray[Any], second: NDArray[Any]) -> KnapsackChoices:
    """Returns for each row the column with the least `first`, and among equals the least `second`."""
    ties = first == first.min(axis=1, keepdims=True)
    least: KnapsackChoices = np.where(ties, second, np.inf).argmin(axis=1)
    return least


DENSE_GROUP = 64


@dataclass(frozen=True, slots=True, eq=False)
class StorageCosts:
    """The costs of storage choices, in seconds a token."""

    # runs, misses: float64 [L * E], how often a token runs an expert, and how often the expert is missing
    runs: Floats
    misses: Floats
    # run, fetch: float64 [C, sparsities], seconds to run an expert with each choice, and to fetch it
    run: Floats
    fetch: Floats
    expert_byte: float  # for the memory of each byte of an expert
    dense: Floats  # float64 [roles, widths], of each dense tensor at each width


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """A decision with its estimated loss in nats, and the knapsack's solution with the duality gap."""

    decision: Decision
    loss: float
    solution: Solution


def least_time(
    spec: specs.ModelSpec, losses: Losses, max_loss: float, prices: StorageCosts, choices: FormatChoices
) -> Allocation | None:
    """Returns the formats, sparsities and dense widths that cost least and lose at most `max_loss` nats.

    Returns: None if every choice loses more.
    """
    experts = _expert_table(losses, prices, choices)
    if choices.is_fused:
        experts = _fused_table(experts, losses)
    dense = _dense_table(losses, prices)
    width = max(experts[0].shape[1], dense[0].shape[1])
    cost, lost = (np.concatenate([_widened(e, width), _widened(d, width)]) for e, d in zip(experts, dense, strict=True))
    solution = solve(KnapsackProblem(cost, lost), max_loss)
    if solution is None:
        return None
    num_items, num_sparsities = len(experts[0]), len(losses.sparsities)
    taken = np.repeat(solution.choice[:num_items], losses.popularity.size // num_items)
    expert_choice, sparsity_idx = np.divmod(taken, num_sparsities)
    dense_widths = [losses.dense_widths[idx] for idx in solution.choice[num_items:].tolist()]
    E = spec.router.num_experts
    plan = plans.Plan(
        choices.selector,
        choices.quantizer,
        tuple(tuple(choices.formats[n] for n in layer) for layer in expert_choice.reshape(-1, E).tolist()),
        tuple(None if width == 16 else plans.part_format(width, DENSE_GROUP) for width in dense_widths),
        spec.expert.repeats if choices.quantizer == "calibrated" else 0,
    )
    sparsity = np.array(losses.sparsities)[sparsity_idx].reshape(losses.popularity.shape)
    return Allocation(Decision(plan, sparsity), solution.weight, solution)


def _expert_table(losses: Losses, prices: StorageCosts, choices: FormatChoices) -> tuple[Floats, Floats]:
    """Returns the cost and the loss of each choice with each sparsity: [L * E, C * sparsities] each."""
    kind_idx = losses.kinds.index("both" if choices.selector == "none" else choices.selector)
    memory = np.repeat(prices.expert_byte * choices.extent_bytes, len(losses.sparsities))
    cost = prices.runs[:, None] * prices.run.ravel() + prices.misses[:, None] * prices.fetch.ravel() + memory
    sparse = losses.sparse[:, :, kind_idx].reshape(-1, 1, len(losses.sparsities))  # [L * E, 1, S]
    lost = choices.losses(losses)[:, :, None] + sparse  # [L * E, C, S]
    return cost, lost.reshape(len(cost), -1)


def _fused_table(experts: tuple[Floats, Floats], losses: Losses) -> tuple[Floats, Floats]:
    """Returns the cost and the loss of each choice for all experts of a layer, [L, C * sparsities]; all neurons run."""
    num_layers, num_experts = losses.popularity.shape
    cost, lost = (each.reshape(num_layers, num_experts, -1).sum(axis=1) for each in experts)
    is_sparse = np.arange(cost.shape[1]) % len(losses.sparsities) > 0
    return np.where(is_sparse, np.inf, cost), np.where(is_sparse, 0.0, lost)


def _dense_table(losses: Losses, prices: StorageCosts) -> tuple[Floats, Floats]:
    """Returns the cost and the loss of each dense tensor at each width: [roles, widths]; infinite if impossible."""
    possible = np.isfinite(losses.dense)
    return np.where(possible, prices.dense, np.inf), np.where(possible, losses.dense, 0.0)


def _widened(table: Floats, width: int) -> Floats:
    return np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=np.inf)


_PROBE = 0.05  # the share of the budget that is taken away to find the price of memory
_FIRST_MISSES = 0.5  # of runs, before the first estimate


@dataclass(frozen=True, slots=True, eq=False)
class CostedFormats:
    """The format choices of one selector with their costs."""

    choices: FormatChoices
    # run, fetch: float64 [C, sparsities], seconds to run an expert and to fetch it
    run: Floats
    fetch: Floats


def costed_formats(
    tier: speed.MemoryTier, model: planned.PlanningModel, selector: specs.Selector, *, is_fused: bool = False
) -> CostedFormats:
    """Returns the format choices of experts with a selector, and their seconds on a tier.

    Args:    is_fused: whether they are those of `fused_choices`.
    """
    spec, losses = model.spec, model.losses
    choices = (fused_choices if is_fused else expert_choices)(spec, selector, losses)
    experts = [layouts.expert_layout(formats, selector, spec.expert, spec.hidden_size) for formats in choices.formats]
    run, fetch = (
        np.array([[seconds(layout, sparsity) for sparsity in losses.sparsities] for layout in experts])
        for seconds in (tier.run_seconds, tier.fetch_seconds)
    )
    return CostedFormats(choices, run, fetch)


def price(
    tier: speed.MemoryTier,
    model: planned.PlanningModel,
    formats: CostedFormats,
    last: planned.EstimatedPlan | None,
    dearer: tuple[float, float] = (1.0, 1.0),
) -> StorageCosts:
    """Returns the prices at a plan's estimate; without a plan, those of a cache in which half of the experts miss.

    An expert costs the time to run it, as often as it runs, the time to fetch it, as often as it is missing, and the
    memory that its bytes take from other experts. The price of memory is the time that a slightly smaller budget costs.
    Args:    dearer: factors for the price of memory to dense matrices and to experts. With a factor other than 1 the
             price is at least a mean one, even if the estimate says that more memory gains nothing.
    """
    run, fetch, runs = formats.run, formats.fetch, model.losses.popularity.ravel()
    misses = _FIRST_MISSES * runs if last is None else last.speed.misses.ravel()
    byte_price, whole = _byte_price(tier, last), float((runs * run.max()).sum() + (misses * fetch.max()).sum())
    dense, experts = (
        byte_price if factor == 1 else max(byte_price, whole / tier.budget_bytes) * factor for factor in dearer
    )
    return StorageCosts(
        runs,
        misses,
        run,
        fetch,
        # All experts' bytes cost if all fit, else those that are resident.
        expert_byte=experts * (1.0 if last is None else min(1.0, tier.budget_bytes / max(last.expert_bytes, 1))),
        dense=_dense_prices(tier, model, dense),
    )


def _byte_price(tier: speed.MemoryTier, last: planned.EstimatedPlan | None) -> float:
    """Returns the price of a byte of fast memory in seconds a token: the cost of a slightly smaller budget."""
    if last is None:
        return 0.0
    less = int(_PROBE * tier.budget_bytes)
    try:
        smaller = tier.estimate(last.layout, last.decision.sparsity, less, is_rough=True)
    except errors.RunError:
        return last.speed.seconds.total / tier.budget_bytes  # the budget is hardly enough
    return max(smaller.seconds.total - last.speed.seconds.total, 0.0) / less


def _dense_prices(tier: speed.MemoryTier, model: planned.PlanningModel, byte_price: float) -> Floats:
    """Returns the cost of each dense tensor at each width: [roles, widths].

    A token reads one row of the embedding, unless it is the head too.
    """
    spec, losses = model.spec, model.losses
    prices = np.zeros(losses.dense.shape)
    for role_idx, (role, dtype) in enumerate(zip(specs.dense_roles(spec), model.dense_dtypes, strict=True)):
        for width_idx, width in enumerate(losses.dense_widths):
            if np.isfinite(losses.dense[role_idx, width_idx]):
                num_bytes = dense_bytes(role, dtype, width)
                is_looked_up = role.integers or (role.name == "embed" and not spec.tied_head)
                read = num_bytes // role.shape[0] if is_looked_up else num_bytes
                prices[role_idx, width_idx] = tier.dense_seconds(read, width) + byte_price * num_bytes
    return prices


def dense_bytes(role: DenseRole, dtype: str, width: int) -> int:
    """Returns the bytes of a dense tensor at a width; at width 16 it keeps the source's dtype."""
    if width == 16 and dtype == "F8_E4M3":
        return role.shape[0] * layouts.row_layout([("weight", plans.FP8, False)], role.shape[1]).row_bytes
    if width == 16:
        return int(np.prod(role.shape)) * DTYPE_BYTES[dtype]
    return (
        role.shape[0]
        * layouts.row_layout([("weight", plans.part_format(width, DENSE_GROUP), False)], role.shape[1]).row_bytes
    )
