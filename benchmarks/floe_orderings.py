"""Looks for the orderings of FloE's Fig. 3: by what neurons are best dropped, and which matrix takes fewer bits best.

The KL divergence in nats of a pack's predictions from the original's, and its perplexity, on the first windows of a
text: (a) 16-bit packs whose neurons are dropped by the down projection's input (selector `both`), by up, by gate, their
thresholds measured on the shipped sample; (b) packs in which gate, up or down of all experts has fewer bits and the
other two have 16. Ends with exit code 1 unless KL(both) <= KL(up) < KL(gate) at every sparsity from 0.7 up, and
KL(up) < KL(gate) < KL(down) at 2 bits.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
from quality import Candidate, judge, text_windows
from thresholds_hold import make_pack
from tokenizers import Tokenizer

from moe_pack.calib import ThresholdRule, Tokens, measure_thresholds, read_tokens
from moe_pack.convert import convert
from moe_pack.formats import (
    BF16,
    MATRICES,
    Checkpoint,
    ExpertFormat,
    Matrix,
    Pack,
    Plan,
    Selector,
    part_format,
    uniform_dense,
)
from moe_pack.runtime import CheckpointWeights, Decoder, FolderFiles, PackWeights, Text

_TESTS = Path(__file__).parents[1] / "tests"
_GROUP = 64
_SEQUENCE_LENGTH = 512
_DROPPED_BY: tuple[Selector, ...] = ("both", "up", "gate")  # as they should come, the best first
_NARROWED: tuple[Matrix, ...] = ("up", "gate", "down")
_ORDERED_SPARSITY, _ORDERED_WIDTH = 0.7, 2  # orderings are asked for from here on: below, little is lost at all


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the figure. `by`: a selector kind in part a, a matrix in part b; `at`: a sparsity, or a width."""

    part: str
    by: str
    at: float
    kl_nats: float
    perplexity: float


@dataclass(frozen=True, slots=True)
class _Case:
    """A point in the making."""

    part: str
    by: str
    at: float
    candidate: Candidate


def narrowed_plan(checkpoint: Checkpoint, matrix: Matrix, width: int) -> Plan:
    """The plan that stores this matrix of all experts at a width, all else in 16 bit."""
    spec = checkpoint.spec
    gate, up, down = (part_format(width, _GROUP) if held == matrix else BF16 for held in MATRICES)
    layer = (ExpertFormat(gate, up, down),) * spec.router.num_experts
    return Plan("none", "hqq", (layer,) * len(spec.moe_layers), uniform_dense(spec, None))


class _Packs:
    """Makes packs below a folder, and opens them; all stay open until `stack` is left."""

    def __init__(self, checkpoint: Checkpoint, folder: Path, context_tokens: int, stack: ExitStack) -> None:
        self._checkpoint = checkpoint
        self._folder = folder
        self._context_tokens = context_tokens
        self._stack = stack

    def sparse(self, selector: Selector, sparsities: list[float], sample: Tokens) -> Iterator[_Case]:
        """One 16-bit pack with one set of thresholds after the other; an open pack keeps those it was opened with."""
        folder = self._folder / selector
        make_pack(self._checkpoint, selector, 16, "hqq", folder, 1)
        for sparsity in sparsities:
            with Pack(folder) as pack:
                measure_thresholds(pack, sample, ThresholdRule(sparsity=sparsity))
            yield _Case("a", selector, sparsity, self._open(folder, 16))

    def narrowed(self, matrix: Matrix, width: int) -> _Case:
        """A pack with one matrix narrowed."""
        folder, num_threads = self._folder / f"{matrix}-{width}", torch.get_num_threads()
        convert(self._checkpoint, narrowed_plan(self._checkpoint, matrix, width), folder, num_threads)
        torch.set_num_threads(num_threads)  # converting leaves torch with one thread
        return _Case("b", matrix, width, self._open(folder, width))

    def _open(self, folder: Path, width: int) -> Candidate:
        pack = self._stack.enter_context(Pack(folder))
        return Candidate(width, pack, Decoder(PackWeights(pack, torch.device("cpu")), self._context_tokens))


