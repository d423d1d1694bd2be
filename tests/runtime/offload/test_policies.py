"""Each policy on its paper's rule and against a slow twin; the benchmarks' caches against the replay."""

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
from benchlib.playing import ExpertSizes, Play, best_of, play
from benchlib.routes import ModelRoutes, NeuronRows, popularity_of
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import case
from support.evictions import FIFO, LFU
from support.residencies import Steps, dropped, facts_of, fetched, hits, random_steps, resident, walk_all
from support.routings import random_routes

from moe_pack.calib.statistics import learn_paths
from moe_pack.runtime.offload import PRESETS, ExpertCache, ExpertKey, Passes, Preset, expert_cache_for
from moe_pack.runtime.offload.eviction import (
    LRU,
    Belady,
    EdgeMoE,
    Importance,
    LayerLRU,
    experts_to_start_with,
    placed_by_popularity,
)
from moe_pack.runtime.offload.replay import replay

SHAPE = (3, 4)
Victim = Callable[[int, Steps, set[ExpertKey]], ExpertKey]  # step, all steps, what may go: what goes


def test_edgemoe_weighs_how_often_against_how_far_ahead() -> None:
    """S = 4 layers, current I = 1: D is 3, 4, 1, 2. With f = 3, 3, 1, 1 the worths are 1, 3/4, 1, 1/2."""
    policy = EdgeMoE(replace(facts_of((4, 1), 4), popularity=np.zeros((4, 1), np.float32)))
    for layer_idx, times in enumerate([3, 3, 1, 1]):
        for _ in range(times):
            policy.routed(layer_idx, [0], None)
    np.testing.assert_array_equal(policy.worth(1)[:, 0], [1, 3 / 4, 1, 1 / 2])
    np.testing.assert_array_equal(policy.worth(3)[:, 0], [3, 3 / 2, 1 / 3, 1 / 4])


def test_edgemoe_begins_with_popularity_as_one_tokens_choices() -> None:
    """k = 2, popularity 3/4 and 1/4: f = 1.5 and 0.5; S = 1, so D = 1."""
    policy = EdgeMoE(facts_of((1, 2), 1, popularity=[[0.75, 0.25]], num_active=2))
    np.testing.assert_array_equal(policy.worth(0), [[1.5, 0.5]])


def test_edgemoe_counts_the_decoders_layers_and_no_use_of_an_encoder() -> None:
    """Two layers of an encoder, then S = 3 of the decoder, all used 6 times.

    In the decoder, from I = 3 (its second): D is 2, 3, 1, so 3, 2, 6. In the encoder, from I = 0: the decoder's layers
    are 2, 3 and 4 layers ahead, so 3, 2, 3/2. The encoder's own are worth 0 in both.
    """
    facts = replace(facts_of((5, 1), 5), popularity=np.zeros((5, 1), np.float32), num_encoder_layers=2)
    policy = EdgeMoE(facts)
    for layer_idx in range(5):
        for _ in range(6):
            policy.routed(layer_idx, [0], None)
    np.testing.assert_array_equal(policy.worth(3)[:, 0], [0, 0, 3, 2, 6])
    np.testing.assert_array_equal(policy.worth(0)[:, 0], [0, 0, 3, 2, 6 / 4])
    assert not EdgeMoE(replace(facts_of((5, 1), 5), num_encoder_layers=2)).worth(4)[:2].any(), "popularity or not"


def test_an_encoders_experts_fill_the_pages_in_order_and_popular_ones_the_rest() -> None:
    popularity = [[0.1, 0.9], [0.5, 0.5], [0.4, 0.6], [0.7, 0.3]]
    facts = replace(facts_of((4, 2), 6, popularity=popularity), num_encoder_layers=2)
    encoder = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert experts_to_start_with(facts) == [*encoder, (3, 0), (2, 1)]
    assert experts_to_start_with(replace(facts, num_pages=3)) == encoder[:3]
    one_stack = replace(facts, num_encoder_layers=0, num_pages=5)
    assert experts_to_start_with(one_stack) == [(0, 1), (3, 0), (2, 1), (1, 0), (1, 1)]
    # 0.1 takes 3 of 4 pages; 3.0 and 2.1 take 2 each and are skipped; 1.0 takes the last.
    sizes = np.array([[1, 3], [1, 1], [2, 2], [2, 1]])
    assert experts_to_start_with(replace(one_stack, pages=sizes, num_pages=4)) == [(0, 1), (1, 0)]


