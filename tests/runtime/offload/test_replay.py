"""Recordings are read back and not trusted; replay counts what a run counts; the optimum is above all others."""

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import case
from support.residencies import facts_of

from moe_pack.formats import RunError, canonical, dump
from moe_pack.formats.pack.safetensors import assemble, read_header
from moe_pack.runtime.offload import (
    PRESETS,
    CacheFacts,
    ExpertKey,
    Passes,
    Preset,
    Recorder,
    Recording,
    expert_cache_for,
    read_recording,
    recorded_expert_cache_for,
)
from moe_pack.runtime.offload.cache import Array, ComputeEvent, FetchEvent
from moe_pack.runtime.offload.record import PrefetchRequest, RecordingFacts, write_recording
from moe_pack.runtime.offload.replay import ReplayCounts, ReplayResult, auto_policy, optimum, replay

SHAPE = (3, 6)


def passes_of(seed: int, chunks: list[int], k: int = 2, with_scores: bool = True) -> Passes:
    rng, (L, E) = np.random.default_rng(seed), SHAPE
    weights = rng.random((L, E)) ** 2 + 0.05
    routes = [
        [rng.choice(E, k, replace=False, p=weights[l] / weights[l].sum()) for l in range(L)] for _ in range(sum(chunks))
    ]
    scores = rng.random((len(chunks), L, E)).astype("<f2") if with_scores else None
    popularity = (weights / weights.sum(axis=1, keepdims=True)).astype("<f4")
    return Passes(np.array(routes, "<u2").reshape(sum(chunks), L, k), np.array(chunks, "<u4"), scores, popularity)


def facts_for(passes: Passes, num_pages: int, seed: int | None = None) -> CacheFacts:
    rng = random.Random(seed)
    pages = None if seed is None else [[rng.randint(1, 3) for _ in range(SHAPE[1])] for _ in range(SHAPE[0])]
    return replace(facts_of(SHAPE, num_pages, pages, num_active=2), popularity=passes.popularity)


def by_hand(passes: Passes, facts: CacheFacts, extents: Array, preset: Preset) -> tuple[ReplayCounts, ReplayCounts]:
    """Prefill and decode counted without `replay`: through the residency, pass by pass, from the routes themselves."""
    residency, tallies, start = expert_cache_for(preset, facts), (ReplayCounts(), ReplayCounts()), 0
    for number, length in enumerate(passes.chunks.tolist()):
        tally = tallies[length == 1]
        tally.num_tokens += length
        for l in range(SHAPE[0]):
            experts = sorted({int(e) for e in passes.routes[start : start + length, l].ravel()})
            told = None if passes.scores is None else passes.scores[number, l].astype(np.float32)
            for event in residency.schedule(l, experts, told):
                tally.num_needed += isinstance(event, ComputeEvent)
                tally.num_hits += isinstance(event, ComputeEvent) and event.is_hit
                tally.bytes_fetched += int(extents[event.key]) if isinstance(event, FetchEvent) else 0
        start += length
    return tallies


def test_a_replay_counts_what_the_residency_does() -> None:
    for name in PRESETS:
        with case(name):
            passes = passes_of(1, [9, 1, 1, 4, *[1] * 30])
            facts, extents = facts_for(passes, 11, seed=2), np.arange(1, 19).reshape(SHAPE) * 1000
            played = replay(passes, facts, extents, PRESETS[name])
            assert (played.prefill, played.decode) == by_hand(passes, facts, extents, PRESETS[name])
            assert played.prefill.num_tokens == 13 and played.decode.num_tokens == 32


