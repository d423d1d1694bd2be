"""Path statistics learned: a table worked by hand, sizes to the byte, recall and coverage against loops."""

import itertools
import math
from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest
from support.cases import case as named_case
from support.paths import CASES, EVERYTHING, HAND, Case, Plain, Sets

from moe_pack.calib.statistics import accumulated_frequency, evaluate, learn_paths, path_coverage
from moe_pack.calib.statistics.paths import ACCUMULATED_EXPERTS
from moe_pack.runtime.offload import PathStatistics
from moe_pack.runtime.offload.paths import BackoffLevel
from moe_pack.runtime.offload.prefetch import ranked


def best(probabilities: np.ndarray[Any, Any], count: int) -> list[int]:
    values = probabilities.tolist()
    return sorted(range(len(values)), key=lambda e: (-values[e], e))[:count]


def test_a_small_table_is_stored_as_worked_by_hand() -> None:
    arrays = {name: array.tolist() for name, array in learn_paths(HAND, 3, EVERYTHING).arrays().items()}
    assert arrays == {
        "popularity": [[8, 2, 0], [0, 10, 0], [4, 0, 6]],
        "after_one": [[[0, 8, 0], [0, 2, 0], [0, 0, 0]], [[0, 0, 0], [4, 0, 6], [0, 0, 0]]],
        "after_two": [[[2, 0, 6], [2, 0, 0], [0, 0, 0]]],
        "key_starts": [0, 0, 1, 2],
        "keys_one": [[0]],
        "keys_two": [[0, 1]],
        "keys_seen": [8, 8],
        "successor_starts": [0, 1, 3],
        "successor_experts": [1, 0, 2],
        "successor_counts": [8, 2, 6],
    }


def key_costs(plain: Plain) -> dict[tuple[int, Sets], int]:
    """Bytes of each key seen often enough: its experts, count and start, then index and count of each successor."""
    often = [key for key, seen in plain.seen.items() if seen >= 8]
    successors = Counter(key[:2] for key in plain.after)
    return {(l, sets): 2 * plain.k * len(sets) + 2 + 4 + 4 * successors[l, sets] for l, sets in often}


def stored_keys(found: PathStatistics, k: int) -> set[tuple[int, Sets]]:
    rows = [*found.keys_one.tolist(), *found.keys_two.tolist()]
    layers = np.repeat(np.arange(len(found.key_starts) - 1), np.diff(found.key_starts.astype(int)))
    halves = [tuple(frozenset(row[i : i + k]) for i in range(0, len(row), k)) for row in rows]
    return {(int(l), sets) for l, sets in zip(layers, halves, strict=True)}


PRUNED = Case(500, 4, 2, 4, 4, follow=0.7)


@pytest.mark.parametrize("case", [PRUNED, Case(300, 4, 1, 4, 4, follow=0.6), Case(200, 2, 1, 6, 6)], ids=str)
def test_the_least_seen_keys_go_first_and_the_rest_fits_to_the_byte(case: Case) -> None:
    routes = case.draw(seed=1)
    plain = Plain(routes, case.E)
    costs = key_costs(plain)

    def order(key: tuple[int, Sets]) -> tuple[int, int, list[int]]:
        return -plain.seen[key], key[0], [e for chosen in key[1] for e in sorted(chosen)]

    wanted = sorted(costs, key=order)
    L, E = case.L, case.E
    size = 4 * L * E + 2 * E * E * (L - 1 + max(L - 2, 0)) + 4 * (L + 1) + 4
    assert len(wanted) > 3 and learn_paths(routes, E, size - 1).num_bytes == size
    for i, key in enumerate([None, *wanted]):
        size += costs[key] if key else 0
        for room in (size, size + 1, size + (costs[wanted[i]] - 1 if i < len(wanted) else 10**6)):
            found = learn_paths(routes, E, room)
            assert found.num_bytes == size == sum(array.nbytes for array in found.arrays().values())
            assert stored_keys(found, case.k) == set(wanted[:i])


def test_tables_are_kept_where_they_alone_exceed_the_size() -> None:
    routes = PRUNED.draw(seed=1)
    least, whole = learn_paths(routes, 4, 0), learn_paths(routes, 4, EVERYTHING)
    assert len(least.keys_seen) == 0 < len(whole.keys_seen)
    for name in ("popularity", "after_one", "after_two"):
        np.testing.assert_array_equal(getattr(least, name), getattr(whole, name))
    assert BackoffLevel.EXACT not in least.predict(2, routes[:, :2])[1]


