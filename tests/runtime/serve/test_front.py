"""The parts before the scheduler: pools of threads, grammars and prompts that take long, clients that leave early."""

import asyncio
import gzip
import json
import select
import socket
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import pytest
from support.cases import case
from support.scripted_scheduler import Characters, NamedGrammar, NamedGrammars, Script, scripted_service
from support.served import Served, posted, served
from support.waiting import HANG_S, wait_until

from moe_pack.runtime.serve.grammars import TokenGrammar
from moe_pack.runtime.serve.http import bodies, connections
from moe_pack.runtime.serve.http.app import ServeOptions
from moe_pack.runtime.serve.requests import QueueFullError
from moe_pack.runtime.serve.service import WorkPool
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
        refused = asyncio.create_task(pool.run(call(3)))
        await asyncio.sleep(0)
        assert refused.done()
        with pytest.raises(QueueFullError, match="2 calls are waiting"):
            await refused
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

    def gbnf(self, text: str, param: str) -> NamedGrammar:
        self.compiled.append(text)
        assert self.goes_on.wait(HANG_S)
        return super().gbnf(text, param)

    def json_schema(self, schema: Mapping[str, Any], param: str) -> NamedGrammar:
        self.compiled.append(json.dumps(schema))
        return super().json_schema(schema, param)


@contextmanager
def served_with(
    grammars: NamedGrammars, scripts: tuple[Script, ...] = (), options: ServeOptions | None = None
) -> Iterator[Served]:
    with served(*scripts, loading=True, options=options) as server:
        server.app.state.service = scripted_service(server.scheduler, grammars=grammars)
        try:
            yield server
        finally:
            if isinstance(grammars, SlowGrammars):
                grammars.goes_on.set()


def asked(server: Served, body: object, path: str = "/v1/chat/completions") -> AbstractContextManager[socket.socket]:
    return posted(server.port, path, body)


def wait_for_work(is_so: Callable[[], bool], connection: socket.socket) -> None:
    """Waits until something is so before a connection has its answer, which would say why it is not."""
    wait_until(lambda: is_so() or bool(select.select([connection], [], [], 0)[0]))
    assert is_so(), connection.recv(1000)


def test_nothing_waits_for_grammars_and_those_of_clients_that_left_never_begin() -> None:
    grammars = SlowGrammars()
    with served_with(grammars) as server:
        with asked(server, {"messages": HELLO, "grammar": GBNF}) as first:
            wait_for_work(lambda: len(grammars.compiled) == 1, first)
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


def test_too_many_grammars_are_refused_with_a_time_to_come_back() -> None:
    grammars = SlowGrammars()
    with served_with(grammars) as server:
        statuses: list[int] = []

        def ask(number: int) -> None:
            answer = server.http.post("/v1/chat/completions", json={"messages": HELLO, "grammar": f"{GBNF} # {number}"})
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


def test_the_grammar_that_was_not_used_for_longest_makes_room() -> None:
    grammars = SlowGrammars()
    grammars.goes_on.set()
    with served_with(grammars) as server:
        for number in range(20):
            for grammar in (GBNF, f"{GBNF} # {number}"):
                server.http.post("/v1/completions", json={"prompt": "a", "grammar": grammar})
    assert len(grammars.compiled) == 21 and grammars.compiled.count(GBNF) == 1


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
                asked_for: list[tuple[str, dict[str, Any]]] = [
                    ("/v1/chat/completions", {"messages": chat}),
                    ("/v1/completions", {"prompt": text}),
                    ("/v1/completions", {"prompt": ["a", text]}),
                    ("/v1/responses", {"input": chat[0]["content"]}),
                    ("/v1/messages", {"messages": chat, "max_tokens": 5}),
                ]
                for path, body in asked_for:
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


