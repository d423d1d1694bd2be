"""Path statistics against dictionaries and loops, a table worked by hand, and damaged arrays."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from support.cases import case as named_case
from support.paths import CASES, EVERYTHING, HAND, Case, Plain, sets_before

from moe_pack.calib.statistics import learn_paths
from moe_pack.formats import PackError
from moe_pack.runtime.offload import PathStatistics
from moe_pack.runtime.offload.paths import PATH_MIN_SEEN, BackoffLevel
from moe_pack.runtime.offload.prefetch import ranked


def test_predictions_are_those_of_dictionaries_and_loops() -> None:
    for case, num_known in product(CASES, [0, 1, 2]):
        with named_case(case, num_known):
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


def test_a_token_alone_is_told_what_it_is_told_among_others() -> None:
    for case, num_known in product([*CASES, Case(2000, 4, 4, 40, 36), Case(1000, 3, 8, 128, 120)], [0, 1, 2]):
        with named_case(case, num_known):
            found = learn_paths(case.draw(seed=1), case.E, EVERYTHING)
            held_out = np.concatenate([case.draw(seed=2)[:15], case.draw(seed=3, drawn_from=case.E)[:15]])
            for l in range(case.L):
                before = held_out[:, max(l - num_known, 0) : l]
                probabilities, stages = found.predict(
                    l, np.concatenate([before, before[:1]])
                )  # two tokens at the least
                for t in range(len(before)):
                    alone, stage = found.predict(l, before[t : t + 1])
                    np.testing.assert_array_equal(alone, probabilities[t : t + 1])
                    assert alone.dtype == np.float32 and stage.tolist() == [stages[t]] and stage.dtype == np.uint8


def test_the_cases_reach_every_stage_at_layers_with_two_before() -> None:
    reached = set()
    for case in CASES:
        if case.L > 2:
            found = learn_paths(case.draw(seed=1), case.E, EVERYTHING)
            reached |= set(found.predict(2, case.draw(seed=3, drawn_from=case.E)[:, :2])[1].tolist())
    assert reached == set(BackoffLevel)


def test_a_key_is_used_from_the_eighth_time_on() -> None:
    assert PATH_MIN_SEEN == 8
    for times, stage in ((7, BackoffLevel.FACTORED), (8, BackoffLevel.EXACT)):
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


def test_arrays_come_back_as_they_went() -> None:
    for case, size in product(CASES, [0, 400, EVERYTHING]):
        with named_case(case, size):
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

EVEN = "2 choices of each token, and equally many tokens in every layer"
SUMS = "0 experts whose counts do not add up to their popularity"
SETS, RISING = "sets of ascending experts below 4", "ascending experts below 4"
FEW = "at least 1 and at most the count of its key"
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
    (put("key_starts", 0, 1), "key_starts", ", position 0: found 1, expected ascending numbers from 0"),
    (put("key_starts", 2, 6), "key_starts", ", position 3: found 5, expected ascending numbers from 0"),
    (put("key_starts", 1, 1), "key_starts", ", position 1: found 1, expected 0: no layer is before layer 0"),
    (put("key_starts", 3, 2**32 - 1), "keys_two", ": found <u2 [3, 4], expected <u2 [4294967293, 4]"),
    (put("key_starts", 2, 3), "keys_one", ": found <u2 [2, 2], expected <u2 [3, 2]"),
    (put("keys_one", (1, 1), 4), "keys_one", f", key 1: found [2, 4], expected {SETS}"),
    (put("keys_two", (0, 3), 0), "keys_two", f", key 0: found [0, 1, 0, 0], expected {SETS}"),
    (swap("keys_one", [0, 0]), "keys_one", ", key 1: found [0, 1], expected keys in ascending order"),
    (swap("keys_two", [0, 2, 1]), "keys_two", ", key 2: found [0, 1, 2, 3], expected keys in ascending order"),
    (put("keys_seen", 4, 7), "keys_seen", ", key 4: found 7, expected from 8 to 24 tokens"),
    (put("keys_seen", 4, 25), "keys_seen", ", key 4: found 25, expected from 8 to 24 tokens"),
    (swap("keys_seen", [0]), "keys_seen", ": found <u2 [1], expected <u2 [5]"),
    (swap("successor_starts", [0]), "successor_starts", ": found <u4 [1], expected <u4 [6]"),
    (put("successor_starts", 2, 3), "successor_starts", ", position 2: found 3, expected ascending numbers from 0"),
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


def test_damaged_arrays_are_refused_by_name() -> None:
    for change, name, fault in HOSTILE:
        with named_case(change, name, fault):
            with pytest.raises(PackError) as caught:
                PathStatistics.from_arrays(damaged(change), "profile.safetensors", 3, 4, 2)
            assert str(caught.value) == f"profile.safetensors: tensor {name!r}{fault}; profile the model again"


def test_unknown_and_missing_arrays_are_refused_by_name() -> None:
    for change, fault in (
        (lambda arrays: arrays.pop("keys_one"), "'keys_one' is missing"),
        (lambda arrays: arrays.update(extra=np.zeros(1)), "'extra' is unknown"),
    ):
        with pytest.raises(PackError) as caught:
            PathStatistics.from_arrays(damaged(change), "profile.safetensors", 3, 4, 2)
        assert str(caught.value) == f"profile.safetensors: tensor {fault}; profile the model again"


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


def test_statistics_of_another_model_are_refused() -> None:
    for shape in [(4, 4, 2), (3, 5, 2), (3, 4, 1), (3, 4, 3)]:
        with (
            named_case(shape),
            pytest.raises(PackError, match=r"^profile: tensor '\w+'[:,] .*; profile the model again$"),
        ):
            PathStatistics.from_arrays(damaged(lambda arrays: None), "profile", *shape)
