"""Histograms against sorting: quantiles of every kind of numbers, sums of pieces, and what is no number."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.cases import case

from moe_pack.calib.forward import NUM_BINS, Histogram

RESOLUTION = 1 / 1024  # of a histogram, relative
LEVELS = (0.0, 0.01, 0.07, 0.29, 0.5, 0.57, 0.8, 0.9, 0.99, 0.995, 0.999, 1.0)
DENORMAL_STEP = 2.0**-136  # below 2^-126 floats, and so bins, are evenly spaced
Floats = NDArray[np.float32]


def histogram(values: Floats) -> Histogram:
    found = Histogram()
    found.add(torch.from_numpy(values.copy()))
    return found


def drawn(number: int, sigma: float, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).lognormal(0, sigma, number).astype(np.float32)


def exact(values: Floats, level: float) -> float:
    """The ceil(level n)-th smallest, level taken as the decimal it is written as."""
    return float(np.sort(values, axis=None)[max(math.ceil(Fraction(str(level)) * values.size), 1) - 1])


CASES = {
    "one value": np.float32([0.7]), "two values": np.float32([3.0, 1e-3]), "a hundred values": drawn(100, 1.0),
    "numbers close together": drawn(999, 1e-4), "numbers of all sizes": drawn(1000, 25.0),
    "a constant": np.full(37, 1.2345, np.float32), "powers of two": 2.0 ** np.arange(-140, 128, dtype=np.float32),
    "zeros": np.zeros(10, np.float32), "half zeros": np.concatenate([np.zeros(500, np.float32), drawn(500, 1.0)]),
    "denormals": (np.arange(300) * 2.0**-139).astype(np.float32), "the smallest of all": np.float32([2.0**-149]),
    "huge": np.linspace(1e38, 3.39e38, 50).astype(np.float32),
    "the largest of all": np.full(3, np.finfo(np.float32).max),
}  # fmt: skip


def test_quantiles_are_those_of_sorted_values_to_one_part_in_1024() -> None:
    for values in CASES.values():
        with case(values):
            found = histogram(values).quantiles(LEVELS)
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, [exact(values, level) for level in LEVELS], RESOLUTION, DENORMAL_STEP)


def test_quantiles_of_four_values_by_hand() -> None:
    levels = (0.0, 0.25, 0.26, 0.5, 0.51, 0.75, 0.76, 1.0)
    found = histogram(np.float32([3, 1, 4, 2])).quantiles(levels)
    np.testing.assert_allclose(found, [1, 1, 2, 2, 3, 3, 4, 4], RESOLUTION)


def test_within_a_bin_quantiles_rise_by_rank() -> None:
    found = histogram(np.full(4, 1.0, np.float32)).quantiles((0.25, 0.5, 0.75, 1.0))
    assert found.tolist() == [1 + RESOLUTION * part for part in (0.125, 0.375, 0.625, 0.875)]


def test_numbers_one_part_in_1024_apart_are_told_apart() -> None:
    counts = histogram(np.float32([1.0, 1.0 + RESOLUTION])).counts
    assert counts[counts > 0].tolist() == [1, 1]


def test_a_histogram_of_nothing_has_quantiles_of_zero() -> None:
    found = histogram(np.empty((0, 4), np.float32))
    assert found.total() == 0 and found.all_finite()
    assert found.quantiles((0.0, 0.5, 1.0)).tolist() == [0, 0, 0]


def test_adding_in_pieces_of_any_shape_is_adding_at_once() -> None:
    for sizes in [(1000,), (1, 999), (400, 0, 600), (125,) * 8]:
        with case(sizes):
            values = drawn(1000, 3.0)
            found = Histogram()
            for piece in np.split(values, np.cumsum(sizes)[:-1]):
                found.add(torch.from_numpy(piece.copy()).view(-1, 5 if len(piece) % 5 == 0 else 1))
            assert torch.equal(found.counts, histogram(values).counts)
            assert found.total() == 1000


def test_counts_of_two_histograms_add_to_that_of_both() -> None:
    one, other = drawn(300, 1.0, seed=1), drawn(200, 2.0, seed=2)
    both = Histogram(histogram(one).counts + histogram(other).counts)
    np.testing.assert_array_equal(both.quantiles(LEVELS), histogram(np.concatenate([one, other])).quantiles(LEVELS))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_no_number_is_counted_and_seen(value: float) -> None:
    found = histogram(np.float32([1.0, value, 2.0]))
    assert found.total() == 3
    assert not found.all_finite()
    assert found.quantiles((0.3,)) == pytest.approx([1.0], rel=RESOLUTION)
    assert not np.isfinite(found.quantiles((1.0,)))


def test_nan_of_either_sign_is_seen() -> None:
    magnitudes = torch.tensor([math.nan, -math.nan]).abs()
    found = Histogram()
    found.add(magnitudes)
    assert found.total() == 2 and not found.all_finite()


def test_the_largest_number_is_finite() -> None:
    assert histogram(np.float32([np.finfo(np.float32).max, 0.0])).all_finite()
    assert len(Histogram().counts) == NUM_BINS
