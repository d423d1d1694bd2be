"""What stands before the scheduler: pools of threads, grammars and prompts that take long, clients that leave early."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from cases import case
from scripted_scheduler import Characters, LinesTemplate, NamedGrammar, NamedGrammars, ScriptedScheduler
from served import Served, served
from waiting import HANG_S, wait_until

from moe_pack.runtime.serve.requests import QueueFullError
from moe_pack.runtime.serve.service import Service
from moe_pack.runtime.serve.workers import WorkPool
from moe_pack.runtime.templates import prompt_of

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
GBNF = 'root ::= "a"'


def test_a_pool_runs_in_turn_refuses_too_many_and_drops_who_left() -> None:
    """One thread, two places: a third call is refused, and a call whose client left never begins."""
    begun: list[int] = []
    goes_on = threading.Event()

    def call(number: int) -> Callable[[], int]:
        def run() -> int:
            begun.append(number)
            assert goes_on.wait(HANG_S)
            return number

        return run

    async def scenario() -> None:
        pool = WorkPool("calls", num_threads=1, most_waiting=2, deadline_s=HANG_S)
        tasks = [asyncio.create_task(pool.run(call(number))) for number in range(3)]
        await asyncio.sleep(0)
        await asyncio.to_thread(wait_until, lambda: begun == [0])
        with pytest.raises(QueueFullError, match="2 calls are waiting"):
            await pool.run(call(3))
        tasks[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        tasks.append(asyncio.create_task(pool.run(call(4))))  # has the place of the one that left
        await asyncio.sleep(0)
        goes_on.set()
        assert [await tasks[place] for place in (0, 2, 3)] == [0, 2, 4]
        assert begun == [0, 2, 4]

    asyncio.run(scenario())


def test_a_call_that_waits_too_long_is_answered_and_never_begins() -> None:
    goes_on = threading.Event()
    begun: list[str] = []

    async def scenario() -> None:
        pool = WorkPool("calls", num_threads=1, most_waiting=2, deadline_s=0.2)
        first = asyncio.create_task(pool.run(lambda: goes_on.wait(HANG_S)))
        second = asyncio.create_task(pool.run(lambda: begun.append("second")))
        for task in (first, second):
            with pytest.raises(QueueFullError, match=r"within 0\.2 seconds"):
                await task
        goes_on.set()
        later = WorkPool("calls", num_threads=1, most_waiting=2, deadline_s=HANG_S)
        assert await later.run(lambda: 5) == 5
        with pytest.raises(TimeoutError, match="its own"):
            await later.run(_time_out)
        assert not begun

    asyncio.run(scenario())


def _time_out() -> None:
    raise TimeoutError("its own")


class SlowGrammars(NamedGrammars):
    """Compiles GBNF when it may; `compiled` lists what began."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.goes_on = threading.Event()

    def gbnf(self, text: str) -> NamedGrammar:
        self.compiled.append(text)
        assert self.goes_on.wait(HANG_S)
        return super().gbnf(text)

    def json_schema(self, schema: Mapping[str, Any]) -> NamedGrammar:
        self.compiled.append(json.dumps(schema))
        return super().json_schema(schema)


@contextmanager
def served_with(grammars: NamedGrammars, **more: Any) -> Iterator[Served]:
    with served(loading=True, **more) as server:
        server.app.state.service = service_with(server.scheduler, grammars)
        yield server


def service_with(scheduler: ScriptedScheduler, grammars: NamedGrammars) -> Service:
    from scripted_scheduler import FACTS, BracketParser

    return Service(
        FACTS,
        scheduler,
        Characters(),
        LinesTemplate(),
        lambda prompt_end, tools: BracketParser(),
        grammars,
        lambda token: bytes([token % 256]),
    )


@contextmanager
def asked(server: Served, body: Mapping[str, Any], path: str = "/v1/chat/completions") -> Iterator[socket.socket]:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), HANG_S) as connection:
        connection.sendall(head.encode() + content)
        yield connection


def test_nothing_waits_for_grammars_and_those_of_clients_that_left_never_begin() -> None:
    grammars = SlowGrammars()
    with served_with(grammars) as server:
        try:
            with asked(server, {"messages": HELLO, "grammar": GBNF}):
                wait_until(lambda: len(grammars.compiled) == 1)
                for number in range(30):  # their clients leave at once
                    with asked(server, {"messages": HELLO, "grammar": f"{GBNF} # {number}"}):
                        pass
                assert server.http.post("/v1/chat/completions", json={"messages": HELLO}).status_code == 200
                assert server.http.post("/v1/messages/count_tokens", json={"messages": HELLO}).status_code == 200
                with asked(server, {"messages": HELLO, "grammar": "last ::="}) as last:
                    grammars.goes_on.set()
                    assert last.recv(100).startswith(b"HTTP/1.1 200")
            assert grammars.compiled[0] == GBNF and grammars.compiled[-1] == "last ::="
            assert len(grammars.compiled) < 30
        finally:
            grammars.goes_on.set()


