"""The search for trellis codes: against all codes, against itself with other rows, and against the extension."""

import itertools
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from support.cases import case
from torch import Tensor

from moe_pack.calib.quantize import RowQuantizer, UnrepresentableError
from moe_pack.calib.quantize.trellis import TrellisCodes, plain_search, search, trellis_tables, unbiasing_gain
from moe_pack.formats import ROW_GROUP, PartFormat, PlanError, Quantizer, part_format, trellis_format
from moe_pack.formats.pack.codecs import (
    TRELLIS_UNITS,
    Trellis,
    decode_part,
    trellis_columns,
    trellis_hashes,
    trellis_levels,
)
from moe_pack.formats.pack.plans import QUANTIZERS, TRELLIS_WIDTHS
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


FORMATS = [trellis_format(4, ROW_GROUP), trellis_format(4, 64, 8), trellis_format(5, 16, 16), trellis_format(6, 128, 8)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def stored(part: PartFormat, weights: Tensor, quantizer: Quantizer = "nearest") -> Tensor:
    """The weights after a way through bytes."""
    rows = RowQuantizer(part, weights.shape[1], quantizer).encode(weights)
    assert rows.shape == (len(weights), part.part_bytes(weights.shape[1]))
    return decode_part(part, weights.shape[1], rows)


def plain_scales(part: PartFormat, weights: Tensor) -> Tensor:
    """Scales of each group's own root mean square: [rows, groups]."""
    groups = weights.view(len(weights), part.num_groups(weights.shape[1]), -1)
    return groups.square().mean(dim=2).sqrt() * TRELLIS_UNITS[part.width]


def error(weights: Tensor, decoded: Tensor) -> float:
    return float((weights.double() - decoded.double()).square().sum() / weights.double().square().sum())


@pytest.mark.parametrize(("width", "share"), [(2, 0.5), (3, 0.65), (4, 0.7)])
def test_a_trellis_of_row_scales_loses_less_than_codes_of_groups(width: int, share: float) -> None:
    weights = normal(32, 256)
    plain = stored(part_format(width, 64), weights)  # half a bit more, for scales and zeros
    assert error(weights, stored(trellis_format(2 * width, ROW_GROUP), weights)) < share * error(weights, plain)


def test_rows_are_stretched_until_they_are_as_long_as_they_were() -> None:
    for width, scale_bits in product(TRELLIS_WIDTHS, [8, 16]):
        with case(width, scale_bits):
            weights = normal(16, 256, seed=width)
            gain = unbiasing_gain(weights, stored(trellis_format(width, 64, scale_bits), weights))
            # Scales are within 2^-11 of what they should be as float16; as bytes within half a step of some 200.
            assert (gain - 1).abs().max() < (2.0**-11 if scale_bits == 16 else 0.0025)


def test_a_stretched_row_errs_a_little_more_than_the_nearest() -> None:
    part, weights = trellis_format(4, ROW_GROUP), normal(16, 256)
    scales = plain_scales(part, weights).half().float().expand_as(weights)
    columns = trellis_columns(256).flatten()
    found = search(weights[:, columns], scales[:, columns], torch.ones(256), 4)
    nearest = error(weights[:, columns], scales * found.values)
    assert nearest < error(weights, stored(part, weights)) < 1.1 * nearest


@pytest.mark.parametrize("part", [part for part in FORMATS if part.group != 16])
def test_rows_with_outliers_have_larger_scales(part: PartFormat) -> None:
    weights = normal(16, 256)
    weights[::2, ::37] *= 8
    codec = Trellis(part, 256)
    least = plain_scales(part, weights)
    scales = codec.load_scales(RowQuantizer(part, 256, "nearest").encode(weights)[:, codec.code_bytes :])
    grown = (scales / least).amax(dim=1)
    assert grown[::2].mean() > 1.1 * grown[1::2].mean()


def test_zeros_are_read_as_zeros() -> None:
    for part in FORMATS:
        with case(part):
            weights = normal(6, 128)
            weights[2] = 0
            weights[4, :64] = 0
            decoded = stored(part, weights)
            assert torch.equal(decoded[2], torch.zeros(128))
            assert error(weights, decoded) < 0.35
            if part.num_groups(128) > 1:
                assert torch.equal(decoded[4, :64], torch.zeros(64))


def test_errors_do_not_depend_on_how_large_weights_are() -> None:
    for part, size in product(FORMATS, [1e-3, 1.0, 1e4]):
        with case(part, size):
            weights = normal(16, 128)
            small = error(weights, stored(part, weights * size) / size)
            # Scales below float16's normal numbers are multiples of 2^-24: these weights' of 13 of them.
            assert small < (1.02 if size > 1e-3 else 1.3) * error(weights, stored(part, weights))


def test_rows_do_not_depend_on_each_other() -> None:
    part, weights = trellis_format(7, 32, 8), normal(70, 64)
    quantizer = RowQuantizer(part, 64, "nearest")
    assert torch.equal(quantizer.encode(weights)[66:69], quantizer.encode(weights[66:69]))


def test_a_constant_row_and_one_neuron_are_held() -> None:
    part = trellis_format(6, ROW_GROUP)
    assert error(torch.ones(1, 64), stored(part, torch.ones(1, 64))) < 0.05
    lone = torch.zeros(1, 64)
    lone[0, 40] = 3.0
    assert float(stored(part, lone)[0, 40]) > 2.0


@pytest.mark.parametrize("scale_bits", [8, 16])
def test_weights_beyond_float16_scales_are_refused(scale_bits: int) -> None:
    part, weights = trellis_format(4, 64, scale_bits), normal(140, 64) / 0.02
    weights[131] *= 1e5  # a deviation of 1e5 is a scale of 3839
    assert stored(part, weights).isfinite().all()
    weights[131] *= 1e4
    with pytest.raises(
        UnrepresentableError, match="row 131 has weights too large for float16 scales; store it in 16 bits"
    ):
        stored(part, weights)


@pytest.mark.parametrize("quantizer", [each for each in QUANTIZERS if each != "nearest"])
def test_other_quantizers_are_refused(quantizer: Quantizer) -> None:
    expected = f"--quantizer {quantizer}: a trellis has no zeros, which this quantizer finds; use nearest"
    with pytest.raises(PlanError, match=expected):
        RowQuantizer(trellis_format(4, 64), 128, quantizer)
