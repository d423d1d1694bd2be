"""The application around the protocols: keys, limits, origins, clients that leave, counts, health."""

import asyncio
import socket
from collections.abc import MutableMapping
from functools import partial
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from fastapi.routing import APIRoute
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message
from support.cases import case
from support.scripted_scheduler import PlayedTicket, Script, ScriptedScheduler, scripted_service
from support.served import Served, posted, raw, served
from support.waiting import HANG_S, wait_until

from moe_pack.runtime.serve.http.app import OPEN_PATHS, ServeOptions, create_app

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
KEYS = ("first-key", "second-key")
LONG = Script("word " * 200)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1000},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 1000},
}


def endpoints(server: Served) -> list[tuple[str, str]]:
    """Every method and path of the application."""
    described = [(method.upper(), path) for path, one in server.app.openapi()["paths"].items() for method in one]
    routed = [
        (method, route.path)
        for route in server.app.routes
        if isinstance(route, APIRoute) or hasattr(route, "methods")
        for method in route.methods or ()
    ]
    return sorted({*described, *routed})


def test_everything_is_refused_without_a_key() -> None:
    with served(options=ServeOptions(api_keys=KEYS, drain_s=1)) as server:
        found = endpoints(server)
        assert {path for _, path in found} >= {*BODIES, "/v1/models", "/metrics", "/openapi.json", "/health"}
        strange = [("GET", "/nowhere"), ("GET", "/health/"), ("POST", "/v1"), ("TRACE", "/v1/models")]
        strange += [("OPTIONS", "/v1/models"), ("HEAD", "/metrics"), ("GET", "/docs")]
        wrong = [
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Bearer"},
            {"Authorization": f"Basic {KEYS[0]}"},
            {"Authorization": KEYS[0]},
            {"x-api-key": KEYS[0][:-1]},
            {"x-api-key": ""},
            {"Cookie": f"api_key={KEYS[0]}"},
        ]
        for method, path in [*found, *strange]:
            if path in OPEN_PATHS:
                assert server.http.request(method, path).status_code == 200
                continue
            for headers in wrong:
                with case(method, path, headers):
                    answer = server.http.request(method, f"{path}?api_key={KEYS[0]}", headers=headers)
                    assert answer.status_code == 401
                    if method != "HEAD":
                        error = answer.json()["error"]
                        assert error["type"] == "authentication_error" and "needs a key" in error["message"]
            for key in KEYS:
                for headers in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}):
                    with case(method, path, headers):
                        assert server.http.request(method, path, headers=headers).status_code != 401
        # As they are: a client's library would tidy them up.
        for target in ("//", "/health/../metrics", "/health/..%2fmetrics", "//health", "/health;/metrics", "/.", "*"):
            with case(target), raw(server.port, f"GET {target} HTTP/1.1\nHost: a\n\n") as connection:
                assert status_of(connection) == 401
        assert server.scheduler.requests == []


def test_clients_send_their_keys() -> None:
    with served(options=ServeOptions(api_keys=KEYS, drain_s=1)) as server:
        for key, is_right in ((KEYS[0], True), (KEYS[1], True), ("wrong", False)):
            with (
                case(key),
                openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as theirs,
                anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0) as other,
            ):
                if is_right:
                    assert theirs.chat.completions.create(model="demo-moe", messages=HELLO).choices
                    assert other.messages.create(model="demo-moe", messages=HELLO, max_tokens=5).content
                    continue
                with pytest.raises(openai.AuthenticationError) as caught:
                    theirs.chat.completions.create(model="demo-moe", messages=HELLO)
                assert caught.value.code == "invalid_api_key"
                with pytest.raises(anthropic.AuthenticationError):
                    other.messages.create(model="demo-moe", messages=HELLO, max_tokens=5)


