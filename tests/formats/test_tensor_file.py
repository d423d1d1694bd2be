"""Safetensors headers: each rule of the reader broken by hand, and the nearest file that keeps it."""

import errno
import hashlib
import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cases import assert_each, case, line_of
from support.reseal import safetensors_bytes

from moe_pack.formats import PackError, RangeReader, base
from moe_pack.formats.pack.safetensors import assemble, lay_out, read_header


def entry(dtype: str, shape: object, first: object, end: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}


GOOD = {"a": entry("F32", [2, 3], 0, 24), "b": entry("U8", [8], 24, 32)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.safetensors"


def refusal(path: Path, raw: bytes) -> str:
    path.write_bytes(raw)
    place, _, message = line_of(PackError, lambda: read_header(path, PackError)).partition(": ")
    assert place == path.name
    return message


def accepted(path: Path, raw: bytes) -> list[tuple[str, str, tuple[int, ...], int]]:
    path.write_bytes(raw)
    return [(e.name, e.dtype, e.shape, e.num_bytes) for e in read_header(path, PackError)]


def test_a_legal_file_is_read_with_offsets_from_its_start(path: Path) -> None:
    raw = safetensors_bytes(GOOD, bytes(32))
    path.write_bytes(raw)
    entries = read_header(path, PackError)
    assert [(e.name, e.dtype, e.shape, e.num_bytes) for e in entries] == [
        ("a", "F32", (2, 3), 24),
        ("b", "U8", (8,), 8),
    ]
    assert [e.offset for e in entries] == [len(raw) - 32, len(raw) - 8]


def test_a_missing_file_a_folder_and_an_empty_file_are_refused(path: Path) -> None:
    assert line_of(PackError, lambda: read_header(path, PackError)) == "x.safetensors: file is missing"
    assert refusal(path, b"") == "is empty; the download failed, or the file is damaged"
    path.unlink()
    path.mkdir()
    assert line_of(PackError, lambda: read_header(path, PackError)) == "x.safetensors: is not a regular file"


def test_a_header_longer_than_the_file_is_refused_before_it_is_read(path: Path) -> None:
    raw = safetensors_bytes(GOOD, bytes(32))
    for length in [1, 7]:
        assert refusal(path, raw[:length]).endswith(f"bytes in a file of {length}; the file is cut or damaged")
    for length in [1 << 62, (1 << 64) - 1, 100_000_001, 300]:
        with case(length):
            found = refusal(path, length.to_bytes(8, "little") + raw[8:])
            assert found == f"header of {length} bytes in a file of {len(raw)}; the file is cut or damaged"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)  # a hole: takes no space on the disk
    message = "x.safetensors: header of 100000001 bytes in a file of 200000000; the file is cut or damaged"
    assert line_of(PackError, lambda: read_header(path, PackError)) == message


def test_a_header_that_fills_the_file_is_legal(path: Path) -> None:
    assert accepted(path, safetensors_bytes({})) == []


def test_a_header_that_is_no_json_object_is_refused(path: Path) -> None:
    cases = [
        (b"{", "header: not valid JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))"),
        (b"\xff{}", "header: not valid JSON ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte)"),
        (b"[]", "header is not a JSON object"),
        (b"null", "header is not a JSON object"),
        (b'{"a": NaN}', "header: found NaN, which is not a JSON number"),
        (b'{"a": {}, "a": {}}', "header: key 'a' appears twice"),
        (b"", "header: not valid JSON (Expecting value: line 1 column 1 (char 0))"),
    ]
    assert_each(cases, lambda header: refusal(path, safetensors_bytes(header)))


def test_a_deeply_nested_header_is_refused(path: Path) -> None:
    raw = safetensors_bytes(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}")
    assert refusal(path, raw).startswith("header: not valid JSON (maximum recursion depth exceeded")


