"""Recordings of runs: the routers' choices, pass by pass, and the prefetches; `--record` writes them for replay.

The file is a safetensors file, described in docs/moe-pack.md; nothing in it is trusted. `Recording` is its content,
`Recorder` collects one in memory, and `RecordedExpertCache` is a cache that reports its calls to the recorder.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.formats.base import json_files, sync_folder
from moe_pack.formats.pack import safetensors
from moe_pack.runtime.offload import cache, eviction
from moe_pack.runtime.offload.presets import Preset

FORMAT: Literal["moe-pack record"] = "moe-pack record"
VERSION = 1
_MAX_FACTS_BYTES = 1 << 16
_DTYPES = {"U8": "<u1", "U16": "<u2", "U32": "<u4", "F16": "<f2", "F32": "<f4"}
_NAMES = {np.dtype(code): name for name, code in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class RecordingFacts:
    """How a recording was made."""

    format: Literal["moe-pack record"]
    version: int
    root: str  # digest of the pack
    policy: str  # the preset's name
    budget_bytes: json_files.Count
    context_tokens: json_files.Positive
    num_pages: json_files.Count


@dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """The routes of C forward passes with N tokens together."""

    routes: cache.Array  # u16 [N, L, k]
    chunks: cache.Array  # u32 [C], tokens of each pass
    scores: cache.Array | None  # f16 [C, L, E], the mean scores that policies got in each pass; None if not known
    popularity: cache.Array  # f32 [L, E], as in `CacheFacts`
    # u8 [C], 1 for passes of decode, whose tokens may be those of several sequences, or of a draft; None: passes of one
    # token are of decode.
    decode: cache.Array | None = None

    @property
    def is_decode(self) -> NDArray[np.bool_]:
        """The passes that are of decode: bool [C]."""
        found: NDArray[np.bool_] = self.chunks == 1 if self.decode is None else self.decode == 1
        return found

    @property
    def num_experts(self) -> int:
        """Experts a layer."""
        return int(self.popularity.shape[1])

    def needed(self) -> Iterator[list[list[int]]]:
        """Yields for each pass the experts that each layer needs, ascending, each once."""
        ends = np.cumsum(self.chunks, dtype=np.int64)
        for start, end in zip((ends - self.chunks).tolist(), ends.tolist(), strict=True):
            if end - start == 1:
                yield np.sort(self.routes[start], axis=1).tolist()
            else:
                yield [np.unique(layer).tolist() for layer in self.routes[start:end].swapaxes(0, 1)]


class PrefetchRequest(NamedTuple):
    """A call of an engine to its cache: to prefetch experts, likeliest first, or to abandon one."""

    after: int  # events of all schedules before it; the end of a schedule counts as an event
    layer_idx: int
    experts: tuple[int, ...]
    during: int
    is_abandoned: bool


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A recorded run."""

    facts: RecordingFacts
    passes: Passes
    requests: tuple[PrefetchRequest, ...]  # in order
    hits: cache.Array  # u32 [C, L], as the run counted them
    needed: cache.Array  # likewise


def check_writable(path: Path) -> None:
    """Checks, before a run, that its recording can be written at `path`; the disk may still be full later.

    Raises:  RunError if it cannot be written.
    """
    temporary = _temporary(path)
    try:
        if path.exists() and not path.is_file():
            raise formats.RunError(f"{path}: is no regular file; give another path")
        with temporary.open("wb"):
            temporary.unlink()
    except OSError as fault:
        raise formats.RunError(f"{path}: cannot be written ({fault.strerror}); give another path") from fault


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp")


