"""A conversion killed, starved or interrupted anywhere ends, once resumed, in the bytes of one that never was."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.cases import case
from support.killing import (
    CLAIM,
    JOURNAL,
    OnStep,
    Trial,
    different_files,
    files_in,
    in_memory,
    nothing,
    quick_plan,
    run_scenarios,
)
from support.models import TinyMixtral, pack
from support.profiles import Recorder

from moe_pack.convert import ConversionResult
from moe_pack.convert.pipeline import convert, layout_for
from moe_pack.formats import ConversionError, Quantizer
from moe_pack.formats.base.commands import Stage
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.writer import Step

TABLES = ["config.json", "index.safetensors", "order.safetensors", "source.json", "thresholds.safetensors"]


class StoppedError(Exception):
    """Ends a conversion from within, as Ctrl-C does."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return TinyMixtral().write(tmp_path / "source")


def converted(source: Path, out: Path, on_step: OnStep = nothing) -> ConversionResult:
    checkpoint = Checkpoint(source)
    try:
        return convert(checkpoint, quick_plan(checkpoint), out, 1, on_step=on_step)
    finally:
        checkpoint.close()


def unfinished(source: Path, out: Path) -> Path:
    """A conversion stopped when its first expert is about to be journaled."""
    written: list[str] = []

    def on_step(step: Step) -> None:
        if step.action == "write" and step.path != JOURNAL:
            written.append(step.path)
        # The header comes first in an experts file, the first expert second.
        if step.path == JOURNAL and written.count("experts-000.safetensors") == 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        converted(source, out, on_step)
    return out


def refusal(source: Path, out: Path) -> str:
    """Returns the error of a conversion into a folder that it leaves exactly as it was."""
    before = files_in(out)
    with pytest.raises(ConversionError) as caught:
        converted(source, out)
    assert files_in(out) == before
    return str(caught.value)


def faulty(trials: list[Trial]) -> list[tuple[str, list[str]]]:
    """Trials that did not end in the uninterrupted conversion's bytes, or whose last run did not end at all."""
    return [(t.what, t.different) for t in trials if t.different or t.runs[-1].killed or t.runs[-1].error]


def written_again(trials: list[Trial]) -> set[int]:
    """How many items were written once more after a death, over trials of two runs."""
    num_items = max(trial.runs[0].large_writes for trial in trials)  # some die when all is written
    assert num_items > 10
    return {sum(run.large_writes for run in trial.runs) - num_items for trial in trials}


def assert_one_clear_line(message: str, *parts: str) -> None:
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.fixture(
    scope="module", params=[pytest.param(29, id="every 29th"), pytest.param(1, id="all", marks=pytest.mark.slow)]
)
def scenarios(request: pytest.FixtureRequest) -> dict[str, list[Trial]]:
    names = ("each_step", "torn_writes", "resumed_runs", "many_deaths", "power_cuts", "two_at_once")
    with in_memory() as folder:
        return run_scenarios(names, folder, every=request.param)


@pytest.fixture(scope="module")
def each_step(scenarios: dict[str, list[Trial]]) -> list[Trial]:
    return scenarios["each_step"]


def test_killed_at_any_step_and_resumed_it_writes_the_same_bytes(each_step: list[Trial]) -> None:
    assert [trial.what for trial in each_step if not trial.runs[0].killed] == []
    assert faulty(each_step) == []


def test_the_steps_are_all_kinds_of_change_to_the_disk_and_every_file_is_among_them(each_step: list[Trial]) -> None:
    steps = each_step[-1].runs[0].steps
    assert len(each_step) == len(steps)
    assert {action for action, _ in steps} == {"mkdir", "create", "truncate", "write", "fsync", "rename", "unlink"}
    made = {path for action, path in steps if action in ("create", "rename") and not path.endswith(".tmp")}
    assert made == {"dense.safetensors", "experts-000.safetensors", "manifest.json", JOURNAL, CLAIM, *TABLES}


def test_a_resumed_conversion_writes_again_at_most_the_item_that_was_being_written(each_step: list[Trial]) -> None:
    assert written_again(each_step) == {0, 1}


def test_a_resumed_conversion_says_how_much_was_there(each_step: list[Trial]) -> None:
    first, *_, last = (trial.runs[1] for trial in each_step)
    assert first.resumed_bytes < last.resumed_bytes
    assert [t.what for t in each_step if t.runs[1].resumed_bytes < t.runs[0].done_bytes] == []


def test_killed_while_it_cleans_up_it_is_found_finished(each_step: list[Trial]) -> None:
    finished = [trial.runs[1] for trial in each_step if ("rename", "manifest.json") in trial.runs[0].steps[:-1]]
    assert len(finished) == 4
    assert not any(run.written for run in finished)
    assert {action for run in finished for action, _ in run.steps} == {"unlink", "fsync"}


def test_a_write_torn_by_the_kill_is_made_good(scenarios: dict[str, list[Trial]]) -> None:
    trials = scenarios["torn_writes"]
    assert [trial.what for trial in trials if not trial.runs[0].killed] == []
    assert faulty(trials) == []
    assert any(JOURNAL in trial.what for trial in trials)