def test_what_a_cache_starts_with_is_resident_and_can_be_evicted() -> None:
    facts = facts_of((2, 2), 2, popularity=[[0.2, 0.8], [0.9, 0.1]])
    cache = expert_cache_for(PRESETS["edgemoe"], facts)
    assert cache.initial == (ExpertKey(1, 0), ExpertKey(0, 1)) and cache.free_pages == 0
    assert resident(cache) == set(cache.initial) and not cache.is_placed.any()
    assert dropped(walk_all(cache, [(0, [0])])) == [ExpertKey(0, 1)]
    for name in ("lru", "floe", "corm", "importance"):
        assert expert_cache_for(PRESETS[name], facts).initial == ()


def test_importance_is_the_mean_over_the_last_passes_of_all_experts() -> None:
    """n = 2. Scores of expert 0: 1, 1/2, 0: means 1, 3/4, 1/4. Expert 1, never chosen: 0, 1/2, 1: 0, 1/4, 3/4."""
    policy = Importance(facts_of((1, 2), 1), num_passes=2)
    means = []
    for scores in ([1, 0], [0.5, 0.5], [0, 1]):
        policy.routed(0, [0], np.array(scores, np.float32))
        means.append(policy.worth(0)[0].tolist())
    assert means == [[1, 0], [0.75, 0.25], [0.25, 0.75]]


def test_placing_takes_the_most_popular_of_all_layers_and_leaves_room_for_turns() -> None:
    """5 pages, one for turns: of 0.4, 0.4, 0.3, 0.3, 0.2, 0.2 | 0.1, 0.1 the first four, lower layers first."""
    facts = facts_of((2, 4), 5, popularity=[[0.1, 0.4, 0.3, 0.2], [0.3, 0.2, 0.1, 0.4]])
    assert placed_by_popularity(facts, 5) == [(0, 1), (1, 3), (0, 2), (1, 0)]
    assert placed_by_popularity(facts, 2) == [(0, 1), (1, 3)]
    assert placed_by_popularity(facts, 0) == []


def test_placing_passes_over_what_does_not_fit() -> None:
    """6 pages, 3 for turns of the largest; the most popular takes 2, the next 3 (too many), then one of 1."""
    facts = facts_of((1, 4), 6, pages=[[2, 3, 1, 1]], popularity=[[0.4, 0.3, 0.2, 0.1]])
    assert placed_by_popularity(facts, 6) == [(0, 0), (0, 2)]
    whole = replace(facts, num_pages=7)
    assert sorted(placed_by_popularity(whole, 7)) == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_fiddler_fetches_what_is_not_placed_each_time() -> None:
    facts = facts_of((1, 4), 3, popularity=[[0.1, 0.4, 0.3, 0.2]])
    residency = expert_cache_for(PRESETS["fiddler"], facts)
    events = walk_all(residency, [(0, [1]), (0, [0]), (0, [0]), (0, [2])])
    assert hits(events) == [True, False, False, True]
    assert fetched(events) == dropped(events) == [ExpertKey(0, 0)] * 2


def test_a_protected_share_stays_and_the_rest_goes_by_last_use() -> None:
    """Room for 4, half of it placed: 0.1 and 0.2. The other two pages see 0.0, 0.3, 0.4."""
    facts = facts_of((1, 5), 4, popularity=[[0.1, 0.4, 0.3, 0.1, 0.1]])
    residency = expert_cache_for(Preset("lru", "lru", placed_share=0.5), facts)
    assert dropped(walk_all(residency, [(0, [0]), (0, [3]), (0, [4])])) == [ExpertKey(0, 0)]
    assert {ExpertKey(0, 1), ExpertKey(0, 2)} <= resident(residency)


def fewest_misses(steps: Steps, room: int) -> int:
    """The least over all that might be dropped, by trying all of it."""
    keys = [ExpertKey(layer_idx, experts[0]) for layer_idx, experts in steps]

    @cache
    def least(step: int, held: frozenset[ExpertKey]) -> int:
        if step == len(keys):
            return 0
        if keys[step] in held:
            return least(step + 1, held)
        grown = held | {keys[step]}
        if len(grown) <= room:
            return 1 + least(step + 1, grown)
        return 1 + min(least(step + 1, grown - {victim}) for victim in held)

    return least(0, frozenset())


