"""Quality by size: KL divergence from the source over stored bits an expert weight, 1.75 to 4.5, of all who store.

Ours: the planner's plan at every quarter of a bit; and all experts in one format, of the formats that a profile
foretells to lose less than every smaller one. Beside them HQQ in groups of 64 throughout at 2, 3 and 4 bits, and a
random half of the experts at each of two widths; EdgeMoE's plans at the same bytes, as published (absmax, one scale a
row) and its widths in HQQ; Mixture-Compressor's PMQ (`pmq.py`: four variants) at every quarter of a bit; and, with
--llama-python, those of llama.cpp's types that the model's rows can hold, with an importance matrix. Each of these
stands beside our plan within its bytes.

Bits a weight are all bytes of experts: codes, scales, CRCs, padding. Selector `none`, sparsity 0, the dense part as it
is. All are calibrated on the shipped sample and judged on another text by the mean KL divergence in nats; a difference
counts when its 95% interval, of a paired bootstrap over blocks of 128 tokens, excludes 0. Ends with exit code 1 if our
plan is not lower than another of at least 1.75 bits.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from comparators import PMQ_WIDTHS, WIDE_WIDTHS, edgemoe_plans, pmq_plans, sizes, stored_bytes, uniform_plans
from contest import SEQUENCE_LENGTH, Contest, Line, compare_llama
from judge import BLOCK_TOKENS
from llama_experts import LlamaPython, llama_types
from planned import QUANTIZER, foretold, ours, single
from pmq import measure_factors
from quality_picture import draw
from tqdm import tqdm

from moe_pack.calib import Profile, ProfileOptions, Sensitivity, Tokens, make_profile, read_tokens
from moe_pack.formats import Checkpoint, ModelSpec, Plan, PlanError, format_text
from moe_pack.runtime import FolderFiles, Text

PARTS = ("plans", "formats", "hqq", "edgemoe", "pmq", "llama")
LOW, HIGH = 1.75, 4.5  # bits a weight
_STEP = 0.25
_BEYOND = 0.25  # of single formats: how far outside these bounds they still are shown
_TESTS = Path(__file__).parents[1] / "tests"


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement of a series of the picture; `line` compares it with our plan, unless it is ours."""

    series: str
    name: str
    num_bytes: int
    bits: float
    kl: float
    line: Line | None = None

    def facts(self) -> dict[str, Any]:
        """All of it, for JSON."""
        held = {"series": self.series, "name": self.name, "bytes": self.num_bytes, "bits": self.bits, "kl": self.kl}
        return held | (self.line.facts() if self.line else {})

    def row(self) -> str:
        """The line of the table."""
        held = f"{self.bits:6.3f}  {self.series:22}{self.name:28}{self.num_bytes:12,}{self.kl:11.6f}"
        return held + (f"  {self.line.compared()}" if self.line else "")

    def fault(self) -> str | None:
        """What is not as it should be, or None."""
        if self.line is None or self.bits < LOW or self.line.verdict() == "lower":
            return None
        return f"{self.series}, {self.name}, {self.bits:.3f} bits: {self.line.verdict()}, lower expected"


