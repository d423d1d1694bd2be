"""What `moe-run --device cuda --numerics fast` loses, on the demo model: KL of prompts computed in bfloat16.

    python tests/bench/gpu_numerics.py

The GPU's engine computes prompts of a text that the model has not seen, with everything resident. Without a GPU,
Triton's interpreter runs its kernels, with products of bfloat16 corrected (tests/support/interpreted_bf16.py): that
shows the rounding, and nothing of the speed.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from pathlib import Path

import click
import torch
from benchlib import BOOK, finish, folder_option, json_option, table
from benchlib.packs import make_demo
from support.gpu_runs import CPU, GpuRun, gpu_decoder, reference_logits
from support.interpreted_bf16 import correct_bf16
from torch import Tensor

from moe_pack.formats import Pack
from moe_pack.runtime import Text


def logits_of(folder: Path, ids: list[int], is_fast: bool) -> Tensor:
    """Returns the logits after each token of a prompt, float32 [T, V], by the GPU's engine."""
    device = CPU if os.environ["TRITON_INTERPRET"] == "1" else torch.device("cuda")
    run = GpuRun(1.0, chunk_tokens=len(ids), context_tokens=len(ids), is_fast=is_fast)
    with gpu_decoder(folder, run, device) as decoder:
        return decoder.logits(ids)


@click.command(help=__doc__)
@folder_option
@click.option("--tokens", default=256, show_default=True, type=click.IntRange(2), help="Of the prompt.")
@json_option
def main(folder: Path, tokens: int, as_json: bool) -> None:
    """Prints, for both modes, KL from plain torch on the CPU, and the largest difference of a logit."""
    correct_bf16()
    folder.mkdir(parents=True, exist_ok=True)
    packed = make_demo(folder, 0.8)
    with Pack(packed) as pack:
        ids = Text(pack).encode(BOOK.read_text("utf-8")[: 20 * tokens])[:tokens]
    expected, rows = reference_logits(packed, ids), []
    known = expected.double().log_softmax(dim=1)
    for name, is_fast in (("strict", False), ("fast", True)):
        found = logits_of(packed, ids, is_fast).cpu()
        kl = (known.exp() * (known - found.double().log_softmax(dim=1))).sum(dim=1)
        same = float((found.argmax(dim=1) == expected.argmax(dim=1)).double().mean())
        largest = float((found - expected).abs().max())
        rows.append((name, f"{kl.mean():.2e}", f"{kl.max():.2e}", f"{same:.1%}", f"{largest:.2e}"))
    header = ("numerics", "KL, nats", "largest KL", "same likeliest token", "largest difference of a logit")
    finish({"header": header, "rows": rows}, table(header, rows), as_json)


if __name__ == "__main__":
    main()
