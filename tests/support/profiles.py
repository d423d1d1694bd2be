"""Profiles for tests: random text, who watches, folders compared byte for byte, and profile.json sealed by hand."""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack.calib.forward import Tokens
from moe_pack.calib.profile import Profile, ProfileOptions, make_profile
from moe_pack.formats.base.commands import Stage
from moe_pack.formats.families import Checkpoint
from support.models import TinyMixtral

QUICK = ProfileOptions("none")
SMALLEST = TinyMixtral(intermediate_size=16, num_layers=2, num_experts=3, vocab_size=32)


class StoppedError(Exception):
    """What a recorder raises to end a run."""


@dataclass
class Recorder:
    """Progress that writes down all it is told, and stops the run at one of these events.

    `done`: what all stages add up to, `by_kind` by kinds of work.   `lines`: what was said.
    """

    stop_at: int | None = None
    events: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    done: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)

    def begin(self, stage: Stage) -> None:
        assert stage.total >= 0 and stage.seconds >= 0
        self._event(stage.name)

    def advance(self, amount: int, what: str = "", kind: str = "") -> None:
        assert amount >= 0
        self.done += amount
        self.by_kind[kind] += amount
        self._event(what)

    def end(self) -> None:
        pass

    def say(self, line: str) -> None:
        self.lines.append(line)

    def _event(self, what: str) -> None:
        self.events.append(what)
        if len(self.events) - 1 == self.stop_at:
            raise StoppedError(what)


class StopsBefore(Recorder):
    """Progress that stops the run when a stage begins."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self._stage = stage

    def begin(self, stage: Stage) -> None:
        if stage.name == self._stage:
            raise StoppedError(stage.name)


def tokens_of(sequences: NDArray[np.int32]) -> Tokens:
    """These sequences as a text."""
    return Tokens("made up", sequences, hashlib.sha256(sequences.astype("<i4").tobytes()).hexdigest(), ())


def random_tokens(num_sequences: int, sequence_length: int, vocab_size: int, seed: int = 0) -> Tokens:
    """A text of random tokens."""
    drawn = np.random.default_rng(seed).integers(0, vocab_size, (num_sequences, sequence_length))
    return tokens_of(drawn.astype(np.int32))


def profiled(
    source: Path, folder: Path, tokens: Tokens, options: ProfileOptions = QUICK, progress: Recorder | None = None
) -> Profile:
    """Profiles the checkpoint in a folder."""
    checkpoint = Checkpoint(source)
    try:
        return make_profile(checkpoint, tokens, folder, options, progress or Recorder())
    finally:
        checkpoint.close()


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Every file under a folder by its relative path; a folder is an entry too."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"a folder"
        for path in sorted(folder.rglob("*"))
    }


def copied(folder: Path, to: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(folder, to)
    return to


def reseal(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes profile.json and gives it the digest it then needs, by hand: no code shared with what is tested."""
    path = folder / "profile.json"
    values = json.loads(path.read_text())
    change(values)
    for entry in values.get("files", []):
        if (folder / entry["name"]).exists():
            raw = (folder / entry["name"]).read_bytes()
            entry |= {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    values["sha256"] = ""
    values["sha256"] = hashlib.sha256(_text(values)).hexdigest()
    path.write_bytes(_text(values))


def _text(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=1, sort_keys=True) + "\n").encode()