def faults_in(points: list[Point]) -> list[str]:
    """The orderings that do not hold, in words."""
    kl = {(point.part, point.by, point.at): point.kl_nats for point in points}
    faults = []
    for at in sorted({point.at for point in points if point.part == "a" and point.at >= _ORDERED_SPARSITY}):
        both, up, gate = (kl["a", selector, at] for selector in _DROPPED_BY)
        if not both <= up < gate:
            faults.append(f"sparsity {at}: both {both:.4f}, up {up:.4f}, gate {gate:.4f}; expected both <= up < gate")
    if ("b", "up", _ORDERED_WIDTH) in kl:
        up, gate, down = (kl["b", matrix, _ORDERED_WIDTH] for matrix in _NARROWED)
        if not up < gate < down:
            faults.append(f"2 bit: up {up:.4f}, gate {gate:.4f}, down {down:.4f}; expected up < gate < down")
    return faults


def _table(points: list[Point], part: str, names: tuple[str, ...]) -> str:
    """A part's KLs, and perplexities beside them: a row for each sparsity or width."""
    held = {(point.by, point.at): point for point in points if point.part == part}
    rows = ["".join(f"{cell:>10}" for cell in ("sparsity" if part == "a" else "width", *names, *names))]
    for at in dict.fromkeys(at for _, at in held):
        found = [held[name, at] for name in names]
        rows.append(
            f"{at:10g}" + "".join(f"{p.kl_nats:10.4f}" for p in found) + "".join(f"{p.perplexity:10.3f}" for p in found)
        )
    return "\n".join([f"{'':10}{'KL (nats)':>{10 * len(names)}}{'perplexity':>{10 * len(names)}}", *rows])


def _point(case: _Case) -> Point:
    tally = case.candidate.tally
    return Point(case.part, case.by, case.at, tally.divergence / tally.num_tokens, tally.perplexity)


@click.command(help=__doc__)
@click.option("--model", type=click.Path(path_type=Path, exists=True), default=_TESTS / "models" / "tiny-mixtral")
@click.option("--text", type=click.Path(path_type=Path, exists=True), default=_TESTS / "data" / "books-valid.txt")
@click.option("--windows", default=32, show_default=True, type=click.IntRange(1), help="Of the text, the first.")
@click.option("--window", default=512, show_default=True, type=click.IntRange(2), help="Tokens run together.")
@click.option("--tokens", default=16384, show_default=True, help="Of the sample, to measure thresholds on.")
@click.option("--sparsities", default="0.5,0.7,0.8,0.9", show_default=True, help="Of part a.")
@click.option("--widths", default="8,4,3,2", show_default=True, help="Of part b, bits.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(
    model: Path,
    text: Path,
    windows: int,
    window: int,
    tokens: int,
    sparsities: str,
    widths: str,
    as_json: bool,
) -> None:
    """Makes the packs in a temporary folder, runs all beside the original, prints, and judges."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    held = text_windows(tokenizer, text.read_text("utf-8"), window, None)[:windows]
    sample = read_tokens(None, None, Text(FolderFiles(model)), tokens, _SEQUENCE_LENGTH)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moe-pack-")))
        checkpoint = Checkpoint(model)
        stack.callback(checkpoint.close)
        packs, cases = _Packs(checkpoint, folder, window, stack), []
        for selector in _DROPPED_BY:
            cases += list(packs.sparse(selector, [float(sparsity) for sparsity in sparsities.split(",")], sample))
        cases += [packs.narrowed(matrix, int(width)) for width in widths.split(",") for matrix in _NARROWED]
        own = judge(Decoder(CheckpointWeights(checkpoint), window), [case.candidate for case in cases], held)
        points = [_point(case) for case in cases]
    faults = faults_in(points)
    if as_json:
        facts = {"num_tokens": own.num_tokens, "num_windows": len(held), "source_perplexity": own.perplexity}
        click.echo(json.dumps(facts | {"points": [asdict(point) for point in points], "faults": faults}))
    else:
        click.echo(f"{own.num_tokens:,} tokens in {len(held)} windows; source perplexity {own.perplexity:.3f}")
        click.echo(f"\n(a) neurons dropped by\n{_table(points, 'a', _DROPPED_BY)}")
        click.echo(f"\n(b) one matrix at fewer bits\n{_table(points, 'b', _NARROWED)}")
    for fault in faults:
        click.echo(fault, err=True)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
