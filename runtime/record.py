"""Records of runs: what the routers chose, pass by pass, and what was foretold; written by `recording`, for `replay`.

A safetensors file, of which nothing is trusted. Not to be confused with the records of neurons. Described in
docs/moe-pack.md.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from moe_pack.formats import RangeReader, RunError, assemble, canonical, dump, load, parse, read_header
from moe_pack.runtime.residency import Array

FORMAT: Literal["moe-pack record"] = "moe-pack record"
VERSION = 1
_MAX_FACTS_BYTES = 1 << 16
_DTYPES = {"U8": "<u1", "U16": "<u2", "U32": "<u4", "F16": "<f2", "F32": "<f4"}
_NAMES = {np.dtype(code): name for name, code in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class RecordFacts:
    """What a record was made with: the root digest of the pack, the preset's name, the budget and its pages."""

    format: Literal["moe-pack record"]
    version: int
    root: str
    policy: str
    budget_bytes: int
    context_tokens: int
    num_pages: int


@dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """What routers chose in C forward passes of N tokens in all.

    `routes` u16 [N, L, k].   `chunks` u32 [C]: tokens of each pass.   `scores` f16 [C, L, E]: each pass's mean scores
    of all experts, as policies were told them; None where they are not known.   `popularity` f32 [L, E]: what was
    known before, as in `CacheFacts`.
    """

    routes: Array
    chunks: Array
    scores: Array | None
    popularity: Array

    @property
    def num_experts(self) -> int:
        """Experts a layer."""
        return int(self.popularity.shape[1])

    def needed(self) -> Iterator[list[list[int]]]:
        """For each pass and layer the experts it needs, rising, each once."""
        ends = np.cumsum(self.chunks, dtype=np.int64)
        for start, end in zip((ends - self.chunks).tolist(), ends.tolist(), strict=True):
            if end - start == 1:
                yield np.sort(self.routes[start], axis=1).tolist()
            else:
                yield [np.unique(layer).tolist() for layer in self.routes[start:end].swapaxes(0, 1)]


