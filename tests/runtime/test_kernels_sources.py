"""The native kernels on what rows may hold: every code and every scale of sources, also the ends of both; trellises."""

import numpy as np
import pytest
import torch
from native import INSTRUCTION_SETS, kernels_limited_to
from numpy.typing import NDArray
from random_experts import Shape, assert_near, product_magnitudes, random_expert, random_rows, random_tokens
from random_experts import weight_magnitudes as magnitudes
from torch import Tensor

from moe_pack.formats import (
    BF16,
    E5M2,
    FP8,
    MXFP4,
    TRELLIS_WIDTHS,
    PartFormat,
    RowLayout,
    format_text,
    trellis_format,
)
from moe_pack.formats.codecs import decode_part
from moe_pack.runtime.native_kernels import Kernels, row_numbers

Bytes = NDArray[np.uint8]
SOURCES = [FP8, E5M2, MXFP4]
# One code that is no number (E2M1 has none), one that is infinite (E5M2 alone has), the scale that is no number.
NO_NUMBER = {"fp8": 0x7F, "e5m2": 0x7E}
FLOAT_SCALES = [0.0, -0.0, 1.0, -3.0, 2.0**-149, 2.0**-126, 1.1754942e-38, 3.4e38, float("inf"), float("nan")]

each_source = pytest.mark.parametrize("stored", SOURCES, ids=lambda part: part.codec)


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_limited_to(request.param)


def every_scale(stored: PartFormat) -> Bytes:
    """u8 [scales, bytes of one]: all 256 of E8M0, and float32 of every kind."""
    if stored == FP8:
        return np.array(FLOAT_SCALES, "<f4").view(np.uint8).reshape(-1, 4)
    return np.arange(256, dtype=np.uint8).reshape(-1, 1)


def rows_with(stored: PartFormat, scales: Bytes) -> tuple[RowLayout, Bytes]:
    """A row a scale, the same for all its groups, each with all 256 bytes among its codes."""
    layout, rows = random_rows(stored, len(scales), 640)
    codes = stored.code_bytes(640)
    rows[:, :codes] = np.resize(np.arange(256, dtype=np.uint8), codes)
    rows[:, codes : codes + stored.scale_bytes(640)] = np.tile(scales, stored.num_groups(640))
    return layout, rows


def decoded(stored: PartFormat, layout: RowLayout, rows: Bytes) -> Tensor:
    return decode_part(stored, layout.num_cols, torch.from_numpy(rows[:, : layout.parts[0].num_bytes]))


@each_source
def test_every_code_with_every_scale_has_the_bits_of_the_codec(stored: PartFormat, kernels: Kernels) -> None:
    layout, rows = rows_with(stored, every_scale(stored))
    expected, found = decoded(stored, layout, rows), kernels.decode(row_numbers(layout, "weight"), rows)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(nan=0).view(torch.int32), expected.nan_to_num(nan=0).view(torch.int32))


@pytest.mark.parametrize("stored", [E5M2, MXFP4], ids=lambda part: part.codec)
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_products_bear_every_scale(num_tokens: int, stored: PartFormat, kernels: Kernels) -> None:
    """Relative to the row's own weights, from the smallest scale to the largest that leaves sums finite."""
    for byte in (*range(0, 230, 7), 1, 2, 126, 127, 128):
        layout, rows = random_rows(stored, 5, 320, seed=byte)
        codes = stored.code_bytes(320)
        rows[:, codes : codes + stored.scale_bytes(320)] = byte
        x = random_tokens(num_tokens, 320) * (2.0**40 if byte < 40 else 1.0)
        section = rows[:, : layout.parts[0].num_bytes]
        # In torch with the scale taken off: its sums of tiny weights would round to what float32 has below 2^-126.
        unit = section.copy()
        unit[:, codes:] = 127
        power = 2.0 ** (byte - 127)
        expected = (x @ decode_part(stored, 320, torch.from_numpy(unit)).T).double() * power
        errors = product_magnitudes(x, magnitudes(stored, 320, unit)) * power
        found = kernels.product(x, row_numbers(layout, "weight"), rows)
        assert_near(found, expected.float(), errors.clamp(min=2.0**-126))


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_scales_of_a_row_may_differ_by_any_power(num_tokens: int, kernels: Kernels) -> None:
    layout, rows = random_rows(MXFP4, 9, 320)
    codes = MXFP4.code_bytes(320)
    rows[:, codes : codes + 10] = np.random.default_rng(0).integers(0, 200, (9, 10), np.uint8)
    x, section = random_tokens(num_tokens, 320), rows[:, : layout.parts[0].num_bytes]
    errors = product_magnitudes(x, magnitudes(MXFP4, 320, section))
    assert_near(kernels.product(x, row_numbers(layout, "weight"), rows), x @ decoded(MXFP4, layout, rows).T, errors)


