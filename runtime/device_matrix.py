"""A dense matrix on a device, multiplied by Triton kernels as it is stored. Importing this needs triton."""

import torch
from torch import Tensor

from moe_pack.formats import DenseLayout
from moe_pack.runtime.kernels.codes import Part, part_of, stored_part
from moe_pack.runtime.kernels.gemm import gemm
from moe_pack.runtime.kernels.gemv import gather_row, gemv
from moe_pack.runtime.matrix import TORCH_DTYPES, InMemoryMatrix, RowMatrix, StoredMatrix


class DeviceMatrix(InMemoryMatrix):
    """A matrix [num_rows, num_cols] in rows of the row layout, or in plain values; see `Matrix`.

    Args:    raw: u8, all its bytes, on the device.
    """

    def __init__(self, dense: DenseLayout, raw: Tensor) -> None:
        self.num_rows, self.num_cols = dense.role.shape
        self._plain: RowMatrix | StoredMatrix
        if dense.rows is not None:
            self._held = raw.view(-1, dense.rows.row_bytes)
            self.part: Part = part_of(dense.rows, dense.rows.parts[0].name)
            self._plain = RowMatrix(dense.rows, self._held)
        else:
            self._held = raw.view(TORCH_DTYPES[dense.dtype]).view(-1, self.num_cols)
            self.part = stored_part(dense.dtype, self.num_cols)
            self._plain = StoredMatrix(self._held)

    @property
    def held(self) -> Tensor:
        """Its rows as they are stored: u8 [num_rows, row bytes], or values [num_rows, num_cols]."""
        return self._held

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop`, float32 [stop - start, num_cols]."""
        return self._plain.rows(start, stop)

    def take(self, ids: Tensor) -> Tensor:
        """The rows with these numbers, float32 [n, num_cols]."""
        return self._plain.take(ids)

    def product(self, x: Tensor) -> Tensor:
        """`x @ matrix.T`, float32 [T, num_rows], for x float32 [T, num_cols]."""
        out = torch.empty((len(x), self.num_rows), device=x.device)
        if len(x) == 1:
            gemv(x[0].contiguous(), self._held, self.part, out[0])
        else:
            row_units = self._held.stride(0) * self._held.element_size() // 16
            gemm(x.contiguous(), self._held.view(torch.uint8), self.part, row_units, out)
        return out

    def times(
        self, x: Tensor, out: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, scale: float = 1.0
    ) -> None:
        """Writes `residual + scale * (matrix @ x + bias)` to `out`, float32 [num_rows], for x float32 [num_cols]."""
        gemv(x, self._held, self.part, out, bias=bias, residual=residual, scale=scale)

    def gather(self, row_id: Tensor, out: Tensor, scale: float) -> None:
        """Writes the row whose number is in `row_id`, int32 [1], times `scale` to `out`, float32 [num_cols]."""
        gather_row(self._held, self.part, row_id, out, scale=scale)
