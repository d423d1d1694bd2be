"""How well a profile's losses predict the KL divergence of random plans.

    python tests/bench/sensitivity.py [--model MODEL]

The model is profiled on the shipped sample. Then every matrix of every expert gets 2, 3 or 4 bits at random (hqq,
groups of 64), under the constraint that the mean is 2.5, and then 3. Measured is the mean KL divergence in nats of
such a model's predictions from the original's on another text; predicted is the sum of the profile's losses. Exits with
1 if Spearman's correlation is below 0.8, or the ratio of means outside 0.6 to 1.5.
"""

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
import torch
from benchlib import finish, json_option, model_options, sample_and_unseen, table
from benchlib.judging import Judge
from numpy.typing import NDArray
from tqdm import tqdm

from moe_pack.calib.profile import Losses, ProfileOptions, losses_of, make_profile
from moe_pack.calib.profile.options import Sensitivity
from moe_pack.calib.sensitivity.errors import Rounding
from moe_pack.calib.statistics.popularity import spearman
from moe_pack.formats import MATRICES, NO_PROGRESS, part_format
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.model import CheckpointWeights, NeuronBlock

_WIDTHS, _MEANS, _GROUP = (2, 3, 4), (2.5, 3.0), 64
_LEAST_SPEARMAN, _LEAST_RATIO, _MOST_RATIO = 0.8, 0.6, 1.5

Widths = NDArray[np.int64]  # [L, E, 3]: the bits of gate, up and down of every expert


@dataclass(frozen=True, slots=True)
class Agreement:
    """How prediction and measurement agree over the plans of one mean; `ratio` is measured over predicted."""

    mean_bits: float
    predicted: float
    measured: float
    spearman: float
    ratio: float

    def fault(self) -> str | None:
        """Returns what is wrong, or None."""
        if not self.spearman >= _LEAST_SPEARMAN:
            return f"{self.mean_bits} bits: Spearman {self.spearman:.3f}, at least {_LEAST_SPEARMAN} expected"
        if not _LEAST_RATIO <= self.ratio <= _MOST_RATIO:
            return f"{self.mean_bits} bits: ratio {self.ratio:.3f}, {_LEAST_RATIO} to {_MOST_RATIO} expected"
        return None


class RoundedModel:
    """The experts of a checkpoint, each matrix rounded once at each width; in bfloat16, as they take much memory."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        spec, weights, rounding = checkpoint.spec, CheckpointWeights(checkpoint), Rounding("hqq", _GROUP)
        self.shape = len(spec.moe_layers), spec.router.num_experts, len(MATRICES)
        self._rounded: dict[tuple[int, ...], torch.Tensor] = {}
        for l, e in tqdm(list(np.ndindex(self.shape[:2])), desc="rounding", disable=None):
            blocks = list(weights.expert(l, e).blocks())
            for m, name in enumerate(MATRICES):
                whole = torch.cat([getattr(block, name) for block in blocks])
                self._rounded |= {(l, e, m, width): rounding(whole, width).bfloat16() for width in _WIDTHS}

    def expert(self, widths: Widths, l: int, e: int) -> NeuronBlock:
        """Returns an expert whose matrices have these widths."""
        return NeuronBlock(*(self._rounded[l, e, m, int(widths[l, e, m])].float() for m in range(len(MATRICES))))


def random_widths(shape: tuple[int, ...], mean_bits: float, generator: np.random.Generator) -> Widths:
    """Returns widths of the mean: any at first, then moved at random towards it, now and then away from it."""
    widths = generator.choice(_WIDTHS, size=shape).reshape(-1)
    while (excess := float(widths.sum()) - mean_bits * widths.size) != 0:
        place, width = int(generator.integers(widths.size)), int(generator.choice(_WIDTHS))
        if abs(excess + width - widths[place]) < abs(excess) or generator.random() < 0.02:
            widths[place] = width
    return widths.reshape(shape)


def predicted(losses: Losses, widths: Widths) -> float:
    """Returns what a profile's losses predict."""
    places = {width: losses.formats.index(part_format(width, _GROUP)) for width in _WIDTHS}
    return sum(float(losses.quantized[*at, places[int(widths[at])]]) for at in np.ndindex(widths.shape))


@click.command(help=__doc__)
@model_options
@click.option("--sensitivity", type=click.Choice(["fast", "full"]), default="fast", show_default=True)
@click.option("--profiled", default=16384, show_default=True, help="Tokens of the sample, to profile on.")
@click.option("--tokens", default=8192, show_default=True, help="Of the text, to measure on.")
@click.option("--plans", default=20, show_default=True, type=click.IntRange(3), help="For each mean.")
@json_option
def main(
    model: Path, text: Path, profiled: int, tokens: int, sensitivity: Sensitivity, plans: int, as_json: bool
) -> None:
    """Profiles, measures, prints, and judges."""
    sample, unseen = sample_and_unseen(model, profiled, tokens, text)
    checkpoint, generator, found = Checkpoint(model), np.random.default_rng(1), []
    with tempfile.TemporaryDirectory(prefix="moe-pack-") as folder:
        options = ProfileOptions(sensitivity, keeps_inputs=False)
        losses = losses_of(make_profile(checkpoint, sample, Path(folder) / "profile", options, NO_PROGRESS))
    judge, rounded = Judge(checkpoint, unseen), RoundedModel(checkpoint)
    for mean_bits in _MEANS:
        drawn = [random_widths(rounded.shape, mean_bits, generator) for _ in range(plans)]
        kls = [
            float(judge.experts(lambda l, e, widths=widths: rounded.expert(widths, l, e)).mean())  # type: ignore[misc]  # bound early
            for widths in tqdm(drawn, desc=f"{mean_bits} bits", disable=None)
        ]
        estimates = [predicted(losses, widths) for widths in drawn]
        rank = spearman(np.asarray(estimates), np.asarray(kls))
        means = float(np.mean(estimates)), float(np.mean(kls))
        found.append(Agreement(mean_bits, *means, rank or 0.0, means[1] / means[0]))
    checkpoint.close()
    header = ("mean bits", "predicted", "measured", "Spearman", "measured / predicted")
    rows = [
        (f"{a.mean_bits}", *(f"{x:.5f}" for x in (a.predicted, a.measured)), f"{a.spearman:.3f}", f"{a.ratio:.3f}")
        for a in found
    ]
    faults = [fault for one in found if (fault := one.fault())]
    finish({"plans": plans, "found": [asdict(one) for one in found]}, table(header, rows), as_json, faults)


if __name__ == "__main__":
    main()