def run_and_record(passes: Passes, facts: CacheFacts, name: str, seed: int) -> tuple[Recording, int]:
    """A run that predicts at random moments what it likes and abandons some of it; and how many were fetched late."""
    rng, recorder = random.Random(seed), Recorder(facts, "", name, 0, 64, keeps_scores=True)
    residency, num_late, start = recorded_expert_cache_for(PRESETS[name], facts, recorder), 0, 0
    assert passes.scores is not None
    for number, length in enumerate(passes.chunks.tolist()):
        ahead: list[ExpertKey] = []
        for l in range(SHAPE[0]):
            routes = passes.routes[start : start + length, l]
            for key in ahead:
                if key.expert not in routes and residency.is_resident[key] and rng.random() < 0.5:
                    residency.abandon(key)
            ahead = []
            recorder.routed(l, routes)
            for event in residency.schedule(l, np.unique(routes).tolist(), passes.scores[number, l].astype(np.float32)):
                num_late += isinstance(event, FetchEvent)
                if l + 1 < SHAPE[0] and rng.random() < 0.4:
                    brought = list(residency.prefetch(l + 1, rng.sample(range(SHAPE[1]), 2), during=l))
                    ahead += [event.key for event in brought if isinstance(event, FetchEvent)]
        start += length
    return recorder.recording(), num_late


@given(seed=st.integers(0, 10**6), name=st.sampled_from(["floe", "corm", "edgemoe", "importance"]))
@settings(max_examples=60, deadline=None)
def test_what_was_predicted_in_a_run_is_replayed_hit_for_hit(seed: int, name: str) -> None:
    passes = passes_of(seed, [3, *[1] * 12])
    facts = facts_for(passes, random.Random(seed).randint(4, 30), seed)
    record, num_late = run_and_record(passes, facts, name, seed)
    played = replay(record.passes, facts, np.ones(SHAPE, np.int64), PRESETS[name], record)
    assert played.prediction == "recorded"
    assert played.prefill.num_hits == record.hits[0].sum() and played.decode.num_hits == record.hits[1:].sum()
    tallies = (played.prefill, played.decode)
    assert sum(tally.num_needed for tally in tallies) == record.needed.sum()
    assert sum(tally.bytes_fetched - tally.bytes_ahead for tally in tallies) == num_late


def test_a_request_that_no_run_could_make_is_an_error_of_the_record() -> None:
    passes = passes_of(5, [1])
    facts = facts_for(passes, 9)
    record, _ = run_and_record(passes, facts, "floe", 5)
    broken = replace(record, requests=(PrefetchRequest(1, 2, (5,), 2, True),))
    with pytest.raises(RunError, match="abandons expert 5 of MoE layer 2, which was not on its way; record the run"):
        replay(passes, facts, np.ones(SHAPE, np.int64), PRESETS["floe"], broken)


def test_other_pages_or_another_policy_are_not_replayed_with_what_a_run_predicted() -> None:
    passes = passes_of(5, [1] * 9)
    facts, extents = facts_for(passes, 9), np.ones(SHAPE, np.int64)
    record, _ = run_and_record(passes, facts, "floe", 5)
    assert replay(passes, facts, extents, PRESETS["floe"], record).prediction == "recorded"
    assert replay(passes, replace(facts, num_pages=8), extents, PRESETS["floe"], record).prediction == "not replayable"
    assert replay(passes, facts, extents, PRESETS["corm"], record).prediction == "not replayable"
    assert replay(passes, facts, extents, PRESETS["lru"], record).prediction == "none"


class Oracle:
    """Path shares that know what comes: the token's own routes, found by those of the layers before."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes

    def predict(self, l: int, before: Array) -> tuple[Array, Array]:
        past = self.passes.routes[:, max(l - 2, 0) : l]
        token = next(i for i, routes in enumerate(past) if np.array_equal(routes, before[0]))
        shares = np.zeros((1, SHAPE[1]))
        shares[0, self.passes.routes[token, l]] = 1
        return shares, np.zeros(1)


def test_experts_predicted_right_from_routes_are_hits_in_every_layer_but_the_first() -> None:
    """Each token the same: layers 1 and 2 are predicted; room for two layers' experts and no more."""
    one = np.array([[[0, 1], [2, 3], [4, 5]]], "<u2")
    passes = replace(passes_of(1, [1] * 5), routes=np.repeat(one, 5, axis=0))
    facts, extents = facts_for(passes, 4), np.full(SHAPE, 10)
    played = replay(passes, facts, extents, PRESETS["edgemoe"], paths=Oracle(passes))
    without = replay(passes, facts, extents, PRESETS["edgemoe"])
    assert (played.prediction, without.prediction) == ("routes", "not replayable")
    assert played.decode.num_needed == 30 and played.decode.num_hits >= 20 > without.decode.num_hits
    assert played.decode.bytes_ahead > 0 == without.decode.bytes_ahead


