"""Dense matrices times a vector, and times many tokens, against plain torch."""

import pytest
import torch
from support.cases import case
from support.kernel_twins import gemv_twin
from support.random_codes import NUMBERS
from support.random_experts import assert_near, product_magnitudes, random_rows, random_tokens, weight_magnitudes
from torch import Tensor

from moe_pack.formats import BF16, PartFormat, part_format, trellis_format
from moe_pack.formats.pack.layouts import DenseLayout
from moe_pack.formats.pack.plans import TRELLIS_WIDTHS, format_text
from moe_pack.formats.pack.safetensors import TensorEntry
from moe_pack.formats.parts.part import DenseRole
from moe_pack.runtime.gpu.kernels import matmul as module
from moe_pack.runtime.gpu.kernels.elementwise import Norm
from moe_pack.runtime.gpu.kernels.matmul import Product, StoredRows, gather_row, gemm, gemv, normed_gemv
from moe_pack.runtime.gpu.kernels.rows import RowPart, Tile, part_of, stored_part
from moe_pack.runtime.gpu.weights import DeviceMatrix
from moe_pack.runtime.model import TORCH, RowMatrix, StoredMatrix, linear

STORED = [(width, group, scale_bits) for width in (1, 2, 3, 4, 8) for group, scale_bits in ((64, 16), (0, 16))]
STORED += [(2, 16, 16), (3, 32, 16), (4, 128, 16), (2, 64, 8), (3, 64, 8), (8, 64, 8), (16, 0, 16)]
TRELLISES = [trellis_format(width, 64) for width in TRELLIS_WIDTHS]
TRELLISES += [trellis_format(5, 16), trellis_format(4, 0), trellis_format(7, 128, 8), trellis_format(8, 16, 8)]
FORMATS = [*(part_format(*stored) for stored in STORED), *NUMBERS, *TRELLISES]
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def quantized(form: PartFormat, num_rows: int, num_cols: int) -> tuple[Tensor, RowPart, Tensor, Tensor]:
    """Bytes and part of a random matrix; its values in float32, and what errors of products are relative to."""
    layout, held = random_rows(form, num_rows, num_cols)
    rows = torch.from_numpy(held)
    values = RowMatrix(layout, rows).rows(0, num_rows)
    magnitude = weight_magnitudes(form, num_cols, held[:, : layout.parts[0].num_bytes])
    return rows, part_of(layout, "weight"), values, magnitude


def product(x: Tensor, rows: Tensor, part: RowPart, device: torch.device) -> Tensor:
    """The kernel's, on the host."""
    out = torch.full((len(rows),), torch.nan, device=device)
    gemv(x.to(device), StoredRows(rows.to(device), part), out)
    return out.cpu()


def gathered(rows: Tensor, part: RowPart, row: int, num_cols: int, device: torch.device, scale: float = 1.0) -> Tensor:
    """The kernel's, on the host."""
    out = torch.full((num_cols,), torch.nan, device=device)
    gather_row(
        StoredRows(rows.to(device), part), torch.tensor([row], dtype=torch.int32, device=device), out, scale=scale
    )
    return out.cpu()


def test_a_product_of_rows_in_any_format_is_that_of_plain_torch(kernel_device: torch.device) -> None:
    for stored in FORMATS:
        with case(format_text(stored)):
            rows, part, values, magnitude = quantized(stored, 6, 384)
            x = random_tokens(1, 384)
            found = product(x[0], rows, part, kernel_device)
            assert_near(found[None], x @ values.T, product_magnitudes(x, magnitude))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_cols"), [(1, 64), (5, 8), (9, 200)])
def test_a_product_of_plain_values_is_that_of_plain_torch(
    dtype: str, num_rows: int, num_cols: int, kernel_device: torch.device
) -> None:
    rows = torch.randn(num_rows, num_cols).to(DTYPES[dtype])
    x = random_tokens(1, num_cols)
    found = product(x[0], rows, stored_part(dtype, num_cols), kernel_device)
    assert_near(found[None], gemv_twin(x[0], rows, None)[None], product_magnitudes(x, rows.double().abs()))


