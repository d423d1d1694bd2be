"""Compares the project's plans with others of the same bytes: who is nearer to the source on a text nobody has seen.

At the stored bytes of all experts in HQQ (group 64) of 2, 3 and 4 bits, and midway (a random half of the experts at
each of two widths), the project plans within exactly these bytes; beside it stand EdgeMoE's plan (as published: one
absmax scale a row; and its widths alone, in HQQ) and Mixture-Compressor's PMQ (`pmq.py`). With --llama-python,
llama.cpp's types with an importance matrix too, each beside our plan within that type's bytes. Selector `none`,
sparsity 0, the dense part as it is.

All are calibrated on the shipped sample. Judged is the mean KL divergence in nats of predictions from the source's, on
another text; a difference counts when its 95% interval, of a paired bootstrap over blocks of 128 tokens, excludes 0.
Ends with exit code 1 if our plan is not lower than HQQ at some size.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from comparators import PMQ_WIDTHS, WIDE_WIDTHS, published, sizes, stored_bytes, uniform_plans
from judge import BLOCK_TOKENS, Blocks, Judge
from llama_experts import LLAMA_TYPES, LlamaPython, can_hold, llama_experts, write_experts
from memory_weights import MemoryWeights
from paired_bootstrap import Difference, paired_difference
from planned import ours
from pmq import measure_factors
from thresholds_hold import Silent
from tqdm import tqdm

from moe_pack.calib import Profile, ProfileOptions, Sensitivity, Tokens, make_profile, read_tokens
from moe_pack.formats import Checkpoint, Plan, PlanError
from moe_pack.runtime import CheckpointWeights, Decoder, FolderFiles, Text

_TESTS = Path(__file__).parents[1] / "tests"
_SEQUENCE_LENGTH = 512


@dataclass(frozen=True, slots=True)
class Line:
    """One comparison: another's bytes and KL at a size, and ours less its; without those where we have no plan."""

    size: str
    name: str
    num_bytes: int
    kl: float
    our_bytes: int | None
    our_kl: float | None
    difference: Difference | None

    def verdict(self) -> str:
        """Whether our plan is lower."""
        return self.difference.verdict if self.difference else "we have no plan so small"

    def facts(self) -> dict[str, Any]:
        """All of it, for JSON."""
        interval = [self.difference.low, self.difference.high] if self.difference else None
        held = {"size": self.size, "name": self.name, "bytes": self.num_bytes, "kl": self.kl}
        return held | {"our_bytes": self.our_bytes, "our_kl": self.our_kl, "interval": interval, "is": self.verdict()}

    def row(self) -> str:
        """The line of the table."""
        held = f"{self.size:>8}  {self.name:22}{self.num_bytes:12,}{self.kl:11.6f}"
        if self.difference is None or self.our_kl is None:
            return f"{held}  {self.verdict()}"
        interval = f"{self.difference.mean:+.6f} [{self.difference.low:+.6f}, {self.difference.high:+.6f}]"
        return f"{held}{self.our_bytes:12,}{self.our_kl:11.6f}  {interval}  {self.verdict()}"


class Contest:
    """Judges plans of a checkpoint; each plan once."""

    def __init__(self, checkpoint: Checkpoint, unseen: Tokens, profile: Profile) -> None:
        self.spec = checkpoint.spec
        self.weights = MemoryWeights(checkpoint)
        self._judge = Judge(Decoder(CheckpointWeights(checkpoint), _SEQUENCE_LENGTH), unseen)
        self._decoder = Decoder(self.weights, _SEQUENCE_LENGTH)
        self._profile = profile
        self._judged: dict[Plan, Blocks] = {}

    def judge(self, plan: Plan) -> Blocks:
        """The KL divergence of a plan, block by block."""
        if plan not in self._judged:
            self.weights.round_to(plan)
            self._judged[plan] = self.judge_given()
        return self._judged[plan]

    def judge_given(self) -> Blocks:
        """The same of the experts that the weights were given."""
        return self._judge.blocks(self._decoder)

    def line(self, size: str, name: str, num_bytes: int, blocks: Blocks, max_bytes: int) -> Line:
        """Compares with our plan within `max_bytes`."""
        try:
            plan = ours(self._profile, self.spec, max_bytes)
        except PlanError:
            return Line(size, name, num_bytes, float(blocks.mean()), None, None, None)
        own, own_bytes = self.judge(plan), stored_bytes(self.spec, plan)
        assert own_bytes <= max_bytes, f"our plan takes {own_bytes:,} bytes, {max_bytes:,} are allowed"
        difference = paired_difference(own, blocks)
        return Line(size, name, num_bytes, float(blocks.mean()), own_bytes, float(own.mean()), difference)