def test_popularity_predicts_the_same_experts_for_every_token() -> None:
    """Experts 4 and 5 are most popular and always chosen; room for 4. Layer 0 alone is not predicted."""
    routes = np.tile(np.array([4, 5], "<u2"), (6, 3, 1))
    popularity = np.tile(np.array([0.1, 0.1, 0.1, 0.1, 0.3, 0.3], "<f4"), (3, 1))
    passes = Passes(routes, np.ones(6, "<u4"), None, popularity)
    preset = Preset("lru", "lru", prediction="popularity")
    played = replay(passes, facts_for(passes, 4), np.ones(SHAPE, np.int64), preset)
    assert played.prediction == "routes" and played.decode.num_hits == 24
    assert played.decode.bytes_fetched == 36 and played.decode.bytes_ahead == 24


@given(seed=st.integers(0, 10**6), num_pages=st.integers(2, 18))
@settings(max_examples=40, deadline=None)
def test_no_policy_hits_more_than_the_optimum_with_one_expert_a_layer(seed: int, num_pages: int) -> None:
    passes = passes_of(seed, [1] * 25, k=1)
    facts, extents = replace(facts_for(passes, num_pages), num_active=1), np.ones(SHAPE, np.int64)
    best = optimum(passes, facts, extents).decode
    assert best.num_needed == 75 and best.bytes_fetched == best.num_needed - best.num_hits
    for name in ("lru", "corm", "edgemoe", "importance"):
        assert replay(passes, facts, extents, PRESETS[name].without_prediction()).decode.num_hits <= best.num_hits


def test_a_cache_that_starts_filled_hits_before_anything_was_read() -> None:
    """Room for 2 of 2 x 2 experts, most popular 0.1 and 1.0. Token (0.1, 1.0) hits both, then 0.0 misses."""
    popularity = np.array([[0.4, 0.6], [0.7, 0.3]], np.float32)
    passes = Passes(np.array([[[1], [0]], [[0], [0]]], np.uint16), np.ones(2, np.uint32), None, popularity)
    facts = CacheFacts(np.ones((2, 2), np.int64), 2, 1, popularity)
    extents = np.full((2, 2), 10)
    played = replay(passes, facts, extents, PRESETS["edgemoe"]).decode
    # At 0.0, f / D of 0.1 is 1.6 / 2 and of 1.0 is 1.7 / 1: 0.1 is evicted, and 1.0 is there.
    assert (played.num_hits, played.num_needed, played.bytes_fetched) == (3, 4, 10)
    empty = replay(passes, facts, extents, PRESETS["edgemoe"].without_prediction()).decode
    assert (empty.num_hits, empty.bytes_fetched) == (1, 30)


def test_auto_takes_the_best_and_of_near_equals_the_simplest() -> None:
    """With room for all, every policy that keeps hits alike: lru. With less, the best by more than 0.2 points."""
    passes = passes_of(3, [1] * 60)
    extents = np.ones(SHAPE, np.int64)
    assert auto_policy(passes, facts_for(passes, 18), extents)[0] in ("lru", "fiddler")
    for num_pages in (4, 7, 11):
        chosen, table = auto_policy(passes, facts_for(passes, num_pages), extents)
        rates = {name: played.decode.hit_rate for name, played in table.items()}
        assert all(played.prediction == "none" for played in table.values()), "judged by what they keep"
        assert rates[chosen] >= max(rates.values()) - 0.002
        assert list(table) == ["lru", "fiddler", "corm", "edgemoe", "importance", "floe"]
    repeated = replace(passes, routes=np.repeat(passes.routes[:1], 60, axis=0))
    assert auto_policy(repeated, facts_for(repeated, 7), extents)[0] == "lru"


def test_auto_leaves_importance_out_where_scores_are_not_known() -> None:
    passes = passes_of(3, [1] * 5, with_scores=False)
    assert "importance" not in auto_policy(passes, facts_for(passes, 5), np.ones(SHAPE, np.int64))[1]


