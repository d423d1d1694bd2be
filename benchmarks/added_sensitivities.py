"""Checks that a profile's predicted KL divergences add up: random plans of the same bytes, predicted and measured.

The model is profiled on the shipped sample. Then every matrix of every expert gets a format at random (hqq), under the
constraint that the bits a weight takes are fixed on average: 2.5 of 2, 3 and 4, then 3 and 4 of 2, 3, 4 and 8, all in
groups of 64, their scales not counted; then 4.5 of 2, 3, 4 and 8 in groups of 16, 32, 64, 128 and a row with 8- or
16-bit scales, which are counted. Measured is the mean KL divergence in nats of such a model's predictions from the
original's on a text the profile has not seen; predicted is the sum over all matrices of the profile's losses. No matrix
is quantized twice in the same format; that this is what conversion makes is checked on one plan's pack. Measured beside
it is how much log-likelihood a nat of KL divergence costs on that text, and on the sample as the profile has it. Ends
with exit code 1 if Spearman's correlation is below 0.8, or the slope of measured on predicted is outside 0.7 to 1.4, at
any mean and level, or if the pack's KL is another.
"""

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
import torch
from judge import Judge
from memory_weights import MemoryWeights
from numpy.typing import NDArray
from tqdm import tqdm

from moe_pack.calib import (
    Losses,
    ProfileOptions,
    Sensitivity,
    Tokens,
    losses_of,
    make_profile,
    read_tokens,
)
from moe_pack.convert import convert
from moe_pack.formats import (
    MATRICES,
    ROW_GROUP,
    Checkpoint,
    ExpertFormat,
    ModelSpec,
    Pack,
    PartFormat,
    Plan,
    format_fault,
    part_format,
    uniform_dense,
)
from moe_pack.runtime import (
    CheckpointWeights,
    Decoder,
    FolderFiles,
    PackWeights,
    Text,
)

_TESTS = Path(__file__).parents[1] / "tests"
_SEQUENCE_LENGTH = 512
_WIDTHS = (2, 3, 4, 8)
_GROUPS = (16, 32, 64, 128)
_LEVELS: dict[str, tuple[Sensitivity, ...]] = {"fast": ("fast",), "full": ("full",), "both": ("fast", "full")}
_LEAST_SPEARMAN, _LEAST_SLOPE, _MOST_SLOPE = 0.8, 0.7, 1.4
_PACK_TOLERANCE = 1e-3  # relative: weights are the same bit for bit, sums may come in another order

Formats = NDArray[np.object_]  # PartFormat [L, E, 3]: of gate, up and down of every expert


@dataclass(frozen=True, slots=True)
class Draw:
    """What plans are drawn from: formats, the bits each takes a weight, their mean and how far off plans may be."""

    formats: tuple[PartFormat, ...]
    bits: tuple[float, ...]
    mean_bits: float
    scatter: float = 0.0

    @property
    def name(self) -> str:
        """As the table has it."""
        return f"{self.mean_bits}, {'any format' if self.scatter else 'group 64'}"


def draws(spec: ModelSpec) -> tuple[Draw, ...]:
    """Three of groups of 64, one of any format that the model's rows can hold."""
    d = spec.hidden_size
    every = [part_format(w, group, bits) for w in _WIDTHS for group in (*_GROUPS, ROW_GROUP) for bits in (16, 8)]
    held = tuple(p for p in every if format_fault(p, d) is None and (p.group, p.scale_bits) != (ROW_GROUP, 8))
    widths = [((2, 3, 4), 2.5), (_WIDTHS, 3.0), (_WIDTHS, 4.0)]
    return (
        *(Draw(tuple(part_format(w, 64) for w in of), tuple(map(float, of)), mean) for of, mean in widths),
        Draw(held, tuple(8 * part.part_bytes(d) / d for part in held), 4.5, scatter=0.01),
    )


@dataclass(frozen=True, slots=True)
class Agreement:
    """How prediction and measurement agree over the plans of one draw; `ratio` is of means, measured to predicted."""

    level: Sensitivity
    draw: str
    mean_predicted: float
    mean_measured: float
    spearman: float
    slope: float
    ratio: float

    def fault(self) -> str | None:
        """What is wrong, or None."""
        place = f"{self.level}, mean bits {self.draw}"
        if not self.spearman >= _LEAST_SPEARMAN:
            return f"{place}: Spearman {self.spearman:.3f}, at least {_LEAST_SPEARMAN} expected"
        if not _LEAST_SLOPE <= self.slope <= _MOST_SLOPE:
            return f"{place}: slope {self.slope:.3f}, expected {_LEAST_SLOPE} to {_MOST_SLOPE}"
        return None


def random_formats(shape: tuple[int, ...], draw: Draw, generator: np.random.Generator) -> Formats:
    """Formats of the mean drawn: any at first, then moves at random towards it, now and then away from it."""
    bits = np.asarray(draw.bits)
    held = generator.integers(len(bits), size=shape).reshape(-1)
    excess = float(bits[held].sum()) - draw.mean_bits * held.size
    while abs(excess) > draw.scatter * held.size:
        place, chosen = (int(generator.integers(number)) for number in (held.size, len(bits)))
        moved = excess + float(bits[chosen] - bits[held[place]])
        if abs(moved) < abs(excess) or generator.random() < 0.02:  # away, lest no move is left
            held[place], excess = chosen, moved
    parts = np.empty(len(bits), object)
    parts[:] = draw.formats
    return parts[held].reshape(shape)


def plan_of(formats: Formats, spec: ModelSpec) -> Plan:
    """The plan that converts to these formats."""
    experts = tuple(tuple(ExpertFormat(*expert) for expert in layer) for layer in formats)
    return Plan("none", "hqq", experts, uniform_dense(spec, None))


