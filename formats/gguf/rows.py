"""Rows of a family's tensors, read from the tensors of a GGUF file.

`TensorRows` reads a GGUF tensor: F32, F16 and BF16 as they are, every other type dequantized to float32 by the `gguf`
package. The others undo what llama.cpp's converter rearranged, range by range: no tensor is ever whole in memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import RangeReader
from moe_pack.formats.gguf import header

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

AS_THEY_ARE = ("F32", "F16", "BF16")
MXFP4_BYTES = 17  # of a block of 32 values: the scale, then 16 bytes of codes
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1}


class Rows(ABC):
    """A matrix, or a vector as one row, whose rows can be read."""

    dtype: str  # of safetensors
    num_rows: int
    num_cols: int

    def types(self) -> frozenset[str]:
        """Returns the types of the GGUF tensors below."""
        below = (value for value in vars(self).values())
        each = (value if isinstance(value, list | tuple) else (value,) for value in below)
        return frozenset().union(*(rows.types() for group in each for rows in group if isinstance(rows, Rows)))

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return self.num_cols * _ITEM_BYTES[self.dtype]

    def read(self, start: int, stop: int) -> Bytes:
        """Reads rows: u8 [rows, row_bytes], own memory. Raises CheckpointError if the file is cut short."""
        return self._read(start, stop)

    @abstractmethod
    def _read(self, start: int, stop: int) -> Bytes: ...

    def floats(self, start: int, stop: int) -> Floats:
        """Reads rows of a floating dtype as float32 [rows, num_cols]."""
        raw = self.read(start, stop)
        if self.dtype == "F32":
            return raw.view("<f4")
        if self.dtype == "F16":
            return raw.view("<f2").astype(np.float32)
        assert self.dtype == "BF16", self.dtype
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


def can_dequantize(type_name: str) -> bool:
    """Returns whether tensors of a GGML type can be read."""
    package = header.gguf_package()
    kind = package.GGMLQuantizationType[type_name]
    block, num_bytes = package.GGML_QUANT_SIZES[kind]
    try:
        package.quants.dequantize(np.zeros((1, num_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return bool(block)


class TensorRows(Rows):
    """Rows of a GGUF tensor."""

    def __init__(self, reader: RangeReader, tensor: header.GgufTensor) -> None:
        self._reader = reader
        self._tensor = tensor
        self.num_rows = tensor.num_rows
        self.num_cols = tensor.shape[-1]
        self.dtype = tensor.type if tensor.type in AS_THEY_ARE else "F32"

    def types(self) -> frozenset[str]:
        """Returns the tensor's type."""
        return frozenset((self._tensor.type,))

    def stored(self, start: int, stop: int) -> Bytes:
        """Reads rows in the file's bytes: u8 [rows, bytes]."""
        size = self._tensor.row_bytes
        raw = self._reader.read(self._tensor.offset + start * size, (stop - start) * size)
        return raw.reshape(stop - start, size)

    def _read(self, start: int, stop: int) -> Bytes:
        raw = self.stored(start, stop)
        if self._tensor.type in AS_THEY_ARE or start == stop:
            return raw.reshape(stop - start, self.row_bytes)
        package = header.gguf_package()
        with np.errstate(all="ignore"):  # scales of blocks that are zero
            values = package.quants.dequantize(raw, package.GGMLQuantizationType[self._tensor.type])
        return np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(stop - start, self.row_bytes)


class Part(Rows):
    """`count` rows from `first` on."""

    def __init__(self, rows: Rows, first: int, count: int) -> None:
        self._rows, self._first = rows, first
        self.num_rows, self.num_cols, self.dtype = count, rows.num_cols, rows.dtype

    def _read(self, start: int, stop: int) -> Bytes:
        return self._rows.read(self._first + start, self._first + stop)

    def of(self, encoded: "type[Mxfp4Codes] | type[Mxfp4Scales]") -> "Part":
        """Returns the codes, or the scales, of the same rows of a tensor in MXFP4 blocks."""
        assert isinstance(self._rows, TensorRows)
        return Part(encoded(self._rows), self._first, self.num_rows)


