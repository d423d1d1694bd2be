"""Predictions: each against its rule written out, a model worked by hand, and what is said without a profile."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from support.cases import case
from support.models import TinyMixtral, pack
from support.native import operations_limited_to
from support.predictors import random_predictor
from support.routings import random_routing
from support.streaming import budget_for

from moe_pack.formats import Pack, RunError
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime import Engine, EngineOptions, model
from moe_pack.runtime.model.caches.ropes import Rope
from moe_pack.runtime.model.kv_cache import KVCache
from moe_pack.runtime.offload import OffloadedWeights, Routing, prefetch
from moe_pack.runtime.offload.presets import PredictionName
from moe_pack.runtime.offload.routing_file import NO_PREDICTOR, write_routing

L, E, K, D = 4, 6, 2, 64
SHAPE = TinyMixtral(intermediate_size=16, num_layers=L, num_experts=E, dtype=torch.float32)
ROUTING = random_routing(L, E, K, D, best=(0, 1, 4))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SHAPE.write(tmp_path_factory.mktemp("predicted"))


@pytest.fixture(scope="module")
def weights(source: Path) -> Iterator[model.CheckpointWeights]:
    checkpoint = Checkpoint(source)
    yield model.CheckpointWeights(checkpoint)
    checkpoint.close()


def observed(num_tokens: int, layer_idx: int, seed: int = 0, partial: bool = False) -> prefetch.PredictionInput:
    generator = torch.Generator().manual_seed(seed)
    x, hidden = torch.randn(2, num_tokens, D, generator=generator)
    routes = torch.rand(num_tokens, min(layer_idx, 2), E, generator=generator).argsort(-1)[..., :K]
    return prefetch.PredictionInput(x, routes.numpy(), hidden if partial else None)


def made(name: PredictionName, weights: Any, routing: Routing | None = ROUTING) -> prefetch.Prediction:
    prediction = prefetch.make_prediction(name, weights, routing)
    assert prediction is not None
    return prediction


def scores_of(prediction: prefetch.Prediction, layer_idx: int, seen: prefetch.PredictionInput) -> np.ndarray[Any, Any]:
    scores = prediction.scores(layer_idx, seen)
    assert scores is not None and scores.dtype == np.float32 and scores.shape == (len(seen.x), E)
    return scores


# --- each against its rule


def test_popularity_says_the_same_of_every_token(weights: model.CheckpointWeights) -> None:
    for layer_idx, num_tokens in product([1, 2, 3], [1, 7]):
        with case(layer_idx, num_tokens):
            scores = scores_of(made("popularity", weights), layer_idx, observed(num_tokens, layer_idx))
            assert scores.tolist() == [ROUTING.paths.popularity[layer_idx].tolist()] * num_tokens


def test_paths_are_asked_with_the_routes_of_the_layers_before(weights: model.CheckpointWeights) -> None:
    for layer_idx, num_tokens in product([1, 2, 3], [1, 7]):
        with case(layer_idx, num_tokens):
            seen = observed(num_tokens, layer_idx)
            expected, _ = ROUTING.paths.predict(layer_idx, seen.routes)
            np.testing.assert_array_equal(scores_of(made("paths", weights), layer_idx, seen), expected)


def test_the_next_router_multiplies_the_input_before(weights: model.CheckpointWeights) -> None:
    for layer_idx, num_tokens in product([1, 2, 3], [1, 7]):
        with case(layer_idx, num_tokens):
            seen = observed(num_tokens, layer_idx)
            rows = SHAPE.tensors()[f"model.layers.{layer_idx}.block_sparse_moe.gate.weight"]
            expected = seen.x.double() @ rows.double().T
            # 64 products in float32
            np.testing.assert_allclose(
                scores_of(made("router", weights), layer_idx, seen), expected, rtol=1e-4, atol=1e-5
            )


def test_a_partial_state_is_normed_and_routed(weights: model.CheckpointWeights) -> None:
    for layer_idx, num_tokens in product([1, 2, 3], [1, 7]):
        with case(layer_idx, num_tokens):
            prediction = made("partial", weights)
            seen = observed(num_tokens, layer_idx, partial=True)
            assert prediction.needs_partial(layer_idx) and seen.partial is not None
            rows = SHAPE.tensors()[f"model.layers.{layer_idx}.block_sparse_moe.gate.weight"]
            hidden = seen.partial.double()
            normed = hidden / (hidden.square().mean(dim=1, keepdim=True) + 1e-5).sqrt()
            np.testing.assert_allclose(
                scores_of(prediction, layer_idx, seen), normed @ rows.double().T, rtol=1e-4, atol=1e-5
            )
            assert prediction.scores(layer_idx, observed(num_tokens, layer_idx)) is None


def test_a_network_scores_as_the_plain_one() -> None:
    for native, num_layers, layer_idx, num_tokens in product([False, True], [1, 2], [1, 2, 3], [1, 7]):
        with case(native, num_layers, layer_idx, num_tokens):
            network = random_predictor(num_layers, D, E, min(layer_idx, 2), 8, seed=3)
            operations = operations_limited_to("portable") if native else model.TORCH
            prediction = prefetch.LearnedPrediction({layer_idx: network}, operations)
            seen = observed(num_tokens, layer_idx)
            expected = network.scores(seen.x, torch.from_numpy(seen.routes))
            # float32 sums of some 70 products in another order
            np.testing.assert_allclose(scores_of(prediction, layer_idx, seen), expected, rtol=1e-4, atol=1e-5)
            assert prediction.scores(layer_idx - 1, seen) is None


def test_the_best_of_each_layer_is_asked(weights: model.CheckpointWeights) -> None:
    best = made("best", weights)
    for layer_idx, name in ((1, "popularity"), (2, "paths"), (3, "mlp")):
        seen = observed(5, layer_idx)
        expected = scores_of(made(name, weights), layer_idx, seen)  # type: ignore[arg-type]  # a Literal each
        np.testing.assert_array_equal(scores_of(best, layer_idx, seen), expected)
    assert not any(best.needs_partial(layer_idx) for layer_idx in (1, 2, 3))


def test_only_a_layer_whose_best_is_the_partial_state_asks_for_one(weights: model.CheckpointWeights) -> None:
    best = made("best", weights, random_routing(L, E, K, D, best=(2, 5, NO_PREDICTOR)))
    assert [best.needs_partial(layer_idx) for layer_idx in (1, 2, 3)] == [False, True, False]
    seen = observed(1, 2, partial=True)
    np.testing.assert_array_equal(scores_of(best, 2, seen), scores_of(made("partial", weights), 2, seen))
    prefetcher = prefetch.Prefetcher(best, E, K, K)
    assert [prefetcher.needs_partial(layer_idx, 1) for layer_idx in (1, 2, 3)] == [False, True, False]
    # 20 tokens need nearly all of 6 experts, which are prefetched whatever is predicted.
    assert not prefetcher.needs_partial(2, 20) and prefetcher.needs_partial(2, 2)
    assert not prefetch.Prefetcher(None, E, K, 0).needs_partial(2, 1)


@torch.inference_mode()
def test_the_engine_computes_a_partial_state_only_where_the_best_needs_it(source: Path, tmp_path: Path) -> None:
    """One attention a layer and token, and one more for layer 2, the only one predicted by a partial state."""
    pack(source, tmp_path / "pack", width=8)
    with Pack(tmp_path / "pack") as opened:
        for best, expected in (((2, 5, 2), L + 1), ((2, 2, 2), L), ((5, 5, 5), 2 * L - 1)):
            write_routing(opened, random_routing(L, E, K, D, best=best))
            budget = budget_for(opened, 12, 32)
            with Engine(opened, EngineOptions(budget_bytes=budget, kernels="portable"), 32) as engine:
                weights = engine.weights
                assert isinstance(weights, OffloadedWeights)
                weights.prefetcher = prefetch.Prefetcher(made("best", weights, Routing.open(opened)), E, K, K)
                names: list[str] = []
                with pytest.MonkeyPatch.context() as patch:
                    read = weights.matrix
                    patch.setattr(weights, "matrix", lambda role: (names.append(role), read(role))[1])
                    engine.decoder.next_logits([5])
                assert sum(name.endswith("attention.o") for name in names) == expected, names


def test_where_nothing_was_judged_the_best_is_the_next_router(weights: model.CheckpointWeights) -> None:
    half = random_routing(L, E, K, D, best=(NO_PREDICTOR, 2, 0))
    for layer_idx, routing in ((1, half), (2, half), (1, None), (3, None)):
        seen = observed(3, layer_idx)
        expected = scores_of(made("router", weights, None), layer_idx, seen)
        np.testing.assert_array_equal(scores_of(made("best", weights, routing), layer_idx, seen), expected)


@torch.inference_mode()
def test_with_every_expert_in_fast_memory_a_partial_state_predicts_the_truth(source: Path, tmp_path: Path) -> None:
    """The whole model layer by layer: the state with nothing missing, after the next attention, is the next input's."""
    pack(source, tmp_path / "pack", width=8)
    with Pack(tmp_path / "pack") as opened:
        weights = model.PackWeights(opened, torch.device("cpu"))
        prediction = made("partial", weights, None)
        spec, ids = opened.spec, torch.arange(20) * 7 % SHAPE.vocab_size
        cache = KVCache(spec, len(ids), torch.device("cpu"))
        angles = Rope(spec.rope, torch.device("cpu"))(torch.arange(len(ids)), len(ids))
        x = model.add_attention(model.embed(ids, weights), weights, 0, cache.layer(0), angles)
        routes: list[torch.Tensor] = []
        for layer in range(L):
            inputs = model.mlp_input(x, weights, layer)
            experts, router_weights = model.route_tokens(inputs, weights, layer)
            if layer:
                seen = prefetch.PredictionInput(inputs * 0, torch.stack(routes[-2:], dim=1).numpy(), x)
                assert prefetch.ranked(scores_of(prediction, layer, seen), K).tolist() == experts.tolist()
            routes.append(experts)
            x = x + model.run_experts(inputs, experts, router_weights, weights, layer)
            if layer + 1 < L:
                x = model.add_attention(x, weights, layer + 1, cache.layer(layer + 1), angles)


# --- made by name


def test_every_name_is_made_or_says_what_it_needs(weights: model.CheckpointWeights) -> None:
    for name in get_args(PredictionName):
        assert (prefetch.make_prediction(name, weights, ROUTING) is None) == (name == "none")
    assert prefetch.make_prediction("none", weights, None) is None
    for name in ("router", "partial", "best"):
        made(name, weights, None)  # type: ignore[arg-type]  # a Literal each


@pytest.mark.parametrize("name", ["popularity", "paths", "mlp"])
def test_without_a_profile_what_needs_one_says_so(weights: model.CheckpointWeights, name: PredictionName) -> None:
    with pytest.raises(RunError) as refused:
        prefetch.make_prediction(name, weights, None)
    assert str(refused.value) == (
        f"prediction {name!r}: the pack has no routing of a profile, which it needs; "
        "run moe-pack attach PACK --profile DIR, or predict by router"
    )


def test_a_profile_without_networks_says_so(weights: model.CheckpointWeights) -> None:
    none = random_routing(L, E, K, D, best=(NO_PREDICTOR,) * 3)
    with pytest.raises(RunError, match="prediction 'mlp': the pack's profile has no networks"):
        prefetch.make_prediction("mlp", weights, none)
    made("paths", weights, none)
