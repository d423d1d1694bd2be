"""Where the sensitivity stage keeps hidden states: no more in memory with more copies, and none but its own taken."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.profiles import SMALLEST, Recorder, random_tokens

from moe_pack.calib.profile import ProfileOptions, make_profile
from moe_pack.formats.base.commands import Stage
from moe_pack.formats.families import Checkpoint


@dataclass
class HiddenFiles(Recorder):
    """Progress that remembers the hidden states last on the disk, and may end a run before a stage."""

    folder: Path = field(kw_only=True)
    stop: str = field(kw_only=True)
    last: dict[str, bytes] = field(default_factory=dict)

    def begin(self, stage: Stage) -> None:
        if stage.name == self.stop:
            raise KeyboardInterrupt

    def advance(self, amount: int, what: str = "", kind: str = "") -> None:
        found = {str(path): path.read_bytes() for path in self.folder.rglob("hidden-*")}
        self.last = found or self.last


@pytest.mark.slow
def test_hidden_states_that_statistics_left_are_not_taken_for_those_of_this_stage(tmp_path: Path) -> None:
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