def test_killed_again_at_any_step_of_the_resumed_run_it_still_writes_the_same_bytes(
    scenarios: dict[str, list[Trial]],
) -> None:
    trials = scenarios["resumed_runs"]
    assert faulty(trials) == []
    died_at = [trial.runs[1].steps[-1] for trial in trials if trial.runs[1].killed]
    # From the torn line, which it cuts off, to the last cleaning.
    assert ("truncate", JOURNAL) in died_at and ("unlink", CLAIM) in died_at


def test_killed_time_after_time_with_changing_workers_it_still_ends(scenarios: dict[str, list[Trial]]) -> None:
    trials = scenarios["many_deaths"]
    assert faulty(trials) == []
    assert all(len(trial.runs) > 2 for trial in trials)


def test_losing_power_it_loses_at_most_the_item_that_was_being_written(scenarios: dict[str, list[Trial]]) -> None:
    """All that was not synced is lost; it still writes the same bytes."""
    trials = scenarios["power_cuts"]
    assert [trial.what for trial in trials if not trial.runs[0].killed] == []
    assert faulty(trials) == []
    assert written_again(trials) == {0, 1}


def test_a_second_conversion_into_the_folder_says_so_and_leaves_the_first_alone(
    scenarios: dict[str, list[Trial]],
) -> None:
    trials = scenarios["two_at_once"]
    assert len(trials) == 3
    for trial in trials:
        first, second = trial.runs
        assert_one_clear_line(second.error, "out: another conversion is writing in this folder; wait for it or stop it")
        assert second.steps == []
        assert first.written and trial.different == [], trial.what


@pytest.fixture(scope="module")
def small_space(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Trial]]:
    """The scenarios of a disk that is too small, on a tmpfs of 2 MiB.

    It is mounted in a namespace of the command's own, and so goes with it, however it ends.
    """
    if shutil.which("unshare") is None:
        pytest.skip("a small disk needs unshare, of util-linux")
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    script = 'mount -t tmpfs -o size=2m tmpfs "$0" && exec "$@"'
    folder = tmp_path_factory.mktemp("small-disk")
    prefix = ["unshare", "--mount", *root, "sh", "-c", script, str(folder)]
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {tried.stderr.strip()}")
    return run_scenarios(("full_from_the_start", "filling_up"), folder, *prefix)


@pytest.mark.slow
def test_a_disk_too_small_is_refused_before_any_large_write_and_resumes_with_room(
    small_space: dict[str, list[Trial]],
) -> None:
    (trial,) = small_space["full_from_the_start"]
    refused, resumed = trial.runs
    assert_one_clear_line(
        refused.error, "more bytes, the disk has", "free; free some space, then run the same command again"
    )
    assert refused.large_writes == 0
    assert resumed.written
    assert faulty([trial]) == []


def test_a_disk_that_fills_up_at_any_write_stops_the_conversion_which_resumes_with_room(
    small_space: dict[str, list[Trial]],
) -> None:
    trials = small_space["filling_up"]
    assert faulty(trials) == []
    # Where the file's last page had space, the write did not need the disk's.
    stopped = [trial for trial in trials if trial.runs[0].error]
    assert {path for trial in stopped for action, path in [trial.runs[0].steps[-1]] if action == "write"} >= {
        "dense.safetensors",
        "experts-000.safetensors",
        JOURNAL,
        "manifest.json.tmp",
    }
    for trial in stopped:
        at_write, while_full, _ = trial.runs
        assert_one_clear_line(
            at_write.error, "failed (No space left on device); free some space, then run the same command again"
        )
        assert_one_clear_line(while_full.error, "free some space, then run the same command again")


def test_a_finished_pack_is_found_finished_and_nothing_changes(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = converted(source, out)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino, path.read_bytes()) for path in out.iterdir()}
    second = converted(source, out)
    assert (first.written, second.written, first.resumed_bytes) == (True, False, 0)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino, path.read_bytes()) for path in out.iterdir()} == before


class Amounts(Recorder):
    """Progress that keeps stages, and how much was done at once."""

    def __init__(self) -> None:
        super().__init__()
        self.stages: list[Stage] = []
        self.amounts: list[int] = []

    def begin(self, stage: Stage) -> None:
        self.stages.append(stage)

    def advance(self, amount: int, what: str = "", kind: str = "") -> None:
        self.amounts.append(amount)


def test_a_resumed_conversion_has_all_items_but_the_last_ones(source: Path, tmp_path: Path) -> None:
    out = unfinished(source, tmp_path / "out")
    checkpoint = Checkpoint(source)
    items = list(layout_for(checkpoint, quick_plan(checkpoint)).items())
    seen = Amounts()
    ended = convert(checkpoint, quick_plan(checkpoint), out, 1, seen)
    checkpoint.close()
    experts = [item.num_bytes for item in items if item.kind == "expert"]
    total = sum(item.num_bytes for item in items)
    assert ended.resumed_bytes == total - sum(experts)
    assert [(stage.name, stage.total, stage.done) for stage in seen.stages] == [
        ("packing", total, total - sum(experts)),
        ("sealing", 0, 0),
    ]
    assert seen.amounts == experts


