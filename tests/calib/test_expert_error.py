"""Rounding errors of an expert's rows, and the formats in which they are compared."""

from itertools import product

import pytest
import torch
from support.cases import case
from torch import Tensor

from moe_pack.calib.quantize import RowQuantizer
from moe_pack.calib.sensitivity import WIDTHS, compared_formats, quantized_formats
from moe_pack.calib.sensitivity.errors import (
    Rounding,
    format_ratios,
    mean_square,
    plainly_rounded,
    ratios_of_widths,
    rounding_squares,
)
from moe_pack.formats import MATRICES, Quantizer, part_format
from moe_pack.formats.pack.codecs import decode_part
from moe_pack.formats.pack.plans import QUANTIZERS, format_text
from moe_pack.runtime.model import NeuronBlock

# Outputs here are sums of up to 90 float32 products of order 1, in another order than brute force has them.
TOLERANCE = 1e-5


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def an_expert(f: int = 70, d: int = 64, biases: bool = False, matrices: int = 3) -> NeuronBlock:
    return NeuronBlock(
        gate=random(f, d, seed=1) * 0.1 if matrices == 3 else None,
        up=random(f, d, seed=2) * 0.1,
        down=random(f, d, seed=3) * 0.1,
        gate_bias=random(f, seed=4) if biases and matrices == 3 else None,
        up_bias=random(f, seed=5) if biases else None,
    )


EXPERTS = {
    "plain": an_expert(),
    "biases": an_expert(biases=True),
    "two matrices": an_expert(matrices=2),
    "two matrices, bias": an_expert(matrices=2, biases=True),
    "one neuron": an_expert(f=1, d=128),
}
ALL_EXPERTS = pytest.mark.parametrize("name", EXPERTS)
X = random(5, 64, seed=9)
THRESHOLDS = torch.tensor([[0.2, 0.4, 0.6, 0.9], [0.1, 0.2, 0.3, 0.5], [0.05, 0.1, 0.2, 0.4]])


def rounded(weights: Tensor, width: int, quantizer: Quantizer) -> Tensor:
    """The whole matrix as conversion stores it."""
    part = part_format(width, 64)
    return decode_part(part, weights.shape[1], RowQuantizer(part, weights.shape[1], quantizer).encode(weights))


def test_rounding_gives_what_a_pack_holds() -> None:
    for quantizer, width in product([each for each in QUANTIZERS if each != "calibrated"], WIDTHS):
        with case(quantizer, width):
            weights = random(70, 128).bfloat16()
            found = Rounding(quantizer)(weights, width)
            assert found.dtype == torch.float32
            assert torch.equal(found, rounded(weights, width, quantizer))


def test_rounding_leaves_torch_with_the_threads_it_had() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    Rounding("hqq")(random(3, 64), 4)
    found = torch.get_num_threads()
    torch.set_num_threads(threads)
    assert found == threads + 1


