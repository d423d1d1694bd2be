"""`make gpu-check` without a GPU: parts in processes of their own, files whole after every row, rehearsals marked."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from gpu_check import Ended, main, run_part, table

PART = """
import time
from dataclasses import dataclass

@dataclass(frozen=True, slots=True)
class Row:
    number: int

def fails():
    raise ValueError("this section fails")

def run(results, clock):
    results.add(Row(1))
    results.section("bad", fails)
    results.add(Row(2))
    time.sleep({seconds})
"""


def made(folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """A part of two rows and a section that fails between them; then it takes a while."""
    (folder / "gpu_made.py").write_text(PART.format(seconds=seconds))
    monkeypatch.setenv("PYTHONPATH", str(folder))


def read(path: Path) -> dict[str, Any]:
    whole: dict[str, Any] = json.loads(path.read_text())
    return whole


@pytest.mark.slow  # it takes as long as the part may
def test_a_part_that_takes_too_long_is_ended_and_leaves_whole_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path, monkeypatch, 600)
    # Long enough for torch to be imported on a busy machine.
    ended = run_part("made", tmp_path / "made.json", 30, is_rehearsal=True)
    assert (ended.state, ended.num_rows) == ("stopped after 30 s", 2)
    assert read(tmp_path / "made.json")["state"] == "stopped after 30 s"


def test_a_section_that_fails_is_told_and_the_next_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path, monkeypatch, 0)
    ended = run_part("made", tmp_path / "made.json", 100, is_rehearsal=True)
    whole = read(tmp_path / "made.json")
    assert [row["number"] for row in whole["rows"]] == [1, 2]
    assert whole["state"] == ended.state == "failed"
    assert whole["errors"]["bad"].endswith("ValueError: this section fails")
    assert table([ended])[-1] == "made, bad: ValueError: this section fails"


def test_a_part_is_not_begun_when_no_time_is_left(tmp_path: Path) -> None:
    ended = run_part("machine", tmp_path / "machine.json", 1, is_rehearsal=True)
    assert ended == Ended("machine", tmp_path / "machine.json", "not begun: no time left", 0, 0.0, {})
    assert not (tmp_path / "machine.json").exists()


def test_a_rehearsal_is_marked_and_names_no_card(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["--rehearse", "--part", "machine", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "its times mean nothing" in done.stderr
    (path,) = tmp_path.glob("gpu-none-*-machine.json")
    whole = read(path)
    assert whole["rehearsal"] is True
    assert whole["card"] is None
    assert whole["state"] == "done"
    assert {row["kind"] for row in whole["rows"]} == {"CopyRate", "PageLock", "LaunchCost"}


def test_an_unknown_part_is_refused_with_the_names_of_all() -> None:
    done = CliRunner().invoke(main, ["--part", "machine,engine"])
    assert done.exit_code == 2
    assert "--part: found engine, expected some of tests, machine, kernels" in done.stderr
