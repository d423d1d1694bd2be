"""The folder a profile is written to: one writer, one set of options, and nothing of anybody else's is touched."""

import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
from support.profiles import folder_bytes
from support.waiting import HANG_S

from moe_pack.calib.forward import ProfileStore, read_all_arrays
from moe_pack.formats import ConversionError

IDENTITY_FILE = "profile.unfinished.json"


def refusal(folder: Path, identity: str = "one") -> str:
    with pytest.raises(ConversionError) as refused:
        ProfileStore(folder, identity)
    return str(refused.value)


def test_a_new_folder_is_made_and_claimed(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "a" / "b", "one")
    assert sorted(folder_bytes(store.folder)) == [IDENTITY_FILE, "work"]
    store.close()


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    ProfileStore(tmp_path, "one").close()


def test_files_are_written_whole_and_under_their_name_only(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path, "one")
    assert not store.has("x.safetensors")
    for value in (1, 2):
        store.write("x.safetensors", {"x": np.array([value], np.uint32)})
        assert store.has("x.safetensors")
        assert read_all_arrays(tmp_path / "x.safetensors")["x"].tolist() == [value]
    assert sorted(folder_bytes(tmp_path)) == [IDENTITY_FILE, "work", "x.safetensors"]
    store.close()


def test_a_sealed_folder_holds_results_only(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path, "one")
    store.write("x.safetensors", {"x": np.array([1], np.uint32)})
    (store.work / "states").mkdir()
    (store.work / "states" / "hidden").write_bytes(b"1")
    (store.work / "inputs").write_bytes(b"1")
    store.seal(b"sealed")
    store.close()
    held = folder_bytes(tmp_path)
    assert sorted(held) == ["profile.json", "x.safetensors"]
    assert held["profile.json"] == b"sealed"


def test_a_second_writer_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path, "one")
    assert refusal(tmp_path) == f"{tmp_path}: another process is writing a profile here; wait for it, or stop it"
    store.close()
    ProfileStore(tmp_path, "one").close()


def hold(folder: Path, ready: "multiprocessing.synchronize.Event", done: "multiprocessing.synchronize.Event") -> None:
    ProfileStore(folder, "one")
    ready.set()
    done.wait(HANG_S)
    os._exit(1)  # as killed: nothing is closed


def test_another_process_is_refused_until_the_first_has_died(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # the child runs no torch; spawning would import it all again
    ready, done = context.Event(), context.Event()
    child = context.Process(target=hold, args=(tmp_path, ready, done))
    child.start()
    assert ready.wait(HANG_S)
    assert refusal(tmp_path) == f"{tmp_path}: another process is writing a profile here; wait for it, or stop it"
    done.set()
    child.join(HANG_S)
    ProfileStore(tmp_path, "one").close()


def test_an_unfinished_profile_is_gone_on_with_by_the_same_options_only(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path, "one")
    store.write("x.safetensors", {"x": np.array([1], np.uint32)})
    (store.work / "inputs").write_bytes(b"1")
    store.close()
    before = folder_bytes(tmp_path)
    assert refusal(tmp_path, "other") == (
        f"{tmp_path}: contains an unfinished profile of another model, text or options; "
        "repeat that command, or remove the folder"
    )
    store = ProfileStore(tmp_path, "one")
    assert store.has("x.safetensors")
    store.close()
    assert folder_bytes(tmp_path) == before


@pytest.mark.parametrize("name", ["letter.txt", "profile.json", "statistics-000.safetensors"])
def test_a_folder_that_holds_something_else_is_refused_and_left_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "zoo").mkdir()
    before = folder_bytes(tmp_path)
    assert refusal(tmp_path) == f"{tmp_path}: contains {name!r}; give a new or empty folder for the profile"
    assert folder_bytes(tmp_path) == before


def test_a_folder_that_holds_somebodys_folder_called_work_is_refused(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_bytes(b"mine")
    assert refusal(tmp_path) == f"{tmp_path}: contains 'work'; give a new or empty folder for the profile"
    assert (tmp_path / "work" / "thesis.tex").read_bytes() == b"mine"


def test_what_a_refused_writer_locked_is_free_again(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_bytes(b"mine")
    refusal(tmp_path)
    (tmp_path / "letter.txt").unlink()
    ProfileStore(tmp_path, "one").close()


def test_a_run_killed_while_it_claimed_the_folder_is_begun_again(tmp_path: Path) -> None:
    (tmp_path / f"{IDENTITY_FILE}.tmp").write_bytes(b"half")
    ProfileStore(tmp_path, "one").close()


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    folder = tmp_path / "file"
    assert refusal(folder) == f"{folder}: cannot be used as output folder (File exists)"
    folder = tmp_path / "file" / "profile"
    assert refusal(folder) == f"{folder}: cannot be used as output folder (Not a directory)"


def test_a_file_that_cannot_be_written_is_refused_with_what_to_do(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path, "one")
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(ConversionError) as refused:
        store.write("x.safetensors", {})
    assert str(refused.value) == (
        f"{tmp_path}: writing x.safetensors failed (Is a directory); fix this, then run the same command again"
    )
    store.close()
