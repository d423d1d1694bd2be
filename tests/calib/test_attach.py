"""Routing data that a profile adds to a pack: the runtime's predictions on the same tokens have its figures."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cases import case
from support.models import TinyMixtral, pack
from support.predictors import random_predictor
from support.profiles import profiled, random_tokens
from support.routings import random_routes

from moe_pack.calib.profile import Profile, attach
from moe_pack.calib.profile.profiler import PATH_BYTES, most_routing_bytes, routing_of
from moe_pack.calib.statistics import learn_paths, shapes_for
from moe_pack.calib.statistics.predictors import recall_precision
from moe_pack.formats import Pack, PlanError
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.model import CheckpointWeights, add_attention, embed, mlp_input, route_tokens, run_experts
from moe_pack.runtime.model.caches.ropes import Rope
from moe_pack.runtime.model.kv_cache import KVCache
from moe_pack.runtime.offload import ROUTING_FILE, Routing
from moe_pack.runtime.offload.prefetch import PredictionInput, make_prediction
from moe_pack.runtime.offload.routing_file import MAX_ROUTED_TOKENS, NO_PREDICTOR, routing_file_bytes

SHAPE = TinyMixtral(intermediate_size=16, num_layers=4, num_experts=5, vocab_size=32)
NUM_SEQUENCES, LENGTH, NUM_HELD_OUT = 10, 32, 2
TOKENS = random_tokens(NUM_SEQUENCES, LENGTH, 32)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SHAPE.write(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def profile(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return profiled(source, tmp_path_factory.mktemp("profiled") / "p", TOKENS)


@pytest.fixture(scope="module")
def packed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "pack"
    pack(source, folder)
    return folder


@pytest.fixture(scope="module")
def routing(profile: Profile, packed: Path) -> Routing:
    with Pack(packed) as opened:
        attach(opened, profile)
        found = Routing.open(opened)
    assert found is not None
    return found


def test_a_profiles_figures_come_back(profile: Profile, routing: Routing) -> None:
    assert profile.facts.text.num_held_out == NUM_HELD_OUT
    for l in range(4):
        statistics = profile.statistics(l)
        assert routing.popularity[l].tolist() == statistics.tokens.tolist()
        assert routing.mass[l].tolist() == statistics.mass.tolist()
        assert routing.routes[:, l].tolist() == statistics.routes[-NUM_HELD_OUT * LENGTH :].tolist()
    for name, array in profile.paths().arrays().items():
        np.testing.assert_array_equal(routing.paths.arrays()[name], array)
    assert routing.sequence_length == LENGTH
    assert np.isnan(routing.recalls[0]).all() and routing.best[0] == NO_PREDICTOR
    for l in (1, 2, 3):
        judged = profile.predictors(l)
        np.testing.assert_array_equal(routing.recalls[l], judged.experts)
        assert routing.best[l] == judged.best[0]
        kept = judged.network.arrays()
        assert all(torch.equal(tensor, kept[name]) for name, tensor in routing.network(l).arrays().items())


@torch.inference_mode()
def inputs_and_routes(weights: CheckpointWeights, profile: Profile) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns held-out inputs float32 [T, L, d], routes int64 [T, L, k], and hidden states float32 [T, L - 1, d] after
    the next layer's attention, without the less popular experts.
    """
    spec, cpu = weights.spec, torch.device("cpu")
    inputs: list[list[torch.Tensor]] = [[] for _ in range(4)]
    routes: list[list[torch.Tensor]] = [[] for _ in range(4)]
    partials: list[list[torch.Tensor]] = [[] for _ in range(3)]
    for sequence in TOKENS.sequences[-NUM_HELD_OUT:]:
        cache = KVCache(spec, LENGTH, cpu)
        angles = Rope(spec.rope, cpu)(torch.arange(LENGTH), LENGTH)
        hidden = embed(torch.from_numpy(sequence.astype(np.int64)), weights)
        for layer in range(4):
            hidden = add_attention(hidden, weights, layer, cache.layer(layer), angles)
            x = mlp_input(hidden, weights, layer)
            experts, router_weights = route_tokens(x, weights, layer)
            if layer < 3:
                counted = profile.statistics(layer)
                learned = (counted.tokens.astype(int) - counted.held_out_tokens).tolist()
                popular = sorted(range(5), key=lambda expert: -learned[expert])[:3]
                is_resident = torch.isin(experts, torch.tensor(popular))
                partial = hidden + run_experts(x, experts, router_weights * is_resident, weights, layer)
                partials[layer].append(add_attention(partial, weights, layer + 1, cache.layer(layer + 1), angles))
            hidden = hidden + run_experts(x, experts, router_weights, weights, layer)
            inputs[layer].append(x)
            routes[layer].append(experts)
    of_all = (torch.stack([torch.cat(part) for part in parts], dim=1) for parts in (inputs, routes, partials))
    return tuple(of_all)  # type: ignore[return-value]  # of three


