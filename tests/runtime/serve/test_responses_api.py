"""Responses, with OpenAI's own client as the judge."""

from typing import Any

import openai
import pytest
from support.cases import case
from support.scripted_scheduler import NamedGrammar, Script
from support.served import Served, openai_client, served

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Says the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
THOUGHT_AND_CALL = '[think]A town.[/think]Let me see.[call weather]{"city": "Rome"}[/call]'


def test_a_response_has_text_and_usage(client: openai.OpenAI) -> None:
    response = client.responses.create(model="demo-moe", input="Hi", temperature=0.5)
    assert (response.output_text, response.status, response.model) == ("Hello there!", "completed", "demo-moe")
    assert (response.temperature, response.top_p, response.error) == (0.5, 1.0, None)
    usage = response.usage
    prompt = len("user: Hi\nassistant: ")
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (prompt, 12, prompt + 12)
    assert usage.input_tokens_details.cached_tokens == 3
    cut = client.responses.create(model="demo-moe", input="Hi", max_output_tokens=4)
    assert (cut.output_text, cut.status) == ("Hell", "incomplete")
    assert cut.incomplete_details is not None and cut.incomplete_details.reason == "max_output_tokens"


def test_a_stream_has_the_documented_events_in_order() -> None:
    with served(Script(THOUGHT_AND_CALL)) as server, openai_client(server) as client:
        events = list(client.responses.create(model="demo-moe", input="Hi", tools=[WEATHER], stream=True))
        whole = client.responses.create(model="demo-moe", input="Hi", tools=[WEATHER])
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    once = [kind for place, kind in enumerate(kinds) if kinds[place - 1 : place] != [kind]]
    expected = """
        response.created response.in_progress response.output_item.added response.content_part.added
        response.reasoning_text.delta response.reasoning_text.done response.content_part.done
        response.output_item.done response.output_item.added response.content_part.added
        response.output_text.delta response.output_text.done response.content_part.done response.output_item.done
        response.output_item.added response.function_call_arguments.delta response.function_call_arguments.done
        response.output_item.done response.completed
    """.split()  # noqa: SIM905  # a table of words
    assert once == expected
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
    assert plain.prompt.split("\n") == [
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
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "store: false makes the client do so"),
        ({"input": [{"type": "dance_call", "id": "x"}]}, "input", "type 'dance_call' is not supported"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input", "no items that this server can read"),
        ({"input": [{"role": "user"}]}, "input", "needs role and content"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input", "needs call_id"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no responses"),
        ({"background": True}, "background", "stores no responses"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "'web_search' is not supported"),
        ({"tools": [{**FILES, "name": "n" * 250}]}, "tools[0].tools", "over 256 characters"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "add it"),
    ):
        with case(fields):
            answer = plain.http.post("/v1/responses", json={"input": "Hi", **fields})
            error = answer.json()["error"]
            assert answer.status_code == 400
            assert (error["param"], message in error["message"]) == (param, True), error


def test_an_engine_that_fails() -> None:
    with served(Script("Hel", error="the disk is gone")) as server, openai_client(server) as client:
        with pytest.raises(openai.InternalServerError, match="the disk is gone"):
            client.responses.create(model="demo-moe", input="Hi")
        last = list(client.responses.create(model="demo-moe", input="Hi", stream=True))[-1]
        assert last.type == "response.failed" and last.response.error is not None
        assert (last.response.status, last.response.error.message) == ("failed", "the disk is gone")


LARK = 'start: "*** Begin Patch" LF'
PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": LARK},
}
FILES: Any = {"type": "namespace", "name": "mcp__files__", "description": "Files.", "tools": [WEATHER, PATCH]}
PATCH_CALL = '[call apply_patch]{"input": "*** \\u0042egin\\n"}[/call]'


