"""The search for trellis codes: against all paths, against itself with other pieces, and against the extension."""

import itertools
from itertools import product

import pytest
import torch
from cases import case
from torch import Tensor

from moe_pack.calib.quantize.trellis import TrellisCodes, plain_search, search
from moe_pack.formats import ROW_GROUP, trellis_format
from moe_pack.formats.codecs import TRELLIS_UNITS, Trellis, decode_part, trellis_steps, trellis_values
from moe_pack.formats.plan import TRELLIS_WIDTHS
from moe_pack.runtime.cpu import TrellisRows, is_available, search_trellis
from moe_pack.runtime.cpu.kernels import InstructionSet

# Mean squared error of rows of 256 from a normal distribution of unit variance, by width, and 2% beyond what was
# measured when the tables were made: how many rows there are here moves it by 1%.
GAUSS = {3: 0.1564, 4: 0.0802, 5: 0.0428, 6: 0.0219, 7: 0.0120, 8: 0.0062}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def correlated(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """The Hessian of columns that hang together, float64 [n, n], with their factor and importance."""
    values = random(4 * n, n, seed=seed).double()
    values[:, 1:] += 0.8 * values[:, :-1]
    hessian = values.T @ values / len(values)
    root = torch.linalg.cholesky(hessian.flip(0, 1)).flip(0, 1)
    diagonal = root.diagonal().clone()
    return hessian, (root / diagonal).float(), diagonal.square().float()


def cost_of(found: TrellisCodes, targets: Tensor, scales: Tensor, importance: Tensor) -> Tensor:
    """The weighted squared errors of rows, float64 [R]."""
    kept = found.values.shape[1]
    errors = targets[:, :kept].double() - scales[:, :kept].double() * found.values.double()
    return (importance[..., :kept].double() * errors.square()).sum(dim=1)


def best_of_all(targets: Tensor, scales: Tensor, importance: Tensor, width: int, start: int) -> float:
    """The least cost of any codes of one row."""
    best, tables = float("inf"), trellis_values(width).double().tolist()
    steps = [trellis_steps(width)[j % 2] for j in range(len(targets))]
    columns = list(zip(targets.tolist(), scales.tolist(), importance.tolist(), strict=True))
    for codes in itertools.product(*(range(1 << k) for k in steps)):
        window, cost = start, 0.0
        for j, (k, code) in enumerate(zip(steps, codes, strict=True)):
            window = window >> k | code << (7 - k)
            target, scale, weight = columns[j]
            cost += weight * (target - scale * tables[j % 2][window]) ** 2
        best = min(best, cost)
    return best


def test_no_codes_of_a_short_row_cost_less() -> None:
    for width in TRELLIS_WIDTHS:
        with case(width):
            n = {3: 8, 4: 6, 5: 5, 6: 4, 7: 4, 8: 3}[width]
            targets, scales = random(4, n, seed=width), TRELLIS_UNITS[width] * (1 + uniform(4, n))
            importance, starts = uniform(4, n), torch.tensor([0, 1, 85, 127], dtype=torch.uint8)
            found = search(targets, targets, scales, importance, width, starts=starts)
            best = [
                best_of_all(*(each[row].double() for each in (targets, scales, importance)), width, int(starts[row]))
                for row in range(4)
            ]
            # Costs are float32 sums of up to eight terms.
            assert cost_of(found, targets, scales, importance).tolist() == pytest.approx(best, rel=1e-5)


def test_a_reader_of_the_codes_finds_the_values() -> None:
    for width in TRELLIS_WIDTHS:
        with case(width):
            weights = random(5, 64, seed=width)
            scales = torch.full((5, 64), float(torch.tensor(TRELLIS_UNITS[width]).half()))
            found = search(weights, weights, scales, torch.ones(64), width)
            codec = Trellis(trellis_format(width, ROW_GROUP), 64)
            rows = codec.encode(found.codes, codec.store_scales(scales[:, :1]))
            assert torch.equal(decode_part(codec.part, 64, rows), found.values * scales)


def test_errors_of_normal_rows_are_those_the_tables_were_made_for() -> None:
    for width in TRELLIS_WIDTHS:
        with case(width):
            weights = random(24, 256, seed=width)
            found = search(weights, weights, torch.full((24, 256), TRELLIS_UNITS[width]), torch.ones(256), width)
            errors = (found.values * TRELLIS_UNITS[width] - weights).square().mean() / weights.square().mean()
            assert float(errors) < 1.02 * GAUSS[width]


def test_rows_alone_get_the_codes_they_get_together() -> None:
    for with_factor, width in product([False, True], [3, 4, 7]):
        with case(with_factor, width):
            weights, targets = random(130, 76), random(130, 76, seed=1)
            scales, importance = uniform(130, 76) * 0.05, uniform(130, 76)
            factor = correlated(76)[1] if with_factor else None
            together = search(weights, targets, scales, importance, width, factor=factor, num_kept=74)
            for row in (0, 77, 129):
                one = (each[row : row + 1] for each in (weights, targets, scales, importance))
                alone = search(*one, width, factor=factor, num_kept=74)
                assert torch.equal(alone.codes[0], together.codes[row])
                assert torch.equal(alone.values[0], together.values[row])
                assert alone.windows[0] == together.windows[row]


def test_corrections_lose_less_than_the_nearest_path() -> None:
    hessian, factor, importance = correlated(128)
    for width in TRELLIS_WIDTHS:
        with case(width):
            weights, scales = random(16, 128, seed=width), torch.full((16, 128), TRELLIS_UNITS[width])
            losses = []
            for correction in (None, factor):
                found = search(weights, weights, scales, importance, width, factor=correction)
                errors = (weights - scales * found.values).double()
                losses.append(float(((errors @ hessian) * errors).sum()))
            assert losses[1] < 0.8 * losses[0]


def test_a_factor_without_corrections_changes_nothing() -> None:
    weights, importance = random(8, 128), 0.5 + uniform(128)
    scales = torch.full((8, 128), TRELLIS_UNITS[4])
    plain = search(weights, weights, scales, importance, 4)
    fed = search(weights, weights, scales, importance, 4, factor=torch.eye(128))
    # Paths that disagree with the best one 64 columns back end: 0.3% was measured, with 256 columns.
    costs = [float(cost_of(found, weights, scales, importance).sum()) for found in (plain, fed)]
    assert costs[0] <= costs[1] < 1.01 * costs[0]
    assert float((plain.codes == fed.codes).double().mean()) > 0.9


def test_columns_in_pieces_with_states_carried_on_are_read_as_one_row() -> None:
    weights, scales = random(6, 64), torch.full((6, 64), TRELLIS_UNITS[5])
    first = search(weights[:, :40], weights[:, :40], scales[:, :40], torch.ones(40), 5, num_kept=32)
    rest = search(weights[:, 32:], weights[:, 32:], scales[:, 32:], torch.ones(32), 5, starts=first.windows)
    codec = Trellis(trellis_format(5, ROW_GROUP), 64)
    rows = codec.encode(torch.cat((first.codes, rest.codes), 1), codec.store_scales(torch.ones(6, 1)))
    assert torch.equal(decode_part(codec.part, 64, rows), torch.cat((first.values, rest.values), 1))


def test_columns_looked_ahead_at_are_weighed_and_not_returned() -> None:
    weights, scales = random(6, 64), torch.full((6, 64), TRELLIS_UNITS[4])
    whole = search(weights, weights, scales, torch.ones(64), 4)
    part = search(weights, weights, scales, torch.ones(64), 4, num_kept=31)
    assert torch.equal(part.codes, whole.codes[:, :31])
    assert search(weights, weights, scales, torch.ones(64), 4, num_kept=0).windows.tolist() == [0] * 6


@pytest.mark.parametrize("factor", [None, torch.ones(48, 48).triu()])
def test_groups_of_zero_scale_have_codes(factor: Tensor | None) -> None:
    weights = random(3, 48)
    scales = torch.full((3, 48), TRELLIS_UNITS[4])
    weights[:, 16:32] = 0
    scales[:, 16:32] = 0
    weights[2], scales[2] = 0, 0
    found = search(weights, weights, scales, torch.ones(48), 4, factor=factor)
    assert found.codes.max() < 4 and found.values.isfinite().all()
    assert torch.equal(found.values[2] * scales[2], torch.zeros(48))


def test_of_equal_paths_the_lowest_states_win() -> None:
    zeros = torch.zeros(2, 40)
    found = search(zeros, zeros, zeros, torch.ones(40), 6)
    assert found.codes.tolist() == [[0] * 40] * 2


def test_no_rows_have_no_codes() -> None:
    none = torch.zeros(0, 64)
    assert search(none, none, none, torch.ones(64), 4).codes.shape == (0, 64)


def hard_rows(width: int, n: int) -> TrellisRows:
    """Rows with every difficulty: other targets than weights, groups without scale, constants, outliers, any start."""
    weights, targets = random(9, n, seed=width), random(9, n, seed=width + 1)
    scales, importance = TRELLIS_UNITS[width] * (0.5 + uniform(9, n)), uniform(9, n)
    scales[1, :16], scales[2], importance[3, ::3] = 0, 0, 0
    weights[4], targets[4], weights[5], targets[6] = 0, 0, 1, 1000 * targets[6]
    starts = torch.tensor([0, 1, 2, 64, 127, 3, 0, 99, 0], dtype=torch.uint8)
    return TrellisRows(weights, targets, scales, importance, 0.3 * random(n, n, seed=5), starts)


LIMITS: tuple[InstructionSet, ...] = ("portable", "avx2", "avx512")


@pytest.mark.skipif(not is_available(), reason="the extension was not built")
@pytest.mark.parametrize("with_factor", [False, True])
def test_the_extension_finds_what_torch_finds(with_factor: bool) -> None:
    for width, n in product(TRELLIS_WIDTHS, (1, 2, 63, 64, 65, 136, 201)):
        rows = hard_rows(width, n)
        rows = rows if with_factor else rows._replace(factor=None)
        if n == 65:
            rows = rows._replace(importance=rows.importance[0])
        wanted = plain_search(*rows[:4], width, rows.factor, rows.starts, n - n // 3)
        for limit in LIMITS:
            with case(width, n, limit):
                codes, values, windows = search_trellis(rows, width, trellis_values(width), n - n // 3, limit)
                assert torch.equal(codes, wanted.codes)
                assert torch.equal(values, wanted.values)
                assert torch.equal(windows, wanted.windows)