def test_a_key_may_have_any_characters() -> None:
    with served(options=ServeOptions(api_keys=("schlüssel",), drain_s=1)) as server:
        for key, status in (("schlüssel", 200), ("schlussel", 401)):
            with case(key):
                headers = {"x-api-key": key.encode()}
                assert server.http.get("/v1/models", headers=headers).status_code == status


def status_of(connection: socket.socket) -> int:
    return int(connection.recv(4096).split()[1])


def test_a_body_that_is_too_large_is_refused_before_it_is_there() -> None:
    options = ServeOptions(max_body_bytes=1000, drain_s=1)
    start = "POST {} HTTP/1.1\nHost: a\nContent-Type: application/json\n"
    with served(options=options) as server:
        for path in (*BODIES, "/v1/models", "/nowhere"):
            head = start.format(path)
            with case(path):
                with raw(server.port, f"{head}Content-Length: 1001\n\n") as connection:
                    assert status_of(connection) == 413
                chunk = b"3e9\r\n" + b"a" * 1001 + b"\r\n"  # and no end
                with raw(server.port, f"{head}Transfer-Encoding: chunked\n\n", chunk) as connection:
                    assert status_of(connection) == 413
                with raw(server.port, f"{head}Content-Length: 1000\n\n", b"a" * 1000) as connection:
                    assert status_of(connection) in (400, 404, 405)
        body = {"messages": [{"role": "user", "content": "a" * 2000}], "max_tokens": 5}
        assert server.http.post("/v1/messages", json=body).json()["error"]["type"] == "request_too_large"
        assert server.http.post("/v1/chat/completions", json=body).json()["error"]["code"] == "body_too_large"
    late = ServeOptions(body_timeout_s=0.3, drain_s=1)
    with served(options=late) as server, raw(server.port, f"{head}Content-Length: 10\n\n", b"a") as connection:
        assert status_of(connection) == 408


