"""The time of one expert on this CPU by the number of its tokens, which Fiddler takes for linear (§3.2, appendix B)."""

import time
from collections.abc import Sequence
from contextlib import closing
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from moe_pack.convert.synthetic import WeightDistribution, random_rows, random_stream
from moe_pack.formats import ExpertFormat, ExpertSpec, PartFormat
from moe_pack.formats.pack.layouts import expert_layout
from moe_pack.runtime.cpu import ExpertRows, Kernels, extent_rows

HIDDEN_SIZE, INTERMEDIATE_SIZE = 4096, 14336  # Mixtral 8x7B
_COPIES_BYTES = 1 << 29  # more than any cache holds


def _copies(part: PartFormat) -> list[ExpertRows]:
    """Returns a random expert more than once, in memory of its own, so that no cache keeps it for the next turn."""
    spec = ExpertSpec("silu", INTERMEDIATE_SIZE, ("gate", "up", "down"), (), 0)
    layout = expert_layout(ExpertFormat(part, part, part), "up", spec, HIDDEN_SIZE)
    spreads = dict.fromkeys(("gate", "up", "down"), WeightDistribution(0.0, 0.02))
    stream = random_stream(0)
    sections = [
        random_rows(rows, INTERMEDIATE_SIZE, spreads, stream) for rows in (layout.selector, layout.records) if rows
    ]
    extent: NDArray[np.uint8] = np.concatenate([section.reshape(-1) for section in sections])
    number = max(2, -(-_COPIES_BYTES // extent.nbytes))
    return [extent_rows(layout, "up", "silu", 0.0, extent.copy()) for _ in range(number)]


def batch_times(part: PartFormat, batches: Sequence[int], rounds: int, threads: int) -> dict[int, float]:
    """Returns the median seconds of one expert by its number of tokens; all numbers are timed in turn.

    Args:    part: how all three matrices are stored.   rounds: of each number, after one that is not counted.
    """
    copies, turn = _copies(part), 0
    x = torch.randn(max(batches), HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    seconds: dict[int, list[float]] = {number: [] for number in batches}
    with closing(Kernels(threads)) as kernels:
        for _ in range(rounds + 1):
            for number, taken in seconds.items():
                turn += 1
                work = (copies[turn % len(copies)], np.arange(number), np.ones(number, np.float32))
                started = time.perf_counter()
                kernels.experts(x[:number], [work])
                taken.append(time.perf_counter() - started)
    return {number: median(taken[1:]) for number, taken in seconds.items()}
