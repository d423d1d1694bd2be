"""The events of `GET /engine`: counts of experts for several watchers, and the states of a running engine."""

import asyncio
import base64
import json
import re
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from fastapi import FastAPI
from fastapi.testclient import TestClient
from numpy.typing import NDArray
from support.cases import case
from support.models import TinyMixtral, pack
from support.scripted_server import COUNTS, FixedScheduler, served
from support.streaming import budget_for
from support.waiting import HANG_S

from moe_pack.convert.cli.main import main
from moe_pack.formats import Pack
from moe_pack.formats.pack.sidecar import write_sidecar
from moe_pack.runtime import Engine, EngineOptions
from moe_pack.runtime.offload import read_recording
from moe_pack.runtime.quality import QUALITY_FILE, Estimate, Quality, SourceQuality
from moe_pack.runtime.serve.http.live import (
    LiveCounts,
    bitmap,
    engine_events,
    engine_facts,
    engine_router,
    live_counts,
    page_router,
    saturated,
)

Routes = NDArray[np.int64]

L, E, CONTEXT = 3, 8, 48
IDS = torch.randint(0, 90, (30,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of 3 layers of 8 experts, 2 a token; not to be changed."""
    source = TinyMixtral(num_layers=L, num_experts=E).write(tmp_path_factory.mktemp("source"))
    made = tmp_path_factory.mktemp("made") / "packed"
    pack(source, made)
    return made


@contextmanager
def running(folder: Path, **options: Any) -> Iterator[Engine]:
    with Pack(folder) as opened:
        if options.pop("offloads", False):
            options["budget_bytes"] = budget_for(opened, 7, CONTEXT)
        with Engine(opened, EngineOptions(**options), CONTEXT) as engine:
            yield engine


def run_all(engine: Engine) -> None:
    """A prefill of 20 tokens and a decode of 10."""
    engine.decoder.next_logits(IDS[:20])
    for token in IDS[20:]:
        engine.decoder.next_logits([token])


def events_of(engine: Engine, scheduler: FixedScheduler) -> Any:
    return engine_events(live_counts(engine), engine, scheduler, engine_facts(engine, scheduler, "tiny"))


def random_routes(rng: np.random.Generator) -> Iterator[tuple[int, Routes]]:
    """Layers and routes: of one token, of many, all alike, and of no token."""
    for num_tokens in (1, 1, 5, 300, 1, 0, 2):
        layer_idx = int(rng.integers(L))
        scores = rng.random((num_tokens, E))
        yield layer_idx, np.argsort(scores, axis=1)[:, :2].astype(np.int64)
    yield 1, np.tile(np.array([[6, 0]]), (400, 1))


def counted(routes: list[tuple[int, Routes]]) -> Routes:
    """The same counts, one by one."""
    found = np.zeros((L, E), np.int64)
    for layer_idx, experts in routes:
        for expert in experts.ravel().tolist():
            found[layer_idx, expert] += 1
    return found


def test_each_watcher_gets_what_came_since_its_last_snapshot() -> None:
    live, rng = LiveCounts(L, E), np.random.default_rng(1)
    live.routed(0, np.array([[1, 2]]))  # before anybody watches
    missed: list[list[tuple[int, Routes, int]]] = [[], [], []]  # by each watcher since its last snapshot
    watchers = [live.watch() for _ in missed]
    for number, (layer_idx, experts) in enumerate([*random_routes(rng), *random_routes(rng)]):
        live.routed(layer_idx, experts)
        live.fetched(layer_idx, number % E)
        for place, (watcher, events) in enumerate(zip(watchers, missed, strict=True)):
            events.append((layer_idx, experts, number % E))
            if number % (place + 2) == 0:
                chosen, read = watcher.snapshot()
                with case(place, number):
                    np.testing.assert_array_equal(chosen, counted([(l, routes) for l, routes, _ in events]))
                    expected = counted([(l, np.array([expert])) for l, _, expert in events])
                    np.testing.assert_array_equal(read, expected)
                events.clear()


def test_no_count_is_lost_between_threads() -> None:
    live, number = LiveCounts(L, E), 2000
    watchers = [live.watch() for _ in range(2)]
    sums = np.zeros((2, L, E), np.int64)
    ends = threading.Event()

    def look(place: int) -> None:
        while not ends.is_set():
            sums[place] += watchers[place].snapshot()[0]

    threads = [threading.Thread(target=look, args=[place]) for place in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(number):
        live.routed(turn % L, np.array([[turn % E, (turn + 3) % E]]))
    ends.set()
    for thread in threads:
        thread.join()
    for place, watcher in enumerate(watchers):
        sums[place] += watcher.snapshot()[0]
    expected = counted([(turn % L, np.array([[turn % E, (turn + 3) % E]])) for turn in range(number)])
    np.testing.assert_array_equal(sums, [expected, expected])


def test_the_observer_sees_the_routes_that_a_recording_has(folder: Path, tmp_path: Path) -> None:
    record = tmp_path / "routes.safetensors"
    with running(folder, offloads=True, record=record) as engine:
        live = live_counts(engine)
        run_all(engine)
        weights = engine.offloaded
        is_resident = weights.resident_experts()
        num_missed = sum(counts.needed - counts.hits for counts in (weights.prefill, weights.decode))
    routes = read_recording(record).passes.routes  # [N, L, k]
    expected = counted([(l, routes[:, l]) for l in range(L)])
    chosen, read = live.totals()
    np.testing.assert_array_equal(chosen, expected)
    assert expected.sum() == len(IDS) * L * 2
    assert read.sum() >= num_missed > 0, "missing experts, and those that were predicted"
    assert 0 < is_resident.sum() < L * E
    for options in ({"read": "map"}, {"read": "map", "kernels": "torch"}):
        with case(options), running(folder, **options) as engine:
            live = live_counts(engine)
            run_all(engine)
            chosen, read = live.totals()
            np.testing.assert_array_equal(chosen[:-1], expected[:-1])
            assert chosen[-1].sum() == (1 + len(IDS[20:])) * 2, "of a prompt the last token alone has experts there"
            assert bool(read.sum()) == ("kernels" in options), "torch reads experts, kernels use mapped files"


def test_a_run_without_an_observer_counts_nothing(folder: Path) -> None:
    with running(folder, offloads=True) as engine:
        live = LiveCounts(L, E)
        run_all(engine)
        assert not live.totals()[0].any() and engine.weights.observer is None


def test_bits_and_bytes_are_as_the_page_reads_them() -> None:
    rng = np.random.default_rng(2)
    for shape in ((3, 8), (5, 7), (1, 1), (94, 128)):
        with case(shape):
            flags, counts = rng.random(shape) < 0.3, rng.integers(0, 300, shape).astype(np.uint32)
            packed = base64.b64decode(bitmap(flags))
            bits = [packed[i >> 3] >> (i & 7) & 1 for i in range(flags.size)]
            assert bits == flags.ravel().astype(int).tolist()
            assert list(base64.b64decode(saturated(counts))) == np.minimum(counts, 255).ravel().tolist()


def test_the_facts_of_an_engine(folder: Path) -> None:
    for mode, options in (("mapped", {"read": "map"}), ("offloaded", {"offloads": True})):
        with case(mode), running(folder, **options) as engine:
            facts = engine_facts(engine, FixedScheduler(), "tiny")
            assert facts["mode"] == mode and facts["model"] == "tiny" and facts["layers"] == [0, 1, 2]
            assert (facts["num_experts"], facts["experts_per_token"]) == (E, 2)
            assert (facts["num_slots"], facts["context_tokens"]) == (2, CONTEXT)
            assert (facts["budget_bytes"] is None) == (facts["pages_total"] is None) == (mode == "mapped")
            assert (facts["pack"]["kv_dtype"], facts["pack"]["numerics"]) == ("f32", "exact")


def test_the_facts_of_a_pack_are_those_that_inspect_prints(folder: Path, tmp_path: Path) -> None:
    measured = shutil.copytree(folder, tmp_path / "packed")

    def facts() -> dict[str, Any]:
        with running(measured, read="map", kv_dtype="f16") as engine:
            found: dict[str, Any] = engine_facts(engine, FixedScheduler(), "tiny")["pack"]
        return found

    inspected = CliRunner().invoke(main, ["inspect", str(measured)]).output
    found = facts()
    assert f"{found['bits_per_weight']:.2f} bits an expert weight" in inspected
    assert re.search(rf"total +{found['bytes']:,} ", inspected)
    assert (found["loss"], found["kv_dtype"]) == (None, "f16")
    some = Estimate(0.5, 0.25)
    against = SourceQuality("", True, 256, Estimate(0.03125, 0.5), some, 0.0, some, Estimate(0.0625, 0.5), some, 0, 0)
    with Pack(measured) as pack:
        quality = Quality("prose", "", 1, 512, 511, 1000, None, Estimate(24.5, 1.0), against)
        write_sidecar(measured, QUALITY_FILE, quality, pack.manifest.root)
    assert facts()["loss"] == {
        "perplexity": 24.5,
        "perplexity_increase": 0.0625,
        "kl": 0.03125,
        "kl_half_width": 0.5,
        "num_tokens": 511,
        "text": "prose",
    }
    (measured / QUALITY_FILE).write_text("{}")
    assert facts()["loss"] is None, "the server answers without figures"


def test_a_slow_decode_keeps_its_speed_between_tokens_and_loses_it_at_the_end(folder: Path) -> None:
    async def watch(engine: Engine, scheduler: FixedScheduler) -> list[float]:
        events, found = events_of(engine, scheduler), []
        await anext(events), await anext(events)
        for counts in (
            replace(COUNTS, generated_tokens=1, decode_s=4.0),
            replace(COUNTS, generated_tokens=1, decode_s=4.0, waiting=1),
            replace(COUNTS, generated_tokens=1, decode_s=4.0, running=0),
        ):
            scheduler.now = counts
            await asyncio.sleep(0.3)
            found.append(json.loads((await anext(events))["data"])["tokens_per_s"])
        return found

    with pytest.MonkeyPatch.context() as patch, running(folder, read="map") as engine:
        patch.setattr("moe_pack.runtime.serve.http.live.RATE_S", 0.2)
        assert asyncio.run(watch(engine, FixedScheduler())) == [0.25, 0.25, 0.0]


def test_states_tell_what_an_engine_did_and_stop_when_nothing_changes(folder: Path) -> None:
    async def watch(engine: Engine, scheduler: FixedScheduler) -> tuple[list[dict[str, str]], bool]:
        events, found = events_of(engine, scheduler), []
        found += [await anext(events), await anext(events)]
        run_all(engine)
        scheduler.now = replace(COUNTS, prompt_tokens=20, generated_tokens=10, prefill_s=0.5, decode_s=2.0)
        found.append(await anext(events))
        found.append(await anext(events))  # the same rates, with nothing since the last event
        later = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.6)
        is_quiet = not later.done()
        later.cancel()
        return found, is_quiet

    for options in ({"offloads": True}, {"read": "map"}):
        with case(options), running(folder, **options) as engine:
            found, is_quiet = asyncio.run(watch(engine, FixedScheduler()))
            names, states = [event["event"] for event in found], [json.loads(event["data"]) for event in found]
            assert names == ["engine", "state", "state", "state"]
            assert not any(base64.b64decode(states[1]["chosen"])) and any(base64.b64decode(states[2]["chosen"]))
            assert not any(base64.b64decode(states[3]["chosen"]))
            assert (states[2]["tokens_per_s"], states[2]["prefill_tokens_per_s"]) == (5.0, 40.0)
            assert states[2]["bytes_per_token"] > 0 and states[2]["running"] == 1
            if "read" in options:
                assert states[2]["resident"] is None and states[2]["hit_rate"] is None
            else:
                assert 0 <= states[2]["hit_rate"] < 1 and len(base64.b64decode(states[2]["resident"])) == 3
            assert states[2]["slots"][0] == {"state": "prefill", "tokens": 17, "context": CONTEXT}
            assert is_quiet or states[3]["read_bytes_per_s"] > 0, "rates of bytes change as time passes"


def test_engine_events_come_over_http(folder: Path) -> None:
    app, found = FastAPI(), {}
    with running(folder, offloads=True) as engine:
        app.include_router(engine_router(live_counts(engine), engine, FixedScheduler(), "tiny"))
        with served(app) as url, urllib.request.urlopen(f"{url}engine", timeout=HANG_S) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            while "state" not in found:
                name, values = response.readline().decode().partition(": ")[::2]
                if name == "event":
                    event = values.strip()
                elif name == "data":
                    found[event] = json.loads(values)
    assert found["engine"]["model"] == "tiny" and len(found["state"]["slots"]) == 2


def test_the_page_runs_its_own_script_alone() -> None:
    app = FastAPI()
    app.include_router(page_router())
    response = TestClient(app).get("/")
    assert response.status_code == 200 and response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and policy.count("sha256-") == 2
    # Nothing comes from elsewhere, and no text of a model can become markup.
    for word in ("http:", "https:", "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in response.text, word