@pytest.mark.parametrize("num_tokens", [1, 3, 4])
@pytest.mark.parametrize("code", [0x7F, 0xFF, 0x7C, 0xFC, 0x7E])
@pytest.mark.parametrize("stored", [FP8, E5M2], ids=lambda part: part.codec)
def test_a_code_that_is_not_finite_is_seen_in_its_row_alone(
    stored: PartFormat, code: int, num_tokens: int, kernels: Kernels
) -> None:
    layout, rows = random_rows(stored, 33, 192)
    x = random_tokens(num_tokens, 192)
    whole = kernels.product(x, row_numbers(layout, "weight"), rows)
    rows[20, 130] = code
    found = kernels.product(x, row_numbers(layout, "weight"), rows)
    others = [r for r in range(33) if r != 20]
    is_number = bool(decoded(stored, layout, rows)[20, 130].isfinite())
    assert is_number == (stored == FP8 and code not in (0x7F, 0xFF))
    assert torch.equal(found[:, 20].isfinite(), torch.full((num_tokens,), is_number))
    assert torch.equal(found[:, others], whole[:, others])


@pytest.mark.parametrize("stored", [E5M2, MXFP4], ids=lambda part: part.codec)
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_a_scale_that_is_no_number_is_seen_in_its_row_alone(
    num_tokens: int, stored: PartFormat, kernels: Kernels
) -> None:
    layout, rows = random_rows(stored, 33, 192)
    x = random_tokens(num_tokens, 192)
    whole = kernels.product(x, row_numbers(layout, "weight"), rows)
    rows[20, stored.code_bytes(192)] = 255
    found = kernels.product(x, row_numbers(layout, "weight"), rows)
    others = [r for r in range(33) if r != 20]
    assert found[:, 20].isnan().all()
    assert torch.equal(found[:, others], whole[:, others])


@each_source
@pytest.mark.parametrize("num_tokens", [1, 3, 4])
def test_sums_of_down_rows_see_what_is_no_number_in_its_group(
    num_tokens: int, stored: PartFormat, kernels: Kernels
) -> None:
    """A code in its column alone; a scale in its group's columns."""
    expert = random_expert(Shape(40, 320, "up", BF16, BF16, stored))
    layout = expert.shape.layout.records
    part = layout.part("down")
    assert part is not None
    rows, neurons = expert.rows(), torch.arange(40, dtype=torch.int32)
    h = torch.randn(num_tokens, 40, generator=torch.Generator().manual_seed(1))
    whole = kernels.accumulate(h, rows, neurons)
    records = expert.extent[expert.shape.layout.selector_bytes :].reshape(40, -1)
    down = records[7, part.offset : part.offset + part.num_bytes]
    if stored in (FP8, E5M2):
        held, down[200] = int(down[200]), NO_NUMBER[stored.codec]
        found = kernels.accumulate(h, rows, neurons)
        assert found.isnan().nonzero()[:, 1].tolist() == [200] * num_tokens
        assert torch.equal(found.nan_to_num(nan=0)[:, :200], whole[:, :200])
        down[200] = held
    scales, last = down[stored.code_bytes(320) :], slice(0, 320)
    if stored == FP8:
        scales[8:12], last = np.array([np.nan], "<f4").view(np.uint8), slice(256, 320)
    elif stored == MXFP4:
        scales[9], last = 255, slice(288, 320)
    else:
        scales[0] = 255
    found = kernels.accumulate(h, rows, neurons)
    assert found[:, last].isnan().all()
    assert torch.equal(found[:, : last.start], whole[:, : last.start])