def test_the_mean_square_is_that_worked_by_hand() -> None:
    """Two tokens: (1, 3) has 5, (2, 0) has 2; weights 1/2 and 2: (5/4 + 2 * 4) / 2. A change of nothing has 0."""
    changes = torch.tensor([[[1.0, 3.0], [2.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])
    assert mean_square(changes, torch.tensor([0.5, 2.0])).tolist() == [4.625, 0.0]


def test_a_token_of_no_weight_counts_as_a_token_without_error() -> None:
    changes = torch.tensor([[[2.0], [100.0]]])
    assert mean_square(changes, torch.tensor([1.0, 0.0])).tolist() == [2.0]


def test_formats_are_those_that_a_row_can_hold() -> None:
    """Four widths of every group that divides the row, with both scales, and of the row with 16-bit ones."""
    named = [[format_text(part) for part in quantized_formats(num_cols)] for num_cols in (64, 128, 192, 96)]
    assert named[1][:9] == [
        "2 bit g16",
        "2 bit g16, byte scales",
        "2 bit g32",
        "2 bit g32, byte scales",
        "2 bit g64",
        "2 bit g64, byte scales",
        "2 bit g128",
        "2 bit g128, byte scales",
        "2 bit row",
    ]
    assert [name[0] for name in named[1]] == ["2"] * 9 + ["3"] * 9 + ["4"] * 9 + ["8"] * 9
    assert named[0] == named[2] == [name for name in named[1] if "g128" not in name]
    assert named[3] == []


def moments_of(expert: NeuronBlock, seed: int = 8) -> list[Tensor | None]:
    """Made up, of all neurons: what a squared error costs, by groups of 64."""
    of_row = random(len(expert.up), expert.up.shape[1] // 64, seed=seed).abs()
    return [None if expert.gate is None else of_row, of_row * 2, of_row * 3]


def ratios_of(expert: NeuronBlock) -> Tensor:
    formats = compared_formats(expert.up.shape[1])
    return format_ratios((expert.gate, expert.up, expert.down), moments_of(expert), formats)


def test_rounding_squares_are_those_of_plain_rounding_as_a_pack_stores_it() -> None:
    """But for scales and zeros, which are float32 here; at 8 bits by the square of the step."""
    rows = random(40, 128) * 0.1
    for width, found in zip(WIDTHS, rounding_squares(rows), strict=True):
        expected = (rounded(rows, width, "nearest") - rows).square().view(40, 2, 64).sum(2)
        assert found.shape == (40, 2)
        assert found.sum().item() == pytest.approx(expected.sum().item(), rel=0.1 if width == 8 else 0.01)
        if width < 8:
            assert torch.equal(found, (plainly_rounded(rows, width) - rows).square().view(40, 2, 64).sum(2))


def test_a_group_of_equal_weights_is_rounded_without_error() -> None:
    rows = torch.tensor([[0.25] * 64 + [0.0] * 64])
    assert torch.equal(plainly_rounded(rows, 2), rows)


def test_a_matrix_an_expert_does_not_have_has_ratios_of_one() -> None:
    ratios = ratios_of(EXPERTS["two matrices"])
    assert (ratios[0] == 1).all()
    assert (ratios[1:] != 1).any(dim=1).all()


def test_weights_that_every_width_holds_have_ratios_of_one() -> None:
    """0 and a multiple of 3, 7, 15 and 255, which plain rounding stores without error."""
    row = torch.tensor([0.0, 1785 / 1024]).repeat(32)
    assert (ratios_of(NeuronBlock(row.repeat(7, 1), row.repeat(7, 1), row.repeat(7, 1))) == 1).all()


def test_hqq_is_better_where_an_outlier_spoils_plain_rounding() -> None:
    expert = an_expert()
    for matrix in (expert.gate, expert.up, expert.down):
        assert matrix is not None
        matrix[:, 7] = 0.6  # six deviations, and plain rounding's range reaches to it
    assert ratios_of_widths(ratios_of(expert).numpy(), 64)[:, 0].max() < 0.96  # at 2 bits


def test_smaller_groups_err_less() -> None:
    ratios, parts = ratios_of(EXPERTS["plain"]), quantized_formats(64)
    for width in (2, 3, 4):
        by_group = [ratios[:, parts.index(part_format(width, group))] for group in (16, 32, 64)]
        assert (by_group[0] < by_group[1]).all() and (by_group[1] < by_group[2]).all()


def test_ratios_are_of_squares_weighted_by_moments() -> None:
    expert = an_expert(f=30, d=128)
    found = ratios_of(expert)
    for matrix_idx, (matrix, moments) in enumerate(zip(MATRICES, moments_of(expert), strict=True)):
        rows = getattr(expert, matrix)
        assert moments is not None
        by_column = moments.repeat_interleave(64, dim=1)

        def cost(changed: Tensor, rows: Tensor = rows, by_column: Tensor = by_column) -> float:
            return float(((changed - rows).double().square() * by_column).sum())

        for idx, (quantizer, stored) in enumerate(compared_formats(128)):
            if stored.width == 8:
                continue  # plain rounding's is not measured
            coded = decode_part(stored, 128, RowQuantizer(stored, 128, quantizer).encode(rows))
            expected = cost(coded) / cost(plainly_rounded(rows, stored.width))
            assert found[matrix_idx, idx].item() == pytest.approx(expected, rel=1e-4), format_text(stored)
