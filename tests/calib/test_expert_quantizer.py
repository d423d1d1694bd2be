"""Calibrated quantization: GPTQ against its definition, gains, blocks and runs of columns, and that it pays."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from support.cases import case
from support.models import DEMO_MODEL
from support.profiles import QUICK, Recorder
from torch import Tensor

from moe_pack.calib.forward import read_tokens
from moe_pack.calib.profile import make_profile
from moe_pack.calib.quantize import Calibration, ExpertQuantizer, ExpertTokens, RowQuantizer, UnrepresentableError
from moe_pack.calib.quantize.gptq import (
    LEAST_DAMPING,
    MOST_DAMPING,
    USUAL_DAMPING,
    ColumnRun,
    DampedFit,
    column_gains,
    column_order,
    damping,
    gptq_columns,
    gptq_factor,
    gptq_rows,
    weighted_hessian,
)
from moe_pack.calib.quantize.plain import affine_pairs, stored_pairs
from moe_pack.formats import BF16, MATRICES, ExpertFormat, PartFormat, part_format, trellis_format
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.formats.pack.codecs import affine, decode_part, unpack_codes
from moe_pack.formats.pack.plans import MXFP4
from moe_pack.runtime import Text
from moe_pack.runtime.model import CheckpointWeights, NeuronBlock, activations

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


M = 12


def correlated_values(num_tokens: int, num_columns: int, seed: int = 0) -> Tensor:
    """Float32 [n, m], columns of many sizes that hang on each other."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(num_tokens, num_columns, generator=generator) @ torch.randn(
        num_columns, num_columns, generator=generator
    )
    return mixed * torch.logspace(-2, 1, num_columns)[torch.randperm(num_columns, generator=generator)]


def random_weights(num_tokens: int) -> Tensor:
    return torch.rand(num_tokens, generator=torch.Generator().manual_seed(7))


def damped(hessian: Tensor, share: float = 0.01) -> Tensor:
    """Float64, with this share of the diagonal's mean added to it, as GPTQ does."""
    exact = hessian.to(torch.float64)
    return exact + share * exact.diagonal().mean() * torch.eye(len(exact), dtype=torch.float64)


def loss(errors: Tensor, hessian: Tensor) -> float:
    """`e H e^T` of one row's errors."""
    return float(errors @ hessian @ errors)


def best_columns_left(errors: Tensor, hessian: Tensor) -> Tensor:
    """The errors of the columns after these that make the loss least: solved as a whole, no recursion."""
    n = len(errors)
    return -torch.linalg.solve(hessian[n:, n:], hessian[n:, :n] @ errors)


def test_the_hessian_is_the_weighted_mean_of_the_products_of_columns() -> None:
    for num_tokens in [1, 5, 256, 257, 700]:
        with case(num_tokens):
            values, weights = correlated_values(num_tokens, M), random_weights(num_tokens)
            exact, shares = values.to(torch.float64), weights.to(torch.float64)
            expected = torch.einsum("n,ni,nj->ij", shares, exact, exact) / shares.sum()
            found = weighted_hessian(values, weights)
            assert found.dtype == torch.float32
            sizes = expected.diagonal().sqrt()
            assert ((found - expected).abs() <= 1e-6 * sizes[:, None] * sizes).all()  # float32 sums of 700 products


def test_tokens_without_weight_do_not_count() -> None:
    values, weights = correlated_values(300, M), random_weights(300)
    weights[::3] = 0
    kept = weights > 0
    torch.testing.assert_close(weighted_hessian(values, weights), weighted_hessian(values[kept], weights[kept]))


def test_the_hessian_does_not_depend_on_the_unit_of_weights() -> None:
    values, weights = correlated_values(40, M), random_weights(40)
    torch.testing.assert_close(weighted_hessian(values, weights * 1e-30), weighted_hessian(values, weights))


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_without_any_weight_the_hessian_is_zero(num_tokens: int) -> None:
    assert torch.equal(weighted_hessian(correlated_values(num_tokens, M), torch.zeros(num_tokens)), torch.zeros(M, M))


def test_the_hessian_of_some_columns_is_a_block_of_the_whole() -> None:
    values, weights = correlated_values(300, M), random_weights(300)
    whole = weighted_hessian(values, weights)
    torch.testing.assert_close(weighted_hessian(values[:, 3:8], weights), whole[3:8, 3:8])


def test_damping_is_two_fifths_of_columns_over_tokens() -> None:
    for num_tokens, num_columns, expected in [
        (1000, 500, 0.2),
        (1000, 2048, 0.8192),
        (1000, 250, USUAL_DAMPING),
        (1000, 40, USUAL_DAMPING),
        (100, 250, 1.0),
        (1, 14336, MOST_DAMPING),
    ]:
        with case(num_tokens, num_columns, expected):
            assert damping(torch.full((num_tokens,), 0.3), num_columns) == pytest.approx(expected)