def test_a_folder_that_holds_something_else_is_refused(source: Path, new_folder: Callable[[], Path]) -> None:
    other = "out: contains another pack; give another output folder, or remove this one"
    cases: list[tuple[str, Callable[[Path], object], str]] = [
        ("a letter", lambda out: (out / "letters.txt").write_text("dear reader"),
         "out: contains 'letters.txt', which is not part of a conversion; give a new or empty folder"),
        ("other options", lambda out: pack(source, out, width=8), other),
        ("another source", lambda out: converted(TinyMixtral(num_experts=3).write(out.parent / "other"), out), other),
    ]  # fmt: skip
    for name, fill, message in cases:
        with case(name):
            out = new_folder() / "out"
            out.mkdir()
            fill(out)
            assert_one_clear_line(refusal(source, out), message)
    empty = new_folder()
    assert converted(source, empty).written


def test_a_file_in_the_place_of_the_folder_is_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("not a folder")
    with pytest.raises(ConversionError) as caught:
        converted(source, out)
    assert_one_clear_line(str(caught.value), "out: cannot be used as output folder (Not a directory)")
    assert out.read_text() == "not a folder"


def test_an_unfinished_conversion_with_other_options_is_refused(source: Path, tmp_path: Path) -> None:
    out = unfinished(source, tmp_path / "out")
    before = files_in(out)
    with pytest.raises(ConversionError) as caught:
        pack(source, out, width=8)
    assert files_in(out) == before
    assert_one_clear_line(
        str(caught.value), "out: contains an unfinished conversion of another source or with other options", "repeat"
    )


def test_an_unfinished_conversion_whose_source_was_written_again_is_refused(source: Path, tmp_path: Path) -> None:
    out = unfinished(source, tmp_path / "out")
    shard = source / "model.safetensors"
    was = shard.stat()
    os.utime(shard, ns=(was.st_atime_ns, was.st_mtime_ns + 1))
    assert_one_clear_line(refusal(source, out), "out: contains an unfinished conversion of another source")
    os.utime(shard, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert converted(source, out).written


def test_an_unfinished_conversion_whose_source_or_files_have_changed_is_refused(new_folder: Callable[[], Path]) -> None:
    def grow(source: Path, _: Path) -> None:
        shard = source / "model.safetensors"
        was = shard.stat()
        save_file(TinyMixtral().tensors(), shard, {"note": "the same weights, a longer header"})
        os.utime(shard, ns=(was.st_atime_ns, was.st_mtime_ns))
        assert shard.stat().st_size != was.st_size

    other = "out: contains an unfinished conversion of another source"
    cases: list[tuple[str, Callable[[Path, Path], object], str]] = [
        ("another size", grow, other),
        ("another tokenizer", lambda source, _: (source / "tokenizer_config.json").write_text("{}"), other),
        ("a lost file", lambda _, out: (out / "dense.safetensors").unlink(),
         "dense.safetensors was removed from an unfinished conversion"),
        ("a short file", lambda _, out: os.truncate(out / "dense.safetensors", 4096),
         "dense.safetensors has changed its size; remove the folder"),
    ]  # fmt: skip
    for name, change, message in cases:
        with case(name):
            folder = new_folder()
            source = TinyMixtral().write(folder / "source")
            (source / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
            out = unfinished(source, folder / "out")
            change(source, out)
            assert_one_clear_line(refusal(source, out), message)


def test_an_unfinished_file_that_cannot_be_opened_is_one_clear_line(source: Path, tmp_path: Path) -> None:
    out = unfinished(source, tmp_path / "out")
    (out / JOURNAL).unlink()
    (out / JOURNAL).mkdir()  # the superuser may open any file, but no folder for writing
    with pytest.raises(ConversionError) as caught:
        converted(source, out)
    assert_one_clear_line(str(caught.value), JOURNAL)


def test_a_journal_line_of_nothing_but_a_matching_check_is_dropped(source: Path, tmp_path: Path) -> None:
    converted(source, tmp_path / "whole")
    out = unfinished(source, tmp_path / "out")
    with (out / JOURNAL).open("ab") as journal:
        journal.write(b"00000000\n")  # the CRC-32 of no bytes
    assert converted(source, out).written
    assert different_files(files_in(out), files_in(tmp_path / "whole")) == []


# Importing hqq makes torch load modules of its own that use what it now calls deprecated.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("quantizer", ["nearest", "absmax", "hqq"])
def test_any_number_of_workers_writes_the_same_bytes(quantizer: Quantizer, tmp_path: Path) -> None:
    shape = TinyMixtral(num_layers=2, num_experts=3, intermediate_size=80, num_shards=2, dtype=torch.float16)
    source = shape.write(tmp_path / "source")
    for workers in (1, 2, 3):
        pack(source, tmp_path / f"{workers}", dense_width=8, quantizer=quantizer, workers=workers)
    one, two, three = (files_in(tmp_path / f"{workers}") for workers in (1, 2, 3))
    assert different_files(one, two) == []
    assert different_files(one, three) == []
