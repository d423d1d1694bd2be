"""The layout of a pack before its bytes exist: each file's size, each extent's place, each row's parts.

The layout follows from the model's spec and the plan alone: sizes are known before the conversion, and writer and
reader compute the same places. A row is all that one neuron (or one output of a dense matrix) needs: the codes of its
parts, each on a multiple of 16 bytes, then their scales, zeros and biases, then a CRC-32, padded to 16 bytes
(docs/pack.md).
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats.base import errors
from moe_pack.formats.pack import plans, safetensors
from moe_pack.formats.parts import DenseRole, specs

ROW_ALIGN, CRC_BYTES = 16, 4
Bytes2D = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Part:
    """A matrix's bytes in a row."""

    name: str
    format: plans.PartFormat
    offset: int  # where its codes begin
    scales_offset: int  # where its scales begin; its zeros and its bias, if any, follow
    code_bytes: int
    num_bytes: int  # of codes, scales and zeros
    has_bias: bool

    @property
    def bias_offset(self) -> int:
        """The place of the part's float32 bias, if it has one."""
        return self.scales_offset + self.num_bytes - self.code_bytes


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The places in a row of `num_cols` weights a part."""

    parts: tuple[Part, ...]
    num_cols: int
    crc_offset: int
    row_bytes: int  # with CRC and padding

    def part(self, name: str) -> Part | None:
        """Returns the part called `name`, or None."""
        return next((part for part in self.parts if part.name == name), None)


def row_layout(parts: Sequence[tuple[str, plans.PartFormat, bool]], num_cols: int) -> RowLayout:
    """Returns the layout of rows with these parts: name, format, whether a float32 bias follows."""
    placed, end = [], 0
    offsets = []
    for _, part_format, _ in parts:
        offsets.append(-(-end // ROW_ALIGN) * ROW_ALIGN)
        end = offsets[-1] + part_format.code_bytes(num_cols)
    for offset, (name, part_format, has_bias) in zip(offsets, parts, strict=True):
        num_bytes, code_bytes = part_format.part_bytes(num_cols), part_format.code_bytes(num_cols)
        placed.append(Part(name, part_format, offset, end, code_bytes, num_bytes, has_bias))
        end += num_bytes - code_bytes + 4 * has_bias
    return RowLayout(tuple(placed), num_cols, end, _row_bytes(end))


def plain_layout(num_values: int, dtype: str) -> RowLayout:
    """Returns the layout of a row of values of a 16- or 32-bit dtype, CRC and padding."""
    num_bytes = num_values * safetensors.DTYPE_BYTES[dtype]
    return RowLayout((), num_values, num_bytes, _row_bytes(num_bytes))


def _row_bytes(num_bytes: int) -> int:
    return -(-(num_bytes + CRC_BYTES) // ROW_ALIGN) * ROW_ALIGN


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """One expert's extent: `f` selector rows (if the kind has any), `f` records, then a row of float32 extras."""

    selector: RowLayout | None
    records: RowLayout
    num_rows: int
    extra: RowLayout | None

    @property
    def selector_bytes(self) -> int:
        """The bytes of all selector rows."""
        return self.num_rows * self.selector.row_bytes if self.selector else 0

    @property
    def records_bytes(self) -> int:
        """The bytes of all records."""
        return self.num_rows * self.records.row_bytes

    @property
    def num_bytes(self) -> int:
        """The bytes of the extent."""
        return self.selector_bytes + self.records_bytes + self.extra_bytes

    @property
    def extra_bytes(self) -> int:
        """The bytes of the row of extras."""
        return self.extra.row_bytes if self.extra else 0

    def rows(self) -> tuple[RowLayout, ...]:
        """Returns the layouts of all its rows."""
        return tuple(rows for rows in (self.selector, self.records, self.extra) if rows is not None)

    def find(self, matrix: specs.Matrix) -> tuple[RowLayout, Part, int] | None:
        """Returns the rows with `matrix`, its part in them, and their offset in the extent; None if it has none."""
        if self.selector is not None and (part := self.selector.part(matrix)) is not None:
            return self.selector, part, 0
        part = self.records.part(matrix)
        return None if part is None else (self.records, part, self.selector_bytes)


