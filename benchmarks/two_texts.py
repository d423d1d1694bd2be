"""Calibrates on one kind of text and judges on another: the plans' quantizer against HQQ at the same formats.

Two kinds of text: novels (the shipped sample to calibrate on, --text to judge on) and Python's own documentation
(`python_text.py`, of which other documents are judged than calibrated on). On all four pairs, all experts in groups
of 64 at 2, 3 and 4 bits, once by HQQ, which sees the weights alone, and once by the quantizer of our plans.

Selector `none`, sparsity 0, the dense part as it is. Judged is the mean KL divergence in nats of predictions from the
source's; intervals of 95% from a paired bootstrap over blocks of 128 tokens. Ends with exit code 1 if the quantizer's
KL is above HQQ's on some pair.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from comparators import GROUP
from contest import SEQUENCE_LENGTH
from expert_quantizers import joint_quantizers
from judge import Blocks, Judge
from memory_weights import JointQuantizer, MemoryWeights
from paired_bootstrap import Verdict, paired_difference
from planned import QUANTIZER, single
from python_text import write_python_text
from tqdm import tqdm

from moe_pack.calib import ProfileOptions, Tokens, make_profile, read_tokens
from moe_pack.formats import Checkpoint, part_format
from moe_pack.runtime import CheckpointWeights, Decoder, FolderFiles, Text

WIDTHS = (2, 3, 4)
_TESTS = Path(__file__).parents[1] / "tests"


@dataclass(frozen=True, slots=True)
class Kind:
    """Two texts of one kind: to calibrate on, and to judge on."""

    calibration: Tokens
    valid: Tokens


@dataclass(frozen=True, slots=True)
class Row:
    """A pair of texts at a width: both KLs, and the quantizer's less HQQ's with its interval."""

    calibrated_on: str
    judged_on: str
    width: int
    hqq: float
    kl: float
    difference: float
    low: float
    high: float
    verdict: Verdict

    def text(self) -> str:
        """The line of the table."""
        names = f"{self.calibrated_on:15}{self.judged_on:12}"
        interval = f"{self.difference:+.6f} [{self.low:+.6f}, {self.high:+.6f}]"
        return f"{names}{self.width:4}{self.hqq:11.6f}{self.kl:11.6f}  {interval}  {self.verdict}"


class Texts:
    """Judges a checkpoint's experts in one format on texts of several kinds."""

    def __init__(self, checkpoint: Checkpoint, kinds: dict[str, Kind]) -> None:
        source = Decoder(CheckpointWeights(checkpoint), SEQUENCE_LENGTH)
        self._weights = MemoryWeights(checkpoint)
        self._decoder = Decoder(self._weights, SEQUENCE_LENGTH)
        self._judges = {name: Judge(source, kind.valid) for name, kind in kinds.items()}

    def hqq(self, width: int) -> dict[str, Blocks]:
        """By kind, the KL divergence of HQQ."""
        self._weights.round_to(single(self._weights.spec, part_format(width, GROUP), "hqq"))
        return self._judged()

    def ours(self, width: int, quantizer: JointQuantizer | None) -> dict[str, Blocks]:
        """By kind, that of the quantizer of our plans; None if it needs no more than a matrix."""
        self._weights.round_to(single(self._weights.spec, part_format(width, GROUP)), quantizer)
        return self._judged()

    def _judged(self) -> dict[str, Blocks]:
        return {name: judge.blocks(self._decoder) for name, judge in self._judges.items()}


def measure(checkpoint: Checkpoint, kinds: dict[str, Kind], folder: Path) -> Iterator[Row]:
    """All pairs at all widths."""
    texts = Texts(checkpoint, kinds)
    uncalibrated = {width: texts.hqq(width) for width in WIDTHS}
    for calibrated_on, kind in tqdm(kinds.items(), desc="texts", disable=None):
        profile = make_profile(checkpoint, kind.calibration, folder / calibrated_on, ProfileOptions("none"))
        quantizer = joint_quantizers(profile).get(QUANTIZER)
        for width in WIDTHS:
            for judged_on, blocks in texts.ours(width, quantizer).items():
                other = uncalibrated[width][judged_on]
                found, means = paired_difference(blocks, other), (float(other.mean()), float(blocks.mean()))
                bounds = (found.mean, found.low, found.high)
                yield Row(calibrated_on, judged_on, width, *means, *bounds, found.verdict)


def read_kinds(tokenizer: Text, text: Path, num_profiled: int, num_judged: int, folder: Path) -> dict[str, Kind]:
    """Novels and Python's documentation, which is written to the folder."""
    python, judged = write_python_text(folder)
    calibration = {"novels": None, "python": str(python)}
    valid = {"novels": str(text), "python": str(judged)}
    return {
        name: Kind(
            read_tokens(source, None, tokenizer, num_profiled, SEQUENCE_LENGTH),
            read_tokens(valid[name], None, tokenizer, num_judged, SEQUENCE_LENGTH),
        )
        for name, source in calibration.items()
    }


@click.command(help=__doc__)
@click.option("--model", type=click.Path(path_type=Path, exists=True), default=_TESTS / "models" / "tiny-mixtral")
@click.option("--text", type=click.Path(path_type=Path, exists=True), default=_TESTS / "data" / "books-valid.txt")
@click.option("--tokens-profiled", default=32768, show_default=True, help="Of each text, to calibrate on.")
@click.option("--tokens", default=16384, show_default=True, help="Of each text, to judge on.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(model: Path, text: Path, tokens_profiled: int, tokens: int, as_json: bool) -> None:
    """Profiles in a temporary folder, measures, prints, and judges."""
    checkpoint = Checkpoint(model)
    try:
        with tempfile.TemporaryDirectory(prefix="moe-pack-") as name:
            kinds = read_kinds(Text(FolderFiles(model)), text, tokens_profiled, tokens, Path(name))
            rows = list(measure(checkpoint, kinds, Path(name)))
    finally:
        checkpoint.close()
    num_tokens = {name: [kind.calibration.sequences.size, kind.valid.sequences.size] for name, kind in kinds.items()}
    if as_json:
        version = sys.version.split()[0]
        facts = {"quantizer": QUANTIZER, "python": version, "tokens": num_tokens}
        click.echo(json.dumps(facts | {"rows": [asdict(row) for row in rows]}))
    else:
        for name, (profiled, judged) in num_tokens.items():
            click.echo(f"{name}: {profiled:,} tokens to calibrate on, {judged:,} to judge on")
        click.echo(f"{'calibrated on':15}{'judged on':12}{'bits':>4}{'HQQ':>11}{QUANTIZER:>11}  it less HQQ [95%]")
        click.echo("\n".join(row.text() for row in rows))
    faults = [row for row in rows if row.difference > 0]
    for row in faults:
        click.echo(f"{row.calibrated_on} to {row.judged_on}, {row.width} bits: above HQQ", err=True)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
