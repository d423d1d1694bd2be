"""Magnitudes counted in bins of 0.1%: quantiles of more values than memory holds, whatever order they come in.

A bin is all float32 numbers that share sign-less exponent and the first `_MANTISSA_BITS` bits of the mantissa. Counts
add, so that batches of any size give the same histogram, and a quantile is known to one part in 1,024.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MANTISSA_BITS = 10
_SHIFT = 23 - _MANTISSA_BITS
NUM_BINS = 1 << (31 - _SHIFT)
_INFINITY = 0x7F800000 >> _SHIFT  # this bin and those after it hold what is no number
RESOLUTION = 2.0**-_MANTISSA_BITS  # relative


class Histogram:
    """Counts of magnitudes by bin, int64 [NUM_BINS]."""

    def __init__(self, counts: Tensor | None = None) -> None:
        self.counts = torch.zeros(NUM_BINS, dtype=torch.int64) if counts is None else counts

    def add(self, magnitudes: Tensor) -> None:
        """Counts float32 values from 0 up, of any shape; their memory is overwritten."""
        bins = magnitudes.view(torch.int32).bitwise_right_shift_(_SHIFT)
        found = torch.bincount(bins.flatten())
        self.counts[: len(found)] += found.to(self.counts.device)

    def total(self) -> int:
        """How many values were counted."""
        return int(self.counts.sum())

    def all_finite(self) -> bool:
        """Whether all of them were numbers."""
        return int(self.counts[_INFINITY:].sum()) == 0

    def quantiles(self, levels: Sequence[float]) -> NDArray[np.float32]:
        """The least magnitude that at least this share of the values do not exceed, float32 [levels].

        Between the ends of a bin it is interpolated by rank; 0 where nothing was counted.
        Source: FloE Eq. 6.
        """
        by_exponent = self.counts.numpy().reshape(-1, 1 << _MANTISSA_BITS)
        used = np.flatnonzero(by_exponent.sum(axis=1))  # some twenty of 256: the bins of others are not gone through
        if not len(used):
            return np.zeros(len(levels), np.float32)
        counts = by_exponent[used[0] : used[-1] + 1].reshape(-1)
        below = np.cumsum(counts)
        ranks = np.maximum(np.ceil(np.asarray(levels, np.float64) * int(below[-1]) - 1e-9), 1)  # of rising values
        among = np.searchsorted(below, ranks)
        bins = among + (used[0] << _MANTISSA_BITS)
        place = (ranks - (below[among] - counts[among]) - 0.5) / counts[among]  # within the bin, 0 to 1
        low = (bins << _SHIFT).astype(np.uint32).view(np.float32)
        ends = np.minimum(bins + 1, _INFINITY - 1) << _SHIFT  # of finite bins: a step is no number beyond the last
        high = np.where(bins < _INFINITY - 1, ends.astype(np.uint32).view(np.float32), low)
        found = low + (high - low) * np.where(high > low, place, 0.0) if self.all_finite() else low
        return np.where(bins == 0, 0.0, found).astype(np.float32)  # the first bin is zero and what is next to it
