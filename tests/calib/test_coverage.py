"""Coverage, popularity against chance and co-activation, against loops and published tables."""

import itertools
import math
import statistics
from collections import Counter

import numpy as np
import pytest
from support.cases import case

from moe_pack.calib.statistics import MIN_TOKENS, compare_popularity, measure_coverage
from moe_pack.calib.statistics.popularity import (
    Routes,
    as_sets,
    chi_square_tail,
    count_pairs,
    spearman,
    wilson_interval,
)


def draw(T: int, L: int, k: int, num_experts: int, drawn_from: int, seed: int = 0) -> Routes:
    """Routes over the first `drawn_from` experts, the first likeliest; the others are never chosen."""
    generator = np.random.default_rng(seed)
    scores = generator.gumbel(size=(T, L, drawn_from)) - 0.4 * np.arange(drawn_from)
    assert drawn_from <= num_experts
    return np.argsort(-scores, axis=2)[:, :, :k]


SHAPES = [  # T, L, k, E, drawn from
    (40, 3, 1, 6, 5),
    (40, 3, 2, 6, 5),
    (100, 2, 3, 5, 5),
    (5, 1, 2, 4, 3),
    (1, 1, 1, 1, 1),
    (9, 2, 1, 4, 1),  # every token on one expert
    (7, 2, 3, 3, 3),  # every token on every expert
]


def test_coactivation_counts_what_loops_count() -> None:
    for shape in SHAPES:
        with case(shape):
            T, L, k, E, drawn = shape
            routes = draw(T, L, k, E, drawn)
            expected = np.zeros((L, E, E), np.uint32)
            for token in routes.tolist():
                for l, chosen in enumerate(token):
                    for a, b in itertools.product(chosen, chosen):
                        expected[l, a, b] += 1
            found = np.stack([count_pairs(routes[:, l], routes[:, l], E) for l in range(L)])
            assert found.dtype == np.uint32
            np.testing.assert_array_equal(found, expected)
            np.testing.assert_array_equal(np.diagonal(found, axis1=1, axis2=2), measure_coverage(routes, E).tokens)


