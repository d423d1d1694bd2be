"""Multiple-choice knapsack: one choice for each item, least cost, within a limit on weight; and how far from optimal.

Lagrangian relaxation: for a price `p` of weight every item by itself takes what makes `cost + p * weight` least. The
price at which the limit is just kept gives a lower bound on the cost of any solution; what is left of the limit is then
spent greedily. Costs that are all convex in weight would make that optimal; how far it may be from it is the *duality
gap*, found with the solution.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Choices = NDArray[np.int64]

_MAX_PRICES = 60  # tried: the search for the price ends by itself long before
_MAX_PASSES = 40  # of spending what is left
_NEAR_ENOUGH = 1e-5  # of the cost: no more is spent where the bound is so near


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


def solve(table: Table, limit: float) -> Solution | None:
    """The cheapest choices found that weigh no more than `limit` in all; None where even the lightest weigh more."""
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
    cost, weight = table.of(choice)
    return Solution(choice, cost, weight, min(bound, cost), price)


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


def _least(first: NDArray[Any], second: NDArray[Any]) -> Choices:
    """For each row where `first` is least, and among equals `second`."""
    ties = first == first.min(axis=1, keepdims=True)
    least: Choices = np.where(ties, second, np.inf).argmin(axis=1)
    return least
