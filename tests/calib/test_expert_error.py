"""Changes of an expert's output against the whole expert run twice, and their squares worked by hand."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from cases import case
from torch import Tensor

from moe_pack.calib.forward import KINDS
from moe_pack.calib.quantize import RowQuantizer
from moe_pack.calib.sensitivity import SPARSITIES, WIDTHS, compared_formats, quantized_formats
from moe_pack.calib.sensitivity.errors import (
    QUANTIZED,
    SPARSE,
    Change,
    Rounding,
    format_ratios,
    mean_square,
    output_changes,
    ratios_of_widths,
)
from moe_pack.formats import MATRICES, Matrix, PartFormat, Quantizer, part_format
from moe_pack.formats.codecs import decode_part
from moe_pack.formats.plan import QUANTIZERS, format_text
from moe_pack.runtime.model import NeuronBlock, run_expert

# Outputs here are sums of up to 90 float32 products of order 1, in another order than brute force has them.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Held:
    """An expert held in float32, given out in blocks of `step` neurons."""

    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    step: int = 1000

    def down_bias(self) -> None:
        """It has none."""

    def blocks(self) -> Iterator[NeuronBlock]:
        for i in range(0, len(self.up), self.step):
            held = (self.gate, self.up, self.down, self.gate_bias, self.up_bias)
            gate, up, down, gate_bias, up_bias = (None if one is None else one[i : i + self.step] for one in held)
            assert up is not None and down is not None, "every expert has these"
            yield NeuronBlock(gate, up, down, gate_bias, up_bias)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def an_expert(f: int = 70, d: int = 64, biases: bool = False, matrices: int = 3) -> Held:
    return Held(
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


def inputs_of(expert: Held) -> Tensor:
    return random(5, expert.up.shape[1], seed=9)


def rounded(weights: Tensor, width: int, quantizer: Quantizer) -> Tensor:
    """The whole matrix as conversion stores it."""
    part = part_format(width, 64)
    return decode_part(part, weights.shape[1], RowQuantizer(part, weights.shape[1], quantizer).encode(weights))


def output(expert: Held, x: Tensor) -> Tensor:
    return run_expert(x, expert, "silu", "none", 0.0)


def test_a_quantized_matrix_changes_what_the_whole_expert_with_it_gives() -> None:
    for name, quantizer in [
        *((name, "nearest") for name in EXPERTS),
        *((name, "hqq") for name in ("plain", "two matrices, bias")),
    ]:
        with case(name, quantizer):
            expert = EXPERTS[name]
            x = inputs_of(expert)
            found, _ = output_changes(expert, "silu", x, Rounding(quantizer), None)
            assert len(found) == len(QUANTIZED) == len(MATRICES) * len(WIDTHS)
            for change, held in zip(QUANTIZED, found, strict=True):
                matrix = MATRICES[change.matrix_idx]
                weights = getattr(expert, matrix)
                if weights is None:
                    assert not held.any()
                    continue
                changed = replace(expert, **{matrix: rounded(weights, change.width, quantizer)})
                expected = output(changed, x) - output(expert, x)
                torch.testing.assert_close(held, expected, atol=TOLERANCE, rtol=0)
                assert change.width == 8 or expected.abs().max() > 100 * TOLERANCE, "there is something to compare"


@ALL_EXPERTS
def test_a_sparse_expert_changes_by_what_its_dropped_neurons_gave(name: str) -> None:
    expert = EXPERTS[name]
    x = inputs_of(expert)
    _, found = output_changes(expert, "silu", x, Rounding("nearest"), THRESHOLDS)
    assert len(found) == len(SPARSE) == THRESHOLDS.numel()
    for change, held in zip(SPARSE, found, strict=True):
        threshold = float(THRESHOLDS[change.kind_idx, SPARSITIES.index(change.sparsity)])
        kept = run_expert(x, expert, "silu", KINDS[change.kind_idx], threshold)
        torch.testing.assert_close(held, kept - output(expert, x), atol=TOLERANCE, rtol=0)
    assert found.any()


def test_a_threshold_of_zero_drops_nothing_and_an_infinite_one_everything() -> None:
    expert, thresholds = EXPERTS["plain"], torch.zeros(3, 4)
    thresholds[:, 3] = torch.inf
    _, found = output_changes(expert, "silu", X, Rounding("nearest"), thresholds)
    for change, held in zip(SPARSE, found, strict=True):
        expected = -output(expert, X) if change.sparsity == SPARSITIES[3] else torch.zeros_like(X)
        torch.testing.assert_close(held, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["biases", "two matrices", "one neuron"])
def test_changes_do_not_depend_on_blocks_of_whole_rounding_groups(name: str) -> None:
    """Blocks of one neuron with `nearest`, whose groups lie in one row each."""
    expert = EXPERTS[name]
    x = inputs_of(expert)
    at_once = output_changes(expert, "silu", x, Rounding("nearest"), THRESHOLDS)
    for step in (1, 50):
        by_block = output_changes(replace(expert, step=step), "silu", x, Rounding("nearest"), THRESHOLDS)
        for whole, parts in zip(at_once, by_block, strict=True):
            torch.testing.assert_close(parts, whole, atol=TOLERANCE, rtol=0)


def test_without_tokens_there_is_nothing_to_change() -> None:
    quantized, sparse = output_changes(EXPERTS["plain"], "silu", X[:0], Rounding("nearest"), THRESHOLDS)
    assert quantized.shape == (12, 0, 64)
    assert sparse.shape == (12, 0, 64)
    assert mean_square(quantized, torch.empty(0)).tolist() == [0.0] * 12


def test_without_thresholds_no_sparsity_is_measured() -> None:
    assert output_changes(EXPERTS["plain"], "silu", X, Rounding("nearest"), None)[1].shape == (0, 5, 64)


def test_changes_are_listed_matrix_by_matrix_and_kind_by_kind() -> None:
    """As the arrays [matrices, widths] and [kinds, sparsities] of a profile have them."""
    assert QUANTIZED[0] == Change(matrix_idx=0, width=2)
    assert QUANTIZED[6] == Change(matrix_idx=1, width=4)
    assert SPARSE[11] == Change(kind_idx=2, sparsity=0.9)


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


def test_hqqs_own_errors_have_a_ratio_of_one_at_groups_of_64() -> None:
    ratios = format_ratios(EXPERTS["plain"], "silu", X, torch.ones(5), Rounding("hqq"))
    assert ratios.shape == (3, len(compared_formats(64)))
    assert ratios_of_widths(ratios.numpy(), 64).tolist() == [[1.0] * 4] * 3
    assert (ratios != 1).any()


def test_a_matrix_an_expert_does_not_have_has_ratios_of_one() -> None:
    ratios = format_ratios(EXPERTS["two matrices"], "silu", X, torch.ones(5), Rounding("nearest"))
    assert (ratios[0] == 1).all()
    assert (ratios[1:] != 1).any(dim=1).all()


def test_weights_that_every_width_holds_have_ratios_of_one() -> None:
    """0 and a multiple of 3, 7, 15 and 255: plain rounding stores both without error, absmax does not."""
    row = torch.tensor([0.0, 1785 / 1024]).repeat(32)
    expert = Held(row.repeat(7, 1), row.repeat(7, 1), row.repeat(7, 1))
    plain = Rounding("nearest")
    assert output_changes(expert, "silu", X, Rounding("absmax"), None)[0].any()
    assert not output_changes(expert, "silu", X, plain, None)[0].any()
    assert (format_ratios(expert, "silu", X, torch.ones(5), plain) == 1).all()


def test_hqq_is_better_where_an_outlier_spoils_plain_rounding() -> None:
    expert = an_expert()
    for matrix in (expert.gate, expert.up, expert.down):
        assert matrix is not None
        matrix[:, 7] = 0.6  # six deviations, and plain rounding's range reaches to it
    ratios = format_ratios(expert, "silu", random(50, 64, seed=8), torch.ones(50), Rounding("nearest"))
    assert ratios_of_widths(ratios.numpy(), 64)[:, 0].max() < 0.95  # at 2 bits


def test_smaller_groups_err_less() -> None:
    ratios = format_ratios(EXPERTS["plain"], "silu", random(50, 64, seed=8), torch.ones(50), Rounding("nearest"))
    parts = quantized_formats(64)
    for width in (2, 3, 4):
        by_group = [ratios[:, parts.index(part_format(width, group))] for group in (16, 32, 64)]
        assert (by_group[0] < by_group[1]).all() and (by_group[1] < by_group[2]).all()


@pytest.mark.slow
@pytest.mark.parametrize("step", [100, pytest.param(256, marks=pytest.mark.slow), 1000])
def test_ratios_are_those_of_mean_squares_on_the_first_256_neurons(step: int) -> None:
    expert = replace(an_expert(f=300, d=128), step=step)
    weights, x = torch.tensor([0.1, 0.9, 0.4, 0.0, 1.0]), inputs_of(expert)
    found = format_ratios(expert, "silu", x, weights, Rounding("nearest"))
    assert expert.gate is not None
    part = Held(expert.gate[:256], expert.up[:256], expert.down[:256])

    def square(matrix: Matrix, stored: PartFormat, quantizer: Quantizer) -> float:
        rows = getattr(part, matrix)
        pieces = [RowQuantizer(stored, 128, quantizer).encode(rows[i : i + step]) for i in range(0, 256, step)]
        changed = replace(part, **{matrix: decode_part(stored, 128, torch.cat(pieces))})
        return float(((output(changed, x) - output(part, x)) * weights[:, None]).square().mean())

    for matrix_idx, matrix in enumerate(MATRICES):
        for idx, (quantizer, stored) in enumerate(compared_formats(128)):
            expected = square(matrix, stored, quantizer) / square(matrix, part_format(stored.width, 64), "nearest")
            # At 8 bits the difference is of outputs that agree to 3 digits: 1e-7 of 1e-3, twice, squared.
            tolerance = 0.01 if stored.width == 8 else 1e-3
            assert found[matrix_idx, idx].item() == pytest.approx(expected, rel=tolerance), (
                f"{quantizer} {format_text(stored)}"
            )
