"""Kernels with rounded inputs: products against rounding in plain torch, experts against exact ones and each other."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest
import torch
from support.cases import case
from support.combinations import name_of, sample
from support.expert_cases import FEW_CHOICES, ROW_CODECS, Case, can_be, drawn, fitting
from support.native import INSTRUCTION_SETS, kernels_limited_to, work
from support.random_experts import assert_near, product_magnitudes, random_rows, random_tokens, weight_magnitudes
from torch import Tensor

from moe_pack.formats import BF16, PartFormat, part_format, trellis_format
from moe_pack.formats.pack.codecs import decode_part
from moe_pack.formats.pack.plans import MXFP4, format_text
from moe_pack.runtime.cpu import Kernels, row_numbers

ROUNDING = ("avx2", "avx512", "avx512vbmi")
INTEGERS = [stored for stored in ROW_CODECS if stored.codec in ("affine", "trellis", "mxfp4")]
LARGEST = {1: 127.0, 2: 127.0 * 256}  # code of one digit, and of two


@pytest.fixture(scope="module", params=ROUNDING)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_limited_to(request.param)


@contextmanager
def rounding(kernels: Kernels, digits: int) -> Iterator[Kernels]:
    assert kernels.take_digits(digits) == digits
    try:
        yield kernels
    finally:
        kernels.take_digits(0)


def rounded(x: Tensor, digits: int) -> Tensor:
    """Inputs float32 [T, n] rounded by blocks of 64, with a scale for each block of a token."""
    blocks = x.unflatten(1, (-1, 64))
    peaks = blocks.abs().amax(dim=2, keepdim=True)
    codes = (blocks * (torch.tensor(LARGEST[digits]) / peaks).nan_to_num(posinf=0.0)).round()
    return (codes.double() * (peaks / LARGEST[digits])).flatten(1)


def digits_of(stored: PartFormat, num_tokens: int, digits: int, instruction_set: str) -> int:
    """The digits to which inputs are rounded: AVX2 has bytes for small codes alone; few tokens, affine codes alone."""
    if num_tokens <= 3:
        return 1 if digits == 1 and stored.codec == "affine" else 0
    if instruction_set == "avx2" and (stored.codec != "affine" or stored.bits > 4):
        return 2
    return digits


def test_products_are_those_of_rounded_inputs(kernels: Kernels) -> None:
    for digits in (1, 2):
        for number, stored in enumerate(INTEGERS):
            draws = zip(fitting(stored), (4, 3, 65, 7, 129, 17, 1), (129, 7, 33, 1, 65, 200, 5), strict=False)
            for num_cols, num_tokens, num_rows in draws:
                with case((digits, format_text(stored), num_cols)):
                    layout, rows = random_rows(stored, num_rows, num_cols, number)
                    section = rows[:, : layout.parts[0].num_bytes]
                    weights = decode_part(stored, num_cols, torch.from_numpy(section))
                    x = random_tokens(num_tokens, num_cols)
                    taken = digits_of(stored, num_tokens, digits, kernels.instruction_set)
                    inputs = rounded(x, taken) if taken else x.double()
                    with rounding(kernels, digits):
                        found = kernels.product(x, row_numbers(layout, "weight"), rows)
                    errors = product_magnitudes(x, weight_magnitudes(stored, num_cols, section))
                    assert_near(found, (inputs @ weights.double().T).float(), errors)


def output(held: Case, kernels: Kernels, digits: int) -> Tensor:
    everyone = work(held.expert.rows(held.threshold), torch.arange(len(held.x)), torch.ones(len(held.x)))
    with rounding(kernels, digits):
        return kernels.experts(held.x, [everyone])


def distance(found: Tensor, expected: Tensor) -> float:
    size = float(expected.double().norm())
    return float((found.double() - expected.double()).norm()) / size if size else float(found.double().norm())


def test_experts_lose_what_their_digits_allow(kernels: Kernels) -> None:
    """Factors of down rows are rounded too; a neuron near its threshold may run or not; relu2 squares errors."""
    seed = INSTRUCTION_SETS.index(kernels.instruction_set)  # type: ignore[arg-type]  # the one it was limited to
    for number, combination in enumerate(sample(FEW_CHOICES, can_be, seed=seed, together=(("up", "num_tokens"),))):
        with case(name_of(combination)):
            held = drawn(combination, seed + number)
            assert distance(output(held, kernels, 2), held.y) < 2e-3
            assert distance(output(held, kernels, 1), held.y) < 0.3


def test_instruction_sets_round_alike() -> None:
    """Two kernels that share nothing agree much more closely than either agrees with exact inputs."""
    first, second = (kernels_limited_to(name) for name in ("avx2", "avx512"))
    formats = (part_format(4, 64), part_format(2, 16, 8), part_format(3, 0), part_format(1, 32))
    others = (part_format(8, 64), trellis_format(5, 64), trellis_format(8, 0), MXFP4)
    for digits, some in ((1, formats), (2, (*formats, *others))):
        for stored in some:
            with case((digits, format_text(stored))):
                held = drawn(
                    {
                        **{name: choices[0] for name, choices in FEW_CHOICES.items()},
                        **{name: _choice(stored) for name in ("gate", "up", "down")},
                        **{"group": stored.group, "scale_bits": stored.scale_bits},
                        **{"num_rows": 257, "num_cols": 640, "num_tokens": 65, "selector": "up"},
                    },
                    seed=1,
                )
                found = [output(held, kernels, digits) for kernels in (first, second)]
                assert distance(*found) < 3e-6 < distance(found[0], held.y) / 5


def _choice(stored: PartFormat) -> object:
    """What `drawn` calls this format."""
    if stored.codec == "trellis":
        return f"trellis {stored.width}"
    return "mxfp4" if stored.codec == "mxfp4" else stored.width


def test_what_is_not_finite_stays_with_its_token(kernels: Kernels) -> None:
    stored = part_format(4, 64)
    layout, rows = random_rows(stored, 70, 192, 0)
    numbers, x = row_numbers(layout, "weight"), random_tokens(6, 192)
    x[4] = 0.0
    x[5] *= 1e-37
    for digits in (1, 2):
        with rounding(kernels, digits):
            whole = kernels.product(x, numbers, rows)
            for value in (float("inf"), float("nan")):
                broken = x.clone()
                broken[2, 100] = value
                found = kernels.product(broken, numbers, rows)
                assert found[2].isnan().all()
                others = [0, 1, 3, 4, 5]
                assert torch.equal(found[others], whole[others])
        assert not whole[4].any() and whole[5].isfinite().all()


def test_a_token_has_the_same_bits_among_any_others_and_with_any_threads(kernels: Kernels) -> None:
    for stored in (part_format(4, 64), part_format(2, 16), trellis_format(5, 0)):
        held = drawn(
            {
                **{name: choices[0] for name, choices in FEW_CHOICES.items()},
                **{name: _choice(stored) for name in ("gate", "up", "down")},
                **{"group": stored.group, "num_rows": 257, "num_cols": 640, "num_tokens": 65, "selector": "none"},
            },
            seed=2,
        )
        rows = held.expert.rows(0.0)
        with closing(Kernels(1, kernels.instruction_set)) as alone, rounding(alone, 2), rounding(kernels, 2):
            everyone = kernels.experts(held.x, [work(rows, torch.arange(65), torch.ones(65))])
            assert torch.equal(alone.experts(held.x, [work(rows, torch.arange(65), torch.ones(65))]), everyone)
            some = np.array([3, 17, 40, 41, 64])
            few = kernels.experts(held.x, [work(rows, torch.from_numpy(some), torch.ones(5))])
            assert torch.equal(few[some], everyone[some])


def test_portable_kernels_and_floats_are_exact(kernels: Kernels) -> None:
    assert kernels_limited_to("portable").take_digits(2) == 0
    layout, rows = random_rows(BF16, 70, 192, 0)
    numbers, x = row_numbers(layout, "weight"), random_tokens(6, 192)
    expected = kernels.product(x, numbers, rows)
    with rounding(kernels, 1):
        assert torch.equal(kernels.product(x, numbers, rows), expected)
