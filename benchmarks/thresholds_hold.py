"""Checks that thresholds give the sparsity they were measured for, on a text they have not seen.

Packs of every selector kind and width (records as wide, group 64). On each, thresholds are measured on the shipped
sample for one sparsity after the other, and the share of neurons that then do not run is counted on another text. Ends
with exit code 1 if that share is off by more than 0.01 over all experts, or by more than 0.03 in an expert that at
least 1,000 tokens of the text go to.
"""

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import click
import torch
from tqdm import tqdm

from moe_pack.calib import (
    RealizedSparsity,
    ThresholdRule,
    Tokens,
    measure_thresholds,
    read_tokens,
    realized_sparsity,
)
from moe_pack.convert import convert
from moe_pack.formats import SELECTORS, Checkpoint, Pack, Quantizer, Selector, part_format, uniform_plan
from moe_pack.runtime import FolderFiles, Text

_TESTS = Path(__file__).parents[1] / "tests"
_GROUP = 64
_SEQUENCE_LENGTH = 512
_MAX_OVERALL, _MAX_EXPERT = 0.01, 0.03
_TRUSTED_TOKENS = 1000  # of an expert: of fewer, the text's own chance moves the share


@dataclass(frozen=True, slots=True)
class Held:
    """What one pack does at one sparsity; `farthest` is the share of the expert named, of those with enough tokens."""

    selector: Selector
    width: int
    sparsity: float
    overall: float
    farthest: float | None
    expert: str | None

    def fault(self) -> str | None:
        """What is wrong, or None."""
        place = f"{self.selector}, {self.width} bit, sparsity {self.sparsity}"
        if not abs(self.overall - self.sparsity) <= _MAX_OVERALL:
            return f"{place}: {self.overall:.4f} overall, at most {_MAX_OVERALL} off allowed"
        if self.farthest is not None and not abs(self.farthest - self.sparsity) <= _MAX_EXPERT:
            return f"{place}: {self.farthest:.4f} in expert {self.expert}, at most {_MAX_EXPERT} off allowed"
        return None


def make_pack(
    checkpoint: Checkpoint, selector: Selector, width: int, quantizer: Quantizer, folder: Path, workers: int
) -> None:
    """Converts all experts' matrices to one width; torch keeps its number of threads."""
    num_threads, part = torch.get_num_threads(), part_format(width, _GROUP)
    convert(checkpoint, uniform_plan(checkpoint.spec, selector, part, part, None, quantizer), folder, workers)
    torch.set_num_threads(num_threads)  # converting leaves torch with one thread


def hold(folder: Path, width: int, sparsity: float, sample: Tokens, unseen: Tokens) -> Held:
    """Measures a pack's thresholds for a sparsity, and what they do on the unseen text."""
    with Pack(folder) as pack:
        measure_thresholds(pack, sample, ThresholdRule(sparsity=sparsity))
    with Pack(folder) as pack:  # the one before keeps the thresholds it was opened with
        found = realized_sparsity(pack, unseen)
        selector = pack.manifest.selector
    assert found.overall is not None, "some token goes to some expert"
    farthest = _farthest(found, sparsity)
    share, expert = farthest if farthest else (None, None)
    return Held(selector, width, sparsity, found.overall, share, expert)


def _farthest(found: RealizedSparsity, sparsity: float) -> tuple[float, str] | None:
    """The share farthest from `sparsity` among experts with enough tokens, and which expert has it (layer.expert)."""
    shares = [
        (share, f"{layer_idx}.{expert}")
        for layer_idx, layer in enumerate(found.experts)
        for expert, share in enumerate(layer)
        if share is not None and found.tokens[layer_idx][expert] >= _TRUSTED_TOKENS
    ]
    return max(shares, key=lambda held: abs(held[0] - sparsity)) if shares else None


def _table(lines: list[Held]) -> str:
    rows = ["selector  width  sparsity   overall   farthest expert"]
    for h in lines:
        farthest = "-" if h.farthest is None else f"{h.farthest:.4f} ({h.expert})"
        rows.append(f"{h.selector:8}{h.width:7}{h.sparsity:10}{h.overall:10.4f}{farthest:>18}")
    return "\n".join(rows)


def _texts(model: Path, text: Path, num_tokens: int, num_unseen: int) -> tuple[Tokens, Tokens]:
    """The shipped sample, and the text thresholds never see."""
    tokenizer = Text(FolderFiles(model))
    sample = read_tokens(None, None, tokenizer, num_tokens, _SEQUENCE_LENGTH)
    return sample, read_tokens(str(text), None, tokenizer, num_unseen, _SEQUENCE_LENGTH)


@click.command(help=__doc__)
@click.option("--model", type=click.Path(path_type=Path, exists=True), default=_TESTS / "models" / "tiny-mixtral")
@click.option("--text", type=click.Path(path_type=Path, exists=True), default=_TESTS / "data" / "books-valid.txt")
@click.option("--tokens", default=16384, show_default=True, help="Of the sample, to measure thresholds on.")
@click.option("--tokens-unseen", default=16384, show_default=True, help="Of the text, to count on.")
@click.option("--selectors", default=",".join(SELECTORS), show_default=True, help="Kinds to pack for.")
@click.option("--widths", default="16,4,2", show_default=True, help="Bits of every expert's weights, one a pack.")
@click.option("--sparsities", default="0.5,0.7,0.8,0.9", show_default=True, help="Measured on each pack.")
@click.option("--quantizer", type=click.Choice(get_args(Quantizer)), default="hqq", show_default=True)
@click.option("--workers", default=2, show_default=True, type=click.IntRange(1), help="Of a conversion.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(
    model: Path,
    text: Path,
    tokens: int,
    tokens_unseen: int,
    selectors: str,
    widths: str,
    sparsities: str,
    quantizer: Quantizer,
    workers: int,
    as_json: bool,
) -> None:
    """Makes the packs one after the other in a temporary folder, measures, prints, and judges."""
    sample, unseen = _texts(model, text, tokens, tokens_unseen)
    kinds = [kind for kind in SELECTORS if kind in selectors.split(",")]
    packs = [(kind, int(width)) for kind in kinds for width in widths.split(",")]
    checkpoint, lines = Checkpoint(model), []
    try:
        for kind, width in tqdm(packs, desc="packs", disable=None):
            with tempfile.TemporaryDirectory(prefix="moe-pack-") as folder:
                make_pack(checkpoint, kind, width, quantizer, Path(folder), workers)
                lines += [hold(Path(folder), width, float(s), sample, unseen) for s in sparsities.split(",")]
    finally:
        checkpoint.close()
    faults = [fault for line in lines if (fault := line.fault())]
    facts = {"tokens": sample.sequences.size, "tokens_unseen": unseen.sequences.size, "quantizer": quantizer}
    if as_json:
        click.echo(json.dumps(facts | {"packs": [asdict(line) for line in lines], "faults": faults}))
    else:
        click.echo(f"{facts['tokens']:,} tokens of the sample, {facts['tokens_unseen']:,} of {text.name}; {quantizer}")
        click.echo(_table(lines))
    for fault in faults:
        click.echo(fault, err=True)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
