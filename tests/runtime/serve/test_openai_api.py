"""Chat completions, text completions and models, with OpenAI's own client as the judge."""

import json
import time
from typing import Any

import httpx2
import openai
import pytest
from support.cases import case
from support.scripted_scheduler import CONTEXT_TOKENS, Script, scripted_service
from support.served import Served, openai_client, served

from moe_pack.runtime.serve.http.app import ServeOptions

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
THOUGHT_AND_CALLS = '[think]Two towns.[/think]Let me see.[call weather]{"city": "Rome"}[/call][call clock]{}[/call]'


def test_an_answer_has_text_usage_and_timings(plain: Served, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo-moe", messages=HELLO)
    assert answer.choices[0].message.content == "Hello there!"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.object, answer.model) == ("chat.completion", "demo-moe")
    assert answer.system_fingerprint and answer.system_fingerprint.startswith("moe-pack-")
    prompt = len("user: Hi\nassistant: ")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, 12)
    assert (answer.usage.total_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (prompt + 12, 3)
    assert answer.model_extra["timings"] == {
        "cache_n": 3,
        "prompt_n": prompt - 3,
        "prompt_ms": 250.0,
        "prompt_per_second": (prompt - 3) / 0.25,
        "predicted_n": 12,
        "predicted_ms": 500.0,
        "predicted_per_second": 24.0,
    }


def test_a_stream_is_the_answer_in_pieces(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="demo-moe", messages=HELLO, stream=True, stream_options={"include_usage": True}, n=2
    )
    texts = ["", ""]
    chunks = list(stream)
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["Hello there!"] * 2
    ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert ends == ["stop", "stop"]
    last = chunks[-1]
    assert last.choices == []
    assert last.usage.completion_tokens == last.model_extra["timings"]["predicted_n"] == 24
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_without_usage_has_timings_in_its_last_chunk(plain: Served) -> None:
    body = {"messages": HELLO, "stream": True}
    lines = plain.http.post("/v1/chat/completions", json=body).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert ["timings" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert not any("usage" in chunk for chunk in chunks)


def test_reasoning_and_tool_calls_whole_and_streamed() -> None:
    with served(Script(THOUGHT_AND_CALLS)) as server, openai_client(server) as client:
        answer = client.chat.completions.create(model="demo-moe", messages=HELLO, tools=[WEATHER, CLOCK])
        choice = answer.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
        assert choice.message.model_extra == {"reasoning_content": "Two towns."}
        called = [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]  # type: ignore[union-attr]  # functions
        assert called == [("call_1", "weather", '{"city": "Rome"}'), ("call_2", "clock", "{}")]
        assert 10 <= (answer.usage.completion_tokens_details.reasoning_tokens or 0) < 30

        with client.chat.completions.stream(model="demo-moe", messages=HELLO, tools=[WEATHER, CLOCK]) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert (streamed.message.content, streamed.finish_reason) == ("Let me see.", "tool_calls")
        found = [(c.id, c.function.name, c.function.arguments) for c in streamed.message.tool_calls or ()]
        assert found == called


def test_answers_that_run_at_once_stay_apart() -> None:
    texts = ["aaaa", "bbbbbbbb", "[call clock][/call]", "c"]
    with served(*map(Script, texts), delay_s=0.002) as server, openai_client(server) as client:
        for is_streamed in (False, True):
            with case(is_streamed):
                server.scheduler.requests.clear()
                ask: dict[str, Any] = {"model": "demo-moe", "messages": HELLO, "n": 4}
                if is_streamed:
                    with client.chat.completions.stream(**ask) as stream:
                        choices: Any = stream.get_final_completion().choices
                else:
                    choices = client.chat.completions.create(**ask).choices
                assert [choice.index for choice in choices] == [0, 1, 2, 3]
                assert [choice.message.content or "" for choice in choices] == ["aaaa", "bbbbbbbb", "", "c"]
                (call,) = choices[2].message.tool_calls
                assert (call.function.name, call.function.arguments) == ("clock", "{}"), "arguments are always JSON"
                assert [choice.finish_reason for choice in choices] == ["stop", "stop", "tool_calls", "stop"]


def test_one_call_alone_where_parallel_calls_are_refused() -> None:
    with served(Script(THOUGHT_AND_CALLS + "x" * 500), delay_s=0.001) as server, openai_client(server) as client:
        answer = client.chat.completions.create(
            model="demo-moe", messages=HELLO, tools=[WEATHER, CLOCK], parallel_tool_calls=False
        )
        calls = answer.choices[0].message.tool_calls or ()
        assert [call.function.name for call in calls] == ["weather"]  # type: ignore[union-attr]  # functions
        assert answer.choices[0].finish_reason == "tool_calls"
        assert server.scheduler.generated < 500, "the rest is not generated"


def test_tool_choice_decides_what_the_model_sees_and_what_it_may_say() -> None:
    one, several = '{"city": "Rome"}', '{"name": "clock", "arguments": {"zone": "Ä"}}'
    scripts = Script("No tools."), Script(one), Script(one), Script(several), Script(several[:9])
    with served(*scripts) as server, openai_client(server) as client:
        ask = client.chat.completions.create
        answer = ask(model="demo-moe", messages=HELLO, tools=[WEATHER], tool_choice="none")
        assert answer.choices[0].message.tool_calls is None
        assert "weather" not in server.prompt
        named: Any = {"type": "function", "function": {"name": "weather"}}
        for tools, choice, expected in (
            ([WEATHER, CLOCK], named, ("weather", one)),
            ([WEATHER], "required", ("weather", one)),
            ([WEATHER, CLOCK], "required", ("clock", '{"zone": "Ä"}')),
        ):
            with case(choice, expected):
                answer = ask(model="demo-moe", messages=HELLO, tools=tools, tool_choice=choice)
                (call,) = answer.choices[0].message.tool_calls or ()
                assert (call.function.name, call.function.arguments) == expected  # type: ignore[union-attr]  # a function
                assert call.id.startswith("call_")
                assert server.scheduler.requests[-1].grammar is not None
        cut = ask(model="demo-moe", messages=HELLO, tools=[WEATHER, CLOCK], tool_choice="required")
        assert (cut.choices[0].message.content, cut.choices[0].message.tool_calls) == (several[:9], None)


def test_conversations_reach_the_template_as_templates_read_them(plain: Served, client: openai.OpenAI) -> None:
    call: Any = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    client.chat.completions.create(
        model="demo-moe",
        messages=messages,
        reasoning_effort="low",
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    made = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    assert plain.prompt.split("\n") == [
        "system: Be brief.",
        "user: a",
        "b",
        f"assistant:  { ({'reasoning_content': 'hm', 'tool_calls': [made]}) }",
        f"tool: sunny { ({'tool_call_id': 'c1'}) }",
        "reasoning_effort=low",
        "enable_thinking=False",
        "assistant: ",
    ]
    last: Any = [*HELLO, {"role": "assistant", "content": "Well"}]
    client.chat.completions.create(model="demo-moe", messages=last, extra_body={"continue_final_message": True})
    assert plain.prompt == "user: Hi\nassistant: Well"


def test_sampling_fields_reach_the_scheduler(plain: Served, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="demo-moe",
        messages=HELLO,
        temperature=0,
        top_p=0.5,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"7": 5},
        seed=11,
        max_completion_tokens=4,
        stop=["!", ""],
        n=2,
        extra_body={"top_k": 40, "min_p": 0.1, "repeat_penalty": 1.5, "ignore_eos": True, "some_new_field": [1]},
    )
    first, second = plain.scheduler.requests[-2:]
    assert (first.max_tokens, first.stop, first.end_ids, first.top_logprobs) == (4, ("!",), frozenset(), None)
    chosen = first.sampling
    assert (chosen.temperature, chosen.top_p, chosen.top_k, chosen.min_p) == (0, 0.5, 40, 0.1)
    assert (chosen.repetition_penalty, chosen.presence_penalty, chosen.frequency_penalty) == (1.5, 1, -1)
    assert (chosen.logit_bias, chosen.seed, second.sampling.seed) == (((7, 5.0),), 11, 12)
    client.chat.completions.create(model="demo-moe", messages=HELLO)
    usual = plain.scheduler.requests[-1]
    assert (usual.sampling.temperature, usual.sampling.top_p, usual.sampling.seed) == (1.0, 1.0, None)
    assert usual.max_tokens == CONTEXT_TOKENS - len(usual.prompt_ids)
    assert usual.end_ids == {0, 1}


def test_an_answer_ends_by_a_stop_text_or_its_length(client: openai.OpenAI) -> None:
    for fields, text, reason in (
        ({"stop": " there"}, "Hello", "stop"),
        ({"max_tokens": 4}, "Hell", "length"),
        ({"max_tokens": -1}, "Hello there!", "stop"),
    ):
        with case(fields):
            answer = client.chat.completions.create(model="demo-moe", messages=HELLO, **fields)  # type: ignore[call-overload]  # fields by name
            assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, reason)


def test_logprobs_whole_and_streamed(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "demo-moe", "messages": HELLO, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**ask).choices[0].logprobs
    assert [entry.token for entry in whole.content] == list("Hello there!")
    first = whole.content[0]
    assert (first.logprob, first.bytes, [top.token for top in first.top_logprobs]) == (-0.5, [72], ["H", "I"])
    chunks = list(client.chat.completions.create(**ask, stream=True))
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
    assert [entry for part in parts if part for entry in part.content or ()] == whole.content


def test_an_answer_of_json_is_content_whatever_it_looks_like() -> None:
    with served(Script('["[think]", 1]')) as server, openai_client(server) as client:
        for fields, prompt in (
            ({}, "user: Hi\nenable_thinking=False\nassistant: "),
            (
                {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}},
                "user: Hi\nenable_thinking=True\nassistant: ",
            ),
        ):
            with case(fields):
                answer = client.chat.completions.create(
                    model="demo-moe",
                    messages=HELLO,
                    response_format={"type": "json_object"},
                    **fields,  # type: ignore[arg-type]  # fields by name
                )
                assert answer.choices[0].message.content == '["[think]", 1]'
                assert server.prompt == prompt


