"""The row layout: offsets worked out by hand, CRC-32 by its definition, and what `check_rows` refuses."""

import re

import numpy as np
import pytest
from numpy.typing import NDArray
from support.cases import case

from moe_pack.formats import BF16, ExpertFormat, ExpertSpec, PackError, RowLayout, part_format
from moe_pack.formats.pack.layouts import check_rows, expert_layout, row_layout, seal_rows, write_rows

FOUR = part_format(4, 16)  # 64 columns: 32 bytes of codes, 4 groups: 8 of scales, 8 of zeros; 48 in all
BYTE_SCALES = part_format(4, 16, 8)  # 32 of codes, 2 + 4 of scales, 2 + 4 of zeros; 44 in all
THREE = part_format(3, 0)  # 24 of codes, 2 of scale, 2 of zero; 28 in all


def crc32(raw: bytes) -> int:
    """CRC-32 bit by bit: reflected polynomial EDB88320, all ones before and after."""
    crc = 0xFFFFFFFF
    for byte in raw:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0xEDB88320 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def sections_of(layout: RowLayout, rows: int) -> dict[str, NDArray[np.uint8]]:
    generator = np.random.default_rng(0)
    return {
        part.name: generator.integers(0, 256, (rows, part.num_bytes + 4 * part.has_bias), np.uint8)
        for part in layout.parts
    }


def written(layout: RowLayout, rows: int = 5) -> NDArray[np.uint8]:
    out = np.full((rows, layout.row_bytes), 255, np.uint8)
    write_rows(layout, sections_of(layout, rows), out)
    return out


def test_a_part_takes_its_codes_its_scales_and_its_zeros() -> None:
    cases = [
        (FOUR, 64, 48), (BYTE_SCALES, 64, 44), (THREE, 64, 28), (BF16, 64, 128),
        (part_format(8, 128), 128, 128 + 2 + 2), (part_format(2, 32), 448, 112 + 28 + 28),
        (part_format(1, 64, 8), 192, 24 + 5 + 5), (part_format(3, 128), 4096, 1536 + 64 + 64),
    ]  # fmt: skip
    for part, cols, num_bytes in cases:
        with case(part, cols, num_bytes):
            layout = row_layout([("weight", part, False)], cols)  # type: ignore[list-item]  # a table of mixed parameters
            assert layout.parts[0].num_bytes == num_bytes


def test_parts_lie_where_hand_computation_puts_them() -> None:
    cases = [
        ([("up", FOUR, False)], [(0, 32)], 48, 64),
        ([("gate", FOUR, False), ("down", FOUR, False)], [(0, 64), (32, 80)], 96, 112),
        ([("gate", FOUR, True), ("down", THREE, False)], [(0, 56), (32, 76)], 80, 96),
        (
            [("gate", THREE, True), ("up", BYTE_SCALES, True), ("down", BF16, True)],
            [(0, 192), (32, 200), (64, 216)],
            220,
            224,
        ),
        ([("up", BYTE_SCALES, False)], [(0, 32)], 44, 48),  # the CRC ends the row: no padding
        ([("up", THREE, False)], [(0, 24)], 28, 32),
    ]
    for parts, places, crc_offset, row_bytes in cases:
        with case(parts, places, crc_offset, row_bytes):
            layout = row_layout(parts, 64)  # type: ignore[arg-type]  # a table of mixed parameters
            assert [(part.offset, part.scales_offset) for part in layout.parts] == places
            assert (layout.crc_offset, layout.row_bytes) == (crc_offset, row_bytes)


def test_the_crc_here_is_the_usual_one() -> None:
    assert crc32(b"123456789") == 0xCBF43926


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_row_is_all_codes_then_scales_and_biases_the_crc_and_zeros(has_bias: bool) -> None:
    layout = row_layout([("gate", THREE, has_bias), ("down", BYTE_SCALES, False)], 64)
    sections = sections_of(layout, 5)
    for row, gate, down in zip(written(layout), sections["gate"], sections["down"], strict=True):
        codes = gate[:24].tobytes() + b"\0" * 8 + down[:32].tobytes()
        body = codes + gate[24:].tobytes() + down[32:].tobytes()
        expected = body + crc32(body).to_bytes(4, "little")
        assert row.tobytes() == expected + b"\0" * (-len(expected) % 16)


def test_a_row_does_not_depend_on_any_other() -> None:
    layout = row_layout([("up", FOUR, False)], 64)
    sections = sections_of(layout, 5)
    one = np.empty((1, layout.row_bytes), np.uint8)
    write_rows(layout, {"up": sections["up"][3:4]}, one)
    assert np.array_equal(one[0], written(layout)[3])


def test_rows_as_written_are_accepted() -> None:
    layout = row_layout([("gate", FOUR, True), ("down", THREE, False)], 64)
    check_rows(layout, written(layout), "experts-000.safetensors: expert 1: records")