def test_a_faulty_entry_is_refused_by_name(path: Path) -> None:
    cases = [
        (entry("F31", [6], 0, 24), "unknown dtype 'F31'"),
        (entry("f32", [6], 0, 24), "unknown dtype 'f32'"),
        ({"dtype": [], "shape": [6], "data_offsets": [0, 24]}, "unknown dtype []"),
        (entry("F32", [-6], 0, 24), "shape is not a list of whole numbers"),
        (entry("F32", [-2, -3], 0, 24), "shape is not a list of whole numbers"),
        (entry("F32", [6.0], 0, 24), "shape is not a list of whole numbers"),
        (entry("F32", [True, 6], 0, 24), "shape is not a list of whole numbers"),
        (entry("F32", ["6"], 0, 24), "shape is not a list of whole numbers"),
        (entry("F32", [1 << 63], 0, 24), "shape is not a list of whole numbers"),
        (entry("F32", "6", 0, 24), "shape is not a list of whole numbers"),
        (entry("F32", None, 0, 24), "shape is not a list of whole numbers"),
        (entry("F32", [6], 24, 0), "data_offsets is not a pair of rising whole numbers"),
        (entry("F32", [6], -24, 0), "data_offsets is not a pair of rising whole numbers"),
        (entry("F32", [6], 0, 24.0), "data_offsets is not a pair of rising whole numbers"),
        (entry("F32", [6], 0, 1 << 64), "data_offsets is not a pair of rising whole numbers"),
        ({"dtype": "F32", "shape": [6], "data_offsets": [0, 24, 24]},
         "data_offsets is not a pair of rising whole numbers"),
        ({"dtype": "F32", "shape": [6], "data_offsets": 24}, "data_offsets is not a pair of rising whole numbers"),
        (entry("F32", [5], 0, 24), "F32 [5] needs 20 bytes, data_offsets give 24"),
        (entry("F64", [6], 0, 24), "F64 [6] needs 48 bytes, data_offsets give 24"),
        (entry("F32", [1 << 62], 0, 24), f"F32 [{1 << 62}] needs {1 << 64} bytes, data_offsets give 24"),
        (entry("F32", [1 << 62, 1 << 62], 0, 24),
         f"F32 [{1 << 62}, {1 << 62}] needs {1 << 126} bytes, data_offsets give 24"),
        ({"dtype": "F32", "shape": [6]}, "expected exactly dtype, shape and data_offsets"),
        (entry("F32", [6], 0, 24) | {"strides": [4]}, "expected exactly dtype, shape and data_offsets"),
        ([], "expected exactly dtype, shape and data_offsets"),
        (None, "expected exactly dtype, shape and data_offsets"),
    ]  # fmt: skip
    assert_each(cases, lambda held: refusal(path, safetensors_bytes({"a": held}, bytes(24))), "tensor 'a': ")


def test_an_entry_whose_shape_fills_its_bytes_is_read(path: Path) -> None:
    of_24 = [("F32", [6]), ("F32", [2, 3]), ("F32", [1, 6, 1]), ("F64", [3]), ("BF16", [12]), ("F8_E4M3", [24])]
    cases: list[tuple[str, list[int], int]] = [*((*each, 24) for each in of_24), ("BOOL", [24], 24)]
    cases += [("F32", [], 4), ("F32", [0], 0), ("F32", [0, 1 << 62], 0)]
    for dtype, shape, size in cases:
        with case(dtype, shape):
            raw = safetensors_bytes({"a": entry(dtype, shape, 0, size)}, bytes(size))
            assert accepted(path, raw) == [("a", dtype, tuple(shape), size)]


def test_metadata_is_no_tensor_and_the_order_of_names_does_not_matter(path: Path) -> None:
    header = {"b": GOOD["b"], "__metadata__": {"format": "pt"}, "a": GOOD["a"]}
    expected = [("a", "F32", (2, 3), 24), ("b", "U8", (8,), 8)]
    assert accepted(path, safetensors_bytes(header, bytes(32))) == expected


def test_a_shape_of_very_many_large_sizes_is_refused_at_once(path: Path) -> None:
    raw = safetensors_bytes({"a": entry("F32", [1 << 62] * 400, 0, 24)}, bytes(24))
    message = refusal(path, raw)
    assert message.startswith("tensor 'a': ") and len(message) < 1000