class Curve:
    """Collects the points of a contest."""

    def __init__(self, contest: Contest, profile: Profile) -> None:
        self.contest = contest
        self._profile = profile
        self._spec = contest.spec
        self._num_weights = num_expert_weights(contest.spec)

    def grid(self) -> Iterator[tuple[float, int]]:
        """Every quarter of a bit, and the bytes that it leaves the experts."""
        for quarter in range(round(LOW / _STEP), round(HIGH / _STEP) + 1):
            yield quarter * _STEP, int(quarter * _STEP * self._num_weights) // 8

    def others(self, series: str, name: str, plan: Plan) -> Point:
        """A plan that is not ours, beside ours within its bytes."""
        num_bytes = stored_bytes(self._spec, plan)
        return self.compared(series, self.contest.line(name, num_bytes, self.contest.judge(plan)))

    def compared(self, series: str, line: Line) -> Point:
        """The point of a comparison."""
        return Point(series, line.name, line.num_bytes, self._bits(line.num_bytes), line.kl, line)

    def hqq(self, num_seeds: int) -> Iterator[Point]:
        """HQQ in groups of 64, throughout and in random halves."""
        for size in tqdm(list(sizes(self._spec, num_seeds)), desc="HQQ", disable=None):
            for name, plan in size.plans.items():
                series = "HQQ, groups of 64" if name == "uniform" else "random half"
                yield self.others(series, f"{size.mean_width:g} bit, {name}", plan)

    def edgemoe(self, sample: Tokens, folder: Path) -> Iterator[Point]:
        """EdgeMoE's plans at HQQ's bytes, its importance measured on the sample by a profile in the folder."""
        exact = make_profile(self.contest.checkpoint, sample, folder, ProfileOptions("exact"))
        importance = exact.exact()["losses"]
        for size in tqdm(list(sizes(self._spec, 1)), desc="EdgeMoE", disable=None):
            for name, plan in edgemoe_plans(self._spec, size.max_bytes, importance).items():
                yield self.others("EdgeMoE", f"{size.mean_width:g}, {name}", plan)

    def pmq(self, sample: Tokens) -> Iterator[Point]:
        """PMQ's plans at every quarter of a bit that has one."""
        widths = tuple(sorted({*PMQ_WIDTHS, *WIDE_WIDTHS}))
        self.contest.weights.give(self.contest.weights.original)
        factors = measure_factors(self.contest.weights, sample, uniform_plans(self._spec, widths))
        for bits, max_bytes in tqdm(list(self.grid()), desc="PMQ", disable=None):
            for name, plan in pmq_plans(self._spec, max_bytes, factors).items():
                yield self.others("PMQ", f"{bits:g}, {name}", plan)

    def single(self) -> Iterator[Point]:
        """All experts in one of our formats."""
        sized = [(part, single(self._spec, part), loss) for part, loss in foretold(self._profile).items()]
        in_order = sorted((stored_bytes(self._spec, plan), loss, format_text(part), plan) for part, plan, loss in sized)
        least = float("inf")
        for num_bytes, loss, name, plan in tqdm(in_order, desc="single formats", disable=None):
            if loss < least and LOW - _BEYOND <= self._bits(num_bytes) <= HIGH + _BEYOND:
                yield self._own("moe-pack, one format", name, plan)
            least = min(least, loss)

    def ours(self) -> Iterator[Point]:
        """Our plans at every quarter of a bit that has one."""
        for bits, max_bytes in tqdm(list(self.grid()), desc="our plans", disable=None):
            try:
                plan = ours(self._profile, self._spec, max_bytes)
            except PlanError:
                continue
            yield self._own("moe-pack, plans", f"plan of {bits:g}", plan)

    def _own(self, series: str, name: str, plan: Plan) -> Point:
        num_bytes = stored_bytes(self._spec, plan)
        kl = float(self.contest.judge(plan).mean())
        return Point(series, name, num_bytes, self._bits(num_bytes), kl)

    def _bits(self, num_bytes: int) -> float:
        return num_bytes * 8 / self._num_weights


def num_expert_weights(spec: ModelSpec) -> int:
    """The weights of all routed experts."""
    expert = spec.expert.intermediate_size * spec.hidden_size * len(spec.expert.matrices)
    return len(spec.moe_layers) * spec.router.num_experts * expert


def measure(
    curve: Curve, sample: Tokens, num_seeds: int, llama: LlamaPython | None, only: tuple[str, ...], folder: Path
) -> list[Point]:
    """The points of these of `PARTS`, by rising size; llama.cpp's only with a Python that has its code.

    Args:    folder: for what they write.
    """
    points: list[Point] = []
    if "plans" in only:
        points += curve.ours()
    if "formats" in only:
        points += curve.single()
    if "hqq" in only:
        points += curve.hqq(num_seeds)
    if "edgemoe" in only:
        points += curve.edgemoe(sample, folder / "exact")
    if "pmq" in only:
        points += curve.pmq(sample)
    if "llama" in only and llama:
        lines = compare_llama(curve.contest, sample, llama, folder)
        points += [curve.compared("llama.cpp", line) for line in lines]
    return sorted(points, key=lambda point: (point.num_bytes, point.series, point.name))