def test_a_changed_bit_in_codes_scales_bias_or_crc_is_refused() -> None:
    for byte in [0, 47, 48, 51, 79, 80, 83]:
        with case(byte):
            layout = row_layout([("gate", FOUR, True), ("down", THREE, False)], 64)
            rows = written(layout)
            rows[2, byte] ^= 1
            rows[4, byte] ^= 1
            with pytest.raises(PackError) as refused:
                check_rows(layout, rows, "experts-000.safetensors: expert 1: records")
            where = "experts-000.safetensors: expert 1: records: row 2"
            assert str(refused.value) == f"{where}: CRC-32 does not match its bytes; the file is damaged"


@pytest.mark.parametrize("byte", [84, 95])
def test_padding_that_is_not_zero_is_refused(byte: int) -> None:
    layout = row_layout([("gate", FOUR, True), ("down", THREE, False)], 64)
    rows = written(layout)
    rows[3, byte] = 1
    with pytest.raises(PackError, match=f"^{re.escape('dense.safetensors: embed: row 3: padding is not zero')}$"):
        check_rows(layout, rows, "dense.safetensors: embed")


def test_bytes_between_codes_that_are_not_zero_are_refused() -> None:
    layout = row_layout([("gate", THREE, False), ("down", FOUR, False)], 64)
    for byte in (24, 31):
        rows = written(layout)
        rows[1, byte] = 1
        seal_rows(layout, rows)
        with case(byte), pytest.raises(PackError, match=r"^records: row 1: padding is not zero$"):
            check_rows(layout, rows, "records")
    for byte in (23, 32):  # codes
        rows = written(layout)
        rows[1, byte] ^= 1
        seal_rows(layout, rows)
        check_rows(layout, rows, "records")


def test_rows_that_change_places_are_still_whole() -> None:
    layout = row_layout([("up", FOUR, False)], 64)
    check_rows(layout, np.ascontiguousarray(written(layout)[::-1]), "selector")


GATED = ExpertSpec("silu", 48, ("gate", "up", "down"), (), 0)
TWO_MATRICES = ExpertSpec("silu", 48, ("up", "down"), ("up",), 64)


def test_each_selector_kind_puts_its_matrices_into_selector_and_record() -> None:
    cases = [
        ("up", ["up"], ["gate", "down"]), ("gate", ["gate"], ["up", "down"]), ("both", ["gate", "up"], ["down"]),
        ("none", [], ["gate", "up", "down"]),
    ]  # fmt: skip
    for selector, selected, recorded in cases:
        with case(selector, selected, recorded):
            layout = expert_layout(ExpertFormat(FOUR, FOUR, FOUR), selector, GATED, 64)
            assert [part.name for part in layout.selector.parts] if layout.selector else selected == []
            assert [part.name for part in layout.records.parts] == recorded


def test_an_extent_is_all_selectors_then_all_records() -> None:
    cases = [("up", 64, 112), ("gate", 64, 112), ("both", 112, 64), ("none", 0, 160)]
    for selector, selector_row, record_row in cases:
        with case(selector, selector_row, record_row):
            layout = expert_layout(ExpertFormat(FOUR, FOUR, FOUR), selector, GATED, 64)
            assert layout.selector_bytes == 48 * selector_row
            assert layout.records_bytes == 48 * record_row
            assert layout.num_bytes == 48 * (selector_row + record_row)


def test_a_matrix_is_found_in_selector_or_records() -> None:
    layout = expert_layout(ExpertFormat(THREE, FOUR, BYTE_SCALES), "up", GATED, 64)
    places = {}
    for matrix in GATED.matrices:
        found = layout.find(matrix)
        assert found is not None
        _, part, base = found
        places[matrix] = (base, part.offset, part.num_bytes)
    # Selector rows are 48 + 4 bytes, padded to 64; 48 of them come first.
    assert places == {"up": (0, 0, 48), "gate": (3072, 0, 28), "down": (3072, 32, 44)}


def test_an_expert_of_two_matrices_has_up_with_bias_down_and_extras() -> None:
    layout = expert_layout(ExpertFormat(None, FOUR, THREE), "up", TWO_MATRICES, 64)
    assert layout.selector is not None
    assert [(part.name, part.offset, part.has_bias) for part in layout.selector.parts] == [("up", 0, True)]
    assert (layout.selector.crc_offset, layout.selector.row_bytes) == (52, 64)
    assert [(part.name, part.offset, part.has_bias) for part in layout.records.parts] == [("down", 0, False)]
    assert layout.find("gate") is None
    assert layout.num_bytes == 48 * 64 + 48 * 32 + (4 * 64 + 16)


def test_an_expert_of_two_matrices_without_selector_is_records_alone() -> None:
    layout = expert_layout(ExpertFormat(None, FOUR, THREE), "none", TWO_MATRICES, 64)
    assert layout.selector is None
    assert [(part.name, part.offset) for part in layout.records.parts] == [("up", 0), ("down", 32)]
    assert (layout.records.crc_offset, layout.records.row_bytes) == (80, 96)
    assert layout.num_bytes == 48 * 96 + (4 * 64 + 16)
