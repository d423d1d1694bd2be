"""Multiple-choice knapsack: one choice for each item, least cost, within a limit on weight; and how far from optimal.

Lagrangian relaxation: for a price `p` of weight every item by itself takes what makes `cost + p * weight` least. The
price at which the limit is just kept gives a lower bound on the cost of any solution; what is left of the limit is then
spent greedily. With few items that may stay away from the bound; asked to search, the choices that a better solution
can hold are then gone through by dynamic programming. How far the solution may be from optimal is the *duality gap*,
found with it.

What each expert and dense matrix shall be stored as: the knapsack's two questions, put and answered.

*Least loss in so many bytes* (`least_loss`): what a size can be. *Least time within a loss* (`least_time`): what a
budget can be; time is linear in bytes at given prices, which the planner finds by replay and asks again (`planner`).

What storing something costs in seconds a token, at a plan already foretold: the prices the next plan is decided at.

An expert costs what running it takes as often as it runs, what bringing it takes as often as it is missed, and the room
that its bytes take from others: what a smaller budget would cost, by a foretelling with a little less of it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack.calib.profile import Losses
from moe_pack.convert.plan.plan_file import Decision
from moe_pack.convert.plan.planned import EstimatedPlan, PlanningModel
from moe_pack.convert.plan.tiers import FormatChoices, Ints, MemoryTier, expert_choices
from moe_pack.formats import ExpertFormat, ModelSpec, PartFormat, Plan, RunError, Selector, dense_roles, part_format
from moe_pack.formats.layout import expert_layout, row_layout
from moe_pack.formats.plan import FP8, uniform_dense
from moe_pack.formats.spec import DenseRole

Floats = NDArray[np.float64]
KnapsackChoices = NDArray[np.int64]

_MAX_PRICES = 60  # tried: the search for the price ends by itself long before
_MAX_PASSES = 40  # of spending what is left
_NEAR_ENOUGH = 1e-5  # of the cost: no more is sought where the bound is so near
_FEW_ITEMS = 64  # with more the greedy solution is near the bound, and the search for a better one takes long
_MAX_STATES = 4096  # of the dynamic programme after each item: where it needs no more it is exact


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """One choice for each item: int64 [N].

    `cost`, `weight`: of all.   `bound`: no solution within the limit costs less.   `price`: cost a unit of weight.
    """

    choice: KnapsackChoices
    cost: float
    weight: float
    bound: float
    price: float

    @property
    def gap(self) -> float:
        """How much less than this the best solution may cost, as a share of this one's cost."""
        return max(self.cost - self.bound, 0.0) / self.cost if self.cost > 0 else 0.0


class KnapsackProblem:
    """Cost and weight of every choice of every item.

    Args:    cost, weight: float64 [N, C], not negative; a choice that an item does not have costs infinity.
    """

    def __init__(self, cost: Floats, weight: Floats) -> None:
        assert cost.shape == weight.shape and cost.shape[1] > 0, "a cost and a weight for each choice"
        self.cost = cost
        self.weight = np.where(np.isinf(cost), 0.0, weight)
        self._items = np.arange(len(cost))

    def of(self, choice: KnapsackChoices) -> tuple[float, float]:
        """What choices int64 [N] cost and weigh in all."""
        return float(self.cost[self._items, choice].sum()), float(self.weight[self._items, choice].sum())

    def lightest(self) -> KnapsackChoices:
        """The lightest choice of each item, the cheapest among equals."""
        return _least(np.where(np.isinf(self.cost), np.inf, self.weight), self.cost)

    def cheapest(self) -> KnapsackChoices:
        """The cheapest choice of each item, the lightest among equals."""
        return _least(self.cost, self.weight)

    def at(self, price: float) -> tuple[KnapsackChoices, float]:
        """The choices that make `cost + price * weight` least, and what that sums to."""
        priced = self.cost + price * self.weight
        choice = priced.argmin(axis=1)
        return choice, float(priced[self._items, choice].sum())


