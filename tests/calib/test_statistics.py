"""A layer's statistics on routes made up by hand: counts, pooled quantiles, shares between levels, damaged arrays."""

import itertools
import math
import statistics
from collections import Counter
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.cases import case
from support.models import Tensors, TinyMixtral

from moe_pack.calib.forward import LayerStates, LayerTokens, LayerwiseWeights
from moe_pack.calib.forward.layers import Beginning
from moe_pack.calib.statistics import (
    MIN_TOKENS,
    QUANTILE_LEVELS,
    LayerStatistics,
    compare_popularity,
    measure_coverage,
    measure_layer,
)
from moe_pack.calib.statistics.popularity import (
    Routes,
    as_sets,
    chi_square_tail,
    count_pairs,
    spearman,
    wilson_interval,
)
from moe_pack.formats import CheckpointError, ModelSpec, PackError
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.model import CheckpointWeights, activations, run_expert

RESOLUTION = 1 / 1024  # of a histogram, relative
Array = NDArray[Any]
S, F = 40, 24
MODEL = TinyMixtral(num_experts=4, intermediate_size=F)
COSINE = (0.25, 0.125)
# Every token goes to expert 2, then 0 or 3; none to 1; the held-out last 10 all to 3.
ROUTES = torch.tensor([[2, 0]] * 20 + [[2, 3]] * 20)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> LayerwiseWeights:
    return LayerwiseWeights(CheckpointWeights(Checkpoint(MODEL.write(tmp_path_factory.mktemp("source")))))


def made_up(routes: torch.Tensor = ROUTES) -> LayerTokens:
    generator = torch.Generator().manual_seed(2)
    x, inputs = (torch.randn((len(routes), MODEL.hidden_size), generator=generator) for _ in range(2))
    return LayerTokens(x, inputs, routes, torch.rand(routes.shape, generator=generator))


def measured(weights: LayerwiseWeights, tokens: LayerTokens, folder: Path, num_held_out: int = 10) -> LayerStatistics:
    states = LayerStates(weights, Beginning(lambda number: torch.zeros(S, 64)), 1, S, folder, torch.device("cpu"))
    return measure_layer(states, tokens, weights, 0, COSINE, num_held_out)


def test_tokens_are_counted_by_expert(weights: LayerwiseWeights, tmp_path: Path) -> None:
    tokens = made_up()
    found = measured(weights, tokens, tmp_path)
    assert found.tokens.tolist() == [20, 0, 40, 20]
    assert found.held_out_tokens.tolist() == [0, 0, 10, 10]
    assert np.array_equal(found.routes, ROUTES)
    assert found.cosine.tolist() == list(COSINE)
    w = tokens.weights.double()
    mass = [w[:20, 1].sum(), 0.0, w[:, 0].sum(), w[20:, 1].sum()]
    assert found.mass == pytest.approx(np.array(mass), rel=1e-6)  # stored in float32


def test_squares_of_both_inputs_are_summed_over_all_tokens_of_an_expert(
    weights: LayerwiseWeights, tmp_path: Path
) -> None:
    tokens = made_up()
    found = measured(weights, tokens, tmp_path)
    for expert, own in enumerate((slice(0, 20), slice(0, 0), slice(0, 40), slice(20, 40))):
        x = tokens.inputs[own]
        block = next(iter(weights.expert(0, expert).blocks()))
        assert len(block.up) == F
        h = activations(x, block, "silu").h
        for squares, values in ((found.input_squares, x), (found.hidden_squares, h)):
            exact = values.double().square().sum(dim=0).numpy()
            np.testing.assert_allclose(squares[expert], exact, 1e-6)  # sums of 40 squares in float32


def test_without_held_out_tokens_none_are_counted(weights: LayerwiseWeights, tmp_path: Path) -> None:
    assert measured(weights, made_up(), tmp_path, 0).held_out_tokens.tolist() == [0, 0, 0, 0]


