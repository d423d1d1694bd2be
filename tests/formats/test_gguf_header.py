"""Headers of GGUF files: what the package's reader finds in them, and counts, sizes and places that are refused."""

import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.cases import case, line_of
from support.golden_gguf import GOLDEN
from support.raw_gguf import F32, KIND_F32, KIND_Q8_0, LIST, TEXT, U32, Tensor, Value, gguf_file, list_of, text

from moe_pack.formats import CheckpointError
from moe_pack.formats.gguf.header import GgufTensor, Metadata, read_header, read_headers

ARCHITECTURE: Value = ("general.architecture", TEXT, text("llama"))
SMALL: tuple[Value, ...] = (
    ARCHITECTURE,
    ("llama.texts", LIST, list_of(TEXT, 2, text("a") + text("bc"))),
    ("llama.numbers", LIST, list_of(F32, 3, struct.pack("<3f", 1, 2, 3))),
)
TENSORS: tuple[Tensor, ...] = (("first", (4, 2), KIND_F32, 0), ("second", (8,), KIND_F32, 32))
LARGE = (2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 12, 2**64 - 1)


def read(path: Path, raw: bytes) -> tuple[Metadata, dict[str, GgufTensor]]:
    path.write_bytes(raw)
    return read_headers([path])


def refusal(path: Path, raw: bytes) -> str:
    message = line_of(CheckpointError, lambda: read(path, raw))
    assert len(message) < 300
    return message


