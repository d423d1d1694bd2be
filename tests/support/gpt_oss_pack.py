"""A tiny gpt-oss as its checkpoints come, packed as it is: experts in MXFP4, sinks, a window that a ring keeps."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from moe_pack.convert.kept import keep_source
from moe_pack.convert.pipeline import convert
from moe_pack.formats import Selector, part_format, uniform_plan
from moe_pack.formats.families import Checkpoint
from support.coded import MXFP4_CONFIG, put_gpt_oss_into_blocks

WINDOW, CHUNK = 2, 2  # a ring of three places
IDS = [(37 * i + 5) % 96 for i in range(6)]  # goes round it twice
PROMPT = 4  # two passes
CONFIG = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "intermediate_size": 64,
    "num_local_experts": 3,
}
FOUR = part_format(4, 64)


def packed_gpt_oss(folder: Path, selector: Selector) -> Path:
    """A pack that keeps what its source has in MXFP4."""
    from support.families import Tiny, write  # which imports transformers

    source = write(Tiny("gpt_oss", "of two layers, one with a window", CONFIG), folder / "source")
    tensors = load_file(source / "model.safetensors")
    put_gpt_oss_into_blocks(tensors, num_layers=2, num_experts=3, f=64, d=64)
    save_file(tensors, source / "model.safetensors")
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(values | {"quantization_config": MXFP4_CONFIG}))
    checkpoint = Checkpoint(source)
    plan = uniform_plan(checkpoint.spec, selector, FOUR, FOUR, quantizer="nearest")
    convert(checkpoint, keep_source(checkpoint, plan, "source", "source", None), folder / "packed", 1)
    checkpoint.close()
    return folder / "packed"
