"""The native kernels for rows as such against plain torch, zlib and numpy: products, decoding, checksums, gathering."""

import zlib

import numpy as np
import pytest
import torch
from native import INSTRUCTION_SETS, kernels_limited_to
from random_experts import (
    MAX_ERROR,
    Shape,
    assert_near,
    product_magnitudes,
    random_expert,
    random_rows,
    random_tokens,
    weight_magnitudes,
)

from moe_pack.formats import (
    BF16,
    E5M2,
    FP8,
    MXFP4,
    TRELLIS_WIDTHS,
    PartFormat,
    format_text,
    part_format,
    trellis_format,
)
from moe_pack.formats.codecs import decode_part
from moe_pack.formats.rows import row_crcs
from moe_pack.runtime.matrix import TORCH_DTYPES
from moe_pack.runtime.native_kernels import Kernels, row_numbers, stored_numbers

SOURCES = [FP8, E5M2, MXFP4]
CODECS = [BF16, *(part_format(w, g, s) for w in (1, 2, 3, 4, 8) for g in (0, 16, 32, 64, 128) for s in (16, 8))]
CODECS += [trellis_format(w, g, s) for w in TRELLIS_WIDTHS for g in (0, 16, 32, 64, 128) for s in (16, 8)]
CODECS += SOURCES
SOME_CODECS = [BF16, part_format(4, 64), part_format(2, 16, 8), part_format(3, 0), *SOURCES]
SOME_CODECS += [trellis_format(3, 0), trellis_format(4, 16, 8), trellis_format(8, 64)]
COLUMNS = (64, 192, 320, 640, 1088)
MEBIBYTE = 1 << 20


def fitting(stored: PartFormat) -> list[int]:
    """The row sizes that a codec may have."""
    whole = stored.codec in ("affine", "trellis") and stored.group
    return [n for n in COLUMNS if not whole or n % whole == 0] + ([70, 1] if stored == BF16 else [])


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_limited_to(request.param)


each_codec = pytest.mark.parametrize("stored", CODECS, ids=format_text)


@each_codec
def test_products_are_those_of_the_decoded_rows(stored: PartFormat, kernels: Kernels) -> None:
    """Numbers of tokens and of rows change with the columns, so that each codec meets many."""
    draws = zip(fitting(stored), (1, 3, 64, 2, 65, 17, 4), (129, 7, 33, 1, 65, 200, 5), strict=False)
    for num_cols, num_tokens, num_rows in draws:
        bias = num_tokens % 2 == 0
        layout, rows = random_rows(stored, num_rows, num_cols, num_tokens, bias)
        x, section = random_tokens(num_tokens, num_cols), rows[:, : layout.parts[0].num_bytes]
        expected = x @ decode_part(stored, num_cols, torch.from_numpy(section)).T
        errors = product_magnitudes(x, weight_magnitudes(stored, num_cols, section))
        if bias:
            biases = torch.from_numpy(rows[:, section.shape[1] : section.shape[1] + 4].copy()).view(torch.float32)[:, 0]
            expected, errors = expected + biases, errors + biases.double().abs()
        assert_near(kernels.product(x, row_numbers(layout, "weight"), rows), expected, errors)


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 17, 64, 65, 100])
def test_products_with_stored_values_are_those_of_torch(num_tokens: int, dtype: torch.dtype, kernels: Kernels) -> None:
    for num_rows, num_cols in ((1, 1), (7, 64), (65, 70), (33, 1088), (129, 1031)):
        weight = torch.randn(num_rows, num_cols, generator=torch.Generator().manual_seed(num_rows)).to(dtype)
        x = random_tokens(num_tokens, num_cols)
        found = kernels.product(x, stored_numbers(dtype, num_cols), weight.view(torch.uint8).numpy())
        assert_near(found, x @ weight.float().T, product_magnitudes(x, weight.double().abs()))


@each_codec
def test_decoding_gives_the_bits_of_the_codec(stored: PartFormat, kernels: Kernels) -> None:
    for num_cols in fitting(stored):
        layout, rows = random_rows(stored, 40, num_cols, seed=num_cols)
        expected = decode_part(stored, num_cols, torch.from_numpy(rows[:, : layout.parts[0].num_bytes]))
        found = kernels.decode(row_numbers(layout, "weight"), rows)
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@each_codec
def test_decoding_gives_the_bits_of_the_codec_for_any_bytes(stored: PartFormat, kernels: Kernels) -> None:
    """Scales and zeros of all kinds: subnormal, negative, infinite and no numbers, which alone may be others."""
    layout, rows = random_rows(stored, 100, 128)
    rows[:] = np.random.default_rng(0).integers(0, 256, rows.shape, np.uint8)
    expected = decode_part(stored, 128, torch.from_numpy(rows[:, : layout.parts[0].num_bytes]))
    found = kernels.decode(row_numbers(layout, "weight"), rows)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(nan=0).view(torch.int32), expected.nan_to_num(nan=0).view(torch.int32))