def compare_plans(contest: Contest, sample: Tokens, exact: Profile, num_seeds: int) -> tuple[list[Line], list[str]]:
    """Ours beside all plans of others at every size; and what is not as it should be."""
    spec, lines, faults = contest.spec, [], []
    widths = tuple(sorted({*PMQ_WIDTHS, *WIDE_WIDTHS}))
    factors = measure_factors(contest.weights, sample, uniform_plans(spec, widths))
    importance = exact.exact()["losses"]
    for size in tqdm(list(sizes(spec, num_seeds)), desc="sizes", disable=None):
        others = size.plans | published(spec, size, importance, factors)
        for name, plan in others.items():
            num_bytes = stored_bytes(spec, plan)
            line = contest.line(f"{size.mean_width}", name, num_bytes, contest.judge(plan), size.max_bytes)
            lines.append(line)
            if name in size.plans and line.verdict() != "lower":
                faults.append(f"{line.size} bits, {name}: {line.verdict()}, lower expected")
    return lines, faults


def compare_llama(contest: Contest, sample: Tokens, llama: LlamaPython, folder: Path) -> Iterator[Line]:
    """Ours beside llama.cpp's types, each within its bytes."""
    contest.weights.give(contest.weights.original)
    write_experts(contest.weights, sample, folder)
    for kind in tqdm(LLAMA_TYPES, desc="llama.cpp", disable=None):
        stored = llama_experts(contest.weights, kind, folder, llama)
        contest.weights.give(stored.block)
        yield contest.line("llama", kind, stored.num_bytes, contest.judge_given(), stored.num_bytes)


def _table(lines: list[Line]) -> str:
    """The comparisons under their names."""
    title = f"{'size':>8}  {'plan':22}{'bytes':>12}{'KL':>11}{'ours, bytes':>12}{'KL':>11}  ours less it [95%]"
    return "\n".join([title, *(line.row() for line in lines)])


@click.command(help=__doc__)
@click.option("--model", type=click.Path(path_type=Path, exists=True), default=_TESTS / "models" / "tiny-mixtral")
@click.option("--text", type=click.Path(path_type=Path, exists=True), default=_TESTS / "data" / "books-valid.txt")
@click.option("--sensitivity", type=click.Choice(["fast", "full"]), default="fast", show_default=True)
@click.option("--tokens-profiled", default=16384, show_default=True, help="Of the sample, to calibrate on.")
@click.option("--tokens", default=32768, show_default=True, help="Of the text, to judge on.")
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(1), help="Random halves midway.")
@click.option("--llama-python", type=click.Path(path_type=Path, exists=True), help="A Python with gguf and llama_cpp.")
@click.option("--libggml", type=click.Path(path_type=Path, exists=True), help="The library, if llama_cpp is not there.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(
    model: Path,
    text: Path,
    sensitivity: Sensitivity,
    tokens_profiled: int,
    tokens: int,
    seeds: int,
    llama_python: Path | None,
    libggml: Path | None,
    as_json: bool,
) -> None:
    """Profiles in a temporary folder, compares, prints, and judges."""
    tokenizer = Text(FolderFiles(model))
    sample = read_tokens(None, None, tokenizer, tokens_profiled, _SEQUENCE_LENGTH)
    unseen = read_tokens(str(text), None, tokenizer, tokens, _SEQUENCE_LENGTH)
    checkpoint = Checkpoint(model)
    try:
        with tempfile.TemporaryDirectory(prefix="moe-pack-") as name:
            folder = Path(name)
            profile = make_profile(checkpoint, sample, folder / "own", ProfileOptions(sensitivity), Silent())
            exact = make_profile(checkpoint, sample, folder / "exact", ProfileOptions("exact"), Silent())
            contest = Contest(checkpoint, unseen, profile)
            if llama_python and not can_hold(contest.weights):
                raise click.ClickException(f"{model}: llama.cpp's types hold rows of multiples of 256 weights only")
            lines, faults = compare_plans(contest, sample, exact, seeds)
            if llama_python:
                lines += compare_llama(contest, sample, LlamaPython(llama_python, libggml), folder)
    finally:
        checkpoint.close()
    if as_json:
        facts = {"tokens_profiled": sample.sequences.size, "tokens": unseen.sequences.size, "block": BLOCK_TOKENS}
        click.echo(json.dumps(facts | {"lines": [line.facts() for line in lines], "faults": faults}))
    else:
        click.echo(f"{sample.sequences.size:,} tokens profiled, {unseen.sequences.size:,} of {text.name} to judge on")
        click.echo(_table(lines))
    for fault in faults:
        click.echo(fault, err=True)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