def test_hidden_states_get_the_weighted_outputs(weights: LayerwiseWeights, tmp_path: Path) -> None:
    tokens = made_up()
    expected = tokens.x.clone()
    for token, (experts, router_weights) in enumerate(zip(ROUTES.tolist(), tokens.weights, strict=True)):
        for expert, weight in zip(experts, router_weights, strict=True):
            output = run_expert(tokens.inputs[[token]], weights.expert(0, expert), "silu", "none", 0.0)
            expected[token] += weight * output[0]
    measured(weights, tokens, tmp_path)
    # Products of one row or many differ in their last bits, which sums of 64 and 24 of them carry along.
    assert (tokens.x - expected).abs().max() < 1e-5 * expected.abs().max()


def magnitudes(weights: LayerwiseWeights, x: torch.Tensor, expert: int) -> Array:
    """abs(a), float32 [kinds, n f]."""
    (block,) = weights.expert(0, expert).blocks()
    values = activations(x, block, "silu")
    return torch.stack((values.up, values.gate, values.h)).abs().flatten(1).numpy()


def quantiles(values: Array) -> Array:
    ordered = np.sort(values, axis=1)
    places = [max(math.ceil(level * ordered.shape[1] - 1e-9), 1) - 1 for level in QUANTILE_LEVELS]
    return ordered[:, places]


def test_an_expert_without_tokens_has_its_layers_pooled_quantiles(weights: LayerwiseWeights, tmp_path: Path) -> None:
    tokens = made_up()
    found = measured(weights, tokens, tmp_path)
    own = {e: magnitudes(weights, tokens.inputs[(e == ROUTES).any(dim=1)], e) for e in (0, 2, 3)}
    for e, values in own.items():
        np.testing.assert_allclose(found.quantiles[e], quantiles(values), RESOLUTION, 1e-6)  # sums in another order
    pooled = quantiles(np.concatenate(list(own.values()), axis=1))
    np.testing.assert_allclose(found.quantiles[1], pooled, RESOLUTION, 1e-6)
    assert not found.hot[1].any() and not found.hot_thresholds[1].any()
    assert found.hot[[0, 2, 3]].any(axis=(1, 2, 3)).all()


def test_all_tokens_may_go_to_the_same_experts(weights: LayerwiseWeights, tmp_path: Path) -> None:
    found = measured(weights, made_up(torch.tensor([[1, 0]] * S)), tmp_path)
    assert found.tokens.tolist() == [S, S, 0, 0]
    assert np.array_equal(found.quantiles[2], found.quantiles[3])