@pytest.mark.parametrize("stored", [c for c in CODECS if c.codec == "trellis"], ids=format_text)
def test_either_way_of_avx_512_gives_a_trellis_the_same_bits(stored: PartFormat) -> None:
    by_words, by_bytes = kernels_limited_to("avx512"), kernels_limited_to("avx512vbmi")
    x = random_tokens(3, 640)
    layout, rows = random_rows(stored, 70, 640)
    products = [kernels.product(x, row_numbers(layout, "weight"), rows) for kernels in (by_words, by_bytes)]
    assert torch.equal(*products)
    expert, neurons = random_expert(Shape(70, 640, down=stored)), torch.arange(70, dtype=torch.int32)
    h = random_tokens(3, 70)
    assert torch.equal(*(kernels.accumulate(h, expert.rows(), neurons) for kernels in (by_words, by_bytes)))


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=str)
def test_decoding_stored_values_gives_those_of_torch(dtype: torch.dtype, kernels: Kernels) -> None:
    """All 65,536 of 16 bits, and as many of 32."""
    values = torch.arange(0, 2**16, dtype=torch.int32)
    held = (values << 16 if dtype == torch.float32 else values.to(torch.int16)).view(dtype).view(-1, 64)
    found = kernels.decode(stored_numbers(dtype, 64), held.view(torch.uint8).numpy())
    assert torch.equal(found.isnan(), held.isnan())
    number = ~held.isnan()
    assert torch.equal(found[number].view(torch.int32), held.float()[number].view(torch.int32))


@pytest.mark.parametrize("stored", SOME_CODECS, ids=format_text)
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_products_of_inputs_that_are_zero_are_zero(num_tokens: int, stored: PartFormat, kernels: Kernels) -> None:
    layout, rows = random_rows(stored, 33, 192 if stored.group != 128 else 128)
    x = torch.zeros(num_tokens, layout.num_cols)
    assert torch.equal(kernels.product(x, row_numbers(layout, "weight"), rows), torch.zeros(num_tokens, 33))


@pytest.mark.parametrize("stored", SOME_CODECS, ids=format_text)
@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-20, 1e20, 1e30, 1e36])
def test_products_bear_inputs_of_any_size(size: float, num_tokens: int, stored: PartFormat, kernels: Kernels) -> None:
    """All inputs of one size, or beside ordinary ones. What is below 1e-30 may be taken as zero."""
    layout, rows = random_rows(stored, 33, 192)
    x = random_tokens(num_tokens, 192).clamp_(-100, 100) / 100 * size
    x[-1, ::2] = torch.randn(96, generator=torch.Generator().manual_seed(1))
    weights, section = row_numbers(layout, "weight"), rows[:, : layout.parts[0].num_bytes]
    expected = x @ decode_part(stored, 192, torch.from_numpy(section)).T
    errors = product_magnitudes(x, weight_magnitudes(stored, 192, section))
    assert_near(kernels.product(x, weights, rows), expected, errors.clamp(min=1e-30 / MAX_ERROR))


@pytest.mark.parametrize("stored", SOME_CODECS, ids=format_text)
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 20])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_an_input_that_is_not_finite_is_seen_in_its_token_alone(
    bad: float, num_tokens: int, stored: PartFormat, kernels: Kernels
) -> None:
    layout, rows = random_rows(stored, 33, 192)
    x = random_tokens(num_tokens, 192)
    whole = kernels.product(x, row_numbers(layout, "weight"), rows)
    x[num_tokens // 2, 150] = bad
    found = kernels.product(x, row_numbers(layout, "weight"), rows)
    assert not found[num_tokens // 2].isfinite().any()
    others = [t for t in range(num_tokens) if t != num_tokens // 2]
    assert torch.equal(found[others], whole[others])


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 15, 16, 17, 63, 64, 65, 255, 4096, 65537, MEBIBYTE, 5 * MEBIBYTE + 3])
def test_a_checksum_is_zlibs(num_bytes: int, kernels: Kernels) -> None:
    for start in (0, 1, 13):
        held = np.random.default_rng(num_bytes).integers(0, 256, num_bytes + start, np.uint8)[start:]
        assert kernels.checksum(held) == zlib.crc32(held.tobytes())


@pytest.mark.parametrize("num_cols", [64, 1088])
@pytest.mark.parametrize("num_rows", [1, 7, 3000])
def test_checksums_of_rows_are_those_in_them(num_rows: int, num_cols: int, kernels: Kernels) -> None:
    layout, rows = random_rows(part_format(3, 16, 8) if num_cols == 64 else BF16, num_rows, num_cols)
    assert np.array_equal(kernels.row_checksums(layout, rows), row_crcs(layout, rows))


@pytest.mark.parametrize("row_bytes", [1, 48, 1000, 20_000])
def test_rows_are_gathered_in_the_order_asked_for(row_bytes: int, kernels: Kernels) -> None:
    random = np.random.default_rng(row_bytes)
    rows = random.integers(0, 256, (50, row_bytes), np.uint8)
    for count in (0, 1, 49, 300):
        places = random.integers(0, 50, count).astype(np.int32)
        assert np.array_equal(kernels.gather(rows, places), rows[places])
        out = np.zeros((count, row_bytes), np.uint8)
        assert kernels.gather(rows, places, out) is out
        assert np.array_equal(out, rows[places])


@pytest.mark.parametrize("num_bytes", [0, 100, 255, 256, 4096, 3 * MEBIBYTE])
def test_reading_gives_the_parity_of_whole_pieces(num_bytes: int, kernels: Kernels) -> None:
    held = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
    words = held[: num_bytes // 256 * 256].view(np.uint64)
    assert kernels.read(held) == (int(np.bitwise_xor.reduce(words)) if len(words) else 0)
