"""Which experts are in fast memory: bookkeeping alone. The engine moves bytes by it, and replay counts by it.

An expert is in or out as a whole, and takes a number of pages. Nothing here depends on time: the same routes, and the
same foretold experts, give the same decisions. How they are carried out is the engine's affair (`streaming`), what is
worth keeping the policy's (`policies`).
"""

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class ExpertKey(NamedTuple):
    """An expert of the `layer_idx`-th MoE layer."""

    layer_idx: int
    expert: int


class FetchEvent(NamedTuple):
    """Bring this expert in; it has been given its pages."""

    key: ExpertKey


class EvictEvent(NamedTuple):
    """This expert's pages are free from now on."""

    key: ExpertKey


class ComputeEvent(NamedTuple):
    """Run this expert for its tokens. `is_hit`: it was there, or on its way, when the router spoke."""

    key: ExpertKey
    is_hit: bool


Event = FetchEvent | EvictEvent | ComputeEvent


@dataclass(frozen=True, slots=True, eq=False)
class CacheFacts:
    """What there is to place: `pages` int64 [L, E], what each expert takes; `num_pages` of fast memory.

    `num_active`: experts a token.   `popularity` float32 [L, E]: each expert's share of its layer's choices, as a
    profile measured it; uniform where there is none.
    """

    pages: Array
    num_pages: int
    num_active: int
    popularity: Array


class Eviction(Protocol):
    """What is worth keeping: told of everything that happens, asked when room is needed."""

    def routed(self, layer_idx: int, experts: Sequence[int], scores: Array | None) -> None:
        """The router of a layer has chosen these experts for the tokens of a forward pass.

        Args:    experts: rising, each once.   scores: float32 [E], its mean scores over the tokens; None where they are
                 not known.
        """
        ...

    def used(self, key: ExpertKey) -> None:
        """An expert has been computed."""
        ...

    def fetched(self, key: ExpertKey) -> None:
        """An expert is being brought in, foretold or needed."""
        ...

    def dropped(self, key: ExpertKey) -> None:
        """An expert is out again."""
        ...

    def worth(self, layer_idx: int) -> Array:
        """How much each expert is worth keeping while `layer_idx` runs: [L, E]; the least goes first.

        Among equals the first does: of the lowest layer, then the lowest expert.
        """
        ...


class ExpertCache:
    """The experts in fast memory. `placed` are in from the start and stay.

    `is_resident`, `is_locked` bool [L, E]: locked ones are needed before the forward pass leaves its layer.
    `num_waiting`: experts that the layer needs and for which there has been no room yet.
    """

    def __init__(
        self, facts: CacheFacts, eviction: Eviction, placed: Iterable[ExpertKey] = (), keeps: bool = True
    ) -> None:
        """`keeps`: whether experts that were needed stay; without, only the placed ones do."""
        self.facts = facts
        self.is_resident = np.zeros(facts.pages.shape, bool)
        self.is_locked = np.zeros(facts.pages.shape, bool)
        self.free_pages = facts.num_pages
        self.num_waiting = 0
        self.is_placed = np.zeros(facts.pages.shape, bool)
        self._eviction = eviction
        self._keeps = keeps
        for key in placed:
            self._take(key)
            self.is_placed[key] = True
        largest = int(facts.pages.max(initial=0, where=~self.is_placed))
        assert self.free_pages >= largest, "what is not placed takes turns in room for its largest at least"

    def walk(self, layer_idx: int, experts: Sequence[int], scores: Array | None = None) -> Generator[Event, None, None]:
        """What happens when the router of a layer has chosen `experts` (rising, each once), in this order.

        Those that are in come first; meanwhile the others are fetched, as many at once as there is room beside what
        this layer still needs. Each is computed once. The caller carries out every event before it takes the next.
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
                    yield from self._bring(waiting.popleft(), layer_idx)
                self.num_waiting = len(waiting)
                assert self.is_resident[key], "whatever came before is unlocked, so that there is room"
                yield ComputeEvent(key, is_hit)
                self._eviction.used(key)
                self.is_locked[key] = False
                if not (self._keeps or self.is_placed[key]):
                    yield self._drop(key)
        finally:  # an error, or Ctrl-C, may end it before its time
            self.num_waiting = 0
            for key in keys:
                self.is_locked[key] = False

    def ahead(self, layer_idx: int, experts: Sequence[int], during: int) -> Generator[Event, None, None]:
        """What happens to bring in foretold `experts` of a layer, likeliest first, while the layer `during` runs.

        What that layer needs, and what is foretold and in, is not dropped for it; once there is no room, it ends.
        """
        keys = [ExpertKey(layer_idx, expert) for expert in experts]
        held = [key for key in keys if self.is_resident[key] and not self.is_locked[key]]
        for key in held:
            self.is_locked[key] = True
        try:
            for key in keys:
                if self.is_resident[key]:
                    continue
                if not self._fits(key, during):
                    break
                held.append(key)
                yield from self._bring(key, during)
        finally:
            for key in held:
                self.is_locked[key] = False

    def abandon(self, key: ExpertKey) -> None:
        """A foretold expert that was not chosen, and of which not all has arrived, is out again."""
        assert self.is_resident[key] and not (self.is_locked[key] or self.is_placed[key]), "it is not needed now"
        self._drop(key)

    def _bring(self, key: ExpertKey, layer_idx: int) -> Iterator[Event]:
        while self.free_pages < self.facts.pages[key]:
            yield self._drop(self._least(self._eviction.worth(layer_idx)))
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
        assert not self.is_resident[key] and self.free_pages >= self.facts.pages[key], "what fits is brought in once"
        self.free_pages -= int(self.facts.pages[key])
        self.is_resident[key] = True

    def _drop(self, key: ExpertKey) -> EvictEvent:
        self.free_pages += int(self.facts.pages[key])
        self.is_resident[key] = self.is_locked[key] = False
        self._eviction.dropped(key)
        return EvictEvent(key)
