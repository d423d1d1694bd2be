"""Writing down a run: a residency that notes what is asked of it, and what collects it into a record."""

from collections.abc import Generator, Iterable, Sequence
from pathlib import Path

import numpy as np

from moe_pack.runtime.policies import Preset, eviction_of, placed_by
from moe_pack.runtime.record import FORMAT, VERSION, Passes, Record, RecordFacts, Request, write_record
from moe_pack.runtime.residency import Array, CacheFacts, Compute, Event, Eviction, Key, Residency


class Recorder:
    """Collects a run in memory: 2 L k bytes a token, 8 L a pass and, with scores, 2 L E a pass; 24 an expert foretold.

    Args:    facts: what was known of the experts.   root: the pack's root digest.   policy: the preset's name.
             budget_bytes, context_tokens: what the pages come from.
             keeps_scores: whether mean scores are written down too; `Importance` needs them to be replayed.
    """

    def __init__(
        self,
        facts: CacheFacts,
        root: str,
        policy: str,
        budget_bytes: int,
        context_tokens: int,
        keeps_scores: bool,
    ) -> None:
        self._facts = RecordFacts(FORMAT, VERSION, root, policy, budget_bytes, context_tokens, facts.num_pages)
        self._popularity = facts.popularity
        self._num_active = facts.num_active
        self._keeps_scores = keeps_scores
        self._routes: list[Array] = []  # [T, k], layer by layer
        self._scores: list[Array] = []  # [E], likewise
        self._hits: list[int] = []
        self._needed: list[int] = []
        self._requests: list[Request] = []
        self._num_events = 0
        self._whole = (0, 0)  # events and requests by the end of the last whole pass

    def routed(self, layer_idx: int, routes: Array) -> None:
        """The router of a layer has chosen; to be told before its walk begins. routes: [T, k], whole numbers.

        A pass that was broken off, as by an error, is forgotten once the next begins.
        """
        if layer_idx == 0:
            self._forget_broken_pass()
        self._routes.append(routes.astype("<u2"))

    def walked(self, num_hits: int, num_needed: int, scores: Array | None) -> None:
        """A walk has come to its end."""
        self._hits.append(num_hits)
        self._needed.append(num_needed)
        if self._keeps_scores:
            assert scores is not None, "scores of every pass, or of none"
            self._scores.append(scores.astype("<f2"))
        if len(self._hits) % len(self._popularity) == 0:
            self._whole = (self._num_events, len(self._requests))

    def happened(self) -> None:
        """A walk gives an event, or ends."""
        self._num_events += 1

    def asked(self, layer_idx: int, experts: Sequence[int], during: int, is_abandoned: bool) -> None:
        """The engine asks for something beside walks."""
        self._requests.append(Request(self._num_events, layer_idx, tuple(experts), during, is_abandoned))

    def record(self) -> Record:
        """All whole forward passes so far."""
        self._forget_broken_pass()
        L, E = self._popularity.shape
        num_passes = len(self._hits) // L
        of_passes = [self._routes[start : start + L] for start in range(0, num_passes * L, L)]
        empty = np.empty((0, L, self._num_active), "<u2")
        passes = Passes(
            routes=np.concatenate([empty, *(np.stack(layers, axis=1) for layers in of_passes)]),
            chunks=np.array([len(layers[0]) for layers in of_passes], "<u4"),
            scores=np.array(self._scores, "<f2").reshape(num_passes, L, E) if self._keeps_scores else None,
            popularity=self._popularity.astype("<f4"),
        )
        hits, needed = (np.array(counts, "<u4").reshape(num_passes, L) for counts in (self._hits, self._needed))
        return Record(self._facts, passes, tuple(self._requests), hits, needed)

    def _forget_broken_pass(self) -> None:
        num_walks = len(self._hits) // len(self._popularity) * len(self._popularity)
        if len(self._routes) > num_walks:
            for walks in (self._routes, self._scores, self._hits, self._needed):
                del walks[num_walks:]
            self._num_events = self._whole[0]
            del self._requests[self._whole[1] :]

    def write(self, path: Path) -> None:
        """Writes the record, in the place of a file that is there.

        Raises:  RunError if the drive refuses.
        """
        write_record(self.record(), path)


class RecordedResidency(Residency):
    """A residency that writes down what is asked of it. The engine tells the recorder `routed` before each walk."""

    def __init__(
        self,
        facts: CacheFacts,
        eviction: Eviction,
        recorder: Recorder,
        placed: Iterable[Key] = (),
        keeps: bool = True,
    ) -> None:
        super().__init__(facts, eviction, placed, keeps)
        self._recorder = recorder

    def walk(self, layer_idx: int, experts: Sequence[int], scores: Array | None = None) -> Generator[Event, None, None]:
        """As `Residency.walk`."""
        num_hits = 0
        for event in super().walk(layer_idx, experts, scores):
            num_hits += isinstance(event, Compute) and event.is_hit
            self._recorder.happened()
            yield event
        self._recorder.happened()
        self._recorder.walked(num_hits, len(experts), scores)

    def ahead(self, layer_idx: int, experts: Sequence[int], during: int) -> Generator[Event, None, None]:
        """As `Residency.ahead`; to be taken to its end before the walk goes on."""
        self._recorder.asked(layer_idx, experts, during, False)
        yield from super().ahead(layer_idx, experts, during)

    def abandon(self, key: Key) -> None:
        """As `Residency.abandon`."""
        self._recorder.asked(key.layer_idx, (key.expert,), key.layer_idx, True)
        super().abandon(key)


def recorded_residency_for(preset: Preset, facts: CacheFacts, recorder: Recorder) -> RecordedResidency:
    """As `residency_for`, written down."""
    placed = placed_by(preset, facts)
    return RecordedResidency(facts, eviction_of(preset, facts), recorder, placed, preset.keeps)
