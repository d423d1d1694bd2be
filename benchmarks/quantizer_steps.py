"""What each step from HQQ to the project's own plans brings, alone and together with those before it.

At the stored bytes of all experts in HQQ (group 64) of 2, 3 and 4 bits: HQQ; then HQQ with each step of
`expert_quantizers.STEPS` alone; then one step after the other. *codebook* adds trellises; without it codes are affine.
*scales* lets formats have any group and byte scales; without it affine codes have groups of 64, trellises rows, with
float16 scales. Without *knapsack* all experts have one format, the one that a profile foretells to lose least within
the bytes; with it each matrix of each expert has its own.

Selector `none`, sparsity 0, the dense part as it is; calibrated on the shipped sample, judged on another text by the
mean KL divergence in nats; intervals of 95% from a paired bootstrap over blocks of 128 tokens. Ends with exit code 1 if
all steps together are not lower than HQQ at some size.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from comparators import GROUP, stored_bytes
from contest import SEQUENCE_LENGTH
from expert_quantizers import STEPS, quantizer_with
from judge import Blocks, Judge
from memory_weights import MemoryWeights
from paired_bootstrap import Verdict, paired_difference
from planned import foretold, ours, single
from tqdm import tqdm

from moe_pack.calib import Profile, ProfileOptions, Sensitivity, make_profile, read_tokens
from moe_pack.formats import ROW_GROUP, Checkpoint, ModelSpec, PartFormat, Plan, Quantizer, part_format
from moe_pack.runtime import CheckpointWeights, Decoder, FolderFiles, Text

WIDTHS = (2, 3, 4)
_TESTS = Path(__file__).parents[1] / "tests"

_PLAIN_GROUPS = {"affine": GROUP, "trellis": ROW_GROUP}  # by codec, without other scales


@dataclass(frozen=True, slots=True)
class Row:
    """HQQ with some steps at a size: how far from the source, and its KL less that of HQQ alone with its interval."""

    width: int
    steps: tuple[str, ...]
    num_bytes: int
    kl: float
    less_hqq: float
    low: float
    high: float
    verdict: Verdict

    def text(self) -> str:
        """The line of the table."""
        steps = " + ".join(self.steps) or "hqq alone"
        interval = f"{self.less_hqq:+.6f} [{self.low:+.6f}, {self.high:+.6f}]"
        return f"{self.width:4}  {steps:56}{self.num_bytes:12,}{self.kl:11.6f}  {interval}  {self.verdict}"


def combinations() -> list[tuple[str, ...]]:
    """HQQ alone, each step alone, and one after the other."""
    alone, together = [(step,) for step in STEPS], [STEPS[:number] for number in range(2, len(STEPS) + 1)]
    return [(), *alone, *together]


def allowed_formats(formats: tuple[PartFormat, ...], steps: frozenset[str]) -> tuple[PartFormat, ...]:
    """Those of the formats that quantization with these steps has; none keeps the source's 16 bits."""
    codecs = {"affine", "trellis"} if "codebook" in steps else {"affine"}
    return tuple(part for part in formats if part.codec in codecs and ("scales" in steps or _has_plain_scales(part)))


def _has_plain_scales(part: PartFormat) -> bool:
    return (part.group, part.scale_bits) == (_PLAIN_GROUPS[part.codec], 16)


def planned(
    profile: Profile, spec: ModelSpec, max_bytes: int, steps: frozenset[str], quantizer: Quantizer = "hqq"
) -> Plan:
    """The plan within the bytes that these steps give: one format for all, or by the knapsack."""
    losses = foretold(profile, "hqq")
    if quantizer != "hqq":
        losses |= foretold(profile, quantizer)
    allowed = allowed_formats(tuple(losses), steps)
    if "knapsack" in steps:
        return ours(profile, spec, max_bytes, allowed, quantizer)
    plans = {part: single(spec, part, quantizer) for part in allowed}
    return plans[min((part for part in plans if stored_bytes(spec, plans[part]) <= max_bytes), key=losses.__getitem__)]


def measure(checkpoint: Checkpoint, profile: Profile, judge: Judge) -> Iterator[Row]:
    """Every combination of steps at every size."""
    spec, weights = checkpoint.spec, MemoryWeights(checkpoint)
    decoder = Decoder(weights, SEQUENCE_LENGTH)
    quantizers = {steps: quantizer_with(profile, frozenset(steps)) for steps in combinations()}
    for width in WIDTHS:
        max_bytes = stored_bytes(spec, single(spec, part_format(width, GROUP), "hqq"))
        alone: Blocks | None = None
        for steps in tqdm(combinations(), desc=f"{width} bit", disable=None):
            name, quantizer = quantizers[steps]
            plan = planned(profile, spec, max_bytes, frozenset(steps), name)
            weights.round_to(plan, quantizer)
            blocks = judge.blocks(decoder)
            alone = blocks if alone is None else alone
            found, num_bytes = paired_difference(blocks, alone), stored_bytes(spec, plan)
            assert num_bytes <= max_bytes, f"{steps} take {num_bytes:,} bytes, {max_bytes:,} are allowed"
            kl = float(blocks.mean())
            yield Row(width, steps, num_bytes, kl, found.mean, found.low, found.high, found.verdict)


@click.command(help=__doc__)
@click.option("--model", type=click.Path(path_type=Path, exists=True), default=_TESTS / "models" / "tiny-mixtral")
@click.option("--text", type=click.Path(path_type=Path, exists=True), default=_TESTS / "data" / "books-valid.txt")
@click.option("--sensitivity", type=click.Choice(["fast", "full"]), default="fast", show_default=True)
@click.option("--tokens-profiled", default=16384, show_default=True, help="Of the sample, to calibrate on.")
@click.option("--tokens", default=16384, show_default=True, help="Of the text, to judge on.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(model: Path, text: Path, sensitivity: Sensitivity, tokens_profiled: int, tokens: int, as_json: bool) -> None:
    """Profiles in a temporary folder, measures, prints, and judges."""
    tokenizer = Text(FolderFiles(model))
    sample = read_tokens(None, None, tokenizer, tokens_profiled, SEQUENCE_LENGTH)
    unseen = read_tokens(str(text), None, tokenizer, tokens, SEQUENCE_LENGTH)
    checkpoint = Checkpoint(model)
    try:
        with tempfile.TemporaryDirectory(prefix="moe-pack-") as folder:
            profile = make_profile(checkpoint, sample, Path(folder), ProfileOptions(sensitivity))
            judge = Judge(Decoder(CheckpointWeights(checkpoint), SEQUENCE_LENGTH), unseen)
            rows = list(measure(checkpoint, profile, judge))
    finally:
        checkpoint.close()
    if as_json:
        facts = {"tokens_profiled": sample.sequences.size, "tokens": unseen.sequences.size}
        click.echo(json.dumps(facts | {"rows": [asdict(row) for row in rows]}))
    else:
        click.echo(f"{sample.sequences.size:,} tokens profiled, {unseen.sequences.size:,} of {text.name} to judge on")
        click.echo(f"{'bits':>4}  {'steps':56}{'bytes':>12}{'KL':>11}  less HQQ alone [95%]")
        click.echo("\n".join(row.text() for row in rows))
    faults = [row for row in rows if row.steps == STEPS and row.verdict != "lower"]
    for row in faults:
        click.echo(f"{row.width} bits, all steps: {row.verdict}, lower than HQQ expected", err=True)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