class LimitedGrammar(TokenGrammar):
    """A grammar that passes a limit while it is followed."""

    def __init__(self) -> None:
        self.fault = "the grammar is too large or too ambiguous to be followed further (limit); make it simpler"

    def copy(self) -> "LimitedGrammar":
        return LimitedGrammar()


class LimitedGrammars(NamedGrammars):
    def gbnf(self, text: str, param: str) -> Any:
        return LimitedGrammar()


def test_a_grammar_that_is_too_large_while_it_is_followed_is_the_clients_error() -> None:
    with served_with(LimitedGrammars(), scripts=(Script("some text", error="it cannot be followed"),)) as server:
        asked = {"messages": HELLO, "grammar": GBNF}
        answer = server.http.post("/v1/chat/completions", json=asked)
        assert answer.status_code == 400 and "too large" in answer.json()["error"]["message"]
        streamed = server.http.post("/v1/chat/completions", json={**asked, "stream": True})
        last = json.loads(streamed.text.strip().split("data: ")[-1])
        assert last["error"]["type"] == "invalid_request_error" and "too large" in last["error"]["message"]
        plain = server.http.post("/v1/chat/completions", json={"messages": HELLO})
        assert plain.status_code == 500, "the engine's own error"


# ---- connections ----------------------------------------------------------------------------------------------------


def test_idle_connections_give_way_to_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "most_connections", lambda: 16)
    monkeypatch.setattr(connections, "HEAD_SECONDS", HANG_S)
    with served(Script("slow")) as server, ExitStack() as stack:
        server.scheduler.speaks.clear()
        busy = stack.enter_context(asked(server, {"messages": HELLO}))
        wait_for_work(lambda: bool(server.scheduler.tickets), busy)
        opened = []
        for number in range(60):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), HANG_S))
            if number % 2:
                one.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nX-Half: ")
            opened.append(one)
        assert server.http.get("/health").status_code == 200
        assert server.num_connections() <= 16
        for one in opened:
            one.setblocking(False)
        with pytest.raises(ConnectionError):
            assert not opened[0].recv(1)  # the oldest one was closed
            raise ConnectionError
        with pytest.raises(BlockingIOError):
            opened[-1].recv(1)
        server.scheduler.speaks.set()
        assert busy.recv(100).startswith(b"HTTP/1.1 200"), "a connection that waits for its answer stays"


def test_busy_connections_do_not_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "most_connections", lambda: 4)
    with served(Script("slow")) as server, ExitStack() as stack:
        server.scheduler.speaks.clear()
        busy = [stack.enter_context(asked(server, {"messages": HELLO})) for _ in range(4)]
        wait_for_work(lambda: len(server.scheduler.tickets) == 4, busy[-1])
        with socket.create_connection(("127.0.0.1", server.port), HANG_S) as one:
            assert one.recv(100).startswith(b"HTTP/1.1 503")
        server.scheduler.speaks.set()
        assert all(one.recv(100).startswith(b"HTTP/1.1 200") for one in busy)


