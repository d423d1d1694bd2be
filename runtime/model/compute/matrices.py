"""Dense matrices `[out, in]`: they multiply, and give rows in float32.

A matrix may be in memory, in its stored bytes, or on disk. At most 16 MiB of it are in float32 at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import RowLayout
from moe_pack.runtime import cpu
from moe_pack.runtime.model.compute.operations import (
    TORCH,
    NativeOperations,
    NativeProduct,
    Operations,
    Product,
    product_by_blocks,
    row_blocks,
)

TORCH_DTYPES = {  # by their names in safetensors
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I32": torch.int32,
    "I64": torch.int64,
}


class Matrix(Protocol):
    """A matrix that gives its rows in float32."""

    num_rows: int
    num_cols: int

    def rows(self, start: int, stop: int) -> Tensor:
        """Returns rows `start` to `stop`, float32 [stop - start, num_cols]."""


class InMemoryMatrix(ABC):
    """A matrix in memory, which may multiply faster than row by row."""

    @abstractmethod
    def take(self, ids: Tensor) -> Tensor:
        """Returns the rows with these numbers, int64 [n] on the CPU: float32 [n, num_cols] on the matrix's device."""

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """Returns `x @ matrix.T`, float32 [T, num_rows], for x float32 [T, num_cols]."""


class DivisibleMatrix(InMemoryMatrix):
    """A matrix in memory whose rows can be divided into matrices."""

    @property
    def native(self) -> NativeProduct | None:
        """The rows as the kernels see them; None if no kernel multiplies them."""
        return None

    @abstractmethod
    def part(self, start: int, stop: int) -> Matrix:
        """Returns rows `start` to `stop` as a matrix that shares this one's memory."""


class _RowsInMemory(DivisibleMatrix):
    """A matrix that decodes its stored rows, and that its operations multiply by `product`."""

    def __init__(self, stored: Tensor, num_cols: int, product: Product) -> None:
        self.num_rows, self.num_cols, self._stored, self._product = len(stored), num_cols, stored, product

    @abstractmethod
    def _decoded(self, stored: Tensor) -> Tensor: ...

    def rows(self, start: int, stop: int) -> Tensor:
        return self._decoded(self._stored[start:stop])

    def take(self, ids: Tensor) -> Tensor:
        return self._decoded(self._stored[ids.to(self._stored.device)])

    def product(self, x: Tensor) -> Tensor:
        return self._product(x)

    @property
    def native(self) -> NativeProduct | None:
        return self._product if isinstance(self._product, NativeProduct) else None


class StoredMatrix(_RowsInMemory):
    """A matrix of 16- or 32-bit values, or of integers, on the device of its operations."""

    def __init__(self, weight: Tensor, operations: Operations = TORCH) -> None:
        super().__init__(weight, weight.shape[1], operations.stored_product(weight))
        self._operations = operations

    def _decoded(self, stored: Tensor) -> Tensor:
        return stored.to(torch.float32)

    def part(self, start: int, stop: int) -> "StoredMatrix":
        return StoredMatrix(self._stored[start:stop], self._operations)


class RowMatrix(_RowsInMemory):
    """A matrix in rows of the row layout, u8 [num_rows, row_bytes], on the device of its operations."""

    def __init__(self, layout: RowLayout, stored: Tensor, operations: Operations = TORCH) -> None:
        super().__init__(stored, layout.num_cols, operations.row_product(layout, stored))
        (self._part,) = layout.parts
        self._layout, self._operations = layout, operations

    def _decoded(self, stored: Tensor) -> Tensor:
        return self._operations.decode(self._layout, self._part, stored)

    def part(self, start: int, stop: int) -> "RowMatrix":
        return RowMatrix(self._layout, self._stored[start:stop], self._operations)

    def to_panels(self) -> "RowMatrix | PanelMatrix":
        """Returns this matrix in panels, which take its memory, where kernels multiply them; else itself."""
        operations, product = self._operations, self.native
        if product is None or not isinstance(operations, NativeOperations):
            return self
        is_done = operations.kernels.put_in_panels(product.layout, product.rows)
        return PanelMatrix(self._layout, product.rows, operations) if is_done else self


