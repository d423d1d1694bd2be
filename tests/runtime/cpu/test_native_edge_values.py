"""The native kernels on what rows may hold: every code and every scale of sources, also the ends of both; trellises."""

from collections.abc import Iterable
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.cases import case
from support.native import INSTRUCTION_SETS, kernels_limited_to, work
from support.random_experts import (
    RandomExpert,
    Shape,
    assert_near,
    product_magnitudes,
    random_expert,
    random_rows,
    random_tokens,
)
from support.random_experts import magnitudes as expert_magnitudes
from support.random_experts import weight_magnitudes as magnitudes
from torch import Tensor

from moe_pack.formats import BF16, PartFormat, RowLayout, trellis_format
from moe_pack.formats.pack.codecs import decode_part
from moe_pack.formats.pack.plans import E5M2, FP8, MXFP4, TRELLIS_WIDTHS, format_text
from moe_pack.runtime.cpu import Kernels, row_numbers
from moe_pack.runtime.model import activations

Bytes = NDArray[np.uint8]
SOURCES = [FP8, E5M2, MXFP4]
# One code that is no number (E2M1 has none), one that is infinite (E5M2 alone has), the scale that is no number.
NO_NUMBER = {"fp8": 0x7F, "e5m2": 0x7E}
FLOAT_SCALES = [0.0, -0.0, 1.0, -3.0, 2.0**-149, 2.0**-126, 1.1754942e-38, 3.4e38, float("inf"), float("nan")]


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


def assert_same_numbers(found: Tensor, expected: Tensor) -> None:
    """Bit for bit, and no number where none is expected."""
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(nan=0).view(torch.int32), expected.nan_to_num(nan=0).view(torch.int32))


def with_down(stored: PartFormat) -> tuple[RandomExpert, Bytes]:
    """An expert of 40 neurons and 320 columns; the bytes of its down rows, u8 [40, part bytes], to be changed."""
    expert = random_expert(Shape(40, 320, "up", BF16, BF16, stored))
    return expert, expert.part_bytes("down")


def outputs(x: Tensor, expert: RandomExpert, kernels: Kernels) -> Tensor:
    """The expert's output for each token: all of its neurons run."""
    return kernels.experts(x, [work(expert.rows(), torch.arange(len(x)), torch.ones(len(x)))])


def test_every_code_with_every_scale_has_the_bits_of_the_codec(kernels: Kernels) -> None:
    for stored in SOURCES:
        with case(stored.codec):
            layout, rows = rows_with(stored, every_scale(stored))
            assert_same_numbers(kernels.decode(row_numbers(layout, "weight"), rows), decoded(stored, layout, rows))


def test_products_bear_every_scale(kernels: Kernels) -> None:
    """Relative to the row's own weights, from the smallest scale to the largest that leaves sums finite."""
    for stored, num_tokens in product((E5M2, MXFP4), (1, 4)):
        for byte in (*range(0, 230, 7), 1, 2, 126, 127, 128):
            with case((stored.codec, num_tokens, byte)):
                check_scale(stored, num_tokens, byte, kernels)


def check_scale(stored: PartFormat, num_tokens: int, byte: int, kernels: Kernels) -> None:
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


def test_scales_of_a_row_may_differ_by_any_power(kernels: Kernels) -> None:
    layout, rows = random_rows(MXFP4, 9, 320)
    codes = MXFP4.code_bytes(320)
    rows[:, codes : codes + 10] = np.random.default_rng(0).integers(0, 200, (9, 10), np.uint8)
    section = rows[:, : layout.parts[0].num_bytes]
    for num_tokens in (1, 4):
        with case(num_tokens):
            x = random_tokens(num_tokens, 320)
            found = kernels.product(x, row_numbers(layout, "weight"), rows)
            errors = product_magnitudes(x, magnitudes(MXFP4, 320, section))
            assert_near(found, x @ decoded(MXFP4, layout, rows).T, errors)


def test_a_code_that_is_not_finite_is_seen_in_its_row_alone(kernels: Kernels) -> None:
    others = [r for r in range(33) if r != 20]
    for stored, code, num_tokens in product((FP8, E5M2), (0x7F, 0xFF, 0x7C, 0xFC, 0x7E), (1, 3, 4)):
        with case((stored.codec, hex(code), num_tokens)):
            layout, rows = random_rows(stored, 33, 192)
            x = random_tokens(num_tokens, 192)
            whole = kernels.product(x, row_numbers(layout, "weight"), rows)
            rows[20, 130] = code
            found = kernels.product(x, row_numbers(layout, "weight"), rows)
            is_number = bool(decoded(stored, layout, rows)[20, 130].isfinite())
            assert is_number == (stored == FP8 and code not in (0x7F, 0xFF))
            assert torch.equal(found[:, 20].isfinite(), torch.full((num_tokens,), is_number))
            assert torch.equal(found[:, others], whole[:, others])


def test_a_scale_that_is_no_number_is_seen_in_its_row_alone(kernels: Kernels) -> None:
    others = [r for r in range(33) if r != 20]
    for stored, num_tokens in product((E5M2, MXFP4), (1, 4)):
        with case((stored.codec, num_tokens)):
            layout, rows = random_rows(stored, 33, 192)
            x = random_tokens(num_tokens, 192)
            whole = kernels.product(x, row_numbers(layout, "weight"), rows)
            rows[20, stored.code_bytes(192)] = 255
            found = kernels.product(x, row_numbers(layout, "weight"), rows)
            assert found[:, 20].isnan().all()
            assert torch.equal(found[:, others], whole[:, others])