def expert_layout(
    expert: plans.ExpertFormat, selector: specs.Selector, spec: specs.ExpertSpec, hidden_size: int
) -> ExpertLayout:
    """Returns the layout of an expert with these formats and this selector kind."""

    def rows(matrices: tuple[specs.Matrix, ...]) -> RowLayout:
        parts = [
            (m, part, m in spec.row_bias)
            for m in specs.MATRICES
            if m in matrices and (part := expert.of(m)) is not None
        ]
        return row_layout(parts, hidden_size)

    selected = specs.selector_matrices(selector, spec.matrices)
    return ExpertLayout(
        selector=rows(selected) if selected else None,
        records=rows(specs.record_matrices(selector, spec.matrices)),
        num_rows=spec.intermediate_size,
        extra=plain_layout(spec.extra_floats, "F32") if spec.extra_floats else None,
    )


def write_rows(layout: RowLayout, sections: Mapping[str, Bytes2D], out: Bytes2D) -> None:
    """Writes the parts' bytes into rows, with CRC and zero padding.

    Args:    sections: for each part, u8 [rows, bytes of part and bias].   out: u8 [rows, row_bytes], overwritten.
    """
    out[:] = 0
    for part in layout.parts:
        section, codes = sections[part.name], part.code_bytes
        out[:, part.offset : part.offset + codes] = section[:, :codes]
        out[:, part.scales_offset : part.scales_offset + section.shape[1] - codes] = section[:, codes:]
    seal_rows(layout, out)


def seal_rows(layout: RowLayout, out: Bytes2D) -> None:
    """Writes the CRC and the zero padding of u8 [rows, row_bytes] whose parts are already written."""
    out[:, layout.crc_offset :] = 0
    crcs = row_crcs(layout, out)
    out[:, layout.crc_offset : layout.crc_offset + 4] = crcs.astype("<u4").view(np.uint8).reshape(-1, 4)


def row_crcs(layout: RowLayout, rows: Bytes2D) -> NDArray[np.uint32]:
    """Returns the CRC-32 (zlib's polynomial) of each row's bytes before its CRC field: u32 [rows]."""
    raw = np.ascontiguousarray(rows).data.cast("B")
    size, end = rows.shape[1], layout.crc_offset
    return np.fromiter(
        (zlib.crc32(raw[start : start + end]) for start in range(0, len(raw), size)), np.uint32, rows.shape[0]
    )


def check_rows(layout: RowLayout, rows: Bytes2D, place: str, numbers: int | NDArray[np.int64] = 0) -> None:
    """Checks every row's CRC and that its padding is zero.

    Args:    rows: u8 [rows, row_bytes].   place: for messages.   numbers: the number of the first row, or of each.
    Raises:  PackError that names the first damaged row.
    """

    def row(idx: np.int64) -> int:
        return int(numbers + idx if isinstance(numbers, int) else numbers[idx])

    stored = np.ascontiguousarray(rows[:, layout.crc_offset : layout.crc_offset + 4]).view("<u4")[:, 0]
    wrong = np.flatnonzero(row_crcs(layout, rows) != stored)
    if wrong.size:
        raise errors.PackError(f"{place}: row {row(wrong[0])}: CRC-32 does not match its bytes; the file is damaged")
    gaps = [slice(part.offset + part.code_bytes, after.offset) for part, after in pairwise(layout.parts)]
    gaps.append(slice(layout.crc_offset + 4, layout.row_bytes))
    padded = np.flatnonzero(np.any([rows[:, gap].any(axis=1) for gap in gaps], axis=0))
    if padded.size:
        raise errors.PackError(f"{place}: row {row(padded[0])}: padding is not zero")


