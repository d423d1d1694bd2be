"""The search for trellis codes: against all codes, against itself with other rows, and against the extension."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from support.cases import case
from torch import Tensor

from moe_pack.calib.quantize.trellis import TrellisCodes, plain_search, search, trellis_tables
from moe_pack.formats import ROW_GROUP, trellis_format
from moe_pack.formats.pack.codecs import (
    TRELLIS_UNITS,
    Trellis,
    decode_part,
    trellis_columns,
    trellis_hashes,
    trellis_levels,
)
from moe_pack.formats.pack.plans import TRELLIS_WIDTHS
from moe_pack.runtime import cpu
from moe_pack.runtime.cpu import TrellisRows, is_available, search_trellis
from moe_pack.runtime.cpu.kernels import InstructionSet

# Mean squared error of rows of 256 from a normal distribution of unit variance, by width, with paths to all states, as
# measured when the tables were made. 64 paths cost 1% more, and how many rows there are here moves it by 1%.
GAUSS = {4: 0.0771, 5: 0.0401, 6: 0.0203, 7: 0.0104, 8: 0.0052}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def correlated(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """The Hessian of columns that hang together, float64 [n, n], with their factor and importance."""
    values = random(4 * n, n, seed=seed).double()
    values += 2 * random(4 * n, 1, seed=seed + 1).double()
    hessian = values.T @ values / len(values)
    root = torch.linalg.cholesky(hessian.flip(0, 1)).flip(0, 1)
    diagonal = root.diagonal().clone()
    return hessian, (root / diagonal).float(), diagonal.square().float()


def best_of_all(weights: Tensor, scales: Tensor, importance: Tensor, width: int, factor: Tensor) -> float:
    """The least cost of any nibbles of one row of float64 columns, with the levels nearest to their targets."""
    best, hashes, n = float("inf"), trellis_hashes().tolist(), len(weights)
    levels = [table.view(-1, 16).T.double() for table in trellis_levels(width)]
    for nibbles in itertools.product(range(16), repeat=n // 2):
        window, cost, errors = 0, 0.0, torch.zeros(n, dtype=torch.float64)
        for step, nibble in enumerate(nibbles):
            window = nibble << 8 | window >> 4
            for half, level_set in enumerate((hashes[window] & 15, hashes[window] >> 4)):
                j = 2 * step + half
                target = weights[j] + errors[:j] @ factor[:j, j]
                values = scales[j] * levels[half][level_set]
                value = values[(target - values).abs().argmin()]
                errors[j] = weights[j] - value
                cost += float(importance[j] * (target - value).square())
        best = min(best, cost)
    return best


def corrected_cost_of(
    found: TrellisCodes, weights: Tensor, scales: Tensor, importance: Tensor, factor: Tensor
) -> Tensor:
    """The cost of codes whose columns correct the errors of earlier ones, float64 [R]."""
    errors = weights.double() - scales.double() * found.values.double()
    ones = torch.eye(len(factor)) + factor.triu(1)
    return (importance.double() * (errors @ ones.double()).square()).sum(dim=1)


@pytest.mark.slow
def test_no_codes_of_two_steps_cost_less() -> None:
    for width in TRELLIS_WIDTHS:
        with case(width):
            weights, scales = random(4, 4, seed=width), TRELLIS_UNITS[width] * (1 + uniform(4, 4))
            importance, factor = uniform(4), random(4, 4, seed=width + 1)
            for factors in ([], [factor]):
                of_columns = factors[0].triu(1) if factors else torch.zeros(4, 4)
                found = search(weights, scales, importance, width, factors)
                exact = (importance.double(), width, of_columns.double())
                best = [best_of_all(weights[i].double(), scales[i].double(), *exact) for i in range(4)]
                # Costs are float32 sums of four terms.
                costs = corrected_cost_of(found, weights, scales, importance, of_columns)
                assert costs.tolist() == pytest.approx(best, rel=1e-4)


@pytest.mark.slow
def test_hardly_any_codes_of_three_steps_cost_less() -> None:
    for factors in ([], [random(6, 6, seed=1) / 2]):
        with case(len(factors)):
            weights, scales, importance = random(1, 6), TRELLIS_UNITS[4] * (1 + uniform(1, 6)), torch.ones(6)
            of_columns = factors[0].triu(1) if factors else torch.zeros(6, 6)
            found = search(weights, scales, importance, 4, factors)
            exact = (importance.double(), 4, of_columns.double())
            best = best_of_all(weights[0].double(), scales[0].double(), *exact)
            # After two steps, an eighth or a quarter of 256 paths go on.
            assert float(corrected_cost_of(found, weights, scales, importance, of_columns).sum()) < 1.1 * best


def test_a_reader_of_the_codes_finds_the_values() -> None:
    for width in TRELLIS_WIDTHS:
        with case(width):
            weights = random(5, 256, seed=width)
            scales = torch.full((5, 256), float(torch.tensor(TRELLIS_UNITS[width]).half()))
            found = search(weights, scales, torch.ones(256), width)
            codec = Trellis(trellis_format(width, ROW_GROUP), 256)
            rows = codec.encode(found.codes, codec.store_scales(scales[:, :1]))
            read = decode_part(codec.part, 256, rows)[:, trellis_columns(256).flatten()]
            assert torch.equal(read, found.values * scales)


def test_errors_of_normal_rows_are_those_the_tables_were_made_for() -> None:
    for width in TRELLIS_WIDTHS:
        with case(width):
            weights = random(24, 256, seed=width)
            found = search(weights, torch.full((24, 256), TRELLIS_UNITS[width]), torch.ones(256), width)
            errors = (found.values * TRELLIS_UNITS[width] - weights).square().mean() / weights.square().mean()
            assert float(errors) < 1.03 * GAUSS[width]


def test_rows_alone_get_the_codes_they_get_together() -> None:
    for num_factors, width in itertools.product([0, 1, 2], [4, 7]):
        with case(num_factors, width):
            n = 276 if num_factors == 0 else 128 * num_factors
            weights, scales, factors = random(130, n), uniform(130, n) * 0.05, [correlated(128)[1]] * num_factors
            together = search(weights, scales, torch.ones(n), width, factors)
            for row in (0, 77, 129):
                alone = search(weights[row : row + 1], scales[row : row + 1], torch.ones(n), width, factors)
                assert torch.equal(alone.codes[0], together.codes[row])
                assert torch.equal(alone.values[0], together.values[row])


def test_rows_of_long_runs_alone_differ_by_the_rounding_of_products() -> None:
    weights, scales, factor = random(130, 276), uniform(130, 276) * 0.05, correlated(276)[1]
    together = search(weights, scales, torch.ones(276), 4, [factor])
    for row in (0, 77, 129):
        alone = search(weights[row : row + 1], scales[row : row + 1], torch.ones(276), 4, [factor])
        # Products of one row and of many are rounded apart: a tie may go either way.
        assert (alone.codes[0] == together.codes[row]).double().mean() > 0.9


def loss_of(found: TrellisCodes, weights: Tensor, scales: Tensor, hessian: Tensor) -> float:
    """The squared error of the products of rows: the trace of `E H E^T`."""
    errors = (weights - scales * found.values).double()
    return float(((errors @ hessian) * errors).sum())


def test_corrections_lose_less_than_the_nearest_path() -> None:
    hessian, factor, importance = correlated(256)
    for width in TRELLIS_WIDTHS:
        with case(width):
            weights, scales = random(16, 256, seed=width), torch.full((16, 256), TRELLIS_UNITS[width])
            plain, fed = (search(weights, scales, importance, width, factors) for factors in ([], [factor]))
            assert loss_of(fed, weights, scales, hessian) < 0.75 * loss_of(plain, weights, scales, hessian)


def test_one_long_run_loses_less_than_two_short_ones() -> None:
    hessian, factor, importance = correlated(256)
    weights, scales = random(16, 256), torch.full((16, 256), TRELLIS_UNITS[4])
    halves = [factor[:128, :128], factor[128:, 128:]]
    parted, whole = (search(weights, scales, importance, 4, factors) for factors in (halves, [factor]))
    assert loss_of(whole, weights, scales, hessian) < 0.9 * loss_of(parted, weights, scales, hessian)


def test_a_factor_without_corrections_changes_little() -> None:
    weights, importance = random(8, 256), 0.5 + uniform(256)
    scales = torch.full((8, 256), TRELLIS_UNITS[4])
    costs = []
    for factors in ([], [torch.eye(256)]):
        found = search(weights, scales, importance, 4, factors)
        costs.append(float(corrected_cost_of(found, weights, scales, importance, torch.zeros(256, 256)).sum()))
    # Half as many paths go on, and blocks look ahead at few steps.
    assert costs[0] <= costs[1] < 1.04 * costs[0]


def test_runs_do_not_correct_each_other() -> None:
    weights, scales = random(64, 192), torch.full((64, 192), TRELLIS_UNITS[4])
    factors, ones = [correlated(64)[1], correlated(128, seed=2)[1]], torch.ones(192)
    together = search(weights, scales, ones, 4, factors)
    alone = search(weights[:, :64], scales[:, :64], ones[:64], 4, factors[:1])
    assert torch.equal(together.codes[:, :32], alone.codes)
    # The second run takes no errors of the first, only its last state: it costs as much as if it were alone.
    second = search(weights[:, 64:], scales[:, 64:], ones[64:], 4, factors[1:])
    both = corrected_cost_of(together, weights, scales, ones, torch.block_diag(*factors))
    apart = corrected_cost_of(alone, weights[:, :64], scales[:, :64], ones[:64], factors[0])
    apart += corrected_cost_of(second, weights[:, 64:], scales[:, 64:], ones[64:], factors[1])
    assert float(both.sum()) == pytest.approx(float(apart.sum()), rel=0.03)


@pytest.mark.parametrize("factors", [[], [torch.ones(64, 64).triu()]])
def test_groups_of_zero_scale_have_codes(factors: list[Tensor]) -> None:
    weights = random(3, 64)
    scales = torch.full((3, 64), TRELLIS_UNITS[4])
    weights[:, 16:32] = 0
    scales[:, 16:32] = 0
    weights[2], scales[2] = 0, 0
    found = search(weights, scales, torch.ones(64), 4, factors)
    assert found.codes.max() < 16 and found.values.isfinite().all()
    assert torch.equal(found.values[2] * scales[2], torch.zeros(64))


def test_of_equal_paths_the_lowest_states_win() -> None:
    zeros = torch.zeros(2, 40)
    found = search(zeros, zeros, torch.ones(40), 6)
    assert (found.codes & 15).tolist() == [[0] * 20] * 2


def test_no_rows_have_no_codes() -> None:
    none = torch.zeros(0, 64)
    assert search(none, none, torch.ones(64), 4).codes.shape == (0, 32)


def hard_rows(width: int, num_steps: int) -> TrellisRows:
    """Rows with every difficulty: other targets than weights, groups without scale, constants, outliers, any start."""
    n = 2 * num_steps
    weights, targets = random(9, n, seed=width), random(9, n, seed=width + 1)
    scales, importance = TRELLIS_UNITS[width] * (0.5 + uniform(9, n)), uniform(n)
    scales[1, :16], scales[2], importance[::3] = 0, 0, 0
    weights[4], targets[4], weights[5], targets[6] = 0, 0, 1, 1000 * targets[6]
    starts = torch.tensor([0, 1, 16, 64, 255, 3, 0, 99, 240], dtype=torch.uint8)
    return TrellisRows(weights, targets, scales, importance, 0.3 * random(n, n, seed=5), starts)


LIMITS: tuple[InstructionSet, ...] = ("portable", "avx2", "avx512")


@pytest.mark.skipif(not is_available(), reason="the extension was not built")
@pytest.mark.parametrize("with_factor", [False, True])
@pytest.mark.parametrize("widths", [(4,), pytest.param(TRELLIS_WIDTHS[1:], marks=pytest.mark.slow)], ids=str)
def test_the_extension_finds_what_torch_finds(widths: Sequence[int], with_factor: bool) -> None:
    for width, num_steps in itertools.product(widths, (1, 2, 68)):
        rows = hard_rows(width, num_steps)
        rows = rows if with_factor else rows._replace(factor=None)
        num_kept = num_steps - num_steps // 3
        wanted = plain_search(rows, width, num_kept)
        for limit in LIMITS:
            with case(width, num_steps, limit):
                found = search_trellis(rows, trellis_tables(width), num_kept, limit)
                assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))


@pytest.mark.slow
@pytest.mark.skipif(not is_available(), reason="the extension was not built")
def test_of_many_equal_paths_the_extension_keeps_those_of_torch() -> None:
    # Weights on the grid of the levels: thousands of paths have equal costs.
    targets = (3 * random(9, 80)).round()
    rows = TrellisRows(targets, targets, torch.ones(9, 80), torch.ones(80), None, torch.zeros(9, dtype=torch.uint8))
    for width, factor in itertools.product(TRELLIS_WIDTHS, (None, random(80, 80).round())):
        wanted = plain_search(rows._replace(factor=factor), width, 40)
        for limit in LIMITS:
            with case(width, factor is None, limit):
                found = search_trellis(rows._replace(factor=factor), trellis_tables(width), 40, limit)
                assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))


@pytest.mark.skipif(not is_available(), reason="the extension was not built")
def test_rows_get_the_same_codes_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, factor, importance = random(7, 256), correlated(256)[1], correlated(256)[2]
    scales = torch.full((7, 256), TRELLIS_UNITS[5])
    found = search(weights, scales, importance, 5, [factor])
    monkeypatch.setattr(cpu, "is_available", lambda: False)
    plain = search(weights, scales, importance, 5, [factor])
    assert torch.equal(found.codes, plain.codes) and torch.equal(found.values, plain.values)
