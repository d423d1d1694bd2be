"""Residency: whatever the policy, the routes and the room, pages are counted right and what is needed is there."""

import random
from collections.abc import Sequence
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import case
from support.residencies import dropped, facts_of, fetched, hits, lru_residency, resident

from moe_pack.runtime.offload import PRESETS, CacheFacts, ExpertCache, ExpertKey, Preset, expert_cache_for
from moe_pack.runtime.offload.cache import ComputeEvent, Event, EvictEvent, FetchEvent
from moe_pack.runtime.offload.eviction import LRU
from moe_pack.runtime.offload.presets import EvictionName

EVICTIONS: tuple[EvictionName, ...] = get_args(EvictionName)
SHAPE = (3, 4)


class Watched:
    """Carries events out on sets of its own, and objects to what may not happen."""

    def __init__(self, facts: CacheFacts, residency: ExpertCache) -> None:
        self.facts = facts
        self.residency = residency
        self.held = resident(residency)
        self.placed = set(self.held)
        self.needed: set[ExpertKey] = set()  # by the running layer, and not computed yet

    def carry_out(self, event: Event) -> None:
        if isinstance(event, FetchEvent):
            assert event.key not in self.held, "what is in is not fetched"
            self.held.add(event.key)
        elif isinstance(event, EvictEvent):
            assert event.key in self.held and event.key not in self.placed | self.needed
            self.held.remove(event.key)
        else:
            assert event.key in self.held, "what is computed is in"
            self.needed.remove(event.key)
        used = sum(int(self.facts.pages[key]) for key in self.held)
        assert used + self.residency.free_pages == self.facts.num_pages and self.residency.free_pages >= 0
        assert self.held == resident(self.residency)

    def walk(self, layer_idx: int, experts: list[int], predicted: list[int] | None = None) -> None:
        """A layer; predicted experts of the next are asked for once it has begun."""
        keys = [ExpertKey(layer_idx, expert) for expert in experts]
        expected = {key: key in self.held for key in keys}
        self.needed = set(keys)
        computed, events = [], list[Event]()
        for event in self.residency.schedule(layer_idx, experts):
            self.carry_out(event)
            events.append(event)
            if isinstance(event, ComputeEvent):
                assert event.is_hit == expected[event.key], "a hit was there when the router spoke"
                computed.append(event.key)
            if predicted:
                self.prefetch(layer_idx + 1, predicted, layer_idx)
                predicted = None
        assert sorted(computed) == keys and not self.needed, "each is computed once"
        assert sorted(fetched(events)) == [key for key in keys if not expected[key]], "each is fetched once, if missing"
        assert not self.residency.is_locked.any()

    def prefetch(self, layer_idx: int, predicted: list[int], during: int) -> None:
        before = {ExpertKey(layer_idx, expert) for expert in predicted} & self.held
        for event in self.residency.prefetch(layer_idx, predicted, during):
            assert not isinstance(event, ComputeEvent)
            assert event.key not in before, "what is predicted and in stays"
            self.carry_out(event)


def random_facts(rng: random.Random, equal: bool) -> CacheFacts:
    L, E = SHAPE
    pages = [[1 if equal else rng.randint(1, 4) for _ in range(E)] for _ in range(L)]
    most, total = max(max(row) for row in pages), sum(map(sum, pages))
    popularity = [[rng.random() for _ in range(E)] for _ in range(L)]
    return facts_of(SHAPE, rng.randint(most, total), pages, popularity, num_active=2)


@pytest.mark.slow
@given(
    seed=st.integers(0, 10**6),
    eviction=st.sampled_from(EVICTIONS),
    placed_share=st.sampled_from([0.0, 0.3, 1.0]),
    keeps=st.booleans(),
    equal=st.booleans(),
)
@settings(max_examples=250, deadline=None)
def test_pages_locks_and_hits_are_right_with_any_policy_and_any_room(
    seed: int, eviction: EvictionName, placed_share: float, keeps: bool, equal: bool
) -> None:
    rng = random.Random(seed)
    facts = random_facts(rng, equal)
    watched = Watched(facts, expert_cache_for(Preset("lru", eviction, placed_share, keeps), facts))
    for _ in range(12):
        for layer_idx in range(SHAPE[0]):
            experts = sorted(rng.sample(range(SHAPE[1]), rng.randint(1, SHAPE[1])))
            predicted = rng.sample(range(SHAPE[1]), rng.randint(0, 3)) if layer_idx + 1 < SHAPE[0] else []
            watched.walk(layer_idx, experts, predicted)
            if layer_idx + 1 < SHAPE[0] and rng.random() < 0.3:
                abandon_one(watched, layer_idx + 1, predicted)


def abandon_one(watched: Watched, layer_idx: int, predicted: Sequence[int]) -> None:
    for key in (ExpertKey(layer_idx, expert) for expert in predicted):
        if key in watched.held - watched.placed:
            watched.residency.abandon(key)
            watched.held.remove(key)
            return


