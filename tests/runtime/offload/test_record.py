"""Records: what is written is read back, and nothing in a file is trusted."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cases import case
from support.residencies import facts_of

from moe_pack.formats import RunError, canonical, dump
from moe_pack.formats.pack.safetensors import assemble, read_header
from moe_pack.runtime.offload import (
    PRESETS,
    ExpertKey,
    Passes,
    Recorder,
    Recording,
    read_recording,
    recorded_expert_cache_for,
)
from moe_pack.runtime.offload.record import PrefetchRequest, RecordingFacts, write_recording

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
