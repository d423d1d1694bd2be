"""The folder a profile is written to: one writer, one set of options, and nothing of anybody else's is touched."""

import math
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load as load_numpy
from safetensors.torch import load as load_torch
from safetensors.torch import save_file
from support.cases import case
from support.profiles import folder_bytes
from support.waiting import HANG_S

from moe_pack.calib.forward import ProfileStore, read_all_arrays
from moe_pack.calib.forward.store import ArrayRule, check_arrays, write_arrays
from moe_pack.formats import ConversionError, PackError

IDENTITY_FILE = "profile.unfinished.json"


def refusal(folder: Path, identity: str = "one") -> str:
    with pytest.raises(ConversionError) as refused:
        ProfileStore(folder, identity)
    return str(refused.value)


def test_a_new_folder_is_made_and_claimed(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "a" / "b", "one")
    assert sorted(folder_bytes(store.folder)) == [IDENTITY_FILE, "work"]
    store.close()


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


ARRAYS: dict[str, NDArray[Any]] = {
    "u8": np.arange(7, dtype=np.uint8),
    "u16": np.arange(6, dtype=np.uint16).reshape(2, 3),
    "u32": np.array(2**32 - 1, np.uint32),
    "i64": np.array([-(2**40)], np.int64),
    "f16": np.array([0.5, -np.inf], np.float16),
    "f32": np.array([[1e-40, np.nan]], np.float32),
    "f64": np.array([1 / 3]),
    "no rows": np.zeros((0, 5), np.float32),
    "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
}


def written(folder: Path, raw: bytes) -> Path:
    path = folder / "profile.safetensors"
    path.write_bytes(raw)
    return path


def test_we_and_the_safetensors_package_read_every_array_as_it_was(tmp_path: Path) -> None:
    raw = write_arrays(ARRAYS)
    assert raw == write_arrays({name: array.copy() for name, array in ARRAYS.items()})
    ours, theirs = read_all_arrays(written(tmp_path, raw)), load_numpy(raw)
    assert sorted(ours) == sorted(ARRAYS)
    for found in (ours, theirs):
        for name, array in ARRAYS.items():
            assert found[name].dtype == array.dtype
            np.testing.assert_array_equal(found[name], array)


def test_16_bit_weights_are_stored_as_bfloat16(tmp_path: Path) -> None:
    weights = torch.tensor([1.0, -2.5, 3e38], dtype=torch.bfloat16)
    bits = weights.view(torch.int16).numpy().view(np.uint16)
    raw = write_arrays({"first_weight": bits, "weight_counts": bits})
    found = load_torch(raw)
    assert torch.equal(found["first_weight"], weights)
    assert found["weight_counts"].dtype == torch.uint16
    again = read_all_arrays(written(tmp_path, raw))
    assert again["first_weight"].dtype == np.uint16
    assert np.array_equal(again["first_weight"], bits)


def test_the_files_of_others_are_read_too(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(3, dtype=torch.float32), "a": torch.ones((2, 2), dtype=torch.uint8)}
    save_file(tensors, tmp_path / "theirs.safetensors")
    found = read_all_arrays(tmp_path / "theirs.safetensors")
    assert {name: array.tolist() for name, array in found.items()} == {"a": [[1, 1], [1, 1]], "b": [0, 1, 2]}


def test_a_kind_that_profiles_have_not_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    kinds = {"BOOL": torch.bool, "I32": torch.int32, "I8": torch.int8, "BF16": torch.bfloat16}
    for kind, dtype in kinds.items():
        save_file({"a": torch.zeros(2, dtype=dtype)}, path)
        fault = f"^x.safetensors: tensor 'a' is {kind}, a dtype that profiles do not use$"
        with case(kind), pytest.raises(PackError, match=fault):
            read_all_arrays(path)


def test_a_missing_and_a_cut_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"^x.safetensors: file is missing$"):
        read_all_arrays(tmp_path / "x.safetensors")
    raw = write_arrays(ARRAYS)
    with pytest.raises(PackError, match=r"^profile.safetensors: .*cut or damaged$"):
        read_all_arrays(written(tmp_path, raw[:-1]))
    read_all_arrays(written(tmp_path, raw))


WANTED = {
    "counts": ArrayRule("U32", (2, 3), most=9),
    "shares": ArrayRule("F32", (2,), 0, 1),
    "any": ArrayRule("F32", (2,)),
    "logs": ArrayRule("F32", (1,), -math.inf, 0),
    "figures": ArrayRule("F32", (2,), least=-1, has_nan=True),
}


def legal() -> dict[str, NDArray[Any]]:
    return {
        "counts": np.full((2, 3), 9, np.uint32),
        "shares": np.array([0, 1], np.float32),
        "any": np.array([-3e38, 3e38], np.float32),
        "logs": np.array([-np.inf], np.float32),
        "figures": np.array([np.nan, 3e38], np.float32),
    }


def test_the_arrays_that_are_wanted_pass() -> None:
    check_arrays(legal(), WANTED, "x.safetensors")
    check_arrays(dict(reversed(legal().items())), WANTED, "x.safetensors")


FAULTS: list[tuple[dict[str, NDArray[Any] | None], str]] = [
    ({"counts": None}, "tensor 'counts' is missing"),
    ({"more": np.zeros(1)}, "unknown tensor 'more'"),
    ({"shares": np.zeros(2)}, "tensor 'shares' is F64 [2], expected F32 [2]"),
    ({"counts": np.zeros((2, 3), np.float32)}, "tensor 'counts' is F32 [2, 3], expected U32 [2, 3]"),
    ({"counts": np.zeros((3, 2), np.uint32)}, "tensor 'counts' is U32 [3, 2], expected U32 [2, 3]"),
    ({"shares": np.zeros((2, 1), np.float32)}, "tensor 'shares' is F32 [2, 1], expected F32 [2]"),
    ({"shares": np.array(0, np.float32)}, "tensor 'shares' is F32 [], expected F32 [2]"),
]
IMPOSSIBLE: list[tuple[str, list[Any], str]] = [
    ("counts", [[0, 9, 9], [0, 10, 0]], "is 10 at [1, 1], expected a finite number of at most 9"),
    ("shares", [-1, 0], "is -1.0 at [0], expected 0 to 1"),
    ("shares", [0, 2], "is 2.0 at [1], expected 0 to 1"),
    ("shares", [0, np.nan], "is nan at [1], expected 0 to 1"),
    ("any", [0, np.nan], "is nan at [1], expected a finite number"),
    ("any", [np.inf, 0], "is inf at [0], expected a finite number"),
    ("any", [0, -np.inf], "is -inf at [1], expected a finite number"),
    ("logs", [np.nan], "is nan at [0], expected -inf to 0"),
    ("figures", [np.nan, np.inf], "is inf at [1], expected a finite number of at least -1"),
    ("figures", [np.nan, -2], "is -2.0 at [1], expected a finite number of at least -1"),
]


def test_other_arrays_and_impossible_values_are_refused_by_name_and_place() -> None:
    impossible = [
        ({name: np.array(values, legal()[name].dtype)}, f"tensor '{name}' {fault}; the file is damaged, make it again")
        for name, values, fault in IMPOSSIBLE
    ]
    for changes, fault in (*FAULTS, *impossible):
        with case(changes, fault):
            arrays = {name: array for name, array in (legal() | changes).items() if array is not None}
            with pytest.raises(PackError) as refused:
                check_arrays(arrays, WANTED, "x.safetensors")
            assert str(refused.value) == f"x.safetensors: {fault}"
