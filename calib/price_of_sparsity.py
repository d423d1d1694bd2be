"""What leaving out more neurons would cost a finished pack: measured on it, in memory, nothing of it rewritten.

Thresholds for each sparsity are found as `measure_thresholds` finds them; then another text goes through the pack with
them, and through the pack of which all neurons run, whose predictions they are judged by.
"""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.calib.estimate import Estimate, block_sums, exponential, mean
from moe_pack.calib.expert_error import SPARSITIES
from moe_pack.calib.held import HeldWeights
from moe_pack.calib.model_pass import ModelPass
from moe_pack.calib.outcomes import whole_divergence
from moe_pack.calib.reference import next_log_probs
from moe_pack.calib.store import ProfileStore
from moe_pack.calib.text import Tokens
from moe_pack.calib.thresholds import ThresholdRule, find_thresholds
from moe_pack.formats import Pack, Progress, canonical
from moe_pack.runtime import TORCH, Operations, StreamedPackWeights


@dataclass(frozen=True, slots=True)
class SparsityPrice:
    """What a pack loses at a sparsity against itself with all neurons running: KL in nats, perplexity relative.

    `realized`: the share of neurons that did not run on the text judged on; None if no token reached an expert.
    """

    sparsity: float
    realized: float | None
    kl: Estimate
    perplexity_increase: Estimate


def sparsity_prices(
    pack: Pack,
    tokens: Tokens,
    calibration: Tokens,
    progress: Progress,
    folder: Path,
    device: torch.device | None = None,
    operations: Operations = TORCH,
) -> tuple[SparsityPrice, ...]:
    """The price of each of `SPARSITIES`. Resumable by layer.

    Args:    tokens: to judge on.   calibration: to find thresholds on.   folder: to work in; the caller removes it.
    Raises:  ConversionError if the folder is in use or cannot be written; PackError if the pack is damaged.
    """
    where = device or torch.device("cpu")
    every = [np.zeros(pack.thresholds.shape, np.float32)]
    for sparsity in SPARSITIES:
        work = folder / f"thresholds-{sparsity:g}"
        every.append(find_thresholds(pack, calibration, ThresholdRule(sparsity), progress, work, where, operations))
    facts = {"root": pack.manifest.root, "calibration": calibration.sha256, "text": tokens.sha256}
    store = ProfileStore(folder / "passes", sha256(canonical(facts)).hexdigest(), starts_anew=True)
    try:
        passes = []
        for sparsity, thresholds in zip((0.0, *SPARSITIES), every, strict=True):
            weights = HeldWeights(_Rethresholded(pack, thresholds, where, operations))
            passes.append(ModelPass(weights, tokens, store, f"at-{sparsity:g}", where))
            passes[-1].run(f"predictions at {sparsity:.0%} sparsity", progress)
        return _judged(passes, tokens, progress)
    finally:
        store.close()


class _Rethresholded(StreamedPackWeights):
    """A pack's weights with other thresholds, float32 [L, E]."""

    def __init__(
        self, pack: Pack, thresholds: NDArray[np.float32], device: torch.device, operations: Operations
    ) -> None:
        super().__init__(pack, device, operations)
        self._thresholds = thresholds

    def threshold(self, layer_idx: int, expert: int) -> float:
        """The expert's threshold on `abs(a)`."""
        return float(self._thresholds[layer_idx, expert])


@torch.inference_mode()
def _judged(passes: list[ModelPass], tokens: Tokens, progress: Progress) -> tuple[SparsityPrice, ...]:
    """The prices, once all layers are done; the first pass is the one that all others are judged by."""
    first, others = passes[0], passes[1:]
    cost = first.prediction_cost() * len(passes)
    progress.begin(cost.stage("predictions"))
    found: list[list[Tensor]] = [[] for _ in others]  # float64 [2, n]: KL, and likelihood lost
    for number, sequence in enumerate(first.predicted):
        for rows in first.pieces():
            expected = first.predictions(number, rows)
            likely = next_log_probs(expected, sequence, rows)
            for held, other in zip(found, others, strict=True):
                log_probs = other.predictions(number, rows)
                lost = likely - next_log_probs(log_probs, sequence, rows)
                held.append(torch.stack([whole_divergence(expected, log_probs), lost.double()]))
        progress.advance(cost.multiplications // len(tokens.sequences), f"sequence {number}")
    progress.end()
    return tuple(
        SparsityPrice(sparsity, other.sparsity().overall, *estimates(torch.cat(held, dim=1)))
        for sparsity, other, held in zip(SPARSITIES, others, found, strict=True)
    )


def estimates(losses: Tensor) -> tuple[Estimate, Estimate]:
    """KL, and how much perplexity grows, from nats float64 [2, n]: each token's KL and the likelihood it loses."""
    kl, lost = (block_sums(row) for row in losses.cpu().numpy())
    number = block_sums(np.ones(losses.shape[1])).astype(np.int64)
    return mean(kl, number), exponential(mean(lost, number), less=1.0)
