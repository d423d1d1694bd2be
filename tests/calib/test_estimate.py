"""Means with half-widths, against figures worked by hand, tables, and how often the interval holds the truth."""

import math

import numpy as np
import pytest
from support.cases import case

from moe_pack.calib.evaluate.reference import BLOCK_TOKENS, block_sums, exponential, mean, student_t
from moe_pack.runtime.quality import Estimate


def test_students_t_is_that_of_the_tables() -> None:
    for degrees, value in [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (1000, 1.962)]:
        with case(degrees, value):
            assert student_t(degrees) == pytest.approx(value, rel=0.002)


def test_blocks_are_of_128_tokens_and_the_last_of_the_rest() -> None:
    sums = block_sums(np.ones(2 * BLOCK_TOKENS + 5))
    assert sums.tolist() == [128, 128, 5]


def test_a_mean_of_equal_blocks_has_the_half_width_of_their_standard_error() -> None:
    sums, number = np.array([1.0, 2.0, 6.0]), np.array([2, 2, 2])
    found = mean(sums, number)
    # block means 0.5, 1, 3: mean 1.5, deviation sqrt((1 + 0.25 + 2.25) / 2), over sqrt(3); t of 2 is 4.3027
    assert found.value == pytest.approx(1.5)
    assert found.half_width == pytest.approx(4.30265 * math.sqrt(1.75 / 3), rel=1e-4)


def test_a_single_block_has_no_half_width() -> None:
    assert mean(np.array([3.0]), np.array([2])) == Estimate(1.5, None)


def test_the_interval_holds_the_truth_nineteen_times_of_twenty() -> None:
    rng = np.random.default_rng(0)
    number = np.array([128] * 9 + [40])
    held = 0
    for _ in range(2000):
        sums = rng.normal(0.3 * number, 5 * np.sqrt(number))
        found = mean(sums, number)
        assert found.half_width is not None
        held += abs(found.value - 0.3) <= found.half_width
    assert 0.93 < held / 2000 < 0.97


def test_the_interval_of_an_exponential_is_its_upper_half() -> None:
    found = exponential(Estimate(0.02, 0.01), less=1.0)
    assert found.value == pytest.approx(math.exp(0.02) - 1)
    assert found.upper == pytest.approx(math.exp(0.03) - 1)


def test_a_perplexity_beyond_all_numbers_is_a_number() -> None:
    found = exponential(Estimate(1e6, 10.0))
    assert math.isfinite(found.value) and found.half_width == 0