def write_recording(recording: Recording, path: Path) -> None:
    """Writes a recording into a temporary file in the same folder and renames it.

    Raises:  RunError if it cannot be written.
    """
    passes = recording.passes
    # One row an expert: after, number of the request, layer_idx, expert, during, is_abandoned.
    requests = [
        (r.after, number, r.layer_idx, expert, r.during, int(r.is_abandoned))
        for number, r in enumerate(recording.requests)
        for expert in r.experts
    ]
    arrays: dict[str, cache.Array] = {
        "facts": np.frombuffer(formats.canonical(formats.dump(recording.facts)), "<u1"),
        "routes": passes.routes,
        "chunks": passes.chunks,
        "popularity": passes.popularity,
        "hits": recording.hits,
        "needed": recording.needed,
        "requests": np.array(requests, "<u4").reshape(-1, 6),
    }
    if passes.scores is not None:
        arrays["scores"] = passes.scores
    if passes.decode is not None:
        arrays["decode"] = passes.decode
    raw = safetensors.assemble((name, _NAMES[array.dtype], array) for name, array in arrays.items())
    temporary = _temporary(path)
    try:
        try:
            with temporary.open("wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:  # a signal's exception too
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as fault:
        raise formats.RunError(f"{path}: cannot be written ({fault.strerror}); give another path") from fault


def read_recording(path: Path) -> Recording:
    """Reads a recording and checks all of it. Raises RunError, which says the first fault."""
    arrays, place = _read_arrays(path), path.name
    raw = arrays["facts"].tobytes()
    if len(raw) > _MAX_FACTS_BYTES:
        raise formats.RunError(
            f"{place}: tensor 'facts' has {len(raw)} bytes, expected at most {_MAX_FACTS_BYTES}; record the run again"
        )
    values = formats.parse(raw, f"{place}: facts", formats.RunError)
    if not isinstance(values, dict) or values.get("format") != FORMAT or values.get("version") != VERSION:
        raise formats.RunError(f"{place}: expected format {FORMAT!r}, version {VERSION}; record the run again")
    facts = formats.load(RecordingFacts, values, f"{place}: facts", formats.RunError)
    _check_values(arrays, place)
    popularity, decode = arrays["popularity"], arrays.get("decode")
    passes = Passes(arrays["routes"], arrays["chunks"], arrays.get("scores"), popularity, decode)
    return Recording(facts, passes, _requests_of(arrays, place), arrays["hits"], arrays["needed"])


def _read_arrays(path: Path) -> dict[str, cache.Array]:
    """Reads the tensors of a recording: exactly those that it has, with fitting dtypes and shapes."""
    place = path.name
    entries = {
        entry.name: entry
        for entry in safetensors.read_header(path, formats.RunError)
        if not entry.name.startswith("pad.")
    }
    shapes = {name: entry.shape for name, entry in entries.items()}
    if "routes" not in shapes or "chunks" not in shapes or "popularity" not in shapes:
        raise formats.RunError(f"{place}: routes, chunks or popularity are missing; give a file of moe-run --record")
    N, C = (shapes[name][0] if shapes[name] else -1 for name in ("routes", "chunks"))
    L, E = shapes["popularity"] if len(shapes["popularity"]) == 2 else (-1, -1)
    k = shapes["routes"][-1] if shapes["routes"] else -1
    expected_forms: dict[str, tuple[str, tuple[int, ...] | None]] = {
        "facts": ("U8", None),
        "routes": ("U16", (N, L, k)),
        "chunks": ("U32", (C,)),
        "popularity": ("F32", (L, E)),
        "hits": ("U32", (C, L)),
        "needed": ("U32", (C, L)),
        "requests": ("U32", None),
    }
    if "scores" in entries:
        expected_forms["scores"] = ("F16", (C, L, E))
    if "decode" in entries:
        expected_forms["decode"] = ("U8", (C,))
    for name in [*expected_forms, *entries]:
        if name not in expected_forms or name not in entries:
            state = "unknown" if name in entries else "missing"
            raise formats.RunError(f"{place}: tensor {name!r} is {state}; record the run again")
        dtype, shape = expected_forms[name]
        entry = entries[name]
        fits = entry.shape == shape if shape else len(entry.shape) == (2 if name == "requests" else 1)
        if entry.dtype != dtype or not fits:
            expected = f"{dtype} {list(shape)}" if shape else f"{dtype}, a list"
            found = f"{entry.dtype} {list(entry.shape)}"
            raise formats.RunError(f"{place}: tensor {name!r} is {found}, expected {expected}")
    with formats.RangeReader(path, formats.RunError) as reader:
        return {
            name: reader.read(entry.offset, entry.num_bytes).view(_DTYPES[entry.dtype]).reshape(entry.shape)
            for name, entry in entries.items()
        }


def _check_values(arrays: Mapping[str, cache.Array], place: str) -> None:
    routes, chunks, popularity = arrays["routes"], arrays["chunks"], arrays["popularity"]
    E, scores = popularity.shape[1], arrays.get("scores")
    ordered = np.sort(routes, axis=2)
    faults = {
        "popularity": not popularity.size or not np.isfinite(popularity).all() or (popularity < 0).any(),
        "routes": not routes.shape[2] or (ordered >= E).any() or (ordered[..., 1:] == ordered[..., :-1]).any(),
        "chunks": (chunks == 0).any() or int(chunks.sum(dtype=np.int64)) != len(routes),
        "hits": (arrays["hits"] > arrays["needed"]).any() or (arrays["needed"] > E).any(),
        "scores": scores is not None and not np.isfinite(scores).all(),
        "decode": "decode" in arrays and (arrays["decode"] > 1).any(),
    }
    for name, is_wrong in faults.items():
        if is_wrong:
            raise formats.RunError(f"{place}: tensor {name!r} has values that a run cannot have; record the run again")


def _requests_of(arrays: Mapping[str, cache.Array], place: str) -> tuple[PrefetchRequest, ...]:
    rows, (L, E) = arrays["requests"], arrays["popularity"].shape
    fits = rows.shape[1] == 6 and bool(
        (np.diff(rows[:, :2].astype(np.int64), axis=0) >= 0).all()
        and (rows[:, [2, 4]] < L).all()
        and (rows[:, 3] < E).all()
        and (rows[:, 5] <= 1).all()
    )
    requests = []
    if fits:
        for _, group in groupby(rows.tolist(), key=lambda row: row[1]):
            of_request = list(group)
            after, _, layer_idx, _, during, is_abandoned = of_request[0]
            fits &= all(row[:3] + row[4:] == of_request[0][:3] + of_request[0][4:] for row in of_request)
            experts = tuple(row[3] for row in of_request)
            requests.append(PrefetchRequest(after, layer_idx, experts, during, bool(is_abandoned)))
    if not fits:
        raise formats.RunError(f"{place}: tensor 'requests' has values that a run cannot have; record the run again")
    return tuple(requests)


class Recorder:
    """Collects a run in memory.

    It takes 2 L k bytes a token, 8 L a pass, 2 L E a pass with scores, and 24 for each prefetched expert.
    Args:    root: the pack's root digest.   policy: the preset's name.   keeps_scores: whether mean scores are recorded
             too; a replay of `Importance` needs them.
    """

    def __init__(
        self,
        facts: cache.CacheFacts,
        root: str,
        policy: str,
        budget_bytes: int,
        context_tokens: int,
        keeps_scores: bool,
    ) -> None:
        self._facts = RecordingFacts(FORMAT, VERSION, root, policy, budget_bytes, context_tokens, facts.num_pages)
        self._popularity = facts.popularity
        self._num_active = facts.num_active
        self._keeps_scores = keeps_scores
        self._routes: list[cache.Array] = []  # [T, k], layer by layer
        self._scores: list[cache.Array] = []  # [E], likewise
        self._decode: list[bool] = []  # likewise
        self._hits: list[int] = []
        self._needed: list[int] = []
        self._requests: list[PrefetchRequest] = []
        self._num_events = 0
        self._whole = (0, 0)  # events and requests until the end of the last whole pass

    def routed(self, layer_idx: int, routes: cache.Array, is_decode: bool | None = None) -> None:
        """Records the routes [T, k], of any integer dtype, of a layer, before its schedule begins.

        Args:    is_decode: whether the pass is of decode; None: one of a single token is.
        """
        if layer_idx == 0:
            self.begin_pass()
        if layer_idx > 0:  # the last layer may run for the last token of a pass alone: the same experts are needed
            routes = np.broadcast_to(routes[-1:], self._routes[-1].shape) if len(routes) == 1 else routes
        self._routes.append(routes.astype("<u2"))
        self._decode.append(len(routes) == 1 if is_decode is None else is_decode)

    def layer_ended(self, num_hits: int, num_needed: int, scores: cache.Array | None) -> None:
        """Records the counts of a layer at the end of its schedule."""
        self._hits.append(num_hits)
        self._needed.append(num_needed)
        if self._keeps_scores:
            assert scores is not None, "scores of every pass or of none"
            self._scores.append(scores.astype("<f2"))
        if len(self._hits) % len(self._popularity) == 0:
            self._whole = (self._num_events, len(self._requests))

    def event_happened(self) -> None:
        """Counts an event or the end of a schedule."""
        self._num_events += 1

    def requested(self, layer_idx: int, experts: Sequence[int], during: int, is_abandoned: bool) -> None:
        """Records a prefetch, or that an expert was abandoned."""
        self._requests.append(PrefetchRequest(self._num_events, layer_idx, tuple(experts), during, is_abandoned))

    def recording(self) -> Recording:
        """Returns all whole forward passes so far."""
        self.begin_pass()
        L, E = self._popularity.shape
        num_passes = len(self._hits) // L
        of_passes = [self._routes[start : start + L] for start in range(0, num_passes * L, L)]
        chunks = np.array([len(layers[0]) for layers in of_passes], "<u4")
        decode = np.array(self._decode[: num_passes * L : L], "<u1")
        empty = np.empty((0, L, self._num_active), "<u2")
        passes = Passes(
            routes=np.concatenate([empty, *(np.stack(layers, axis=1) for layers in of_passes)]),
            chunks=chunks,
            decode=None if np.array_equal(decode, chunks == 1) else decode,
            scores=np.array(self._scores, "<f2").reshape(num_passes, L, E) if self._keeps_scores else None,
            popularity=self._popularity.astype("<f4"),
        )
        hits, needed = (np.array(counts, "<u4").reshape(num_passes, L) for counts in (self._hits, self._needed))
        return Recording(self._facts, passes, tuple(self._requests), hits, needed)

    def begin_pass(self) -> None:
        """Forgets a pass that was broken off, for example by an error; what follows is of the next."""
        num_layers = len(self._hits) // len(self._popularity) * len(self._popularity)
        if len(self._routes) > num_layers:
            for values in (self._routes, self._decode, self._scores, self._hits, self._needed):
                del values[num_layers:]
            self._num_events = self._whole[0]
            del self._requests[self._whole[1] :]

    def write(self, path: Path) -> None:
        """Writes the recording; it replaces a file of that name. Raises RunError if it cannot be written."""
        write_recording(self.recording(), path)


class RecordedExpertCache(cache.ExpertCache):
    """A cache that records its calls. The engine calls the recorder's `routed` before each schedule."""

    def __init__(self, recorder: Recorder, *parts: Any) -> None:
        super().__init__(*parts)
        self._recorder = recorder

    def schedule(self, layer_idx: int, experts: Sequence[int], scores: cache.Array | None = None) -> cache.Events:
        """Yields the events of `ExpertCache.schedule`, and counts them."""
        num_hits = 0
        for event in super().schedule(layer_idx, experts, scores):
            num_hits += isinstance(event, cache.ComputeEvent) and event.is_hit
            self._recorder.event_happened()
            yield event
        self._recorder.event_happened()
        self._recorder.layer_ended(num_hits, len(experts), scores)

    def prefetch(self, layer_idx: int, experts: Sequence[int], during: int) -> cache.Events:
        """Yields the events of `ExpertCache.prefetch`; take all of them before the schedule goes on."""
        self._recorder.requested(layer_idx, experts, during, False)
        yield from super().prefetch(layer_idx, experts, during)

    def abandon(self, key: cache.ExpertKey) -> None:
        """Evicts a predicted expert that was not chosen, and records that."""
        self._recorder.requested(key.layer_idx, (key.expert,), key.layer_idx, True)
        super().abandon(key)


def recorded_expert_cache_for(preset: Preset, facts: cache.CacheFacts, recorder: Recorder) -> cache.ExpertCache:
    """Returns a cache like `expert_cache_for` that records its calls."""
    return eviction.expert_cache_for(preset, facts, partial(RecordedExpertCache, recorder))
