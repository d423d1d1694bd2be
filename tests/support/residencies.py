"""Facts for policies in tests, routes that show what matters, and walks carried out event by event."""

import random
from collections.abc import Sequence

import numpy as np

from moe_pack.runtime.offload import CacheFacts, ExpertCache, ExpertKey
from moe_pack.runtime.offload.cache import ComputeEvent, Event, EvictEvent, Eviction, FetchEvent
from moe_pack.runtime.offload.eviction import LRU

Steps = list[tuple[int, list[int]]]  # a layer and the experts it needs, rising


def facts_of(
    shape: tuple[int, int],
    num_pages: int,
    pages: Sequence[Sequence[int]] | None = None,
    popularity: Sequence[Sequence[float]] | None = None,
    num_active: int = 1,
) -> CacheFacts:
    """Experts of one page each, all alike popular, unless said otherwise."""
    L, E = shape
    return CacheFacts(
        pages=np.ones(shape, np.int64) if pages is None else np.array(pages, np.int64),
        num_pages=num_pages,
        num_active=num_active,
        popularity=np.array(popularity or [[1 / E] * E] * L, np.float32),
    )


def random_steps(seed: int, shape: tuple[int, int], num_passes: int, k: int = 1) -> Steps:
    """Forward passes of one token, with some experts chosen more often than others."""
    rng, (L, E) = random.Random(seed), shape
    weights = [[rng.random() ** 2 + 0.05 for _ in range(E)] for _ in range(L)]
    steps = []
    for _ in range(num_passes):
        for layer_idx in range(L):
            drawn: set[int] = set()
            while len(drawn) < k:
                drawn |= set(rng.choices(range(E), weights[layer_idx]))
            steps.append((layer_idx, sorted(drawn)))
    return steps


def walk_all(residency: ExpertCache, steps: Steps) -> list[Event]:
    """All that happens."""
    return [event for layer_idx, experts in steps for event in residency.schedule(layer_idx, experts)]


def fetched(events: Sequence[Event]) -> list[ExpertKey]:
    return [event.key for event in events if isinstance(event, FetchEvent)]


def dropped(events: Sequence[Event]) -> list[ExpertKey]:
    return [event.key for event in events if isinstance(event, EvictEvent)]


def hits(events: Sequence[Event]) -> list[bool]:
    return [event.is_hit for event in events if isinstance(event, ComputeEvent)]


def resident(residency: ExpertCache) -> set[ExpertKey]:
    return {ExpertKey(int(l), int(e)) for l, e in np.argwhere(residency.is_resident)}


def lru_residency(facts: CacheFacts, placed: Sequence[ExpertKey] = (), keeps: bool = True) -> ExpertCache:
    eviction: Eviction = LRU(facts)
    return ExpertCache(facts, eviction, placed, keeps)
