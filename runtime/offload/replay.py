"""Replay: recorded routes run against a policy and a number of pages, without weights.

`ExpertCache` decides, as in a run. Therefore the hits are those of the run where nothing is predicted, and where the
predictions were recorded. Replay knows no time: every prefetch arrives.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from moe_pack.formats import RunError
from moe_pack.runtime.offload import eviction, presets
from moe_pack.runtime.offload.cache import Array, CacheFacts, ComputeEvent, Event, ExpertCache, ExpertKey, FetchEvent
from moe_pack.runtime.offload.record import Passes, PrefetchRequest, Recording

PredictionSource = Literal["none", "recorded", "routes", "not replayable"]

# Two hit rates, as shares, that differ by no more than this count as equal: the simpler policy is taken.
_TIE = 0.002


class PathShares(Protocol):
    """Path statistics: how likely experts are after those of the layers before."""

    def predict(self, l: int, before: Array) -> tuple[Array, Array]:
        """Returns shares [N, E] for tokens [N, p, k], the p <= 2 layers before l, oldest first; and one more array."""
        ...


@dataclass(slots=True)
class ReplayCounts:
    """The counts of some passes."""

    num_tokens: int = 0
    num_needed: int = 0
    num_hits: int = 0
    bytes_fetched: int = 0  # with prefetches
    bytes_ahead: int = 0  # of prefetches alone

    @property
    def hit_rate(self) -> float:
        """The share of needed experts that were resident or on their way; 1 if no expert was needed."""
        return self.num_hits / self.num_needed if self.num_needed else 1.0

    @property
    def bytes_per_token(self) -> float:
        """Bytes fetched, per token."""
        return self.bytes_fetched / self.num_tokens if self.num_tokens else 0.0

    def tokens_per_second(self, read_rate: float, expert_seconds: float = 0.0) -> float:
        """Returns tokens a second without overlap: first reading, at `read_rate` bytes a second, then each expert."""
        needed = self.num_needed / self.num_tokens if self.num_tokens else 0.0
        seconds = self.bytes_per_token / read_rate + needed * expert_seconds
        return 1 / seconds if seconds else float("inf")


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The counts of a replay."""

    prefill: ReplayCounts = field(default_factory=ReplayCounts)
    decode: ReplayCounts = field(default_factory=ReplayCounts)
    prediction: PredictionSource = "none"  # `not replayable`: the policy predicts from what routes do not tell


def replay(
    passes: Passes,
    facts: CacheFacts,
    extent_bytes: Array,
    preset: presets.Preset,
    record: Recording | None = None,
    paths: PathShares | None = None,
) -> ReplayResult:
    """Replays routes against a preset.

    If the recorded run had this policy and these pages, all its prefetches are replayed. Otherwise experts are
    predicted from the routes so far, in passes of one token, if the preset's prediction needs no more than routes; they
    are prefetched at the end of the layer before.
    Args:    extent_bytes: int64 [L, E], the bytes that fetching each expert reads.
    """
    assert facts.pages.shape == (passes.routes.shape[1], passes.num_experts), "routes of this model"
    source, prefetches = _prefetches(passes, facts, preset, record, paths)
    return _counted(passes, eviction.expert_cache_for(preset, facts), extent_bytes, prefetches, source)


def optimum(passes: Passes, facts: CacheFacts, extent_bytes: Array) -> ReplayResult:
    """Replays routes against Belady's eviction, which knows the future, without placement and without prediction."""
    steps = [step for layers in passes.needed() for step in enumerate(layers)]
    return _counted(passes, ExpertCache(facts, eviction.Belady(facts, steps)), extent_bytes, _NO_PREFETCH, "none")


def auto_policy(
    passes: Passes, facts: CacheFacts, extent_bytes: Array
) -> tuple[presets.PolicyName, dict[presets.PolicyName, ReplayResult]]:
    """Returns the best policy for such routes, by `best_of`, and the result of each policy without prediction.

    Routes alone do not tell most predictions, and prediction reads no fewer bytes. All policies begin with an empty
    cache, as the optimum does: they are compared by what they keep. A policy that needs scores is left out without
    scores.
    """
    names = [
        name for name in presets.SIMPLEST_FIRST if not presets.PRESETS[name].needs_scores or passes.scores is not None
    ]
    table = {name: replay(passes, facts, extent_bytes, presets.PRESETS[name].without_prediction()) for name in names}
    return best_of(table), table


def best_of(table: Mapping[presets.PolicyName, ReplayResult]) -> presets.PolicyName:
    """Returns the policy with the highest hit rate in decode; of those within 0.2 points of it, the simplest."""
    best = max(result.decode.hit_rate for result in table.values())
    return next(name for name in presets.SIMPLEST_FIRST if name in table and table[name].decode.hit_rate >= best - _TIE)


class _NoPrefetch:
    """Prefetches nothing. Both methods yield events of the cache, which carries out each before it gives the next."""

    def before_pass(self, cache: ExpertCache, pass_idx: int) -> Iterable[Event]:
        return ()

    def after_event(self, cache: ExpertCache, layer_idx: int, is_over: bool) -> Iterable[Event]:
        """Prefetches after an event of a layer's schedule, or after its end (`is_over`)."""
        return ()


