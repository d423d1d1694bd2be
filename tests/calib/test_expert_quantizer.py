"""Calibrated quantization: GPTQ against its definition, gains, blocks and runs of columns, and that it pays."""

from itertools import product

import pytest
import torch
from support.cases import case
from torch import Tensor

from moe_pack.calib.quantize import Calibration, ExpertQuantizer, ExpertTokens, RowQuantizer, UnrepresentableError
from moe_pack.calib.quantize.gptq import (
    ColumnRun,
    column_gains,
    column_order,
    gptq_columns,
    gptq_factor,
    gptq_rows,
    weighted_hessian,
)
from moe_pack.calib.quantize.plain import affine_pairs, stored_pairs
from moe_pack.formats import BF16, MATRICES, ExpertFormat, PartFormat, part_format, trellis_format
from moe_pack.formats.pack.codecs import affine, decode_part, unpack_codes
from moe_pack.formats.pack.plans import MXFP4
from moe_pack.runtime.model import NeuronBlock, activations

D, N, TOKENS = 128, 24, 300
PARTS = [
    part_format(2, 64),
    part_format(3, 0, 8),
    part_format(1, 32),
    part_format(4, 16, 8),
    trellis_format(5, 0),
    trellis_format(4, 0),
    trellis_format(6, 32, 8),
]