# Offsets, sizes and addresses of direct reads are multiples of a disk block, so experts begin on one.
DISK_BLOCK_BYTES = 4096
DENSE_ALIGN = 64  # one cache line
DENSE_FILE = "dense.safetensors"
UNUSED_FILE = "unused-000.safetensors"
# Larger dense tensors are written in pieces of whole rows, so that none is in memory whole. The number of rows is a
# multiple of the rows that any quantizer solves together, so that pieces change no byte.
_PIECE_BYTES, _PIECE_ROWS = 128 << 20, 512


def experts_file(layer: int) -> str:
    """Returns the name of the file with the experts of decoder layer `layer`."""
    return f"experts-{layer:03d}.safetensors"


TABLE = "table"  # the tensor in a file of `ngrams_file`


def ngrams_file(layer: int) -> str:
    """Returns the name of the file with the n-gram table of decoder layer `layer`."""
    return f"ngrams-{layer:03d}.safetensors"


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """A dense tensor as it will be stored: in rows if `rows` is set, else as the source's bytes."""

    role: DenseRole
    dtype: str
    rows: RowLayout | None
    entry: safetensors.TensorEntry


@dataclass(frozen=True, slots=True)
class NgramLayout:
    """The n-gram table of a decoder layer as it will be stored: rows of values of the source's dtype."""

    layer: int
    dtype: str
    rows: RowLayout
    num_rows: int
    file: safetensors.TensorFileLayout

    @property
    def offset(self) -> int:
        """The place of row 0 in the file."""
        return len(self.file.header)


@dataclass(frozen=True, slots=True)
class Item:
    """A range of a file that is written, and entered in the journal, at once."""

    kind: Literal["header", "expert", "dense", "unused", "ngrams"]
    file: str
    offset: int
    num_bytes: int
    layer: int = -1  # counts MoE layers for experts, and layers with n-grams for tables
    expert: int = -1
    role: str = ""  # the tensor's name in its file
    first_row: int = 0  # of a dense tensor's rows, or of an n-gram table's
    start: int = 0  # of an unused tensor's bytes


@dataclass(frozen=True, slots=True)
class PackLayout:
    """The files and extents of a pack. `l` counts MoE layers."""

    spec: specs.ModelSpec
    experts: tuple[tuple[ExpertLayout, ...], ...]  # [l][e]
    offsets: tuple[tuple[int, ...], ...]  # [l][e]: of the expert's extent in its layer's file, in bytes
    expert_files: tuple[safetensors.TensorFileLayout, ...]  # [l]
    dense: tuple[DenseLayout, ...]
    dense_file: safetensors.TensorFileLayout
    unused_file: safetensors.TensorFileLayout | None = None
    rotation_bytes: int = 0  # of the vectors of rotated layers; 0 if no layer is rotated
    ngrams: tuple[NgramLayout, ...] = ()

    def read_dense(self) -> Iterator[DenseLayout]:
        """Yields the dense tensors that a token reads whole: all but an embedding that is not the head, and tables."""
        for dense in self.dense:
            if not dense.role.integers and (dense.role.name != "embed" or self.spec.tied_head):
                yield dense

    def files(self) -> Iterator[tuple[str, safetensors.TensorFileLayout]]:
        """Yields name and layout of each large file. These are laid out before they are written."""
        yield DENSE_FILE, self.dense_file
        for layer, file in zip(self.spec.moe_layers, self.expert_files, strict=True):
            yield experts_file(layer), file
        if self.unused_file is not None:
            yield UNUSED_FILE, self.unused_file
        for table in self.ngrams:
            yield ngrams_file(table.layer), table.file

    def items(self) -> Iterator[Item]:
        """Yields all ranges of the large files, in the order of writing."""
        yield Item("header", DENSE_FILE, 0, len(self.dense_file.header))
        for dense in self.dense:
            yield from _dense_items(dense.entry)
        for layer_idx, layer in enumerate(self.spec.moe_layers):
            name, file, experts = experts_file(layer), self.expert_files[layer_idx], self.experts[layer_idx]
            yield Item("header", name, 0, len(file.header))
            for expert, layout in enumerate(experts):
                yield Item("expert", name, self.offsets[layer_idx][expert], layout.num_bytes, layer_idx, expert)
        if self.unused_file is not None:
            yield Item("header", UNUSED_FILE, 0, len(self.unused_file.header))
            for entry in self.unused_file.entries:
                if not entry.name.startswith("pad."):
                    for offset, size in safetensors.split_bytes(entry.offset, entry.num_bytes, _PIECE_BYTES):
                        start = offset - entry.offset
                        yield Item("unused", UNUSED_FILE, offset, size, role=entry.name, start=start)
        for place, table in enumerate(self.ngrams):
            yield Item("header", ngrams_file(table.layer), 0, len(table.file.header))
            yield from _table_items(place, table)