def test_the_pieces_of_a_body_count_together() -> None:
    """A server gives the application a body in pieces of its own choice."""
    app = create_app(None, ServeOptions(max_body_bytes=1000))  # 400: spaces are no JSON

    async def status(pieces: list[int]) -> int:
        messages: list[Message] = [
            {"type": "http.request", "body": b" " * size, "more_body": place < len(pieces) - 1}
            for place, size in enumerate(pieces)
        ]
        sent: list[MutableMapping[str, Any]] = []

        async def receive() -> Message:
            return messages.pop(0)

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        headers = [(b"host", b"a"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/messages", "query_string": b"", "headers": headers}
        await app(scope, receive, send)
        return int(sent[0]["status"])

    for pieces, expected in (
        ([1000], 400),
        ([1001], 413),
        ([500, 500], 400),
        ([500, 501], 413),
        ([900, 50, 50, 1], 413),
        ([1] * 1001, 413),
        ([1] * 1000 + [0], 400),
    ):
        with case(pieces[:4]):
            assert asyncio.run(status(pieces)) == expected


def test_a_client_that_leaves_ends_its_request() -> None:
    for delay_s in (0.01, 0.3):  # between tokens that come, and while nothing comes
        with served(LONG, delay_s=delay_s) as server:
            for path, body in BODIES.items():
                for is_streamed in (False, True):
                    with case(path, is_streamed, delay_s):
                        leave(server, path, {**body, "stream": is_streamed}, is_streamed)


def leave(server: Served, path: str, body: dict[str, Any], is_streamed: bool) -> None:
    """Asks, leaves, and waits until the request is cancelled."""
    before = len(server.scheduler.tickets)
    with posted(server.port, path, body) as connection:
        wait_until(lambda: len(server.scheduler.tickets) > before)
        if is_streamed:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert not server.scheduler.tickets[before].cancelled.is_set()
    wait_until(server.scheduler.tickets[before].cancelled.is_set)


def test_the_clients_cancel_by_leaving() -> None:
    ask: dict[str, Any] = {"model": "demo-moe", "messages": HELLO}
    with (
        served(LONG, delay_s=0.02) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as theirs,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as other,
    ):
        with theirs.chat.completions.create(**ask, stream=True) as stream:
            assert next(iter(stream)).choices
        with theirs.responses.create(model="demo-moe", input="Hi", stream=True) as events:
            assert next(iter(events)).type == "response.created"
        with other.messages.stream(**ask, max_tokens=1000) as messages:
            assert next(iter(messages.text_stream)) == "w"
        for number, fault, create in (
            (4, openai.APITimeoutError, partial(theirs.chat.completions.create, **ask)),
            (5, anthropic.APITimeoutError, partial(other.messages.create, **ask, max_tokens=1000)),
        ):
            for seconds in (0.2, 1, 5, 25, 125):  # longer where the request has not arrived by then
                with pytest.raises(fault):
                    create(timeout=httpx2.Timeout(HANG_S, read=seconds))
                if len(server.scheduler.tickets) >= number:
                    break
        assert len(server.scheduler.tickets) >= 5
        for ticket in server.scheduler.tickets:
            wait_until(ticket.cancelled.is_set)


def test_a_server_that_stops_ends_its_requests() -> None:
    with served(LONG, delay_s=0.3) as server:
        answer = server.http.send(
            server.http.build_request("POST", "/v1/completions", json={**BODIES["/v1/completions"], "stream": True}),
            stream=True,
        )
        next(answer.iter_lines())
    answer.close()
    assert all(ticket.cancelled.is_set() for ticket in server.scheduler.tickets)


def test_pages_of_other_origins_need_leave() -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization,content-type"
    for origins, allowed in (((), None), (("https://b.example",), None), (("https://a.example",),) * 2, (("*",), "*")):
        with case(origins), served(options=ServeOptions(api_keys=KEYS, cors_origins=origins, drain_s=1)) as server:
            allowed_origin = allowed[0] if isinstance(allowed, tuple) else allowed
            answer = server.http.options("/v1/chat/completions", headers=asked)
            assert answer.headers.get("access-control-allow-origin") == allowed_origin
            assert (answer.status_code == 200) == (allowed_origin is not None)
            headers = {"Origin": "https://a.example"}
            refused = server.http.post("/v1/chat/completions", json={"messages": HELLO}, headers=headers)
            assert refused.status_code == 401
            assert refused.headers.get("access-control-allow-origin") == allowed_origin


def test_a_server_for_this_machine_answers_to_its_own_names_alone() -> None:
    with served(options=ServeOptions(host_names=("127.0.0.1", "localhost", "[::1]"), drain_s=1)) as server:
        for host, status in (
            ("127.0.0.1", 200),
            (f"LOCALHOST:{server.port}", 200),
            ("[::1]:80", 200),
            ("evil.example", 403),
            ("127.0.0.1.evil.example:80", 403),
            ("notlocalhost", 403),
            ("localhost.evil.example", 403),
            ("localhos", 403),
            ("evil.localhost", 403),
            (f"1127.0.0.1:{server.port}", 403),
            ("a[::1]", 403),
            ("", 403),
        ):
            for path in ("/health", "/v1/models"):
                with case(host, path), raw(server.port, f"GET {path} HTTP/1.1\nHost: {host}\n\n") as connection:
                    assert status_of(connection) == status


def test_health_of_a_model_that_comes_and_goes() -> None:
    with served(loading=True) as server:
        assert (server.http.get("/health").status_code, server.http.get("/health").json()) == (
            503,
            {"status": "loading"},
        )
        assert server.http.get("/metrics").status_code == 200
        for path, body in BODIES.items():
            with case(path):
                answer = server.http.post(path, json=body)
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
                assert "being loaded" in answer.json()["error"]["message"]
        service = scripted_service(server.scheduler)
        server.app.state.service = service
        assert (server.http.get("/health").status_code, server.http.get("/health").json()) == (200, {"status": "ok"})
        assert server.http.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        server.scheduler.failure = "the disk is gone"
        assert server.http.get("/health").json() == {"status": "failed"}
        assert server.http.post("/v1/completions", json={"prompt": "a"}).status_code == 503


def test_metrics_count_what_happened() -> None:
    with served() as server:
        server.http.post("/v1/completions", json={"prompt": "abc"})
        server.http.post("/v1/completions", json={"prompt": 5})
        server.http.get("/v1/models/demo-moe")
        server.http.get("/nowhere/at/all")
        text = server.http.get("/metrics").text
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for name, value in (
        (("moe_serve_requests_total", "/v1/completions", "200"), 1),
        (("moe_serve_requests_total", "/v1/completions", "400"), 1),
        (("moe_serve_requests_total", "/v1/models/{model_id:path}", "200"), 1),
        (("moe_serve_requests_total", "404", "other"), 1),
        (("moe_serve_running",), 0),
        (("moe_serve_slots",), 64),
        (("moe_serve_submitted_total",), 1),
        (("moe_serve_prompt_tokens_total",), 3),
        (("moe_serve_generated_tokens_total",), 12),
        (("moe_serve_prefill_seconds_total",), 0.5),
        (("moe_serve_decode_seconds_total",), 1.5),
        (("moe_serve_decode_steps_total",), 7),
        (("moe_serve_drafted_tokens_total",), 5),
        (("moe_serve_accepted_tokens_total",), 4),
    ):
        with case(name):
            assert found[name] == value


def test_every_answer_has_its_headers_and_the_shape_of_its_protocol() -> None:
    with served() as server:
        for method, path, status in (
            ("GET", "/health", 200),
            ("GET", "/v1/models", 200),
            ("POST", "/v1/completions", 400),
            ("GET", "/v1/completions", 405),
            ("DELETE", "/v1/messages", 405),
            ("GET", "/nowhere", 404),
            ("GET", "/v1/models/", 404),
            ("GET", "/docs", 404),
        ):
            with case(method, path):
                answer = server.http.request(method, path)
                assert answer.status_code == status
                headers = answer.headers
                assert (headers["x-content-type-options"], headers["x-frame-options"]) == ("nosniff", "DENY")
                assert "server" not in headers
                if status >= 400:
                    body = answer.json()
                    assert body["error"]["message"]
                    assert ("type" in body) == path.startswith("/v1/messages")


class BrokenScheduler(ScriptedScheduler):
    """A scheduler with an error in it."""

    def submit(self, *_: object) -> PlayedTicket:
        raise LookupError("a secret of the code")


def test_an_unexpected_error_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    with served(loading=True) as server:
        server.app.state.service = scripted_service(BrokenScheduler())
        for path, body in BODIES.items():
            for is_streamed in (False, True):
                with case(path, is_streamed):
                    answer = server.http.post(path, json={**body, "stream": is_streamed})
                    assert answer.status_code == 500
                    assert answer.json()["error"]["message"] == "the server failed; its log says why"
                    assert answer.headers["x-content-type-options"] == "nosniff"
    assert caplog.text.count("a secret of the code") >= 8


def test_a_silent_stream_keeps_its_connection() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moe_pack.runtime.serve.protocols.answers.PING_SECONDS", 0.05)
        for path, ping in (("/v1/completions", ": ping"), ("/v1/messages", "event: ping")):
            with case(path), served(Script("ab")) as server:
                server.scheduler.speaks.clear()  # until the third ping: the first of messages comes with their start
                with server.http.stream("POST", path, json={**BODIES[path], "stream": True}) as answer:
                    lines = answer.iter_lines()
                    for _ in range(3):
                        next(line for line in lines if line.startswith(ping))
                    server.scheduler.speaks.set()
                    assert any("stop" in line for line in lines)


def test_the_page_needs_no_key() -> None:
    with served(options=ServeOptions(api_keys=KEYS, drain_s=1)) as server:
        answer = server.http.get("/")
        assert answer.status_code == 200 and "connect-src 'self'" in answer.headers["content-security-policy"]