def test_too_many_grammars_are_refused_with_a_time_to_come_back() -> None:
    grammars = SlowGrammars()
    with served_with(grammars) as server:
        try:
            statuses: list[int] = []

            def ask(number: int) -> None:
                answer = server.http.post(
                    "/v1/chat/completions", json={"messages": HELLO, "grammar": f"{GBNF} # {number}"}
                )
                statuses.append(answer.status_code)
                if answer.status_code == 429:
                    assert int(answer.headers["retry-after"]) >= 1

            threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
            for thread in threads:
                thread.start()
            wait_until(lambda: 429 in statuses)
            assert set(statuses) == {429}
            grammars.goes_on.set()
            for thread in threads:
                thread.join(HANG_S)
            assert set(statuses) == {200, 429} and len(statuses) == 40
        finally:
            grammars.goes_on.set()


def test_a_grammar_is_compiled_once() -> None:
    """For several answers, for several requests, and for one that has an error."""
    grammars = SlowGrammars()
    grammars.goes_on.set()
    with served_with(grammars) as server:
        for body in ({"n": 5, "grammar": GBNF}, {"grammar": GBNF}):
            assert server.http.post("/v1/chat/completions", json={"messages": HELLO, **body}).status_code == 200
        assert server.http.post("/v1/completions", json={"prompt": ["a", "b"], "grammar": GBNF}).status_code == 200
        assert grammars.compiled == [GBNF]
        given = [request.grammar for request in server.scheduler.requests]
        assert len(given) == 8 and len({id(grammar) for grammar in given}) == 8
        wrong = {"type": "json_schema", "json_schema": {"schema": {"type": "wrong"}}}
        messages = set()
        for _ in range(3):
            answer = server.http.post("/v1/chat/completions", json={"messages": HELLO, "response_format": wrong})
            assert answer.status_code == 400
            messages.add(answer.json()["error"]["message"])
        assert len(messages) == 1 and len(grammars.compiled) == 2
        for number in range(20):  # others take its place
            server.http.post("/v1/completions", json={"prompt": "a", "grammar": f"{GBNF} # {number}"})
        server.http.post("/v1/completions", json={"prompt": "a", "grammar": GBNF})
        assert grammars.compiled.count(GBNF) == 2


def test_a_prompt_far_beyond_the_context_is_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,048 tokens of 4 bytes at most: 8,192 bytes may fit, and one more does not."""
    encoded: list[int] = []

    def encode(self: Characters, text: str, special_tokens: bool = True) -> list[int]:
        encoded.append(len(text))
        return [ord(character) % 256 for character in text]

    monkeypatch.setattr(Characters, "encode", encode)
    with served() as server:
        for length, is_encoded in ((8193, False), (8192, True), (200_000, False)):
            with case(length):
                text = "a" * length
                chat = [{"role": "user", "content": text[len("user: \nassistant: ") :]}]
                bodies: list[tuple[str, dict[str, Any]]] = [
                    ("/v1/chat/completions", {"messages": chat}),
                    ("/v1/completions", {"prompt": text}),
                    ("/v1/completions", {"prompt": ["a", text]}),
                    ("/v1/responses", {"input": chat[0]["content"]}),
                    ("/v1/messages", {"messages": chat, "max_tokens": 5}),
                ]
                for path, body in bodies:
                    encoded.clear()
                    answer = server.http.post(path, json=body)
                    assert answer.status_code == 400
                    assert (max(encoded, default=0) > 1) == is_encoded
                    if path.startswith("/v1/c"):
                        assert answer.json()["error"]["code"] == "context_length_exceeded"
        encoded.clear()
        counted = server.http.post("/v1/messages/count_tokens", json={"messages": chat})
        assert counted.status_code == 400 and not encoded
        tokens = server.http.post("/v1/completions", json={"prompt": [5] * 5000})
        assert tokens.status_code == 400 and "5000 tokens" in tokens.json()["error"]["message"]


class Words:
    """A tokenizer of words and of `<mark>`, which keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        self.asked.append(text)
        return [len(word) for word in text.replace("<mark>", " <mark> ").split()]


def test_a_conversation_is_encoded_once() -> None:
    before = "one two "
    for begun in ("<mark> three", "three", ""):
        with case(begun):
            words = Words()

            def render(adds: bool, begun: str = begun) -> str:
                return before + begun if adds else before

            prompt = prompt_of(words, render)
            assert prompt.ids == tuple(Words().encode(before + begun))
            assert prompt.stable_tokens == 2
            assert words.asked[:2] == [before + begun, begun]
            assert (len(words.asked) == 2) == bool(begun)
