"""What the sensitivity stage holds in memory: a fixed sum, however many copies there are."""

from pathlib import Path

import numpy as np
import pytest
import torch
from models import TinyMixtral

from moe_pack.calib import sensitivity
from moe_pack.calib.held import HeldWeights
from moe_pack.calib.sensitivity import SensitivityPass
from moe_pack.formats import Checkpoint
from moe_pack.runtime import CheckpointWeights

MODEL = TinyMixtral(num_layers=3, num_experts=4)
IDS = torch.randint(96, (4, 32), generator=torch.Generator().manual_seed(7))
NUM_SEQUENCES = 4 + 2 * 4 + 4  # in layer 0: the original's, the embedding's two copies, the dense matrices' one


def run_pass(folder: Path) -> tuple[list[np.ndarray], list[set[str]]]:
    """All that is measured, and the files each layer's arrays lie in."""
    weights = HeldWeights(CheckpointWeights(Checkpoint(MODEL.write(folder / "m"))))
    limits = np.full((4, 3, 4), 0.1, np.float32)
    stage = SensitivityPass(weights, IDS, "fast", lambda layer_idx: limits, folder / "pass", torch.device("cpu"))
    found, files = [], []
    for layer in range(MODEL.num_layers):
        found += list(stage.layer(layer).arrays().values())
        stage.leave(layer)
        files.append({path.name for path in (folder / "pass").glob("held-*")})
    return found + list(stage.divergences()), files


def test_what_does_not_fit_in_memory_lies_in_mapped_files_and_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, none = run_pass(tmp_path / "held")
    assert none == [set()] * 3
    monkeypatch.setattr(sensitivity, "_HELD_BYTES", 2 * 4 * NUM_SEQUENCES * 32 * MODEL.hidden_size)
    monkeypatch.setattr(sensitivity, "_DELTA_BYTES", 0)
    found, files = run_pass(tmp_path / "mapped")
    arrays = {"held-x.bin", "held-inputs.bin"}
    assert files == [{"held-delta-0.bin"}, {"held-delta-0.bin"} | arrays, {"held-delta-0.bin"} | arrays]
    assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))
