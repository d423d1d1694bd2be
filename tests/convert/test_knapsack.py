"""The knapsack against brute force, and its bound."""

import itertools

import numpy as np
import pytest
from support.cases import case

from moe_pack.convert.plan.search import KnapsackProblem, solve


def random_table(seed: int, num_items: int, num_choices: int) -> KnapsackProblem:
    """Costs that fall as weights rise, roughly: as losses do with bytes."""
    generator = np.random.default_rng(seed)
    weight = np.sort(generator.uniform(1, 10, (num_items, num_choices)), axis=1)
    cost = np.sort(generator.exponential(1.0, (num_items, num_choices)), axis=1)[:, ::-1] + 0.01
    cost[generator.random(cost.shape) < 0.1] = np.inf
    cost[:, -1] = 0.01
    return KnapsackProblem(cost, weight)


def best_cost(table: KnapsackProblem, limit: float) -> float:
    found = [
        table.of(np.array(choice)) for choice in itertools.product(range(table.cost.shape[1]), repeat=len(table.cost))
    ]
    return min((cost for cost, weight in found if weight <= limit), default=float("inf"))


def test_it_keeps_the_limit_and_its_bound_is_below_the_best_of_all() -> None:
    for seed in range(30):
        with case(seed):
            table = random_table(seed, 6, 4)
            limit = float(np.random.default_rng(seed).uniform(6, 60))
            found, best = solve(table, limit), best_cost(table, limit)
            if found is None:
                assert best == float("inf")
            else:
                assert found.weight <= limit
                assert (found.cost, found.weight) == pytest.approx(table.of(found.choice))
                assert found.bound <= best * (1 + 1e-12) and best <= found.cost * (1 + 1e-12)


def test_with_many_items_the_gap_is_small() -> None:
    table = random_table(1, 2000, 12)
    found = solve(table, 8000.0)
    assert found is not None
    assert found.weight <= 8000.0
    assert found.gap < 2e-3


def test_convex_costs_are_solved_to_within_one_step() -> None:
    # Each unit of weight saves less than the one before: taking savings in their order is optimal.
    weight = np.tile(np.arange(5.0), (3, 1))
    cost = np.array([[16.0, 8, 4, 2, 1], [8, 4, 2, 1, 0.5], [4, 2, 1, 0.5, 0.25]])
    found = solve(KnapsackProblem(cost, weight), 6.0)
    assert found is not None
    assert found.choice.tolist() == [3, 2, 1]
    assert found.cost == pytest.approx(6.0)
    assert found.gap == pytest.approx(0.0)


def test_what_costs_least_is_taken_where_the_limit_does_not_bind() -> None:
    found = solve(KnapsackProblem(np.array([[3.0, 1.0, 1.0]]), np.array([[1.0, 5.0, 4.0]])), 10.0)
    assert found is not None
    assert (found.choice.tolist(), found.gap, found.price) == ([2], 0.0, 0.0)


def test_there_is_no_solution_where_the_lightest_choices_weigh_too_much() -> None:
    assert solve(KnapsackProblem(np.array([[3.0, 1.0]]), np.array([[2.0, 5.0]])), 1.9) is None


def test_a_choice_an_item_does_not_have_is_never_taken() -> None:
    table = KnapsackProblem(np.array([[5.0, np.inf], [5.0, 1.0]]), np.array([[3.0, 0.0], [3.0, 4.0]]))
    found = solve(table, 7.0)
    assert found is not None
    assert found.choice.tolist() == [0, 1]
