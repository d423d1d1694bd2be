"""What the benchmark says of scores: its shares against loops, its caches against those of the replay."""

import numpy as np
import pytest
from benchlib import BOOK, DEMO_MODEL
from benchlib.playing import Play, play
from benchlib.routes import ModelRoutes, popularity_of, routed_model
from numpy.typing import NDArray
from paper_scores import Sizes, accuracies, batched, misses, played

from moe_pack.calib.statistics import learn_paths
from moe_pack.runtime.offload import CacheFacts, ExpertCache, Passes
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
    passes = Passes(routes, np.ones(N, "<u4"), scores.astype("<f2"), popularity_of(routes, E))
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
        found = play(routes, Play(ExpertCache(facts, Importance(facts)), alpha=alpha))
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
        facts = CacheFacts(np.ones(shape, np.int64), shape[0] * shape[1], 2, np.zeros(shape, np.float32))
        run = played(model, facts, Sizes(0, 80, 1.0), alpha=None, num_predicted=2)
    assert len(run.log_probs) == 16 and len(run.scored) == 16 * shape[0]
    assert [one.guessed is None for one in run.scored] == [True, *[False] * (shape[0] - 1)] * 16
    close = [np.allclose(one.guessed, one.scores, atol=1e-4) for one in run.scored if one.guessed is not None]
    assert np.mean(close) > 0.8