_NO_PREFETCH = _NoPrefetch()


class _RecordedPrefetch(_NoPrefetch):
    """Repeats the requests of a run, each after as many events as in the run."""

    def __init__(self, requests: Sequence[PrefetchRequest]) -> None:
        self._requests = deque(requests)
        self._num_events = 0

    def before_pass(self, cache: ExpertCache, pass_idx: int) -> Iterator[Event]:
        while self._requests and self._requests[0].after <= self._num_events:
            request = self._requests.popleft()
            if request.is_abandoned:
                self._abandon(cache, ExpertKey(request.layer_idx, request.experts[0]))
            else:
                yield from cache.prefetch(request.layer_idx, request.experts, request.during)

    def after_event(self, cache: ExpertCache, layer_idx: int, is_over: bool) -> Iterator[Event]:
        self._num_events += 1
        return self.before_pass(cache, layer_idx)

    def _abandon(self, cache: ExpertCache, key: ExpertKey) -> None:
        if not cache.is_resident[key] or cache.is_locked[key] or cache.is_placed[key]:
            raise RunError(
                f"recording: it abandons expert {key.expert} of MoE layer {key.layer_idx}, which was not on its way; "
                "record the run again"
            )
        cache.abandon(key)


class _RoutePrefetch(_NoPrefetch):
    """Prefetches the likeliest experts of the next layer, by the routes of the pass; only in passes of one token."""

    def __init__(self, passes: Passes, num_predicted: int, paths: PathShares | None) -> None:
        self._passes = passes
        self._num_predicted = num_predicted
        self._paths = paths
        self._starts = np.cumsum(passes.chunks, dtype=np.int64) - passes.chunks
        self._token: int | None = None

    def before_pass(self, cache: ExpertCache, pass_idx: int) -> Iterable[Event]:
        self._token = int(self._starts[pass_idx]) if self._passes.chunks[pass_idx] == 1 else None
        return ()

    def after_event(self, cache: ExpertCache, layer_idx: int, is_over: bool) -> Iterable[Event]:
        if not is_over or self._token is None or layer_idx + 1 == self._passes.routes.shape[1]:
            return ()
        best = np.argsort(-self._shares(layer_idx + 1, self._token), kind="stable")[: self._num_predicted]
        return cache.prefetch(layer_idx + 1, best.tolist(), during=layer_idx)

    def _shares(self, layer_idx: int, token: int) -> Array:
        shares: Array = self._passes.popularity[layer_idx]
        if self._paths is not None:
            before = self._passes.routes[token : token + 1, max(layer_idx - 2, 0) : layer_idx]
            shares = self._paths.predict(layer_idx, before)[0][0]
        return shares


def _prefetches(
    passes: Passes, facts: CacheFacts, preset: presets.Preset, record: Recording | None, paths: PathShares | None
) -> tuple[PredictionSource, _NoPrefetch]:
    num_predicted = preset.num_predicted(facts.num_active)
    if record is not None and (record.facts.policy, record.facts.num_pages) == (preset.name, facts.num_pages):
        return ("recorded", _RecordedPrefetch(record.requests)) if record.requests else ("none", _NO_PREFETCH)
    if num_predicted == 0:
        return "none", _NO_PREFETCH
    if preset.prediction == "popularity":
        return "routes", _RoutePrefetch(passes, num_predicted, None)
    if preset.prediction == "paths" and paths is not None:
        return "routes", _RoutePrefetch(passes, num_predicted, paths)
    return "not replayable", _NO_PREFETCH


def played(
    passes: Passes, expert_cache: ExpertCache, prefetches: _NoPrefetch = _NO_PREFETCH
) -> Iterator[tuple[int, int, Event, bool]]:
    """Yields the events of all passes with pass and layer, and whether each is of a prefetch."""
    for pass_idx, layers in enumerate(passes.needed()):
        yield from ((pass_idx, 0, event, True) for event in prefetches.before_pass(expert_cache, pass_idx))
        for l, experts in enumerate(layers):
            scores = None if passes.scores is None else passes.scores[pass_idx, l]
            for event in expert_cache.schedule(l, experts, scores):
                yield pass_idx, l, event, False
                yield from ((pass_idx, l, ahead, True) for ahead in prefetches.after_event(expert_cache, l, False))
            yield from ((pass_idx, l, ahead, True) for ahead in prefetches.after_event(expert_cache, l, True))


def _counted(
    passes: Passes, expert_cache: ExpertCache, extent_bytes: Array, prefetches: _NoPrefetch, source: PredictionSource
) -> ReplayResult:
    result = ReplayResult(prediction=source)
    by_pass = [result.decode if is_decode else result.prefill for is_decode in passes.is_decode]
    for counts, num_tokens in zip(by_pass, passes.chunks.tolist(), strict=True):
        counts.num_tokens += num_tokens
    for pass_idx, _, event, is_ahead in played(passes, expert_cache, prefetches):
        counts = by_pass[pass_idx]
        if isinstance(event, ComputeEvent):
            counts.num_needed += 1
            counts.num_hits += event.is_hit
        elif isinstance(event, FetchEvent):
            num_bytes = int(extent_bytes[event.key])
            counts.bytes_fetched += num_bytes
            counts.bytes_ahead += num_bytes * is_ahead
    return result