def _dense_items(entry: safetensors.TensorEntry) -> Iterator[Item]:
    num_rows, row_bytes = entry.shape[0], entry.num_bytes // entry.shape[0]
    step = max(_PIECE_BYTES // row_bytes // _PIECE_ROWS, 1) * _PIECE_ROWS
    for first in range(0, num_rows, step):
        rows = min(step, num_rows - first)
        offset = entry.offset + first * row_bytes
        yield Item("dense", DENSE_FILE, offset, rows * row_bytes, role=entry.name, first_row=first)


def _table_items(place: int, table: NgramLayout) -> Iterator[Item]:
    row_bytes = table.rows.row_bytes
    step = max(_PIECE_BYTES // row_bytes, 1)
    for first in range(0, table.num_rows, step):
        rows, offset = min(step, table.num_rows - first), table.offset + first * row_bytes
        yield Item("ngrams", ngrams_file(table.layer), offset, rows * row_bytes, place, role=TABLE, first_row=first)


def pack_layout(
    spec: specs.ModelSpec,
    plan: plans.Plan,
    dense_dtypes: Sequence[str],
    unused: Sequence[safetensors.StoredTensor] = (),
    table_dtypes: Sequence[str] = (),
) -> PackLayout:
    """Returns the layout of the pack of a model with `plan`.

    Args:    dense_dtypes: the source's safetensors dtypes, in the order of `dense_roles`; F8_E4M3 that the plan keeps
             is stored in rows of `fp8`.   unused: tensors that are kept, but not run.   table_dtypes: of the n-gram
             table of each layer that has one; none: BF16.
    Raises:  PlanError if the plan is for another model, or has formats that its rows do not allow.
    """
    fault = plans.plan_fault(plan, spec)
    if fault:
        raise errors.PlanError(f"plan: {fault}")
    spec = specs.with_repeats(spec, plan.repeats)
    kinds = {expert for layer in plan.experts for expert in layer}  # few, of thousands of experts
    known = {kind: expert_layout(kind, plan.selector, spec.expert, spec.hidden_size) for kind in kinds}
    experts = tuple(tuple(known[expert] for expert in layer) for layer in plan.experts)
    dense = [
        _kept(role, dtype) if part is None else (dtype, part)
        for role, dtype, part in zip(specs.dense_roles(spec), dense_dtypes, plan.dense, strict=True)
    ]
    return layout_of(spec, experts, dense, unused, table_dtypes)


def _kept(role: DenseRole, dtype: str) -> tuple[str, plans.PartFormat | None]:
    """Returns dtype and format of a dense tensor that keeps the source's values; FP8 is F32 in rows of unfit length."""
    if dtype != "F8_E4M3":
        return dtype, None
    return ("F32", None) if plans.format_fault(plans.FP8, role.shape[-1]) else (dtype, plans.FP8)


def layout_of(
    spec: specs.ModelSpec,
    experts: tuple[tuple[ExpertLayout, ...], ...],
    dense_formats: Sequence[tuple[str, plans.PartFormat | None]],
    unused: Sequence[safetensors.StoredTensor] = (),
    table_dtypes: Sequence[str] = (),
) -> PackLayout:
    """Returns the layout of a pack.

    Args:    experts: [MoE layer][expert].   dense_formats: for each of `dense_roles`, the dtype in the source and the
             format of its rows; None stores the source's bytes.   unused, table_dtypes: as for `pack_layout`.
    """
    roles = specs.dense_roles(spec)
    rows = [
        row_layout([("weight", part, False)], role.shape[1]) if part else None
        for role, (_, part) in zip(roles, dense_formats, strict=True)
    ]
    tensors = [
        (role.name, "U8" if layout else dtype, (role.shape[0], layout.row_bytes) if layout else role.shape)
        for role, layout, (dtype, _) in zip(roles, rows, dense_formats, strict=True)
    ]
    dense_file = safetensors.lay_out([[tensor] for tensor in tensors], DENSE_ALIGN)
    entries = dense_file.by_name()
    dense = tuple(
        DenseLayout(role, dtype, layout, entries[role.name])
        for role, layout, (_, dtype, _) in zip(roles, rows, tensors, strict=True)
    )
    expert_files = tuple(_expert_file(layer) for layer in experts)
    offsets = tuple(_extent_offsets(file, len(layer)) for file, layer in zip(expert_files, experts, strict=True))
    unused_file = safetensors.lay_out([[tensor] for tensor in unused], DENSE_ALIGN) if unused else None
    tables = _tables(spec, table_dtypes)
    return PackLayout(spec, experts, offsets, expert_files, dense, dense_file, unused_file, ngrams=tables)


def _tables(spec: specs.ModelSpec, dtypes: Sequence[str]) -> tuple[NgramLayout, ...]:
    if spec.ngrams is None:
        return ()
    tables, layers = [], spec.ngrams.layers
    for layer, dtype in zip(layers, dtypes or ("BF16",) * len(layers), strict=True):
        num_rows, row_values = spec.ngrams.table_shape(layer)
        rows = plain_layout(row_values, dtype)
        # A row has the source's values and, as further values of their dtype, its CRC-32 and padding.
        shape = (num_rows, rows.row_bytes // safetensors.DTYPE_BYTES[dtype])
        file = safetensors.lay_out([[(TABLE, dtype, shape)]], DISK_BLOCK_BYTES)
        tables.append(NgramLayout(layer, dtype, rows, num_rows, file))
    return tuple(tables)


def whole_blocks(num_bytes: int) -> int:
    """Returns bytes rounded up to whole disk blocks."""
    return -(-num_bytes // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES


def _expert_file(layer: Sequence[ExpertLayout]) -> safetensors.TensorFileLayout:
    groups: list[list[safetensors.StoredTensor]] = []
    for number, expert in enumerate(layer):
        group: list[safetensors.StoredTensor] = []
        if expert.selector is not None:
            group.append((f"{number}.selector", "U8", (expert.num_rows, expert.selector.row_bytes)))
        group.append((f"{number}.records", "U8", (expert.num_rows, expert.records.row_bytes)))
        if expert.extra is not None:
            group.append((f"{number}.extra", "U8", (1, expert.extra.row_bytes)))
        groups.append(group)
    return safetensors.lay_out(groups, DISK_BLOCK_BYTES)


def _extent_offsets(file: safetensors.TensorFileLayout, num_experts: int) -> tuple[int, ...]:
    first: dict[str, int] = {}
    for entry in file.entries:
        first.setdefault(entry.name.partition(".")[0], entry.offset)
    return tuple(first[str(expert)] for expert in range(num_experts))
