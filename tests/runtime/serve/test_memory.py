"""The memory of a server's engine: given back on request or when nobody asks, taken again for the next request."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from support.cases import case
from support.models import PackMaker
from support.running_scheduler import CONTEXT, WORDS, Answer, request
from support.served import running
from support.waiting import HANG_S, wait_until

from moe_pack.formats import Pack, RunError
from moe_pack.runtime import Engine, EngineOptions, SamplingOptions, Text
from moe_pack.runtime.cli.serve import ServeCommand, _service_of
from moe_pack.runtime.drafts import Drafts, NgramDrafter
from moe_pack.runtime.offload import Sequences
from moe_pack.runtime.offload.budgets import BudgetTooSmall
from moe_pack.runtime.serve.http.app import ServeOptions, create_app, server_of
from moe_pack.runtime.serve.memory import EngineMemory, NoMemoryError
from moe_pack.runtime.serve.requests import RequestError
from moe_pack.runtime.serve.scheduler import BatchScheduler

BUDGET, LEAST, CONTEXT_BYTES = 11 << 30, 4 << 30, 500 << 20
KEY = {"Authorization": "Bearer secret"}
PROMPT = {"prompt": WORDS, "max_tokens": 8, "temperature": 0}


class LiveEngine:
    """A double of an engine on a GPU: it computes on the CPU, and says that it has used its budget."""

    def __init__(self, opened: Pack) -> None:
        self._pack, self.pack, self.budget = opened, opened, BUDGET
        self.free = 1 << 40  # of its GPU, without what it uses
        self.other_gpus: tuple[Any, ...] = ()
        self.events: list[str] = []
        self.pause = threading.Event()  # while it is cleared, memory is not given back
        self.pause.set()
        self._engine: Engine | None = None
        self._make()

    def _make(self) -> None:
        options = EngineOptions(read="map", chunk_tokens=16)
        self._engine = Engine(self._pack, options, CONTEXT, sequences=Sequences(2, checkpoints=2))
        self.drafts = Drafts(NgramDrafter(), None)

    @property
    def facts(self) -> Any:
        return SimpleNamespace(gpu=SimpleNamespace(use=SimpleNamespace(budget=self.budget)), other_gpus=self.other_gpus)

    @property
    def is_released(self) -> bool:
        return self._engine is None

    @property
    def decoder(self) -> Any:
        assert self._engine is not None
        return self._engine.decoder

    def used_bytes(self) -> int:
        return CONTEXT_BYTES if self._engine is None else self.budget

    def release(self) -> None:
        self.events.append("release")
        assert self.pause.wait(HANG_S)
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        del self.drafts

    def take(self, budget_bytes: int | None = None) -> None:
        self.events.append(f"take {budget_bytes}")
        budget = budget_bytes or self.budget
        if budget < LEAST:
            raise BudgetTooSmall(budget, LEAST, "at least 4.0 GiB are needed", "give more")
        if budget > self.free:
            raise RunError(f"budget: {budget} is more than is free")
        self.budget = budget
        self._make()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


@dataclass
class Clock:
    """A clock that a test sets."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Running:
    """A scheduler over the double, and its parts."""

    scheduler: BatchScheduler
    engine: LiveEngine
    memory: EngineMemory
    text: Text
    pack: Pack
    clock: Clock = field(default_factory=Clock)

    def ask(self, max_tokens: int = 8) -> Answer:
        answer = Answer()
        self.scheduler.submit(request(self.text.encode(WORDS), max_tokens), answer.events.put)
        return answer

    def wake(self) -> None:
        """Lets the scheduler look at the clock, which it would do when its wait is over."""
        answer = Answer()
        job = self.scheduler.submit(request([1, 2], 1), answer.events.put)
        job.cancel()


@contextmanager
def live(folder: Path, idle_s: float | None = None) -> Iterator[Running]:
    with ExitStack() as stack:
        opened = stack.enter_context(Pack(folder))
        engine, clock, text = stack.enter_context(closing(LiveEngine(opened))), Clock(), Text(opened)
        memory = EngineMemory(engine, idle_s, clock)  # type: ignore[arg-type]  # a double
        scheduler = BatchScheduler(engine.decoder, text, 64, None, engine.drafts, memory)
        stack.enter_context(closing(scheduler))
        yield Running(scheduler, engine, memory, text, opened, clock)