def test_coactivation_of_a_small_table_is_what_one_counts_by_hand() -> None:
    routes = np.array([[0, 1], [1, 0], [2, 1]])
    assert count_pairs(routes, routes, 4).tolist() == [[2, 2, 0, 0], [2, 3, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]


def test_coverage_counts_what_loops_count() -> None:
    for shape in SHAPES:
        with case(shape):
            T, L, k, E, drawn = shape
            routes = draw(T, L, k, E, drawn)
            coverage = measure_coverage(routes, E)
            counts = [Counter(e for token in routes.tolist() for e in token[l]) for l in range(L)]
            assert coverage.num_tokens == T
            assert coverage.tokens.tolist() == [[counts[l][e] for e in range(E)] for l in range(L)]
            assert coverage.share.tolist() == [[counts[l][e] / T for e in range(E)] for l in range(L)]
            assert coverage.unreached == tuple((l, e) for l in range(L) for e in range(E) if not counts[l][e])
            assert coverage.scarce == tuple((l, e) for l in range(L) for e in range(E) if 0 < counts[l][e] < MIN_TOKENS)
            assert (coverage.low <= coverage.share).all() and (coverage.share <= coverage.high).all()
            assert (coverage.low >= 0).all() and (coverage.high <= 1).all()


def test_an_expert_is_scarce_up_to_one_token_below_the_minimum() -> None:
    routes = np.repeat([0, 1, 2], [MIN_TOKENS - 1, MIN_TOKENS, 1]).reshape(-1, 1, 1)
    coverage = measure_coverage(routes, 4)
    assert coverage.scarce == ((0, 0), (0, 2)) and coverage.unreached == ((0, 3),)


def test_intervals_are_those_newcombe_published() -> None:
    for tokens, out_of, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        with case(tokens, out_of, low, high):
            # R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3: four decimals.
            found = wilson_interval(np.array([tokens, out_of - tokens], np.uint32), out_of)
            assert [float(ends[0]) for ends in found] == pytest.approx([low, high], abs=0.5e-4)
            mirrored = [1 - float(found[1][1]), 1 - float(found[0][1])]
            assert mirrored == pytest.approx([float(ends[0]) for ends in found], abs=1e-15)  # rounding of 1 - x


def test_intervals_of_none_and_all_end_exactly_at_0_and_1() -> None:
    for out_of in range(1, 200):
        low, high = wilson_interval(np.array([0, out_of], np.uint32), out_of)
        assert low[0] == 0 and high[1] == 1


def test_chi_square_tails_are_those_of_the_tables() -> None:
    for value, freedom, tail in [
        (3.841, 1, 0.05),
        (6.635, 1, 0.01),
        (10.828, 1, 0.001),
        (5.991, 2, 0.05),
        (7.815, 3, 0.05),
        (0.352, 3, 0.95),
        (18.307, 10, 0.05),
        (29.588, 10, 0.001),
        (24.996, 15, 0.05),
        (67.505, 50, 0.05),
        (124.342, 100, 0.05),
        (149.449, 100, 0.001),
    ]:
        with case(value, freedom, tail):
            assert chi_square_tail(value, freedom) == pytest.approx(
                tail, rel=1e-3
            )  # tables round values to three decimals


@pytest.mark.parametrize("value", [180.0, 255.0, 300.0])
def test_chi_square_tails_of_many_experts_follow_wilson_and_hilferty(value: float) -> None:
    n = 255
    z = ((value / n) ** (1 / 3) - (1 - 2 / (9 * n))) / math.sqrt(2 / (9 * n))
    # The approximation itself is off by a few 1e-4 at this many degrees of freedom.
    assert chi_square_tail(value, n) == pytest.approx(0.5 * math.erfc(z / math.sqrt(2)), abs=5e-4)


def test_chi_square_tails_are_1_at_nothing_and_vanish_far_out() -> None:
    assert chi_square_tail(0.0, 7) == chi_square_tail(0.0, 0) == 1.0
    assert chi_square_tail(1e6, 255) == chi_square_tail(1e6, 2) == 0.0
    assert 0.999999 < chi_square_tail(1e-9, 9) <= 1.0


def test_chi_square_is_on_average_its_degrees_of_freedom_where_sets_are_uniform() -> None:
    for k in [1, 2, 3, 4]:
        with case(k):
            # All pairs of tokens, each with any k of 5 experts: the expectation, exactly, not a sample of it.
            sets = list(itertools.combinations(range(5), k))
            tests = [compare_popularity(np.array([[a], [b]]), np.array([[a], [b]]), 5)[0] for a in sets for b in sets]
            assert statistics.mean(test.chi_square for test in tests) == pytest.approx(4, rel=1e-12)  # float64 sums


def test_chi_square_of_one_expert_a_token_is_pearsons_by_hand() -> None:
    held_out = np.repeat([0, 1, 2], [6, 3, 0]).reshape(-1, 1, 1)  # 6, 3, 0 where 3 each were uniform: 9/3 + 0 + 9/3
    test = compare_popularity(held_out, held_out, 3)[0]
    assert test.chi_square == pytest.approx(6) and test.p_value == pytest.approx(math.exp(-3))


def test_popularity_is_compared_as_loops_compare_it() -> None:
    for shape in [shape for shape in SHAPES if shape[0] > 1]:
        with case(shape):
            T, L, k, E, drawn = shape
            calibration, held_out = draw(T, L, k, E, drawn), draw(T + 3, L, k, E, drawn, seed=1)[:, :, ::-1]
            for l, test in enumerate(compare_popularity(calibration, held_out, E)):
                learned = Counter(e for token in calibration.tolist() for e in token[l])
                choices = [e for token in held_out.tolist() for e in token[l]]
                nats = [math.log((learned[e] + 1) / (T * k + E)) for e in choices]
                best = sorted(range(E), key=lambda e: (-learned[e], e))[: math.ceil(E / 4)]
                assert test.calibrated_nats == pytest.approx(statistics.mean(nats), rel=1e-12)  # float64 sums
                assert test.uniform_nats == pytest.approx(-math.log(E))
                assert test.quarter_share == pytest.approx(sum(e in best for e in choices) / len(choices), rel=1e-12)
                assert test.quarter_uniform == len(best) / E
                assert test.p_value == chi_square_tail(test.chi_square, E - 1)
                expected = [learned[e] for e in range(E)], [choices.count(e) for e in range(E)]
                assert test.spearman == spearman(*map(np.array, expected))


def test_where_every_token_has_every_expert_nothing_can_differ_from_uniform() -> None:
    test = compare_popularity(draw(7, 1, 3, 3, 3), draw(9, 1, 3, 3, 3), 3)[0]
    assert (test.chi_square, test.p_value, test.spearman) == (0.0, 1.0, None)


def test_popularity_that_holds_beats_uniform_and_popularity_that_turns_round_loses() -> None:
    calibration = np.repeat([0, 1, 2, 3], [80, 10, 6, 4]).reshape(-1, 1, 1)
    held, turned = (compare_popularity(calibration, routes, 4)[0] for routes in (calibration, 3 - calibration))
    assert held.calibrated_nats > held.uniform_nats > turned.calibrated_nats
    assert held.quarter_share == 0.8 and turned.quarter_share == 0.04 and held.quarter_uniform == 0.25
    assert held.spearman == pytest.approx(1) and turned.spearman == pytest.approx(-1)
    assert held.p_value == turned.p_value < 1e-20


def test_spearman_is_the_correlation_of_mean_ranks() -> None:
    generator = np.random.default_rng(3)
    for _ in range(20):
        a, b = generator.integers(0, 5, (2, 9))
        ranks = [
            [sum(x < y for x in row) + (sum(x == y for x in row) - 1) / 2 for y in row]
            for row in (a.tolist(), b.tolist())
        ]
        assert spearman(a, b) == pytest.approx(statistics.correlation(*ranks), abs=1e-12)  # float64 sums
    assert spearman(np.array([1, 1]), np.array([1, 2])) is None


def test_the_order_of_a_tokens_experts_changes_nothing() -> None:
    routes = draw(50, 3, 3, 6, 6)
    other = np.random.default_rng(5).permuted(routes, axis=2)
    assert (routes != other).any()
    assert compare_popularity(routes, routes, 6) == compare_popularity(other, other, 6)


def test_routes_that_no_router_gives_are_caught() -> None:
    for routes, fault in [
        (np.zeros((2, 3), int), r"routes are \[T, L, k\] and not empty, not \(2, 3\)"),
        (np.zeros((0, 1, 1), int), r"routes are \[T, L, k\] and not empty, not \(0, 1, 1\)"),
        (np.array([[[4]]]), "routes name an expert that is none of 4"),
        (np.array([[[-1]]]), "routes name an expert that is none of 4"),
        (np.array([[[2, 2]]]), "a token's experts are distinct"),
    ]:
        with case(routes, fault), pytest.raises(AssertionError, match=fault):
            as_sets(routes, 4)
