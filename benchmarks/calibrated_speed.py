"""Seconds that calibrated rounding takes for an expert of Mixtral-8x7B's size, measured on a block of its neurons.

Random normal weights and inputs; one thread, as a worker of conversion has, processor time. What an expert needs once
(moments of its inputs, their factor) counts once, what each block of 1,024 neurons needs 14 times. HQQ, which sees the
weights alone, beside it on as many rows.
"""

import json
import time
from collections.abc import Callable

import click
import torch

from moe_pack.calib import BLOCK_NEURONS, Calibration, ExpertQuantizer, RowQuantizer
from moe_pack.calib.expert_quantizer import ExpertTokens
from moe_pack.formats import MATRICES, ROW_GROUP, ExpertFormat, PartFormat, format_text, part_format, trellis_format
from moe_pack.runtime import NeuronBlock

_FORMATS = (
    *(trellis_format(width, ROW_GROUP) for width in (3, 4, 5, 6, 8)),
    *(part_format(width, 64) for width in (2, 3, 4)),
)


def seconds(call: Callable[[], object]) -> float:
    """Processor time of one call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def measure(d: int, f: int, num_tokens: int) -> dict[str, float]:
    """Seconds an expert by what is done; `once` is part of every calibrated one."""
    generator = torch.Generator().manual_seed(0)
    rows = min(f, BLOCK_NEURONS)
    block = NeuronBlock(*(torch.randn((rows, d), generator=generator) * 0.02 for _ in MATRICES))
    tokens = ExpertTokens(torch.randn((num_tokens, d), generator=generator), torch.ones(num_tokens))
    blocks = f / rows
    calibration = Calibration(tokens, "silu")
    once = seconds(lambda: calibration.runs)

    def calibrated(part: PartFormat) -> float:
        quantizer = ExpertQuantizer(ExpertFormat(part, part, part), calibration, d)
        return once + blocks * seconds(lambda: quantizer.encode(block))

    def plain(part: PartFormat) -> float:
        quantizer = RowQuantizer(part, d, "hqq")
        return blocks * len(MATRICES) * seconds(lambda: quantizer.encode(block.up))

    plain(part_format(4, 64))  # loads hqq
    found = {"once": once, "hqq, 4 bit g64": plain(part_format(4, 64))}
    return found | {f"calibrated, {format_text(part)}": calibrated(part) for part in _FORMATS}


@click.command(help=__doc__)
@click.option("--d", default=4096, show_default=True, help="Hidden size.")
@click.option("--f", default=14336, show_default=True, help="Neurons of an expert.")
@click.option("--tokens", default=2304, show_default=True, help="To calibrate on.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@torch.inference_mode()
def main(d: int, f: int, tokens: int, as_json: bool) -> None:
    """Measures and prints."""
    torch.set_num_threads(1)
    found = measure(d, f, tokens)
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, taken in found.items():
        click.echo(f"{name:36}{taken:8.1f} s an expert")


if __name__ == "__main__":
    main()
