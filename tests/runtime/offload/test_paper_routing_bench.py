"""The figures of the papers' routing, against counts by hand."""

import numpy as np
import pytest
from paper_routing import best_only, coverage_finding, covered, path_counts, placement_finding, shares_of, shuffled
from support.routings import random_routes


def test_paths_are_counted_whatever_the_order_of_a_tokens_experts() -> None:
    routes = np.array([[[0, 1], [2, 3]], [[1, 0], [3, 2]], [[0, 1], [2, 4]], [[5, 1], [2, 3]], [[1, 5], [2, 3]]])
    counts = path_counts(routes.astype("<u2"))
    assert counts.tolist() == [2, 2, 1]
    assert covered(counts, 1) == covered(counts, 0.2) == pytest.approx(0.4)  # at least one path
    assert covered(counts, 2.5) == 1


def test_shuffled_layers_keep_their_popularity_and_forget_each_other() -> None:
    routes = np.repeat(random_routes(500, 1, 4, 1, 0), 2, axis=1)  # the second layer repeats the first
    dealt = shuffled(routes)
    for l in range(2):
        assert np.array_equal(np.sort(dealt[:, l].ravel()), np.sort(routes[:, l].ravel()))
    assert len(path_counts(routes)) == 4
    assert len(path_counts(dealt)) == 16


def test_shares_are_those_of_the_tokens_that_came_by_these_experts() -> None:
    best = np.array([[0, 1, 2], [0, 1, 2], [0, 1, 3], [1, 1, 0]], "<u2")
    assert shares_of(best, (0, 1), 4).tolist() == pytest.approx([0, 0, 2 / 3, 1 / 3])
    assert shares_of(best, None, 4).tolist() == [0.25, 0, 0.5, 0.25]
    assert shares_of(best, (3, 3), 4).tolist() == [0, 0, 0, 0]


def test_a_claim_holds_only_where_the_figures_are_the_papers() -> None:
    skewed, even = np.zeros((1000, 3, 1), "<u2"), random_routes(1000, 3, 8, 1, 0)
    assert coverage_finding(skewed, 8, 1).here.startswith("the claim holds")
    assert coverage_finding(even, 8, 1).here.startswith("the claim does not hold")


def test_placing_popular_experts_is_judged_on_other_text() -> None:
    popularity = np.array([[0.7, 0.1, 0.1, 0.1]])
    same = placement_finding(popularity, popularity)
    assert same.rows[0][2:] == ("70.0%", "70.0%", "25.0%", "10.0%")
    assert same.here.startswith("the claim holds")
    turned = placement_finding(popularity, popularity[:, ::-1])
    assert turned.rows[0][2:] == ("70.0%", "10.0%", "25.0%", "10.0%")
    assert turned.here.startswith("the claim does not hold")


def test_the_best_expert_is_the_first_of_a_route() -> None:
    routes = random_routes(10, 3, 6, 2, 0)
    assert np.array_equal(best_only(routes)[..., 0], routes[..., 0])
