"""A tier whose figures can be worked out by hand: fixed rates, and experts that take turns in proportion to room."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_pack.calib.profile import Losses
from moe_pack.convert.plan.speed import MemoryTier, SpeedEstimate, TokenSeconds
from moe_pack.formats import DISK_BLOCK_BYTES, ExpertLayout, PackLayout, RunError
from moe_pack.runtime import DiskFacts
from moe_pack.runtime.engine.machine import ReadRate, SizedRate
from moe_pack.runtime.offload.budgets import MemoryPart

RUN_RATE, FETCH_RATE, DENSE_RATE = 1e9, 1e8, 1e9  # bytes a second
FIXED_S = 1e-5


def steady_disk(rate: float) -> DiskFacts:
    """Returns a disk that reads at this rate, bytes a second, whatever the size of a read."""
    point = SizedRate(DISK_BLOCK_BYTES, rate)
    # A read of less than a block takes as long as a whole block; above that the rate is constant.
    return DiskFacts(None, 0, "pread", 1, (point,), (point,), (ReadRate("pread", DISK_BLOCK_BYTES, 1, rate),))


@dataclass
class FixedTier(MemoryTier):
    """Seconds of a token: all dense bytes, the running bytes of each expert as often as it runs, and of those that are
    missing. Missing is the share of all experts' bytes that has no room, the same of every expert.
    """

    losses: Losses
    budget_bytes: int

    def estimate(
        self, layout: PackLayout, sparsity: NDArray[np.float64], less_bytes: int = 0, is_rough: bool = False
    ) -> SpeedEstimate:
        dense, budget = layout.dense_file.num_bytes, self.budget_bytes - less_bytes
        if budget < self.least_bytes(layout):
            raise RunError(f"{budget} bytes, the least is {self.least_bytes(layout)}")
        experts = np.array([[expert.num_bytes for expert in layer] for layer in layout.experts])
        held = min(1.0, (budget - dense) / int(experts.sum()))
        misses = self.losses.popularity * (1 - held)
        run, fetch = (
            np.array(
                [[of(e, s) for e, s in zip(*row, strict=True)] for row in zip(layout.experts, sparsity, strict=True)]
            )
            for of in (self.run_seconds, self.fetch_seconds)
        )
        seconds = FIXED_S + dense / DENSE_RATE + float((self.losses.popularity * run + misses * fetch).sum())
        fetched = float((misses * fetch).sum()) * FETCH_RATE
        shares = (MemoryPart("dense", dense), MemoryPart("experts", budget - dense))
        return SpeedEstimate("none", held, misses, fetched, dense, TokenSeconds(seconds, 0, 0, 0), shares)

    def least_bytes(self, layout: PackLayout) -> int:
        return layout.dense_file.num_bytes + max(e.num_bytes for layer in layout.experts for e in layer)

    def run_seconds(self, expert: ExpertLayout, sparsity: float) -> float:
        return _running_bytes(expert, sparsity) / RUN_RATE

    def fetch_seconds(self, expert: ExpertLayout, sparsity: float) -> float:
        return _running_bytes(expert, sparsity) / FETCH_RATE

    def dense_seconds(self, num_bytes: int, width: int) -> float:
        return num_bytes / DENSE_RATE


def _running_bytes(expert: ExpertLayout, sparsity: float) -> float:
    if expert.selector is None:
        return expert.num_bytes
    return expert.selector_bytes + (1 - sparsity) * expert.records_bytes