def test_tokens_of_little_weight_count_as_few() -> None:
    heavy = torch.cat((torch.full((200,), 2.0), torch.full((800,), 1e-4)))
    assert damping(heavy, 300) == pytest.approx(0.6, rel=1e-3)
    assert damping(heavy * 1e-12, 300) == pytest.approx(damping(heavy, 300))
    assert damping(torch.zeros(5), 300) == MOST_DAMPING


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tensor, Tensor]]:
    """The inputs of an expert of the demo model and its `h`, some 1,500 tokens each."""
    checkpoint = Checkpoint(DEMO_MODEL)
    tokens = read_tokens(None, None, Text(FolderFiles(DEMO_MODEL)), 8192, 512)
    profile = make_profile(checkpoint, tokens, tmp_path_factory.mktemp("demo") / "profile", QUICK, Recorder())
    with profile.inputs(1) as inputs:
        x = inputs.of_expert(2).inputs[:-256]  # its own
    blocks = CheckpointWeights(checkpoint).expert(1, 2).blocks()
    yield x, torch.cat([activations(x, block, profile.spec.expert.function).h for block in blocks], dim=1)
    checkpoint.close()


@pytest.mark.slow
def test_damped_by_the_rule_a_real_experts_rows_lose_less_on_tokens_not_seen(demo: tuple[Tensor, Tensor]) -> None:
    for num_tokens, which in [(32, 0), (128, 1), (512, 0)]:
        with case(num_tokens, which):
            values = demo[which]
            seen = torch.arange(num_tokens) * len(values) // num_tokens  # evenly spread
            unseen = torch.ones(len(values), dtype=torch.bool).index_fill_(0, seen, False)
            hessian, weights = weighted_hessian(values[seen], torch.ones(num_tokens)), torch.ones(num_tokens)
            other = weighted_hessian(values[unseen], torch.ones(int(unseen.sum()))).to(torch.float64)

            def lost(share: float, hessian: Tensor = hessian, other: Tensor = other) -> float:
                factor = gptq_factor(hessian, share).factor.to(torch.float64)
                # Misses of aims are independent and of one size, errors are misses F^-1: the trace of F^-1 H F^-T.
                errors = torch.linalg.solve_triangular(factor, torch.eye(len(factor), dtype=torch.float64), upper=True)
                return float((errors @ other * errors).sum() / other.trace())

            by_rule = lost(damping(weights, values.shape[1]))
            assert by_rule < lost(LEAST_DAMPING)
            assert by_rule < 1, "more than is lost without corrections"


def test_factor_and_importance_make_up_the_damped_hessian() -> None:
    for share, num_columns in product([LEAST_DAMPING, 0.3], [1, 2, M, 65]):
        with case(share, num_columns):
            hessian = weighted_hessian(correlated_values(300, num_columns), random_weights(300))
            found, expected = gptq_factor(hessian, share), damped(hessian, share)
            factor = found.factor.to(torch.float64)
            assert found.factor.dtype == found.importance.dtype == torch.float32
            assert torch.equal(factor, factor.triu()) and (factor.diagonal() == 1).all()
            assert (found.importance > 0).all()
            errors = (factor * found.importance @ factor.T - expected).abs()
            sizes = expected.diagonal().sqrt()
            assert (errors <= 1e-6 * sizes[:, None] * sizes).all()  # the factor is rounded to float32


