"""Checks that a profile's predicted KL divergences add up: random plans of the same bytes, predicted and measured.

The model is profiled on the shipped sample. Then every matrix of every expert gets a width at random (group 64, hqq),
under the constraint that the widths' sum is fixed: mean 2.5 of 2, 3 and 4 bits, mean 3 and mean 4 of 2, 3, 4 and 8.
Measured is the mean KL divergence in nats of such a model's predictions from the original's on a text the profile has
not seen; predicted is the sum over all matrices of the profile's error at that width times what an error costs in that
layer. Every matrix is quantized once at every width, not for each plan anew; that this is what conversion makes is
checked on one plan's pack. Ends with exit code 1 if Spearman's correlation is below 0.8, or the slope of measured on
predicted is outside 0.7 to 1.4, at any sum and level, or if the pack's KL is another.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from judge import Judge
from memory_weights import MemoryWeights
from numpy.typing import NDArray
from thresholds_hold import Silent
from tqdm import tqdm

from moe_pack.calib import Profile, ProfileOptions, Sensitivity, Tokens, make_profile, read_tokens
from moe_pack.convert import convert
from moe_pack.formats import MATRICES, Checkpoint, ExpertFormat, ModelSpec, Pack, Plan, part_format, uniform_dense
from moe_pack.runtime import CheckpointWeights, Decoder, FolderFiles, PackWeights, Text

_TESTS = Path(__file__).parents[1] / "tests"
_GROUP = 64
_SEQUENCE_LENGTH = 512
_WIDTHS = (2, 3, 4, 8)  # as a profile has them, in this order
_SUMS: tuple[tuple[float, tuple[int, ...]], ...] = ((2.5, (2, 3, 4)), (3.0, _WIDTHS), (4.0, _WIDTHS))
_LEVELS: dict[str, tuple[Sensitivity, ...]] = {"fast": ("fast",), "full": ("full",), "both": ("fast", "full")}
_LEAST_SPEARMAN, _LEAST_SLOPE, _MOST_SLOPE = 0.8, 0.7, 1.4
_PACK_TOLERANCE = 1e-3  # relative: weights are the same bit for bit, sums may come in another order

Widths = NDArray[np.integer[Any]]  # [L, E, 3]: gate, up and down of every expert


@dataclass(frozen=True, slots=True)
class Agreement:
    """How prediction and measurement agree over the plans of one sum; `ratio` is of means, measured to predicted."""

    level: Sensitivity
    mean_width: float
    mean_predicted: float
    mean_measured: float
    spearman: float
    slope: float
    ratio: float

    def fault(self) -> str | None:
        """What is wrong, or None."""
        place = f"{self.level}, mean width {self.mean_width}"
        if not self.spearman >= _LEAST_SPEARMAN:
            return f"{place}: Spearman {self.spearman:.3f}, at least {_LEAST_SPEARMAN} expected"
        if not _LEAST_SLOPE <= self.slope <= _MOST_SLOPE:
            return f"{place}: slope {self.slope:.3f}, expected {_LEAST_SLOPE} to {_MOST_SLOPE}"
        return None


def random_widths(
    shape: tuple[int, ...], choices: tuple[int, ...], total: int, generator: np.random.Generator
) -> Widths:
    """Widths that add up to `total`: any at first, then moves at random towards it, now and then away from it."""
    widths = generator.choice(choices, shape)
    held, excess = widths.reshape(-1), int(widths.sum()) - total
    while excess:
        place, width = int(generator.integers(held.size)), int(generator.choice(choices))
        moved = excess + width - int(held[place])
        if abs(moved) < abs(excess) or generator.random() < 0.02:  # away, lest no move is left
            held[place], excess = width, moved
    return widths


def plan_of(widths: Widths, spec: ModelSpec) -> Plan:
    """The plan that converts to these widths."""
    parts = {width: part_format(width, _GROUP) for width in _WIDTHS}
    experts = tuple(tuple(ExpertFormat(*(parts[w] for w in expert)) for expert in layer) for layer in widths.tolist())
    return Plan("none", "hqq", experts, uniform_dense(spec, None))


def pack_kl(checkpoint: Checkpoint, widths: Widths, judge: Judge, folder: Path) -> float:
    """The KL divergence of a real pack of these widths."""
    num_threads = torch.get_num_threads()
    convert(checkpoint, plan_of(widths, checkpoint.spec), folder, num_threads)
    torch.set_num_threads(num_threads)  # converting leaves torch with one thread
    with Pack(folder) as pack:
        return judge.kl(Decoder(PackWeights(pack, torch.device("cpu")), _SEQUENCE_LENGTH))


def predictor(profile: Profile) -> Callable[[Widths], float]:
    """What a profile predicts for widths [L, E, 3]."""
    errors = np.stack([profile.errors(layer).quantized for layer in profile.spec.moe_layers])  # [L, E, 3, widths]
    costs = errors.astype(np.float64) * profile.effects().quantized[:, None]

    def predict(widths: Widths) -> float:
        chosen = np.searchsorted(_WIDTHS, widths)[..., None]
        return float(np.take_along_axis(costs, chosen, axis=3).sum())

    return predict


def agreement(level: Sensitivity, mean_width: float, predicted: list[float], measured: list[float]) -> Agreement:
    """Compares the plans of one sum."""
    first, second = (np.argsort(np.argsort(values)) for values in (predicted, measured))  # ranks; no two are equal
    return Agreement(
        level=level,
        mean_width=mean_width,
        mean_predicted=float(np.mean(predicted)),
        mean_measured=float(np.mean(measured)),
        spearman=float(np.corrcoef(first, second)[0, 1]),
        slope=float(np.polyfit(predicted, measured, 1)[0]),
        ratio=float(np.mean(measured) / np.mean(predicted)),
    )


def random_plans(spec: ModelSpec, number: int, seed: int) -> dict[float, list[Widths]]:
    """Plans by their mean width."""
    assert tuple(spec.expert.matrices) == MATRICES, "experts have three matrices"
    shape = (len(spec.moe_layers), spec.router.num_experts, len(MATRICES))
    generator = np.random.default_rng(seed)
    return {
        mean: [random_widths(shape, choices, round(mean * int(np.prod(shape))), generator) for _ in range(number)]
        for mean, choices in _SUMS
    }


def measure_plans(
    checkpoint: Checkpoint, plans: dict[float, list[Widths]], unseen: Tokens, folder: Path
) -> tuple[dict[float, list[float]], float]:
    """The KL divergences of plans; that of the first one's pack, made in `folder`."""
    judge = Judge(Decoder(CheckpointWeights(checkpoint), _SEQUENCE_LENGTH), unseen)
    weights = MemoryWeights(checkpoint)
    decoder = Decoder(weights, _SEQUENCE_LENGTH)
    measured: dict[float, list[float]] = {mean: [] for mean in plans}
    ordered = [(mean, widths) for mean, held in plans.items() for widths in held]
    for mean, widths in tqdm(ordered, desc="plans", disable=None):
        weights.round_to(plan_of(widths, checkpoint.spec))
        measured[mean].append(judge.kl(decoder))
    return measured, pack_kl(checkpoint, ordered[0][1], judge, folder)