def test_text_completions(plain: Served, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo-moe", prompt="Once", max_tokens=5)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hello", "length")
    assert plain.scheduler.requests[-1].end_ids == {0}
    assert client.completions.create(model="demo-moe", prompt="Once").usage.completion_tokens == 12  # type: ignore[union-attr]  # there
    answer = client.completions.create(model="demo-moe", prompt=["Once", "Twice"], n=2, echo=True)
    texts = [f"{prompt}Hello there!" for prompt in ("Once", "Once", "Twice", "Twice")]
    assert [choice.text for choice in answer.choices] == texts
    assert answer.usage is not None and answer.usage.prompt_tokens == 9
    answer = client.completions.create(model="demo-moe", prompt=[72, 105], echo=True, max_tokens=1)
    assert answer.choices[0].text == "HiH"
    assert plain.scheduler.requests[-1].prompt_ids == (72, 105)
    answer = client.completions.create(model="demo-moe", prompt="Once", logprobs=1, max_tokens=2)
    found = answer.choices[0].logprobs
    assert (found.tokens, found.token_logprobs, found.text_offset) == (["H", "e"], [-0.5, -0.5], [0, 1])
    assert found.top_logprobs == [{"H": -0.5}, {"e": -0.5}]
    pieces = client.completions.create(model="demo-moe", prompt=["a", "b"], echo=True, stream=True)
    streamed = ["", ""]
    for chunk in pieces:
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == ["aHello there!", "bHello there!"]