def test_a_head_that_does_not_come_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    with served() as server:
        for begin in (b"", b"GET /health HTTP/1.1\r\nHost: a\r\nX: ", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\nGET /h"):
            with case(begin), socket.create_connection(("127.0.0.1", server.port), HANG_S) as one:
                one.sendall(begin)
                with suppress(ConnectionError):
                    while one.recv(1000):
                        pass


def test_a_connection_without_another_request_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", HANG_S)
    monkeypatch.setattr(connections, "KEEP_ALIVE_SECONDS", 0)
    with served() as server, socket.create_connection(("127.0.0.1", server.port), HANG_S) as one:
        one.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"".join(iter(lambda: one.recv(1000), b"")).startswith(b"HTTP/1.1 200")


def test_a_client_that_does_not_read_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for the page, of some 50 kB, so often that the answers fill all buffers between server and client."""
    monkeypatch.setattr(connections, "READ_SECONDS", 0.2)
    with served() as server, socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(("127.0.0.1", server.port))
        one.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 400)
        wait_until(lambda: server.num_connections() == 1)
        wait_until(lambda: server.num_connections() == 0)


# ---- bodies and who may ask -----------------------------------------------------------------------------------------


def test_bodies_may_be_compressed_and_have_the_same_limit() -> None:
    plain = json.dumps({"messages": HELLO}).encode()
    raw = zlib.compressobj(wbits=-15)
    bomb = gzip.compress(b" " * 50_000_000)
    with served(options=ServeOptions(drain_s=1, max_body_bytes=100_000)) as server:
        for encoding, body, status in (
            ("gzip", gzip.compress(plain), 200),
            ("deflate", zlib.compress(plain), 200),
            ("deflate", raw.compress(plain) + raw.flush(), 200),
            ("identity", plain, 200),
            ("GZIP", gzip.compress(plain), 200),
            ("gzip", bomb, 413),
            ("gzip", gzip.compress(b" " * 100_001), 413),
            ("gzip", gzip.compress(plain)[:-5], 400),
            ("gzip", gzip.compress(plain) + b"more", 400),
            ("gzip", plain, 400),
            ("br", plain, 415),
            ("zstd", plain, 415),
            ("gzip, gzip", gzip.compress(gzip.compress(plain)), 415),
        ):
            with case(encoding, status):
                headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
                answer = server.http.post("/v1/chat/completions", content=body, headers=headers)
                assert answer.status_code == status, answer.text


def test_a_body_is_unpacked_up_to_its_limit_alone() -> None:
    bomb = gzip.compress(b" " * 50_000_000)
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    with served(options=ServeOptions(drain_s=1, max_body_bytes=1_000_000)) as server:
        tracemalloc.start()
        try:
            assert server.http.post("/v1/completions", content=bomb, headers=headers).status_code == 413
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert most < 20_000_000


def test_bodies_are_json_in_utf_8() -> None:
    text = '{"messages": [{"role": "user", "content": "Grüße"}]}'
    with served() as server:
        for encoding in ("latin-1", "utf-16", "utf-16-le", "utf-32"):
            with case(encoding):
                headers = {"Content-Type": f"application/json; charset={encoding}"}
                answer = server.http.post("/v1/chat/completions", content=text.encode(encoding), headers=headers)
                assert answer.status_code == 400 and "UTF-8" in answer.json()["error"]["message"]
        for kind, status in (
            ("application/json", 200),
            ("application/json; charset=utf-8", 200),
            ("APPLICATION/JSON", 200),
            ("application/x-www-form-urlencoded", 415),
            ("text/plain", 415),
            ("", 415),
        ):
            with case(kind):
                answer = server.http.post("/v1/chat/completions", content=text.encode(), headers={"Content-Type": kind})
                assert answer.status_code == status


def test_bodies_of_very_many_values_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_VALUES", 100)
    punctuation = '",[{' * 100
    with served() as server:
        for name, body, status in (
            ("tokens", {"prompt": [5] * 200}, 413),
            ("lists", {"prompt": "a", "metadata": {"a": [[]] * 60}}, 413),
            ("objects", {"prompt": "a", "metadata": {"a": [{}] * 60}}, 413),
            ("a text of the same characters", {"prompt": punctuation}, 200),
            ("escapes in a text", {"prompt": '\\",' * 100 + "\\"}, 200),
            ("few", {"prompt": [5] * 90}, 200),
        ):
            with case(name):
                assert server.http.post("/v1/completions", json=body).status_code == status


def test_large_bodies_wait_for_room_and_small_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bodies fill the room: one whose client sends the rest later, and one that becomes a prompt slowly."""
    monkeypatch.setattr(bodies, "SMALL_BYTES", 1000)
    monkeypatch.setattr(bodies, "ROOM_SECONDS", 0.2)
    grammars, large = SlowGrammars(), {"prompt": "a", "metadata": {"a": "a" * 9000}}
    with served_with(grammars, options=ServeOptions(drain_s=1, max_body_bytes=10_000)) as server, ExitStack() as stack:

        def status(body: dict[str, Any], **how: Any) -> int:
            content = json.dumps(body).encode()
            headers = {"Content-Type": "application/json", **how.pop("headers", {})}
            for change in how.values():
                content = change(content)
            return server.http.post("/v1/completions", content=content, headers=headers).status_code

        packed = {"pack": gzip.compress, "headers": {"Content-Encoding": "gzip"}}
        pieces: dict[str, Any] = {"cut": lambda content: iter([content[:500], content[500:]])}
        assert [status(large), status(large, **packed), status(large, **pieces)] == [200, 200, 200]
        head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9500\r\n\r\n{"
        slow = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), HANG_S))
        slow.sendall(head.encode())
        second = stack.enter_context(asked(server, {**large, "grammar": GBNF}, "/v1/completions"))
        wait_for_work(lambda: bool(grammars.compiled), second)
        assert [status(large), status(large, **packed), status(large, **pieces)] == [429, 429, 429]
        for _ in range(3):
            assert [status({"prompt": "a"}), status({"prompt": "a"}, **packed)] == [200, 200]
        monkeypatch.setattr(bodies, "ROOM_SECONDS", HANG_S)
        slow.close()  # its place is free
        assert [status(large), status(large, **packed), status(large, **pieces)] == [200, 200, 200]
        grammars.goes_on.set()