def test_pruned_statistics_answer_as_the_whole_do_where_they_still_hold_the_key() -> None:
    routes = PRUNED.draw(seed=1)
    whole = learn_paths(routes, 4, EVERYTHING)
    pruned = learn_paths(routes, 4, whole.num_bytes * 3 // 4)
    for l in (1, 2, 3):
        before = routes[:, max(l - 2, 0) : l]
        (wide, wide_stage), (narrow, stage) = whole.predict(l, before), pruned.predict(l, before)
        same = stage == wide_stage
        assert same.any() and (l == 1 or not same.all())
        np.testing.assert_array_equal(narrow[same], wide[same])
        assert set(stage[~same].tolist()) <= {BackoffLevel.FACTORED}


def test_the_order_of_a_tokens_experts_changes_nothing() -> None:
    for case in [case for case in CASES if case.k > 1]:
        with named_case(case):
            routes, held_out = case.draw(seed=1), case.draw(seed=2)
            shuffle = np.random.default_rng(7).permuted
            found, other = (learn_paths(r, case.E, EVERYTHING) for r in (routes, shuffle(routes, axis=2)))
            for name, array in found.arrays().items():
                np.testing.assert_array_equal(array, other.arrays()[name])
            assert evaluate(found, held_out, 2) == evaluate(found, shuffle(held_out, axis=2), 2)
            for l in range(case.L):
                before = held_out[:, max(l - 2, 0) : l]
                for a, b in zip(found.predict(l, before), found.predict(l, shuffle(before, axis=2)), strict=True):
                    np.testing.assert_array_equal(a, b)


def test_counts_beyond_65535_tokens_take_32_bits() -> None:
    for T, dtype in ((65535, "<u2"), (65536, "<u4")):
        routes = np.zeros((T, 3, 1), np.uint8)
        found = learn_paths(routes, 2, 200)
        for array in (found.after_one, found.after_two, found.keys_seen, found.successor_counts):
            assert array.dtype == dtype and int(array.max()) == T
        assert found.num_bytes <= 200 and len(found.keys_seen) == 2
        again = PathStatistics.from_arrays(found.arrays(), "profile", 3, 2, 1)
        assert again.predict(2, np.zeros((1, 2, 1), int))[0].tolist() == [[1.0, 0.0]]


def test_keys_ascend_by_number_where_indices_take_two_bytes() -> None:
    experts = [1, 255, 256, 511, 512]
    routes = np.repeat([[e, e] for e in experts], 8, axis=0)[:, :, None]
    found = learn_paths(routes, 513, EVERYTHING)
    assert found.keys_one[:, 0].tolist() == experts
    PathStatistics.from_arrays(found.arrays(), "profile", 2, 513, 1)
    probabilities, stages = found.predict(1, routes[::8, :1])
    assert stages.tolist() == [BackoffLevel.EXACT] * 5 and ranked(probabilities, 1)[:, 0].tolist() == experts


def test_recall_is_what_loops_find() -> None:
    for case, num_predicted in product(CASES, [1, 2]):
        with named_case(case, num_predicted):
            found, held_out = learn_paths(case.draw(seed=1), case.E, EVERYTHING), case.draw(seed=2)
            results = evaluate(found, held_out, num_predicted)
            assert len(results) == case.L
            for l, result in enumerate(results):
                probabilities, stages = found.predict(l, held_out[:, max(l - 2, 0) : l])
                hits = [
                    [len(set(token[l]) & set(best(row, n))) / case.k for n in (num_predicted, 2 * num_predicted)]
                    for token, row in zip(held_out.tolist(), probabilities, strict=True)
                ]
                assert [result.recall, result.recall_doubled] == pytest.approx(np.mean(hits, axis=0).tolist())
                for stage in BackoffLevel:
                    of_stage = [hit[0] for hit, s in zip(hits, stages.tolist(), strict=True) if s == stage]
                    assert result.stage_share[stage] == pytest.approx(len(of_stage) / case.T)
                    expected = sum(of_stage) / len(of_stage) if of_stage else None
                    assert result.stage_recall[stage] == (None if expected is None else pytest.approx(expected))


def test_recall_does_not_depend_on_how_many_tokens_are_predicted_at_once() -> None:
    case = Case(4500, 2, 1, 3, 3, follow=0.5)  # more than one chunk
    found, held_out = learn_paths(case.draw(seed=1), 3, EVERYTHING), case.draw(seed=2)
    probabilities, _ = found.predict(1, held_out[:, :1])
    hits = ranked(probabilities, 1)[:, 0] == held_out[:, 1, 0]
    assert evaluate(found, held_out, 1)[1].recall == hits.mean()


def test_accumulated_frequencies_are_what_loops_find() -> None:
    for case in [*CASES, Case(30, 2, 2, 20, 18)]:
        with named_case(case):
            found, held_out = learn_paths(case.draw(seed=1), case.E, EVERYTHING), case.draw(seed=2)
            accumulated = accumulated_frequency(found, held_out)
            n = min(case.E, ACCUMULATED_EXPERTS)
            assert accumulated.shape == (3, case.L, n)
            for num_known, l in itertools.product(range(3), range(case.L)):
                probabilities, _ = found.predict(l, held_out[:, max(l - num_known, 0) : l])
                hits = np.zeros(n)
                for token, row in zip(held_out.tolist(), probabilities, strict=True):
                    hits += np.cumsum([e in token[l] for e in best(row, n)])
                np.testing.assert_allclose(accumulated[num_known, l], hits / (case.T * case.k), rtol=1e-12)  # float64


def test_knowing_more_layers_accumulates_faster_where_layers_follow_each_other() -> None:
    # Layer 2 is the sum of the two before, modulo 3: neither alone tells anything of it, both tell all.
    pairs = np.random.default_rng(0).integers(0, 3, (900, 2))
    routes = np.concatenate([pairs, pairs.sum(axis=1, keepdims=True) % 3], axis=1)[:, :, None]
    accumulated = accumulated_frequency(learn_paths(routes, 3, EVERYTHING), routes)
    assert accumulated[0, 2, 0] < 0.4 and accumulated[1, 2, 0] < 0.4 and accumulated[2, 2, 0] == 1


def test_paths_are_counted_as_loops_count_them() -> None:
    for case in CASES:
        with named_case(case):
            routes = case.draw(seed=1)
            length = case.L if case.k == 1 else min(3, case.L)
            results = path_coverage(routes, case.E)
            assert [result.first_layer for result in results] == list(range(case.L - length + 1))
            for result in results:
                l = result.first_layer
                paths = Counter(tuple(frozenset(c) for c in token[l : l + length]) for token in routes.tolist())
                counts = sorted(paths.values(), reverse=True)
                assert result.num_layers == length and len(result.frequencies) == len(counts)
                assert result.frequencies.tolist() == counts
                nums = [math.ceil(percent * len(counts) / 100) for percent in (1, 5, 10, 20, 50)]
                assert result.covered == pytest.approx([sum(counts[:num]) / case.T for num in nums])


def test_whole_paths_of_one_expert_a_token_are_covered_as_worked_by_hand() -> None:
    paths = [[0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0, 1]]
    routes = np.repeat(paths, [5, 10, 3, 1, 1], axis=0)[:, :, None]
    (result,) = path_coverage(routes, 2)
    assert result.frequencies.tolist() == [10, 5, 3, 1, 1]
    assert result.covered == (0.5, 0.5, 0.5, 0.5, 0.9)  # 50% of five paths is rounded up to three


def test_no_path_leads_from_one_stack_into_another() -> None:
    routes = np.random.default_rng(3).integers(0, 3, (64, 5, 1))
    found = learn_paths(routes, 3, EVERYTHING, first_layers=(0, 2))
    apart = [learn_paths(routes[:, stack], 3, EVERYTHING) for stack in (slice(0, 2), slice(2, 5))]
    assert found.popularity.tolist() == [*apart[0].popularity.tolist(), *apart[1].popularity.tolist()]
    zeros = np.zeros((3, 3)).tolist()
    ones = [*apart[0].after_one.tolist(), zeros, *apart[1].after_one.tolist()]
    assert found.after_one.tolist() == ones
    assert found.after_two.tolist() == [zeros, zeros, *apart[1].after_two.tolist()]
    # A key is of all that a layer could know: of one stack's two layers, or of layer 0 alone.
    assert found.keys_one.tolist() == apart[0].keys_one.tolist()
    assert found.keys_two.tolist() == apart[1].keys_two.tolist()
    assert PathStatistics.from_arrays(found.arrays(), "paths", 5, 3, 1).arrays().keys() == found.arrays().keys()
    recalls = evaluate(found, routes, 1, first_layers=(0, 2))
    assert [recall.stage_share[2] for recall in recalls] == [1, 0, 1, 0, 0]  # a stack's first: popularity alone


def test_paths_are_spread_over_each_stack() -> None:
    routes = np.random.default_rng(3).integers(0, 3, (64, 5, 1))
    found = path_coverage(routes, 3, first_layers=(0, 2))
    assert [(window.first_layer, window.num_layers) for window in found] == [(0, 2), (2, 3)]
    apart = [path_coverage(routes[:, stack], 3)[0] for stack in (slice(0, 2), slice(2, 5))]
    assert [window.frequencies.tolist() for window in found] == [window.frequencies.tolist() for window in apart]
