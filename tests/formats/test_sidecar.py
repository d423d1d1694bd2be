"""Sidecars: written, read for the root digest they belong to, and refused when damaged."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.cases import assert_each, line_of
from support.killing import files_in
from support.reseal import Change, JsonObject, edit_byte, manifest_of, sealed

from moe_pack.formats import ConversionError, Pack, PackError
from moe_pack.formats.pack.sidecar import read_sidecar, write_sidecar
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
    with Pack(folder) as opened:
        changed = opened.thresholds + 1

    def meanwhile(step: object) -> None:
        with pytest.raises(ConversionError) as refused:
            write_sidecar(folder, NAME, VALUES, ROOT)
        assert str(refused.value) == (
            f"{folder}: another command is writing in this folder; wait for it or stop it, then write {NAME} again"
        )

    rewrite_thresholds(folder, changed, meanwhile)
    assert not (folder / NAME).exists()
    write_sidecar(folder, NAME, VALUES, ROOT)
    write_sidecar(folder, NAME, VALUES, ROOT)  # the lock is given back
