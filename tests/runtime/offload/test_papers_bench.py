"""The benchmarks of the papers' claims: against counts by hand, loops, and what the engine runs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from benchlib import BOOK
from benchlib.parts_side import Parts, open_parts
from benchlib.playing import Play, play
from benchlib.routes import ModelRoutes, popularity_of, routed_model
from numpy.typing import NDArray
from paper_routing import best_only, coverage_finding, covered, path_counts, placement_finding, shares_of, shuffled
from paper_scores import Sizes, accuracies, batched, misses, played
from support.models import DEMO_MODEL, pack
from support.routings import random_routes
from support.streaming import budget_for

from moe_pack.calib.statistics import learn_paths
from moe_pack.formats import Pack
from moe_pack.formats.pack.writer import rewrite_thresholds
from moe_pack.runtime import Engine, EngineOptions, offload
from moe_pack.runtime.cpu import is_available
from moe_pack.runtime.offload.eviction import Importance

N, L, E, K = 40, 3, 6, 2
ALPHA = 0.3


def random_scores(seed: int) -> NDArray[np.float32]:
    """Scores [N, L, E] that add up to 1, as those of a softmax."""
    scores = np.random.default_rng(seed).random((N, L, E), np.float32)
    return scores / scores.sum(axis=2, keepdims=True)


def routes_of(scores: NDArray[np.float32]) -> ModelRoutes:
    """Single tokens that take the experts of the largest scores."""
    routes = np.argsort(-scores, axis=2)[:, :, :K].astype("<u2")
    passes = offload.Passes(routes, np.ones(N, "<u4"), scores.astype("<f2"), popularity_of(routes, E))
    return ModelRoutes(passes, routes, scores, scores, np.zeros((N, L, 1), np.float32), learn_paths(routes, E, 1 << 20))


def tops(scores: list[float]) -> set[int]:
    beta = sorted(scores, reverse=True)[K]
    return {expert for expert, score in enumerate(scores) if score > (1 + ALPHA) * beta}


def best(scores: list[float]) -> set[int]:
    return set(sorted(range(E), key=lambda expert: -scores[expert])[:K])


def test_predictions_are_counted_as_by_hand() -> None:
    guessed, scores = random_scores(0)[:, 0], random_scores(1)[:, 0]
    right = wrong = chosen = hits = 0
    for guess, own in zip(guessed.tolist(), scores.tolist(), strict=True):
        right += len(tops(guess) & tops(own))
        wrong += len(tops(guess) - tops(own))
        chosen += len((tops(guess) - tops(own)) & best(own))
        hits += len(best(guess) & best(own))
    assert accuracies(guessed, scores, K) == pytest.approx((right / (right + wrong), chosen / wrong, hits / (K * N)))
    assert accuracies(scores, scores, K)[::2] == (1, 1)


def test_one_sequence_misses_what_the_cache_misses_that_is_played() -> None:
    routes = routes_of(random_scores(2))
    facts = routes.facts(7)
    for way, alpha in (("off", None), ("alone", ALPHA), ("together", ALPHA)):
        found = play(routes, Play(offload.ExpertCache(facts, Importance(facts)), alpha=alpha))
        assert misses(facts, *batched(routes, 1), way) == found.needed - found.hits, way


def test_a_batch_is_of_parts_of_the_text_and_shares_its_top_experts() -> None:
    """The top expert of each of two sequences replaces the low-score expert of the other."""
    routes = routes_of(random_scores(3))
    scores, chosen = batched(routes, 2)
    assert scores.shape == (N // 2, 2, L, E)
    np.testing.assert_array_equal(scores[4, 1], routes.scores[N // 2 + 4])
    np.testing.assert_array_equal(chosen[4, 1], routes.passes.routes[N // 2 + 4])
    first, second = [0.3, 0.2, 0.19, 0.11, 0.1, 0.1], [0.1, 0.1, 0.5, 0.11, 0.1, 0.09]
    pair = np.array([[first, second]], np.float32)[:, :, None]
    taken = np.array([[[0, 1], [2, 3]]])[:, :, None]
    facts = routes.facts(7)
    counts = {way: misses(facts, pair, taken, way) for way in ("off", "alone", "together")}
    assert counts == {"off": 4, "alone": 4, "together": 2}


def test_a_partial_state_that_lacks_no_expert_predicts_the_scores() -> None:
    """Every expert fits, and the prompt brings nearly all."""
    with routed_model(DEMO_MODEL, BOOK, 16) as model:
        spec = model.checkpoint.spec
        shape = len(spec.moe_layers), spec.router.num_experts
        facts = offload.CacheFacts(np.ones(shape, np.int64), shape[0] * shape[1], 2, np.zeros(shape, np.float32))
        run = played(model, facts, Sizes(0, 80, 1.0), alpha=None, num_predicted=2)
    assert len(run.log_probs) == 16 and len(run.scored) == 16 * shape[0]
    assert [one.guessed is None for one in run.scored] == [True, *[False] * (shape[0] - 1)] * 16
    close = [np.allclose(one.guessed, one.scores, atol=1e-4) for one in run.scored if one.guessed is not None]
    assert np.mean(close) > 0.8


def test_paths_are_counted_whatever_the_order_of_a_tokens_experts() -> None:
    routes = np.array([[[0, 1], [2, 3]], [[1, 0], [3, 2]], [[0, 1], [2, 4]], [[5, 1], [2, 3]], [[1, 5], [2, 3]]])
    counts = path_counts(routes.astype("<u2"))
    assert counts.tolist() == [2, 2, 1]
    assert covered(counts, 1) == covered(counts, 0.2) == pytest.approx(0.4)  # at least one path
    assert covered(counts, 2.5) == 1


def test_shuffled_layers_keep_their_popularity_and_forget_each_other() -> None:
    routes = np.repeat(random_routes(500, 1, 4, 1, 0), 2, axis=1)  # the second layer repeats the first
    dealt = shuffled(routes)
    for l in range(2):
        assert np.array_equal(np.sort(dealt[:, l].ravel()), np.sort(routes[:, l].ravel()))
    assert len(path_counts(routes)) == 4
    assert len(path_counts(dealt)) == 16


def test_shares_are_those_of_the_tokens_that_came_by_these_experts() -> None:
    best = np.array([[0, 1, 2], [0, 1, 2], [0, 1, 3], [1, 1, 0]], "<u2")
    assert shares_of(best, (0, 1), 4).tolist() == pytest.approx([0, 0, 2 / 3, 1 / 3])
    assert shares_of(best, None, 4).tolist() == [0.25, 0, 0.5, 0.25]
    assert shares_of(best, (3, 3), 4).tolist() == [0, 0, 0, 0]


def test_a_claim_holds_only_where_the_figures_are_the_papers() -> None:
    skewed, even = np.zeros((1000, 3, 1), "<u2"), random_routes(1000, 3, 8, 1, 0)
    assert coverage_finding(skewed, 8, 1).here.startswith("the claim holds")
    assert coverage_finding(even, 8, 1).here.startswith("the claim does not hold")


def test_placing_popular_experts_is_judged_on_other_text() -> None:
    popularity = np.array([[0.7, 0.1, 0.1, 0.1]])
    same = placement_finding(popularity, popularity)
    assert same.rows[0][2:] == ("70.0%", "70.0%", "25.0%", "10.0%")
    assert same.here.startswith("the claim holds")
    turned = placement_finding(popularity, popularity[:, ::-1])
    assert turned.rows[0][2:] == ("70.0%", "10.0%", "25.0%", "10.0%")
    assert turned.here.startswith("the claim does not hold")


def test_the_best_expert_is_the_first_of_a_route() -> None:
    routes = random_routes(10, 3, 6, 2, 0)
    assert np.array_equal(best_only(routes)[..., 0], routes[..., 0])


IDS = [1, 540, 33, 7, 2048, 19, 4095, 600, 600, 3, 77, 1000]
CONTEXT, NUM_EXPERTS = 32, 12
FLOE = Parts(replace(offload.PRESETS["floe"], prediction="router"), selectors=True)  # the pack has no networks

NEEDS_KERNELS = pytest.mark.skipif(not is_available(), reason="native kernels were not built")


@pytest.fixture(scope="module")
def sparse_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with one threshold, which most of the neurons do not reach."""
    folder = tmp_path_factory.mktemp("parts") / "sparse"
    pack(DEMO_MODEL, folder, group=64)
    with Pack(folder) as opened:
        shape = opened.thresholds.shape
    rewrite_thresholds(folder, np.full(shape, 0.8, np.float32))
    return folder


