"""Rounding errors of an expert's rows, and the formats in which they are compared."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from support.cases import case
from support.families import TINY, Tiny, write_config
from support.specs import GROUPED, LATENT
from torch import Tensor

from moe_pack.calib.quantize import RowQuantizer
from moe_pack.calib.sensitivity import WIDTHS, compared_formats, quantized_formats, roundable_roles
from moe_pack.calib.sensitivity.errors import (
    RoundedDense,
    RoundedExperts,
    Rounding,
    format_ratios,
    mean_square,
    plainly_rounded,
    ratios_of_widths,
    rounding_squares,
)
from moe_pack.formats import MATRICES, ModelSpec, Quantizer, dense_roles, part_format
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.families.family import Config
from moe_pack.formats.families.registry import read_spec
from moe_pack.formats.pack.codecs import decode_part
from moe_pack.formats.pack.plans import QUANTIZERS, format_text
from moe_pack.runtime.model import CheckpointWeights, NeuronBlock, Weights

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


ROLES = ("layers.0.attention.q", "layers.0.attention.o")


@pytest.fixture(scope="module")
def source(tiny_source: Path) -> Iterator[CheckpointWeights]:
    checkpoint = Checkpoint(tiny_source)
    yield CheckpointWeights(checkpoint)
    checkpoint.close()


def whole(weights: Weights, role: str) -> torch.Tensor:
    matrix = weights.matrix(role)
    return matrix.rows(0, matrix.num_rows)


def test_the_roles_named_are_as_conversion_stores_them(source: CheckpointWeights) -> None:
    rounded = RoundedDense(source, ROLES, 4, Rounding("nearest"))
    for role in ROLES:
        original, part = whole(source, role), part_format(4, 64)
        expected = decode_part(part, 64, RowQuantizer(part, 64, "nearest").encode(original))
        assert torch.equal(whole(rounded, role), expected)
        assert not torch.equal(expected, original)


def test_nothing_else_changes(source: CheckpointWeights) -> None:
    rounded = RoundedDense(source, ROLES, 2, Rounding("nearest"))
    assert (rounded.spec, rounded.selector, rounded.threshold(0, 1)) == (source.spec, source.selector, 0.0)
    others = [role for role in dense_roles(source.spec) if role.name not in ROLES]
    for role in others:
        if len(role.shape) == 1:
            assert torch.equal(rounded.vector(role.name), source.vector(role.name))
        else:
            assert torch.equal(whole(rounded, role.name), whole(source, role.name))
    (found,), (expected,) = rounded.expert(0, 1).blocks(), source.expert(0, 1).blocks()
    assert torch.equal(found.up, expected.up) and torch.equal(found.down, expected.down)
    assert {"layers.0.router", "embed", "head", "layers.0.attention.k"} < {role.name for role in others}


def test_rounded_experts_have_their_matrices_rounded_and_nothing_else(source: CheckpointWeights) -> None:
    plain = Rounding("nearest")
    rounded = RoundedExperts(source, 2, plain)
    (found,), (expected,) = rounded.expert(0, 1).blocks(), source.expert(0, 1).blocks()
    assert expected.gate is not None and found.gate is not None
    assert torch.equal(found.gate, plain(expected.gate, 2)) and not torch.equal(found.gate, expected.gate)
    assert torch.equal(found.up, plain(expected.up, 2))
    assert torch.equal(found.down, plain(expected.down, 2))  # a neuron a row: the group runs along d
    for role in ROLES:
        assert torch.equal(whole(rounded, role), whole(source, role))
    assert torch.equal(rounded.vector("norm"), source.vector("norm"))
    assert (rounded.spec, rounded.selector, rounded.threshold(0, 1)) == (source.spec, source.selector, 0.0)


def test_rows_in_pieces_are_the_rows_at_once(source: CheckpointWeights) -> None:
    matrix = RoundedDense(source, ("embed",), 3, Rounding("nearest")).matrix("embed")
    assert (matrix.num_rows, matrix.num_cols) == (96, 64)
    for step in (1, 7, 64):
        pieces = [matrix.rows(start, min(start + step, 96)) for start in range(0, 96, step)]
        assert torch.equal(torch.cat(pieces), matrix.rows(0, 96))


def test_roles_that_rows_of_64_cannot_hold_are_left_out() -> None:
    """The attention of GROUPED is 4 heads of 32 wide, so its every matrix has 64 or 128 columns; its experts' 80, 40.

    LATENT's second halves of queries and keys have 40 and 24 columns, its attention's output 48, its shared down 96.
    """
    attention = ("attention.q", "attention.k", "attention.v", "attention.o")
    with_experts = (*attention, "shared.gate", "shared.up")
    assert roundable_roles(GROUPED, 1) == tuple(f"layers.1.{name}" for name in with_experts)
    assert roundable_roles(GROUPED, 2) == tuple(f"layers.2.{name}" for name in (*attention, "mlp.gate", "mlp.up"))
    assert roundable_roles(GROUPED, None) == ("embed", "head")
    latent = ("attention.q_a", "attention.kv_a", "shared.gate", "shared.up")
    assert roundable_roles(LATENT, 1) == tuple(f"layers.1.{name}" for name in latent)
    assert roundable_roles(LATENT, None) == ("embed",)


def test_a_layers_roles_are_not_those_of_a_layer_whose_number_begins_alike() -> None:
    deep = replace(GROUPED, num_hidden_layers=12, moe_layers=tuple(range(12)))
    assert all(role.startswith("layers.1.") for role in roundable_roles(deep, 1))
    assert len(roundable_roles(deep, 1)) == len(roundable_roles(deep, 11)) == 6


def spec_of(tiny: Tiny, folder: Path) -> ModelSpec:
    return read_spec(Config(write_config(tiny, folder), "config.json"))[1]


@pytest.mark.slow
def test_in_every_family_only_matrices_a_plan_may_quantize_are_rounded(tmp_path: Path) -> None:
    for number, tiny in enumerate([tiny for tiny in TINY if not (tiny.fused or tiny.four)]):
        (case_folder := tmp_path / str(number)).mkdir()
        with case(tiny):
            spec = spec_of(tiny, case_folder)
            by_name = {role.name: role for role in dense_roles(spec)}
            layers = [roundable_roles(spec, layer) for layer in range(spec.num_hidden_layers)]
            found = [*roundable_roles(spec, None), *(name for roles in layers for name in roles)]
            assert len(set(found)) == len(found)
            for name in found:
                assert by_name[name].quantizable and len(by_name[name].shape) == 2 and by_name[name].shape[1] % 64 == 0
                assert not any(word in name for word in ("router", "norm", "bias"))
            for layer, roles in enumerate(layers):
                assert all(name.startswith(f"layers.{layer}.") for name in roles)
            missing = [role for name, role in by_name.items() if role.quantizable and name not in found]
            assert all(role.shape[1] % 64 for role in missing)
            assert any("attention" in name or "mixer" in name for name in found)
            assert ("head" in found) == (not spec.tied_head)