def test_models(client: openai.OpenAI) -> None:
    assert [(model.id, model.created) for model in client.models.list()] == [("demo-moe", 1_700_000_000)]
    assert client.models.retrieve("demo-moe").id == "demo-moe"
    for name in ("demo-moe", "packed", "gpt-9/x"):
        assert client.chat.completions.create(model=name, messages=HELLO).model == "demo-moe"
        assert client.models.retrieve(name).id == "demo-moe"


def test_with_aliases_other_names_are_refused() -> None:
    with served(aliases=("gpt-4o", "a/b")) as server, openai_client(server) as client:
        assert [model.id for model in client.models.list()] == ["demo-moe", "gpt-4o", "a/b"]
        assert [client.models.retrieve(name).id for name in ("a/b", "packed")] == ["a/b", "demo-moe"]
        for name in ("demo-moe", "packed", "gpt-4o"):
            assert client.chat.completions.create(model=name, messages=HELLO).model == "demo-moe"
        with pytest.raises(openai.NotFoundError, match="use 'demo-moe'"):
            client.models.retrieve("gpt-9/x")
        body = {"model": "gpt-9", "messages": HELLO, "prompt": "a", "input": "a"}
        for path in ("chat/completions", "completions", "responses"):
            answer = server.http.post(f"/v1/{path}", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")


def refused(http: httpx2.Client, path: str, body: object) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


def test_what_is_refused_names_the_field(plain: Served) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    function = {"type": "function", "function": {"name": "clock"}}
    for fields, param, message in (
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role", "'system'"),
        ({"messages": image}, "messages[0].content[0]", "'image_url' is not supported"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "valid string"),
        ({"messages": [{"role": "user", "content": "REFUSE"}]}, "messages", "it refuses"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"top_p": 1.5}, "top_p", "less than or equal to 1"),
        ({"n": 9}, "n", "less than or equal to 8"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 2.5}, "max_tokens", "integer"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"logit_bias": {"999": 1}}, "logit_bias", "no token"),
        ({"logit_bias": {"٣": 1}}, "logit_bias", "no token"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "'web_search' is not supported"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [function], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "add it"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wrong"}}}},
            "response_format.json_schema.schema",
            "there is no type",
        ),
        ({"grammar": "nonsense"}, "grammar", "no ::="),
        ({"grammar": "a ::= b", "response_format": {"type": "json_object"}}, "grammar", "exclude each other"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "cannot set messages"),
        ({"continue_final_message": True}, "continue_final_message", "of the assistant"),
    ):
        with case(fields):
            error = refused(plain.http, "/v1/chat/completions", {"messages": HELLO, **fields})
            assert (error["param"], message in error["message"]) == (param, True), error
    for fields, param in (
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"prompt": ["a"] * 5, "n": 8}, "n"),
        ({"prompt": [999]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
    ):
        with case(fields):
            error = refused(plain.http, "/v1/completions", {"prompt": "a", **fields})
            assert str(error["param"]).startswith(param)


def test_strange_bodies_are_refused(plain: Served) -> None:
    deep = b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": ' + b"[" * 80 + b"]" * 80
    bodies = {
        "nothing": b"",
        "no JSON": b"{",
        "a list": b"[]",
        "too deep to read": b"[" * 100_000,
        "too deep to write": deep + b"}}",
        "half a character": rb'{"messages": [{"role": "user", "content": "\ud800"}]}',
        "half a character in a schema": rb'{"messages": [], "chat_template_kwargs": {"\udfff": 1}}',
        "no number": b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
        "a number without end": b'{"messages": [{"role": "user", "content": "a"}], "seed": ' + b"9" * 5000 + b"}",
        "not UTF-8": b'{"messages": "\xff"}',
    }
    for name, body in bodies.items():
        with case(name):
            answer = plain.http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), answer.text
    form = plain.http.post("/v1/chat/completions", content=b'{"messages": []}', headers={"Content-Type": "text/plain"})
    assert form.status_code == 415, "a page of another origin may send text without being asked"


