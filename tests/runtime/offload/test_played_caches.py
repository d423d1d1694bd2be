"""The benchmarks' bookkeeping of caches: its hits are the replay's, and its rows those of sets of neurons."""

from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest
from benchlib.playing import ExpertSizes, Play, SecondProcessor, best_of, play
from benchlib.routes import ModelRoutes, NeuronRows, popularity_of
from support.evictions import FIFO
from support.residencies import facts_of, random_steps
from support.routings import random_routes

from moe_pack.calib.statistics import learn_paths
from moe_pack.runtime.offload import PRESETS, ExpertCache, Passes, expert_cache_for
from moe_pack.runtime.offload.eviction import LRU
from moe_pack.runtime.offload.replay import replay
from moe_pack.runtime.offload.split import LoadOrCompute

N, L, E, F = 60, 3, 6, 10
NUM_PROMPT = 8


def routes_of(seed: int = 0) -> ModelRoutes:
    """A prompt, then single tokens; scores at random."""
    routes, rng = random_routes(N, L, E, 2, seed), np.random.default_rng(seed)
    chunks = np.array([NUM_PROMPT] + [1] * (N - NUM_PROMPT), "<u4")
    scores = rng.random((N, L, E), np.float32)
    means = np.stack([scores[:NUM_PROMPT].mean(axis=0), *scores[NUM_PROMPT:]]).astype("<f2")
    passes = Passes(routes, chunks, means, popularity_of(routes, E))
    ahead, inputs = rng.random((N, L, E), np.float32), np.zeros((N, L, 1), np.float32)
    return ModelRoutes(passes, routes, scores, ahead, inputs, learn_paths(routes, E, 1 << 20))


def test_without_prediction_the_hits_are_those_of_the_replay() -> None:
    routes = routes_of()
    for name, preset in PRESETS.items():
        for num_experts in (4, 7, 12):
            facts, silent = routes.facts(num_experts), preset.without_prediction()
            played = play(routes, Play(expert_cache_for(silent, facts)))
            expected = replay(routes.passes, facts, facts.pages, silent).decode
            assert (played.hits, played.needed) == (expected.num_hits, expected.num_needed), (name, num_experts)
            assert played.late == played.read == expected.num_needed - expected.num_hits, (name, num_experts)
            assert played.num_tokens == N - NUM_PROMPT


def test_rows_that_are_read_are_those_that_an_expert_has_not() -> None:
    """Everything fits, so that the rows of an expert only grow; predicted experts are the two of the largest scores."""
    routes, rng = routes_of(3), np.random.default_rng(5)
    running, ahead = rng.random((2, N, L, E, F)) < 0.3
    rows = NeuronRows(running, ahead, below=1.1)
    facts = routes.facts(L * E)
    played = play(routes, Play(ExpertCache(facts, LRU(facts)), rows), best_of(routes.ahead, 2))
    resident: dict[tuple[int, int], set[int]] = {}
    total = late = selectors = 0
    for token in range(N):
        for l in range(L):
            for e in routes.passes.routes[token, l].tolist():
                is_prompt = token < NUM_PROMPT
                needed = set(range(F)) if is_prompt else set(np.flatnonzero(running[token, l, e]).tolist())
                if not is_prompt:
                    late += len(needed - resident.get((l, e), set()))
                    total += len(needed - resident.get((l, e), set()))
                    selectors += (l, e) not in resident
                resident[l, e] = resident.get((l, e), set()) | needed
            if token < NUM_PROMPT or l + 1 == L:
                continue
            for e in np.argsort(-routes.ahead[token, l + 1], kind="stable")[:2].tolist():
                guessed = set(np.flatnonzero(ahead[token, l + 1, e]).tolist())
                total += len(guessed - resident.get((l + 1, e), set()))
                selectors += (l + 1, e) not in resident
                resident[l + 1, e] = resident.get((l + 1, e), set()) | guessed
    assert played.records.sum(axis=(1, 2)) * F == pytest.approx([total, late])
    assert played.selectors[0].sum() == selectors
    sizes = ExpertSizes(np.full((L, E), 0.5), np.full((L, E), 2.0))
    assert played.read_sizes(sizes)[0] == pytest.approx((0.5 * selectors + 2 * total / F) / played.num_tokens)


def test_an_expert_of_which_enough_neurons_run_is_read_whole() -> None:
    routes = routes_of()
    half = np.zeros((N, L, E, F), bool)
    half[..., : F // 2] = True
    facts = routes.facts(4)
    for below, share in ((0.5, 1.0), (0.6, 0.5)):
        played = play(routes, Play(ExpertCache(facts, LRU(facts), keeps=False), NeuronRows(half, half, below)))
        assert played.records[0].sum() == pytest.approx(share * played.read)


def test_a_second_processor_takes_experts_that_are_then_not_read() -> None:
    routes, facts = routes_of(), routes_of().facts(4)

    def last_computed(computing: Sequence[float], loading: Sequence[float]) -> LoadOrCompute:
        places = range(len(computing))
        return LoadOrCompute(tuple(places[:-1]), tuple(places[-1:]))

    played = play(routes, Play(ExpertCache(facts, LRU(facts)), second=SecondProcessor(last_computed, 0.25)))
    assert played.needed == 2 * L * (N - NUM_PROMPT)
    assert played.hits + played.read + played.computed == played.needed
    assert played.read <= played.time <= played.read + 0.25 * played.computed
    assert played.computed > 0


def test_fifo_evicts_what_came_first() -> None:
    facts = facts_of((3, 5), 4)
    cache, queue, expected, found = ExpertCache(facts, FIFO(facts)), deque[tuple[int, int]](), [], []
    for layer_idx, experts in random_steps(1, (3, 5), 40):
        for event in cache.schedule(layer_idx, experts):
            found += [event.is_hit] if hasattr(event, "is_hit") else []
        key = (layer_idx, experts[0])
        expected.append(key in queue)
        if key not in queue:
            queue.append(key)
            if len(queue) > 4:
                queue.popleft()
    assert found == expected
    assert 0 < sum(found) < len(found)
