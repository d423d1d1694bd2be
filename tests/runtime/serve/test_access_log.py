"""The log of a server about requests: a line for each, with what it took, and nothing that a client can choose."""

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

from support.cases import case
from support.scripted_scheduler import Script
from support.served import served
from support.waiting import wait_until

from moe_pack.runtime.serve.access_log import LOG, LogFormat, RequestRecord, printable, write_log
from moe_pack.runtime.serve.http.app import ServeOptions

SECRET = "swordfish"
HELLO: list[Any] = [{"role": "user", "content": f"Hi {SECRET}"}]


@contextmanager
def logged(log_format: LogFormat = "json", quiet: bool = False) -> Iterator[StringIO]:
    """Gives what is written in the block."""
    root, written = logging.getLogger(), StringIO()
    handlers, level, own = root.handlers[:], root.level, LOG.level
    root.handlers[:] = []
    write_log(written, log_format, quiet)
    try:
        yield written
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        LOG.setLevel(own)


def lines(written: StringIO, number: int) -> list[dict[str, Any]]:
    """Waits for lines of requests, and returns them."""

    def found() -> list[dict[str, Any]]:
        parsed = [json.loads(line) for line in written.getvalue().splitlines()]
        return [one for one in parsed if one["event"] == "request"]

    wait_until(lambda: len(found()) >= number)
    return found()


def test_each_request_has_a_line_with_what_it_took() -> None:
    with logged() as written, served(Script("Hello there!", cached=3)) as server:
        for streamed in (False, True):
            body = {"messages": HELLO, "stream": streamed, "n": 2}
            assert server.http.post("/v1/chat/completions", json=body).status_code == 200
        server.http.post("/v1/completions", json={"prompt": ["ab", "abc"], "max_tokens": 5})
        server.http.get("/v1/models")
        found = lines(written, 4)
        assert SECRET not in written.getvalue()
    for one in found[:2]:
        assert (one["method"], one["route"], one["status"]) == ("POST", "/v1/chat/completions", 200)
        assert (one["prompt"], one["cached"], one["generated"]) == (len(f"user: Hi {SECRET}\nassistant: "), 3, 24)
        assert one["finish"] == "stop" and 0 <= one["first_s"] <= one["total_s"] and one["tokens_per_s"] > 0
    assert (found[2]["prompt"], found[2]["generated"], found[2]["finish"]) == (5, 10, "length")
    assert found[3]["route"] == "/v1/models" and "prompt" not in found[3]


def test_refusals_say_why_without_the_clients_words() -> None:
    options = ServeOptions(api_keys=("key-of-the-server",), drain_s=1, max_body_bytes=10_000)
    forged = f"{SECRET}%0amoe-serve: forged%1b[31m"
    with logged() as written, served(options=options) as server:
        server.http.headers["x-api-key"] = "key-of-the-server"
        post = server.http.post
        statuses = [
            post("/v1/chat/completions", json={"messages": HELLO, "suffix": SECRET}).status_code,
            post("/v1/chat/completions", json={"messages": HELLO, "logit_bias": {SECRET: 1}}).status_code,
            post("/v1/chat/completions", json={"messages": [{"role": SECRET}]}).status_code,
            post("/v1/chat/completions", content=SECRET, headers={"Content-Type": "application/json"}).status_code,
            server.http.get(f"/{forged}").status_code,
            server.http.request(SECRET.upper(), "/v1/models").status_code,
            post("/v1/completions", json={"prompt": "a" * 9000}).status_code,
            server.http.get("/v1/models", headers={"x-api-key": SECRET}).status_code,
            post("/v1/completions", json={"prompt": "a" * 20_000}).status_code,
        ]
        found = lines(written, len(statuses))
        for hidden in (SECRET, SECRET.upper(), "forged", "key-of-the-server", "\x1b"):
            assert hidden not in written.getvalue()
    assert [one["status"] for one in found] == statuses == [400, 400, 400, 400, 404, 405, 400, 401, 413]
    assert all(one["code"] for one in found)
    assert found[1]["param"] == "logit_bias" and "9000 bytes" in found[6]["message"]


def test_a_request_has_one_number_in_answer_and_log() -> None:
    with logged() as written, served() as server:
        for given, is_kept in (("abc-1.2_3", True), ("a b", False), ("x" * 65, False), ("a;b", False), ("", False)):
            with case(given):
                answer = server.http.get("/health", headers={"X-Request-Id": given})
                assert (answer.headers["x-request-id"] == given) == is_kept
                assert re.fullmatch(r"[\w.-]{1,64}", answer.headers["x-request-id"])
                wait_until(lambda answer=answer: answer.headers["x-request-id"] in written.getvalue())  # type: ignore[misc]


def test_a_client_that_leaves_and_an_engine_that_fails() -> None:
    with logged() as written, served(Script("word " * 50, error="the disk is gone")) as server:
        body = {"messages": HELLO, "stream": True}
        assert "disk is gone" in server.http.post("/v1/chat/completions", json=body).text
        server.scheduler.speaks.clear()
        with server.http.stream("POST", "/v1/chat/completions", json=body):
            pass
        found = lines(written, 2)
    assert (found[0]["status"], found[0]["finish"], found[0]["code"]) == (200, "error", "server_error")
    assert found[1]["finish"] if "finish" in found[1] else found[1]["status"] in (200, 499)


def test_text_is_one_line_a_record_and_quiet_is_warnings_alone() -> None:
    with logged("text") as written, served() as server:
        server.http.get("/health")
        wait_until(lambda: "\n" in written.getvalue())
        assert re.fullmatch(
            r"moe-serve: [\d:T.+-]+ request id=\w+ method=GET route=/health status=200 total_s=\d\.\d+\n",
            written.getvalue(),
        )
        LOG.error("a\nmoe-serve: forged\x1b[0m")
        assert written.getvalue().splitlines()[-1] == r"moe-serve: a\nmoe-serve: forged\x1b[0m"
    with logged("text", quiet=True) as written, served() as server:
        server.http.get("/health")
        server.scheduler.submit = lambda *_: 1 // 0  # type: ignore[assignment,method-assign,return-value]
        assert server.http.post("/v1/completions", json={"prompt": "a"}).status_code == 500
        wait_until(lambda: "status=500" in written.getvalue())
        assert "/health" not in written.getvalue()


def test_a_request_without_an_answer_is_one_of_a_client_that_left() -> None:
    with logged() as written:
        record = RequestRecord.of("abc")
        record.refuse(400, SECRET, f"metadata.{SECRET}", "invalid")
        record.write("BREW\n", "other", 0)
        found = lines(written, 1)
    assert (found[0]["id"], found[0]["method"], found[0]["status"]) == ("abc", "other", 499)
    assert found[0]["param"] == "metadata" and SECRET not in written.getvalue()
    assert printable("a\tb\u2028ü") == r"a\tb\u2028ü"
