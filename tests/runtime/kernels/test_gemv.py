"""Dense matrices times a vector on the GPU, against plain torch."""

import pytest
import torch
from random_experts import assert_near, product_magnitudes, random_rows, random_tokens, weight_magnitudes
from torch import Tensor

from moe_pack.formats import part_format
from moe_pack.runtime.kernels import gemv as module
from moe_pack.runtime.kernels.codes import Part, part_of, stored_part
from moe_pack.runtime.kernels.gemv import gather_row, gemv, gemv_twin
from moe_pack.runtime.matrix import RowMatrix

FORMATS = [(width, group, scale_bits) for width in (1, 2, 3, 4, 8) for group, scale_bits in ((64, 16), (0, 16))]
FORMATS += [(2, 16, 16), (3, 32, 16), (4, 128, 16), (2, 64, 8), (3, 64, 8), (8, 64, 8), (16, 0, 16)]
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def quantized(stored: tuple[int, int, int], num_rows: int, num_cols: int) -> tuple[Tensor, Part, Tensor, Tensor]:
    """Bytes and part of a random matrix; its values in float32, and what errors of products are relative to."""
    form = part_format(*stored)
    layout, held = random_rows(form, num_rows, num_cols)
    rows = torch.from_numpy(held)
    values = RowMatrix(layout, rows).rows(0, num_rows)
    magnitude = weight_magnitudes(form, num_cols, held[:, : layout.parts[0].num_bytes])
    return rows, part_of(layout, "weight"), values, magnitude


@pytest.mark.parametrize("stored", FORMATS)
def test_a_product_of_rows_in_any_format_is_that_of_plain_torch(stored: tuple[int, int, int]) -> None:
    rows, part, values, magnitude = quantized(stored, 6, 384)
    x, out = random_tokens(1, 384), torch.empty(6)
    gemv(x[0], rows, part, out)
    assert_near(out[None], x @ values.T, product_magnitudes(x, magnitude))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_cols"), [(1, 64), (5, 8), (9, 200)])
def test_a_product_of_plain_values_is_that_of_plain_torch(dtype: str, num_rows: int, num_cols: int) -> None:
    rows = torch.randn(num_rows, num_cols).to(DTYPES[dtype])
    x, out = random_tokens(1, num_cols), torch.empty(num_rows)
    gemv(x[0], rows, stored_part(dtype, num_cols), out)
    assert_near(out[None], gemv_twin(x[0], rows, None)[None], product_magnitudes(x, rows.double().abs()))


def test_a_product_is_scaled_with_its_bias_and_added_to_the_residual() -> None:
    rows, x, bias, residual = torch.randn(6, 64), torch.randn(64), torch.randn(6), torch.randn(6)
    expected = residual + 0.5 * (rows @ x + bias)
    gemv(x, rows, stored_part("F32", 64), residual, bias=bias, residual=residual, scale=0.5)
    torch.testing.assert_close(residual, expected, rtol=1e-5, atol=1e-5)


def test_a_matrix_of_many_rows_is_multiplied_by_programs_that_take_several_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MANY_PROGRAMS", 2)
    rows, x, out = torch.randn(31, 8), torch.randn(8), torch.full((31,), torch.nan)
    gemv(x, rows, stored_part("F32", 8), out)
    torch.testing.assert_close(out, rows @ x, rtol=1e-5, atol=1e-5)


def test_a_nan_in_x_is_seen_in_every_product() -> None:
    rows, part, _, _ = quantized((4, 64, 16), 5, 64)
    x, out = torch.randn(64), torch.empty(5)
    x[7] = torch.nan
    gemv(x, rows, part, out)
    assert out.isnan().all()


@pytest.mark.parametrize("stored", FORMATS)
def test_a_gathered_row_is_the_matrix_row_of_that_number(stored: tuple[int, int, int]) -> None:
    rows, part, values, magnitude = quantized(stored, 4, 384)
    out = torch.empty(384)
    gather_row(rows, part, torch.tensor([2], dtype=torch.int32), out, scale=2.0)
    assert_near(out, 2 * values[2], 2 * magnitude[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gathered_row_of_plain_values_is_exact(dtype: str) -> None:
    rows, out = torch.randn(3, 72).to(DTYPES[dtype]), torch.empty(72)
    gather_row(rows, stored_part(dtype, 72), torch.tensor([1], dtype=torch.int32), out)
    assert torch.equal(out, rows[1].float())


def test_rows_that_do_not_begin_at_multiples_of_16_bytes_are_refused() -> None:
    with pytest.raises(AssertionError, match="rows of 140 bytes, not a multiple of 16"):
        gemv(torch.randn(70), torch.randn(2, 70).bfloat16(), stored_part("BF16", 70), torch.empty(2))
