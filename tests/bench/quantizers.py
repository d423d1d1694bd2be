"""What quantizers lose at the same formats, calibrated on one text and judged on another.

    python tests/bench/quantizers.py
    python tests/bench/quantizers.py --sample OTHER.jsonl --quantizer hqq --quantizer calibrated

All experts in one format, by each quantizer; each is compared with the first. Selector `none`, sparsity 0, the dense
part as it is; judged by the mean KL divergence in nats, with intervals of 95% from a paired bootstrap over blocks of
128 tokens. Run it once for each pair of texts to learn whether calibration on one kind of text holds on another. Exits
with 1 if a later quantizer is higher than the first.
"""

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import click
from benchlib import finish, json_option, model_options, sample_and_unseen, table
from benchlib.judging import Difference, Judge, num_expert_weights, paired_difference, stored_bytes, uniform
from tqdm import tqdm

from moe_pack.calib.profile import ProfileOptions, make_profile
from moe_pack.formats import NO_PROGRESS, ROW_GROUP, PartFormat, Quantizer, part_format, trellis_format
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.plans import format_text


@dataclass(frozen=True, slots=True)
class Row:
    """One quantizer at one format; `difference`: its KL less the first quantizer's."""

    stored_as: str
    quantizer: Quantizer
    bits: float
    kl: float
    difference: Difference


def format_of(name: str) -> PartFormat:
    """Returns a format: `BITS`, in groups of 64, or `trellisBITS`, with one scale a row."""
    if name.startswith("trellis"):
        return trellis_format(round(2 * float(name.removeprefix("trellis"))), ROW_GROUP)
    return part_format(int(name), 64)


@click.command(help=__doc__)
@model_options
@click.option(
    "--sample", type=click.Path(path_type=Path, exists=True), help="To calibrate on.  [default: the shipped one]"
)
@click.option(
    "--quantizer",
    "quantizers",
    multiple=True,
    type=click.Choice(get_args(Quantizer)),
    default=("hqq", "calibrated"),
    show_default=True,
)
@click.option("--formats", default="2,3,4", show_default=True, help="Bits in groups of 64, or trellisBITS.")
@click.option("--tokens-profiled", default=16384, show_default=True, help="Of the sample.")
@click.option("--tokens", default=16384, show_default=True, help="Of the text, to judge on.")
@json_option
def main(
    model: Path,
    text: Path,
    sample: Path | None,
    quantizers: tuple[Quantizer, ...],
    formats: str,
    tokens_profiled: int,
    tokens: int,
    as_json: bool,
) -> None:
    """Profiles in a temporary folder, measures, prints, and judges."""
    calibration, unseen = sample_and_unseen(model, tokens_profiled, tokens, text, sample)
    checkpoint, rows = Checkpoint(model), list[Row]()
    try:
        with tempfile.TemporaryDirectory(prefix="moe-pack-") as folder:
            profile = make_profile(checkpoint, calibration, Path(folder) / "p", ProfileOptions("none"), NO_PROGRESS)
            judge = Judge(checkpoint, unseen, profile)
            for part in tqdm([format_of(name) for name in formats.split(",")], disable=None):
                plans = {quantizer: uniform(checkpoint.spec, part, quantizer) for quantizer in quantizers}
                first = judge.plan(plans[quantizers[0]])
                for quantizer, plan in plans.items():
                    blocks = judge.plan(plan)
                    bits = 8 * stored_bytes(checkpoint.spec, plan) / num_expert_weights(checkpoint.spec)
                    difference = paired_difference(blocks, first)
                    rows.append(Row(format_text(part), quantizer, bits, float(blocks.mean()), difference))
    finally:
        checkpoint.close()
    header = ("stored as", "quantizer", "bits a weight", "KL", f"less {quantizers[0]}, 95%")
    cells = [(r.stored_as, r.quantizer, f"{r.bits:.3f}", f"{r.kl:.6f}", r.difference) for r in rows]
    faults = [f"{r.stored_as}, {r.quantizer}: higher than {quantizers[0]}" for r in rows if r.difference.low > 0]
    facts = {"model": model.name, "tokens_profiled": calibration.sequences.size, "tokens": unseen.sequences.size}
    finish(facts | {"rows": [asdict(r) for r in rows]}, table(header, cells), as_json, faults)


if __name__ == "__main__":
    main()
