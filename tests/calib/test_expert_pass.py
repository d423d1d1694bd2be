"""One expert over its tokens: counts and outputs against brute force, the same whatever the chunks."""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.cases import case as named_case
from support.held_experts import HeldExpert
from torch import Tensor

from moe_pack.calib.forward import (
    HOT_SPARSITIES,
    KINDS,
    NUM_BINS,
    ExpertActivity,
    Histogram,
    measure_expert,
    sample_places,
)
from moe_pack.calib.forward.experts import HOT_SAMPLE_TOKENS
from moe_pack.runtime.model import NeuronBlock, run_expert

RESOLUTION = 1 / 1024  # of a histogram, relative
D = 8
CHUNKS = (1, 7, 4096)
LEVELS = tuple(number / 20 for number in range(21))


@dataclass(frozen=True)
class Case:
    """An expert of `f` neurons, the tokens that go to it, and all tokens' inputs. Small whole numbers, so that every
    product is exact and no count hangs on the order of a sum."""

    num_tokens: int
    f: int
    seed: int = 0

    def draw(self) -> tuple[HeldExpert, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)

        def whole(*shape: int) -> Tensor:
            return torch.randint(-3, 4, shape, generator=generator).to(torch.float32)

        block = NeuronBlock(whole(self.f, D) / 4, whole(self.f, D), whole(self.f, D))
        token_idx = torch.randperm(2 * self.num_tokens + 3, generator=generator)[: self.num_tokens].sort().values
        return HeldExpert(block, step=5), whole(2 * self.num_tokens + 3, D), token_idx


CASES = [Case(1, 7), Case(50, 7), Case(50, 1), Case(HOT_SAMPLE_TOKENS, 12), Case(HOT_SAMPLE_TOKENS + 45, 12)]


def measured(
    expert: HeldExpert, inputs: Tensor, token_idx: Tensor, chunk_tokens: int = 4096
) -> tuple[ExpertActivity, Tensor]:
    """The counts, and the outputs float32 [n, d]; each must be given once."""
    output = torch.full((len(token_idx), D), torch.nan)

    def add(places: Tensor, y: Tensor) -> None:
        assert output[places].isnan().all(), "given twice"
        output[places] = y

    f = len(expert.whole.up)
    return measure_expert(expert, "silu", inputs, token_idx, f, add, chunk_tokens), output


def magnitudes(expert: HeldExpert, x: Tensor) -> Tensor:
    """abs(a) of all neurons at once, float32 [kinds, n, f]."""
    whole = expert.whole
    assert whole.gate is not None
    up, gate = x @ whole.up.T, torch.nn.functional.silu(x @ whole.gate.T)
    return torch.stack((up, gate, gate * up)).abs()


