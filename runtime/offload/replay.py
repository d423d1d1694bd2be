"""Replay: routes played against a policy and a number of pages, without weights; Belady's optimum beside.

The decisions are the engine's own (`ExpertCache`), so that hits are the same where nothing is foretold, and where what
was foretold is recorded. Time is not played: what is foretold arrives.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np

from moe_pack.formats import RunError
from moe_pack.runtime.offload.cache import Array, CacheFacts, ComputeEvent, Event, ExpertCache, ExpertKey, FetchEvent
from moe_pack.runtime.offload.eviction import Belady
from moe_pack.runtime.offload.prefetch import PredictionName
from moe_pack.runtime.offload.presets import PRESETS, PolicyName, Preset, expert_cache_for
from moe_pack.runtime.offload.record import Passes, PrefetchRequest, Record

Foretelling = Literal["none", "recorded", "routes", "not replayable"]

# Hit rates so near each other, as shares, that the simpler policy is taken.
_TIE = 0.002
# A layer's experts of one token, below which `auto` foretells nothing: foretelling takes longer than reading them. With
# experts of 110 KB tokens took 7.5% longer (tests/bench/offloading.py overlap, the demo model; Intel Xeon, 2026-11-22).
_FORETOLD_BYTES = 1 << 20
# The fewer things a policy does, the earlier: what is preferred among equals.
_SIMPLEST_FIRST: tuple[PolicyName, ...] = ("lru", "fiddler", "corm", "edgemoe", "importance", "floe")


class PathShares(Protocol):
    """Path statistics: how likely experts are after those of the layers before."""

    def predict(self, l: int, before: Array) -> tuple[Array, Array]:
        """For tokens [N, p, k], the p <= 2 layers before l, oldest first: shares [N, E]; and what else is known."""
        ...


@dataclass(slots=True)
class ReplayCounts:
    """What some passes came to. `bytes_fetched` counts what was foretold too; `bytes_ahead` that alone."""

    num_tokens: int = 0
    num_needed: int = 0
    num_hits: int = 0
    bytes_fetched: int = 0
    bytes_ahead: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of experts that were in, or on their way, when their router spoke; 1 where none was needed."""
        return self.num_hits / self.num_needed if self.num_needed else 1.0

    @property
    def bytes_per_token(self) -> float:
        """Bytes fetched, per token."""
        return self.bytes_fetched / self.num_tokens if self.num_tokens else 0.0

    def tokens_per_second(self, read_rate: float, expert_seconds: float = 0.0) -> float:
        """Tokens a second where nothing overlaps: reading, at so many bytes a second, then computing each expert."""
        needed = self.num_needed / self.num_tokens if self.num_tokens else 0.0
        seconds = self.bytes_per_token / read_rate + needed * expert_seconds
        return 1 / seconds if seconds else float("inf")


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What came of a replay: passes of several tokens, and those of one.

    `foretelling`: where what was foretold came from; `not replayable`: the policy foretells, and nothing here can.
    """

    prefill: ReplayCounts = field(default_factory=ReplayCounts)
    decode: ReplayCounts = field(default_factory=ReplayCounts)
    foretelling: Foretelling = "none"


def replay(
    passes: Passes,
    facts: CacheFacts,
    extent_bytes: Array,
    preset: Preset,
    record: Record | None = None,
    paths: PathShares | None = None,
) -> ReplayResult:
    """Plays routes against a preset.

    What is foretold is taken from `record` where the run had this policy and these pages: all that it asked for. Else,
    in passes of one token, from the routes so far where the preset's prediction needs no more; it is then asked for
    once the layer before has all it needs.
    Args:    extent_bytes: int64 [L, E], what bringing each expert reads.   paths: for predictions from paths.
    """
    assert facts.pages.shape == (passes.routes.shape[1], passes.num_experts), "routes of this model"
    foretelling, prophet = _prophet(passes, facts, preset, record, paths)
    played = ReplayResult(foretelling=foretelling)
    _play(passes, expert_cache_for(preset, facts), extent_bytes, played, prophet)
    return played


def optimum(passes: Passes, facts: CacheFacts, extent_bytes: Array) -> ReplayResult:
    """The same with Belady's eviction, nothing placed and nothing foretold."""
    steps = [step for layers in passes.needed() for step in enumerate(layers)]
    played = ReplayResult()
    _play(passes, ExpertCache(facts, Belady(facts, steps)), extent_bytes, played, _NoPrefetch())
    return played


def auto_policy(
    passes: Passes, facts: CacheFacts, extent_bytes: Array
) -> tuple[PolicyName, dict[PolicyName, ReplayResult]]:
    """The policy to take for such routes, by `best_of`, and what all of them come to without foretelling.

    Foretelling is left out because most of it cannot be judged by routes, and what it brings is read all the same.
    `importance` is left out where scores are not known.
    """
    names = [name for name in _SIMPLEST_FIRST if name != "importance" or passes.scores is not None]
    table = {name: replay(passes, facts, extent_bytes, PRESETS[name].alone()) for name in names}
    return best_of(table), table


def auto_preset(passes: Passes | None, facts: CacheFacts, extent_bytes: Array) -> Preset:
    """What `--policy auto` runs: the policy that keeps best on such routes, and what foretells best.

    Without routes to choose by it keeps as EdgeMoE does: layers come in turn, and what was used longest ago is what the
    next layers need. Measured on synthetic packs (docs/benchmarks/offloading.md).
    """
    name: PolicyName = "edgemoe" if passes is None else auto_policy(passes, facts, extent_bytes)[0]
    token_bytes = facts.num_active * int(extent_bytes.max())
    prediction: PredictionName = "best" if token_bytes >= _FORETOLD_BYTES else "none"
    return replace(PRESETS[name], prediction=prediction, num_ahead=None, rows_below=0.0, reuse_selector=False)