class Request(NamedTuple):
    """What an engine asked of a residency beside its walks: to bring experts ahead, likeliest first, or abandon one.

    `after`: how many events all walks had given before, each walk's end counted as one.
    """

    after: int
    layer_idx: int
    experts: tuple[int, ...]
    during: int
    is_abandoned: bool


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A record: `passes` as above, `requests` in their order; `hits`, `needed` u32 [C, L] as the run counted them."""

    facts: RecordFacts
    passes: Passes
    requests: tuple[Request, ...]
    hits: Array
    needed: Array


def check_place(path: Path) -> None:
    """Checks, before a run, that its record can be written at `path`; whether there is room for it, nobody knows yet.

    Raises:  RunError if it cannot.
    """
    beside = _beside(path)
    try:
        if path.exists() and not path.is_file():
            raise RunError(f"{path}: is no regular file; give another place")
        with beside.open("wb"):
            beside.unlink()
    except OSError as fault:
        raise RunError(f"{path}: cannot be written ({fault.strerror}); give another place") from fault


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp")


def write_record(record: Record, path: Path) -> None:
    """Writes a record beside its place and renames it there.

    Raises:  RunError if the drive refuses.
    """
    passes = record.passes
    arrays: dict[str, Array] = {
        "facts": np.frombuffer(canonical(dump(record.facts)), "<u1"),
        "routes": passes.routes,
        "chunks": passes.chunks,
        "popularity": passes.popularity,
        "hits": record.hits,
        "needed": record.needed,
        "requests": _rows_of(record.requests),
    }
    if passes.scores is not None:
        arrays["scores"] = passes.scores
    raw = assemble((name, _NAMES[array.dtype], array.shape, array.tobytes()) for name, array in arrays.items())
    beside = _beside(path)
    try:
        try:
            with beside.open("wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except BaseException:  # a signal's exception too
            beside.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as fault:
        raise RunError(f"{path}: cannot be written ({fault.strerror}); give another place") from fault


def _rows_of(requests: Sequence[Request]) -> Array:
    """One row an expert: after, number of the request, layer_idx, expert, during, whether it is abandoned."""
    rows = [
        (r.after, number, r.layer_idx, expert, r.during, int(r.is_abandoned))
        for number, r in enumerate(requests)
        for expert in r.experts
    ]
    return np.array(rows, "<u4").reshape(-1, 6)


def read_record(path: Path) -> Record:
    """The record at `path`, all of it checked.

    Raises:  RunError with the first fault found.
    """
    arrays, place = _read_arrays(path), path.name
    raw = arrays["facts"].tobytes()
    if len(raw) > _MAX_FACTS_BYTES:
        raise RunError(f"{place}: tensor 'facts' has {len(raw)} bytes, at most {_MAX_FACTS_BYTES}")
    values = parse(raw, f"{place}: facts", RunError)
    if not isinstance(values, dict) or values.get("format") != FORMAT or values.get("version") != VERSION:
        raise RunError(f"{place}: expected format {FORMAT!r}, version {VERSION}; record the run anew")
    facts = load(RecordFacts, values, f"{place}: facts", RunError)
    _check_values(arrays, place)
    passes = Passes(arrays["routes"], arrays["chunks"], arrays.get("scores"), arrays["popularity"])
    return Record(facts, passes, _requests_of(arrays, place), arrays["hits"], arrays["needed"])


def _read_arrays(path: Path) -> dict[str, Array]:
    """The file's tensors, exactly those that a record has, of fitting dtypes and shapes."""
    place, found = path.name, read_header(path, RunError)
    entries = {entry.name: entry for entry in found if not entry.name.startswith("pad.")}
    shapes = {name: entry.shape for name, entry in entries.items()}
    if "routes" not in shapes or "chunks" not in shapes or "popularity" not in shapes:
        raise RunError(f"{place}: found no routes, chunks and popularity, which records of runs have")
    N, C = (shapes[name][0] if shapes[name] else -1 for name in ("routes", "chunks"))
    L, E = shapes["popularity"] if len(shapes["popularity"]) == 2 else (-1, -1)
    k = shapes["routes"][-1] if shapes["routes"] else -1
    wanted: dict[str, tuple[str, tuple[int, ...] | None]] = {
        "facts": ("U8", None),
        "routes": ("U16", (N, L, k)),
        "chunks": ("U32", (C,)),
        "popularity": ("F32", (L, E)),
        "hits": ("U32", (C, L)),
        "needed": ("U32", (C, L)),
        "requests": ("U32", None),
    }
    if "scores" in entries:
        wanted["scores"] = ("F16", (C, L, E))
    for name in [*wanted, *entries]:
        if name not in wanted or name not in entries:
            raise RunError(f"{place}: tensor {name!r} is {'unknown' if name in entries else 'missing'}")
        dtype, shape = wanted[name]
        entry = entries[name]
        fits = entry.shape == shape if shape else len(entry.shape) == (2 if name == "requests" else 1)
        if entry.dtype != dtype or not fits:
            expected = f"{dtype} {list(shape)}" if shape else f"{dtype}, a list"
            raise RunError(f"{place}: tensor {name!r} is {entry.dtype} {list(entry.shape)}, expected {expected}")
    with RangeReader(path, RunError) as reader:
        return {
            name: reader.read(entry.offset, entry.num_bytes).view(_DTYPES[entry.dtype]).reshape(entry.shape)
            for name, entry in entries.items()
        }


def _check_values(arrays: Mapping[str, Array], place: str) -> None:
    routes, chunks, popularity = arrays["routes"], arrays["chunks"], arrays["popularity"]
    E, scores = popularity.shape[1], arrays.get("scores")
    ordered = np.sort(routes, axis=2)
    faults = {
        "popularity": not popularity.size or not np.isfinite(popularity).all() or (popularity < 0).any(),
        "routes": not routes.shape[2] or (ordered >= E).any() or (ordered[..., 1:] == ordered[..., :-1]).any(),
        "chunks": (chunks == 0).any() or int(chunks.sum(dtype=np.int64)) != len(routes),
        "hits": (arrays["hits"] > arrays["needed"]).any() or (arrays["needed"] > E).any(),
        "scores": scores is not None and not np.isfinite(scores).all(),
    }
    for name, is_wrong in faults.items():
        if is_wrong:
            raise RunError(f"{place}: tensor {name!r} has values that no run gives; record the run anew")


def _requests_of(arrays: Mapping[str, Array], place: str) -> tuple[Request, ...]:
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
            held = list(group)
            after, _, layer_idx, _, during, is_abandoned = held[0]
            fits &= all(row[:3] + row[4:] == held[0][:3] + held[0][4:] for row in held)
            requests.append(Request(after, layer_idx, tuple(row[3] for row in held), during, bool(is_abandoned)))
    if not fits:
        raise RunError(f"{place}: tensor 'requests' has values that no run gives; record the run anew")
    return tuple(requests)
