"""The product of many tokens with a dense matrix, compared with its plain twin."""

import pytest
import torch
from support.cases import case
from support.random_codes import NUMBERS
from support.random_experts import random_rows, random_tokens
from torch import Tensor

from moe_pack.formats import BF16, PartFormat, part_format, trellis_format
from moe_pack.formats.pack.plans import TRELLIS_WIDTHS, format_text
from moe_pack.runtime.gpu.kernels.matmul import StoredRows, gemm
from moe_pack.runtime.gpu.kernels.rows import part_of, stored_part
from moe_pack.runtime.model import RowMatrix, StoredMatrix, linear

# The same products in float32, summed in another order than torch's, codes and zeros apart; 2e-6 is the most seen.
TOLERANCE = 1e-5  # of the reference's RMS
# A GPU's tensor cores cut sums off after every 8 products, where others round, and see 22 of 24 bits or fewer of x.
GPU_TOLERANCE = 3e-5
FORMATS = [
    BF16,
    *(part_format(width, group) for width in (1, 2, 3, 4, 8) for group in (16, 32, 64)),
    *(part_format(width, 0) for width in (1, 3)),
    *(part_format(width, 64, 8) for width in (2, 3, 8)),
    *NUMBERS,
    *(trellis_format(width, group) for width in TRELLIS_WIDTHS for group in (16, 64)),
    *(trellis_format(width, group, 8) for width, group in ((4, 32), (5, 0), (8, 64))),
]
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def assert_close(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE if found.device.type == "cpu" else GPU_TOLERANCE
    error, size = (found.cpu() - expected).abs().max(), expected.square().mean().sqrt()
    assert error <= tolerance * size, f"off by {error / size} of the reference's RMS"


def assert_equals_twin(
    stored: PartFormat,
    num_tokens: int,
    num_rows: int,
    num_cols: int,
    device: torch.device,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    layout, rows = random_rows(stored, num_rows, num_cols)
    x, out = random_tokens(num_tokens, num_cols).to(dtype), torch.full((num_tokens, num_rows), torch.nan, device=device)
    held = torch.from_numpy(rows)
    there = None if bias is None else bias.to(device)
    gemm(x.to(device), StoredRows(held.to(device), part_of(layout, "weight")), out, bias=there)
    assert_close(out, linear(x.float(), RowMatrix(layout, held), bias))


def test_rows_of_every_format_multiply_as_their_twin(kernel_device: torch.device) -> None:
    for stored in FORMATS:
        with case(format_text(stored)):
            assert_equals_twin(stored, 3, 5, 192, kernel_device)


def test_tokens_in_bfloat16_multiply_as_in_float32(kernel_device: torch.device) -> None:
    for stored in FORMATS:  # all codes are exact in bfloat16
        with case(format_text(stored)):
            assert_equals_twin(stored, 3, 5, 64, kernel_device, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_in_bfloat16_round_stored_values(dtype: str, kernel_device: torch.device) -> None:
    weight = torch.randn(7, 72, generator=torch.Generator().manual_seed(0)).to(DTYPES[dtype])
    x, out = random_tokens(3, 72).to(torch.bfloat16), torch.full((3, 7), torch.nan, device=kernel_device)
    gemm(x.to(kernel_device), StoredRows(weight.to(kernel_device), stored_part(dtype, 72)), out)
    assert_close(out, linear(x.float(), StoredMatrix(weight.to(torch.bfloat16))))


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(1, 1), (2, 32), (17, 33), (65, 2)])
def test_any_number_of_tokens_and_rows_multiplies_as_its_twin(
    num_tokens: int, num_rows: int, kernel_device: torch.device
) -> None:
    assert_equals_twin(part_format(4, 128), num_tokens, num_rows, 128, kernel_device)


def test_a_bias_is_added_to_every_token(kernel_device: torch.device) -> None:
    bias = torch.randn(5, generator=torch.Generator().manual_seed(1))
    assert_equals_twin(part_format(4, 64), 3, 5, 64, kernel_device, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_cols", [8, 72])
def test_stored_values_multiply_as_their_twin(dtype: str, num_cols: int, kernel_device: torch.device) -> None:
    weight = torch.randn(7, num_cols, generator=torch.Generator().manual_seed(0)).to(DTYPES[dtype])
    x, out = random_tokens(3, num_cols), torch.full((3, 7), torch.nan, device=kernel_device)
    gemm(x.to(kernel_device), StoredRows(weight.to(kernel_device), stored_part(dtype, num_cols)), out)
    assert_close(out, linear(x, StoredMatrix(weight)))