def solve(table: KnapsackProblem, limit: float, *, search: bool = False) -> Solution | None:
    """The cheapest choices found that weigh no more than `limit` in all; None where even the lightest weigh more.

    Args:    search: of few items for better ones than the greedy, milliseconds to a second: not for many questions.
    """
    low, high = table.cheapest(), table.lightest()
    (low_cost, low_weight), (high_cost, high_weight) = table.of(low), table.of(high)
    if low_weight <= limit:
        return Solution(low, low_cost, low_weight, low_cost, 0.0)
    if high_weight > limit:
        return None
    bound, price = low_cost, 0.0
    for _ in range(_MAX_PRICES):
        price = (high_cost - low_cost) / (low_weight - high_weight)  # at which both are as good
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
    is_best = False
    if search and len(choice) <= _FEW_ITEMS and table.of(choice)[0] > bound * (1 + _NEAR_ENOUGH):
        choice, is_best = _searched(table, choice, price, limit)
    cost, weight = table.of(choice)
    return Solution(choice, cost, weight, cost if is_best else min(bound, cost), price)


def _spend(table: KnapsackProblem, choice: KnapsackChoices, left: float, enough: float) -> KnapsackChoices:
    """Spends what is left of the limit: again and again each item's best saving, the best for its weight first.

    Args:    enough: a cost at which it ends.
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


def _searched(
    table: KnapsackProblem, choice: KnapsackChoices, price: float, limit: float
) -> tuple[KnapsackChoices, bool]:
    """The cheapest choices within the limit that dynamic programming finds, or these where none are cheaper; and
    whether there are none cheaper at all.

    At this price an item's choice has an excess over the item's best, never negative, and

        cost = (what all items' best sum to) - price * limit + (excesses) + price * (what is left of the limit)

    so that no solution cheaper than the one at hand holds a choice, or choices together, of more excess than what that
    one lies above the first two terms. States are sums over the items so far; of those that weigh no less and cost no
    less than another none is kept, and of too many those of least excess are.
    """
    priced = table.cost + price * table.weight
    excess = priced - priced.min(axis=1, keepdims=True)
    most = table.of(choice)[0] - (float(priced.min(axis=1).sum()) - price * limit)
    lightest = np.where(excess < most, table.weight, np.inf).min(axis=1)
    if not np.isfinite(lightest).all():
        return choice, True
    after = np.append(np.cumsum(lightest[::-1])[::-1][1:], 0.0)  # of all items yet to come
    weight, over = np.zeros(1), np.zeros(1)  # of each state
    came: list[tuple[KnapsackChoices, KnapsackChoices]] = []  # from which state, by which choice
    is_best = True
    for item in range(len(choice)):
        of_item = np.flatnonzero(excess[item] < most)
        weights = (weight[:, None] + table.weight[item, of_item]).ravel()
        overs = (over[:, None] + excess[item, of_item]).ravel()
        kept = np.flatnonzero((overs < most) & (weights + after[item] <= limit))
        if not len(kept):
            return choice, is_best
        kept = kept[np.lexsort((overs[kept], weights[kept]))]
        costs = overs[kept] - price * weights[kept]
        kept = kept[np.append(True, costs[1:] < np.minimum.accumulate(costs)[:-1])]
        if len(kept) > _MAX_STATES:
            kept, is_best = kept[np.argpartition(overs[kept], _MAX_STATES)[:_MAX_STATES]], False
        weight, over = weights[kept], overs[kept]
        came.append((kept // len(of_item), of_item[kept % len(of_item)]))
    state = int((over - price * weight).argmin())
    found = choice.copy()
    for item in reversed(range(len(choice))):
        states, choices = came[item]
        found[item], state = choices[state], int(states[state])
    (cost, weighs), before = table.of(found), table.of(choice)[0]
    return (found if cost < before and weighs <= limit else choice), is_best


def _least(first: NDArray[Any], second: NDArray[Any]) -> KnapsackChoices:
    """For each row where `first` is least, and among equals `second`."""
    ties = first == first.min(axis=1, keepdims=True)
    least: KnapsackChoices = np.where(ties, second, np.inf).argmin(axis=1)
    return least


DENSE_GROUP = 64


@dataclass(frozen=True, slots=True, eq=False)
class StorageCosts:
    """What storing something costs, in seconds a token.

    `runs`, `misses`: float64 [L * E], how often a token runs an expert, and finds it missing.   `run`, `fetch`:
    float64 [C, sparsities], seconds to run an expert of each choice, and to bring it.   `hold`: a byte of an expert,
    for the room it takes from others.   `dense`: float64 [roles, widths], each dense tensor at each width.
    """

    runs: Floats
    misses: Floats
    run: Floats
    fetch: Floats
    hold: float
    dense: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """A decision, the nats it is expected to lose, and how near it is to the best at the prices given."""

    decision: Decision
    loss: float
    solution: Solution


def least_loss(
    spec: ModelSpec,
    selector: Selector,
    losses: Losses,
    max_expert_bytes: int,
    allowed: tuple[PartFormat, ...] | None = None,
) -> Allocation | None:
    """The formats that lose least where all experts together take so many bytes; dense matrices keep the source's.

    Args:    max_expert_bytes: of all extents, without what aligns them in files.   allowed: formats to choose from.
    Returns: None where even the smallest take more.
    """
    choices = expert_choices(spec, selector, losses, allowed)
    lost = choices.losses(losses)
    weights = np.broadcast_to(choices.extent_bytes.astype(np.float64), lost.shape)
    found = solve(KnapsackProblem(lost, weights), max_expert_bytes, search=True)
    if found is None:
        return None
    plan = Plan(selector, choices.quantizer, _experts(choices, found.choice, spec), uniform_dense(spec, None))
    return Allocation(Decision(plan, np.zeros(losses.popularity.shape)), found.cost, found)


def least_time(
    spec: ModelSpec, losses: Losses, max_loss: float, prices: StorageCosts, choices: FormatChoices
) -> Allocation | None:
    """The formats, sparsities and dense widths that cost least at these prices and lose at most so many nats.

    Returns: None where even what loses least loses more.
    """
    experts = _expert_table(losses, prices, choices)
    dense = _dense_table(losses, prices)
    width = max(experts[0].shape[1], dense[0].shape[1])
    cost, lost = (np.concatenate([_widened(e, width), _widened(d, width)]) for e, d in zip(experts, dense, strict=True))
    found = solve(KnapsackProblem(cost, lost), max_loss)
    if found is None:
        return None
    num_experts, num_sparsities = losses.popularity.size, len(losses.sparsities)
    expert_choice, sparsity_idx = np.divmod(found.choice[:num_experts], num_sparsities)
    plan = Plan(
        choices.selector,
        choices.quantizer,
        _experts(choices, expert_choice, spec),
        _dense_formats(spec, losses, found.choice[num_experts:].tolist()),
    )
    sparsity = np.array(losses.sparsities)[sparsity_idx].reshape(losses.popularity.shape)
    return Allocation(Decision(plan, sparsity), found.weight, found)


def _expert_table(losses: Losses, prices: StorageCosts, choices: FormatChoices) -> tuple[Floats, Floats]:
    """Cost and loss of each choice with each sparsity, sparsities side by side: [L * E, C * sparsities] each."""
    kind_idx = losses.kinds.index("both" if choices.selector == "none" else choices.selector)
    held = np.repeat(prices.hold * choices.extent_bytes, len(losses.sparsities))
    cost = prices.runs[:, None] * prices.run.ravel() + prices.misses[:, None] * prices.fetch.ravel() + held
    sparse = losses.sparse[:, :, kind_idx].reshape(-1, 1, len(losses.sparsities))  # [L * E, 1, S]
    lost = choices.losses(losses)[:, :, None] + sparse  # [L * E, C, S]
    return cost, lost.reshape(len(cost), -1)


def _dense_table(losses: Losses, prices: StorageCosts) -> tuple[Floats, Floats]:
    """Cost and loss of each dense tensor at each width: [roles, widths] each; infinite where it cannot be so stored."""
    possible = np.isfinite(losses.dense)
    return np.where(possible, prices.dense, np.inf), np.where(possible, losses.dense, 0.0)


def _dense_formats(spec: ModelSpec, losses: Losses, width_idx: list[int]) -> tuple[PartFormat | None, ...]:
    widths = [losses.dense_widths[idx] for idx in width_idx]
    assert len(widths) == len(dense_roles(spec)), "a width for each"
    return tuple(None if width == 16 else part_format(width, DENSE_GROUP) for width in widths)


def _experts(choices: FormatChoices, choice: Ints, spec: ModelSpec) -> tuple[tuple[ExpertFormat, ...], ...]:
    E = spec.router.num_experts
    numbers = choice.tolist()
    return tuple(tuple(choices.formats[n] for n in numbers[at : at + E]) for at in range(0, len(numbers), E))


def _widened(table: Floats, width: int) -> Floats:
    """The table with as many columns: choices that no item has."""
    return np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=np.inf)


_PROBE = 0.05  # the share of the budget by which it is made smaller
_FIRST_MISSES = 0.5  # of runs, before anything was foretold


@dataclass(frozen=True, slots=True, eq=False)
class CostedFormats:
    """Choices of one selector kind with what they take: `run`, `fetch` float64 [C, sparsities], seconds each."""

    choices: FormatChoices
    run: Floats
    fetch: Floats


def menu_of(tier: MemoryTier, model: PlanningModel, selector: Selector) -> CostedFormats:
    """The choices for experts under a selector kind, and their seconds on a tier."""
    spec, losses = model.spec, model.losses
    choices = expert_choices(spec, selector, losses)
    layouts = [expert_layout(held, selector, spec.expert, spec.hidden_size) for held in choices.formats]
    run, fetch = (
        np.array([[seconds(layout, sparsity) for sparsity in losses.sparsities] for layout in layouts])
        for seconds in (tier.run_seconds, tier.fetch_seconds)
    )
    return CostedFormats(choices, run, fetch)


def price(
    tier: MemoryTier,
    model: PlanningModel,
    menu: CostedFormats,
    last: EstimatedPlan | None,
    dearer: tuple[float, float] = (1.0, 1.0),
) -> StorageCosts:
    """The prices at a plan; before any, those of a cache that half of the experts are missing from.

    Args:    dearer: what memory is worth to dense matrices, and to experts, is multiplied by it; above 1, and memory
             worth nothing yet, it is given a worth.
    """
    run, fetch, runs = menu.run, menu.fetch, model.losses.popularity.ravel()
    misses = _FIRST_MISSES * runs if last is None else last.foretold.misses.ravel()
    room, whole = _room_price(tier, last), float((runs * run.max()).sum() + (misses * fetch.max()).sum())
    dense, held = (room if factor == 1 else max(room, whole / tier.budget_bytes) * factor for factor in dearer)
    return StorageCosts(
        runs,
        misses,
        run,
        fetch,
        hold=held * _held_share(tier, last),
        dense=_dense_prices(tier, model, dense),
    )


def _room_price(tier: MemoryTier, last: EstimatedPlan | None) -> float:
    """What a byte of fast memory is worth, seconds a token: found with a budget that is a little smaller."""
    if last is None:
        return 0.0
    less = int(_PROBE * tier.budget_bytes)
    try:
        smaller = tier.foretell(last.layout, last.decision.sparsity, less, is_rough=True)
    except RunError:
        return last.foretold.seconds / tier.budget_bytes  # hardly any room is left
    return max(smaller.seconds - last.foretold.seconds, 0.0) / less


def _held_share(tier: MemoryTier, last: EstimatedPlan | None) -> float:
    """How much of an expert's bytes takes room: all where all have room, less where they take turns."""
    return 1.0 if last is None else min(1.0, tier.budget_bytes / max(last.expert_bytes, 1))


def _dense_prices(tier: MemoryTier, model: PlanningModel, room: float) -> Floats:
    """What each dense tensor costs at each width: [roles, widths]; of the embedding one row is read, or all as head."""
    spec, losses = model.spec, model.losses
    prices = np.zeros(losses.dense.shape)
    for role_idx, (role, dtype) in enumerate(zip(dense_roles(spec), model.dense_dtypes, strict=True)):
        for width_idx, width in enumerate(losses.dense_widths):
            if np.isfinite(losses.dense[role_idx, width_idx]):
                num_bytes = dense_bytes(role, dtype, width)
                is_looked_up = role.name == "embed" and not spec.tied_head
                read = num_bytes // role.shape[0] if is_looked_up else num_bytes
                prices[role_idx, width_idx] = tier.dense_seconds(read, width) + room * num_bytes
    return prices


def dense_bytes(role: DenseRole, dtype: str, width: int) -> int:
    """What a dense tensor takes at a width; at 16, what the source keeps it in."""
    if width == 16 and dtype == "F8_E4M3":
        return role.shape[0] * row_layout([("weight", FP8, False)], role.shape[1]).row_bytes
    if width == 16:
        return int(np.prod(role.shape)) * (4 if dtype == "F32" else 2)
    return role.shape[0] * row_layout([("weight", part_format(width, DENSE_GROUP), False)], role.shape[1]).row_bytes
