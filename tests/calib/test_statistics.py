"""A layer's statistics on routes made up by hand: counts, pooled quantiles, shares between levels, damaged arrays."""

import math
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
from moe_pack.calib.statistics import QUANTILE_LEVELS, LayerStatistics, measure_layer
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

            def spoil(tensors: Tensors, matrix: str = matrix, value: float = value) -> None:
                tensors[f"model.layers.0.block_sparse_moe.experts.2.{matrix}.weight"][1, 3] = value

            checkpoint = Checkpoint(MODEL.write(case_folder / "source", spoil))
            with pytest.raises(CheckpointError) as refused:
                measured(LayerwiseWeights(CheckpointWeights(checkpoint)), made_up(), case_folder)
            assert (
                str(refused.value)
                == "layer 0 expert 2: activations are not finite; check that the checkpoint is complete"
            )
            checkpoint.close()


def test_large_weights_and_bad_ones_no_token_meets_are_not_refused(tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors["model.layers.0.block_sparse_moe.experts.2.w3.weight"][1, 3] = 1e30
        tensors["model.layers.0.block_sparse_moe.experts.1.w3.weight"][1, 3] = math.nan

    checkpoint = Checkpoint(MODEL.write(tmp_path / "source", spoil))
    found = measured(LayerwiseWeights(CheckpointWeights(checkpoint)), made_up(), tmp_path)
    assert np.isfinite(found.quantiles).all()
    checkpoint.close()


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


def test_neurons_of_an_expert_without_tokens_are_all_as_hot() -> None:
    for sparsity in [0.0, 0.3, 0.5, 0.75, 0.95]:
        with case(sparsity):
            assert len(set(shared().hot_share(1, sparsity)[1].tolist())) == 1


def test_quantiles_are_taken_out_by_level() -> None:
    found = shared().at_sparsities((0.5, 0.0, 0.995, 1.0))
    assert found[1, 2].tolist() == [5 * 103 + place for place in (50, 0, 100, 102)]


def damaged(statistics: LayerStatistics, **changes: Array | None) -> dict[str, Array]:
    return {name: array for name, array in (statistics.arrays() | changes).items() if array is not None}


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
    for number, (changes, fault) in enumerate(FAULTS):
        (case_folder := tmp_path / str(number)).mkdir()
        with case(changes, fault):
            arrays = damaged(measured(weights, made_up(), case_folder), **changes)
            with pytest.raises(PackError) as refused:
                LayerStatistics.from_arrays(arrays, "x.safetensors", weights.spec, S)
            assert str(refused.value) == f"x.safetensors: {fault}"


def test_undamaged_arrays_come_back(weights: LayerwiseWeights, tmp_path: Path) -> None:
    found = measured(weights, made_up(), tmp_path)
    again = LayerStatistics.from_arrays(found.arrays(), "x.safetensors", weights.spec, S)
    assert all(np.array_equal(array, again.arrays()[name]) for name, array in found.arrays().items())


def test_statistics_of_another_model_are_refused(weights: LayerwiseWeights, tmp_path: Path) -> None:
    arrays = measured(weights, made_up(), tmp_path).arrays()
    other: ModelSpec = replace(weights.spec, router=replace(weights.spec.router, num_experts=5))
    with pytest.raises(PackError, match=r"^x.safetensors: tensor 'tokens' is U32 \[4\], expected U32 \[5\]$"):
        LayerStatistics.from_arrays(arrays, "x.safetensors", other, S)
