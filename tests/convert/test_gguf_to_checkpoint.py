"""transformers loads what is exported of a pack that was made of a GGUF file, and computes the pack's logits."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from support.families import oracle
from support.golden_gguf import GOLDEN, IDS

from moe_pack.convert.export import export_plain
from moe_pack.convert.pipeline import convert
from moe_pack.formats import BF16, Pack, uniform_plan
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.gguf import GgufFiles
from moe_pack.runtime.model import Decoder, PackWeights

# transformers has no class for DeepSeek-MoE's first model, and reads Step-3.5 only as the text of Step-3.7.
NAMES = sorted(path.stem for path in GOLDEN.glob("*.gguf") if path.stem not in ("deepseek", "step3p5"))
WITH_PICTURES = {"minimax_m3_vl", "qwen3_vl_moe"}  # classes of transformers that take seconds to load


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in WITH_PICTURES)) for name in NAMES]
)
def test_transformers_loads_the_export_of_a_gguf_file(name: str, tmp_path: Path) -> None:
    with closing(Checkpoint(GgufFiles(GOLDEN / f"{name}.gguf"))) as checkpoint:
        plan = uniform_plan(checkpoint.spec, "none", BF16, BF16, quantizer="nearest")
        convert(checkpoint, plan, tmp_path / "pack", 1)
    with Pack(tmp_path / "pack") as pack:
        export_plain(pack, tmp_path / "out", "f32")
        weights = PackWeights(pack, torch.device("cpu"))
        expected = Decoder(weights, 128).logits(IDS)
        weights.close()
    _without_padding(tmp_path / "out" / "config.json")
    found = oracle(tmp_path / "out")(IDS).detach()
    assert (found - expected).abs().max() < 2e-5
    assert np.abs(found.numpy() - np.load(GOLDEN / f"{name}.npz")["logits"]).max() < 0.03  # matrices have 16 bits


def _without_padding(path: Path) -> None:
    """Says that no token pads: the published model's, which classes take without it, is none of these few."""
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"pad_token_id": None}))