class PanelMatrix(DivisibleMatrix):
    """A matrix in memory that native operations have put into panels: u8 [num_rows, row_bytes], 16 rows a panel."""

    def __init__(self, layout: RowLayout, panels: cpu.Bytes, operations: NativeOperations) -> None:
        (self._part,) = layout.parts
        self.num_rows, self.num_cols = len(panels), layout.num_cols
        self._layout, self._panels, self._operations = layout, panels, operations
        self._numbers = cpu.panel_numbers(cpu.row_numbers(layout, self._part.name))
        self._product = NativeProduct(operations.kernels, self._numbers, panels)

    def rows(self, start: int, stop: int) -> Tensor:
        return self._decoded(self._taken(np.arange(start, stop, dtype=np.int32)))

    def take(self, ids: Tensor) -> Tensor:
        return self._decoded(self._taken(ids.numpy().astype(np.int32)))

    def product(self, x: Tensor) -> Tensor:
        return self._product(x)

    @property
    def native(self) -> NativeProduct:
        return self._product

    def part(self, start: int, stop: int) -> "RowMatrix | PanelMatrix":
        if start % cpu.PANEL_ROWS or stop % cpu.PANEL_ROWS:
            return RowMatrix(self._layout, self._taken(np.arange(start, stop, dtype=np.int32)), self._operations)
        return PanelMatrix(self._layout, self._panels[start:stop], self._operations)

    def _taken(self, numbers: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(self._operations.kernels.take_rows(self._numbers, self._panels, numbers))

    def _decoded(self, rows: Tensor) -> Tensor:
        return self._operations.decode(self._layout, self._part, rows)


class ReadMatrix:
    """A matrix whose rows `start` to `stop` a function reads when they are needed, float32."""

    def __init__(self, num_rows: int, num_cols: int, read: Callable[[int, int], Tensor]) -> None:
        self.num_rows, self.num_cols, self._read = num_rows, num_cols, read

    def rows(self, start: int, stop: int) -> Tensor:
        return self._read(start, stop)


def rows_of(matrix: Matrix, start: int, stop: int) -> Matrix:
    """Returns rows `start` to `stop` of a matrix as a matrix of their own."""
    if isinstance(matrix, DivisibleMatrix):
        return matrix.part(start, stop)
    return ReadMatrix(stop - start, matrix.num_cols, lambda first, last: matrix.rows(start + first, start + last))


def linear(x: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    """Returns `x @ matrix.T + bias`, float32 [T, out], for x float32 [T, in] and bias float32 [out]."""
    if isinstance(matrix, InMemoryMatrix):
        y = matrix.product(x)
    else:
        y = product_by_blocks(x, matrix.num_rows, matrix.num_cols, matrix.rows)
    return y if bias is None else y + bias


def linear_each(x: Tensor, each: Sequence[Matrix]) -> list[Tensor]:
    """Returns `linear` of each of some matrices of one input; native kernels take some side by side."""
    found = [matrix.native if isinstance(matrix, DivisibleMatrix) else None for matrix in each]
    native = [product for product in found if product is not None]
    if not 1 < len(native) == len(each) <= cpu.MOST_PRODUCTS:
        return [linear(x, matrix) for matrix in each]
    return native[0].kernels.products(x, [(product.layout, product.rows) for product in native])


def linear_by_group(x: Tensor, matrix: Matrix, num_groups: int) -> Tensor:
    """Multiplies each share of x's columns [T, groups * in] with the same share of rows: [T, groups * out]."""
    step = matrix.num_rows // num_groups
    parts = (rows_of(matrix, group * step, (group + 1) * step) for group in range(num_groups))
    return torch.cat([linear(each, part) for each, part in zip(x.chunk(num_groups, dim=1), parts, strict=True)], dim=1)


def gather_rows(matrix: Matrix, ids: Tensor) -> Tensor:
    """Returns the rows with these numbers, int64 [T] on the CPU: float32 [T, in]; it may be a view of the matrix."""
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
