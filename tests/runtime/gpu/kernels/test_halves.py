"""Numbers as float16: decoded rows of every format, and rounded hidden states."""

import numpy as np
import pytest
import torch
from support.cases import case
from support.random_codes import NUMBERS
from support.random_experts import random_rows
from torch import Tensor

from moe_pack.formats import BF16, PartFormat, part_format, trellis_format
from moe_pack.formats.pack.plans import TRELLIS_WIDTHS, format_text
from moe_pack.runtime.gpu.kernels.halves import Halves, decode_rows, round_rows
from moe_pack.runtime.gpu.kernels.rows import RowPart, part_of, stored_part
from moe_pack.runtime.model import RowMatrix

FORMATS = [
    BF16,
    *(part_format(width, group) for width in (1, 2, 3, 4, 8) for group in (16, 64, 0)),
    *(part_format(width, 64, 8) for width in (2, 3, 8)),
    *NUMBERS,
    *(trellis_format(width, group) for width in TRELLIS_WIDTHS for group in (16, 64)),
    trellis_format(4, 32, 8),
]
TOP = 2.0**15  # no rounded value is larger


def halves_of(values: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """The two float16 numbers of values whose rows have these factors, by torch."""
    scaled = values / factors[:, None]
    high = scaled.half()
    return high, (scaled - high.float()).half()


def is_power_of_two(factors: Tensor) -> bool:
    mantissas, _ = torch.frexp(factors)
    return bool((mantissas == 0.5).all())


def decoded(rows: Tensor, part: RowPart, num_rows: int, device: torch.device, first: int = 0) -> Halves:
    out, raw = Halves.allocate(2, num_rows, part.num_cols, device), rows.view(torch.uint8).to(device)
    out.values.fill_(torch.nan)
    decode_rows(raw, raw.shape[1] // 16, part, first, out)
    return Halves(out.values.cpu(), out.factors.cpu())


@pytest.mark.parametrize("stored", FORMATS, ids=format_text)
def test_decoded_rows_are_bit_for_bit_what_the_codec_says(stored: PartFormat, kernel_device: torch.device) -> None:
    layout, rows = random_rows(stored, 7, 192)
    held = torch.from_numpy(rows)
    expected = RowMatrix(layout, held).rows(0, 7)
    found = decoded(held, part_of(layout, "weight"), 7, kernel_device)
    assert is_power_of_two(found.factors)
    for half, twin in zip(found.values, halves_of(expected, found.factors), strict=True):
        assert torch.equal(half, twin)
    assert found.values[0].abs().max() <= TOP
    # Not so small that bits are lost: of two halves, 2^-22 of each value, or 2^-24 where that is more.
    sums = found.values.float().sum(0) * found.factors[:, None]
    assert ((sums - expected).abs() <= 2**-22 * expected.abs() + 2**-24 * found.factors[:, None]).all()


def test_decoding_begins_at_any_row_and_ends_with_zeros(kernel_device: torch.device) -> None:
    layout, rows = random_rows(part_format(4, 64), 70, 128)
    whole = decoded(torch.from_numpy(rows), part_of(layout, "weight"), 70, kernel_device)
    some = decoded(torch.from_numpy(rows), part_of(layout, "weight"), 20, kernel_device, first=60)
    assert torch.equal(some.values[:, :10], whole.values[:, 60:]) and torch.equal(some.factors[:10], whole.factors[60:])
    assert not some.values[:, 10:].any() and (some.factors[10:] == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_cols", [8, 72])
def test_stored_values_are_padded_with_zeros(dtype: torch.dtype, num_cols: int, kernel_device: torch.device) -> None:
    name = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    values = torch.randn(5, num_cols, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = decoded(values, stored_part(name, num_cols), 5, kernel_device)
    for half, twin in zip(found.values, halves_of(values.float(), found.factors), strict=True):
        assert torch.equal(half[:, :num_cols], twin) and not half[:, num_cols:].any()


def test_rounded_hidden_states_are_scaled_by_their_largest_value(kernel_device: torch.device) -> None:
    x = torch.randn(6, 1100, generator=torch.Generator().manual_seed(1)) * torch.logspace(-30, 30, 6)[:, None]
    x[3] = 0
    x[4, 7] = torch.nan
    out = Halves.allocate(2, 6, 1100, kernel_device)
    round_rows(x.to(kernel_device), out)
    values, factors = out.values.cpu(), out.factors.cpu()
    assert is_power_of_two(factors)
    for half, twin in zip(values, halves_of(x, factors), strict=True):
        np.testing.assert_array_equal(half[:, :1100], twin)
    tops = values[0].nan_to_num().abs().amax(1)
    assert ((tops >= TOP / 2) & (tops <= TOP))[[0, 1, 2, 4, 5]].all() and not tops[3]
    assert values[0, 4, 7].isnan() and values[0, 4].isnan().sum() == 1


def test_only_rows_between_two_places_are_rounded(kernel_device: torch.device) -> None:
    out = Halves.allocate(1, 5, 64, kernel_device)
    out.values.fill_(7.0)
    starts = torch.tensor([0, 1, 3, 5], dtype=torch.int32, device=kernel_device)
    round_rows(torch.ones(5, 64, device=kernel_device), out, starts, first=1, number=1)
    with case("rows 1 and 2"):
        assert (out.values[0, :, 0] == 7).tolist() == [True, False, False, True, True]