def test_rates_of_nothing_are_no_error_and_seconds_add_up() -> None:
    """10 tokens, 40 experts, 2,000 bytes: 200 bytes a token at 1,000 a second, 4 experts of 0.05 s: 0.4 s."""
    empty = ReplayResult()
    assert (empty.decode.hit_rate, empty.decode.bytes_per_token) == (1.0, 0.0)
    assert empty.decode.tokens_per_second(1e9) == float("inf")
    tally = ReplayCounts(num_tokens=10, num_needed=40, num_hits=30, bytes_fetched=2000)
    assert tally.hit_rate == 0.75 and tally.tokens_per_second(1000.0, 0.05) == pytest.approx(2.5)
    assert tally.tokens_per_second(1000.0) == pytest.approx(5.0)


Arrays = dict[str, Any]
FACTS = RecordingFacts("moe-pack record", 1, "ab" * 32, "lru", 10**6, 64, 3)
NAMES = {"<u1": "U8", "<u2": "U16", "<u4": "U32", "<f2": "F16", "<f4": "F32"}


def small(with_scores: bool = True) -> Recording:
    """Two passes, of 2 tokens and of 1, through 2 layers of 4 experts, 2 a token."""
    routes = np.array([[[0, 1], [2, 3]], [[1, 0], [0, 2]], [[3, 1], [1, 2]]], "<u2")
    scores = np.full((2, 2, 4), 0.25, "<f2") if with_scores else None
    passes = Passes(routes, np.array([2, 1], "<u4"), scores, np.full((2, 4), 0.25, "<f4"))
    requests = (PrefetchRequest(3, 1, (2, 0), 0, False), PrefetchRequest(7, 1, (0,), 1, True))
    return Recording(FACTS, passes, requests, np.array([[0, 1], [1, 2]], "<u4"), np.array([[2, 3], [2, 2]], "<u4"))


def assert_equal(found: Recording, expected: Recording) -> None:
    assert found.facts == expected.facts and found.requests == expected.requests
    np.testing.assert_array_equal(found.hits, expected.hits)
    np.testing.assert_array_equal(found.needed, expected.needed)
    for name in ("routes", "chunks", "scores", "popularity", "decode"):
        np.testing.assert_array_equal(getattr(found.passes, name), getattr(expected.passes, name))


@pytest.mark.parametrize("with_scores", [True, False])
def test_a_record_is_read_back_as_it_was_written(tmp_path: Path, with_scores: bool) -> None:
    write_recording(small(with_scores), tmp_path / "routes.safetensors")
    assert_equal(read_recording(tmp_path / "routes.safetensors"), small(with_scores))
    assert os.listdir(tmp_path) == ["routes.safetensors"]


def test_a_pass_of_several_tokens_may_be_of_decode(tmp_path: Path) -> None:
    recording = small()
    assert recording.passes.is_decode.tolist() == [False, True]
    marked = replace(recording, passes=replace(recording.passes, decode=np.array([1, 1], "<u1")))
    write_recording(marked, tmp_path / "r")
    assert_equal(read_recording(tmp_path / "r"), marked)
    assert read_recording(tmp_path / "r").passes.is_decode.tolist() == [True, True]


def test_a_record_takes_the_place_of_one_that_is_there(tmp_path: Path) -> None:
    write_recording(small(), tmp_path / "r")
    write_recording(small(False), tmp_path / "r")
    assert read_recording(tmp_path / "r").passes.scores is None


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"missing/r: cannot be written \(No such file"):
        write_recording(small(), tmp_path / "missing" / "r")
    (tmp_path / "folder").mkdir()
    with pytest.raises(RunError, match="cannot be written"):
        write_recording(small(), tmp_path / "folder")
    assert os.listdir(tmp_path) == ["folder"], "no partial file is left"


def test_the_needed_experts_of_a_pass_are_those_of_all_its_tokens_rising() -> None:
    assert list(small().passes.needed()) == [[[0, 1], [0, 2, 3]], [[1, 3], [1, 2]]]


