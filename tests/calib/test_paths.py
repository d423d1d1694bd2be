"""Path statistics against dictionaries and loops, a table worked by hand, sizes to the byte, and damaged arrays."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from moe_pack.calib.coverage import Routes
from moe_pack.calib.paths import (
    ACCUMULATED_EXPERTS,
    MIN_SEEN,
    PathStatistics,
    Stage,
    accumulated_frequency,
    evaluate,
    learn_paths,
    path_coverage,
    ranked,
)
from moe_pack.formats import PackError

EVERYTHING = 2**30
Sets = tuple[frozenset[int], ...]


@dataclass(frozen=True)
class Case:
    """A shape of routes; experts from `drawn_from` on are never chosen; a `follow` of 1 repeats the layer before."""

    T: int
    L: int
    k: int
    E: int
    drawn_from: int
    follow: float = 0.0

    def draw(self, seed: int, drawn_from: int | None = None) -> Routes:
        generator = np.random.default_rng(seed)
        width = drawn_from or self.drawn_from
        scores = generator.gumbel(size=(self.T, self.L, width)) - 0.5 * np.arange(width)
        routes = np.argsort(-scores, axis=2)[:, :, : self.k]  # best first, so unsorted
        for l in range(1, self.L):
            same = generator.random(self.T) < self.follow
            routes[same, l] = routes[same, l - 1]
        return routes


CASES = [
    Case(60, 4, 1, 6, 5),
    Case(300, 4, 1, 4, 4, follow=0.6),
    Case(60, 3, 2, 6, 5),
    Case(400, 4, 2, 4, 4, follow=0.7),
    Case(150, 3, 3, 5, 5, follow=0.8),
    Case(5, 3, 2, 4, 3),  # too few tokens for any exact key
    Case(40, 1, 2, 5, 4),
    Case(40, 2, 2, 5, 4),
    Case(40, 2, 1, 3, 3),
    Case(20, 3, 1, 4, 1),  # all tokens on one expert
    Case(9, 3, 3, 3, 3),  # every expert for every token
    Case(8, 3, 1, 1, 1),
    Case(1, 1, 1, 1, 1),
]


class Plain:
    """The same statistics by dictionaries of sets, one token and one expert at a time."""

    def __init__(self, routes: Routes, num_experts: int) -> None:
        self.E, self.tokens = num_experts, [[frozenset(chosen) for chosen in token] for token in routes.tolist()]
        self.k = routes.shape[2]
        self.seen: Counter[tuple[int, Sets]] = Counter()
        self.after: Counter[tuple[int, Sets, int]] = Counter()
        for token in self.tokens:
            for l in range(1, len(token)):
                key = l, tuple(token[max(l - 2, 0) : l])
                self.seen[key] += 1
                self.after.update((*key, e) for e in token[l])

    def popularity(self, l: int, e: int) -> float:
        return sum(e in token[l] for token in self.tokens) / (len(self.tokens) * self.k)

    def given(self, l: int, e: int, earlier: int, before: int) -> float | None:
        """P(e at l | before at earlier), leaning on popularity by E choices; None if `before` was never chosen."""
        those = [token for token in self.tokens if before in token[earlier]]
        count = sum(e in token[l] for token in those)
        return (count + self.E * self.popularity(l, e)) / (len(those) * self.k + self.E) if those else None

    def predict(self, l: int, before: Sets) -> tuple[list[float], Stage]:
        seen = self.seen[l, before]
        if seen >= 8 and len(before) == min(l, 2):
            return [self.after[l, before, e] / (seen * self.k) for e in range(self.E)], Stage.EXACT
        pairs = [(l - len(before) + i, e) for i, chosen in enumerate(before) for e in chosen]
        factors = [[self.given(l, e, *pair) for pair in pairs] for e in range(self.E)]
        known = [[factor for factor in row if factor is not None] for row in factors]
        if not known[0]:
            return [self.popularity(l, e) for e in range(self.E)], Stage.POPULARITY
        means = [math.prod(row) ** (1 / len(row)) for row in known]
        return [mean / sum(means) for mean in means], Stage.FACTORED


def sets_before(token: list[list[int]], l: int, num_known: int = 2) -> Sets:
    return tuple(frozenset(chosen) for chosen in token[max(l - num_known, 0) : l])


def best(probabilities: np.ndarray[Any, Any], count: int) -> list[int]:
    values = probabilities.tolist()
    return sorted(range(len(values)), key=lambda e: (-values[e], e))[:count]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("num_known", [0, 1, 2])
def test_predictions_are_those_of_dictionaries_and_loops(case: Case, num_known: int) -> None:
    routes = case.draw(seed=1)
    # Held-out tokens also choose experts that calibration never saw.
    held_out = np.concatenate([case.draw(seed=2)[:20], case.draw(seed=3, drawn_from=case.E)[:20]])
    found, plain = learn_paths(routes, case.E, EVERYTHING), Plain(routes, case.E)
    for l in range(case.L):
        probabilities, stages = found.predict(l, held_out[:, max(l - num_known, 0) : l])
        assert probabilities.dtype == np.float32 and stages.dtype == np.uint8
        expected = [plain.predict(l, sets_before(token, l, num_known)) for token in held_out.tolist()]
        assert stages.tolist() == [stage for _, stage in expected]
        # Rounding to float32 is 6e-8 relative; sums and logarithms before it are float64.
        np.testing.assert_allclose(probabilities, [shares for shares, _ in expected], rtol=1e-6, atol=1e-12)


def test_the_cases_reach_every_stage_at_layers_with_two_before() -> None:
    reached = set()
    for case in CASES:
        if case.L > 2:
            found = learn_paths(case.draw(seed=1), case.E, EVERYTHING)
            reached |= set(found.predict(2, case.draw(seed=3, drawn_from=case.E)[:, :2])[1].tolist())
    assert reached == set(Stage)


HAND = np.repeat([[0, 1, 2], [0, 1, 0], [1, 1, 0]], [6, 2, 2], axis=0)[:, :, None]  # ten tokens, three layers, k = 1


def test_a_small_table_is_predicted_as_worked_by_hand() -> None:
    found = learn_paths(HAND, 3, EVERYTHING)
    before = np.array([[[0], [1]], [[1], [1]], [[2], [1]], [[2], [2]]])
    probabilities, stages = found.predict(2, before)
    # 0 then 1, seen 8 times, 6 times followed by 2. 1 then 1, seen twice: two layers back (2 + 3 * 0.4) / (2 + 3) =
    # 0.64 for expert 0 and 0.36 for 2; one back (4 + 3 * 0.4) / (10 + 3) = 0.4 and 0.6; so sqrt(0.256) to
    # sqrt(0.216). 2 then 1: layer 0 never chose 2, which leaves 0.4 and 0.6. 2 then 2: nothing known.
    assert stages.tolist() == [Stage.EXACT, Stage.FACTORED, Stage.FACTORED, Stage.POPULARITY]
    expected = [[0.25, 0, 0.75], [0.521224, 0, 0.478776], [0.4, 0, 0.6], [0.4, 0, 0.6]]
    np.testing.assert_allclose(probabilities, expected, atol=1e-6)  # worked out to six decimals
    first, stage = found.predict(0, np.empty((2, 0, 1), int))
    np.testing.assert_allclose(first, [[0.8, 0.2, 0]] * 2, atol=1e-7)  # float32
    assert stage.tolist() == [Stage.POPULARITY] * 2


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


def test_a_key_is_used_from_the_eighth_time_on() -> None:
    assert MIN_SEEN == 8
    for times, stage in ((7, Stage.FACTORED), (8, Stage.EXACT)):
        found = learn_paths(HAND[:times], 3, EVERYTHING)
        assert found.predict(2, np.array([[[0], [1]]]))[1].tolist() == [stage]


def test_no_tokens_get_no_predictions() -> None:
    found = learn_paths(HAND, 3, EVERYTHING)
    for l in range(3):
        probabilities, stages = found.predict(l, np.empty((0, min(l, 2), 1), int))
        assert probabilities.shape == (0, 3) and stages.shape == (0,)


def test_equal_probabilities_rank_by_lowest_index() -> None:
    probabilities = np.array([[0.2, 0.3, 0.2, 0.3], [0, 0, 0, 1], [0.25] * 4], np.float32)
    assert ranked(probabilities, 3).tolist() == [[1, 3, 0], [3, 0, 1], [0, 1, 2]]
    assert ranked(probabilities, 9).shape == (3, 4)


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
    assert Stage.EXACT not in least.predict(2, routes[:, :2])[1]


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
        assert set(stage[~same].tolist()) <= {Stage.FACTORED}


@pytest.mark.parametrize("case", [case for case in CASES if case.k > 1], ids=str)
def test_the_order_of_a_tokens_experts_changes_nothing(case: Case) -> None:
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
    assert stages.tolist() == [Stage.EXACT] * 5 and ranked(probabilities, 1)[:, 0].tolist() == experts


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("num_predicted", [1, 2])
def test_recall_is_what_loops_find(case: Case, num_predicted: int) -> None:
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
        for stage in Stage:
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


@pytest.mark.parametrize("case", [*CASES, Case(30, 2, 2, 20, 18)], ids=str)
def test_accumulated_frequencies_are_what_loops_find(case: Case) -> None:
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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_paths_are_counted_as_loops_count_them(case: Case) -> None:
    routes = case.draw(seed=1)
    length = case.L if case.k == 1 else min(3, case.L)
    results = path_coverage(routes, case.E)
    assert [result.first_layer for result in results] == list(range(case.L - length + 1))
    for result in results:
        l = result.first_layer
        paths = Counter(tuple(frozenset(c) for c in token[l : l + length]) for token in routes.tolist())
        counts = sorted(paths.values(), reverse=True)
        assert result.num_layers == length and result.num_paths == len(counts)
        assert result.frequencies.tolist() == counts
        nums = [math.ceil(percent * len(counts) / 100) for percent in (1, 5, 10, 20, 50)]
        assert result.covered == pytest.approx([sum(counts[:num]) / case.T for num in nums])


def test_whole_paths_of_one_expert_a_token_are_covered_as_worked_by_hand() -> None:
    paths = [[0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0, 1]]
    routes = np.repeat(paths, [5, 10, 3, 1, 1], axis=0)[:, :, None]
    (result,) = path_coverage(routes, 2)
    assert result.frequencies.tolist() == [10, 5, 3, 1, 1]
    assert result.covered == (0.5, 0.5, 0.5, 0.5, 0.9)  # 50% of five paths is rounded up to three


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("size", [0, 400, EVERYTHING])
def test_arrays_come_back_as_they_went(case: Case, size: int) -> None:
    found = learn_paths(case.draw(seed=1), case.E, size)
    raw = {name: (array.dtype.str, array.shape, array.tobytes()) for name, array in found.arrays().items()}
    assert all(dtype in ("<u2", "<u4") for dtype, _, _ in raw.values())
    read = {name: np.frombuffer(values, dtype).reshape(shape) for name, (dtype, shape, values) in raw.items()}
    again = PathStatistics.from_arrays(read, "profile", case.L, case.E, case.k)
    assert again.num_bytes == found.num_bytes
    for l in range(case.L):
        before = case.draw(seed=2)[:, max(l - 2, 0) : l]
        for a, b in zip(found.predict(l, before), again.predict(l, before), strict=True):
            np.testing.assert_array_equal(a, b)


Arrays = dict[str, np.ndarray[Any, Any]]
Change = Callable[[Arrays], object]


def put(name: str, place: Any, value: Any) -> Change:
    """Writes one value (or one value several times)."""

    def change(arrays: Arrays) -> None:
        arrays[name][place] = value

    return change


def swap(name: str, rows: list[int]) -> Change:
    """Takes the rows of an array in another order, or another number of them."""

    def change(arrays: Arrays) -> None:
        arrays[name] = arrays[name][rows]

    return change


def cast(name: str, dtype: str) -> Change:
    def change(arrays: Arrays) -> None:
        arrays[name] = arrays[name].astype(dtype)

    return change


# The statistics that are damaged: T = 24, L = 3, E = 4, k = 2; sets A = {0, 1} and B = {2, 3}, eight tokens each of
# A A A, A B A and B B B. Keys: layer 1: A (16), B (8); layer 2: A A (8), A B (8), B B (8).
A, B = [1, 0], [3, 2]
DAMAGED = np.repeat([[A, A, A], [A, B, A], [B, B, B]], 8, axis=0)

EVEN = "2 choices of each token, of equally many at every layer"
SUMS = "no expert whose counts do not add up to its popularity"
SETS, RISING = "sets of ascending experts below 4", "ascending experts below 4"
FEW = "at least 1 and at most what its key was seen"
HOSTILE: list[tuple[Change, str, str]] = [
    (cast("popularity", "<f4"), "popularity", ": found <f4 [3, 4], expected <u4 [3, 4]"),
    (cast("popularity", ">u4"), "popularity", ": found >u4 [3, 4], expected <u4 [3, 4]"),
    (swap("popularity", [0, 1]), "popularity", ": found <u4 [2, 4], expected <u4 [3, 4]"),
    (put("popularity", ..., 0), "popularity", f", layer 0: found 0, expected {EVEN}"),
    (put("popularity", (0, 0), 17), "popularity", f", layer 0: found 49, expected {EVEN}"),
    (put("popularity", (2, 1), 18), "popularity", f", layer 2: found 50, expected {EVEN}"),
    (put("popularity", (1, ...), [0, 12, 11, 25]), "popularity", ", layer 1: found 25, expected at most all 24 tokens"),
    (put("popularity", (1, ...), [12, 12, 12, 12]), "after_one", f", table 0: found 4, expected {SUMS}"),
    (cast("after_one", "<u4"), "after_one", ": found <u4 [2, 4, 4], expected <u2 [2, 4, 4]"),
    (put("after_one", (1, 0, 0), 9), "after_one", f", table 1: found 1, expected {SUMS}"),
    (put("after_one", (1, 0, ...), [4, 12, 0, 0]), "after_one", f", table 1: found 2, expected {SUMS}"),
    (put("after_one", (1, ..., 0), [4, 12, 8, 8]), "after_one", f", table 1: found 2, expected {SUMS}"),
    (put("after_two", (0, 3, 3), 0), "after_two", f", table 0: found 1, expected {SUMS}"),
    (swap("key_starts", [0, 1, 2]), "key_starts", ": found <u4 [3], expected <u4 [4]"),
    (put("key_starts", 0, 1), "key_starts", ", position 0: found 1, expected numbers that rise from 0"),
    (put("key_starts", 2, 6), "key_starts", ", position 3: found 5, expected numbers that rise from 0"),
    (put("key_starts", 1, 1), "key_starts", ", position 1: found 1, expected 0: layer 0 has none before it"),
    (put("key_starts", 3, 2**32 - 1), "keys_two", ": found <u2 [3, 4], expected <u2 [4294967293, 4]"),
    (put("key_starts", 2, 3), "keys_one", ": found <u2 [2, 2], expected <u2 [3, 2]"),
    (put("keys_one", (1, 1), 4), "keys_one", f", key 1: found [2, 4], expected {SETS}"),
    (put("keys_two", (0, 3), 0), "keys_two", f", key 0: found [0, 1, 0, 0], expected {SETS}"),
    (swap("keys_one", [0, 0]), "keys_one", ", key 1: found [0, 1], expected one above that before it"),
    (swap("keys_two", [0, 2, 1]), "keys_two", ", key 2: found [0, 1, 2, 3], expected one above that before it"),
    (put("keys_seen", 4, 7), "keys_seen", ", key 4: found 7, expected from 8 to 24 tokens"),
    (put("keys_seen", 4, 25), "keys_seen", ", key 4: found 25, expected from 8 to 24 tokens"),
    (swap("keys_seen", [0]), "keys_seen", ": found <u2 [1], expected <u2 [5]"),
    (swap("successor_starts", [0]), "successor_starts", ": found <u4 [1], expected <u4 [6]"),
    (put("successor_starts", 2, 3), "successor_starts", ", position 2: found 3, expected numbers that rise from 0"),
    (put("successor_starts", 5, 13), "successor_experts", ": found <u2 [12], expected <u2 [13]"),
    (swap("successor_counts", [0]), "successor_counts", ": found <u2 [1], expected <u2 [12]"),
    (put("successor_experts", 3, 4), "successor_experts", f", position 3: found 4, expected {RISING}"),
    (put("successor_experts", 1, 0), "successor_experts", f", position 1: found 0, expected {RISING}"),
    (put("successor_starts", 1, 0), "successor_experts", f", position 4: found 2, expected {RISING}"),
    (put("successor_counts", 11, 0), "successor_counts", f", position 11: found 0, expected {FEW}"),
    (put("successor_counts", 11, 9), "successor_counts", f", position 11: found 9, expected {FEW}"),
    (put("successor_counts", 11, 7), "successor_counts", ", key 4: found 15, expected 2 choices of each token"),
]


def damaged(change: Change) -> Arrays:
    arrays = {name: array.copy() for name, array in learn_paths(DAMAGED, 4, EVERYTHING).arrays().items()}
    change(arrays)
    return arrays


@pytest.mark.parametrize(("change", "name", "fault"), HOSTILE, ids=[name + fault for _, name, fault in HOSTILE])
def test_damaged_arrays_are_refused_by_name(change: Change, name: str, fault: str) -> None:
    with pytest.raises(PackError) as caught:
        PathStatistics.from_arrays(damaged(change), "profile.safetensors", 3, 4, 2)
    assert str(caught.value) == f"profile.safetensors: tensor {name!r}{fault}; profile the model anew"


def test_unknown_and_missing_arrays_are_refused_by_name() -> None:
    for change, fault in (
        (lambda arrays: arrays.pop("keys_one"), "'keys_one' is missing"),
        (lambda arrays: arrays.update(extra=np.zeros(1)), "'extra' is unknown"),
    ):
        with pytest.raises(PackError) as caught:
            PathStatistics.from_arrays(damaged(change), "profile.safetensors", 3, 4, 2)
        assert str(caught.value) == f"profile.safetensors: tensor {fault}; profile the model anew"


def test_the_arrays_that_are_damaged_pass_undamaged() -> None:
    arrays = damaged(lambda arrays: None)
    assert arrays["keys_seen"].tolist() == [16, 8, 8, 8, 8] and arrays["key_starts"].tolist() == [0, 0, 2, 5]
    assert arrays["successor_starts"].tolist() == [0, 4, 6, 8, 10, 12]
    PathStatistics.from_arrays(arrays, "profile.safetensors", 3, 4, 2)


def test_keys_of_a_later_layer_may_come_before_those_of_an_earlier() -> None:
    routes = np.repeat([[0, 1, 1, 0], [1, 0, 0, 0]], 8, axis=0)[:, :, None]
    found = learn_paths(routes, 2, EVERYTHING)
    assert found.keys_two.tolist() == [[0, 1], [1, 0], [0, 0], [1, 1]]  # two keys of layer 2, two of layer 3
    PathStatistics.from_arrays(found.arrays(), "profile", 4, 2, 1)


@pytest.mark.parametrize("shape", [(4, 4, 2), (3, 5, 2), (3, 4, 1), (3, 4, 3)])
def test_statistics_of_another_model_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(PackError, match=r"^profile: tensor '\w+'[:,] .*; profile the model anew$"):
        PathStatistics.from_arrays(damaged(lambda arrays: None), "profile", *shape)