def test_a_custom_tool_is_called_with_a_text() -> None:
    with served(Script(f"Now.{PATCH_CALL}")) as server, openai_client(server) as client:
        whole = client.responses.create(model="demo-moe", input="Hi", tools=[WEATHER, PATCH])
        with client.responses.stream(model="demo-moe", input="Hi", tools=[WEATHER, PATCH]) as stream:
            events = list(stream)
    last = events[-1]
    assert last.type == "response.completed"
    for response in (whole, last.response):
        call = response.output[1]
        assert call.type == "custom_tool_call"
        assert (call.name, call.input, call.call_id) == ("apply_patch", "*** Begin\n", "call_1")
        assert [tool.type for tool in response.tools] == ["function", "custom"]
    kinds = [event.type for event in events][-5:]
    expected = """
        response.output_item.added response.custom_tool_call_input.delta response.custom_tool_call_input.done
        response.output_item.done response.completed
    """.split()  # noqa: SIM905  # a table of words
    assert kinds == expected
    added, delta, done, item = events[-5:-1]
    assert added.type == "response.output_item.added" and added.item.type == "custom_tool_call"
    assert (added.item.input, added.item.id) == ("", item.item.id if item.type == "response.output_item.done" else "")
    assert delta.type == "response.custom_tool_call_input.delta" and delta.delta == "*** Begin\n"
    assert done.type == "response.custom_tool_call_input.done" and done.input == "*** Begin\n"
    assert (whole.model_extra or {})["warnings"] == [
        "tools[1].format: the model is told of this format, and may not keep to it"
    ]


def test_what_a_model_writes_instead_of_a_text_is_the_text() -> None:
    texts = {"": "", "{}": "", '{"input": ""}': "", "no JSON": "no JSON", '{"a": 1}': '{"a": 1}', '"a"': "a", "5": "5"}
    for arguments, text in texts.items():
        with case(arguments), served(Script(f"[call apply_patch]{arguments}[/call]")) as server:
            found = server.http.post("/v1/responses", json={"input": "Hi", "tools": [PATCH]}).json()
            assert found["output"][0]["input"] == text


def test_a_custom_tool_can_be_demanded() -> None:
    with served(Script('{"input": "a"}')) as server, openai_client(server) as client:
        choice: Any = {"type": "custom", "name": "apply_patch"}
        response = client.responses.create(model="demo-moe", input="Hi", tools=[WEATHER, PATCH], tool_choice=choice)
        grammar = server.scheduler.requests[-1].grammar
    call = response.output[0]
    assert call.type == "custom_tool_call" and call.input == "a"
    assert isinstance(grammar, NamedGrammar) and isinstance(grammar.source, dict)
    assert (grammar.source["required"], grammar.source["additionalProperties"]) == (["input"], False)
    told = grammar.source["properties"]["input"]
    assert told["type"] == "string" and LARK in told["description"]


def test_the_tools_of_a_namespace_come_back_with_it(plain: Served) -> None:
    script = Script("[call mcp__files__weather]{}[/call][call mcp__files__apply_patch][/call][call weather]{}[/call]")
    tools = [FILES, {**FILES, "name": "git"}, WEATHER]
    with served(script) as server, openai_client(server) as client:
        called = client.responses.create(model="demo-moe", input="Hi", tools=tools).output
        items: list[Any] = [{"role": "user", "content": "Hi"}, *(item.model_dump(exclude_none=True) for item in called)]
        items += [{"type": "function_call_output", "call_id": "call_1", "output": "warm"}]
        client.responses.create(model="demo-moe", input=items, tools=tools)
        prompt = server.prompt
    assert [(item.type, getattr(item, "namespace", None), getattr(item, "name", "")) for item in called] == [
        ("function_call", "mcp__files__", "weather"),
        ("custom_tool_call", "mcp__files__", "apply_patch"),
        ("function_call", None, "weather"),
    ]
    for offered in ("mcp__files__weather", "mcp__files__apply_patch", "git__weather", "git__apply_patch", "weather"):
        assert f"\ntool: {offered}\n" in prompt
    assert "'name': 'mcp__files__weather', 'arguments': {}" in prompt
    assert f"tool: warm { ({'tool_call_id': 'call_1', 'name': 'mcp__files__weather'}) }" in prompt


