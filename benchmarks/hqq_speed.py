"""Times hqq's quantizer on a whole expert matrix against ours, which runs hqq's solver in blocks that stay in cache.

One torch thread, runs interleaved, medians. Ours includes rounding scales to float16, codes and packing; hqq's does not
pack. Errors are means of absolute differences from the weights: ours of the stored bytes, hqq's of its codes with its
scales and zeros left in float32.
"""

import json
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import click
import torch
from hqq.core.quantize import Quantizer as HqqQuantizer
from torch import Tensor
from tqdm import tqdm

from moe_pack.calib import RowQuantizer
from moe_pack.formats import PartFormat, part_format
from moe_pack.formats.codecs import decode_part


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both quantizers at one width: medians of seconds, and mean absolute errors."""

    width: int
    hqq_seconds: float
    our_seconds: float
    times_faster: float
    hqq_error: float
    our_error: float
    error_ratio: float


def _hqq(weights: Tensor, part: PartFormat) -> tuple[float, tuple[Tensor, dict[str, Any]]]:
    """Seconds, codes and what hqq says of them."""
    began = time.perf_counter()
    found = HqqQuantizer.quantize(weights, nbits=part.width, axis=1, group_size=part.group, device="cpu", bitpack=False)
    return time.perf_counter() - began, found


def _ours(weights: Tensor, part: PartFormat) -> tuple[float, Tensor]:
    """Seconds and the rows' bytes."""
    began = time.perf_counter()
    rows = RowQuantizer(part, weights.shape[1], "hqq").encode(weights)
    return time.perf_counter() - began, rows


def _mean_error(weights: Tensor, decoded: Tensor) -> float:
    """Mean absolute difference, summed in float64 some rows at a time."""
    pairs = zip(torch.split(weights, 1024), torch.split(decoded, 1024), strict=True)
    return float(sum((a.double() - b).abs_().sum() for a, b in pairs)) / weights.numel()


def _hqq_decoded(codes: Tensor, found: dict[str, Any]) -> Tensor:
    """hqq's weights, all in float32."""
    return codes.float().sub_(found["zero"]).mul_(found["scale"]).view(found["shape"])


def compare(weights: Tensor, part: PartFormat, num_runs: int) -> Comparison:
    """Times both on the same weights, one after the other, `num_runs` times."""
    hqq_seconds, our_seconds = [], []
    hqq_error = our_error = 0.0
    for run in tqdm(range(num_runs), desc=f"{part.width} bit", disable=None):
        seconds, rows = _ours(weights, part)
        our_seconds.append(seconds)
        if run == 0:
            our_error = _mean_error(weights, decode_part(part, weights.shape[1], rows))
        seconds, (codes, found) = _hqq(weights, part)
        hqq_seconds.append(seconds)
        if run == 0:
            hqq_error = _mean_error(weights, _hqq_decoded(codes, found))
        del rows, codes, found
    hqq, ours = median(hqq_seconds), median(our_seconds)
    return Comparison(part.width, hqq, ours, hqq / ours, hqq_error, our_error, our_error / hqq_error)


@click.command(help=__doc__)
@click.option("--rows", default=14336, show_default=True, type=click.IntRange(1), help="Of the matrix.")
@click.option("--cols", default=4096, show_default=True, type=click.IntRange(64), help="Of the matrix.")
@click.option("--group", default=64, show_default=True, type=click.IntRange(16), help="Weights a scale.")
@click.option("--widths", default="8,4,3,2", show_default=True, help="Bits a code.")
@click.option("--runs", default=3, show_default=True, type=click.IntRange(1), help="Of each, for the medians.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(rows: int, cols: int, group: int, widths: str, runs: int, as_json: bool) -> None:
    """Compares on random weights of an expert's size and spread, in bfloat16 as a checkpoint holds them."""
    torch.set_num_threads(1)
    weights = (torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    warm_up = weights[:64]
    _ours(warm_up, part_format(4, group))
    _hqq(warm_up, part_format(4, group))
    found = [compare(weights, part_format(int(width), group), runs) for width in widths.split(",")]
    if as_json:
        facts = {"rows": rows, "cols": cols, "group": group, "runs": runs, "torch": torch.__version__}
        click.echo(json.dumps(facts | {"comparisons": [asdict(comparison) for comparison in found]}))
        return
    click.echo(f"[{rows}, {cols}], group {group}, one thread, medians of {runs}")
    click.echo("width   hqq s   ours s   times faster   hqq error   our error   ratio")
    for c in found:
        click.echo(
            f"{c.width:5}{c.hqq_seconds:8.2f}{c.our_seconds:9.2f}{c.times_faster:15.2f}"
            f"{c.hqq_error:12.7f}{c.our_error:12.7f}{c.error_ratio:8.4f}"
        )


if __name__ == "__main__":
    main()
