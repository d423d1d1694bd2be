"""A pack's thresholds rewritten, killed at any step or not: all old or all new, and nothing else touched."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from numpy.typing import NDArray
from support.cases import assert_each, line_of
from support.killing import Drive, Files, different_files, files_in, in_memory, nothing
from support.models import TinyMixtral, pack
from support.reseal import array_tensor, edit_array, edit_byte, manifest_of, reseal, write_tensors
from support.second_reader import SecondReader

from moe_pack.formats import ConversionError, Pack, PackError, PlanError
from moe_pack.formats.pack.reader import audit
from moe_pack.formats.pack.writer import Step, rewrite_thresholds

THRESHOLDS, NEW, MANIFEST = "thresholds.safetensors", "thresholds.safetensors.new", "manifest.json"
MEASURED = np.array([[0.25, 0.0], [1e-3, 3.5]], np.float32)  # of the sound pack's two layers of two experts
OTHERS = MEASURED + 1

Thresholds = NDArray[np.float32]
OnStep = Callable[[Step], None]


class StoppedError(Exception):
    """Ends a rewrite from within: what was not done before is not done after."""


def stop() -> NoReturn:
    raise StoppedError


def stops_at(number: int, before: OnStep = nothing) -> OnStep:
    def on_step(step: Step) -> None:
        if step.number == number:
            before(step)
            stop()

    return on_step


@pytest.fixture
def packed(sound_pack: Path) -> Iterator[Path]:
    with in_memory() as folder:
        yield Path(shutil.copytree(sound_pack, folder / "pack"))


def restore(folder: Path, files: Files) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    for name, raw in files.items():
        (folder / name).write_bytes(raw)


def resealed(folder: Path, thresholds: Thresholds) -> Files:
    copy = folder.parent / "resealed"
    shutil.copytree(folder, copy)
    edit_array(copy / THRESHOLDS, "threshold", lambda held: np.copyto(held, thresholds))
    reseal(copy)
    files = files_in(copy)
    shutil.rmtree(copy)
    return files


def steps_of(folder: Path, thresholds: Thresholds) -> list[Step]:
    steps: list[Step] = []
    rewrite_thresholds(folder, thresholds, steps.append)
    return steps


def in_between(folder: Path, thresholds: Thresholds = MEASURED) -> Path:
    """A rewrite stopped when the manifest has the new thresholds and their place has not."""
    with pytest.raises(StoppedError):
        rewrite_thresholds(
            folder, thresholds, lambda step: stop() if (step.action, step.path) == ("rename", THRESHOLDS) else None
        )
    assert (folder / NEW).exists()
    return folder


def assert_pack_of(folder: Path, thresholds: dict[str, Thresholds]) -> None:
    """Both readers find one of these thresholds, each under the root digest it belongs to, and no fault anywhere."""
    with Pack(folder) as opened:
        audit(opened)
        expected = thresholds[opened.manifest.root]
        np.testing.assert_array_equal(opened.thresholds, expected)
    second = SecondReader(folder)
    np.testing.assert_array_equal(second.thresholds, expected)
    assert second.manifest["root"] == opened.manifest.root


def test_the_pack_then_has_the_thresholds_and_a_root_digest_of_its_own(folder: Path) -> None:
    def facts() -> dict[str, tuple[int, int]]:
        rest = [path for path in folder.iterdir() if path.name not in (THRESHOLDS, MANIFEST)]
        return {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in rest}

    files, before, others, expected = files_in(folder), manifest_of(folder), facts(), resealed(folder, MEASURED)
    root = rewrite_thresholds(folder, MEASURED)
    after = manifest_of(folder)
    assert root == after["root"] != before["root"] and after["conversion"] == before["conversion"]
    assert_pack_of(folder, {root: MEASURED})
    assert different_files(files_in(folder), expected) == [] and facts() == others
    # What the pack has already changes nothing; thresholds can be rewritten back.
    assert steps_of(folder, MEASURED) == [] and rewrite_thresholds(folder, MEASURED) == root
    rewrite_thresholds(folder, np.zeros((2, 2), np.float32))
    assert different_files(files_in(folder), files) == []


def test_a_pack_of_one_expert_with_one_neuron_is_rewritten(tmp_path: Path) -> None:
    pack(TinyMixtral(num_experts=1, intermediate_size=1).write(tmp_path / "source"), tmp_path / "pack")
    root = rewrite_thresholds(tmp_path / "pack", np.full((1, 1), 0.5, np.float32))
    assert_pack_of(tmp_path / "pack", {root: np.full((1, 1), 0.5, np.float32)})


def test_thresholds_laid_out_by_another_program_are_replaced_by_ours(folder: Path) -> None:
    expected = resealed(folder, MEASURED)
    write_tensors(folder / THRESHOLDS, {"threshold": array_tensor("F32", np.ones((2, 2)))})  # without any padding
    reseal(folder)
    rewrite_thresholds(folder, MEASURED)
    assert different_files(files_in(folder), expected) == []


# --- killed


def test_killed_at_any_step_the_pack_has_all_old_or_all_new_thresholds_and_the_same_call_ends(packed: Path) -> None:
    old = rewrite_thresholds(packed, OTHERS)
    start, expected = files_in(packed), resealed(packed, MEASURED)
    steps = steps_of(packed, MEASURED)
    assert {step.action for step in steps} == {"create", "write", "fsync", "rename"}
    new = rewrite_thresholds(packed, MEASURED)
    found = []
    for step in steps:
        restore(packed, start)
        with pytest.raises(StoppedError):
            rewrite_thresholds(packed, MEASURED, stops_at(step.number))
        assert_pack_of(packed, {old: OTHERS, new: MEASURED})
        found.append(manifest_of(packed)["root"])
        assert rewrite_thresholds(packed, MEASURED) == new
        assert different_files(files_in(packed), expected) == [], step
    committed = 1 + next(i for i, step in enumerate(steps) if (step.action, step.path) == ("rename", MANIFEST))
    assert found == [old] * committed + [new] * (len(steps) - committed)


def test_killed_within_any_write_the_pack_has_its_old_thresholds_and_the_same_call_ends(packed: Path) -> None:
    old = rewrite_thresholds(packed, OTHERS)
    start, expected = files_in(packed), resealed(packed, MEASURED)
    writes = [step for step in steps_of(packed, MEASURED) if step.action == "write"]
    assert [step.path for step in writes] == [NEW, f"{MANIFEST}.tmp"]
    for step in writes:
        for made in (expected[step.path.removesuffix(".new").removesuffix(".tmp")][:100], b"", bytes(500)):
            restore(packed, start)

            def torn(step: Step, made: bytes = made) -> None:
                (packed / step.path).write_bytes(made)

            with pytest.raises(StoppedError):
                rewrite_thresholds(packed, MEASURED, stops_at(step.number, torn))
            assert_pack_of(packed, {old: OTHERS})
            rewrite_thresholds(packed, MEASURED)
            assert different_files(files_in(packed), expected) == [], step


# A disk keeps both changes of name that a rename makes, or neither: "removed", which keeps one, is not for renames.
@pytest.mark.parametrize("names", ["synced", "ahead", "replaced"])
def test_losing_power_at_any_step_the_pack_is_whole_and_the_same_call_ends(packed: Path, names: str) -> None:
    old = rewrite_thresholds(packed, OTHERS)
    start, expected = files_in(packed), resealed(packed, MEASURED)
    new = rewrite_thresholds(packed, MEASURED)
    found = set()
    restore(packed, start)
    for step in steps_of(packed, MEASURED):
        restore(packed, start)
        with pytest.raises(StoppedError):
            rewrite_thresholds(packed, MEASURED, Drive(packed, step.number, names, stop))
        assert_pack_of(packed, {old: OTHERS, new: MEASURED})
        found.add(manifest_of(packed)["root"])
        assert rewrite_thresholds(packed, MEASURED) == new
        assert different_files(files_in(packed), expected) == [], step
    assert found == {old, new}


def test_killed_again_while_it_ends_what_was_left_the_pack_is_whole(packed: Path) -> None:
    left = files_in(in_between(packed))
    root = manifest_of(packed)["root"]
    steps = steps_of(packed, MEASURED)
    assert [(step.action, step.path) for step in steps] == [("rename", THRESHOLDS), ("fsync", ".")]
    for step in steps:
        restore(packed, left)
        with pytest.raises(StoppedError):
            rewrite_thresholds(packed, MEASURED, stops_at(step.number))
        assert_pack_of(packed, {root: MEASURED})


@pytest.mark.parametrize("thresholds", [OTHERS, np.zeros((2, 2), np.float32)], ids=["others", "the old ones"])
def test_killed_at_any_step_another_call_ends_as_if_it_were_the_first(packed: Path, thresholds: Thresholds) -> None:
    start, expected = files_in(packed), resealed(packed, thresholds)
    for step in steps_of(packed, MEASURED):
        restore(packed, start)
        with pytest.raises(StoppedError):
            rewrite_thresholds(packed, MEASURED, stops_at(step.number))
        rewrite_thresholds(packed, thresholds)
        assert different_files(files_in(packed), expected) == [], step


def test_a_damaged_byte_of_the_new_thresholds_is_refused_until_they_are_in_place(packed: Path) -> None:
    edit_byte(in_between(packed) / NEW, -60)
    message = r"^thresholds\.safetensors: SHA-256 does not match the manifest's; the file is damaged$"
    with pytest.raises(PackError, match=message):
        Pack(packed)
    before = files_in(packed)
    with pytest.raises(PackError, match=message):
        rewrite_thresholds(packed, OTHERS)
    assert files_in(packed) == before


@pytest.mark.parametrize("raw", [b"", b"noise", bytes(1 << 20)])
def test_a_file_beside_the_thresholds_that_nothing_lists_is_not_looked_at(folder: Path, raw: bytes) -> None:
    (folder / NEW).write_bytes(raw)
    assert_pack_of(folder, {manifest_of(folder)["root"]: np.zeros((2, 2), np.float32)})
    rewrite_thresholds(folder, np.zeros((2, 2), np.float32))
    assert not (folder / NEW).exists()


def test_a_folder_beside_the_thresholds_is_not_looked_at(folder: Path) -> None:
    (folder / NEW).mkdir()
    edit_byte(folder / THRESHOLDS, -60)
    with pytest.raises(PackError, match=r"^thresholds\.safetensors: SHA-256 does not match"):
        Pack(folder)


# --- conversions


def test_the_same_conversion_finds_a_pack_with_other_thresholds_finished(packed: Path, sound_pack: Path) -> None:
    rewrite_thresholds(packed, MEASURED)
    before = files_in(packed)
    assert not pack(sound_pack.parent / "source", packed).written
    assert different_files(files_in(packed), before) == []


def test_the_same_conversion_ends_a_rewrite_that_was_killed(packed: Path, sound_pack: Path) -> None:
    expected = resealed(packed, MEASURED)
    in_between(packed)
    assert not pack(sound_pack.parent / "source", packed).written
    assert different_files(files_in(packed), expected) == []


def test_another_conversion_leaves_a_rewrite_that_was_killed_as_it_is(packed: Path, sound_pack: Path) -> None:
    before = files_in(in_between(packed))
    with pytest.raises(ConversionError, match="contains another pack"):
        pack(sound_pack.parent / "source", packed, width=8)
    assert files_in(packed) == before


def test_a_second_rewrite_and_a_conversion_are_refused_while_one_is_at_work(packed: Path, sound_pack: Path) -> None:
    refused: list[str] = []

    def meanwhile(step: Step) -> None:
        if step.number > 1:
            return
        with pytest.raises(ConversionError) as second:
            rewrite_thresholds(packed, OTHERS)
        with pytest.raises(ConversionError, match="another conversion is writing in this folder"):
            pack(sound_pack.parent / "source", packed)
        refused.append(str(second.value))

    root = rewrite_thresholds(packed, MEASURED, meanwhile)
    assert refused == [
        f"{packed}: a conversion or another change of thresholds is writing in this folder; wait for it or stop it"
    ]
    assert_pack_of(packed, {root: MEASURED})
    assert rewrite_thresholds(packed, OTHERS) != root  # the lock is given back


# --- refused


def test_thresholds_that_are_no_numbers_from_0_up_or_of_another_shape_are_refused(folder: Path) -> None:
    def changed(value: float) -> Thresholds:
        thresholds = MEASURED.copy()
        thresholds[1, 0] = value
        return thresholds

    values = [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf"), (-1e-30, "-1.0000000031710769e-30")]
    expected, before = "expected a number of 0 or more", files_in(folder)
    cases = [(changed(value), f"threshold of layer 1 expert 0 is {text}, {expected}") for value, text in values]
    for shape in [(2, 3), (3, 2), (4,), (2, 2, 1), ()]:
        zeros = np.zeros(shape, np.float32)
        cases.append((zeros, f"shape {list(shape)}, expected [2, 2] (MoE layers, experts)"))

    def found(thresholds: Thresholds) -> str:
        message = line_of(PlanError, lambda: rewrite_thresholds(folder, thresholds))
        assert files_in(folder) == before
        return message

    assert_each(cases, found, "thresholds: ")


def test_a_threshold_from_0_to_the_largest_float_is_taken(folder: Path) -> None:
    for value in (0.0, 1e-45, 3.4028235e38):
        thresholds = np.full((2, 2), value, np.float32)
        assert_pack_of(folder, {rewrite_thresholds(folder, thresholds): thresholds})


def test_a_folder_without_a_pack_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / MANIFEST).unlink()
    with pytest.raises(PackError, match=r"found no manifest\.json; this is not a pack"):
        rewrite_thresholds(folder, MEASURED)
    with pytest.raises(ConversionError, match=r"none: cannot be used as output folder \(No such file"):
        rewrite_thresholds(tmp_path / "none", MEASURED)
    assert not (tmp_path / "none").exists()


def test_a_drive_that_refuses_a_step_is_one_clear_line(folder: Path) -> None:
    (folder / NEW).mkdir()  # the superuser may write any file, but no folder
    message = f"{folder}: create {NEW} failed ({os.strerror(21)}); fix this, then run the same command again"
    assert line_of(ConversionError, lambda: rewrite_thresholds(folder, MEASURED)) == message