def test_what_a_service_runs_is_left_out(plain: Served) -> None:
    kinds = ("web_search", "web_search_preview", "local_shell", "shell", "image_generation", "file_search", "mcp")
    kinds += ("code_interpreter", "computer_use_preview", "tool_search", "programmatic_tool_calling", "apply_patch")
    tools = [*({"type": kind, "name": f"the_{kind}"} for kind in kinds), WEATHER]
    found = plain.http.post("/v1/responses", json={"input": "Hi", "tools": tools, "tool_choice": "auto"}).json()
    assert [tool["name"] for tool in found["tools"]] == ["weather"]
    assert plain.prompt.count("tool: ") == 1
    for i, kind in enumerate(kinds):
        assert f"tools[{i}]: type '{kind}' is not supported" in found["warnings"][i]
    for choice, message in (
        ({"type": "web_search"}, "type 'web_search' is not supported and was left out"),
        ({"type": "mcp", "server_label": "x", "name": "y"}, "type 'mcp' is not supported and was left out"),
        ({"type": "function", "name": "dance"}, "there is no tool 'dance' in tools"),
        ({"type": "function", "name": "the_mcp"}, "'the_mcp' is a tool that was left out"),
        ({"type": "function"}, "has no name"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, "allows none of the tools"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]}, "allows 'x'"),
    ):
        with case(choice):
            answer = plain.http.post("/v1/responses", json={"input": "Hi", "tools": tools, "tool_choice": choice})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], message in error["message"]) == (400, "tool_choice", True), (
                error
            )


def test_allowed_tools_are_the_ones_that_the_model_knows(plain: Served, client: openai.OpenAI) -> None:
    allowed = [{"type": "custom", "name": "apply_patch"}, {"type": "web_search"}]
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    tools: Any = [WEATHER, PATCH, {"type": "web_search"}]
    response = client.responses.create(model="demo-moe", input="Hi", tools=tools, tool_choice=choice)
    assert "tool: apply_patch" in plain.prompt and "tool: weather" not in plain.prompt
    assert [item.type for item in response.output] == ["custom_tool_call"]
    assert not isinstance(response.tool_choice, str) and response.tool_choice.type == "allowed_tools"


def test_histories_of_agents_reach_the_template(plain: Served, client: openai.OpenAI) -> None:
    action = {"type": "exec", "command": ["ls"], "timeout_ms": None, "env": {}}
    items: list[Any] = [
        {"role": "user", "content": "a"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "reasoning", "id": "r", "summary": [], "content": None, "encrypted_content": None},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "x"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "local_shell_call", "id": "c2", "call_id": None, "status": "completed", "action": action},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "Done."}]},
        {"type": "local_shell_call_output", "id": "c2", "output": "a.txt"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "b"}] * 2},
        {"type": "mcp_list_tools", "id": "m", "server_label": "x", "tools": []},
        {"type": "web_search_call", "id": "ws_2", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "additional_tools", "role": "developer", "tools": [FILES]},
        {"role": "user", "content": "b"},
    ]
    response = client.responses.create(model="demo-moe", input=items, tools=[PATCH])
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "apply_patch", "arguments": {"input": "*** Begin"}}},
        {
            "id": "c2",
            "type": "function",
            "function": {"name": "local_shell", "arguments": {"type": "exec", "command": ["ls"], "env": {}}},
        },
    ]
    assert plain.prompt.split("\n") == [
        "user: a",
        f"assistant:  { ({'reasoning_content': 'hm', 'tool_calls': calls}) }",
        f"tool: Done. { ({'tool_call_id': 'c1', 'name': 'apply_patch'}) }",
        f"tool: a.txt { ({'tool_call_id': 'c2', 'name': 'local_shell'}) }",
        "tool: b",
        f"b { ({'tool_call_id': 'c2', 'name': 'local_shell'}) }",
        "user: b",
        "tool: apply_patch",
        "tool: mcp__files__weather",
        "tool: mcp__files__apply_patch",
        "assistant: ",
    ]
    warnings = (response.model_extra or {})["warnings"]
    for kind in ("web_search_call", "mcp_list_tools"):
        assert sum(repr(kind) in warning for warning in warnings) == 1
