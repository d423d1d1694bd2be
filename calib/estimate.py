"""Means over tokens with their 95% half-widths, from sums over blocks of consecutive tokens.

Neighbouring tokens err together, blocks of 128 hardly: so the scatter of blocks, not that of tokens, tells how far a
mean over another stretch of such text may be off.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 128
_NORMAL = 1.959963984540054  # the 97.5% quantile of the normal distribution
_MOST_LOG = 700.0  # of what exp() takes: a perplexity beyond is as good as infinite, which JSON has no number for


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and half the width of its 95% confidence interval; None where there are less than two blocks."""

    value: float
    half_width: float | None

    @property
    def upper(self) -> float | None:
        """The upper end of the interval."""
        return None if self.half_width is None else self.value + self.half_width


def block_sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums over blocks of `BLOCK_TOKENS` consecutive tokens, the last one perhaps shorter, of values float64 [T]."""
    return np.add.reduceat(values, np.arange(0, len(values), BLOCK_TOKENS))


def mean(sums: NDArray[np.float64], num_tokens: NDArray[np.int64]) -> Estimate:
    """The mean over tokens from sums over B blocks: a ratio of two sums, its half-width by Student's t.

    Meaning: m = sum s / sum n;  variance B / (B - 1) * sum (s - m n)^2 / (sum n)^2;  t of B - 1 degrees of freedom.
    """
    number, total = len(sums), int(num_tokens.sum())
    m = float(sums.sum()) / total
    if number < 2:
        return Estimate(m, None)
    variance = number / (number - 1) * float(np.square(sums - m * num_tokens).sum()) / total**2
    return Estimate(m, student_t(number - 1) * math.sqrt(variance))


def exponential(estimate: Estimate, less: float = 0.0) -> Estimate:
    """exp of an estimate, minus `less`; the half-width is the interval's upper half, which is the longer one."""
    value = math.exp(min(estimate.value, _MOST_LOG))
    if estimate.half_width is None:
        return Estimate(value - less, None)
    upper = math.exp(min(estimate.value + estimate.half_width, _MOST_LOG))
    return Estimate(value - less, upper - value)


def share(num_true: int, number: int) -> Estimate:
    """The share of so many independent cases, with half the width of Wilson's interval, which is never nothing."""
    p, z2 = num_true / number, _NORMAL**2
    return Estimate(p, math.sqrt(z2 * p * (1 - p) / number + (z2 / (2 * number)) ** 2) / (1 + z2 / number))


def student_t(degrees: int) -> float:
    """The 97.5% quantile of Student's t, to 0.2%: exact for 1 and 2 degrees of freedom, else expanded in 1 / degrees.

    Source: Abramowitz and Stegun 26.7.5.
    """
    if degrees < 3:
        return {1: math.tan(0.475 * math.pi), 2: 0.95 * math.sqrt(2 / (1 - 0.95**2))}[degrees]
    z = _NORMAL
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / float(degrees) ** power for power, term in enumerate(terms))