def random_values(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def random_block(num_neurons: int = N, seed: int = 0) -> NeuronBlock:
    return NeuronBlock(*(random_values(num_neurons, D, seed + i) * 0.1 for i in range(3)))


def tokens_of(num_tokens: int = TOKENS, seed: int = 9) -> ExpertTokens:
    """Inputs whose columns hang together and differ in size."""
    mixed = random_values(num_tokens, D // 4, seed) @ random_values(D // 4, D, seed + 1)
    values = mixed + 0.3 * random_values(num_tokens, D, seed + 2)
    return ExpertTokens(values * torch.logspace(-0.5, 0.5, D), torch.rand(num_tokens, generator=torch.Generator()))


def quantized(block: NeuronBlock, part: PartFormat, tokens: ExpertTokens) -> NeuronBlock:
    rows = ExpertQuantizer(ExpertFormat(part, part, part), Calibration(tokens, "silu"), D).encode(block)
    return NeuronBlock(*(decode_part(part, D, rows[matrix]) for matrix in ("gate", "up", "down")))


def plainly_quantized(block: NeuronBlock, part: PartFormat) -> NeuronBlock:
    assert block.gate is not None
    quantizer = RowQuantizer(part, D, "nearest" if part.codec == "trellis" else "hqq")
    return NeuronBlock(*(decode_part(part, D, quantizer.encode(rows)) for rows in (block.gate, block.up, block.down)))


def output(tokens: ExpertTokens, block: NeuronBlock) -> Tensor:
    return activations(tokens.inputs, block, "silu").h @ block.down


def lost(tokens: ExpertTokens, block: NeuronBlock, rounded: NeuronBlock) -> float:
    errors = output(tokens, rounded) - output(tokens, block)
    return float((errors.square().sum(dim=1) * tokens.weights).sum())


def lost_rows(errors: Tensor, hessian: Tensor) -> float:
    """The trace of `E H E^T`."""
    return float((errors @ hessian * errors).sum())


def test_calibrated_codes_lose_less_than_plain_ones_on_tokens_not_seen() -> None:
    for part in PARTS:
        with case(part):
            seen, more, block = tokens_of(), tokens_of(2 * TOKENS), random_block()
            unseen = ExpertTokens(more.inputs[TOKENS:], seen.weights)
            assert lost(unseen, block, quantized(block, part, seen)) < 0.8 * lost(
                unseen, block, plainly_quantized(block, part)
            )


@pytest.mark.parametrize("width", [2, 4])
def test_codes_of_columns_are_those_of_the_recursion_written_out(width: int) -> None:
    d, part = 320, part_format(width, 64)  # two blocks of columns and a half
    codec, weights = affine(part, d), random_values(5, d, 0)
    found = gptq_factor(weighted_hessian(random_values(200, d, 1), torch.ones(200)), 0.2)
    stored = gptq_columns(part, weights, [ColumnRun(slice(0, d), found.importance, found.factor)])
    order = column_order(d)
    codes = unpack_codes(stored[:, : codec.code_bytes], width)[:, order]
    pairs = affine_pairs(weights.view(5, -1, 64), found.importance[order.argsort()].view(-1, 64), width)
    scale, zero = (values.repeat_interleave(64, dim=1)[:, order].double() for values in stored_pairs(codec, *pairs))
    aims, exact = weights[:, order].double(), weights[:, order].double()
    for j in range(d):
        expected = (aims[:, j] / scale[:, j] + zero[:, j]).round().clamp(0, 2**width - 1)
        assert torch.equal(codes[:, j].double(), expected), f"column {j}"
        errors = exact[:, j] - (expected - zero[:, j]) * scale[:, j]
        aims[:, j + 1 :] += errors[:, None] * found.factor[j, j + 1 :]


def test_no_row_shrinks_in_the_direction_of_its_inputs() -> None:
    for part in PARTS:
        with case(part):
            weights, found = (
                random_values(9, D, 0),
                gptq_factor(weighted_hessian(tokens_of().inputs, tokens_of().weights), 0.2),
            )
            runs, order = [ColumnRun(slice(0, D), found.importance, found.factor)], column_order(D)
            rounded = decode_part(part, D, gptq_columns(part, weights, runs))
            torch.testing.assert_close(
                column_gains(weights[:, order], rounded[:, order], runs), torch.ones(9, 1), atol=2e-3, rtol=0
            )  # float16 scales
            rows = decode_part(part, D, gptq_rows(part, weights, torch.eye(9)))
            torch.testing.assert_close((weights * rows).sum(dim=1), weights.square().sum(dim=1), atol=0, rtol=2e-3)


def test_later_neurons_make_up_for_the_errors_of_earlier_ones() -> None:
    for num_neurons, part in product([1, 31, 32, 70], [part_format(2, 64), trellis_format(4, 0)]):
        with case(num_neurons, part):
            h, weights = random_values(200, 16, 3) @ random_values(16, num_neurons, 4), random_values(num_neurons, D, 5)
            hessian = weighted_hessian(h, torch.ones(200))
            alone, together = (
                lost_rows((decode_part(part, D, gptq_rows(part, weights, known, 0.2)) - weights).T, hessian)
                for known in (torch.eye(num_neurons), hessian)
            )
            assert together < 0.8 * alone if num_neurons > 1 else together == alone


def test_neurons_in_another_order_get_the_same_codes() -> None:
    h, weights = random_values(200, 70, 3) * torch.logspace(-1, 1, 70), random_values(70, D, 5)
    hessian, order = (
        weighted_hessian(h, torch.ones(200)),
        torch.randperm(70, generator=torch.Generator().manual_seed(2)),
    )
    for part in PARTS:
        with case(part):
            rows = gptq_rows(part, weights, hessian, 0.2)
            shuffled = gptq_rows(part, weights[order], hessian[order][:, order], 0.2)
            assert torch.equal(shuffled, rows[order])


def test_what_is_no_block_of_usual_rows_stays_finite() -> None:
    for part in PARTS:
        with case(part):
            block = random_block(5)
            assert block.gate is not None
            block.gate[1], block.up[2], block.down[3] = 0.0, 0.25, 0.0
            nobody = ExpertTokens(tokens_of(1).inputs, torch.zeros(1))
            for tokens in (tokens_of(1), nobody, ExpertTokens(torch.zeros(3, D), torch.ones(3))):
                rounded = quantized(block, part, tokens)
                assert rounded.gate is not None and not rounded.gate[1].any()
                assert all(torch.isfinite(matrix).all() for matrix in (rounded.gate, rounded.up, rounded.down))
                assert not rounded.down[3].any() or tokens.inputs.any()


def test_a_row_beyond_float16_scales_is_named() -> None:
    for part, matrix in product(PARTS, MATRICES):
        with case(part, matrix):
            block = random_block(40)
            {"gate": block.gate, "up": block.up, "down": block.down}[matrix][34] = 1e9
            quantizer = ExpertQuantizer(ExpertFormat(part, part, part), Calibration(tokens_of(9), "silu"), D)
            with pytest.raises(
                UnrepresentableError, match=r"^row 34 has weights too large for float16 scales; store it in 16 bits$"
            ):
                quantizer.rows(matrix, block)


def test_wide_formats_are_rounded_plainly_and_kept_ones_passed_over() -> None:
    block, part = random_block(), part_format(8, 64)
    quantizer = ExpertQuantizer(ExpertFormat(BF16, part, MXFP4), Calibration(tokens_of(), "silu"), D)
    found = quantizer.encode(block)
    assert list(found) == ["gate", "up"] == list(quantizer.matrices)
    assert block.gate is not None
    assert torch.equal(found["gate"], RowQuantizer(BF16, D, "hqq").encode(block.gate))
    assert torch.equal(found["up"], RowQuantizer(part, D, "hqq").encode(block.up))


def test_a_matrix_does_not_depend_on_how_another_is_stored() -> None:
    block, part, calibration = random_block(), part_format(2, 64), Calibration(tokens_of(), "silu")
    alike = ExpertQuantizer(ExpertFormat(part, part, part), calibration, D).encode(block)
    others = ExpertQuantizer(ExpertFormat(BF16, trellis_format(4, 0), part), calibration, D).encode(block)
    assert torch.equal(alike["down"], others["down"])


def test_experts_without_gate_have_two_matrices() -> None:
    block, part = random_block(), part_format(2, 64)
    calibration = Calibration(tokens_of(), "relu")
    quantizer = ExpertQuantizer(ExpertFormat(None, part, part), calibration, D)
    assert list(quantizer.encode(NeuronBlock(None, block.up, block.down))) == ["up", "down"]


def test_wide_rows_are_calibrated_in_equal_runs_of_columns() -> None:
    d = 4096 + 128
    runs = Calibration(ExpertTokens(random_values(3, d, 0), torch.ones(3)), "silu").runs
    assert [(run.columns.start, run.columns.stop) for run in runs] == [(0, d // 2), (d // 2, d)]
    part = part_format(2, 64)
    rounded = decode_part(part, d, gptq_columns(part, random_values(2, d, 1), runs))
    assert float((rounded - random_values(2, d, 1)).abs().mean()) < 0.5