def test_the_room_is_given_back_when_the_answer_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "SMALL_BYTES", 1000)
    large = {"prompt": "a", "metadata": {"a": "a" * 9000}, "stream": True}
    with served(options=ServeOptions(drain_s=1, max_body_bytes=10_000)) as server, ExitStack() as stack:
        server.scheduler.speaks.clear()
        for _ in range(5):
            assert stack.enter_context(server.http.stream("POST", "/v1/completions", json=large)).status_code == 200
        server.scheduler.speaks.set()


def test_head_is_get_without_a_body() -> None:
    with served() as server:
        for path in ("/health", "/v1/models", "/", "/metrics", "/v1/models/demo-moe", "/nowhere"):
            with case(path):
                head, get = server.http.head(path), server.http.get(path)
                assert (head.status_code, head.content) == (get.status_code, b"")
                assert head.headers["content-type"] == get.headers["content-type"]
        assert server.http.head("/v1/chat/completions").status_code == 405


def test_pages_of_other_sites_may_not_use_a_server_without_a_key() -> None:
    def status(server: Served, origin: str | None, path: str = "/v1/chat/completions") -> int:
        headers = {} if origin is None else {"Origin": origin}
        if path == "/v1/chat/completions":
            return server.http.post(path, json={"messages": HELLO}, headers=headers).status_code
        return server.http.get(path, headers=headers).status_code

    foreign = ("http://evil.example", "null", "http://127.0.0.1", "http://localhost:3000", "https://a.example")
    with served() as server:
        own = f"http://127.0.0.1:{server.port}"
        for path in ("/v1/chat/completions", "/v1/models", "/metrics", "/nowhere"):
            for origin in foreign:
                with case(path, origin):
                    assert status(server, origin, path) == 403
            assert {status(server, None, path), status(server, own, path)} <= {200, 404}
        assert status(server, foreign[0], "/health") == 200
    with served(options=ServeOptions(cors_origins=("https://a.example",), drain_s=1)) as server:
        assert [status(server, origin) for origin in foreign] == [403, 403, 403, 403, 200]
    with served(options=ServeOptions(cors_origins=("*",), drain_s=1)) as server:
        assert {status(server, origin) for origin in foreign} == {200}
    with served(options=ServeOptions(api_keys=("key",), drain_s=1)) as server:
        assert {status(server, origin) for origin in foreign} == {401}, "a page has to have the key"