def _table(found: list[Agreement]) -> str:
    rows = ["level  mean width   predicted   measured   Spearman    slope   ratio"]
    rows += [
        f"{a.level:5}{a.mean_width:12.1f}{a.mean_predicted:12.5f}{a.mean_measured:11.5f}"
        f"{a.spearman:11.3f}{a.slope:9.3f}{a.ratio:8.3f}"
        for a in found
    ]
    return "\n".join(rows)


@click.command(help=__doc__)
@click.option("--model", type=click.Path(path_type=Path, exists=True), default=_TESTS / "models" / "tiny-mixtral")
@click.option("--text", type=click.Path(path_type=Path, exists=True), default=_TESTS / "data" / "books-valid.txt")
@click.option("--level", type=click.Choice(list(_LEVELS)), default="both", show_default=True, help="Of the profile.")
@click.option("--tokens-profiled", default=16384, show_default=True, help="Of the sample, to profile on.")
@click.option("--tokens", default=8192, show_default=True, help="Of the text, to measure on.")
@click.option("--plans", default=40, show_default=True, type=click.IntRange(3), help="At each sum.")
@click.option("--seed", default=1, show_default=True, help="Another seed, other plans.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(
    model: Path, text: Path, level: str, tokens_profiled: int, tokens: int, plans: int, seed: int, as_json: bool
) -> None:
    """Profiles and measures in a temporary folder, prints, and judges."""
    tokenizer = Text(FolderFiles(model))
    sample = read_tokens(None, None, tokenizer, tokens_profiled, _SEQUENCE_LENGTH)
    unseen = read_tokens(str(text), None, tokenizer, tokens, _SEQUENCE_LENGTH)
    checkpoint, found = Checkpoint(model), []
    try:
        with tempfile.TemporaryDirectory(prefix="moe-pack-") as name:
            drawn = random_plans(checkpoint.spec, plans, seed)
            measured, packed = measure_plans(checkpoint, drawn, unseen, Path(name) / "pack")
            for each in _LEVELS[level]:
                profile = make_profile(checkpoint, sample, Path(name) / each, ProfileOptions(each), Silent())
                predict = predictor(profile)
                found += [agreement(each, mean, list(map(predict, drawn[mean])), measured[mean]) for mean in drawn]
    finally:
        checkpoint.close()
    faults = [fault for one in found if (fault := one.fault())]
    first = measured[_SUMS[0][0]][0]
    if not abs(packed - first) <= _PACK_TOLERANCE * first:
        faults.append(f"the first plan: its pack has KL {packed:.6f}, {first:.6f} measured")
    if as_json:
        facts = {"tokens_profiled": sample.sequences.size, "tokens": unseen.sequences.size, "plans": plans}
        kls = {str(mean): values for mean, values in measured.items()}
        agreements = [asdict(one) for one in found]
        click.echo(json.dumps(facts | {"found": agreements, "measured": kls, "pack": packed, "faults": faults}))
    else:
        click.echo(f"{plans} plans at each mean width, measured on {unseen.sequences.size:,} tokens of {text.name}")
        click.echo(_table(found))
        click.echo(f"the first plan: KL {first:.6f}, of its pack {packed:.6f}")
    for fault in faults:
        click.echo(fault, err=True)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