class Flat(Rows):
    """All values in one row."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.num_rows, self.num_cols, self.dtype = 1, rows.num_rows * rows.num_cols, rows.dtype

    def _read(self, start: int, stop: int) -> Bytes:
        raw = self._rows.read(0, self._rows.num_rows) if start < stop else np.empty(0, np.uint8)
        return raw.reshape(stop - start, self.row_bytes)


class Stacked(Rows):
    """The rows of several, one after the other; float32 if their dtypes differ."""

    def __init__(self, parts: Sequence[Rows], dtype: str | None = None) -> None:
        self._parts = parts
        self.num_rows, self.num_cols = sum(part.num_rows for part in parts), parts[0].num_cols
        self.dtype = dtype or (parts[0].dtype if len({part.dtype for part in parts}) == 1 else "F32")

    def _read(self, start: int, stop: int) -> Bytes:
        pieces, first = [np.empty((0, self.row_bytes), np.uint8)], 0
        for part in self._parts:
            low, high = max(start - first, 0), min(stop - first, part.num_rows)
            if low < high:
                same = part.dtype == self.dtype
                pieces.append(part.read(low, high) if same else part.floats(low, high).view(np.uint8))
            first += part.num_rows
        return np.concatenate(pieces)


class Reordered(Rows):
    """Rows in another order: in each run of `len(order)` rows, row i is row `order[i]` of the rows below."""

    def __init__(self, rows: Rows, order: NDArray[np.int64]) -> None:
        assert rows.num_rows % len(order) == 0, (len(order), rows.num_rows)
        self._rows, self._order = rows, order
        self.num_rows, self.num_cols, self.dtype = rows.num_rows, rows.num_cols, rows.dtype

    def _read(self, start: int, stop: int) -> Bytes:
        if start == stop:
            return self._rows.read(0, 0)
        wanted = np.arange(start, stop)
        places = wanted // len(self._order) * len(self._order) + self._order[wanted % len(self._order)]
        first, last = int(places.min()), int(places.max()) + 1
        if last - first <= 2 * len(places):
            found: Bytes = self._rows.read(first, last)[places - first]
            return found
        runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
        return np.concatenate([self._rows.read(int(run[0]), int(run[-1]) + 1) for run in runs])


class ColumnsReordered(Rows):
    """Columns in another order: column i is column `order[i]` of the rows below."""

    def __init__(self, rows: Rows, order: NDArray[np.int64]) -> None:
        assert rows.num_cols == len(order), (len(order), rows.num_cols)
        self._rows, self._order = rows, order
        self.num_rows, self.num_cols, self.dtype = rows.num_rows, rows.num_cols, rows.dtype

    def _read(self, start: int, stop: int) -> Bytes:
        values = self._rows.read(start, stop).reshape(stop - start, self.num_cols, _ITEM_BYTES[self.dtype])
        return np.ascontiguousarray(values[:, self._order]).reshape(stop - start, self.row_bytes)


class ByHead(Rows):
    """The rows of several, head by head: the first head's of each part, then the second's, and so on."""

    def __init__(self, parts: Sequence[Rows], num_heads: int) -> None:
        self._parts, self._sizes = parts, [part.num_rows // num_heads for part in parts]
        self.num_rows, self.num_cols = sum(self._sizes) * num_heads, parts[0].num_cols
        self.dtype = parts[0].dtype if len({part.dtype for part in parts}) == 1 else "F32"

    def _read(self, start: int, stop: int) -> Bytes:
        size = sum(self._sizes)
        heads = range(start // size, -(-stop // size))
        slices = [
            Part(part, head * count, count)
            for head in heads
            for part, count in zip(self._parts, self._sizes, strict=True)
        ]
        first = start // size * size
        return Stacked(slices, self.dtype).read(start - first, stop - first) if slices else self._parts[0].read(0, 0)


class Changed(Rows):
    """A function of each value, float32."""

    dtype = "F32"

    def __init__(self, rows: Rows, change: Callable[[Floats], Floats]) -> None:
        self._rows, self._change = rows, change
        self.num_rows, self.num_cols = rows.num_rows, rows.num_cols

    def _read(self, start: int, stop: int) -> Bytes:
        return self._change(self._rows.floats(start, stop)).astype("<f4").view(np.uint8)


class KeysAndValues(Rows):
    """The matrix of latent attention from keys `[heads, rank, key]`, transposed, and values `[heads, value, rank]`."""

    dtype = "F32"

    def __init__(self, keys: Rows, values: Rows, num_heads: int, rank: int) -> None:
        self._keys, self._values, self._rank = keys, values, rank
        self._num_keys, self._num_values = keys.num_cols, values.num_rows // num_heads
        self.num_rows, self.num_cols = num_heads * (self._num_keys + self._num_values), rank

    def _read(self, start: int, stop: int) -> Bytes:
        size = self._num_keys + self._num_values
        heads = range(start // size, -(-stop // size))
        pieces = [np.empty((0, self._rank), np.float32)]
        for head in heads:
            pieces.append(self._keys.floats(head * self._rank, (head + 1) * self._rank).T)
            pieces.append(self._values.floats(head * self._num_values, (head + 1) * self._num_values))
        first = start // size * size
        return np.ascontiguousarray(np.concatenate(pieces)[start - first : stop - first], "<f4").view(np.uint8)


class Mxfp4Codes(Rows):
    """The codes of a tensor in MXFP4 blocks, two a byte, in the order of the OCP's format: the even value is low."""

    dtype = "U8"

    def __init__(self, rows: TensorRows) -> None:
        self._rows = rows
        self.num_rows, self.num_cols = rows.num_rows, rows.num_cols // 2

    def _read(self, start: int, stop: int) -> Bytes:
        codes = self._rows.stored(start, stop).reshape(-1, MXFP4_BYTES)[:, 1:]  # byte j: values j and j + 16
        values = np.concatenate((codes & 15, codes >> 4), axis=1)
        pairs: Bytes = values[:, 0::2] | values[:, 1::2] << 4
        return pairs.reshape(stop - start, self.row_bytes)


class Mxfp4Scales(Rows):
    """The scales of a tensor in MXFP4 blocks: a byte for 32 values."""

    dtype = "U8"

    def __init__(self, rows: TensorRows) -> None:
        self._rows = rows
        self.num_rows, self.num_cols = rows.num_rows, rows.num_cols // 32

    def _read(self, start: int, stop: int) -> Bytes:
        blocks = self._rows.stored(start, stop).reshape(stop - start, self.num_cols, MXFP4_BYTES)
        return np.ascontiguousarray(blocks[:, :, 0])