def pack_kl(checkpoint: Checkpoint, formats: Formats, judge: Judge, folder: Path) -> float:
    """The KL divergence of a real pack of these formats."""
    num_threads = torch.get_num_threads()
    convert(checkpoint, plan_of(formats, checkpoint.spec), folder, num_threads)
    torch.set_num_threads(num_threads)  # converting leaves torch with one thread
    with Pack(folder) as pack:
        return judge.kl(Decoder(PackWeights(pack, torch.device("cpu")), _SEQUENCE_LENGTH))


def predicted(losses: Losses, formats: Formats) -> float:
    """What a profile's losses predict for formats [L, E, 3]."""
    return sum(
        float(losses.quantized[*place, losses.formats.index(formats[place])]) for place in np.ndindex(formats.shape)
    )


def agreement(level: Sensitivity, draw: Draw, predicted: list[float], measured: list[float]) -> Agreement:
    """Compares the plans of one draw."""
    first, second = (np.argsort(np.argsort(values)) for values in (predicted, measured))  # ranks; no two are equal
    return Agreement(
        level=level,
        draw=draw.name,
        mean_predicted=float(np.mean(predicted)),
        mean_measured=float(np.mean(measured)),
        spearman=float(np.corrcoef(first, second)[0, 1]),
        slope=float(np.polyfit(predicted, measured, 1)[0]),
        ratio=float(np.mean(measured) / np.mean(predicted)),
    )


def random_plans(spec: ModelSpec, number: int, seed: int) -> dict[Draw, list[Formats]]:
    """Plans by what they were drawn from."""
    assert tuple(spec.expert.matrices) == MATRICES, "experts have three matrices"
    shape = (len(spec.moe_layers), spec.router.num_experts, len(MATRICES))
    generator = np.random.default_rng(seed)
    return {draw: [random_formats(shape, draw, generator) for _ in range(number)] for draw in draws(spec)}


@dataclass(frozen=True, slots=True)
class Measured:
    """KL divergences of plans; that of the last one's pack, and of itself; log-likelihood lost for a nat of all."""

    kls: dict[Draw, list[float]]
    last_kl: float
    pack_kl: float
    nll_per_kl: float


def measure_plans(checkpoint: Checkpoint, plans: dict[Draw, list[Formats]], unseen: Tokens, folder: Path) -> Measured:
    """Measures plans, and a pack, which is made in `folder`."""
    judge = Judge(Decoder(CheckpointWeights(checkpoint), _SEQUENCE_LENGTH), unseen)
    weights = MemoryWeights(checkpoint)
    decoder = Decoder(weights, _SEQUENCE_LENGTH)
    measured: dict[Draw, list[float]] = {draw: [] for draw in plans}
    ordered = [(draw, formats) for draw, held in plans.items() for formats in held]
    nll = 0.0
    for draw, formats in tqdm(ordered, desc="plans", disable=None):
        weights.round_to(plan_of(formats, checkpoint.spec))
        kl, lost = judge.losses(decoder)
        measured[draw].append(kl)
        nll += lost
    packed = pack_kl(checkpoint, ordered[-1][1], judge, folder)
    return Measured(measured, kl, packed, nll / sum(map(sum, measured.values())))


def _table(found: list[Agreement]) -> str:
    rows = ["level  mean bits         predicted   measured   Spearman    slope   ratio"]
    rows += [
        f"{a.level:5}  {a.draw:16}{a.mean_predicted:11.5f}{a.mean_measured:11.5f}"
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
    checkpoint, found, lost = Checkpoint(model), [], {}
    try:
        with tempfile.TemporaryDirectory(prefix="moe-pack-") as name:
            drawn = random_plans(checkpoint.spec, plans, seed)
            measured = measure_plans(checkpoint, drawn, unseen, Path(name) / "pack")
            for each in _LEVELS[level]:
                losses = losses_of(make_profile(checkpoint, sample, Path(name) / each, ProfileOptions(each)))
                lost[each] = losses.nll_per_kl
                for draw, held in drawn.items():
                    foretold = [predicted(losses, formats) for formats in held]
                    found.append(agreement(each, draw, foretold, measured.kls[draw]))
    finally:
        checkpoint.close()
    faults = [fault for one in found if (fault := one.fault())]
    if not abs(measured.pack_kl - measured.last_kl) <= _PACK_TOLERANCE * measured.last_kl:
        faults.append(f"the last plan: its pack has KL {measured.pack_kl:.6f}, {measured.last_kl:.6f} measured")
    if as_json:
        facts = {"tokens_profiled": sample.sequences.size, "tokens": unseen.sequences.size, "plans": plans}
        kls = {draw.name: values for draw, values in measured.kls.items()}
        agreements = [asdict(one) for one in found]
        nll = {"measured": measured.nll_per_kl} | lost
        packed = {"pack": measured.pack_kl, "nll_per_kl": nll, "faults": faults}
        click.echo(json.dumps(facts | {"found": agreements, "measured": kls} | packed))
    else:
        click.echo(f"{plans} plans at each mean, measured on {unseen.sequences.size:,} tokens of {text.name}")
        click.echo(_table(found))
        click.echo(f"the last plan: KL {measured.last_kl:.6f}, of its pack {measured.pack_kl:.6f}")
        told = ", ".join(f"{each} {value:.3f}" for each, value in lost.items())
        click.echo(f"log-likelihood lost for a nat: {measured.nll_per_kl:.3f}, by the profile {told}")
    for fault in faults:
        click.echo(fault, err=True)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