def table(points: list[Point]) -> str:
    """The points under their names."""
    title = (
        f"{'bits':>6}  {'series':22}{'name':28}{'bytes':>12}{'KL':>11}{'ours, bytes':>14}{'KL':>11}  ours less it [95%]"
    )
    return "\n".join([title, *(point.row() for point in points)])


@click.command(help=__doc__)
@click.option("--model", type=click.Path(path_type=Path, exists=True), default=_TESTS / "models" / "tiny-mixtral")
@click.option("--text", type=click.Path(path_type=Path, exists=True), default=_TESTS / "data" / "books-valid.txt")
@click.option("--sensitivity", type=click.Choice(["fast", "full"]), default="fast", show_default=True)
@click.option("--tokens-profiled", default=16384, show_default=True, help="Of the sample, to calibrate on.")
@click.option("--tokens", default=16384, show_default=True, help="Of the text, to judge on.")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1), help="Random halves midway.")
@click.option("--only", type=click.Choice(PARTS), multiple=True, default=PARTS, help="What to measure; all by default.")
@click.option("--llama-python", type=click.Path(path_type=Path, exists=True), help="A Python with gguf and llama_cpp.")
@click.option("--libggml", type=click.Path(path_type=Path, exists=True), help="The library, if llama_cpp is not there.")
@click.option("--json", "result", type=click.Path(path_type=Path), help="Also write the result here, as JSON.")
@click.option("--svg", "drawn", type=click.Path(path_type=Path), help="Also draw it here.")
def main(
    model: Path,
    text: Path,
    sensitivity: Sensitivity,
    tokens_profiled: int,
    tokens: int,
    seeds: int,
    only: tuple[str, ...],
    llama_python: Path | None,
    libggml: Path | None,
    result: Path | None,
    drawn: Path | None,
) -> None:
    """Profiles in a temporary folder, measures, prints, draws, and judges."""
    tokenizer = Text(FolderFiles(model))
    sample = read_tokens(None, None, tokenizer, tokens_profiled, SEQUENCE_LENGTH)
    unseen = read_tokens(str(text), None, tokenizer, tokens, SEQUENCE_LENGTH)
    llama = LlamaPython(llama_python, libggml) if llama_python else None
    checkpoint = Checkpoint(model)
    try:
        if llama and not llama_types(checkpoint.spec):
            raise click.ClickException(f"{model}: no type of llama.cpp can hold its rows, multiples of 32 weights")
        with tempfile.TemporaryDirectory(prefix="moe-pack-") as name:
            folder = Path(name)
            profile = make_profile(checkpoint, sample, folder / "profile", ProfileOptions(sensitivity))
            contest = Contest(checkpoint, unseen, profile)
            points = measure(Curve(contest, profile), sample, seeds, llama, only, folder)
    finally:
        checkpoint.close()
    click.echo(f"{sample.sequences.size:,} tokens profiled, {unseen.sequences.size:,} of {text.name} to judge on")
    click.echo(table(points))
    if result:
        facts = {"model": model.name, "tokens_profiled": sample.sequences.size, "tokens": unseen.sequences.size}
        facts |= {"block": BLOCK_TOKENS, "quantizer": QUANTIZER, "points": [point.facts() for point in points]}
        result.write_text(json.dumps(facts, indent=1), "utf-8")
    if drawn:
        held = ((point.series, point.name, point.bits, point.kl) for point in points)
        draw(model.name, held, drawn)
    faults = [fault for point in points if (fault := point.fault())]
    for fault in faults:
        click.echo(fault, err=True)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
