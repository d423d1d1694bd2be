"""Compares grids without calibration: affine with a zero, symmetric affine (no zeros stored), and the trellis.

Mean squared error of the demo model's expert weights as a share of their mean square, at the bits a weight that codes,
scales and zeros take in a row of --row weights. Symmetric affine is no format of the project: levels at half steps
about zero, each group's scale the best of 26. This says whether it should be one.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
from torch import Tensor

from moe_pack.calib import RowQuantizer
from moe_pack.formats import MATRICES, ROW_GROUP, Checkpoint, PartFormat, Quantizer, part_format, trellis_format
from moe_pack.formats.codecs import decode_part
from moe_pack.runtime import CheckpointWeights

_TESTS = Path(__file__).parents[1] / "tests"
_ROWS = 64  # of each matrix of an expert
_SHRINKS = torch.linspace(0.5, 1.0, 26)  # of the scale that reaches the largest weight


@dataclass(frozen=True, slots=True)
class Line:
    """A grid's bits a weight, and its squared error as a share."""

    grid: str
    bits: float
    error: float


def symmetric(weights: Tensor, width: int, group: int) -> Tensor:
    """Weights float32 [rows, n] on a grid of `2^width` levels about zero, a best scale for each group."""
    groups, top = weights.view(len(weights), -1, group), (2**width - 1) / 2
    largest = groups.abs().amax(dim=2, keepdim=True) / top
    tried = []
    for shrink in _SHRINKS:
        scale = (largest * shrink).half().float().clamp(min=2.0**-24)
        tried.append(((groups / scale + top).round().clamp(0, 2 * top) - top) * scale)
    errors = torch.stack([(one - groups).square().sum(dim=2) for one in tried])  # [26, rows, groups]
    best = errors.argmin(dim=0)[None, :, :, None].expand(1, *groups.shape)
    return torch.stack(tried).gather(0, best)[0].reshape(weights.shape)


def stored(weights: Tensor, part: PartFormat, quantizer: Quantizer) -> Tensor:
    """Weights as a pack gives them back."""
    num_cols = weights.shape[1]
    return decode_part(part, num_cols, RowQuantizer(part, num_cols, quantizer).encode(weights))


def lines(weights: Tensor, row: int) -> Iterator[Line]:
    """All grids of 2, 3 and 4 bits."""

    def line(grid: str, bits: float, found: Tensor) -> Line:
        return Line(grid, bits, float((found - weights).square().sum() / weights.square().sum()))

    def bits(part: PartFormat) -> float:
        return 8 * part.part_bytes(row) / row

    for width in (2, 3, 4):
        for group in (32, 64, 128):
            part, small = part_format(width, group), part_format(width, group, 8)
            yield line(f"{width} bit g{group}, zeros", bits(part), stored(weights, part, "hqq"))
            yield line(f"{width} bit g{group}, zeros, bytes", bits(small), stored(weights, small, "hqq"))
            yield line(f"{width} bit g{group}, symmetric", width + 16 / group, symmetric(weights, width, group))
        trellis = trellis_format(2 * width, ROW_GROUP)
        yield line(f"{width} bit trellis, row", bits(trellis), stored(weights, trellis, "nearest"))


def expert_rows(model: Path) -> Tensor:
    """Rows of every matrix of every layer's first expert: float32 [rows, d]."""
    checkpoint = Checkpoint(model)
    try:
        weights, rows = CheckpointWeights(checkpoint), []
        for layer_idx in range(len(checkpoint.spec.moe_layers)):
            block = next(iter(weights.expert(layer_idx, 0).blocks()))
            rows += [held[:_ROWS].float() for matrix in MATRICES if (held := getattr(block, matrix)) is not None]
        return torch.cat(rows)
    finally:
        checkpoint.close()


@click.command(help=__doc__)
@click.option("--model", type=click.Path(path_type=Path, exists=True), default=_TESTS / "models" / "tiny-mixtral")
@click.option("--row", default=4096, show_default=True, help="Weights a row, for what scales of a row take.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@torch.inference_mode()
def main(model: Path, row: int, as_json: bool) -> None:
    """Measures and prints."""
    found = list(lines(expert_rows(model), row))
    if as_json:
        click.echo(json.dumps([asdict(line) for line in found]))
        return
    click.echo("grid                          bits/weight   squared error")
    for line in found:
        click.echo(f"{line.grid:28}{line.bits:13.3f}{line.error:16.4f}")


if __name__ == "__main__":
    main()