def test_the_runtimes_predictions_recall_what_the_profile_measured(
    source: Path, profile: Profile, routing: Routing
) -> None:
    """On the same held-out tokens, run through the model once more; a tie broken otherwise may move one token."""
    checkpoint = Checkpoint(source)
    weights = CheckpointWeights(checkpoint)
    x, routes, partials = inputs_and_routes(weights, profile)
    assert routes.tolist() == routing.routes.tolist()
    one_token = 1.01 / (len(x) * 2)
    for layer_idx in (1, 2, 3):
        before = routes[:, max(layer_idx - 2, 0) : layer_idx]
        seen = PredictionInput(x[:, layer_idx - 1], before.numpy(), partials[:, layer_idx - 1])
        measured = routing.recalls[layer_idx]
        expected = {
            "popularity": measured[0],
            "paths": measured[1],
            "router": measured[2],
            "mlp": measured[3 + int(routing.network(layer_idx).out_weight is not None)],
            "partial": measured[5],
            "best": measured[routing.best[layer_idx]],
        }
        for name, row in expected.items():
            prediction = make_prediction(name, weights, routing)  # type: ignore[arg-type]  # a Literal each
            assert prediction is not None
            told = prediction.scores(layer_idx, seen)
            assert told is not None
            scores = torch.from_numpy(told.copy())
            found = [recall_precision(scores, routes[:, layer_idx], 2)[0]]
            found += recall_precision(scores, routes[:, layer_idx], 4)
            np.testing.assert_allclose(found, row, rtol=0, atol=one_token, err_msg=f"{name}, layer {layer_idx}")
    checkpoint.close()


def test_of_many_held_out_tokens_the_first_whole_sequences_are_kept(profile: Profile) -> None:
    for most_tokens, num_kept, length in [(64, 64, 32), (63, 32, 32), (32, 32, 32), (20, 20, 20), (1, 1, 1)]:
        with case(most_tokens, num_kept, length):
            found = routing_of(profile, most_tokens)
            held_out = profile.statistics(2).routes[-NUM_HELD_OUT * LENGTH :]
            assert found.sequence_length == length
            assert found.routes[:, 2].tolist() == held_out[:num_kept].tolist()


def test_text_of_one_sequence_holds_out_nothing_and_predicts_by_paths_alone(source: Path, tmp_path: Path) -> None:
    found = profiled(source, tmp_path / "p", random_tokens(1, 64, 32))
    pack(source, tmp_path / "pack")
    with Pack(tmp_path / "pack") as opened:
        attach(opened, found)
        routing = Routing.open(opened)
    assert routing is not None and routing.best_recall is None and len(routing.routes) == 0
    assert routing.popularity.sum() == 4 * 64 * 2


def test_it_is_attached_again_to_the_same_bytes(profile: Profile, packed: Path, routing: Routing) -> None:
    before = (packed / ROUTING_FILE).read_bytes()
    with Pack(packed) as opened:
        attach(opened, profile)
    assert (packed / ROUTING_FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("shape", "what"),
    [
        (replace(SHAPE, seed=1), "another checkpoint of this model"),
        (replace(SHAPE, num_experts=4), "another model"),
        (replace(SHAPE, num_layers=3), "another model"),
    ],
)
def test_a_profile_of_something_else_is_refused(
    profile: Profile, shape: TinyMixtral, what: str, tmp_path: Path
) -> None:
    pack(shape.write(tmp_path / "source"), tmp_path / "pack")
    with Pack(tmp_path / "pack") as opened, pytest.raises(PlanError) as refused:
        attach(opened, profile)
    assert str(refused.value) == (
        f"{tmp_path / 'pack'}: was made from {what} than the profile {profile.folder}; "
        "give a pack and a profile of the same checkpoint"
    )
    assert not (tmp_path / "pack" / ROUTING_FILE).exists()


def test_how_long_the_file_will_be_is_known_from_the_profile_alone(profile: Profile, packed: Path) -> None:
    with Pack(packed) as opened:
        attach(opened, profile)
    assert routing_file_bytes(routing_of(profile)) == (packed / ROUTING_FILE).stat().st_size


def test_no_routing_is_longer_than_the_model_allows(profile: Profile) -> None:
    """Counts of 32 bits, as many routes as are kept, every network the larger."""
    L, E, k, d = 4, 5, 2, 64
    routes = random_routes(70_000, L, E, k, 0)
    hidden = shapes_for(d, E)[1].hidden
    most = Routing(
        popularity=np.zeros((L, E), "<u4"),
        mass=np.zeros((L, E), "<f4"),
        paths=learn_paths(routes, E, PATH_BYTES),
        recalls=np.zeros((L, 6, 3), "<f4"),
        best=np.array([NO_PREDICTOR, 4, 4, 4], "<u1"),
        routes=routes[:MAX_ROUTED_TOKENS],
        sequence_length=MAX_ROUTED_TOKENS,
        network=lambda layer_idx: random_predictor(2, d, E, min(layer_idx, 2), hidden, 0),
    )
    bound = most_routing_bytes(profile.spec)
    assert routing_file_bytes(routing_of(profile)) < routing_file_bytes(most) <= bound
    # Keys have all the room that paths may take: here they hardly need any.
    assert bound - PATH_BYTES < routing_file_bytes(most)
