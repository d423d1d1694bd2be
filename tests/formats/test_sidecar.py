"""Sidecars of values and of arrays: read for the root digest they belong to, and refused when damaged."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from support.cases import assert_each, case, line_of
from support.killing import files_in
from support.reseal import Change, JsonObject, edit_byte, manifest_of, sealed

from moe_pack.formats import ConversionError, Pack, PackError
from moe_pack.formats.pack.manifests import root_without_thresholds
from moe_pack.formats.pack.safetensors import assemble
from moe_pack.formats.pack.sidecar import (
    TensorSidecar,
    open_tensor_sidecar,
    read_sidecar,
    write_sidecar,
    write_tensor_sidecar,
)
from moe_pack.formats.pack.writer import rewrite_thresholds

NAME = "quality.json"
ROOT, OTHER_ROOT = "ab" * 32, "cd" * 32


@dataclass(frozen=True, slots=True)
class Curve:
    widths: tuple[int, ...]
    note: str | None


@dataclass(frozen=True, slots=True)
class Measured:
    tokens: int
    loss: float
    curves: tuple[Curve, ...]


VALUES = Measured(512, 3.0, (Curve((), None), Curve((2, 4), "a 'note' in fünf words")))
CONTENT: JsonObject = {
    "tokens": 512,
    "loss": 3.0,
    "curves": [{"widths": [], "note": None}, {"widths": [2, 4], "note": "a 'note' in fünf words"}],
}


def refusal(folder: Path) -> str:
    return line_of(PackError, lambda: read_sidecar(folder, NAME, Measured, ROOT))


def write_by_hand(folder: Path, values: JsonObject) -> None:
    (folder / NAME).write_bytes(sealed(values))


def test_what_was_written_is_read_back_and_has_the_bytes_of_a_file_written_by_hand(tmp_path: Path) -> None:
    assert read_sidecar(tmp_path, NAME, Measured, ROOT) is None
    write_sidecar(tmp_path, NAME, VALUES, ROOT)
    assert read_sidecar(tmp_path, NAME, Measured, ROOT) == VALUES
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    ours = (tmp_path / NAME).read_bytes()
    write_by_hand(tmp_path, {"root": ROOT, "content": CONTENT})
    assert (tmp_path / NAME).read_bytes() == ours


def test_the_digest_is_that_of_the_file_with_zeros_in_its_place(tmp_path: Path) -> None:
    write_sidecar(tmp_path, NAME, VALUES, ROOT)
    raw = (tmp_path / NAME).read_bytes()
    digest = json.loads(raw)["sha256"]
    assert raw.endswith(f',\n "sha256": "{digest}"\n}}\n'.encode())
    assert hashlib.sha256(raw.replace(digest.encode(), b"0" * 64)).hexdigest() == digest


def test_a_sidecar_that_is_there_is_replaced_whole(tmp_path: Path) -> None:
    write_sidecar(tmp_path, NAME, VALUES, ROOT)
    (tmp_path / f"{NAME}.tmp").write_bytes(bytes(10_000))  # left by a write that was killed
    write_sidecar(tmp_path, NAME, Measured(1, 0.5, ()), OTHER_ROOT)
    assert read_sidecar(tmp_path, NAME, Measured, OTHER_ROOT) == Measured(1, 0.5, ())
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_one_of_another_root_digest_is_as_good_as_none_whatever_it_holds(tmp_path: Path) -> None:
    write_sidecar(tmp_path, NAME, VALUES, OTHER_ROOT)
    assert read_sidecar(tmp_path, NAME, Measured, ROOT) is None
    write_by_hand(tmp_path, {"root": OTHER_ROOT, "content": {"of": "an older program"}})
    assert read_sidecar(tmp_path, NAME, Measured, ROOT) is None


def test_it_is_no_part_of_the_pack_and_stale_once_thresholds_change(folder: Path) -> None:
    root = manifest_of(folder)["root"]
    write_sidecar(folder, "thresholds.json", VALUES, root)
    with Pack(folder) as opened:
        assert opened.manifest.root == root
        changed = opened.thresholds + 1
    assert read_sidecar(folder, "thresholds.json", Measured, root) == VALUES
    assert read_sidecar(folder, "thresholds.json", Measured, rewrite_thresholds(folder, changed)) is None


# --- refused


def test_a_sidecar_with_a_byte_changed_anywhere_is_refused(tmp_path: Path) -> None:
    write_sidecar(tmp_path, NAME, VALUES, ROOT)
    size = (tmp_path / NAME).stat().st_size
    for offset in {*range(0, size, 5), *range(size - 80, size)}:
        edit_byte(tmp_path / NAME, offset)
        refusal(tmp_path)
        edit_byte(tmp_path / NAME, offset)
    assert read_sidecar(tmp_path, NAME, Measured, ROOT) == VALUES


def test_a_sidecar_cut_anywhere_is_refused(tmp_path: Path) -> None:
    write_sidecar(tmp_path, NAME, VALUES, ROOT)
    raw = (tmp_path / NAME).read_bytes()
    for length in range(0, len(raw), 7):
        (tmp_path / NAME).write_bytes(raw[:length])
        assert re.match(r"quality\.json: (not valid JSON \(|does not end with its own digest)", refusal(tmp_path))


def test_a_file_that_is_no_sealed_object_is_refused(tmp_path: Path) -> None:
    write_sidecar(tmp_path, NAME, VALUES, ROOT)
    sound = (tmp_path / NAME).read_bytes()
    other_digest = sound.replace(json.loads(sound)["sha256"].encode(), b"e" * 64)
    cases = [
        (b'{"root": "x"}\n', "does not end with its own digest; the file is cut or damaged"),
        (b"[]", "does not end with its own digest; the file is cut or damaged"),
        (b'{"a": 1, "a": 2}', "key 'a' appears twice"),
        (b'{"a": NaN}', "found NaN, which is not a JSON number"),
        (other_digest, "SHA-256 does not match its bytes; the file is damaged"),
    ]

    def found(raw: bytes) -> str:
        (tmp_path / NAME).write_bytes(raw)
        return refusal(tmp_path)

    assert_each(cases, found, "quality.json: ")


def test_keys_and_types_are_exact(tmp_path: Path) -> None:
    cases: list[tuple[Change, str]] = [
        (lambda v: v.pop("content"), "quality.json: key 'content' is missing"),
        (lambda v: v.pop("root"), "quality.json: key 'root' is missing"),
        (lambda v: v.update(note="?"), "quality.json: unknown key 'note'"),
        (lambda v: v.update(root=5), "quality.json: root: found 5, expected str"),
        (lambda v: v.update(content=[]), "quality.json: content: found [], expected an object"),
        (lambda v: v["content"].update(more=1), "quality.json: content: unknown key 'more'"),
        (lambda v: v["content"].pop("loss"), "quality.json: content: key 'loss' is missing"),
        (lambda v: v["content"].update(tokens=True), "quality.json: content: tokens: found True, expected int"),
        (lambda v: v["content"]["curves"][1].update(widths=[2, "4"]),
         "quality.json: content: curves[1]: widths[1]: found '4', expected int"),
    ]  # fmt: skip

    def found(change: Change) -> str:
        values: JsonObject = {"root": ROOT, "content": json.loads(json.dumps(CONTENT))}
        change(values)
        write_by_hand(tmp_path, values)
        return refusal(tmp_path)

    assert_each(cases, found)
    write_by_hand(tmp_path, {"root": ROOT, "content": CONTENT | {"loss": 3}})  # a number without fraction
    assert read_sidecar(tmp_path, NAME, Measured, ROOT) == VALUES


def test_a_sidecar_beyond_16_mb_is_neither_read_nor_written(tmp_path: Path) -> None:
    with (tmp_path / NAME).open("wb") as file:
        file.truncate(16_000_001)  # takes no room
    message = "quality.json: 16,000,001 bytes, at most 16,000,000"
    assert refusal(tmp_path) == message
    with (tmp_path / NAME).open("r+b") as file:
        file.truncate(16_000_000)
    assert refusal(tmp_path).startswith("quality.json: not valid JSON")
    write_sidecar(tmp_path, NAME, Curve((), ""), ROOT)
    spare = 16_000_000 - (tmp_path / NAME).stat().st_size
    write_sidecar(tmp_path, NAME, Curve((), "x" * spare), ROOT)
    before = files_in(tmp_path)
    with pytest.raises(PackError, match=f"^{re.escape(message)}$"):
        write_sidecar(tmp_path, NAME, Curve((), "x" * (spare + 1)), ROOT)
    assert files_in(tmp_path) == before
    found = read_sidecar(tmp_path, NAME, Curve, ROOT)
    assert found is not None and found.note == "x" * spare


def test_a_folder_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    assert refusal(tmp_path) == "quality.json: is not a regular file"


def test_a_missing_folder_or_one_in_use_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"none: cannot be used as output folder \(No such file"):
        write_sidecar(tmp_path / "none", NAME, VALUES, ROOT)
    writers: dict[str, Callable[[], object]] = {
        NAME: lambda: write_sidecar(folder, NAME, VALUES, ROOT),
        ARRAYS: lambda: written(folder),
    }
    with Pack(folder) as opened:
        changed = opened.thresholds + 1

    def meanwhile(step: object) -> None:
        busy = f"{folder}: another command is writing in this folder; wait for it or stop it"
        for name, write in writers.items():
            assert line_of(ConversionError, write) == f"{busy}, then write {name} again"

    rewrite_thresholds(folder, changed, meanwhile)
    for name, write in writers.items():
        assert not (folder / name).exists()
        write()
        write()  # the lock is given back


# --- arrays

ARRAYS = "routing.safetensors"
TENSORS: list[tuple[str, str, np.ndarray[Any, Any]]] = [
    ("counts", "U32", np.arange(6, dtype="<u4").reshape(2, 3)),
    ("none", "U16", np.empty((0, 4), "<u2")),
    ("shares", "F32", np.array([0.5, -0.25, np.nan], "<f4")),
    ("weight", "BF16", np.array([[0x3F80, 0xC000]], "<u2")),  # 1 and -2
    ("turned", "U8", np.arange(6, dtype="<u1").reshape(2, 3).T),  # not in one piece
]


def written(folder: Path, root: str = ROOT) -> Path:
    write_tensor_sidecar(folder, ARRAYS, TENSORS, root)
    return folder / ARRAYS


def opened(folder: Path, root: str = ROOT) -> TensorSidecar:
    found = open_tensor_sidecar(folder, ARRAYS, root)
    assert found is not None
    return found


def array_refusal(folder: Path) -> str:
    message = line_of(PackError, lambda: opened(folder))
    assert message.startswith(ARRAYS), message
    return message


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    written(tmp_path)
    with opened(tmp_path) as found:
        assert list(found.entries) == [name for name, _, _ in TENSORS]
        assert [entry.dtype for entry in found.entries.values()] == [dtype for _, dtype, _ in TENSORS]
        for name, _, values in TENSORS:
            np.testing.assert_array_equal(found.read(name), values)
            assert found.read(name).dtype == values.dtype
        assert (found.root, found.num_bytes) == (ROOT, (tmp_path / ARRAYS).stat().st_size)
    assert [path.name for path in tmp_path.iterdir()] == [ARRAYS]


def test_other_readers_of_safetensors_find_arrays_and_digests(tmp_path: Path) -> None:
    path = written(tmp_path)
    with safe_open(path, "pt") as other:  # type: ignore[no-untyped-call]  # its stubs lag behind
        metadata = other.metadata()
        assert other.get_tensor("weight").tolist() == [[1.0, -2.0]]
        assert other.get_tensor("counts").tolist() == [[0, 1, 2], [3, 4, 5]]
    raw = path.read_bytes()
    assert metadata["root"] == ROOT
    assert hashlib.sha256(raw.replace(metadata["sha256"].encode(), b"0" * 64)).hexdigest() == metadata["sha256"]
    length = int.from_bytes(raw[:8], "little")
    names = ["counts", "pad.0", "none", "shares", "pad.1", "weight", "pad.2", "turned", "pad.3"]
    assert list(json.loads(raw[8 : 8 + length])) == ["__metadata__", *names]
    assert (8 + length) % 64 == len(raw) % 64 == 0


def test_the_same_arrays_give_the_same_bytes(tmp_path: Path) -> None:
    raw = written(tmp_path).read_bytes()
    (tmp_path / f"{ARRAYS}.tmp").write_bytes(bytes(10_000))  # left by a write that was killed
    assert written(tmp_path).read_bytes() == raw
    assert [path.name for path in tmp_path.iterdir()] == [ARRAYS]


def test_a_root_of_zeros_is_not_taken_for_the_digest(tmp_path: Path) -> None:
    written(tmp_path, "0" * 64)
    opened(tmp_path, "0" * 64).close()


def test_where_there_is_none_or_one_of_another_root_there_is_nothing(tmp_path: Path) -> None:
    assert open_tensor_sidecar(tmp_path, ARRAYS, ROOT) is None
    written(tmp_path, OTHER_ROOT)
    assert open_tensor_sidecar(tmp_path, ARRAYS, ROOT) is None


def test_it_outlives_new_thresholds_but_not_new_content(folder: Path) -> None:
    with Pack(folder) as held:
        manifest, changed = held.manifest, held.thresholds + 1
    root = root_without_thresholds(manifest)
    lines = [(f["name"], f"{f['sha256']} {f['bytes']} {f['name']}\n") for f in manifest_of(folder)["files"]]
    lines += [
        (f["name"], f"{f['header_sha256']} {f['bytes']} {f['name']}\n") for f in manifest_of(folder)["expert_files"]
    ]
    kept = "".join(line for name, line in sorted(lines) if name != "thresholds.safetensors")
    assert root == hashlib.sha256(kept.encode()).hexdigest()
    written(folder, root)
    rewrite_thresholds(folder, changed)
    with Pack(folder) as held:
        assert held.manifest.root != manifest.root
        opened(folder, root_without_thresholds(held.manifest)).close()


# --- refused


def test_a_byte_changed_anywhere_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    for offset in range(path.stat().st_size):
        edit_byte(path, offset)
        array_refusal(tmp_path)
        edit_byte(path, offset)
    opened(tmp_path).close()


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    raw = path.read_bytes()
    for length in range(0, len(raw), 7):
        path.write_bytes(raw[:length])
        array_refusal(tmp_path)


def test_a_digest_known_from_before_is_not_computed_again_and_no_other_is_taken(tmp_path: Path) -> None:
    path = written(tmp_path)
    with opened(tmp_path) as found:
        sha256 = found.sha256
    edit_byte(path, path.stat().st_size - 64)  # the first byte of `turned`
    with TensorSidecar(tmp_path, ARRAYS, sha256) as again:
        assert again.read("turned")[0, 0] != 0
    with pytest.raises(PackError, match="SHA-256 does not match its bytes"):
        TensorSidecar(tmp_path, ARRAYS, "0" * 64)


def test_a_safetensors_file_of_others_is_refused(new_folder: Callable[[], Path]) -> None:
    for metadata in [None, {"root": ROOT}, {"sha256": ROOT}, {"root": "AB" * 32}]:
        with case(metadata):
            tmp_path = new_folder()
            save_file({"counts": np.arange(6)}, tmp_path / ARRAYS, metadata)
            load_file(tmp_path / ARRAYS)
            assert (
                array_refusal(tmp_path) == f"{ARRAYS}: header does not begin with root and sha256; the file is damaged"
            )


def test_an_empty_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / ARRAYS).write_bytes(assemble([]))
    assert array_refusal(tmp_path) == f"{ARRAYS}: header does not begin with root and sha256; the file is damaged"
    (tmp_path / ARRAYS).unlink()
    (tmp_path / ARRAYS).mkdir()
    assert array_refusal(tmp_path) == f"{ARRAYS}: is not a regular file"


def test_a_file_beyond_4_gib_is_refused_unread(tmp_path: Path) -> None:
    written(tmp_path)
    with (tmp_path / ARRAYS).open("r+b") as file:
        file.truncate(2**32 + 1)  # takes no room
    assert array_refusal(tmp_path) == f"{ARRAYS}: 4294967297 bytes, at most 4294967296"


def test_a_tensor_that_is_not_there_or_of_no_arrays_dtype_is_refused_by_name(tmp_path: Path) -> None:
    written(tmp_path)
    with opened(tmp_path) as found:
        with pytest.raises(PackError, match=rf"^{re.escape(ARRAYS)}: tensor 'more' is missing$"):
            found.read("more")
        with pytest.raises(PackError, match=rf"^{re.escape(ARRAYS)}: tensor 'pad\.0' is missing$"):
            found.read("pad.0")
    raw = (tmp_path / ARRAYS).read_bytes().replace(b'"U8","shape":[3,2]', b'"BOOL","shape":[3,2]')
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length + 2].rstrip()  # two bytes longer, at the cost of the spaces after it
    raw = raw[:8] + header.ljust(length) + raw[8 + length + 2 :]
    digest = re.search(rb'"sha256":"(\w+)"', raw)
    assert digest is not None
    zeroed = raw.replace(digest[1], b"0" * 64)
    (tmp_path / ARRAYS).write_bytes(raw.replace(digest[1], hashlib.sha256(zeroed).hexdigest().encode()))
    with (
        opened(tmp_path) as found,
        pytest.raises(
            PackError, match=rf"^{re.escape(ARRAYS)}: tensor 'turned' is BOOL, a dtype that sidecars do not have$"
        ),
    ):
        found.read("turned")
