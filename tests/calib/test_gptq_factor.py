"""Hessians against float64, the GPTQ factor against the exact best of the columns left, damping on tokens not seen."""

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
from moe_pack.calib.quantize.gptq import (
    LEAST_DAMPING,
    MOST_DAMPING,
    USUAL_DAMPING,
    DampedFit,
    damping,
    gptq_factor,
    weighted_hessian,
)
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.runtime import Text
from moe_pack.runtime.model import CheckpointWeights, activations

M = 12


def random_values(num_tokens: int, num_columns: int, seed: int = 0) -> Tensor:
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


# --- the Hessian


def test_the_hessian_is_the_weighted_mean_of_the_products_of_columns() -> None:
    for num_tokens in [1, 5, 256, 257, 700]:
        with case(num_tokens):
            values, weights = random_values(num_tokens, M), random_weights(num_tokens)
            exact, shares = values.to(torch.float64), weights.to(torch.float64)
            expected = torch.einsum("n,ni,nj->ij", shares, exact, exact) / shares.sum()
            found = weighted_hessian(values, weights)
            assert found.dtype == torch.float32
            sizes = expected.diagonal().sqrt()
            assert ((found - expected).abs() <= 1e-6 * sizes[:, None] * sizes).all()  # float32 sums of 700 products


def test_tokens_without_weight_do_not_count() -> None:
    values, weights = random_values(300, M), random_weights(300)
    weights[::3] = 0
    kept = weights > 0
    torch.testing.assert_close(weighted_hessian(values, weights), weighted_hessian(values[kept], weights[kept]))


def test_the_hessian_does_not_depend_on_the_unit_of_weights() -> None:
    values, weights = random_values(40, M), random_weights(40)
    torch.testing.assert_close(weighted_hessian(values, weights * 1e-30), weighted_hessian(values, weights))


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_without_any_weight_the_hessian_is_zero(num_tokens: int) -> None:
    assert torch.equal(weighted_hessian(random_values(num_tokens, M), torch.zeros(num_tokens)), torch.zeros(M, M))


def test_the_hessian_of_some_columns_is_a_block_of_the_whole() -> None:
    values, weights = random_values(300, M), random_weights(300)
    whole = weighted_hessian(values, weights)
    torch.testing.assert_close(weighted_hessian(values[:, 3:8], weights), whole[3:8, 3:8])


# --- damping


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
    """What an expert of the demo model was given, and its `h`, some 1,500 tokens each."""
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


# --- the factor


def test_factor_and_importance_make_up_the_damped_hessian() -> None:
    for share, num_columns in product([LEAST_DAMPING, 0.3], [1, 2, M, 65]):
        with case(share, num_columns):
            hessian = weighted_hessian(random_values(300, num_columns), random_weights(300))
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
            hessian = weighted_hessian(random_values(300, M), random_weights(300))
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
    hessian = weighted_hessian(random_values(300, M), random_weights(300))
    found, exact = gptq_factor(hessian), damped(hessian)
    factor, importance = found.factor.to(torch.float64), found.importance.to(torch.float64)
    errors = torch.randn(M, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    misses = errors @ factor  # what columns aim at, less what they were rounded to
    assert float((importance * misses.square()).sum()) == pytest.approx(loss(errors, exact), rel=1e-5)


def test_importance_is_what_is_lost_when_all_later_columns_make_up_for_an_error() -> None:
    for column in range(M):
        with case(column):
            hessian = weighted_hessian(random_values(300, M), random_weights(300))
            exact = damped(hessian)
            errors = torch.zeros(M, dtype=torch.float64)
            errors[column] = 1
            errors[column + 1 :] = best_columns_left(errors[: column + 1], exact)
            assert float(gptq_factor(hessian).importance[column]) == pytest.approx(loss(errors, exact), rel=1e-5)


def test_gptq_loses_the_importances_where_plain_rounding_loses_the_diagonal() -> None:
    """An error of rounding to whole numbers has 1/12 for its mean square, and those of different columns are free."""
    hessian = weighted_hessian(random_values(16, 64), random_weights(16))  # of rank 16
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
    values = random_values(300, M)
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
        random_values(1, 400),
        torch.ones(1, 400),
        torch.full((300, 400), 1 / 3),
        random_values(1, 400).repeat(300, 1),
        torch.cat((torch.full((300, 1), 1e4), random_values(300, 399) * 1e-4), dim=1),
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
    hessian = weighted_hessian(random_values(300, M), random_weights(300))
    other = hessian.triu() + torch.ones(M, M).tril(-1)
    assert torch.equal(gptq_factor(other).factor, gptq_factor(hessian).factor)


# --- the damped fit


@pytest.mark.parametrize("num_tokens", [3 * M, M // 2])
def test_a_fit_is_the_damped_least_squares_solution_with_few_tokens_and_many(num_tokens: int) -> None:
    x, s = random_values(num_tokens, M).double(), random_weights(num_tokens).double()
    missing, share = random_values(num_tokens, 5, seed=1).double(), 0.3
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
            (random_values(num_tokens, M), torch.zeros(num_tokens)),
            (torch.zeros(num_tokens, M), torch.ones(num_tokens)),
        ):
            found = DampedFit(x, s, 0.1).addition(random_values(num_tokens, 5))
            assert not found.any()