def steady_counts(counts: offload.PhaseCounts) -> tuple[int, ...]:
    """Counts that do not depend on the disk's speed, if nothing is predicted."""
    return counts.tokens, counts.needed, counts.hits, counts.asked_bytes, counts.in_part


@NEEDS_KERNELS
@pytest.mark.parametrize(
    ("parts", "options"),
    [
        (Parts(offload.PRESETS["lru"]), EngineOptions(policy="lru")),
        (Parts(offload.Preset("lru", "lru", rows_below=1.0), selectors=True), EngineOptions(policy="lru", cutover=1.0)),
        (FLOE, EngineOptions(policy="floe")),
        (
            Parts(offload.PRESETS["importance"].without_prediction(), substitute=0.3),
            EngineOptions(policy="importance", prefetches=False, approximations=offload.Approximations(substitute=0.3)),
        ),
    ],
    ids=["nothing", "rows and selectors", "FloE", "substitution"],
)
def test_parts_that_moe_run_has_options_for_run_as_in_the_engine(
    sparse_pack: Path, parts: Parts, options: EngineOptions
) -> None:
    with Pack(sparse_pack) as opened:
        given = replace(options, budget_bytes=budget_for(opened, NUM_EXPERTS, CONTEXT))
        with Engine(opened, given, CONTEXT) as engine:
            expected = [engine.decoder.next_logits([token]) for token in IDS]
            assert isinstance(engine.weights, offload.OffloadedWeights) and engine.plan is not None
            assert (engine.plan.num_selectors > 0) == parts.selectors
            by_engine = engine.weights.decode
        with open_parts(opened, parts, given, CONTEXT) as (decoder, weights):
            found = [decoder.next_logits([token]) for token in IDS]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    if parts.preset.prediction != "none":
        assert by_engine.prefetched > 0 and weights.decode.prefetched > 0
    else:
        assert steady_counts(weights.decode) == steady_counts(by_engine)


@NEEDS_KERNELS
def test_predicted_rows_are_counted_for_the_experts_that_ran(sparse_pack: Path) -> None:
    with Pack(sparse_pack) as opened:
        options = EngineOptions(budget_bytes=budget_for(opened, NUM_EXPERTS, CONTEXT))
        with open_parts(opened, FLOE, options, CONTEXT) as (decoder, weights):
            for token in IDS:
                decoder.next_logits([token])
            assert weights.decode.rows_prefetched > 0
            assert 0 < weights.decode.running_predicted <= weights.rows_predicted
