"""Multiple-choice knapsack: one choice for each item, least cost, within a limit on weight; and how far from optimal.

Lagrangian relaxation: for a price `p` of weight every item by itself takes what makes `cost + p * weight` least. The
price at which the limit is just kept gives a lower bound on the cost of any solution; what is left of the limit is then
spent greedily. With few items that may stay away from the bound; asked to search, the choices that a better solution
can hold are then gone through by dynamic programming. How far the solution may be from optimal is the *duality gap*,
found with it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Choices = NDArray[np.int64]

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

    choice: Choices
    cost: float
    weight: float
    bound: float
    price: float

    @property
    def gap(self) -> float:
        """How much less than this the best solution may cost, as a share of this one's cost."""
        return max(self.cost - self.bound, 0.0) / self.cost if self.cost > 0 else 0.0


class Table:
    """Cost and weight of every choice of every item.

    Args:    cost, weight: float64 [N, C], not negative; a choice that an item does not have costs infinity.
    """

    def __init__(self, cost: Floats, weight: Floats) -> None:
        assert cost.shape == weight.shape and cost.shape[1] > 0, "a cost and a weight for each choice"
        self.cost = cost
        self.weight = np.where(np.isinf(cost), 0.0, weight)
        self._items = np.arange(len(cost))

    def of(self, choice: Choices) -> tuple[float, float]:
        """What choices int64 [N] cost and weigh in all."""
        return float(self.cost[self._items, choice].sum()), float(self.weight[self._items, choice].sum())

    def lightest(self) -> Choices:
        """The lightest choice of each item, the cheapest among equals."""
        return _least(np.where(np.isinf(self.cost), np.inf, self.weight), self.cost)

    def cheapest(self) -> Choices:
        """The cheapest choice of each item, the lightest among equals."""
        return _least(self.cost, self.weight)

    def at(self, price: float) -> tuple[Choices, float]:
        """The choices that make `cost + price * weight` least, and what that sums to."""
        priced = self.cost + price * self.weight
        choice = priced.argmin(axis=1)
        return choice, float(priced[self._items, choice].sum())


def solve(table: Table, limit: float, *, search: bool = False) -> Solution | None:
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


def _spend(table: Table, choice: Choices, left: float, enough: float) -> Choices:
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


def _searched(table: Table, choice: Choices, price: float, limit: float) -> tuple[Choices, bool]:
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
    came: list[tuple[Choices, Choices]] = []  # from which state, by which choice
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


def _least(first: NDArray[Any], second: NDArray[Any]) -> Choices:
    """For each row where `first` is least, and among equals `second`."""
    ties = first == first.min(axis=1, keepdims=True)
    least: Choices = np.where(ties, second, np.inf).argmin(axis=1)
    return least