def best_of(table: Mapping[PolicyName, ReplayResult]) -> PolicyName:
    """The policy with the highest hit rate on tokens decoded one by one; within 0.2 points the simplest."""
    best = max(played.decode.hit_rate for played in table.values())
    return next(name for name in _SIMPLEST_FIRST if name in table and table[name].decode.hit_rate >= best - _TIE)


class _NoPrefetch:
    """Foretells nothing."""

    def begin(self, residency: ExpertCache, pass_idx: int) -> Iterable[Event]:
        """What is asked for before a pass; carried out as it is taken."""
        return ()

    def speak(self, residency: ExpertCache, layer_idx: int, is_over: bool) -> Iterable[Event]:
        """What is asked for after an event of a layer's walk, or after its end; carried out as it is taken."""
        return ()


class _Recorded(_NoPrefetch):
    """Asks what a run asked, when it did."""

    def __init__(self, requests: Sequence[PrefetchRequest]) -> None:
        self._requests = deque(requests)
        self._num_events = 0

    def begin(self, residency: ExpertCache, pass_idx: int) -> Iterator[Event]:
        """All that is due: something only before the first pass, which no event precedes."""
        while self._requests and self._requests[0].after <= self._num_events:
            request = self._requests.popleft()
            if request.is_abandoned:
                self._abandon(residency, ExpertKey(request.layer_idx, request.experts[0]))
            else:
                yield from residency.ahead(request.layer_idx, request.experts, request.during)

    def speak(self, residency: ExpertCache, layer_idx: int, is_over: bool) -> Iterator[Event]:
        """All that came after as many events."""
        self._num_events += 1
        return self.begin(residency, layer_idx)

    def _abandon(self, residency: ExpertCache, key: ExpertKey) -> None:
        if not residency.is_resident[key] or residency.is_locked[key] or residency.is_placed[key]:
            raise RunError(
                f"record: abandons expert {key.expert} of MoE layer {key.layer_idx}, which was not on its way; "
                "record the run anew"
            )
        residency.abandon(key)


class _FromRoutes(_NoPrefetch):
    """Asks for the likeliest experts of the next layer, judged by the routes of the pass."""

    def __init__(self, passes: Passes, num_ahead: int, paths: PathShares | None) -> None:
        self._passes = passes
        self._num_ahead = num_ahead
        self._paths = paths
        self._starts = np.cumsum(passes.chunks, dtype=np.int64) - passes.chunks
        self._token: int | None = None

    def begin(self, residency: ExpertCache, pass_idx: int) -> Iterable[Event]:
        """Nothing; only passes of one token are foretold."""
        self._token = int(self._starts[pass_idx]) if self._passes.chunks[pass_idx] == 1 else None
        return ()

    def speak(self, residency: ExpertCache, layer_idx: int, is_over: bool) -> Iterable[Event]:
        """The next layer's, once a layer is over."""
        if not is_over or self._token is None or layer_idx + 1 == self._passes.routes.shape[1]:
            return ()
        best = np.argsort(-self._shares(layer_idx + 1, self._token), kind="stable")[: self._num_ahead]
        return residency.ahead(layer_idx + 1, best.tolist(), during=layer_idx)

    def _shares(self, layer_idx: int, token: int) -> Array:
        if self._paths is None:
            popularity: Array = self._passes.popularity[layer_idx]
            return popularity
        before = self._passes.routes[token : token + 1, max(layer_idx - 2, 0) : layer_idx]
        shares, _ = self._paths.predict(layer_idx, before)
        likeliest: Array = shares[0]
        return likeliest


def _prophet(
    passes: Passes, facts: CacheFacts, preset: Preset, record: Record | None, paths: PathShares | None
) -> tuple[Foretelling, _NoPrefetch]:
    num_ahead = preset.num_foretold(facts.num_active)
    if record is not None and (record.facts.policy, record.facts.num_pages) == (preset.name, facts.num_pages):
        return ("recorded", _Recorded(record.requests)) if record.requests else ("none", _NoPrefetch())
    if num_ahead == 0:
        return "none", _NoPrefetch()
    if preset.prediction == "popularity":
        return "routes", _FromRoutes(passes, num_ahead, None)
    if preset.prediction == "paths" and paths is not None:
        return "routes", _FromRoutes(passes, num_ahead, paths)
    return "not replayable", _NoPrefetch()


def _play(
    passes: Passes, residency: ExpertCache, extent_bytes: Array, played: ReplayResult, prophet: _NoPrefetch
) -> None:
    scores = passes.scores
    for pass_idx, layers in enumerate(passes.needed()):
        tally = played.decode if passes.chunks[pass_idx] == 1 else played.prefill
        tally.num_tokens += int(passes.chunks[pass_idx])
        _count_ahead(prophet.begin(residency, pass_idx), extent_bytes, tally)
        for layer_idx, experts in enumerate(layers):
            told = None if scores is None else scores[pass_idx, layer_idx]
            for event in residency.walk(layer_idx, experts, told):
                if isinstance(event, ComputeEvent):
                    tally.num_needed += 1
                    tally.num_hits += event.is_hit
                elif isinstance(event, FetchEvent):
                    tally.bytes_fetched += int(extent_bytes[event.key])
                _count_ahead(prophet.speak(residency, layer_idx, False), extent_bytes, tally)
            _count_ahead(prophet.speak(residency, layer_idx, True), extent_bytes, tally)


def _count_ahead(events: Iterable[Event], extent_bytes: Array, tally: ReplayCounts) -> None:
    for event in events:
        if isinstance(event, FetchEvent):
            tally.bytes_fetched += int(extent_bytes[event.key])
            tally.bytes_ahead += int(extent_bytes[event.key])