@pytest.mark.slow
def test_a_large_wrong_body_is_refused_at_once(plain: Served) -> None:
    for fields in (
        {"stop": [1] * 250_000},
        {"logit_bias": dict.fromkeys(map(str, range(120_000)), "x")},
        {"messages": [{"role": "user", "content": 1}] * 50_000},
        {"messages": [{"role": "user", "content": [1] * 250_000}]},
    ):
        with case(*fields):
            body = json.dumps({"messages": HELLO, **fields})
            begun = time.process_time()
            json.loads(body)
            parsed_s, begun = time.process_time() - begun, time.process_time()
            answer = plain.http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400
            # All others wait meanwhile. In seconds of the CPU, which others do not take, and not in a machine's own.
            assert time.process_time() - begun < 50 * parsed_s


def test_a_prompt_that_fills_the_context(client: openai.OpenAI) -> None:
    for length, is_short in ((CONTEXT_TOKENS - 1, True), (CONTEXT_TOKENS, False)):
        with case(length):
            if is_short:
                answer = client.completions.create(model="demo-moe", prompt="a" * length)
                assert answer.choices[0].text == "H"
                continue
            with pytest.raises(openai.BadRequestError, match="shorten the prompt") as caught:
                client.completions.create(model="demo-moe", prompt="a" * length)
            assert caught.value.code == "context_length_exceeded"


def test_an_engine_that_fails() -> None:
    with served(Script("Hel", error="the disk is gone")) as server, openai_client(server) as client:
        with pytest.raises(openai.InternalServerError, match="the disk is gone") as caught:
            client.chat.completions.create(model="demo-moe", messages=HELLO)
        assert caught.value.type == "server_error"
        stream = client.chat.completions.create(model="demo-moe", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="the disk is gone"):
            list(stream)


def test_a_queue_that_is_full() -> None:
    with served(delay_s=0.05, most=2) as server, openai_client(server) as client:
        with client.chat.completions.create(model="demo-moe", messages=HELLO, stream=True, n=2) as stream:
            next(iter(stream))
            for is_streamed in (False, True):
                body = {"messages": HELLO, "stream": is_streamed}
                answer = server.http.post("/v1/chat/completions", json=body)
                assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
                assert answer.json()["error"]["code"] == "queue_full"
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(model="demo-moe", messages=HELLO, n=3)
        assert all(ticket.cancelled.is_set() for ticket in server.scheduler.tickets[2:]), "none of the three runs on"


def test_a_model_without_a_chat_template(plain: Served) -> None:
    service = scripted_service(plain.scheduler, has_template=False)
    with served(options=ServeOptions(drain_s=1), loading=True) as server:
        server.app.state.service = service
        error = refused(server.http, "/v1/chat/completions", {"messages": HELLO})
        assert "use /v1/completions" in error["message"]
        assert server.http.post("/v1/completions", json={"prompt": "a"}).status_code == 200