def test_each_expert_is_told_of_with_its_tokens(weights: LayerwiseWeights, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    states = LayerStates(weights, Beginning(lambda number: torch.zeros(S, 64)), 1, S, tmp_path, torch.device("cpu"))
    measure_layer(states, made_up(), weights, 0, COSINE, 10, lambda expert, number: told.append((expert, number)))
    assert told == [(0, 20), (1, 0), (2, 40), (3, 20)]


def test_weights_that_are_no_numbers_are_refused_by_expert(tmp_path: Path) -> None:
    for number, (value, matrix) in enumerate(product([math.nan, math.inf], ["w1", "w3"])):
        (case_folder := tmp_path / str(number)).mkdir()
        with case(value, matrix):

            def spoil(tensors: Tensors) -> None:
                tensors[f"model.layers.0.block_sparse_moe.experts.2.{matrix}.weight"][1, 3] = value

            fault = "^layer 0 expert 2: activations are not finite; check that the checkpoint is complete$"
            source = MODEL.write(case_folder / "source", spoil)
            with closing(Checkpoint(source)) as checkpoint, pytest.raises(CheckpointError, match=fault):
                measured(LayerwiseWeights(CheckpointWeights(checkpoint)), made_up(), case_folder)


def test_large_weights_and_bad_ones_no_token_meets_are_not_refused(tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors["model.layers.0.block_sparse_moe.experts.2.w3.weight"][1, 3] = 1e30
        tensors["model.layers.0.block_sparse_moe.experts.1.w3.weight"][1, 3] = math.nan

    with closing(Checkpoint(MODEL.write(tmp_path / "source", spoil))) as checkpoint:
        found = measured(LayerwiseWeights(CheckpointWeights(checkpoint)), made_up(), tmp_path)
    assert np.isfinite(found.quantiles).all()


def shared() -> LayerStatistics:
    """Two experts of three neurons; the second had no tokens."""
    hot = np.zeros((2, 3, 4, 3), np.uint16)
    hot[0, 1] = np.rint(65535 * np.array([[1.0, 0.6, 0.2], [0.8, 0.4, 0.1], [0.6, 0.3, 0.0], [0.4, 0.1, 0.0]]))
    quantile = np.arange(2 * 3 * len(QUANTILE_LEVELS), dtype=np.float32).reshape(2, 3, -1)
    small = np.zeros(2, np.float32)
    thresholds = np.zeros((2, 3, 4), np.float32)
    counts, squares = np.array([5, 0], np.uint32), np.zeros((2, 3), np.float32)
    routes = np.zeros((5, 1), np.uint16)
    return LayerStatistics(counts, counts, small, routes, counts, quantile, thresholds, hot, small, squares, squares)


def test_between_levels_heat_is_interpolated_and_beyond_scaled() -> None:
    for sparsity, expected in [
        (0.0, [1, 1, 1]),
        (0.25, [1.0, 0.8, 0.6]),
        (0.5, [1.0, 0.6, 0.2]),
        (0.6, [0.9, 0.5, 0.15]),
        (0.7, [0.8, 0.4, 0.1]),
        (0.85, [0.5, 0.2, 0.0]),
        (0.9, [0.4, 0.1, 0.0]),
        (0.95, [0.2, 0.05, 0.0]),
        (1.0, [0.0, 0.0, 0.0]),
    ]:
        with case(sparsity, expected):
            found = shared().hot_share(1, sparsity)
            assert found.dtype == np.float32
            assert found[0] == pytest.approx(expected, abs=1e-5)  # stored in 65,535ths
            assert len(set(found[1].tolist())) == 1, "without tokens all neurons are as hot"


def test_quantiles_are_taken_out_by_level() -> None:
    found = shared().at_sparsities((0.5, 0.0, 0.995, 1.0))
    assert found[1, 2].tolist() == [5 * 103 + place for place in (50, 0, 100, 102)]


FAULTS: list[tuple[dict[str, Array | None], str]] = [
    ({"cosine": None}, "tensor 'cosine' is missing"),
    ({"heat": np.zeros(1)}, "unknown tensor 'heat'"),
    ({"tokens": np.zeros(4, np.uint16)}, "tensor 'tokens' is U16 [4], expected U32 [4]"),
    ({"held_out_tokens": np.zeros(3, np.uint32)}, "tensor 'held_out_tokens' is U32 [3], expected U32 [4]"),
    ({"mass": np.zeros(4)}, "tensor 'mass' is F64 [4], expected F32 [4]"),
    ({"coactivation": np.zeros((4, 3), np.uint32)}, "tensor 'coactivation' is U32 [4, 3], expected U32 [4, 4]"),
    ({"routes": np.zeros((S, 3), np.uint16)}, "tensor 'routes' is U16 [40, 3], expected U16 [40, 2]"),
    ({"routes": np.zeros((S - 1, 2), np.uint16)}, "tensor 'routes' is U16 [39, 2], expected U16 [40, 2]"),
    (
        {"quantiles": np.zeros((4, 3, 102), np.float32)},
        "tensor 'quantiles' is F32 [4, 3, 102], expected F32 [4, 3, 103]",
    ),
    (
        {"hot_thresholds": np.zeros((4, 4, 3), np.float32)},
        "tensor 'hot_thresholds' is F32 [4, 4, 3], expected F32 [4, 3, 4]",
    ),
    ({"hot": np.zeros((4, 3, 4, F), np.uint8)}, "tensor 'hot' is U8 [4, 3, 4, 24], expected U16 [4, 3, 4, 24]"),
    ({"hot": np.zeros((4, 3, 4, 1), np.uint16)}, "tensor 'hot' is U16 [4, 3, 4, 1], expected U16 [4, 3, 4, 24]"),
    ({"cosine": np.zeros(3, np.float32)}, "tensor 'cosine' is F32 [3], expected F32 [2]"),
]


def test_damaged_arrays_are_refused_by_name(weights: LayerwiseWeights, tmp_path: Path) -> None:
    found = measured(weights, made_up(), tmp_path)
    for changes, fault in FAULTS:
        with case(changes, fault):
            arrays = {name: array for name, array in (found.arrays() | changes).items() if array is not None}
            with pytest.raises(PackError) as refused:
                LayerStatistics.from_arrays(arrays, "x.safetensors", weights.spec, S)
            assert str(refused.value) == f"x.safetensors: {fault}"
    again = LayerStatistics.from_arrays(found.arrays(), "x.safetensors", weights.spec, S)
    assert all(np.array_equal(array, again.arrays()[name]) for name, array in found.arrays().items())
    other: ModelSpec = replace(weights.spec, router=replace(weights.spec.router, num_experts=5))
    with pytest.raises(PackError, match=r"^x.safetensors: tensor 'tokens' is U32 \[4\], expected U32 \[5\]$"):
        LayerStatistics.from_arrays(found.arrays(), "x.safetensors", other, S)


def draw(T: int, L: int, k: int, num_experts: int, drawn_from: int, seed: int = 0) -> Routes:
    """Routes over the first `drawn_from` experts, the first likeliest; the others are never chosen."""
    generator = np.random.default_rng(seed)
    scores = generator.gumbel(size=(T, L, drawn_from)) - 0.4 * np.arange(drawn_from)
    assert drawn_from <= num_experts
    return np.argsort(-scores, axis=2)[:, :, :k]


SHAPES = [  # T, L, k, E, drawn from
    (40, 3, 1, 6, 5),
    (40, 3, 2, 6, 5),
    (100, 2, 3, 5, 5),
    (5, 1, 2, 4, 3),
    (1, 1, 1, 1, 1),
    (9, 2, 1, 4, 1),  # every token on one expert
    (7, 2, 3, 3, 3),  # every token on every expert
]


def test_coactivation_counts_what_loops_count() -> None:
    for shape in SHAPES:
        with case(shape):
            T, L, k, E, drawn = shape
            routes = draw(T, L, k, E, drawn)
            expected = np.zeros((L, E, E), np.uint32)
            for token in routes.tolist():
                for l, chosen in enumerate(token):
                    for a, b in itertools.product(chosen, chosen):
                        expected[l, a, b] += 1
            found = np.stack([count_pairs(routes[:, l], routes[:, l], E) for l in range(L)])
            assert found.dtype == np.uint32
            np.testing.assert_array_equal(found, expected)
            np.testing.assert_array_equal(np.diagonal(found, axis1=1, axis2=2), measure_coverage(routes, E).tokens)


def test_coactivation_of_a_small_table_is_what_one_counts_by_hand() -> None:
    routes = np.array([[0, 1], [1, 0], [2, 1]])
    assert count_pairs(routes, routes, 4).tolist() == [[2, 2, 0, 0], [2, 3, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]


def test_coverage_counts_what_loops_count() -> None:
    for shape in SHAPES:
        with case(shape):
            T, L, k, E, drawn = shape
            routes = draw(T, L, k, E, drawn)
            coverage = measure_coverage(routes, E)
            counts = [Counter(e for token in routes.tolist() for e in token[l]) for l in range(L)]
            assert coverage.num_tokens == T
            assert coverage.tokens.tolist() == [[counts[l][e] for e in range(E)] for l in range(L)]
            assert coverage.share.tolist() == [[counts[l][e] / T for e in range(E)] for l in range(L)]
            assert coverage.unreached == tuple((l, e) for l in range(L) for e in range(E) if not counts[l][e])
            assert coverage.scarce == tuple((l, e) for l in range(L) for e in range(E) if 0 < counts[l][e] < MIN_TOKENS)
            assert (coverage.low <= coverage.share).all() and (coverage.share <= coverage.high).all()
            assert (coverage.low >= 0).all() and (coverage.high <= 1).all()


def test_an_expert_is_scarce_up_to_one_token_below_the_minimum() -> None:
    routes = np.repeat([0, 1, 2], [MIN_TOKENS - 1, MIN_TOKENS, 1]).reshape(-1, 1, 1)
    coverage = measure_coverage(routes, 4)
    assert coverage.scarce == ((0, 0), (0, 2)) and coverage.unreached == ((0, 3),)


def test_intervals_are_those_newcombe_published() -> None:
    for tokens, out_of, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        with case(tokens, out_of, low, high):
            # R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3: four decimals.
            found = wilson_interval(np.array([tokens, out_of - tokens], np.uint32), out_of)
            assert [float(ends[0]) for ends in found] == pytest.approx([low, high], abs=0.5e-4)
            mirrored = [1 - float(found[1][1]), 1 - float(found[0][1])]
            assert mirrored == pytest.approx([float(ends[0]) for ends in found], abs=1e-15)  # rounding of 1 - x


def test_intervals_of_none_and_all_end_exactly_at_0_and_1() -> None:
    for out_of in range(1, 200):
        low, high = wilson_interval(np.array([0, out_of], np.uint32), out_of)
        assert low[0] == 0 and high[1] == 1


def test_chi_square_tails_are_those_of_the_tables() -> None:
    for value, freedom, tail in [
        (3.841, 1, 0.05),
        (6.635, 1, 0.01),
        (10.828, 1, 0.001),
        (5.991, 2, 0.05),
        (7.815, 3, 0.05),
        (0.352, 3, 0.95),
        (18.307, 10, 0.05),
        (29.588, 10, 0.001),
        (24.996, 15, 0.05),
        (67.505, 50, 0.05),
        (124.342, 100, 0.05),
        (149.449, 100, 0.001),
    ]:
        with case(value, freedom, tail):
            assert chi_square_tail(value, freedom) == pytest.approx(
                tail, rel=1e-3
            )  # tables round values to three decimals


@pytest.mark.parametrize("value", [180.0, 255.0, 300.0])
def test_chi_square_tails_of_many_experts_follow_wilson_and_hilferty(value: float) -> None:
    n = 255
    z = ((value / n) ** (1 / 3) - (1 - 2 / (9 * n))) / math.sqrt(2 / (9 * n))
    # The approximation itself is off by a few 1e-4 at this many degrees of freedom.
    assert chi_square_tail(value, n) == pytest.approx(0.5 * math.erfc(z / math.sqrt(2)), abs=5e-4)


def test_chi_square_tails_are_1_at_nothing_and_vanish_far_out() -> None:
    assert chi_square_tail(0.0, 7) == chi_square_tail(0.0, 0) == 1.0
    assert chi_square_tail(1e6, 255) == chi_square_tail(1e6, 2) == 0.0
    assert 0.999999 < chi_square_tail(1e-9, 9) <= 1.0


def test_chi_square_is_on_average_its_degrees_of_freedom_where_sets_are_uniform() -> None:
    for k in [1, 2, 3, 4]:
        with case(k):
            # All pairs of tokens, each with any k of 5 experts: the expectation, exactly, not a sample of it.
            sets = list(itertools.combinations(range(5), k))
            tests = [compare_popularity(np.array([[a], [b]]), np.array([[a], [b]]), 5)[0] for a in sets for b in sets]
            assert statistics.mean(test.chi_square for test in tests) == pytest.approx(4, rel=1e-12)  # float64 sums


def test_chi_square_of_one_expert_a_token_is_pearsons_by_hand() -> None:
    held_out = np.repeat([0, 1, 2], [6, 3, 0]).reshape(-1, 1, 1)  # 6, 3, 0 where 3 each were uniform: 9/3 + 0 + 9/3
    test = compare_popularity(held_out, held_out, 3)[0]
    assert test.chi_square == pytest.approx(6) and test.p_value == pytest.approx(math.exp(-3))


def test_popularity_is_compared_as_loops_compare_it() -> None:
    for shape in [shape for shape in SHAPES if shape[0] > 1]:
        with case(shape):
            T, L, k, E, drawn = shape
            calibration, held_out = draw(T, L, k, E, drawn), draw(T + 3, L, k, E, drawn, seed=1)[:, :, ::-1]
            for l, test in enumerate(compare_popularity(calibration, held_out, E)):
                learned = Counter(e for token in calibration.tolist() for e in token[l])
                choices = [e for token in held_out.tolist() for e in token[l]]
                nats = [math.log((learned[e] + 1) / (T * k + E)) for e in choices]
                best = sorted(range(E), key=lambda e: (-learned[e], e))[: math.ceil(E / 4)]
                assert test.calibrated_nats == pytest.approx(statistics.mean(nats), rel=1e-12)  # float64 sums
                assert test.uniform_nats == pytest.approx(-math.log(E))
                assert test.quarter_share == pytest.approx(sum(e in best for e in choices) / len(choices), rel=1e-12)
                assert test.quarter_uniform == len(best) / E
                assert test.p_value == chi_square_tail(test.chi_square, E - 1)
                expected = [learned[e] for e in range(E)], [choices.count(e) for e in range(E)]
                assert test.spearman == spearman(*map(np.array, expected))


def test_where_every_token_has_every_expert_nothing_can_differ_from_uniform() -> None:
    test = compare_popularity(draw(7, 1, 3, 3, 3), draw(9, 1, 3, 3, 3), 3)[0]
    assert (test.chi_square, test.p_value, test.spearman) == (0.0, 1.0, None)


def test_popularity_that_holds_beats_uniform_and_popularity_that_turns_round_loses() -> None:
    calibration = np.repeat([0, 1, 2, 3], [80, 10, 6, 4]).reshape(-1, 1, 1)
    held, turned = (compare_popularity(calibration, routes, 4)[0] for routes in (calibration, 3 - calibration))
    assert held.calibrated_nats > held.uniform_nats > turned.calibrated_nats
    assert held.quarter_share == 0.8 and turned.quarter_share == 0.04 and held.quarter_uniform == 0.25
    assert held.spearman == pytest.approx(1) and turned.spearman == pytest.approx(-1)
    assert held.p_value == turned.p_value < 1e-20


def test_spearman_is_the_correlation_of_mean_ranks() -> None:
    generator = np.random.default_rng(3)
    for _ in range(20):
        a, b = generator.integers(0, 5, (2, 9))
        ranks = [
            [sum(x < y for x in row) + (sum(x == y for x in row) - 1) / 2 for y in row]
            for row in (a.tolist(), b.tolist())
        ]
        assert spearman(a, b) == pytest.approx(statistics.correlation(*ranks), abs=1e-12)  # float64 sums
    assert spearman(np.array([1, 1]), np.array([1, 2])) is None


def test_the_order_of_a_tokens_experts_changes_nothing() -> None:
    routes = draw(50, 3, 3, 6, 6)
    other = np.random.default_rng(5).permuted(routes, axis=2)
    assert (routes != other).any()
    assert compare_popularity(routes, routes, 6) == compare_popularity(other, other, 6)


def test_routes_that_no_router_gives_are_caught() -> None:
    for routes, fault in [
        (np.zeros((2, 3), int), r"routes are \[T, L, k\] and not empty, not \(2, 3\)"),
        (np.zeros((0, 1, 1), int), r"routes are \[T, L, k\] and not empty, not \(0, 1, 1\)"),
        (np.array([[[4]]]), "routes name an expert that is none of 4"),
        (np.array([[[-1]]]), "routes name an expert that is none of 4"),
        (np.array([[[2, 2]]]), "a token's experts are distinct"),
    ]:
        with case(routes, fault), pytest.raises(AssertionError, match=fault):
            as_sets(routes, 4)