def test_a_run_is_written_down_as_it_happened() -> None:
    """Room for 2 of 1 + 1 layers. Layer 1's expert 3 is predicted after the first event of layer 0, and abandoned."""
    facts = facts_of((2, 4), 2)
    recorder = Recorder(facts, "cd" * 32, "lru", 123, 64, keeps_scores=True)
    residency = recorded_expert_cache_for(PRESETS["lru"], facts, recorder)
    scores = np.array([0.5, 0.25, 0.125, 0.125], np.float32)
    recorder.routed(0, np.array([[1]]))
    walk = residency.schedule(0, [1], scores)
    next(walk)
    list(residency.prefetch(1, [3, 1], during=0))
    list(walk)
    residency.abandon(ExpertKey(1, 3))
    recorder.routed(1, np.array([[2]]))
    list(residency.schedule(1, [2], scores))
    record = recorder.recording()
    assert record.facts == RecordingFacts("moe-pack record", 1, "cd" * 32, "lru", 123, 64, 2)
    assert record.passes.routes.tolist() == [[[1], [2]]] and record.passes.chunks.tolist() == [1]
    assert record.passes.scores is not None and record.passes.scores.tolist() == [[scores.tolist()] * 2]
    # Layer 0 gives Fetch and Compute; its end is the third event.
    assert record.requests == (PrefetchRequest(1, 1, (3, 1), 0, False), PrefetchRequest(3, 1, (3,), 1, True))
    assert (record.hits.tolist(), record.needed.tolist()) == ([[0, 0]], [[1, 1]])


def test_a_pass_that_was_broken_off_is_left_out() -> None:
    facts = facts_of((2, 4), 3)
    recorder = Recorder(facts, "", "lru", 0, 64, keeps_scores=False)
    residency = recorded_expert_cache_for(PRESETS["lru"], facts, recorder)

    def layer(layer_idx: int, expert: int) -> None:
        recorder.routed(layer_idx, np.array([[expert]]))
        list(residency.schedule(layer_idx, [expert]))

    layer(0, 0), layer(1, 1)
    layer(0, 2)
    list(residency.prefetch(1, [0], during=0))
    recorder.routed(1, np.array([[3]]))  # and no walk: here it broke
    layer(0, 3), layer(1, 3)
    record = recorder.recording()
    assert record.passes.routes.tolist() == [[[0], [1]], [[3], [3]]] and record.requests == ()
    assert record.needed.shape == (2, 2)
    recorder.routed(0, np.array([[0]]))
    assert len(recorder.recording().passes.routes) == 2


def test_a_recorder_that_has_seen_nothing_gives_a_record_that_can_be_read(tmp_path: Path) -> None:
    Recorder(facts_of((2, 4), 2, num_active=2), "", "lru", 0, 64, keeps_scores=True).write(tmp_path / "r")
    passes = read_recording(tmp_path / "r").passes
    assert passes.routes.shape == (0, 2, 2) and list(passes.needed()) == []


# What files may not hold. The nearest legal file is `small`, which is read above.


def arrays_of(record: Recording, path: Path) -> Arrays:
    write_recording(record, path)
    raw = path.read_bytes()
    dtypes = {name: code for code, name in NAMES.items()}
    return {
        entry.name: np.frombuffer(raw, dtypes[entry.dtype], offset=entry.offset, count=int(np.prod(entry.shape)))
        .reshape(entry.shape)
        .copy()
        for entry in read_header(path, RunError)
        if not entry.name.startswith("pad.")
    }


def put(name: str, place: object, value: float) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        arrays[name][place] = value

    return change


def facts(**values: object) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        arrays["facts"] = np.frombuffer(canonical(dump(FACTS) | values), "<u1")

    return change


def cast(name: str, code: str) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        arrays[name] = arrays[name].astype(code)

    return change


def cut(name: str, place: object) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        arrays[name] = arrays[name][place]

    return change


IMPOSSIBLE = "has values that a run cannot have"