@given(seed=st.integers(0, 10**6), room=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_no_way_of_dropping_misses_less_than_belady(seed: int, room: int) -> None:
    steps = random_steps(seed, (2, 3), 7)
    facts = facts_of((2, 3), room)
    residency = ExpertCache(facts, Belady(facts, steps))
    assert hits(walk_all(residency, steps)).count(False) == fewest_misses(steps, room)


# Slow twins: who goes, from all that has happened, one expert a step and a page each.


def keys_of(steps: Steps) -> list[ExpertKey]:
    return [ExpertKey(layer_idx, experts[0]) for layer_idx, experts in steps]


def last_use(step: int, steps: Steps, key: ExpertKey) -> int:
    return max(i for i, used in enumerate(keys_of(steps[:step])) if used == key)


def lru_victim(step: int, steps: Steps, held: set[ExpertKey]) -> ExpertKey:
    return min(held, key=lambda key: last_use(step, steps, key))


def layer_lru_victim(step: int, steps: Steps, held: set[ExpertKey], room: int = 6) -> ExpertKey:
    share, own = room / SHAPE[0], {key for key in held if key.layer_idx == steps[step][0]}
    counts = Counter(key.layer_idx for key in held)
    over = {key for key in held if counts[key.layer_idx] > share}
    return lru_victim(step, steps, (own if len(own) + 1 > share else over) or held)


def lfu_victim(step: int, steps: Steps, held: set[ExpertKey]) -> ExpertKey:
    uses = Counter(keys_of(steps[:step]))
    return min(held, key=lambda key: (uses[key], last_use(step, steps, key)))


def fifo_victim(step: int, steps: Steps, held: set[ExpertKey], room: int = 6) -> ExpertKey:
    queue: list[ExpertKey] = []
    for key in keys_of(steps[:step]):
        queue = queue if key in queue else [*queue, key][-room:]
    return queue[0]


def edgemoe_victim(step: int, steps: Steps, held: set[ExpertKey]) -> ExpertKey:
    uses, current = Counter(keys_of(steps[: step + 1])), steps[step][0]
    ahead = {key: (key.layer_idx - current - 1) % SHAPE[0] + 1 for key in held}  # layers from now to its own
    return min(sorted(held), key=lambda key: (uses[key] + 1 / SHAPE[1]) / ahead[key])


def importance_victim(step: int, steps: Steps, held: set[ExpertKey]) -> ExpertKey:
    """Scores unknown: choices among the layer's last four passes, this one included."""
    past = defaultdict(list)
    for layer_idx, expert in keys_of(steps[: step + 1]):
        past[layer_idx].append(expert)

    def share(key: ExpertKey) -> float:
        recent = past[key.layer_idx][-4:]
        return recent.count(key.expert) / max(len(recent), 1)

    return min(sorted(held), key=share)


def test_a_policy_drops_what_its_slow_twin_drops() -> None:
    for policy, victim in [
        (LRU, lru_victim),
        (LayerLRU, layer_lru_victim),
        (LFU, lfu_victim),
        (FIFO, fifo_victim),
        (EdgeMoE, edgemoe_victim),
        (partial(Importance, num_passes=4), importance_victim),
    ]:
        with case(policy, victim):
            facts = facts_of(SHAPE, 6)
            for seed in range(12):
                steps, held = random_steps(seed, SHAPE, 40), set[ExpertKey]()
                residency, num_drops = ExpertCache(facts, policy(facts)), 0
                for step, (layer_idx, experts) in enumerate(steps):
                    key = ExpertKey(layer_idx, experts[0])
                    if key not in held and len(held) == facts.num_pages:
                        held.remove(victim(step, steps, held))
                        num_drops += 1
                    held.add(key)
                    list(residency.schedule(layer_idx, experts))
                    assert resident(residency) == held, (seed, step)
                assert num_drops > 5


def test_presets_say_what_their_papers_set() -> None:
    assert list(PRESETS) == ["lru", "floe", "corm", "fiddler", "edgemoe", "importance"]
    assert all(preset.name == name for name, preset in PRESETS.items())
    corm, fiddler = PRESETS["corm"], PRESETS["fiddler"]
    assert (corm.eviction, corm.rows_below, corm.reuse_selector) == ("layer_lru", 0.75, True)
    assert (fiddler.placed_share, fiddler.keeps, fiddler.num_predicted(2)) == (1.0, False, 0)
    assert (PRESETS["edgemoe"].num_predicted(8), PRESETS["importance"].num_predicted(8)) == (3, 8)


def test_every_eviction_by_its_name_drops_in_an_order_of_its_own() -> None:
    """Else names could be mixed up."""
    rng = random.Random(1)
    facts = facts_of((4, 8), 12, popularity=[[rng.random() for _ in range(8)] for _ in range(4)], num_active=2)
    steps, gone = random_steps(5, (4, 8), 50, k=2), {}
    for eviction in ("lru", "layer_lru", "edgemoe", "importance"):
        gone[eviction] = dropped(walk_all(expert_cache_for(Preset("lru", eviction), facts), steps))
    for one, other in itertools.combinations(gone, 2):
        assert gone[one] != gone[other], (one, other)


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
