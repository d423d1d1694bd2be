"""A pack's weights as its checkpoint had them, written piece by piece into the tensors of an export.

`PlainExpert`: an expert in the source's coordinates and its order of neurons, each neuron once. `ExportUnit`: a dense
tensor, an expert, or, where a tensor has all experts of a layer, that layer. A unit computes the bytes of its tensors
a few rows at a time, and never has more than one expert in memory.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack import formats
from moe_pack.calib.quantize import LayerRotation
from moe_pack.convert.export.source import Owner, SourceModel, owners
from moe_pack.formats.families import claiming
from moe_pack.formats.pack import safetensors
from moe_pack.formats.pack.codecs import affine
from moe_pack.formats.pack.layouts import DenseLayout
from moe_pack.runtime.model import Operations, pack_weights
from moe_pack.runtime.model.compute.matrices import TORCH_DTYPES

_BLOCK_BYTES = 16 << 20  # of an export's tensor, computed at once
Put = Callable[[str, int, NDArray[np.uint8]], None]  # writes bytes into a tensor, from a byte of it on
Rows = Callable[[int, int], Tensor]  # returns rows of a matrix as the checkpoint stores it, [rows, columns]


class PlainExpert:
    """An expert of an open pack: `matrices` [f, d] and `biases`, in the source's order and coordinates.

    The second row of a repeated neuron is added to its first.
    Args:    order: int64 [rows], the source's neuron in each row.   dtype: of the matrices.
    """

    def __init__(
        self, pack: formats.Pack, place: tuple[int, int], order: Tensor, dtype: torch.dtype, operations: Operations
    ) -> None:
        (layer_idx, expert), spec = place, pack.spec.expert
        layout, rotation = pack.layout.experts[layer_idx][expert], LayerRotation.of(pack.rotation, layer_idx)
        is_first = torch.ones(len(order), dtype=torch.bool)
        is_first[1:] = order[1:] != order[:-1]
        f, d = spec.source_size, pack.spec.hidden_size
        self.matrices: dict[formats.Matrix, Tensor] = {
            matrix: torch.empty((f, d), dtype=dtype) for matrix in spec.matrices
        }
        self.biases: dict[formats.Matrix, Tensor] = {m: torch.empty(f) for m in spec.bias if m != "down"}
        down = torch.zeros((f, d)) if spec.repeats else None
        self._extent, self._layout = torch.from_numpy(pack.read_extent(layer_idx, expert)), layout
        self._first, self._order, self._is_rotated = is_first, order, rotation.vectors is not None
        packed, start = pack_weights.PackedExpert(layout, self._extent, operations), 0
        for block in packed.blocks():
            some = slice(start, start + len(block.up))
            rows, first, start = order[some], is_first[some], some.stop
            parts: dict[formats.Matrix, tuple[Tensor | None, Tensor | None]] = {
                "gate": (block.gate, block.gate_bias),
                "up": (block.up, block.up_bias),
            }
            for matrix, (stored, bias) in parts.items():
                if stored is not None:
                    self.matrices[matrix][rows[first]] = rotation.source_rows(matrix, stored[first]).to(dtype)
                if bias is not None:
                    self.biases[matrix][rows[first]] = bias[first]
            if down is None:
                self.matrices["down"][rows] = rotation.source_rows("down", block.down).to(dtype)
            else:
                down.index_add_(0, rows, block.down)
        if down is not None:
            for first_row, size in safetensors.split_bytes(0, f, max(_BLOCK_BYTES // (4 * d), 1)):
                some = slice(first_row, first_row + size)
                self.matrices["down"][some] = rotation.source_rows("down", down[some]).to(dtype)
        if (bias := packed.down_bias()) is not None:
            self.biases["down"] = rotation.source_rows("down", bias[None])[0]

    def scales(self, matrix: formats.Matrix) -> tuple[Tensor, Tensor] | None:
        """Returns scales and zeros of rows in the source's order, float32 [f, groups] each; None without such."""
        place = self._layout.find(matrix)
        assert place is not None, f"{matrix} is one of the family's matrices"
        layout, part, base = place
        if part.format.codec != "affine" or self._is_rotated:
            return None
        rows = self._extent[base : base + self._layout.num_rows * layout.row_bytes].view(-1, layout.row_bytes)
        codec = affine(part.format, layout.num_cols)
        stored = rows[:, part.scales_offset : part.scales_offset + 2 * codec.scale_bytes]
        found = codec.load_scales(stored[:, : codec.scale_bytes], stored[:, codec.scale_bytes :])
        pair = torch.stack(found)[:, self._first]
        scale, zero = (torch.empty_like(each).index_copy_(0, self._order[self._first], each) for each in pair)
        return scale, zero

    def rows(self, owner: Owner, source: claiming.SourceMatrix) -> Rows:
        """Returns the rows of a matrix or a bias as a checkpoint has them."""
        if owner.kind == "bias":
            values = self.biases[owner.name][:, None]  # type: ignore[index]  # an owner's name is a matrix
        else:
            values = self.matrices[owner.name]  # type: ignore[index]  # likewise
            values = values.T if source.neurons == "columns" else values
        return lambda start, stop: values[start:stop]


