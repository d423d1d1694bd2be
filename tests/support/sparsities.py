"""The sparsity that a pack's own thresholds give on a text."""

import tempfile
from pathlib import Path

import torch

from moe_pack.calib import forward
from moe_pack.calib.evaluate.model_pass import ModelPass, RealizedSparsity
from moe_pack.formats import Pack
from moe_pack.runtime.model import StreamedPackWeights
from support.profiles import Recorder


def realized_sparsity(pack: Pack, tokens: forward.Tokens) -> RealizedSparsity:
    """Measures the share of neurons that do not run on a text with the pack's own thresholds."""
    where = torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        store = forward.ProfileStore(Path(folder), tokens.sha256)
        run = ModelPass(forward.LayerwiseWeights(StreamedPackWeights(pack, where)), tokens, store, "pack", where)
        run.run("sparsity", Recorder())
        found = run.sparsity()
        store.close()
    return found