def test_overlaps_and_holes_are_refused(path: Path) -> None:
    cases = [
        (23, "tensor 'b' overlaps the tensor before it (offset 23, expected 24)"),
        (0, "tensor 'a' overlaps the tensor before it (offset 0, expected 8)"),
        (25, "tensor 'b' leaves a hole before it (offset 25, expected 24)"),
        (1 << 62, f"tensor 'b' leaves a hole before it (offset {1 << 62}, expected 24)"),
    ]

    def found(at: int) -> str:
        return refusal(path, safetensors_bytes(GOOD | {"b": entry("U8", [8], at, at + 8)}, bytes(32)))

    assert_each(cases, found)
    raw = safetensors_bytes({"a": entry("F32", [6], 4, 28)}, bytes(28))
    assert refusal(path, raw) == "tensor 'a' leaves a hole before it (offset 4, expected 0)"


def test_a_file_cut_or_with_bytes_after_its_tensors_is_refused(path: Path) -> None:
    for extra in [-32, -1, 1, 4096]:
        with case(extra):
            raw = safetensors_bytes(GOOD, bytes(32 + extra))
            described = f"file has {len(raw)} bytes, its header describes {len(raw) - extra}"
            assert refusal(path, raw) == f"{described}; the file is cut or damaged"


def test_a_file_written_by_the_safetensors_library_is_read(path: Path) -> None:
    save_file({"x": torch.ones(3, 5), "y": torch.zeros(7, dtype=torch.bfloat16)}, path, {"format": "pt"})
    found = {e.name: (e.dtype, e.shape) for e in read_header(path, PackError)}
    assert found == {"x": ("F32", (3, 5)), "y": ("BF16", (7,))}


def test_a_file_assembled_here_is_read_by_the_safetensors_library(path: Path) -> None:
    path.write_bytes(assemble([("x", "U8", np.arange(3)), ("y", "F32", np.array([[1], [2]]))], align=64))
    held = load_file(path)
    assert held["x"].tolist() == [0, 1, 2] and held["y"].tolist() == [[1.0], [2.0]]


@pytest.mark.parametrize("align", [64, 4096])
def test_a_layout_puts_each_group_on_a_boundary_and_names_every_gap(path: Path, align: int) -> None:
    layout = lay_out([[("p", "U8", (10,)), ("q", "F32", (3,))], [("r", "U8", (align,))], [("s", "U8", (1,))]], align)
    path.write_bytes(layout.header + bytes(layout.num_bytes - len(layout.header)))
    start = len(layout.header)
    assert read_header(path, PackError) == layout.entries
    assert [(e.name, e.offset - start, e.num_bytes) for e in layout.entries] == [
        ("p", 0, 10),
        ("q", 10, 12),
        ("pad.0", 22, align - 22),
        ("r", align, align),
        ("s", 2 * align, 1),
        ("pad.1", 2 * align + 1, align - 1),
    ]
    assert start % align == 0 and layout.num_bytes == start + 3 * align
    assert json.loads(layout.header[8:])["s"]["data_offsets"] == [2 * align, 2 * align + 1]


def test_a_file_is_read_with_its_digest_whatever_its_size(path: Path) -> None:
    """Of no piece, one, exactly two, and two and a half; what ends early, or fails in a later piece, is refused."""
    piece = 8 << 20
    for num_bytes in (0, 1, piece, 2 * piece, 2 * piece + piece // 2 + 3):
        with case(num_bytes):
            raw = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
            path.write_bytes(raw.tobytes() + b"rest")
            with closing(RangeReader(path, PackError)) as reader:
                found, digest = reader.read_hashed(num_bytes)
                assert np.array_equal(found, raw) and digest == hashlib.sha256(raw.tobytes()).hexdigest()
                with pytest.raises(PackError, match=f"ends at byte {num_bytes + 4}, expected {num_bytes + 5}"):
                    reader.read_hashed(num_bytes + 5)


def test_a_fault_while_a_file_is_read_with_its_digest_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(bytes(20 << 20))

    def fail(descriptor: int, view: memoryview, offset: int) -> int:
        if offset:
            raise OSError(errno.EIO, "Input/output error")
        return len(view)

    monkeypatch.setattr(base, "read_at", fail)
    message = r"read failed at byte 8388608 \(Input/output error\)"
    with closing(RangeReader(path, PackError)) as reader, pytest.raises(PackError, match=message):
        reader.read_hashed(20 << 20)