def test_what_no_run_gives_is_refused(tmp_path: Path) -> None:
    for number, (change, message) in enumerate(
        [
            (lambda arrays: arrays.pop("routes"), "routes, chunks or popularity are missing"),
            (lambda arrays: arrays.pop("hits"), "tensor 'hits' is missing"),
            (lambda arrays: arrays.update(more=arrays["hits"]), "tensor 'more' is unknown"),
            (cast("routes", "<u4"), r"tensor 'routes' is U32 \[3, 2, 2\], expected U16 \[3, 2, 2\]"),
            (cut("routes", np.s_[:, 0]), r"tensor 'routes' is U16 \[3, 2\], expected U16 \[3, 2, 2\]"),
            (cut("routes", np.s_[:, :1]), r"tensor 'routes' is U16 \[3, 1, 2\], expected U16 \[3, 2, 2\]"),
            (cut("popularity", 0), r"tensor 'routes' is U16 \[3, 2, 2\], expected U16 \[3, -1, 2\]"),
            (cut("scores", np.s_[:1]), r"tensor 'scores' is F16 \[1, 2, 4\], expected F16 \[2, 2, 4\]"),
            (cut("requests", 0), "tensor 'requests' is U32 .*, expected U32, a list"),
            (put("routes", (0, 0, 0), 4), f"'routes' {IMPOSSIBLE}"),
            (put("routes", (0, 0, 0), 1), f"'routes' {IMPOSSIBLE}"),
            (put("chunks", 0, 1), f"'chunks' {IMPOSSIBLE}"),
            (lambda arrays: arrays.update(chunks=np.array([3, 0], "<u4")), f"'chunks' {IMPOSSIBLE}"),
            (put("hits", (0, 0), 3), f"'hits' {IMPOSSIBLE}"),
            (put("needed", (0, 0), 5), f"'hits' {IMPOSSIBLE}"),
            (put("scores", (0, 0, 0), np.nan), f"'scores' {IMPOSSIBLE}"),
            (put("popularity", (0, 0), np.inf), f"'popularity' {IMPOSSIBLE}"),
            (put("popularity", (0, 0), -1), f"'popularity' {IMPOSSIBLE}"),
            (put("requests", (0, 0), 9), f"'requests' {IMPOSSIBLE}"),  # after the next request
            (put("requests", (0, 2), 2), f"'requests' {IMPOSSIBLE}"),
            (put("requests", (0, 3), 4), f"'requests' {IMPOSSIBLE}"),
            (put("requests", (0, 4), 2), f"'requests' {IMPOSSIBLE}"),
            (put("requests", (0, 5), 2), f"'requests' {IMPOSSIBLE}"),
            (put("requests", (0, 2), 0), f"'requests' {IMPOSSIBLE}"),  # one request, two layers
            (cut("requests", np.s_[:, :5]), f"'requests' {IMPOSSIBLE}"),
            (facts(version=2), "expected format 'moe-pack record', version 1"),
            (facts(num_pages="3"), "num_pages: found '3', expected int"),
            (facts(more=1), "unknown key 'more'"),
            (
                lambda arrays: arrays.update(facts=np.zeros(70000, "<u1")),
                "'facts' has 70000 bytes, expected at most 65536",
            ),
        ]
    ):
        case_folder = tmp_path / str(number)
        case_folder.mkdir()
        with case(change, message):
            arrays = arrays_of(small(), case_folder / "r")
            change(arrays)
            raw = assemble((name, NAMES[a.dtype.str.replace("|", "<")], a) for name, a in arrays.items())
            (case_folder / "r").write_bytes(raw)
            with pytest.raises(RunError, match=message) as caught:
                read_recording(case_folder / "r")
            assert str(caught.value).startswith("r: ") and "\n" not in str(caught.value)


def test_a_file_that_is_none_and_one_that_is_cut_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="r: file is missing"):
        read_recording(tmp_path / "r")
    write_recording(replace(small(), requests=()), tmp_path / "r")
    raw = (tmp_path / "r").read_bytes()
    for length in (0, 7, 100, len(raw) - 1):
        (tmp_path / "r").write_bytes(raw[:length])
        with pytest.raises(RunError, match=r"cut or damaged|is empty"):
            read_recording(tmp_path / "r")
