"""Where the sensitivity stage keeps hidden states: no more in memory with more copies, and none but its own taken."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from models import TinyMixtral
from profiles import SMALLEST, Recorder, random_tokens

from moe_pack.calib.forward import LayerwiseWeights
from moe_pack.calib.profile import ProfileOptions, make_profile
from moe_pack.calib.sensitivity import SensitivityPass
from moe_pack.calib.sensitivity import stage as sensitivity
from moe_pack.formats.commands import Stage
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.model import CheckpointWeights

MODEL = TinyMixtral(num_layers=3, num_experts=4)
IDS = torch.randint(96, (4, 32), generator=torch.Generator().manual_seed(7))
NUM_SEQUENCES = 4 + 2 * 4 + 4  # in layer 0: the original's, the embedding's two copies, the dense matrices' one


def run_pass(folder: Path) -> tuple[list[np.ndarray], list[set[str]]]:
    """All that is measured, and the files each layer's arrays lie in."""
    weights = LayerwiseWeights(CheckpointWeights(Checkpoint(MODEL.write(folder / "m"))))
    limits = np.full((4, 3, 4), 0.1, np.float32)
    stage = SensitivityPass(weights, IDS, "fast", lambda layer_idx: limits, folder / "pass", torch.device("cpu"))
    found, files = [], []
    for layer in range(MODEL.num_layers):
        found += list(stage.layer(layer).arrays().values())
        stage.leave(layer)
        files.append({path.name for path in (folder / "pass").glob("held-*")})
    measured = stage.divergences()
    return [*found, measured.kls, measured.nlls, measured.head], files


def test_what_does_not_fit_in_memory_lies_in_mapped_files_and_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, none = run_pass(tmp_path / "held")
    assert none == [set()] * 3
    monkeypatch.setattr(sensitivity, "ARRAY_BYTES", 2 * 4 * NUM_SEQUENCES * 32 * MODEL.hidden_size)
    monkeypatch.setattr(sensitivity, "DELTA_BYTES", 0)
    found, files = run_pass(tmp_path / "mapped")
    arrays, deltas = {"held-x.bin", "held-inputs.bin"}, {"held-delta-0.bin", "held-delta-1.bin"}  # two copies a layer
    assert files == [deltas, deltas | arrays, deltas | arrays]
    assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))


def test_changes_measured_in_pieces_are_those_measured_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of rounding are scaled by a ratio that the first piece alone gives: those of sparsity are compared."""

    def sparse(folder: Path) -> list[np.ndarray]:
        weights = LayerwiseWeights(CheckpointWeights(Checkpoint(MODEL.write(folder / "m"))))
        limits = np.full((4, 3, 4), 0.1, np.float32)
        stage = SensitivityPass(weights, IDS, "fast", lambda layer_idx: limits, folder / "pass", torch.device("cpu"))
        return [stage.layer(0).sparse, np.asarray(stage.changed_tokens)]

    at_once, all_tokens = sparse(tmp_path / "whole")
    monkeypatch.setattr(sensitivity, "CHANGES_BYTES", 7 * sensitivity.CHANGES_BYTES // int(all_tokens))
    in_pieces, piece_tokens = sparse(tmp_path / "pieces")
    assert 1 <= piece_tokens <= 7
    np.testing.assert_allclose(in_pieces, at_once, rtol=1e-5)


@dataclass
class HiddenFiles(Recorder):
    """Progress that remembers the hidden states last on the disk, and may end a run before a stage."""

    folder: Path = field(kw_only=True)
    stop: str = field(kw_only=True)
    last: dict[str, bytes] = field(default_factory=dict)

    def begin(self, stage: Stage) -> None:
        if stage.name == self.stop:
            raise KeyboardInterrupt

    def advance(self, amount: int, what: str = "") -> None:
        found = {str(path): path.read_bytes() for path in self.folder.rglob("hidden-*")}
        self.last = found or self.last


@pytest.mark.slow
def test_hidden_states_that_statistics_left_are_not_taken_for_those_of_this_stage(
    tmp_path: Path,
) -> None:
    """As a run leaves them that is killed after its last file of statistics, before it removes its hidden states."""
    checkpoint, text = Checkpoint(SMALLEST.write(tmp_path / "m")), random_tokens(1, 16, SMALLEST.vocab_size)
    options = ProfileOptions(keeps_inputs=False)
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    progress = HiddenFiles(folder=killed, stop="sensitivity")
    with pytest.raises(KeyboardInterrupt):
        make_profile(checkpoint, text, killed, options, progress)
    assert len(progress.last) == 1
    for path, raw in progress.last.items():
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_bytes(raw)
    for folder in (killed, whole):
        make_profile(checkpoint, text, folder, options, HiddenFiles(folder=folder, stop="never"))
    checkpoint.close()
    files = {path.name: path.read_bytes() for path in whole.iterdir()}
    assert {path.name: path.read_bytes() for path in killed.iterdir()} == files
