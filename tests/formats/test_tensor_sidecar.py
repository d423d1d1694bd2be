"""Sidecars of arrays: as any safetensors reader sees them, found stale, and refused when a byte of them changes."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from support.cases import case, line_of
from support.reseal import edit_byte, manifest_of

from moe_pack.formats import ConversionError, Pack, PackError
from moe_pack.formats.pack.manifests import root_without_thresholds
from moe_pack.formats.pack.safetensors import assemble
from moe_pack.formats.pack.sidecar import TensorSidecar, open_tensor_sidecar, write_tensor_sidecar
from moe_pack.formats.pack.writer import rewrite_thresholds

NAME = "routing.safetensors"
ROOT, OTHER_ROOT = "ab" * 32, "cd" * 32
TENSORS: list[tuple[str, str, np.ndarray[Any, Any]]] = [
    ("counts", "U32", np.arange(6, dtype="<u4").reshape(2, 3)),
    ("none", "U16", np.empty((0, 4), "<u2")),
    ("shares", "F32", np.array([0.5, -0.25, np.nan], "<f4")),
    ("weight", "BF16", np.array([[0x3F80, 0xC000]], "<u2")),  # 1 and -2
    ("turned", "U8", np.arange(6, dtype="<u1").reshape(2, 3).T),  # not in one piece
]


def written(folder: Path, root: str = ROOT) -> Path:
    write_tensor_sidecar(folder, NAME, TENSORS, root)
    return folder / NAME


def opened(folder: Path, root: str = ROOT) -> TensorSidecar:
    found = open_tensor_sidecar(folder, NAME, root)
    assert found is not None
    return found


def refusal(folder: Path) -> str:
    message = line_of(PackError, lambda: opened(folder))
    assert message.startswith(NAME), message
    return message


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    written(tmp_path)
    with opened(tmp_path) as found:
        assert list(found.entries) == [name for name, _, _ in TENSORS]
        assert [entry.dtype for entry in found.entries.values()] == [dtype for _, dtype, _ in TENSORS]
        for name, _, values in TENSORS:
            np.testing.assert_array_equal(found.read(name), values)
            assert found.read(name).dtype == values.dtype
        assert (found.root, found.num_bytes) == (ROOT, (tmp_path / NAME).stat().st_size)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


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
    (tmp_path / f"{NAME}.tmp").write_bytes(bytes(10_000))  # left by a write that was killed
    assert written(tmp_path).read_bytes() == raw
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_a_root_of_zeros_is_not_taken_for_the_digest(tmp_path: Path) -> None:
    written(tmp_path, "0" * 64)
    opened(tmp_path, "0" * 64).close()


def test_where_there_is_none_or_one_of_another_root_there_is_nothing(tmp_path: Path) -> None:
    assert open_tensor_sidecar(tmp_path, NAME, ROOT) is None
    written(tmp_path, OTHER_ROOT)
    assert open_tensor_sidecar(tmp_path, NAME, ROOT) is None


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
        refusal(tmp_path)
        edit_byte(path, offset)
    opened(tmp_path).close()


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    raw = path.read_bytes()
    for length in range(0, len(raw), 7):
        path.write_bytes(raw[:length])
        refusal(tmp_path)


def test_a_digest_known_from_before_is_not_computed_again_and_no_other_is_taken(tmp_path: Path) -> None:
    path = written(tmp_path)
    with opened(tmp_path) as found:
        sha256 = found.sha256
    edit_byte(path, path.stat().st_size - 64)  # the first byte of `turned`
    with TensorSidecar(tmp_path, NAME, sha256) as again:
        assert again.read("turned")[0, 0] != 0
    with pytest.raises(PackError, match="SHA-256 does not match its bytes"):
        TensorSidecar(tmp_path, NAME, "0" * 64)


def test_a_safetensors_file_of_others_is_refused(new_folder: Callable[[], Path]) -> None:
    for metadata in [None, {"root": ROOT}, {"sha256": ROOT}, {"root": "AB" * 32}]:
        with case(metadata):
            tmp_path = new_folder()
            save_file({"counts": np.arange(6)}, tmp_path / NAME, metadata)
            load_file(tmp_path / NAME)
            assert refusal(tmp_path) == f"{NAME}: header does not begin with root and sha256; the file is damaged"


def test_an_empty_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(assemble([]))
    assert refusal(tmp_path) == f"{NAME}: header does not begin with root and sha256; the file is damaged"
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).mkdir()
    assert refusal(tmp_path) == f"{NAME}: is not a regular file"


def test_a_file_beyond_4_gib_is_refused_unread(tmp_path: Path) -> None:
    written(tmp_path)
    with (tmp_path / NAME).open("r+b") as file:
        file.truncate(2**32 + 1)  # takes no room
    assert refusal(tmp_path) == f"{NAME}: 4294967297 bytes, at most 4294967296"


def test_a_tensor_that_is_not_there_or_of_no_arrays_dtype_is_refused_by_name(tmp_path: Path) -> None:
    written(tmp_path)
    with opened(tmp_path) as found:
        with pytest.raises(PackError, match=rf"^{re.escape(NAME)}: tensor 'more' is missing$"):
            found.read("more")
        with pytest.raises(PackError, match=rf"^{re.escape(NAME)}: tensor 'pad\.0' is missing$"):
            found.read("pad.0")
    raw = (tmp_path / NAME).read_bytes().replace(b'"U8","shape":[3,2]', b'"BOOL","shape":[3,2]')
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length + 2].rstrip()  # two bytes longer, at the cost of the spaces after it
    raw = raw[:8] + header.ljust(length) + raw[8 + length + 2 :]
    digest = re.search(rb'"sha256":"(\w+)"', raw)
    assert digest is not None
    zeroed = raw.replace(digest[1], b"0" * 64)
    (tmp_path / NAME).write_bytes(raw.replace(digest[1], hashlib.sha256(zeroed).hexdigest().encode()))
    with (
        opened(tmp_path) as found,
        pytest.raises(
            PackError, match=rf"^{re.escape(NAME)}: tensor 'turned' is BOOL, a dtype that sidecars do not have$"
        ),
    ):
        found.read("turned")


def test_a_folder_in_use_is_refused(folder: Path) -> None:
    with Pack(folder) as opened:
        changed = opened.thresholds + 1

    def meanwhile(step: object) -> None:
        with pytest.raises(ConversionError) as refused:
            written(folder)
        assert str(refused.value) == (
            f"{folder}: another command is writing in this folder; wait for it or stop it, then write {NAME} again"
        )

    rewrite_thresholds(folder, changed, meanwhile)
    assert not (folder / NAME).exists()
    written(folder)
    written(folder)  # the lock is given back
