"""The loss of `moe-run --device cuda` against plain torch: KL of a prompt with --numerics exact and fast.

    python tests/bench/gpu_numerics.py
    python tests/bench/gpu_numerics.py --model small-mixtral/ --tokens 512

The GPU's engine computes a text that the model has not seen, with everything resident. Without a GPU, Triton's
interpreter runs its kernels: that shows the rounding, and nothing of the speed. The demo model's pack has four bits and
80% of the neurons do not run; other models are packed in four bits.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from pathlib import Path

import click
import torch
from benchlib import BOOK, finish, folder_option, json_option, moe_pack, table
from benchlib.packs import make_demo
from support.gpu_runs import CPU, GpuRun, gpu_decoder, reference_logits
from torch import Tensor

from moe_pack.formats import Pack
from moe_pack.runtime import Text

_HEADER = ("model", "numerics", "KL, nats", "largest KL", "same likeliest token", "largest difference of a logit")


def logits_of(folder: Path, ids: list[int], is_fast: bool) -> Tensor:
    """Returns the logits after each token of a prompt, float32 [T, V], by the GPU's engine."""
    device = CPU if os.environ["TRITON_INTERPRET"] == "1" else torch.device("cuda")
    run = GpuRun(1.0, chunk_tokens=len(ids), context_tokens=len(ids), is_fast=is_fast)
    with gpu_decoder(folder, run, device) as decoder:
        return decoder.logits(ids).cpu()


def compared(name: str, packed: Path, num_tokens: int) -> list[tuple[str, ...]]:
    """Returns the table's rows of a pack, one for each way of rounding."""
    with Pack(packed) as pack:
        ids = Text(pack).encode(BOOK.read_text("utf-8")[: 20 * num_tokens])[:num_tokens]
    expected, rows = reference_logits(packed, ids), list[tuple[str, ...]]()
    known = expected.double().log_softmax(dim=1)
    for mode in ("exact", "fast"):
        found = logits_of(packed, ids, mode == "fast")
        kl = (known.exp() * (known - found.double().log_softmax(dim=1))).sum(dim=1)
        same = float((found.argmax(dim=1) == expected.argmax(dim=1)).double().mean())
        largest = float((found - expected).abs().max())
        rows.append((name, mode, f"{kl.mean():.2e}", f"{kl.max():.2e}", f"{same:.1%}", f"{largest:.2e}"))
    return rows


@click.command(help=__doc__)
@folder_option
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="A checkpoint.")
@click.option("--tokens", default=256, show_default=True, type=click.IntRange(2), help="Of the prompt.")
@json_option
def main(folder: Path, model: Path | None, tokens: int, as_json: bool) -> None:
    """Prints, for both modes, KL from plain torch on the CPU, and the largest difference of a logit."""
    folder.mkdir(parents=True, exist_ok=True)
    if model is None:
        name, packed = "demo", make_demo(folder, 0.8)
    else:
        name, packed = model.name, folder / f"{model.name}-4-bit"
        if not packed.exists():
            bits = ("--selector-bits", 4, "--record-bits", 4, "--dense-bits", "source")
            moe_pack("convert", model, *bits, "-o", packed)
    rows = compared(name, packed, tokens)
    finish({"header": _HEADER, "rows": rows}, table(_HEADER, rows), as_json)


if __name__ == "__main__":
    main()
