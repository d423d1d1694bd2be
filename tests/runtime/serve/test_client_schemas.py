"""Every answer and every event, whole and streamed, against the types of the clients that read them.

The clients themselves build their objects without a look at the values; clients that others wrote look at them.
"""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from support.cases import case
from support.scripted_scheduler import Script
from support.served import Served, served

# Keys whose null the published schemas have; every other null is a key too many.
NULLS = {
    "logprobs", "finish_reason", "refusal", "usage", "content", "stop_sequence", "stop_reason", "error",
    "incomplete_details", "instructions", "max_output_tokens", "previous_response_id",
}  # fmt: skip
HELLO = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
SCRIPTS = {
    "text": "Hello there!",
    "nothing": "",
    "thoughts and text": "[think]Two towns.[/think]Rome.",
    "thoughts and calls": '[think]Two.[/think]See.[call weather]{"city": "Rome"}[/call][call weather]{}[/call]',
}
Body = dict[str, Any]
REQUESTS: dict[str, tuple[str, Body, Any, Any]] = {
    "chat": ("/v1/chat/completions", {"messages": HELLO, "tools": [{"type": "function", "function": FUNCTION}], "n": 2},
             ChatCompletion, ChatCompletionChunk),
    "chat with log-probabilities and usage": (
        "/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "max_tokens": 4},
        ChatCompletion, ChatCompletionChunk,
    ),
    "completions": ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 2, "echo": False}, Completion, Completion),
    "responses": ("/v1/responses",
                  {"input": "Hi", "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 99}, Response,
                  ResponseStreamEvent),
    "messages": ("/v1/messages",
                 {"messages": HELLO, "max_tokens": 99, "tools": [{"name": "weather", "input_schema": SCHEMA}]}, Message,
                 RawMessageStreamEvent),
}  # fmt: skip


def nulls_of(value: Any, key: str = "") -> Iterator[str]:
    """Yields the keys of a JSON value that have no value."""
    if isinstance(value, dict):
        for name, below in value.items():
            yield from nulls_of(below, name)
    elif isinstance(value, list):
        for below in value:
            yield from nulls_of(below, key)
    elif value is None:
        yield key


def events_of(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_answers_have_the_shapes_that_clients_publish(name: str) -> None:
    with served(Script(SCRIPTS[name])) as server:
        for kind, (path, body, whole, event) in REQUESTS.items():
            with case(kind):
                found = server.http.post(path, json=body).json()
                check(found, whole)
                options = {"stream_options": {"include_usage": True}} if "usage" in kind else {}
                streamed = server.http.post(path, json={**body, "stream": True, **options})
                for one in events_of(streamed.text):
                    if one.get("type") != "ping":
                        check(one, event)


@cache
def adapter_of(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)  # hundreds of types each, made once


def check(found: Any, kind: Any) -> None:
    if kind is Completion and found["choices"] and found["choices"][0]["finish_reason"] is None:
        found = json.loads(json.dumps(found).replace('"finish_reason": null', '"finish_reason": "stop"'))
    adapter_of(kind).validate_python(found)
    assert set(nulls_of(found)) <= NULLS, found


def test_lists_and_counts_have_the_shapes_that_clients_publish() -> None:
    with served() as server:
        for one in server.http.get("/v1/models").json()["data"]:
            check(one, Model)
            check(one, ModelInfo)
        check(server.http.post("/v1/messages/count_tokens", json={"messages": HELLO}).json(), MessageTokensCount)


def test_a_stream_that_fails_says_so_in_its_protocol() -> None:
    with served(Script("Hel", error="the disk is gone")) as server:
        assert last_event(server, "/v1/chat/completions", {"messages": HELLO})["error"]["message"] == "the disk is gone"
        failed = last_event(server, "/v1/responses", {"input": "Hi"})
        check(failed, ResponseStreamEvent)
        assert failed["type"] == "response.failed"
        assert last_event(server, "/v1/messages", {"messages": HELLO, "max_tokens": 9})["type"] == "error"


def last_event(server: Served, path: str, body: Body) -> Any:
    return events_of(server.http.post(path, json={**body, "stream": True}).text)[-1]
