"""Messages, with Anthropic's own client as the judge."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel
from support.cases import case
from support.scripted_scheduler import NamedGrammar, Script
from support.served import Served, served

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
WEATHER: Any = {
    "name": "weather",
    "description": "Says the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CLOCK: Any = {"name": "clock", "input_schema": {"type": "object"}}
THOUGHT_AND_CALLS = '[think]Two towns.[/think]Let me see.[call weather]{"city": "Rome"}[/call][call clock]{}[/call]'


def client_of(server: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture
def client(plain: Served) -> Iterator[anthropic.Anthropic]:
    with client_of(plain) as made:
        yield made


def test_an_answer_has_text_and_usage(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model="demo-moe", max_tokens=100, messages=HELLO)
    assert [(block.type, getattr(block, "text", None)) for block in answer.content] == [("text", "Hello there!")]
    assert (answer.role, answer.model, answer.stop_reason, answer.stop_sequence) == (
        "assistant",
        "demo-moe",
        "end_turn",
        None,
    )
    usage = answer.usage
    prompt = len("user: Hi\nassistant: ")
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (prompt - 3, 3, 12)


def test_a_stream_is_the_answer_in_pieces(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="demo-moe", max_tokens=100, messages=HELLO) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert pieces == list("Hello there!")
    assert (final.stop_reason, final.usage.output_tokens, final.usage.cache_read_input_tokens) == ("end_turn", 12, 3)
    events = [
        event.type for event in client.messages.create(model="demo-moe", max_tokens=2, messages=HELLO, stream=True)
    ]
    expected = """
        message_start content_block_start content_block_delta content_block_delta content_block_stop
        message_delta message_stop
    """.split()  # noqa: SIM905  # a table of words
    assert [event for event in events if event != "ping"] == expected


def test_thinking_and_tool_calls_whole_and_streamed() -> None:
    expected = [
        ("thinking", "Two towns."),
        ("text", "Let me see."),
        ("tool_use", ("call_1", "weather", {"city": "Rome"})),
        ("tool_use", ("call_2", "clock", {})),
    ]
    ask: dict[str, Any] = {"model": "demo-moe", "max_tokens": 500, "messages": HELLO, "tools": [WEATHER, CLOCK]}
    with served(Script(THOUGHT_AND_CALLS)) as server, client_of(server) as client:
        answer = client.messages.create(**ask)
        with client.messages.stream(**ask) as stream:
            streamed = stream.get_final_message()
        for found in (answer, streamed):
            assert [shown(block) for block in found.content] == expected
            assert found.stop_reason == "tool_use"
        one = client.messages.create(**ask, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        assert [shown(block) for block in one.content] == expected[:3]


def shown(block: Any) -> tuple[str, object]:
    if block.type == "tool_use":
        return block.type, (block.id, block.name, block.input)
    return block.type, block.text if block.type == "text" else block.thinking


def test_stop_reasons(client: anthropic.Anthropic) -> None:
    for fields, text, reason, sequence in (
        ({"stop_sequences": [" there", "x"]}, "Hello", "stop_sequence", " there"),
        ({"max_tokens": 4}, "Hell", "max_tokens", None),
    ):
        with case(fields):
            made: dict[str, Any] = {"model": "demo-moe", "max_tokens": 100, "messages": HELLO, **fields}
            answer = client.messages.create(**made)
            assert shown(answer.content[0]) == ("text", text)
            assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)
            with client.messages.stream(**made) as stream:
                streamed = stream.get_final_message()
            assert (streamed.stop_reason, streamed.stop_sequence) == (reason, sequence)


def test_conversations_reach_the_template_as_templates_read_them(plain: Served, client: anthropic.Anthropic) -> None:
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I ask."},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    ask: dict[str, Any] = {"model": "demo-moe", "messages": messages, "tools": [WEATHER], "system": "Be brief."}
    ask["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    client.messages.create(**ask, max_tokens=2000)
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    assert plain.prompt.split("\n") == [
        "system: Be brief.",
        "user: a",
        "b",
        f"assistant: I ask. { ({'reasoning_content': 'hm', 'tool_calls': [call]}) }",
        f"tool: sunny { ({'tool_call_id': 'c1', 'name': 'weather'}) }",
        "user: And?",
        "tool: weather",
        "enable_thinking=True",
        "assistant: ",
    ]
    counted = client.messages.count_tokens(**ask)
    assert counted.input_tokens == len(plain.scheduler.requests[-1].prompt_ids)
    last: Any = [*HELLO, {"role": "assistant", "content": "Well"}]
    client.messages.create(model="demo-moe", max_tokens=9, messages=last, thinking={"type": "disabled"})
    assert plain.prompt == "user: Hi\nassistant: Well\nenable_thinking=False"


def test_a_tool_that_has_to_be_called() -> None:
    with served(Script('{"city": "Rome"}')) as server, client_of(server) as client:
        for choice in ({"type": "tool", "name": "weather"}, {"type": "any"}):
            with case(choice):
                answer = client.messages.create(
                    model="demo-moe",
                    max_tokens=100,
                    messages=HELLO,
                    tools=[WEATHER],
                    tool_choice=choice,  # type: ignore[arg-type]  # one of its objects
                )
                (block,) = answer.content
                assert block.type == "tool_use" and (block.name, block.input) == ("weather", {"city": "Rome"})
                assert answer.stop_reason == "tool_use"
        client.messages.create(
            model="demo-moe", max_tokens=1, messages=HELLO, tools=[WEATHER], tool_choice={"type": "none"}
        )
        assert "weather" not in server.prompt


def test_what_is_refused_is_said_in_anthropics_shape(plain: Served) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    for fields, message in (
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [image]}]}, "'image' is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "no text"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
        ({"tools": [{"name": "clock"}]}, "no input_schema"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"tool_choice": {"type": "tool"}}, "no name"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"system": "REFUSE"}, "it refuses"),
        ({"messages": [{"role": "user", "content": "a" * 3000}]}, "shorten the prompt"),
    ):
        with case(fields):
            answer = plain.http.post("/v1/messages", json={"max_tokens": 5, "messages": HELLO, **fields})
            body = answer.json()
            assert (answer.status_code, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
            assert message in body["error"]["message"], body


def test_errors_become_the_clients_exceptions() -> None:
    with served(Script("Hel", error="the disk is gone")) as server, client_of(server) as client:
        ask: dict[str, Any] = {"model": "demo-moe", "max_tokens": 100, "messages": HELLO}
        with pytest.raises(anthropic.InternalServerError, match="the disk is gone"):
            client.messages.create(**ask)
        with pytest.raises(anthropic.APIStatusError, match="the disk is gone"), client.messages.stream(**ask) as stream:
            stream.get_final_message()
        assert [model.id for model in client.models.list()] == ["demo-moe"]
        assert client.models.retrieve("demo-moe").display_name == "demo-moe"
    with served(aliases=("claude-1",)) as server, client_of(server) as client:
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            client.messages.create(model="claude", max_tokens=100, messages=HELLO)
        with pytest.raises(anthropic.NotFoundError):
            client.messages.count_tokens(model="claude", messages=HELLO)
    with served(most=0) as server, client_of(server) as client, pytest.raises(anthropic.RateLimitError):
        client.messages.create(model="demo-moe", max_tokens=100, messages=HELLO)


def test_a_conversation_that_the_server_would_keep_is_sent_whole_by_the_client() -> None:
    """The client's tool runner asks for a thread; told in the published way, it goes on without one."""

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Says the weather."""
        return f"sunny in {city}"

    with (
        served(Script('[call weather]{"city": "Rome"}[/call]'), Script("Sunny.")) as server,
        client_of(server) as client,
    ):
        runner = client.beta.messages.tool_runner(
            model="demo-moe", max_tokens=100, messages=[{"role": "user", "content": "Rome?"}], tools=[weather]
        )
        answers = [answer.content[0].type for answer in runner]
        assert answers == ["tool_use", "text"]
        assert "user: Rome?" in server.prompt and "sunny in Rome" in server.prompt
        body = {"max_tokens": 9, "messages": HELLO, "thread": {"type": "continue", "previous_message_id": "msg_1"}}
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            answer = server.http.post(path, json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_no_block_has_a_key_without_a_value(client: anthropic.Anthropic) -> None:
    """@ai-sdk/anthropic refuses a text block whose citations are null."""
    raw = client.messages.with_raw_response.create(model="demo-moe", max_tokens=9, messages=HELLO)
    assert raw.http_response.json()["content"] == [{"type": "text", "text": "Hello the"}]


def test_messages_parse_gives_what_the_class_says() -> None:
    class City(BaseModel):
        name: str
        rivers: list[str]

    with served(Script('{"name": "Rome", "rivers": ["Tiber"]}')) as server:
        client = client_of(server)
        messages: list[Any] = [{"role": "user", "content": "Hi"}]
        answer = client.messages.parse(model="demo-moe", max_tokens=99, messages=messages, output_format=City)
        assert answer.parsed_output == City(name="Rome", rivers=["Tiber"])
        grammar = server.scheduler.requests[-1].grammar
        assert isinstance(grammar, NamedGrammar) and "rivers" in str(grammar.source)
        with client.messages.stream(model="demo-moe", max_tokens=99, messages=messages, output_format=City) as stream:
            assert stream.get_final_message().parsed_output == City(name="Rome", rivers=["Tiber"])