@pytest.fixture(scope="module")
def folder(demo_pack: PackMaker) -> Path:
    return demo_pack("none", 4)


def test_the_next_request_takes_the_memory_again_and_gets_the_same_answer(folder: Path) -> None:
    with live(folder) as server:
        expected = server.ask(30).wait()
        before = server.scheduler.counts().drafted
        state = server.scheduler.change_memory(0).result(HANG_S)
        assert state.is_released and (state.used_bytes, state.budget_bytes) == (CONTEXT_BYTES, BUDGET)
        assert server.scheduler.slots == () and server.scheduler.counts().drafted == before > 0
        assert server.scheduler.change_memory(0).result(HANG_S).is_released, "nothing is left to do"
        again = server.ask(30).wait()
        assert again.tokens == expected.tokens and again.end.cached_tokens == 0
        assert server.engine.events == ["release", "take None"]
        assert server.memory.state().used_bytes == BUDGET and not server.memory.state().is_released
        assert server.scheduler.counts().drafted > before


def test_requests_that_run_end_first_and_those_that_come_wait(folder: Path) -> None:
    with live(folder) as server:
        first = Answer()
        server.scheduler.submit(request(server.text.encode(WORDS), 6), first.take_in_steps)
        first.steps.release()
        wait_until(lambda: server.scheduler.counts().running == 1)
        done = [server.scheduler.change_memory(budget) for budget in (0, 8 << 30, None, 0)]
        later = server.ask()
        assert not any(each.done() for each in done) and server.engine.events == []
        for _ in range(20):
            first.steps.release()
        assert first.wait().end.reason == "length"
        states = [each.result(HANG_S) for each in done]
        assert [state.is_released for state in states] == [True, False, False, True]
        assert [state.budget_bytes for state in states] == [BUDGET, 8 << 30, 8 << 30, 8 << 30]
        assert later.wait().end.reason == "length"
        assert server.engine.events == ["release", f"take {8 << 30}", "release", "take None"]


def test_a_request_that_comes_while_memory_is_given_back_is_answered(folder: Path) -> None:
    with live(folder) as server:
        server.engine.pause.clear()
        done = server.scheduler.change_memory(0)
        wait_until(lambda: server.engine.events == ["release"])
        answer = server.ask()
        left, cancelled = server.scheduler, Answer()
        left.submit(request([1, 2], 1), cancelled.events.put).cancel()
        server.engine.pause.set()
        assert done.result(HANG_S).is_released
        assert answer.wait().end.reason == "length" and cancelled.wait().end.reason == "cancelled"


def test_after_a_time_without_requests_the_memory_is_given_back(folder: Path) -> None:
    with live(folder, idle_s=60) as server:
        server.clock.now = 59.0
        server.ask().wait()
        wait_until(lambda: server.scheduler.counts().running == 0)
        server.clock.now = 118.0
        server.wake()
        assert not server.memory.state().is_released
        server.clock.now = 119.5
        server.wake()
        wait_until(lambda: server.memory.state().is_released)
        assert server.memory.idle_left() is None, "it does not wait for the same again"
        server.ask().wait()
        assert server.engine.events == ["release", "take None"]
        assert server.memory.idle_left() == 60.0


def test_a_wrong_budget_leaves_the_engine_as_it_was(folder: Path) -> None:
    with live(folder) as server:
        with pytest.raises(RequestError, match=r"at least 4.0 GiB are needed"):
            server.scheduler.change_memory(1 << 30).result(HANG_S)
        assert server.engine.events == ["release", f"take {1 << 30}", "take None"]
        assert server.ask().wait().end.reason == "length" and server.memory.state().budget_bytes == BUDGET
        server.engine.other_gpus = (SimpleNamespace(use=SimpleNamespace(budget=BUDGET)),)
        with pytest.raises(RequestError, match="between several GPUs"):
            server.scheduler.change_memory(8 << 30)
        assert len(server.engine.events) == 3, "it goes on as it is"


def test_memory_that_others_took_is_asked_for_again_by_each_request(folder: Path) -> None:
    with live(folder) as server:
        server.scheduler.change_memory(0).result(HANG_S)
        server.engine.free = 1 << 30
        end = server.ask().wait().end
        assert end.reason == "unready" and "more than is free" in end.message
        with pytest.raises(NoMemoryError, match="more than is free"):
            server.scheduler.change_memory(None).result(HANG_S)
        assert server.scheduler.failure is None and server.memory.state().is_released
        server.engine.free = 1 << 40
        assert server.ask().wait().end.reason == "length"


