"""The trellis codec against a reader that shifts its stream bit by bit."""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import torch
from cases import case
from torch import Tensor

from moe_pack.formats import ROW_GROUP, PartFormat, trellis_format
from moe_pack.formats.codecs import TRELLIS_TABLES, TRELLIS_UNITS, Trellis, decode_part, trellis_steps, trellis_values
from moe_pack.formats.plan import TRELLIS_WIDTHS, format_fault

ROOT = Path(__file__).parents[2]
FORMATS = [trellis_format(width, group, bits) for width in TRELLIS_WIDTHS for group, bits in ((ROW_GROUP, 16), (16, 8))]


def random_codes(rows: int, num_cols: int, width: int) -> Tensor:
    """As many bits as each weight adds."""
    generator = torch.Generator().manual_seed(width)
    columns = [
        torch.randint(0, 1 << trellis_steps(width)[j % 2], (rows,), generator=generator) for j in range(num_cols)
    ]
    return torch.stack(columns, dim=1).to(torch.uint8)


def read_slowly(part: PartFormat, num_cols: int, row: bytes) -> list[float]:
    """A row's weights: one bit after the other goes into a register of seven."""
    bits = [row[b // 8] >> b % 8 & 1 for b in range(num_cols * part.width // 2)]
    scales = row[num_cols * part.width // 16 :]
    if part.scale_bits == 16:
        held = torch.frombuffer(bytearray(scales), dtype=torch.float16).float().tolist()
    else:
        step = float(torch.frombuffer(bytearray(scales[:2]), dtype=torch.float16))
        held = [step * byte for byte in scales[2:]]
    register, taken, weights = [0] * 7, 0, []
    for column in range(num_cols):
        count = part.width // 2 + (column % 2 and part.width % 2)
        register = (register + bits[taken : taken + count])[count:]
        taken += count
        table = (
            bytes.fromhex(TRELLIS_TABLES[part.width])[-128:]
            if column % 2
            else bytes.fromhex(TRELLIS_TABLES[part.width])[:128]
        )
        byte = table[sum(bit << place for place, bit in enumerate(register))]
        value = byte - 256 if byte > 127 else byte
        weights.append(value * held[column // (part.group or num_cols)])
    return weights


def test_rows_are_read_as_a_register_of_seven_bits_reads_them() -> None:
    for part in FORMATS:
        with case(part):
            codec, codes = Trellis(part, 192), random_codes(4, 192, part.width)
            scales = codec.store_scales(torch.rand(4, codec.num_groups, generator=torch.Generator().manual_seed(1)))
            rows = codec.encode(codes, scales)
            assert rows.shape == (4, part.part_bytes(192))
            expected = torch.tensor([read_slowly(part, 192, bytes(row.tolist())) for row in rows])
            assert torch.equal(decode_part(part, 192, rows), expected)


def test_bytes_are_those_of_a_stream_that_begins_with_the_lowest_bit() -> None:
    part = trellis_format(3, ROW_GROUP)  # one bit, then two
    codec = Trellis(part, 64)
    codes = torch.zeros((1, 64), dtype=torch.uint8)
    codes[0, 0], codes[0, 1], codes[0, 3] = 1, 2, 3  # bits 0; 1 and 2; 4 and 5
    rows = codec.encode(codes, codec.store_scales(torch.ones(1, 1)))
    assert rows[0].tolist() == [0b110101, *[0] * 11, 0x00, 0x3C]
    even, odd = trellis_values(3)
    windows = [0b1000000, 0b1010000, 0b0101000, 0b1101010, 0b0110101]  # the oldest bit is the lowest
    expected = [(odd if j % 2 else even)[window] for j, window in enumerate(windows)]
    assert decode_part(part, 64, rows)[0, :5].tolist() == [float(value) for value in expected]


def test_a_scale_of_zero_is_kept() -> None:
    for scale_bits in (8, 16):
        codec = Trellis(trellis_format(4, 16, scale_bits), 64)
        scales = codec.store_scales(torch.tensor([[0.0, 1.0, 0.5, 0.0]]))
        assert (codec.load_scales(scales) == 0).tolist() == [[True, False, False, True]]


def test_tables_hold_what_the_format_says() -> None:
    assert tuple(TRELLIS_TABLES) == tuple(TRELLIS_UNITS) == TRELLIS_WIDTHS
    for width in TRELLIS_WIDTHS:
        assert len(bytes.fromhex(TRELLIS_TABLES[width])) == (256 if width % 2 else 128)
        assert trellis_values(width).abs().max() == 127


def test_the_specification_and_both_languages_have_the_same_tables() -> None:
    documented = json.loads((ROOT / "docs" / "trellis-tables.json").read_text())
    assert [int(width) for width in documented] == list(TRELLIS_WIDTHS)
    stored = b"".join(np.array(tables, np.int8).tobytes() for tables in documented.values())
    for width, tables in documented.items():
        assert np.array(tables, np.int8).tobytes() == bytes.fromhex(TRELLIS_TABLES[int(width)]), width
        assert {len(table) for table in tables} == {128}
    assert hashlib.sha256(stored).hexdigest() in (ROOT / "docs" / "format.md").read_text()
    (header,) = (ROOT / "runtime").rglob("trellis_tables.h")
    tables_in_cpp = re.findall(r"\{ // width (\d)(.*?)\}", header.read_text(), re.DOTALL)
    numbers = [int(number) for _, table in tables_in_cpp for number in re.findall(r"-?\d+", table)]
    assert [width for width, _ in tables_in_cpp] == [width for width, tables in documented.items() for _ in tables]
    assert np.array(numbers, np.int8).tobytes() == stored


def test_formats_that_rows_cannot_have_are_named() -> None:
    cases = [
        (trellis_format(2, 64), "trellis of width 2, expected one of 3, 4, 5, 6, 7, 8"),
        (trellis_format(9, 64), "trellis of width 9, expected one of 3, 4, 5, 6, 7, 8"),
        (trellis_format(4, 48), "group size 48, expected one of 16, 32, 64, 128 or row"),
        (trellis_format(4, 64, 4), "scales of 4 bits, expected 8 or 16"),
        (trellis_format(4, 128), "group size 128 does not divide rows of 192 values"),
        (trellis_format(4, 64), None),
    ]
    for part, fault in cases:
        with case(part, fault):
            assert format_fault(part, 192) == fault
