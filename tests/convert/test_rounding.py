"""The record of what rounding cost: an expert that is ruined is named by `convert` and by `inspect`."""

import json
from pathlib import Path

import torch
from support.commands import done
from support.models import Tensors, TinyMixtral
from support.profiles import profiled, random_tokens

from moe_pack.convert.account import ROUNDING_FILE, heavy_losses, read_rounding
from moe_pack.formats import Pack

MODEL = TinyMixtral(64, 128, num_layers=2, vocab_size=96)
NAME = "model.layers.1.block_sparse_moe.experts.1.w{}.weight"


def ruin(tensors: Tensors) -> None:
    """Gives each row of one expert's gate and up a weight hundreds of times the others."""
    for number in (1, 3):
        weights = tensors[NAME.format(number)]
        weights[:, 5] = 400 * weights.float().square().mean().sqrt() * torch.sign(weights[:, 5])


def test_a_ruined_expert_is_named_in_the_end_and_by_inspect(tmp_path: Path) -> None:
    source, out = MODEL.write(tmp_path / "source", ruin), tmp_path / "p"
    profile = profiled(source, tmp_path / "profile", random_tokens(6, 32, 96))
    bits = ("--selector-bits", "2", "--record-bits", "2", "--rotate", "off")
    said = done("convert", source, "-o", out, "--profile", profile.folder, *bits).stdout
    with Pack(out) as pack:
        rounding = read_rounding(pack)
        assert rounding is not None and all(loss is not None for layer in rounding.experts for loss in layer)
        heavy = heavy_losses(pack, rounding)
        assert (1, 1) in [(one.layer, one.expert) for one in heavy]
    shown = done("inspect", out).stdout
    for text in (said, shown):
        assert "much of the output; give" in text and "or convert with --rotate on" in text
        assert "  layer 1 expert 1: squared error " in text
    assert "  layer 0: median " in shown
    facts = json.loads(done("inspect", out, "--json").stdout)
    assert len(facts["heavy_losses"]) == len(heavy) and len(facts["rounding"][1]) == len(rounding.experts[1])
    (out / ROUNDING_FILE).unlink()
    assert "rounding: not measured" in done("inspect", out).stdout
