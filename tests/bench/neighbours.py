"""Whether sequences that run in one pass have the logits that each has alone, with the dimensions of published models.

    python tests/bench/neighbours.py

A pack has some layers and random weights. Prompts of different lengths and six tokens after each run alone, then in a
batch; the largest difference of a logit has to be 0. Native kernels of the machine's best instruction set compute.
"""

import shutil
from contextlib import closing
from pathlib import Path

import click
import torch
from benchlib import finish, folder_option, json_option, moe_pack, table
from torch import Tensor

from moe_pack.formats import Pack
from moe_pack.runtime.model import Decoder, open_weights, operations_for

MODELS = ("deepseek-v3", "gpt-oss-20b", "qwen3.6-35b-a3b")
LENGTHS, NUM_STEPS, VOCAB, CONTEXT = (9, 14, 11, 20, 17), 6, 4096, 40
CPU = torch.device("cpu")


def largest_difference(pack: Path) -> float:
    """Returns the largest difference of a logit in a batch from the same alone."""
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCAB, (length,), generator=draw).tolist() for length in LENGTHS]
    steps: list[list[int]] = torch.randint(VOCAB, (NUM_STEPS, len(LENGTHS)), generator=draw).tolist()
    with (
        Pack(pack) as opened,
        operations_for(CPU) as operations,
        closing(open_weights(opened, CPU, operations)) as weights,
    ):
        single, batch = Decoder(weights, CONTEXT), Decoder(weights, CONTEXT, num_sequences=len(LENGTHS))
        alone = list[Tensor]()
        for number, prompt in enumerate(prompts):
            single.reset()
            found = [single.next_logits(prompt), *(single.next_logits([step[number]]) for step in steps)]
            alone.append(torch.stack(found))
        firsts = [batch.extend(*each) for each in zip(batch.sequences, prompts, strict=True)]
        rows = [torch.stack(firsts), *(batch.extend_each(batch.sequences, step) for step in steps)]
    return float((torch.stack(rows, dim=1) - torch.stack(alone)).abs().max())


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--model", "models", multiple=True, default=MODELS, show_default=True, help="A name that synth knows.")
@click.option("--layers", default=4, show_default=True, type=click.IntRange(1))
@folder_option
@json_option
def main(models: tuple[str, ...], layers: int, folder: Path, as_json: bool) -> None:
    differences = dict[str, float]()
    folder.mkdir(parents=True, exist_ok=True)
    for model in models:
        pack = folder / f"neighbours-{model}"
        shutil.rmtree(pack, ignore_errors=True)
        bits = ("--selector-bits", 4, "--record-bits", 4, "--dense-bits", 4)
        moe_pack("synth", model, "--layers", layers, "--vocab", VOCAB, *bits, "-o", pack)
        differences[model] = largest_difference(pack)
        shutil.rmtree(pack)
    faults = [f"{model}: logits differ by {difference}" for model, difference in differences.items() if difference]
    text = table(("model", "largest difference"), [(model, f"{each:g}") for model, each in differences.items()])
    finish({"differences": differences}, text, as_json, faults)


if __name__ == "__main__":
    main()
