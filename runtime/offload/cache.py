"""The expert cache: which experts are in fast memory. It decides; the engine moves the bytes, and replay counts.

An expert is resident as a whole or not at all. Nothing here depends on time: the same routes and the same predictions
give the same decisions.
"""

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class ExpertKey(NamedTuple):
    """An expert of the `layer_idx`-th MoE layer."""

    layer_idx: int
    expert: int


class FetchEvent(NamedTuple):
    """Fetch this expert: it has its pages now."""

    key: ExpertKey


class EvictEvent(NamedTuple):
    """Free this expert's pages."""

    key: ExpertKey


class ComputeEvent(NamedTuple):
    """Run this expert for its tokens. `is_hit`: it was resident or on its way when the router chose it."""

    key: ExpertKey
    is_hit: bool


Event = FetchEvent | EvictEvent | ComputeEvent
Events = Generator[Event, None, None]


@dataclass(frozen=True, slots=True, eq=False)
class CacheFacts:
    """The facts that a policy knows before a run."""

    pages: Array  # int64 [L, E], of each expert
    num_pages: int  # of fast memory
    num_active: int  # experts a token
    popularity: Array  # float32 [L, E], shares of a layer's choices in the profile; uniform without a profile
    num_encoder_layers: int = 0  # the first MoE layers, if an encoder has them and the decoder has others
    is_elsewhere: Array | None = None  # bool [L, E], experts that a GPU has and computes; None: it has none


class Eviction:
    """An eviction policy: it observes all events, and says how much each expert is worth keeping.

    A policy overrides the observations that it needs; the others do nothing.
    """

    def routed(self, layer_idx: int, experts: Sequence[int], scores: Array | None) -> None:
        """Observes that the router of a layer has chosen these experts for the tokens of a forward pass.

        Args:    experts: ascending, each once.   scores: float32 [E], the router's mean scores over the tokens; None if
                 they are not known.
        """

    def used(self, key: ExpertKey) -> None:
        """Observes that an expert has been computed."""

    def fetched(self, key: ExpertKey) -> None:
        """Observes that an expert is being fetched, because it is needed or predicted."""

    def evicted(self, key: ExpertKey) -> None:
        """Observes that an expert is no longer resident."""

    def worth(self, layer_idx: int) -> Array:
        """Returns how much each expert is worth keeping while `layer_idx` runs: [L, E].

        The expert with the least is evicted first; among equals that of the lowest layer, then the lowest expert.
        """
        raise NotImplementedError


class ExpertCache:
    """The experts in fast memory. Placed experts are resident for the whole run; initial ones until they are evicted.

    Args:    keeps: whether experts stay after they have run; otherwise only the placed ones do.
    """

    def __init__(
        self,
        facts: CacheFacts,
        eviction: Eviction,
        placed: Iterable[ExpertKey] = (),
        keeps: bool = True,
        initial: Sequence[ExpertKey] = (),
    ) -> None:
        self.facts = facts
        self.is_resident = np.zeros(facts.pages.shape, bool)  # [L, E], as the next two
        self.is_locked = np.zeros(facts.pages.shape, bool)  # needed before the forward pass leaves its layer
        self.is_placed = np.zeros(facts.pages.shape, bool)
        self.free_pages = facts.num_pages
        self.num_waiting = 0  # experts that the running layer needs and that have no pages yet
        self._eviction = eviction
        self._keeps = keeps
        for key in placed:
            self._take(key)
            self.is_placed[key] = True
        largest = int(facts.pages.max(initial=0, where=~self.is_placed))
        assert self.free_pages >= largest, "the other experts need pages for the largest of them"
        self.initial = tuple(initial)  # in the order in which they are to be fetched
        for key in self.initial:
            self._take(key)
            eviction.fetched(key)

    def schedule(self, layer_idx: int, experts: Sequence[int], scores: Array | None = None) -> Events:
        """Yields what to do, in order, after the router of a layer has chosen `experts` (ascending, each once).

        Resident experts are computed first. Meanwhile the others are fetched, as many at once as fit next to the
        experts that the layer still needs. The caller carries out an event before it takes the next.
        """
        self._eviction.routed(layer_idx, experts, scores)
        keys = [ExpertKey(layer_idx, expert) for expert in experts]
        hits = [key for key in keys if self.is_resident[key]]
        waiting = deque(key for key in keys if not self.is_resident[key])
        order = [(key, True) for key in hits] + [(key, False) for key in waiting]
        for key in hits:
            self.is_locked[key] = True
        try:
            for key, is_hit in order:
                while waiting and self._fits(waiting[0], layer_idx):
                    yield from self._fetch(waiting.popleft(), layer_idx)
                self.num_waiting = len(waiting)
                assert self.is_resident[key], "the experts before it are unlocked, so that it fits"
                yield ComputeEvent(key, is_hit)
                self._eviction.used(key)
                self.is_locked[key] = False
                if not (self._keeps or self.is_placed[key]):
                    yield self._evict(key)
        finally:  # an error or Ctrl-C may close the generator early
            self.num_waiting = 0
            for key in keys:
                self.is_locked[key] = False

    def prefetch(self, layer_idx: int, experts: Sequence[int], during: int) -> Events:
        """Yields what to do to prefetch predicted `experts` of a layer, likeliest first, while layer `during` runs.

        It fetches none that a GPU computes, and evicts neither the experts that the running layer needs nor resident
        predicted ones; it ends at the first expert that does not fit.
        """
        elsewhere = self.facts.is_elsewhere
        keys = [ExpertKey(layer_idx, e) for e in experts if elsewhere is None or not elsewhere[layer_idx, e]]
        locked = [key for key in keys if self.is_resident[key] and not self.is_locked[key]]
        for key in locked:
            self.is_locked[key] = True
        try:
            for key in keys:
                if self.is_resident[key]:
                    continue
                if not self._fits(key, during):
                    break
                locked.append(key)
                yield from self._fetch(key, during)
        finally:
            for key in locked:
                self.is_locked[key] = False

    def abandon(self, key: ExpertKey) -> None:
        """Evicts a predicted expert that was not chosen and has not arrived completely."""
        assert self.is_resident[key] and not (self.is_locked[key] or self.is_placed[key]), "it is not needed now"
        self._evict(key)

    def _fetch(self, key: ExpertKey, layer_idx: int) -> Iterator[Event]:
        while self.free_pages < self.facts.pages[key]:
            yield self._evict(self._least(self._eviction.worth(layer_idx)))
        self._take(key)
        self.is_locked[key] = True
        self._eviction.fetched(key)
        yield FetchEvent(key)

    def _evictable(self) -> Array:
        evictable: Array = self.is_resident & ~self.is_locked & ~self.is_placed
        return evictable

    def _fits(self, key: ExpertKey, layer_idx: int) -> bool:
        needed = self.facts.pages[key] - self.free_pages
        return bool(needed <= 0 or self.facts.pages[self._evictable()].sum() >= needed)

    def _least(self, worth: Array) -> ExpertKey:
        place = int(np.argmin(np.where(self._evictable(), worth, np.inf)))
        return ExpertKey(*divmod(place, worth.shape[1]))

    def _take(self, key: ExpertKey) -> None:
        assert not self.is_resident[key] and self.free_pages >= self.facts.pages[key], "it is fetched once, and fits"
        self.free_pages -= int(self.facts.pages[key])
        self.is_resident[key] = True

    def _evict(self, key: ExpertKey) -> EvictEvent:
        self.free_pages += int(self.facts.pages[key])
        self.is_resident[key] = self.is_locked[key] = False
        self._eviction.evicted(key)
        return EvictEvent(key)