def test_what_is_read_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    kinds = gguf.GGUFValueType
    numbers = [each for each in kinds if each.name[0] in "UIFB"]
    writer = gguf.GGUFWriter(tmp_path / "all.gguf", "llama")
    for kind in numbers:
        number: Any = True if kind is kinds.BOOL else 0.1 if kind.name[0] == "F" else 200 if kind.name[0] == "U" else -3
        writer.add_key_value(f"one.{kind.name}", number, kind)
        writer.add_key_value(f"list.{kind.name}", [number, number and 0], kinds.ARRAY, kind)
    writer.add_key_value("texts", ["", "東京", "x" * 5000], kinds.ARRAY, kinds.STRING)
    writer.add_key_value("general.alignment", 64, kinds.UINT32)
    writer.data_alignment = 64
    writer.add_tensor("odd", np.ones((3, 5), np.float32))
    writer.add_tensor("coded", np.zeros((2, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert len(numbers) == 11
    for path in (tmp_path / "all.gguf", *sorted(GOLDEN.glob("*.gguf"))):
        with case(path.name):
            expected = gguf.GGUFReader(path)
            found, tensors = read_header(path, CheckpointError)
            assert found == {n: f.contents() for n, f in expected.fields.items() if not n.startswith("GGUF.")}
            assert [(t.name, t.type, t.shape, t.offset, t.num_bytes) for t in tensors] == [
                (t.name, t.tensor_type.name, tuple(reversed(t.shape.tolist())), t.data_offset, t.n_bytes)
                for t in expected.tensors
            ]


def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    whole = gguf_file(SMALL, TENSORS, bytes(64))
    read(tmp_path / "model.gguf", whole)
    for size in range(len(whole)):
        with case(size):
            assert re.match(r"model\.gguf: .*(cut short|is empty)", refusal(tmp_path / "model.gguf", whole[:size]))


def test_counts_and_lengths_that_the_file_cannot_have_are_refused_at_once(tmp_path: Path) -> None:
    whole, path = gguf_file(SMALL, TENSORS, bytes(64)), tmp_path / "model.gguf"
    places = {"tensors": 8, "keys": 16, "length of a key": 24}
    for name, before in (("texts", 4), ("numbers", 4)):
        places[f"length of {name}"] = whole.index(f"llama.{name}".encode()) + len(f"llama.{name}") + 4 + before
    places["length of a text"] = places["length of texts"] + 8
    places["length of a tensor's name"] = whole.index(b"first") - 8
    tracemalloc.start()
    for name, place in places.items():
        for count in LARGE:
            with case(name, count):
                refusal(path, whole[:place] + struct.pack("<Q", count) + whole[place + 8 :])
    place = whole.index(b"first") + 5
    for count in (0, 5, 2**31, 2**32 - 1):
        with case("dimensions", count):
            found = refusal(path, whole[:place] + struct.pack("<I", count) + whole[place + 4 :])
            assert found == f"model.gguf: tensor 'first' has {count} dimensions, expected 1 to 4"
    for count in LARGE:  # the smallest file with such a list
        with case("a list alone", count):
            refusal(path, gguf_file((("a", LIST, list_of(U32, count, b"")),)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_values_of_no_known_type_are_refused_and_bytes_that_are_no_text_are_none(tmp_path: Path) -> None:
    nested = list_of(U32, 1, bytes(4))
    for _ in range(3000):  # deeper than Python recurses
        nested = list_of(LIST, 1, nested)
    cases: dict[str, Value] = {
        "'llama.x' is a list of lists; the file is damaged": ("llama.x", LIST, nested),
        "'llama.x' is of the unknown type 13; the file is damaged": ("llama.x", 13, bytes(8)),
        "'llama.x' is of the unknown type 4294967295; ": ("llama.x", LIST, list_of(2**32 - 1, 1, bytes(8))),
        "key 'general.architecture' appears twice": ARCHITECTURE,
        "general.alignment is 0, expected a power of two": ("general.alignment", U32, bytes(4)),
        "general.alignment is 24, expected a power of two": ("general.alignment", U32, struct.pack("<I", 24)),
        "general.alignment is '32', expected a power of two": ("general.alignment", TEXT, text("32")),
    }
    for message, value in cases.items():
        with case(message):
            assert f"model.gguf: {message}" in refusal(tmp_path / "model.gguf", gguf_file((ARCHITECTURE, value)))
    odd = (b"\x02\0\0\0\0\0\0\0\xff\xfe", list_of(TEXT, 2, text("a") + b"\x01\0\0\0\0\0\0\0\xff"))
    known, _ = read(tmp_path / "odd.gguf", gguf_file((ARCHITECTURE, ("x", TEXT, odd[0]), ("y", LIST, odd[1]))))
    assert not known.has("x") and not known.has("y")
    for version, message in {1: "is of version 1 of GGUF, expected 2 or 3", 3 << 24: "a big-endian machine"}.items():
        assert message in refusal(tmp_path / "model.gguf", gguf_file((ARCHITECTURE,), version=version))


def test_tensors_that_do_not_lie_in_the_file_or_overlap_are_refused_by_name(tmp_path: Path) -> None:
    cases: dict[str, tuple[Tensor, ...]] = {
        r"'second' lies at bytes .*, the file has": (TENSORS[0], ("second", (8,), KIND_F32, 64)),
        r"'second' lies at bytes .* to 18,446,744,073,709,55.*": (TENSORS[0], ("second", (8,), KIND_F32, 2**64 - 32)),
        r"'second' lies at .*, in tensor 'first', which ends": (TENSORS[0], ("second", (8,), KIND_F32, 0)),
        r"'wide' lies at .*, in tensor 'long', which ends": (("long", (9,), KIND_F32, 0), ("wide", (1,), KIND_F32, 32)),
        r"'second' lies at .*, expected a multiple of 32": (TENSORS[0], ("second", (7,), KIND_F32, 36)),
        r"'second' appears twice": (("second", (8,), KIND_F32, 0), ("second", (8,), KIND_F32, 32)),
        r"'huge' lies at bytes .*": (("huge", (2**32, 2**32), KIND_F32, 0),),  # 2^64 values wrap to none
        r"'odd' lies at bytes .*": (("odd", (2**63, 2, 2**62, 1), KIND_F32, 0),),
        r"'empty' has shape \[8, 0\]": (("empty", (0, 8), KIND_F32, 0),),
        r"'coded' has rows of 16 values, expected a multiple of 32 for Q8_0": (("coded", (16, 2), KIND_Q8_0, 0),),
        r"'new' is of type 999, which the gguf package does not know": (("new", (1,), 999, 0),),
    }
    for message, tensors in cases.items():
        with case(message):
            assert re.match(
                f"model.gguf: tensor {message}", refusal(tmp_path / "model.gguf", gguf_file(SMALL, tensors, bytes(64)))
            )
    for offset in LARGE:
        with case(offset):
            tensors = (TENSORS[0], ("second", (8,), KIND_F32, offset))
            assert "tensor 'second' lies at" in refusal(tmp_path / "model.gguf", gguf_file(SMALL, tensors, bytes(64)))
    whole = gguf_file(SMALL, TENSORS, bytes(64))  # its last tensor ends where the file ends
    for swapped in (TENSORS, TENSORS[::-1], (("first", (8,), KIND_F32, 32),)):
        assert len(read(tmp_path / "legal.gguf", gguf_file(SMALL, swapped, bytes(64)))[1]) == len(swapped)
    for size in range(1, 9):
        assert "tensor 'second'" in refusal(tmp_path / "model.gguf", whole[:-size])


def test_parts_of_other_models_are_refused(tmp_path: Path) -> None:
    def part(number: int, tensor: Tensor, total: int = 2, count: int = 2) -> bytes:
        split = (("split.no", U32, number), ("split.count", U32, count), ("split.tensors.count", U32, total))
        said = [(key, kind, struct.pack("<I", value)) for key, kind, value in split]
        return gguf_file((ARCHITECTURE, *said), (tensor,), bytes(32))

    first, second = ("first", (8,), KIND_F32, 0), ("second", (8,), KIND_F32, 0)
    paths = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    cases: dict[str, tuple[bytes, bytes]] = {
        "": (part(0, first), part(1, second)),
        f"{paths[1].name}: split.no is 0, expected 1 by its name": (part(0, first), part(0, second)),
        f"{paths[0].name}: split.no is 1, expected 0 by its name": (part(1, first), part(0, second)),
        f"{paths[1].name}: split.no is None, expected 1": (part(0, first), gguf_file((ARCHITECTURE,))),
        f"{paths[0].name}: the parts have 2 tensors, expected 3; ": (part(0, first, 3), part(1, second, 3)),
        f"{paths[0].name}: is one of 3 parts": (part(0, first, 2, 3), part(1, second, 2, 3)),
        f"{paths[1].name}: tensor 'first' is also in another part": (part(0, first), part(1, first)),
    }
    for message, raws in cases.items():
        with case(message):
            for path, raw in zip(paths, raws, strict=True):
                path.write_bytes(raw)
            if message:
                with pytest.raises(CheckpointError, match=f"^{re.escape(message)}"):
                    read_headers(paths)
            else:
                assert set(read_headers(paths)[1]) == {"first", "second"}


def test_damaged_headers_are_refused_or_read_within_the_file(tmp_path: Path) -> None:
    whole, path = bytearray(gguf_file(SMALL, TENSORS, bytes(64))), tmp_path / "model.gguf"
    draw = np.random.default_rng(20)
    num_read = 0
    for number in range(500):
        raw = bytearray(whole)
        for _ in range(int(draw.integers(1, 4))):
            width = int(draw.choice((1, 4, 8)))
            place = int(draw.integers(4, len(raw) - width))
            raw[place : place + width] = draw.choice((b"\0" * 8, b"\xff" * 8, draw.bytes(8)))[:width]
        with case(number):
            path.write_bytes(raw)
            try:
                _, tensors = read_headers([path])
            except CheckpointError as fault:
                assert "\n" not in str(fault)
                continue
            num_read += 1
            assert all(0 <= tensor.offset <= len(raw) - tensor.num_bytes for tensor in tensors.values())
    assert 20 < num_read < 480, "the damage is neither too light nor too heavy"