def test_a_product_is_scaled_with_its_bias_and_added_to_the_residual(kernel_device: torch.device) -> None:
    rows, x, bias, residual = torch.randn(6, 64), torch.randn(64), torch.randn(6), torch.randn(6)
    expected = residual + 0.5 * (rows @ x + bias)
    rows, x, bias, residual = (held.to(kernel_device) for held in (rows, x, bias, residual))
    gemv(x, StoredRows(rows, stored_part("F32", 64)), residual, bias=bias, residual=residual, scale=0.5)
    torch.testing.assert_close(residual.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_a_matrix_of_many_rows_is_multiplied_by_programs_that_take_several_blocks(
    monkeypatch: pytest.MonkeyPatch, kernel_device: torch.device
) -> None:
    monkeypatch.setattr(module, "wave", lambda *_: 1)
    for num_rows in (150, 64 * 4, 64 * 17 + 1):
        rows, x = torch.randn(num_rows, 8), torch.randn(8)
        found = product(x, rows, stored_part("F32", 8), kernel_device)
        torch.testing.assert_close(found, rows @ x, rtol=1e-5, atol=1e-5)


def test_programs_take_several_blocks_only_of_matrices_of_which_two_waves_of_programs_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "wave", lambda registers, num_warps: 100 * num_warps)
    for num_rows, num_blocks in ((1, 1), (1600, 1), (3199, 1), (3200, 2), (11_199, 6), (11_200, 7), (151_936, 8)):
        assert module.num_blocks(num_rows, Tile(4, 2), 96) == num_blocks


# --- several vectors

SEVERAL = (1, 2, 5, 8)


def stored_on(form: PartFormat, shape: tuple[int, int], device: torch.device, seed: int = 0) -> StoredRows:
    """A random matrix of a format on a device."""
    layout, rows = random_rows(form, *shape, seed)
    return StoredRows(torch.from_numpy(rows).to(device), part_of(layout, "weight"))


def test_each_of_several_vectors_has_the_bits_that_it_has_alone(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "wave", lambda *_: 1)  # so that programs take several blocks of rows
    for form, num_rows in (
        (part_format(4, 64), 300),
        (part_format(3, 64), 7),
        (trellis_format(6, 64), 150),
        (BF16, 70),
    ):
        matrix = stored_on(form, (num_rows, 192), kernel_device)
        by, bias = on(kernel_device, random_norm(192, num_rows == 7)), torch.randn(num_rows, device=kernel_device)
        for num_tokens in SEVERAL:
            with case(format_text(form), num_tokens):
                x = random_tokens(num_tokens, 192).to(kernel_device)
                residual = torch.randn((num_tokens, num_rows), device=kernel_device)
                found, normed, alone = (
                    residual.clone(),
                    torch.full_like(residual, torch.nan),
                    torch.zeros_like(residual),
                )
                gemv(x, matrix, found, bias=bias, residual=found, scale=0.5)
                normed_gemv(x, by, [Product(matrix, normed, bias)])
                for row in range(num_tokens):
                    gemv(x[row], matrix, alone[row], bias=bias, residual=residual[row], scale=0.5)
                assert torch.equal(found, alone)
                for row in range(num_tokens):
                    normed_gemv(x[row], by, [Product(matrix, alone[row], bias)])
                assert torch.equal(normed, alone)


def test_products_of_several_vectors_are_those_of_plain_torch(kernel_device: torch.device) -> None:
    for stored in FORMATS:
        with case(format_text(stored)):
            rows, part, values, magnitude = quantized(stored, 6, 384)
            x, out = random_tokens(5, 384), torch.full((5, 6), torch.nan, device=kernel_device)
            gemv(x.to(kernel_device), StoredRows(rows.to(kernel_device), part), out)
            assert_near(out.cpu(), x @ values.T, product_magnitudes(x, magnitude))


def test_several_rows_are_gathered_as_each_alone(kernel_device: torch.device) -> None:
    matrix = stored_on(part_format(3, 64), (9, 192), kernel_device)
    for ids in ([4], [8, 0], [3, 3, 1, 7, 2], [0, 1, 2, 3, 4, 5, 6, 8]):
        given = torch.tensor(ids, dtype=torch.int32, device=kernel_device)
        found = torch.full((len(ids), 192), torch.nan, device=kernel_device)
        gather_row(matrix, given, found, scale=2.0)
        for row, number in enumerate(ids):
            assert torch.equal(found[row].cpu(), gathered(matrix.rows, matrix.part, number, 192, kernel_device, 2.0))


def test_a_few_rows_are_multiplied_each_as_alone_and_as_exactly(kernel_device: torch.device) -> None:
    weight = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    dense = DenseLayout(DenseRole("q", (7, 64), True), "F32", None, TensorEntry("q", "F32", (7, 64), 0, weight.nbytes))
    raw, scratch = weight.view(torch.uint8).flatten().to(kernel_device), torch.empty(4096, dtype=torch.float16)
    matrix = DeviceMatrix(dense, raw, scratch.to(kernel_device), FAST)
    for num_tokens in (*SEVERAL, 9):
        with case(num_tokens):
            x = random_tokens(num_tokens, 64).to(kernel_device)
            found = matrix.product(x)
            if num_tokens <= 8:
                assert torch.equal(found, torch.cat([matrix.product(row[None]) for row in x]))
            assert_many_close(found, (x @ weight.to(kernel_device).T).cpu(), FAST if num_tokens > 8 else EXACT)