def test_sums_of_down_rows_see_a_code_that_is_no_number_in_its_column(kernels: Kernels) -> None:
    for stored, num_tokens in product((FP8, E5M2), (1, 3, 4)):
        with case((stored.codec, num_tokens)):
            expert, down = with_down(stored)
            x = random_tokens(num_tokens, 320)
            whole = outputs(x, expert, kernels)
            down[7, 200] = NO_NUMBER[stored.codec]
            found = outputs(x, expert, kernels)
            assert found.isnan().nonzero()[:, 1].tolist() == [200] * num_tokens
            assert torch.equal(found.nan_to_num(nan=0)[:, :200], whole[:, :200])


def test_sums_of_down_rows_see_a_scale_that_is_no_number_in_its_group(kernels: Kernels) -> None:
    # The bytes of a scale that is no number, where among a row's scales it is put, and its group's first column.
    half_nan, float_nan = np.array([np.nan], "<f2").view(np.uint8), np.array([np.nan], "<f4").view(np.uint8)
    byte_nan = np.array([255], np.uint8)
    faults = [(FP8, float_nan, 8, 256), (MXFP4, byte_nan, 9, 288), (E5M2, byte_nan, 0, 0)]
    faults += [(stored, half_nan, 0 if stored.group == 0 else 8, 4 * stored.group) for stored in TRELLISES]
    for (stored, scale, place, first), num_tokens in product(faults, (1, 3, 4)):
        with case((format_text(stored), num_tokens)):
            expert, down = with_down(stored)
            x = random_tokens(num_tokens, 320)
            whole = outputs(x, expert, kernels)
            at = stored.code_bytes(320) + place
            down[7, at : at + len(scale)] = scale
            found = outputs(x, expert, kernels)
            assert found[:, first:].isnan().all()
            assert torch.equal(found[:, :first], whole[:, :first])


def test_sums_of_down_rows_bear_scales_from_tiny_to_large(kernels: Kernels) -> None:
    for stored, num_tokens, power in product(SOURCES, (1, 4), (-126, -100, -60, 60)):
        with case((stored.codec, num_tokens, power)):
            expert, rows = with_down(stored)
            scale = np.array([2.0**power], "<f4").view(np.uint8) if stored == FP8 else np.uint8(127 + power)
            rows[:, stored.code_bytes(320) :] = np.resize(scale, stored.scale_bytes(320))
            x = random_tokens(num_tokens, 320) * 2.0**10  # h is up to 2^20 as large
            block = expert.block()
            h, all_run = activations(x, block, "silu").h, torch.ones(num_tokens, 40, dtype=torch.bool)
            errors = expert_magnitudes(x, expert, all_run).y.clamp(min=2.0**-126)
            assert_near(outputs(x, expert, kernels), (h.double() @ block.down.double()).float(), errors)


TRELLISES = [trellis_format(width, group) for width in TRELLIS_WIDTHS for group in (0, 64)]


def test_every_window_in_every_column_has_the_bits_of_the_codec(kernels: Kernels) -> None:
    check_windows((trellis_format(width, (0, 64)[width % 2]) for width in TRELLIS_WIDTHS), kernels, step=5)


@pytest.mark.slow
def test_all_windows_in_every_column_have_the_bits_of_the_codec(kernels: Kernels) -> None:
    check_windows(TRELLISES, kernels, step=1)


def check_windows(trellises: Iterable[PartFormat], kernels: Kernels, step: int) -> None:
    """Streams of two bytes, over and over, so that each window ends at each bit: all of them, or each so many."""
    streams = np.arange(0, 1 << 16, step, dtype="<u2").view(np.uint8).reshape(-1, 2)
    for stored in trellises:
        with case(format_text(stored)):
            layout, rows = random_rows(stored, len(streams), 64)
            codes = stored.code_bytes(64)
            rows[:, :codes] = np.tile(streams, codes // 2)
            found = kernels.decode(row_numbers(layout, "weight"), rows)
            assert torch.equal(found.view(torch.int32), decoded(stored, layout, rows).view(torch.int32))


def test_any_scale_of_a_trellis_is_seen_in_its_row_alone(kernels: Kernels) -> None:
    others = [r for r in range(33) if r != 20]
    scales = (float("nan"), float("inf"), -1.0, 2.0**-24, 65504.0)
    for stored, num_tokens, scale in product(TRELLISES, (1, 4), scales):
        with case((format_text(stored), num_tokens, scale)):
            layout, rows = random_rows(stored, 33, 192)
            x, codes, numbers = (random_tokens(num_tokens, 192), stored.code_bytes(192), row_numbers(layout, "weight"))
            whole = kernels.product(x, numbers, rows)
            of_all_groups = np.full(stored.num_groups(192), scale, "<f2").view(np.uint8)
            rows[20, codes : codes + stored.scale_bytes(192)] = of_all_groups
            found = kernels.product(x, numbers, rows)
            assert torch.equal(found[:, others], whole[:, others])
            if np.isfinite(scale):
                values = decoded(stored, layout, rows[20:21])
                assert_near(found[:, 20:21], x @ values.T, product_magnitudes(x, values.double().abs()))
            else:
                assert not found[:, 20].isfinite().any()