@each_source
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_sums_of_down_rows_bear_scales_from_tiny_to_large(
    num_tokens: int, stored: PartFormat, kernels: Kernels
) -> None:
    for power in (-126, -100, -60, 60):
        expert = random_expert(Shape(40, 320, "up", BF16, BF16, stored))
        part = expert.shape.layout.records.part("down")
        assert part is not None
        records = expert.extent[expert.shape.layout.selector_bytes :].reshape(40, -1)
        start = part.offset + stored.code_bytes(320)
        scale = np.array([2.0**power], "<f4").view(np.uint8) if stored == FP8 else np.uint8(127 + power)
        records[:, start : start + stored.scale_bytes(320)] = np.resize(scale, stored.scale_bytes(320))
        h = torch.randn(num_tokens, 40, generator=torch.Generator().manual_seed(1)) * 2.0**20
        down, neurons = expert.block().down, torch.arange(40, dtype=torch.int32)
        errors = h.double().abs() @ expert.weight_magnitudes("down")
        found = kernels.accumulate(h, expert.rows(), neurons)
        assert_near(found, (h.double() @ down.double()).float(), errors.clamp(min=2.0**-126))


each_trellis = pytest.mark.parametrize(
    "stored", [trellis_format(width, group) for width in TRELLIS_WIDTHS for group in (0, 64)], ids=format_text
)


@each_trellis
def test_every_window_in_every_column_has_the_bits_of_the_codec(stored: PartFormat, kernels: Kernels) -> None:
    """All streams of two bytes, over and over, so that each window ends at each bit."""
    layout, rows = random_rows(stored, 1 << 16, 64)
    codes = stored.code_bytes(64)
    rows[:, :codes] = np.tile(np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(-1, 2), codes // 2)
    expected, found = decoded(stored, layout, rows), kernels.decode(row_numbers(layout, "weight"), rows)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@each_trellis
@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0, 2.0**-24, 65504.0])
def test_any_scale_of_a_trellis_is_seen_in_its_row_alone(
    scale: float, num_tokens: int, stored: PartFormat, kernels: Kernels
) -> None:
    layout, rows = random_rows(stored, 33, 192)
    x, codes = random_tokens(num_tokens, 192), stored.code_bytes(192)
    whole = kernels.product(x, row_numbers(layout, "weight"), rows)
    rows[20, codes : codes + stored.scale_bytes(192)] = np.full(stored.num_groups(192), scale, "<f2").view(np.uint8)
    found = kernels.product(x, row_numbers(layout, "weight"), rows)
    others = [r for r in range(33) if r != 20]
    assert torch.equal(found[:, others], whole[:, others])
    if not np.isfinite(scale):
        assert not found[:, 20].isfinite().any()
        return
    errors = product_magnitudes(x, decoded(stored, layout, rows[20:21]).double().abs())
    assert_near(found[:, 20:21], x @ decoded(stored, layout, rows[20:21]).T, errors)


@each_trellis
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_sums_of_trellis_rows_see_a_scale_that_is_no_number_in_its_group(
    num_tokens: int, stored: PartFormat, kernels: Kernels
) -> None:
    expert = random_expert(Shape(40, 320, "up", BF16, BF16, stored))
    part = expert.shape.layout.records.part("down")
    assert part is not None
    rows, neurons = expert.rows(), torch.arange(40, dtype=torch.int32)
    h = torch.randn(num_tokens, 40, generator=torch.Generator().manual_seed(1))
    whole = kernels.accumulate(h, rows, neurons)
    records = expert.extent[expert.shape.layout.selector_bytes :].reshape(40, -1)
    first = 0 if stored.group == 0 else 256
    at = part.offset + stored.code_bytes(320) + (0 if stored.group == 0 else 8)
    records[7, at : at + 2] = np.array([np.nan], "<f2").view(np.uint8)
    found = kernels.accumulate(h, rows, neurons)
    assert found[:, first:].isnan().all()
    assert torch.equal(found[:, :first], whole[:, :first])
