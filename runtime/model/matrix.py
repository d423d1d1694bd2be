"""Dense matrices `[out, in]` as the decoder sees them: they multiply, and give rows in float32.

A matrix may be in memory, in its stored bytes, or on disk. At most 16 MiB of it are in float32 at a time.
"""

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from moe_pack.formats import RowLayout
from moe_pack.runtime.model.operations import TORCH, Operations, product_by_blocks, row_blocks

TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}  # by their names in safetensors


class Matrix(Protocol):
    """A matrix that gives its rows in float32."""

    num_rows: int
    num_cols: int

    def rows(self, start: int, stop: int) -> Tensor:
        """Returns rows `start` to `stop`, float32 [stop - start, num_cols]."""
        ...


class InMemoryMatrix(ABC):
    """A matrix whose bytes are in memory: it gives any rows at once, and may multiply faster than row by row."""

    @abstractmethod
    def take(self, ids: Tensor) -> Tensor:
        """Returns the rows with these numbers, int64 [n] on the CPU: float32 [n, num_cols] on the matrix's device."""

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """Returns `x @ matrix.T`, float32 [T, num_rows], for x float32 [T, num_cols]."""


class StoredMatrix(InMemoryMatrix):
    """A matrix of 16- or 32-bit values, on the device of its operations."""

    def __init__(self, weight: Tensor, operations: Operations = TORCH) -> None:
        self._weight = weight
        self._product = operations.stored_product(weight)
        self.num_rows, self.num_cols = weight.shape

    def rows(self, start: int, stop: int) -> Tensor:
        """Returns rows `start` to `stop`, float32 [stop - start, num_cols]."""
        return self._weight[start:stop].to(torch.float32)

    def take(self, ids: Tensor) -> Tensor:
        """Returns the rows with these numbers, float32 [n, num_cols]."""
        return self._weight[ids.to(self._weight.device)].to(torch.float32)

    def product(self, x: Tensor) -> Tensor:
        """Returns `x @ matrix.T`, float32 [T, num_rows], for x float32 [T, num_cols]."""
        return self._product(x)


class RowMatrix(InMemoryMatrix):
    """A matrix in rows of the row layout, u8 [num_rows, row_bytes], on the device of its operations."""

    def __init__(self, layout: RowLayout, stored: Tensor, operations: Operations = TORCH) -> None:
        (self._part,) = layout.parts
        self._layout = layout
        self._stored = stored
        self._operations = operations
        self._product = operations.row_product(layout, stored)
        self.num_rows, self.num_cols = stored.shape[0], layout.num_cols

    def rows(self, start: int, stop: int) -> Tensor:
        """Returns rows `start` to `stop`, float32 [stop - start, num_cols]."""
        return self._operations.decode(self._layout, self._part, self._stored[start:stop])

    def take(self, ids: Tensor) -> Tensor:
        """Returns the rows with these numbers, float32 [n, num_cols]; their bytes are gathered, then decoded once."""
        return self._operations.decode(self._layout, self._part, self._stored[ids.to(self._stored.device)])

    def product(self, x: Tensor) -> Tensor:
        """Returns `x @ matrix.T`, float32 [T, num_rows], for x float32 [T, num_cols]."""
        return self._product(x)


def linear(x: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    """Returns `x @ matrix.T + bias`: by the matrix's own product if it is in memory, else a block of rows at a time.

    Args:    x: float32 [T, in].   bias: float32 [out].
    Returns: float32 [T, out].
    """
    if isinstance(matrix, InMemoryMatrix):
        y = matrix.product(x)
    else:
        y = product_by_blocks(x, matrix.num_rows, matrix.num_cols, matrix.rows)
    return y if bias is None else y + bias


def gather_rows(matrix: Matrix, ids: Tensor) -> Tensor:
    """Returns the embedding of tokens: the rows with these numbers, float32 [T, in]; it may be a view of the matrix.

    Args:    ids: int64 [T], on the CPU.
    """
    if len(ids) == 1:
        number = int(ids[0])
        return matrix.rows(number, number + 1)
    distinct, places = torch.unique(ids, return_inverse=True)  # a text repeats its tokens; each row is decoded once
    if isinstance(matrix, InMemoryMatrix):
        pieces = [matrix.take(distinct[start:stop]) for start, stop in row_blocks(len(distinct), matrix.num_cols)]
    else:
        pieces = [matrix.rows(number, number + 1) for number in distinct.tolist()]
    rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return rows[places.to(rows.device)]