def test_with_room_for_all_each_expert_is_fetched_once_for_good() -> None:
    for name in PRESETS:
        with case(name):
            facts = facts_of((2, 3), 6, num_active=2)
            watched = Watched(facts, expert_cache_for(PRESETS[name], facts))
            for _ in range(4):
                for layer_idx in range(2):
                    watched.walk(layer_idx, [0, 2])
            assert all(list(hits(list(watched.residency.schedule(l, [0, 2])))) == [True, True] for l in range(2))


def test_with_everything_placed_no_room_is_kept_for_turns() -> None:
    facts = facts_of((2, 3), 6)
    residency = expert_cache_for(PRESETS["fiddler"], facts)
    assert residency.is_placed.all() and residency.free_pages == 0
    assert hits(list(residency.schedule(1, [0, 1, 2]))) == [True] * 3


def test_what_is_in_is_computed_first_while_the_others_are_fetched() -> None:
    """Room for 3. 1 and 2 are in; 0, 1, 3 are needed: 1 is run, 0 takes the free page, 3 takes 2's."""
    residency = lru_residency(facts_of((1, 4), 3))
    list(residency.schedule(0, [1, 2]))
    assert list(residency.schedule(0, [0, 1, 3])) == [
        FetchEvent(ExpertKey(0, 0)),
        EvictEvent(ExpertKey(0, 2)),
        FetchEvent(ExpertKey(0, 3)),
        ComputeEvent(ExpertKey(0, 1), True),
        ComputeEvent(ExpertKey(0, 0), False),
        ComputeEvent(ExpertKey(0, 3), False),
    ]


def test_with_room_for_one_each_is_dropped_for_the_next() -> None:
    residency = lru_residency(facts_of((1, 4), 1))
    assert list(residency.schedule(0, [0, 3])) == [
        FetchEvent(ExpertKey(0, 0)),
        ComputeEvent(ExpertKey(0, 0), False),
        EvictEvent(ExpertKey(0, 0)),
        FetchEvent(ExpertKey(0, 3)),
        ComputeEvent(ExpertKey(0, 3), False),
    ]


def test_what_is_not_kept_is_dropped_once_it_has_run_and_what_is_placed_stays() -> None:
    residency = lru_residency(facts_of((1, 4), 3), [ExpertKey(0, 1)], keeps=False)
    assert list(residency.schedule(0, [0, 1])) == [
        FetchEvent(ExpertKey(0, 0)),
        ComputeEvent(ExpertKey(0, 1), True),
        ComputeEvent(ExpertKey(0, 0), False),
        EvictEvent(ExpertKey(0, 0)),
    ]


def test_prediction_ends_where_only_what_the_running_layer_needs_is_left() -> None:
    """Room for 3, layer 0 needs 0 and 1: of what is predicted likeliest first, one finds room."""
    residency = lru_residency(facts_of((2, 4), 3))
    walk = residency.schedule(0, [0, 1])
    assert [next(walk), next(walk)] == [FetchEvent(ExpertKey(0, 0)), FetchEvent(ExpertKey(0, 1))]
    assert list(residency.prefetch(1, [3, 2], during=0)) == [FetchEvent(ExpertKey(1, 3))]
    assert fetched(list(walk)) == []


def test_an_abandoned_expert_is_out_and_gives_its_pages_back() -> None:
    residency = lru_residency(facts_of((2, 4), 3))
    list(residency.prefetch(1, [2], during=0))
    residency.abandon(ExpertKey(1, 2))
    assert residency.free_pages == 3 and not residency.is_resident.any()
    with pytest.raises(AssertionError, match="not needed now"):
        residency.abandon(ExpertKey(1, 2))


def test_room_for_less_than_the_largest_expert_is_refused() -> None:
    with pytest.raises(AssertionError, match="pages for the largest"):
        lru_residency(facts_of((1, 2), 3, [[1, 4]]))
    lru_residency(facts_of((1, 2), 4, [[1, 4]]))


def test_drops_are_told_to_the_policy() -> None:
    """Layers apart, two pages each. Layer 0 has its two; layer 1 fills and then gives up its own, not layer 0's."""
    residency = expert_cache_for(Preset("corm", "layer_lru"), facts_of((2, 4), 4))
    for layer_idx, expert in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        assert dropped(list(residency.schedule(layer_idx, [expert]))) == []
    assert dropped(list(residency.schedule(1, [2]))) == [ExpertKey(1, 0)]
    assert dropped(list(residency.schedule(1, [3]))) == [ExpertKey(1, 1)]


def test_a_walk_or_a_look_ahead_that_is_broken_off_leaves_nothing_locked() -> None:
    facts = CacheFacts(np.ones((2, 4), np.int64), 3, 2, np.full((2, 4), 0.25, np.float32))
    held = ExpertCache(facts, LRU(facts))
    walk = held.schedule(0, [0, 1, 2, 3])
    events = [next(walk) for _ in range(3)]
    assert all(isinstance(event, FetchEvent) for event in events) and held.is_locked.any()
    walk.close()
    assert not held.is_locked.any() and held.num_waiting == 0
    ahead = held.prefetch(1, [0, 1], during=0)
    next(ahead)
    ahead.close()
    assert not held.is_locked.any()
    computed = [event.key.expert for event in held.schedule(1, [0, 3]) if isinstance(event, ComputeEvent)]
    assert computed == [0, 3]