def test_the_aim_of_a_column_is_the_exact_best_given_the_columns_before() -> None:
    for num_fixed in range(1, M):
        with case(num_fixed):
            hessian = weighted_hessian(correlated_values(300, M), random_weights(300))
            found, exact = gptq_factor(hessian), damped(hessian)
            weights = torch.randn(M, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            rounded = weights.clone()
            rounded[:num_fixed] = weights[:num_fixed].round()  # whatever they were fixed to
            expected = weights[num_fixed:] - best_columns_left(weights[:num_fixed] - rounded[:num_fixed], exact)
            for column in range(num_fixed, M):  # each set to what it aims at, all that are left are the best there are
                errors = weights[:column] - rounded[:column]
                rounded[column] = weights[column] + errors @ found.factor[:column, column].to(torch.float64)
            torch.testing.assert_close(rounded[num_fixed:], expected, rtol=1e-5, atol=1e-5)


def test_what_is_lost_is_the_importance_of_every_columns_miss_of_its_aim() -> None:
    hessian = weighted_hessian(correlated_values(300, M), random_weights(300))
    found, exact = gptq_factor(hessian), damped(hessian)
    factor, importance = found.factor.to(torch.float64), found.importance.to(torch.float64)
    errors = torch.randn(M, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    misses = errors @ factor  # what columns aim at, less what they were rounded to
    assert float((importance * misses.square()).sum()) == pytest.approx(loss(errors, exact), rel=1e-5)


def test_importance_is_what_is_lost_when_all_later_columns_make_up_for_an_error() -> None:
    for column in range(M):
        with case(column):
            hessian = weighted_hessian(correlated_values(300, M), random_weights(300))
            exact = damped(hessian)
            errors = torch.zeros(M, dtype=torch.float64)
            errors[column] = 1
            errors[column + 1 :] = best_columns_left(errors[: column + 1], exact)
            assert float(gptq_factor(hessian).importance[column]) == pytest.approx(loss(errors, exact), rel=1e-5)


def test_gptq_loses_the_importances_where_plain_rounding_loses_the_diagonal() -> None:
    """An error of rounding to whole numbers has 1/12 for its mean square, and those of different columns are free."""
    hessian = weighted_hessian(correlated_values(16, 64), random_weights(16))  # of rank 16
    found, exact = gptq_factor(hessian), damped(hessian)
    weights = torch.randn(2000, 64, generator=torch.Generator().manual_seed(3)) * 5
    rounded = torch.zeros_like(weights)
    for column in range(64):
        errors = weights[:, :column] - rounded[:, :column]
        rounded[:, column] = (weights[:, column] + errors @ found.factor[:column, column]).round()
    plain, fed = (
        float(((weights - held).to(torch.float64) @ exact * (weights - held)).sum(dim=1).mean())
        for held in (weights.round(), rounded)
    )
    assert plain == pytest.approx(float(exact.trace()) / 12, rel=0.1)  # 2,000 rows
    assert fed == pytest.approx(float(found.importance.sum()) / 12, rel=0.1)
    assert fed < 0.5 * plain


def test_columns_that_are_not_correlated_do_not_correct_each_other() -> None:
    sizes = torch.logspace(-3, 3, M)
    found = gptq_factor(torch.diag(sizes))
    assert torch.equal(found.factor, torch.eye(M))
    torch.testing.assert_close(found.importance, sizes + LEAST_DAMPING * sizes.mean())


def test_columns_that_were_always_zero_neither_give_nor_take_corrections() -> None:
    values = correlated_values(300, M)
    values[:, [0, 5, M - 1]] = 0
    hessian = weighted_hessian(values, random_weights(300))
    found = gptq_factor(hessian)
    for column in (0, 5, M - 1):
        assert torch.equal(found.factor[column], torch.eye(M)[column])
        assert torch.equal(found.factor[:, column], torch.eye(M)[column])
        assert float(found.importance[column]) == pytest.approx(LEAST_DAMPING * float(hessian.diagonal().mean()))
    assert found.factor[1, 2] != 0


def test_a_hessian_of_low_rank_has_a_factor() -> None:
    for values in [
        correlated_values(1, 400),
        torch.ones(1, 400),
        torch.full((300, 400), 1 / 3),
        correlated_values(1, 400).repeat(300, 1),
        torch.cat((torch.full((300, 1), 1e4), correlated_values(300, 399) * 1e-4), dim=1),
        torch.eye(400)[:1],
        torch.ones(2, 400) * 1e-12,
        torch.ones(2, 400) * 1e12,
    ]:
        with case(values):
            hessian = weighted_hessian(values, random_weights(len(values)) + 0.1)
            found, expected = gptq_factor(hessian), damped(hessian)
            factor = found.factor.to(torch.float64)
            assert factor.isfinite().all() and (found.importance > 0).all() and found.importance.isfinite().all()
            product = factor * found.importance @ factor.T
            assert (product - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_hessian_of_zeros_gives_no_corrections() -> None:
    found = gptq_factor(torch.zeros(M, M))
    assert torch.equal(found.factor, torch.eye(M)) and torch.equal(found.importance, torch.ones(M))


def test_only_the_upper_triangle_of_a_hessian_is_read() -> None:
    hessian = weighted_hessian(correlated_values(300, M), random_weights(300))
    other = hessian.triu() + torch.ones(M, M).tril(-1)
    assert torch.equal(gptq_factor(other).factor, gptq_factor(hessian).factor)


@pytest.mark.parametrize("num_tokens", [3 * M, M // 2])
def test_a_fit_is_the_damped_least_squares_solution_with_few_tokens_and_many(num_tokens: int) -> None:
    x, s = correlated_values(num_tokens, M).double(), random_weights(num_tokens).double()
    missing, share = correlated_values(num_tokens, 5, seed=1).double(), 0.3
    s /= s.sum()
    hessian = (x * s[:, None]).T @ x
    ridge = share * hessian.diagonal().mean()
    # As plain least squares with a row more for each column, which wants it to be zero.
    roots = torch.cat((s.sqrt()[:, None] * x, ridge.sqrt() * torch.eye(M, dtype=torch.float64)))
    wanted = torch.cat((s.sqrt()[:, None] * missing, torch.zeros(M, 5, dtype=torch.float64)))
    expected = torch.linalg.lstsq(roots, wanted).solution
    found = DampedFit(x.float(), random_weights(num_tokens), share).addition(missing.float())
    torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=2e-3 * float(expected.abs().max()))


def test_a_fit_without_tokens_that_count_adds_nothing() -> None:
    for num_tokens in (3 * M, M // 2):
        for x, s in (
            (correlated_values(num_tokens, M), torch.zeros(num_tokens)),
            (torch.zeros(num_tokens, M), torch.ones(num_tokens)),
        ):
            found = DampedFit(x, s, 0.1).addition(correlated_values(num_tokens, 5))
            assert not found.any()
