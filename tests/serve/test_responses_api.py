"""Responses, with OpenAI's own client as the judge."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from cases import case
from scripted_scheduler import NamedGrammar, Script
from served import Served, served

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Says the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
THOUGHT_AND_CALL = '[think]A town.[/think]Let me see.[call weather]{"city": "Rome"}[/call]'


def client_of(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    with served(Script("Hello there!", cached=3)) as server:
        yield server


@pytest.fixture
def client(plain: Served) -> Iterator[openai.OpenAI]:
    with client_of(plain) as made:
        yield made


def prompt_of(server: Served) -> str:
    return "".join(map(chr, server.scheduler.requests[-1].prompt_ids))


def test_a_response_has_text_and_usage(client: openai.OpenAI) -> None:
    response = client.responses.create(model="demo-moe", input="Hi", temperature=0.5)
    assert (response.output_text, response.status, response.model) == ("Hello there!", "completed", "demo-moe")
    assert (response.temperature, response.top_p, response.error) == (0.5, 1.0, None)
    usage = response.usage
    assert usage is not None
    prompt = len("user: Hi\nassistant: ")
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (prompt, 12, prompt + 12)
    assert usage.input_tokens_details.cached_tokens == 3
    cut = client.responses.create(model="demo-moe", input="Hi", max_output_tokens=4)
    assert (cut.output_text, cut.status) == ("Hell", "incomplete")
    assert cut.incomplete_details is not None and cut.incomplete_details.reason == "max_output_tokens"


def test_a_stream_has_the_documented_events_in_order() -> None:
    with served(Script(THOUGHT_AND_CALL)) as server, client_of(server) as client:
        events = list(client.responses.create(model="demo-moe", input="Hi", tools=[WEATHER], stream=True))
        whole = client.responses.create(model="demo-moe", input="Hi", tools=[WEATHER])
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    once = [kind for place, kind in enumerate(kinds) if kinds[place - 1 : place] != [kind]]
    assert once == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    last = events[-1]
    assert last.type == "response.completed"
    for response in (last.response, whole):
        assert [shown(item) for item in response.output] == [
            ("reasoning", "A town."),
            ("message", "Let me see."),
            ("function_call", ("call_1", "weather", '{"city": "Rome"}')),
        ]
        assert response.usage is not None and 5 <= response.usage.output_tokens_details.reasoning_tokens < 20
    done = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert done == [item.id for item in last.response.output]


def shown(item: Any) -> tuple[str, object]:
    if item.type == "function_call":
        return item.type, (item.call_id, item.name, item.arguments)
    return item.type, "".join(part.text for part in item.content)


def test_the_clients_own_stream_agrees(client: openai.OpenAI) -> None:
    with client.responses.stream(model="demo-moe", input="Hi") as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert (pieces, final.output_text) == (list("Hello there!"), "Hello there!")
    events = list(client.responses.create(model="demo-moe", input="Hi", max_output_tokens=4, stream=True))
    assert events[-1].type == "response.incomplete"


def test_items_reach_the_template_as_templates_read_them(plain: Served, client: openai.OpenAI) -> None:
    items: list[Any] = [
        {"role": "developer", "content": "No jokes."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "m",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I ask.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    client.responses.create(
        model="demo-moe", input=items, instructions="Be brief.", tools=[WEATHER], reasoning={"effort": "none"}
    )
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    assert prompt_of(plain).split("\n") == [
        "system: Be brief.",
        "",
        "No jokes.",
        "user: a",
        f"assistant: I ask. { ({'reasoning_content': 'hm', 'tool_calls': [call]}) }",
        f"tool: sunny { ({'tool_call_id': 'c1', 'name': 'weather'}) }",
        "tool: weather",
        "enable_thinking=False",
        "assistant: ",
    ]


def test_formats_and_forced_calls(plain: Served, client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    wanted: Any = {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}}
    response = client.responses.create(model="demo-moe", input="Hi", text=wanted)
    grammar = plain.scheduler.requests[-1].grammar
    assert isinstance(grammar, NamedGrammar) and grammar.source == schema
    assert response.text is not None and response.text.format is not None
    assert response.text.format.type == "json_schema" and response.text.format.schema_ == schema
    forced = client.responses.create(
        model="demo-moe", input="Hi", tools=[WEATHER], tool_choice={"type": "function", "name": "weather"}
    )
    assert [item.type for item in forced.output] == ["function_call"]


def test_what_is_refused_names_the_field(plain: Served) -> None:
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
    for fields, param, message in (
        ({"input": []}, "input", "no items"),
        ({"input": 5}, "input", "valid string"),
        ({"input": image}, "input", "'input_image' is not supported"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "'message'"),
        ({"input": [{"role": "user"}]}, "input", "needs role and content"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input", "needs call_id"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no responses"),
        ({"background": True}, "background", "stores no responses"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "'web_search' is not supported"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "add it"),
    ):
        with case(fields):
            answer = plain.http.post("/v1/responses", json={"input": "Hi", **fields})
            error = answer.json()["error"]
            assert answer.status_code == 400
            assert (error["param"], message in error["message"]) == (param, True), error


def test_an_engine_that_fails() -> None:
    with served(Script("Hel", error="the disk is gone")) as server, client_of(server) as client:
        with pytest.raises(openai.InternalServerError, match="the disk is gone"):
            client.responses.create(model="demo-moe", input="Hi")
        last = list(client.responses.create(model="demo-moe", input="Hi", stream=True))[-1]
        assert last.type == "response.failed" and last.response.error is not None
        assert (last.response.status, last.response.error.message) == ("failed", "the disk is gone")
