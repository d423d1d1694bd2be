"""The trellis codec against a reader that takes one step after the other, and its tables against the page's."""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from support.cases import case
from torch import Tensor

from moe_pack.formats import ROW_GROUP, PartFormat, trellis_format
from moe_pack.formats.pack.codecs import (
    TRELLIS_HASH,
    TRELLIS_LEVELS,
    TRELLIS_UNITS,
    Trellis,
    decode_part,
    trellis_columns,
    trellis_hashes,
    trellis_levels,
    trellis_refinements,
    trellis_windows,
)
from moe_pack.formats.pack.plans import TRELLIS_WIDTHS, format_fault

ROOT = Path(__file__).parents[2]
FORMATS = [trellis_format(width, group, bits) for width in TRELLIS_WIDTHS for group, bits in ((ROW_GROUP, 16), (16, 8))]


def random_codes(rows: int, num_cols: int, width: int) -> Tensor:
    """Random nibbles, and as many bits of refinements as the width has: u8 [rows, steps]."""
    generator = torch.Generator().manual_seed(width)
    first, second = (1 << bits for bits in trellis_refinements(width))
    nibbles, ours, theirs = (
        torch.randint(0, size, (rows, num_cols // 2), generator=generator, dtype=torch.uint8)
        for size in (16, first, second)
    )
    return nibbles | ours << 4 | theirs << 6


def decoded_slowly(part: PartFormat, num_cols: int, codes: list[int], scales: list[float]) -> list[float]:
    """A row's weights, step by step, from the codes that `encode` takes."""
    newest, middle, oldest = (bytes.fromhex(table) for table in TRELLIS_HASH)
    levels = [np.frombuffer(bytes.fromhex(table), np.int8).tolist() for table in TRELLIS_LEVELS[part.width]]
    weights, before = [0.0] * num_cols, [0, 0]
    for step, code in enumerate(codes):
        mixed = newest[code & 15] ^ middle[before[0]] ^ oldest[before[1]]
        before = [code & 15, before[0]]
        block, place = divmod(step, 32)
        column = block * 64 + place // 2 + (16 if place % 2 else 0)
        for half, (one_set, refinement) in enumerate(((mixed & 15, code >> 4 & 3), (mixed >> 4, code >> 6))):
            level = levels[half][16 * refinement + one_set]
            weights[column + 32 * half] = level * scales[(column + 32 * half) // (part.group or num_cols)]
    return weights


def test_rows_are_read_as_a_register_of_three_nibbles_reads_them() -> None:
    for part in FORMATS:
        with case(part):
            codec, codes = Trellis(part, 192), random_codes(4, 192, part.width)
            stored = codec.store_scales(torch.rand(4, codec.num_groups, generator=torch.Generator().manual_seed(1)))
            rows = codec.encode(codes, stored)
            assert rows.shape == (4, part.part_bytes(192))
            scales = codec.load_scales(stored).tolist()
            expected = [decoded_slowly(part, 192, row.tolist(), scales[i]) for i, row in enumerate(codes)]
            assert torch.equal(decode_part(part, 192, rows), torch.tensor(expected))


def test_each_code_has_its_bits_where_the_page_says() -> None:
    # One step's code alone, of 64 columns: where its nibble and its two refinements lie.
    cases: list[tuple[int, int, int, dict[int, int]]] = [
        (4, 0, 0b1001, {0: 0b1001}),
        (4, 31, 0b1001, {15: 0b1001_0000}),
        (5, 3, 0b01_00_0001, {1: 0b0001_0000, 16 + 1: 1 << 4}),  # columns 17 and 49: bit 17 // 4 of byte 17 % 4
        (6, 3, 0b00_01_0001, {1: 0b0001_0000, 16 + 1: 1 << 4}),
        (6, 3, 0b01_00_0001, {1: 0b0001_0000, 20 + 1: 1 << 4}),
        (7, 31, 0b10_01_0001, {15: 0b0001_0000, 16 + 3: 1 << 7, 20 + 7: 0b10 << 6}),  # columns 31 and 63
        (8, 12, 0b11_10_0001, {6: 0b0001, 16 + 6: 0b10, 24 + 6: 0b11}),  # columns 6 and 38
    ]
    for width, step, code, expected in cases:
        with case(width, step, code):
            codec, codes = Trellis(trellis_format(width, ROW_GROUP), 64), torch.zeros(1, 32, dtype=torch.uint8)
            codes[0, step] = code
            row = codec.encode(codes, codec.store_scales(torch.ones(1, 1)))[0].tolist()
            assert {i: byte for i, byte in enumerate(row[:-2]) if byte} == expected
            assert row[-2:] == [0x00, 0x3C]


def test_steps_have_the_columns_of_codes_of_two_bits() -> None:
    columns = trellis_columns(128)
    assert columns[:4].tolist() == [[0, 32], [16, 48], [1, 33], [17, 49]]
    assert columns[31:33].tolist() == [[31, 63], [64, 96]]
    assert columns.flatten().sort().values.tolist() == list(range(128))


def test_windows_have_the_newest_nibble_on_top_and_begin_with_zeros() -> None:
    windows = trellis_windows(torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8))
    assert windows.tolist() == [[0x100, 0x210, 0x321, 0x432]]
    newest, middle, oldest = (bytes.fromhex(table) for table in TRELLIS_HASH)
    assert trellis_hashes()[0x432] == newest[4] ^ middle[3] ^ oldest[2]


def test_a_scale_of_zero_is_kept() -> None:
    for scale_bits in (8, 16):
        codec = Trellis(trellis_format(4, 16, scale_bits), 64)
        scales = codec.store_scales(torch.tensor([[0.0, 1.0, 0.5, 0.0]]))
        assert (codec.load_scales(scales) == 0).tolist() == [[True, False, False, True]]


def test_tables_have_the_sizes_and_the_range_that_the_format_says() -> None:
    assert tuple(TRELLIS_LEVELS) == tuple(TRELLIS_UNITS) == TRELLIS_WIDTHS
    assert [len(bytes.fromhex(table)) for table in TRELLIS_HASH] == [16, 16, 16]
    for width in TRELLIS_WIDTHS:
        for levels, bits in zip(trellis_levels(width), trellis_refinements(width), strict=True):
            assert len(levels) == 16 << bits
            assert levels.abs().max() <= (32 if width <= 6 else 64)
        assert sum(trellis_refinements(width)) == width - 4


def test_the_specification_has_the_same_tables() -> None:
    documented = json.loads((ROOT / "docs" / "trellis-tables.json").read_text())
    hashes = [bytes(table) for table in documented["hash"].values()]
    assert list(documented["hash"]) == ["newest", "middle", "oldest"]
    assert hashes == [bytes.fromhex(table) for table in TRELLIS_HASH]
    assert [int(width) for width in documented["levels"]] == list(TRELLIS_WIDTHS)
    stored = b"".join(hashes)
    for width, tables in documented["levels"].items():
        levels = [np.array(table, np.int8).tobytes() for table in tables]
        assert levels == [bytes.fromhex(table) for table in TRELLIS_LEVELS[int(width)]], width
        stored += b"".join(levels)
    assert hashlib.sha256(stored).hexdigest() in (ROOT / "docs" / "pack.md").read_text()


def test_formats_that_rows_cannot_have_are_named() -> None:
    cases = [
        (trellis_format(3, 64), "trellis of width 3, expected one of 4, 5, 6, 7, 8"),
        (trellis_format(9, 64), "trellis of width 9, expected one of 4, 5, 6, 7, 8"),
        (trellis_format(4, 48), "group size 48, expected one of 16, 32, 64, 128 or row"),
        (trellis_format(4, 64, 4), "scales of 4 bits, expected 8 or 16"),
        (trellis_format(4, 128), "group size 128 does not divide rows of 192 values"),
        (trellis_format(4, 64), None),
    ]
    for part, fault in cases:
        with case(part, fault):
            assert format_fault(part, 192) == fault