# --- with the norm before


def random_norm(d: int, is_layer_norm: bool) -> Norm:
    return Norm(1 + torch.randn(d) / 4, torch.randn(d) / 2 if is_layer_norm else None, 1e-5)


def normalized(x: Tensor, by: Norm) -> Tensor:
    """Torch's norm of a vector."""
    if by.bias is None:
        return TORCH.rms_norm(x, by.weight, by.eps)
    return torch.nn.functional.layer_norm(x, x.shape, by.weight, by.bias, by.eps)


def on(device: torch.device, by: Norm) -> Norm:
    return Norm(by.weight.to(device), None if by.bias is None else by.bias.to(device), by.eps)


def assert_normed_products(
    x: Tensor,
    by: Norm,
    matrices: list[tuple[Tensor, RowPart, Tensor, Tensor]],
    biases: list[bool],
    device: torch.device,
) -> None:
    """Asserts that products of bytes of matrices are those of their values; see `quantized`."""
    products, expected, bounds = [], [], []
    normed = normalized(x, by)[None]
    for (rows, part, values, magnitude), has_bias in zip(matrices, biases, strict=True):
        bias = torch.randn(len(rows)) if has_bias else None
        out = torch.full((len(rows),), torch.nan, device=device)
        products.append(Product(StoredRows(rows.to(device), part), out, None if bias is None else bias.to(device)))
        expected.append(normed @ values.T + (0 if bias is None else bias))
        bounds.append(product_magnitudes(normed, magnitude) + (0 if bias is None else bias.double().abs()))
    normed_gemv(x.to(device), on(device, by), products)
    for product_, one, bound in zip(products, expected, bounds, strict=True):
        assert_near(product_.out.cpu()[None], one, 4 * bound)  # the norm rounds twice, in two orders


@pytest.mark.parametrize("is_layer_norm", [False, True])
def test_a_product_with_a_normed_vector_is_that_of_plain_torch_in_any_format(
    is_layer_norm: bool, kernel_device: torch.device
) -> None:
    for stored in FORMATS:
        with case(format_text(stored)):
            x = 3 + 5 * random_tokens(1, 384)[0]
            matrix = quantized(stored, 6, 384)
            assert_normed_products(x, random_norm(384, is_layer_norm), [matrix], [False], kernel_device)


@pytest.mark.parametrize("is_layer_norm", [False, True])
def test_matrices_of_any_number_and_formats_are_multiplied_with_one_normed_vector(
    is_layer_norm: bool, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "wave", lambda *_: 1)
    four, three, eight = (part_format(width, 64) for width in (4, 3, 8))
    for formats, sizes, biases in (
        ((four,), (1,), (True,)),
        ((four, four), (5, 130), (False, False)),
        ((four, four, four), (200, 64, 65), (True, True, True)),
        ((four, four, four), (1, 1, 1), (False, True, False)),
        ((four, three, eight), (70, 2, 3), (True, False, False)),
        ((three, four, three, three, three), (70, 2, 3, 64, 1), (False,) * 5),
    ):
        with case((formats, sizes, biases)):
            x, by = random_tokens(1, 192)[0], random_norm(192, is_layer_norm)
            matrices = [quantized(each, n, 192) for each, n in zip(formats, sizes, strict=True)]
            assert_normed_products(x, by, matrices, list(biases), kernel_device)


def test_matrices_of_one_format_are_multiplied_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []
    monkeypatch.setattr(module, "_launch_gemv", lambda x, norm, group, residual, scale: launches.append(len(group)))
    one, other = (
        StoredRows(torch.zeros(3, 8), stored_part("F32", 8)),
        StoredRows(torch.zeros(3, 8), stored_part("F16", 8)),
    )
    out, bias = torch.zeros(3), torch.zeros(3)
    by = random_norm(8, False)
    normed_gemv(out, by, [Product(one, out)] * 3)
    normed_gemv(out, by, [Product(one, out), Product(other, out), Product(one, out)])
    normed_gemv(out, by, [Product(one, out, bias), Product(one, out)])
    assert launches == [3, 2, 1, 1, 1]


def test_a_product_with_zeros_normed_is_zero(kernel_device: torch.device) -> None:
    rows, part, _, _ = quantized(part_format(4, 64), 5, 64)
    out = torch.full((5,), torch.nan, device=kernel_device)
    matrix = StoredRows(rows.to(kernel_device), part)
    normed_gemv(
        torch.zeros(64, device=kernel_device), on(kernel_device, random_norm(64, False)), [Product(matrix, out)]
    )
    assert not out.any()