def test_a_scheduler_that_ends_answers_what_was_asked(folder: Path) -> None:
    with live(folder) as server:
        server.engine.pause.clear()
        first, second = server.scheduler.change_memory(0), server.scheduler.change_memory(None)
        wait_until(lambda: server.engine.events == ["release"])
        closing_thread = threading.Thread(target=server.scheduler.close)
        closing_thread.start()
        server.engine.pause.set()
        closing_thread.join()
        for each in (first, second):
            assert each.exception(HANG_S) is None or "shutting down" in str(each.exception())
        with pytest.raises(RunError, match="shutting down"):
            server.scheduler.change_memory(0)


# ---- over HTTP -------------------------------------------------------------------------------------------------------


@contextmanager
def served(folder: Path, options: ServeOptions) -> Iterator[tuple[httpx2.Client, Running]]:
    with live(folder) as server:
        service = _service_of(server.pack, server.text, server.scheduler, ServeCommand(), SamplingOptions())
        app = create_app(service, options)
        with (
            running(server_of(app, "127.0.0.1", 0, options)) as port,
            httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=HANG_S) as http,
        ):
            yield http, server


def test_a_client_with_a_key_changes_the_budget(folder: Path) -> None:
    with served(folder, ServeOptions(api_keys=("secret",), drain_s=1)) as (http, server):

        def post(budget: object) -> Any:
            return http.post("/budget", json={"budget": budget}, headers=KEY)

        first = http.post("/v1/completions", json=PROMPT, headers=KEY).json()["choices"]
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert http.post("/budget", json={"budget": 0}, headers=headers).status_code == 401
            assert http.get("/budget", headers=headers).status_code == 401
        taken = {"budget": BUDGET, "used": BUDGET, "released": False}
        assert {**http.get("/budget", headers=KEY).json(), "seconds": 0} == {**taken, "seconds": 0}
        assert http.get("/health").json() == {"status": "ok", "memory": "taken"}
        for budget in (0, "release", "0"):
            answer = post(budget)
            assert answer.status_code == 200 and answer.json()["released"] and answer.json()["used"] == CONTEXT_BYTES
        assert http.get("/health").json() == {"status": "ok", "memory": "released"}
        assert http.get("/props", headers=KEY).json()["is_sleeping"]
        assert "moe_serve_gpu_released 1.0" in http.get("/metrics", headers=KEY).text
        assert http.post("/v1/completions", json=PROMPT, headers=KEY).json()["choices"] == first
        assert post("8G").json()["budget"] == post("take").json()["budget"] == post(8 << 30).json()["budget"] == 8 << 30
        for budget, says in (("much", "such as 11G"), (-1, "budget"), (1.5, "budget"), ("1G", "at least 4.0 GiB")):
            with case(budget):
                answer = post(budget)
                error = answer.json()["error"]
                assert answer.status_code == 400 and error["param"].startswith("budget") and says in error["message"]
        post("release")
        server.engine.free = 1 << 30
        for answer, status in ((post("take"), 409), (http.post("/v1/completions", json=PROMPT, headers=KEY), 503)):
            assert answer.status_code == status and "more than is free" in answer.json()["error"]["message"]
        server.engine.free = 1 << 40
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(post, ["release", "8G", "release", "take"]))
        assert {each.status_code for each in answers} == {200}


def test_without_a_key_nobody_changes_the_budget(folder: Path) -> None:
    with served(folder, ServeOptions(drain_s=1)) as (http, server):
        answer = http.post("/budget", json={"budget": 0})
        assert answer.status_code == 403 and "--api-key" in answer.json()["error"]["message"]
        assert http.get("/budget").json()["budget"] == BUDGET and server.engine.events == []


def test_a_model_on_the_cpu_has_no_memory_to_give_back(plain: Any) -> None:
    for answer in (plain.http.get("/budget"), plain.http.post("/budget", json={"budget": 0})):
        assert answer.status_code == 409 and "runs on the CPU" in answer.json()["error"]["message"]
    assert plain.http.get("/health").json() == {"status": "ok"} and not plain.http.get("/props").json()["is_sleeping"]
