"""Dense matrices `[out, in]` as the decoder sees them: rows in float32, at most 16 MiB of them at a time."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from moe_pack.formats import Part, RowLayout
from moe_pack.formats.codecs import decode_part
from moe_pack.runtime.native_kernels import Kernels, row_numbers, stored_numbers

TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}  # by their names in safetensors
MAX_DECODED_BYTES = 16 << 20  # no operation dequantizes more than this at once


class Matrix(Protocol):
    """A matrix whose rows can be had in float32."""

    num_rows: int
    num_cols: int

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop`, float32 [stop - start, num_cols]."""
        ...


class InMemoryMatrix(ABC):
    """A matrix whose bytes are all in memory: it gives any rows at once, and may multiply faster than by its rows."""

    @abstractmethod
    def take(self, ids: Tensor) -> Tensor:
        """The rows with these numbers, int64 [n] on the CPU: float32 [n, num_cols] where the matrix lies."""

    @abstractmethod
    def product(self, x: Tensor) -> Tensor | None:
        """`x @ matrix.T`, float32 [T, num_rows], for x float32 [T, num_cols]; None where it cannot."""


class StoredMatrix(InMemoryMatrix):
    """A matrix held in its 16- or 32-bit values, on any device; kernels, which multiply it, need it on the CPU."""

    def __init__(self, weight: Tensor, kernels: Kernels | None = None) -> None:
        self._weight = weight
        self._kernels = kernels
        self.num_rows, self.num_cols = weight.shape
        if kernels is not None:
            self._numbers = stored_numbers(weight.dtype, self.num_cols)
            self._bytes = weight.contiguous().view(torch.uint8).numpy()

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop`, float32 [stop - start, num_cols]."""
        return self._weight[start:stop].to(torch.float32)

    def take(self, ids: Tensor) -> Tensor:
        """The rows with these numbers, float32 [n, num_cols]."""
        return self._weight[ids.to(self._weight.device)].to(torch.float32)

    def product(self, x: Tensor) -> Tensor | None:
        """`x @ matrix.T`, float32 [T, num_rows], for x float32 [T, num_cols]; None without kernels."""
        if self._kernels is None:
            return None
        return self._kernels.product(x, self._numbers, self._bytes)


class RowMatrix(InMemoryMatrix):
    """A matrix held in rows of the row layout, u8 [num_rows, row_bytes]; devices and kernels as above."""

    def __init__(self, layout: RowLayout, held: Tensor, kernels: Kernels | None = None) -> None:
        self._layout = layout
        self._held = held
        self._kernels = kernels
        self.num_rows, self.num_cols = held.shape[0], layout.num_cols
        if kernels is not None:
            self._numbers = row_numbers(layout, layout.parts[0].name)
            self._bytes = held.numpy()

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop`, float32 [stop - start, num_cols]."""
        (part,) = self._layout.parts
        return decoded(self._layout, part, self._held[start:stop], self._kernels)

    def take(self, ids: Tensor) -> Tensor:
        """The rows with these numbers, float32 [n, num_cols]: their bytes are gathered, then decoded once."""
        (part,) = self._layout.parts
        return decoded(self._layout, part, self._held[ids.to(self._held.device)], self._kernels)

    def product(self, x: Tensor) -> Tensor | None:
        """`x @ matrix.T`, float32 [T, num_rows], for x float32 [T, num_cols]; None without kernels."""
        if self._kernels is None:
            return None
        return self._kernels.product(x, self._numbers, self._bytes)


def decoded(layout: RowLayout, part: Part, rows: Tensor, kernels: Kernels | None) -> Tensor:
    """A part of rows u8 [rows, row_bytes] in float32 [rows, columns], the same bits with kernels and without."""
    if kernels is not None:
        return kernels.decode(row_numbers(layout, part.name), rows.numpy())
    return decode_part(part.format, layout.num_cols, rows[:, part.offset : part.offset + part.num_bytes])


def row_blocks(num_rows: int, num_cols: int, parts: int = 1) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive blocks of rows; `parts` matrices of a block fit `MAX_DECODED_BYTES` together."""
    step = max(1, MAX_DECODED_BYTES // (4 * num_cols * parts))
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def linear(x: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    """`x @ matrix.T + bias` in float32: by the kernels of a matrix that has any, else a block of rows at a time.

    Args:    x: float32 [T, in].   bias: float32 [out].
    Returns: float32 [T, out].
    """
    y = matrix.product(x) if isinstance(matrix, InMemoryMatrix) else None
    if y is None:
        # Nothing small may outlive a block's rows: it would lie in their room, and the next rows would need new room.
        y = x.new_empty((len(x), matrix.num_rows))
        for start, stop in row_blocks(matrix.num_rows, matrix.num_cols):
            y[:, start:stop] = x @ matrix.rows(start, stop).T
    return y if bias is None else y + bias


def gather_rows(matrix: Matrix, ids: Tensor) -> Tensor:
    """The rows with these numbers, float32 [len(ids), in]: the embedding of tokens. May be a view of the matrix.

    Args:    ids: int64 [T], on the CPU.
    """
    if len(ids) == 1:
        number = int(ids[0])
        return matrix.rows(number, number + 1)
    distinct, places = torch.unique(ids, return_inverse=True)  # a text repeats its tokens: each row is decoded once
    if isinstance(matrix, InMemoryMatrix):
        pieces = [matrix.take(distinct[start:stop]) for start, stop in row_blocks(len(distinct), matrix.num_cols)]
    else:
        pieces = [matrix.rows(number, number + 1) for number in distinct.tolist()]
    rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return rows[places.to(rows.device)]
