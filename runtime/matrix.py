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
# One row alone takes as long as so many in a row: 10 of 2,048 values to 100 of 128 (Zen 5, 2026-11-21).
_MANY_ROWS = 16


class Matrix(Protocol):
    """A matrix whose rows can be had in float32."""

    num_rows: int
    num_cols: int

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop`, float32 [stop - start, num_cols]."""
        ...


class Multiplying(ABC):
    """A matrix that can multiply by itself, faster than by its rows."""

    @abstractmethod
    def product(self, x: Tensor) -> Tensor | None:
        """`x @ matrix.T`, float32 [T, num_rows], for x float32 [T, num_cols]; None where it cannot."""


class StoredMatrix(Multiplying):
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

    def product(self, x: Tensor) -> Tensor | None:
        """`x @ matrix.T`, float32 [T, num_rows], for x float32 [T, num_cols]; None without kernels."""
        if self._kernels is None:
            return None
        return self._kernels.product(x, self._numbers, self._bytes)


class RowMatrix(Multiplying):
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
    y = matrix.product(x) if isinstance(matrix, Multiplying) else None
    if y is None:
        # Nothing small may outlive a block's rows: it would lie in their room, and the next rows would need new room.
        y = x.new_empty((len(x), matrix.num_rows))
        for start, stop in row_blocks(matrix.num_rows, matrix.num_cols):
            y[:, start:stop] = x @ matrix.rows(start, stop).T
    return y if bias is None else y + bias


def gather_rows(matrix: Matrix, ids: Tensor) -> Tensor:
    """The rows with these numbers, float32 [len(ids), in]: the embedding of tokens. May be a view of the matrix."""
    numbers = ids.tolist()
    if len(numbers) == 1:
        return matrix.rows(numbers[0], numbers[0] + 1)
    distinct = sorted(set(numbers))  # a text has few: each is read once
    if _MANY_ROWS * len(distinct) >= matrix.num_rows and 4 * matrix.num_rows * matrix.num_cols <= MAX_DECODED_BYTES:
        return matrix.rows(0, matrix.num_rows)[ids]
    place = {number: idx for idx, number in enumerate(distinct)}
    return torch.cat([matrix.rows(i, i + 1) for i in distinct])[[place[number] for number in numbers]]
