"""The product of many tokens with a dense matrix, beside its plain twin."""

import pytest
import torch
from random_experts import random_rows, random_tokens

from moe_pack.formats import BF16, part_format
from moe_pack.runtime.kernels.codes import part_of, stored_part
from moe_pack.runtime.kernels.gemm import gemm
from moe_pack.runtime.matrix import RowMatrix, StoredMatrix, linear

# The same float32 products, summed in another order than torch's.
TOLERANCE = 1e-5  # of the reference's RMS


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    error, size = (found - expected).abs().max(), expected.square().mean().sqrt()
    assert error <= TOLERANCE * size, f"off by {error / size} of the reference's RMS"


@pytest.mark.parametrize(
    "stored",
    [BF16, *(part_format(width, group) for width in (1, 2, 3, 4, 8) for group in (16, 32, 64, 0))]
    + [part_format(width, 64, 8) for width in (1, 3, 4)],
    ids=str,
)
@pytest.mark.parametrize("num_cols", [64, 320])
def test_rows_of_every_format_multiply_as_their_twin(stored, num_cols) -> None:
    layout, rows = random_rows(stored, 33, num_cols)
    held, x, out = torch.from_numpy(rows), random_tokens(5, num_cols), torch.full((5, 33), torch.nan)
    gemm(x, held, part_of(layout, "weight"), layout.row_bytes // 16, out)
    assert_close(out, linear(x, RowMatrix(layout, held)))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_stored_values_multiply_as_their_twin(dtype) -> None:
    torch_dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]
    weight = torch.randn(7, 72, generator=torch.Generator().manual_seed(0)).to(torch_dtype)
    x, out = random_tokens(3, 72), torch.full((3, 7), torch.nan)
    gemm(x, weight.view(torch.uint8), stored_part(dtype, 72), weight[0].nbytes // 16, out)
    assert_close(out, linear(x, StoredMatrix(weight)))