def dense_rows(pack: formats.Pack, dense: DenseLayout, operations: Operations) -> Rows:
    """Returns rows of a dense tensor: the values of its stored bytes, float32 if it is quantized."""

    def rows(start: int, stop: int) -> Tensor:
        raw = torch.from_numpy(pack.read_dense(dense.entry, start, stop))
        if dense.rows is not None:
            return pack_weights.stored_matrix(dense, raw, operations).rows(0, stop - start)
        return raw.view(TORCH_DTYPES[dense.dtype]).view(stop - start, -1)

    return rows


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of a tensor, counted flat, of `row_size` values, with the places of all that they have."""

    tensor: str
    first_row: int
    num_rows: int
    row_size: int
    places: tuple[tuple[Owner, claiming.SourceMatrix], ...]

    def blocks(
        self, rows_of: Callable[[Owner, claiming.SourceMatrix], Rows], dtype: torch.dtype
    ) -> Iterator[tuple[int, Tensor]]:
        """Yields row by row of the tensor: the first row's number, and the values of some, in `dtype`."""
        given = [(source, rows_of(owner, source)) for owner, source in self.places]
        step = max(_BLOCK_BYTES // (self.row_size * dtype.itemsize), 1)
        for start, size in safetensors.split_bytes(self.first_row, self.num_rows, step):
            out = torch.zeros((size, self.row_size), dtype=dtype)
            for source, rows in given:
                _fill(out, start, source, rows)
            yield start, out


def _fill(out: Tensor, start: int, source: claiming.SourceMatrix, rows: Rows) -> None:
    """Puts the rows of a matrix that lie in rows `start`, ... of its tensor into `out` [rows, row_size]."""
    stop = start + len(out)
    if source.transposed:
        out[:] = rows(0, source.num_rows).T[start:stop].to(out.dtype)
        return
    step = source.row_step
    low = max(-(-(start - source.first_row) // step), 0)
    high = min(-(-(stop - source.first_row) // step), source.num_rows)
    if low >= high:
        return
    first = source.first_row + low * step - start
    last_col = source.first_col + source.num_cols * source.col_step
    values = rows(low, high).to(out.dtype).view(high - low, source.num_cols)
    out[first::step][: high - low, source.first_col : last_col : source.col_step] = values


def pieces_of(claims: claiming.Claims) -> dict[str, list[Piece]]:
    """Returns the pieces of each tensor that has values of the model, rising; matrices that interlock share one."""
    spans: dict[str, list[tuple[int, int, int, Owner, claiming.SourceMatrix]]] = {}
    for owner, source in owners(claims):
        first, size = (0, source.num_rows) if source.transposed else (source.first_row, source.row_size)
        count = source.num_cols if source.transposed else (source.num_rows - 1) * source.row_step + 1
        spans.setdefault(source.tensor, []).append((first, first + count, size, owner, source))
    pieces: dict[str, list[Piece]] = {}
    for tensor, found in spans.items():
        found.sort(key=lambda span: span[:2])
        groups, end = list[list[tuple[int, int, int, Owner, claiming.SourceMatrix]]](), -1
        for span in found:
            if span[0] >= end:
                groups.append([])
            groups[-1].append(span)
            end = max(end, span[1])
        for group in groups:
            first, _, size, *_ = group[0]
            num_rows = max(span[1] for span in group) - first
            places = tuple((owner, source) for *_, owner, source in group)
            pieces.setdefault(tensor, []).append(Piece(tensor, first, num_rows, size, places))
    return pieces


@dataclass(frozen=True, slots=True, eq=False)
class ExportUnit:
    """Tensors that are written at once."""

    name: str  # for progress
    tensors: tuple[safetensors.StoredTensor, ...]  # values that nothing is put into are zero
    write: Callable[[Put], None]  # computes the bytes of all tensors and puts them


def put_rows(put: Put, tensor: str, first_row: int, values: Tensor) -> None:
    """Puts rows of a tensor, values [rows, row_size] in its dtype."""
    raw = values.contiguous().view(torch.uint8).numpy().reshape(-1)
    put(tensor, first_row * values.shape[1] * values.dtype.itemsize, raw)


class PackSource:
    """An open pack with its order of neurons and its checkpoint, from which the units of an export are computed.

    Raises:  as `SourceModel.of`.
    """

    def __init__(self, pack: formats.Pack, operations: Operations) -> None:
        self.pack, self.operations = pack, operations
        self.model, self.order = SourceModel.of(pack), pack.read_order()

    def expert(self, layer: int, expert: int, dtype: torch.dtype) -> PlainExpert:
        """Reads an expert of a decoder layer."""
        place = self.model.spec.moe_layers.index(layer), expert
        order = torch.from_numpy(self.order[place].astype(np.int64))
        return PlainExpert(self.pack, place, order, dtype, self.operations)


def _put_dense(source: PackSource, dtype: torch.dtype, pieces: list[Piece], put: Put) -> None:
    dense = {each.role.name: each for each in source.pack.layout.dense}

    def rows_of(owner: Owner, place: claiming.SourceMatrix) -> Rows:
        return dense_rows(source.pack, dense[owner.name], source.operations)

    for piece in pieces:
        for first, values in piece.blocks(rows_of, dtype):
            put_rows(put, piece.tensor, first, values)


def _put_experts(source: PackSource, group: "ExpertTensors", put: Put) -> None:
    dtypes = {name: TORCH_DTYPES[dtype] for name, dtype, _ in group.tensors}
    for expert, pieces in group.pieces.items():
        weights = {dtypes[piece.tensor] for piece in pieces if piece.places[0][0].kind == "matrix"}
        (dtype,) = weights if len(weights) == 1 else (torch.float32,)
        plain = source.expert(group.layer, expert, dtype)
        for piece in pieces:
            for first, values in piece.blocks(plain.rows, dtypes[piece.tensor]):
                put_rows(put, piece.tensor, first, values)


def _put_table(pack: formats.Pack, layer: int, start: int, tensor: safetensors.StoredTensor, put: Put) -> None:
    """Puts rows of the n-gram table of a decoder layer, from its row `start` on."""
    table = next(table for table in pack.layout.ngrams if table.layer == layer)
    name, _, (num_rows, *_) = tensor
    row_bytes = table.rows.crc_offset
    for first, count in safetensors.split_bytes(0, num_rows, max(_BLOCK_BYTES // table.rows.row_bytes, 1)):
        rows = pack.read_ngrams(table, start + first, start + first + count)
        put(name, first * row_bytes, np.ascontiguousarray(rows[:, :row_bytes]).reshape(-1))


def _put_numbers(name: str, numbers: tuple[int, ...], put: Put) -> None:
    put(name, 0, np.array(numbers, "<i8").view(np.uint8))


def _put_unused(pack: formats.Pack, name: str, put: Put) -> None:
    for item in pack.layout.items():
        if item.kind == "unused" and item.role == name:
            put(name, item.start, pack.read_unused(item.offset, item.num_bytes))


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTensors:
    """The tensors of a layer's experts that have no tensor in common with others: of one expert, or of all."""

    layer: int
    pieces: Mapping[int, list[Piece]]  # by expert
    tensors: tuple[safetensors.StoredTensor, ...]

    @property
    def name(self) -> str:
        """The name of the unit that writes them."""
        which = f" expert {next(iter(self.pieces))}" if len(self.pieces) == 1 else ", all experts"
        return f"layer {self.layer}{which}"


def expert_groups(model: SourceModel, claims: claiming.Claims, tensors: claiming.Tensors) -> Iterator[ExpertTensors]:
    """Yields the tensors of experts in groups that can be written one after the other."""
    by_expert: dict[tuple[int, int], list[Piece]] = {}
    for pieces in pieces_of(claims).values():
        for piece in pieces:
            owner = piece.places[0][0]
            if owner.kind != "dense":
                by_expert.setdefault((owner.layer, owner.expert), []).append(piece)
    for layer in model.spec.moe_layers:
        of_layer = {expert: found for (at, expert), found in by_expert.items() if at == layer}
        names = [{piece.tensor for piece in found} for found in of_layer.values()]
        are_apart = sum(map(len, names)) == len(set().union(*names))
        groups = [{expert: found} for expert, found in of_layer.items()] if are_apart else [of_layer]
        for group in groups:
            used = dict.fromkeys(piece.tensor for found in group.values() for piece in found)
            yield ExpertTensors(layer, group, tuple((name, *tensors[name]) for name in used))


def dense_units(source: PackSource, claims: claiming.Claims, tensors: claiming.Tensors) -> Iterator[ExportUnit]:
    """Yields the units of all tensors but those of experts."""

    def unit(name: str, put: Callable[[Put], None]) -> ExportUnit:
        return ExportUnit(name, ((name, *tensors[name]),), put)

    for name, pieces in pieces_of(claims).items():
        if pieces[0].places[0][0].kind == "dense":
            yield unit(name, partial(_put_dense, source, TORCH_DTYPES[tensors[name][0]], pieces))
    for layer, parts in claims.tables.items():
        start = 0
        for part in parts:
            stored = (part.tensor, *tensors[part.tensor])
            yield unit(part.tensor, partial(_put_table, source.pack, layer, start, stored))
            start += part.num_rows
    for name, numbers in source.model.claims.constants.items():
        yield unit(name, partial(_put_numbers, name, numbers))
    for name in claims.unused:
        yield unit(name, partial(_put_unused, source.pack, name))


def plain_units(source: PackSource, claims: claiming.Claims, tensors: claiming.Tensors) -> Iterator[ExportUnit]:
    """Yields the units of a checkpoint whose weights are all plain."""
    yield from dense_units(source, claims, tensors)
    for group in expert_groups(source.model, claims, tensors):
        yield ExportUnit(group.name, group.tensors, partial(_put_experts, source, group))


def tensor_bytes(tensors: tuple[safetensors.StoredTensor, ...]) -> int:
    """Returns the bytes of some tensors."""
    return sum(safetensors.DTYPE_BYTES[dtype] * int(np.prod(shape, dtype=np.int64)) for _, dtype, shape in tensors)