def test_every_activation_is_counted_once() -> None:
    for chunk_tokens, case in product(CHUNKS, CASES):
        with named_case(chunk_tokens, case):
            expert, inputs, token_idx = case.draw()
            found, _ = measured(expert, inputs, token_idx, chunk_tokens)
            expected = magnitudes(expert, inputs[token_idx])
            for kind in range(len(KINDS)):
                assert found.histograms[kind].total() == case.num_tokens * case.f
                ordered = np.sort(expected[kind].numpy(), axis=None)
                places = [max(-(-level * len(ordered) // 20), 1) - 1 for level in range(21)]
                # One rounding of the gate's activation beyond the histogram's bins.
                np.testing.assert_allclose(found.histograms[kind].quantiles(LEVELS), ordered[places], RESOLUTION, 1e-12)


def test_chunks_of_any_size_count_the_same() -> None:
    for case in CASES:
        with named_case(case):
            expert, inputs, token_idx = case.draw()
            first, output = measured(expert, inputs, token_idx, CHUNKS[0])
            for chunk_tokens in CHUNKS[1:]:
                found, other = measured(expert, inputs, token_idx, chunk_tokens)
                assert torch.equal(found.histograms[0].counts, first.histograms[0].counts)
                assert np.array_equal(found.hot_thresholds, first.hot_thresholds)
                assert torch.equal(found.hot[0], first.hot[0])
                # Of the gate's activation and of h, the last bit may differ with the place in a vector register.
                for kind, level in product((1, 2), range(len(HOT_SPARSITIES))):
                    assert (found.hot[kind, level] - first.hot[kind, level]).abs().max() <= 1
                for kind in (1, 2):
                    quantiles = [held.histograms[kind].quantiles(LEVELS) for held in (found, first)]
                    np.testing.assert_allclose(*quantiles, 2 * RESOLUTION, 1e-12)
                for sums in ("input_squares", "hidden_squares"):
                    np.testing.assert_allclose(getattr(found, sums), getattr(first, sums), 1e-6)
                # Sums of f products in blocks, against the largest of them.
                assert (other - output).abs().max() <= 1e-6 * output.abs().max()


def test_outputs_are_those_of_the_reference() -> None:
    for chunk_tokens, case in product(CHUNKS, CASES):
        with named_case(chunk_tokens, case):
            expert, inputs, token_idx = case.draw()
            _, output = measured(expert, inputs, token_idx, chunk_tokens)
            reference = run_expert(inputs[token_idx], expert, "silu", "none", 0.0)
            assert (
                output - reference
            ).abs().max() <= 1e-6 * reference.abs().max()  # sums of f products in another order


def test_thresholds_for_heat_are_quantiles_of_evenly_spread_tokens() -> None:
    for case in CASES:
        with named_case(case):
            expert, inputs, token_idx = case.draw()
            found, _ = measured(expert, inputs, token_idx)
            number = min(case.num_tokens, HOT_SAMPLE_TOKENS)
            sample = [place * case.num_tokens // number for place in range(number)]
            ordered = np.sort(magnitudes(expert, inputs[token_idx[sample]]).flatten(1).numpy(), axis=1)
            for level, tenths in enumerate((5, 7, 8, 9)):
                place = -(-tenths * ordered.shape[1] // 10) - 1
                np.testing.assert_allclose(found.hot_thresholds[:, level], ordered[:, place], RESOLUTION, 1e-12)


def test_heat_counts_the_tokens_on_which_a_neuron_reaches_the_threshold() -> None:
    for case in CASES:
        with named_case(case):
            expert, inputs, token_idx = case.draw()
            found, _ = measured(expert, inputs, token_idx, 7)
            expected = magnitudes(expert, inputs[token_idx])
            for kind, level in product(range(len(KINDS)), range(len(HOT_SPARSITIES))):
                reached = (expected[kind] >= float(found.hot_thresholds[kind, level])).sum(dim=0)
                slack = 0 if kind == 0 else 1  # sums are exact; an activation's last bit is not
                assert (found.hot[kind, level] - reached).abs().max() <= slack


def test_an_expert_without_tokens_counts_nothing() -> None:
    expert, inputs, _ = Case(5, 3).draw()
    found, output = measured(expert, inputs, torch.empty(0, dtype=torch.int64))
    assert [held.total() for held in found.histograms] == [0, 0, 0]
    assert not found.hot.any() and found.hot.shape == (3, 4, 3)
    assert not found.hot_thresholds.any() and output.numel() == 0
    assert not found.input_squares.any() and not found.hidden_squares.any()


def test_inputs_of_zero_give_activations_of_zero_that_all_reach_a_threshold_of_zero() -> None:
    expert, inputs, token_idx = Case(20, 3).draw()
    found, output = measured(expert, torch.zeros_like(inputs), token_idx, 7)
    assert not found.hot_thresholds.any() and not output.any()
    assert (found.hot == 20).all()


def test_an_expert_without_a_gate_has_one_activation_for_all_kinds() -> None:
    expert, inputs, token_idx = Case(50, 7).draw()
    found, _ = measured(replace(expert, whole=replace(expert.whole, gate=None)), inputs, token_idx, 7)
    for other in found.histograms[1:]:
        assert torch.equal(other.counts, found.histograms[0].counts)
    ordered = torch.nn.functional.silu(inputs[token_idx] @ expert.whole.up.T).abs().flatten().sort().values
    assert found.histograms[0].quantiles((1.0,))[0] == pytest.approx(float(ordered[-1]), rel=RESOLUTION)


def test_biases_shift_activations() -> None:
    expert, inputs, token_idx = Case(50, 7).draw()
    bias = torch.arange(7, dtype=torch.float32)
    shifted = HeldExpert(replace(expert.whole, up_bias=bias, gate_bias=-bias), step=5)
    found, _ = measured(shifted, inputs, token_idx, 7)
    ups = (inputs[token_idx] @ expert.whole.up.T + bias).abs()
    assert torch.equal(found.hot[0, 3], (ups >= float(found.hot_thresholds[0, 3])).sum(dim=0))


def test_samples_are_evenly_spread() -> None:
    for num_places, num_wanted, expected in [
        (0, 4, []),
        (1, 4, [0]),
        (4, 4, [0, 1, 2, 3]),
        (5, 4, [0, 1, 2, 3]),
        (10, 4, [0, 2, 5, 7]),
        (9, 1, [0]),
    ]:
        with named_case(num_places, num_wanted, expected):
            assert sample_places(num_places, num_wanted).tolist() == expected


QUANTILES = (0.0, 0.01, 0.07, 0.29, 0.5, 0.57, 0.8, 0.9, 0.99, 0.995, 0.999, 1.0)
DENORMAL_STEP = 2.0**-136  # below 2^-126 floats, and so bins, are evenly spaced
Floats = NDArray[np.float32]


def histogram(values: Floats) -> Histogram:
    found = Histogram()
    found.add(torch.from_numpy(values.copy()))
    return found


def drawn(number: int, sigma: float, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).lognormal(0, sigma, number).astype(np.float32)


def exact(values: Floats, level: float) -> float:
    """The ceil(level n)-th smallest, level taken as the decimal it is written as."""
    return float(np.sort(values, axis=None)[max(math.ceil(Fraction(str(level)) * values.size), 1) - 1])


VALUES = {
    "one value": np.float32([0.7]), "two values": np.float32([3.0, 1e-3]), "a hundred values": drawn(100, 1.0),
    "numbers close together": drawn(999, 1e-4), "numbers of all sizes": drawn(1000, 25.0),
    "a constant": np.full(37, 1.2345, np.float32), "powers of two": 2.0 ** np.arange(-140, 128, dtype=np.float32),
    "zeros": np.zeros(10, np.float32), "half zeros": np.concatenate([np.zeros(500, np.float32), drawn(500, 1.0)]),
    "denormals": (np.arange(300) * 2.0**-139).astype(np.float32), "the smallest of all": np.float32([2.0**-149]),
    "huge": np.linspace(1e38, 3.39e38, 50).astype(np.float32),
    "the largest of all": np.full(3, np.finfo(np.float32).max),
}  # fmt: skip


def test_quantiles_are_those_of_sorted_values_to_one_part_in_1024() -> None:
    for values in VALUES.values():
        with named_case(values):
            found = histogram(values).quantiles(QUANTILES)
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, [exact(values, level) for level in QUANTILES], RESOLUTION, DENORMAL_STEP)


def test_quantiles_of_four_values_by_hand() -> None:
    levels = (0.0, 0.25, 0.26, 0.5, 0.51, 0.75, 0.76, 1.0)
    found = histogram(np.float32([3, 1, 4, 2])).quantiles(levels)
    np.testing.assert_allclose(found, [1, 1, 2, 2, 3, 3, 4, 4], RESOLUTION)


def test_within_a_bin_quantiles_rise_by_rank() -> None:
    found = histogram(np.full(4, 1.0, np.float32)).quantiles((0.25, 0.5, 0.75, 1.0))
    assert found.tolist() == [1 + RESOLUTION * part for part in (0.125, 0.375, 0.625, 0.875)]


def test_numbers_one_part_in_1024_apart_are_told_apart() -> None:
    counts = histogram(np.float32([1.0, 1.0 + RESOLUTION])).counts
    assert counts[counts > 0].tolist() == [1, 1]


def test_a_histogram_of_nothing_has_quantiles_of_zero() -> None:
    found = histogram(np.empty((0, 4), np.float32))
    assert found.total() == 0 and found.all_finite()
    assert found.quantiles((0.0, 0.5, 1.0)).tolist() == [0, 0, 0]


def test_adding_in_pieces_of_any_shape_is_adding_at_once() -> None:
    for sizes in [(1000,), (1, 999), (400, 0, 600), (125,) * 8]:
        with named_case(sizes):
            values = drawn(1000, 3.0)
            found = Histogram()
            for piece in np.split(values, np.cumsum(sizes)[:-1]):
                found.add(torch.from_numpy(piece.copy()).view(-1, 5 if len(piece) % 5 == 0 else 1))
            assert torch.equal(found.counts, histogram(values).counts)
            assert found.total() == 1000


def test_counts_of_two_histograms_add_to_that_of_both() -> None:
    one, other = drawn(300, 1.0, seed=1), drawn(200, 2.0, seed=2)
    merged = histogram(np.concatenate([one, other]))
    both = Histogram(histogram(one).counts + histogram(other).counts)
    np.testing.assert_array_equal(both.quantiles(QUANTILES), merged.quantiles(QUANTILES))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_no_number_is_counted_and_seen(value: float) -> None:
    found = histogram(np.float32([1.0, value, 2.0]))
    assert found.total() == 3
    assert not found.all_finite()
    assert found.quantiles((0.3,)) == pytest.approx([1.0], rel=RESOLUTION)
    assert not np.isfinite(found.quantiles((1.0,)))


def test_nan_of_either_sign_is_seen() -> None:
    magnitudes = torch.tensor([math.nan, -math.nan]).abs()
    found = Histogram()
    found.add(magnitudes)
    assert found.total() == 2 and not found.all_finite()


def test_the_largest_number_is_finite() -> None:
    assert histogram(np.float32([np.finfo(np.float32).max, 0.0])).all_finite()
    assert len(Histogram().counts) == NUM_BINS