def test_a_nan_in_x_is_seen_in_every_product(kernel_device: torch.device) -> None:
    rows, part, _, _ = quantized(part_format(4, 64), 5, 64)
    x = torch.randn(64)
    x[7] = torch.nan
    assert product(x, rows, part, kernel_device).isnan().all()


def test_a_gathered_row_is_the_matrix_row_of_that_number(kernel_device: torch.device) -> None:
    for stored in FORMATS:
        with case(format_text(stored)):
            rows, part, values, magnitude = quantized(stored, 4, 384)
            found = gathered(rows, part, 2, 384, kernel_device, scale=2.0)
            assert_near(found, 2 * values[2], 2 * magnitude[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gathered_row_of_plain_values_is_exact(dtype: str, kernel_device: torch.device) -> None:
    rows = torch.randn(3, 72).to(DTYPES[dtype])
    found = gathered(rows, stored_part(dtype, 72), 1, 72, kernel_device)
    assert torch.equal(found, rows[1].float())


def test_rows_that_do_not_begin_at_multiples_of_16_bytes_are_refused() -> None:
    with pytest.raises(AssertionError, match="rows of 140 bytes, not a multiple of 16"):
        gemv(torch.randn(70), StoredRows(torch.randn(2, 70).bfloat16(), stored_part("BF16", 70)), torch.empty(2))


# --- many tokens

# The same products in float32, summed in another order than torch's; 2e-6 is the most seen.
GEMM_TOLERANCE = 1e-5  # of the reference's RMS
# A GPU's tensor cores cut sums off after every 8 products, where others round.
GPU_GEMM_TOLERANCE = 3e-5
FAST_TOLERANCE = 0.005  # each factor is rounded by 2^-12 at most
FAST, EXACT = 1, 2  # float16 numbers of a value
GEMM_FORMATS = [
    BF16,
    *(part_format(width, group) for width in (1, 2, 3, 4, 8) for group in (16, 32, 64)),
    *(part_format(width, 0) for width in (1, 3)),
    *(part_format(width, 64, 8) for width in (2, 3, 8)),
    *NUMBERS,
    *(trellis_format(width, group) for width in TRELLIS_WIDTHS for group in (16, 64)),
    *(trellis_format(width, group, 8) for width, group in ((4, 32), (5, 0), (8, 64))),
]


def assert_many_close(found: Tensor, expected: Tensor, num_halves: int) -> None:
    tolerance = GEMM_TOLERANCE if found.device.type == "cpu" else GPU_GEMM_TOLERANCE
    if num_halves == FAST:
        tolerance = FAST_TOLERANCE
    error, size = (found.cpu() - expected).abs().max(), expected.square().mean().sqrt()
    assert error <= tolerance * size, f"off by {error / size} of the reference's RMS"


def assert_equals_twin(
    stored: PartFormat,
    num_tokens: int,
    num_rows: int,
    num_cols: int,
    device: torch.device,
    bias: Tensor | None = None,
    scratch_rows: int = 1024,
) -> None:
    layout, rows = random_rows(stored, num_rows, num_cols)
    held = torch.from_numpy(rows)
    x, matrix = random_tokens(num_tokens, num_cols), StoredRows(held.to(device), part_of(layout, "weight"))
    there, expected = None if bias is None else bias.to(device), linear(x, RowMatrix(layout, held), bias)
    for num_halves in (EXACT, FAST):
        scratch = torch.full((num_halves * scratch_rows * num_cols,), torch.nan, dtype=torch.float16, device=device)
        out = torch.full((num_tokens, num_rows), torch.nan, device=device)
        gemm(x.to(device), matrix, out, scratch, num_halves, bias=there)
        assert_many_close(out, expected, num_halves)


def test_rows_of_every_format_multiply_as_their_twin(kernel_device: torch.device) -> None:
    for stored in GEMM_FORMATS:
        with case(format_text(stored)):
            assert_equals_twin(stored, 3, 5, 192, kernel_device)


def test_matrices_beyond_the_scratch_memory_are_decoded_in_pieces(kernel_device: torch.device) -> None:
    for scratch_rows in (1, 7, 64):
        with case(scratch_rows):
            bias = torch.randn(70, generator=torch.Generator().manual_seed(1))
            assert_equals_twin(part_format(4, 64), 3, 70, 128, kernel_device, bias, scratch_rows)


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
    x, matrix = random_tokens(3, num_cols), StoredRows(weight.to(kernel_device), stored_part(dtype, num_cols))
    for num_halves in (EXACT, FAST):
        scratch = torch.full((4096,), torch.nan, dtype=torch.float16, device=kernel_device)
        out = torch.full((3, 7), torch.nan, device=kernel_device)
        gemm(x.to(kernel_device), matrix, out, scratch, num_halves)
        assert_many_close(out, linear(x, StoredMatrix(weight)), num_halves)
