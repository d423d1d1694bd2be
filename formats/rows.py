"""The row layout: parts side by side, then a CRC-32, padded to 16 bytes. One for selectors, records, dense matrices.

A row is all that one neuron (or one output of a dense matrix) needs, and depends on no other row's bytes.
Specified in docs/format.md.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats.errors import PackError
from moe_pack.formats.plan import ExpertFormat, PartFormat
from moe_pack.formats.spec import MATRICES, ExpertSpec, Matrix, Selector, record_matrices, selector_matrices

ROW_ALIGN, CRC_BYTES = 16, 4
Bytes2D = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Part:
    """One matrix's share of a row: `offset` and `num_bytes` of codes, scales and zeros, then its bias if it has one."""

    name: str
    format: PartFormat
    offset: int
    num_bytes: int
    has_bias: bool


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where everything lies in a row for `num_cols` weights a part; `row_bytes` includes CRC and padding."""

    parts: tuple[Part, ...]
    num_cols: int
    crc_offset: int
    row_bytes: int

    def part(self, name: str) -> Part | None:
        """The part called `name`, or None."""
        return next((part for part in self.parts if part.name == name), None)


def row_layout(parts: list[tuple[str, PartFormat, bool]], num_cols: int) -> RowLayout:
    """The layout of rows with these parts: name, format, whether a float32 bias follows."""
    placed, end = [], 0
    for name, part_format, has_bias in parts:
        num_bytes = part_format.part_bytes(num_cols)
        placed.append(Part(name, part_format, end, num_bytes, has_bias))
        end += num_bytes + 4 * has_bias
    return RowLayout(tuple(placed), num_cols, end, _row_bytes(end))


def extra_layout(num_floats: int) -> RowLayout | None:
    """The layout of a row that is float32 values alone, and what ends a row; None where there are no values."""
    return RowLayout((), num_floats, 4 * num_floats, _row_bytes(4 * num_floats)) if num_floats else None


def _row_bytes(num_bytes: int) -> int:
    return -(-(num_bytes + CRC_BYTES) // ROW_ALIGN) * ROW_ALIGN


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """One expert's extent: `f` selector rows (where the kind has any), `f` records, then a row of float32 extras."""

    selector: RowLayout | None
    records: RowLayout
    num_rows: int
    extra: RowLayout | None

    @property
    def selector_bytes(self) -> int:
        """Bytes of all selector rows."""
        return self.num_rows * self.selector.row_bytes if self.selector else 0

    @property
    def records_bytes(self) -> int:
        """Bytes of all records."""
        return self.num_rows * self.records.row_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the extent: selector, records, extra."""
        return self.selector_bytes + self.records_bytes + self.extra_bytes

    @property
    def extra_bytes(self) -> int:
        """Bytes of the row of extras."""
        return self.extra.row_bytes if self.extra else 0

    def rows(self) -> tuple[RowLayout, ...]:
        """The kinds of rows that there are."""
        return tuple(rows for rows in (self.selector, self.records, self.extra) if rows is not None)

    def find(self, matrix: Matrix) -> tuple[RowLayout, Part, int] | None:
        """The rows that hold `matrix`, its part in them, and where these rows begin in the extent; None if nowhere."""
        if self.selector is not None and (part := self.selector.part(matrix)) is not None:
            return self.selector, part, 0
        part = self.records.part(matrix)
        return None if part is None else (self.records, part, self.selector_bytes)


def expert_layout(expert: ExpertFormat, selector: Selector, spec: ExpertSpec, hidden_size: int) -> ExpertLayout:
    """The layout of an expert stored as `expert` says, for this selector kind."""

    def rows(matrices: tuple[Matrix, ...]) -> RowLayout:
        parts = [
            (m, part, m in spec.row_bias) for m in MATRICES if m in matrices and (part := expert.of(m)) is not None
        ]
        return row_layout(list(parts), hidden_size)

    selected = selector_matrices(selector, spec.matrices)
    return ExpertLayout(
        selector=rows(selected) if selected else None,
        records=rows(record_matrices(selector, spec.matrices)),
        num_rows=spec.intermediate_size,
        extra=extra_layout(spec.extra_floats),
    )


def write_rows(layout: RowLayout, sections: Mapping[str, Bytes2D], out: Bytes2D) -> None:
    """Puts the parts' bytes side by side into rows, with CRC and zero padding.

    Args:    sections: for each part, u8 [rows, part's bytes and bias].   out: u8 [rows, row_bytes], overwritten.
    """
    for part in layout.parts:
        section = sections[part.name]
        out[:, part.offset : part.offset + section.shape[1]] = section
    seal_rows(layout, out)


def seal_rows(layout: RowLayout, out: Bytes2D) -> None:
    """Puts into rows whose parts are there what ends each: its CRC, and zero padding.

    Args:    out: u8 [rows, row_bytes].
    """
    out[:, layout.crc_offset :] = 0
    crcs = row_crcs(layout, out)
    out[:, layout.crc_offset : layout.crc_offset + 4] = crcs.astype("<u4").view(np.uint8).reshape(-1, 4)


def row_crcs(layout: RowLayout, rows: Bytes2D) -> NDArray[np.uint32]:
    """CRC-32 (zlib's polynomial) of each row's bytes before its CRC field: u32 [rows]."""
    held = np.ascontiguousarray(rows).data.cast("B")
    size, end = rows.shape[1], layout.crc_offset
    return np.fromiter(
        (zlib.crc32(held[start : start + end]) for start in range(0, len(held), size)), np.uint32, rows.shape[0]
    )


def check_rows(layout: RowLayout, rows: Bytes2D, place: str) -> None:
    """Checks every row's CRC and that its padding is zero.

    Raises:  PackError naming the first damaged row.
    """
    stored = np.ascontiguousarray(rows[:, layout.crc_offset : layout.crc_offset + 4]).view("<u4")[:, 0]
    wrong = np.flatnonzero(row_crcs(layout, rows) != stored)
    if wrong.size:
        raise PackError(f"{place}: row {wrong[0]}: CRC-32 does not match its bytes; the file is damaged")
    padded = np.flatnonzero(rows[:, layout.crc_offset + 4 :].any(axis=1))
    if padded.size:
        raise PackError(f"{place}: row {padded[0]}: padding is not zero")
