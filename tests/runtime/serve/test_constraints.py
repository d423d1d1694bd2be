"""Constraints in the dialects of several servers: no field that rules an answer is dropped in silence."""

import json
from typing import Any

import torch
from support.cases import case
from support.scripted_scheduler import NamedGrammar, Script
from support.served import Served, served

from moe_pack.runtime import Sampler, SamplingOptions
from moe_pack.runtime.sampling import Grammar
from moe_pack.runtime.serve.grammars import RuledGrammar, TokenRules, ruled, sequences_of
from moe_pack.runtime.serve.parsers import ContentDelta, ToolCallDelta
from moe_pack.runtime.serve.protocols.constraints import ANY_OBJECT, REFUSED, TASTE
from moe_pack.runtime.serve.protocols.formed import FormedCallParser
from moe_pack.runtime.serve.requests import Request

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "clock", "parameters": SCHEMA}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 100},
}


def request_of(server: Served, path: str, **fields: Any) -> Request:
    answer = server.http.post(path, json={**BODIES[path], **fields})
    assert answer.status_code == 200, answer.text
    found: Request = server.scheduler.requests[-1]
    return found


def source_of(grammar: Grammar | None) -> object:
    return grammar.source if isinstance(grammar, NamedGrammar) else grammar


def test_every_spelling_of_a_form_is_taken_in_every_protocol(plain: Served) -> None:
    text = json.dumps(SCHEMA)
    for fields, source in (
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, SCHEMA),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, SCHEMA),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, SCHEMA),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        ({"response_format": {"type": "text"}}, None),
        ({"json_schema": SCHEMA}, SCHEMA),
        ({"json_schema": text}, SCHEMA),
        ({"guided_json": SCHEMA}, SCHEMA),
        ({"guided_json": text}, SCHEMA),
        ({"guided_regex": "a+"}, "/a+/"),
        ({"regex": "a+"}, "/a+/"),
        ({"guided_choice": ["yes", "no"]}, ["yes", "no"]),
        ({"guided_grammar": 'root ::= "a"'}, 'root ::= "a"'),
        ({"grammar": 'root ::= "a"'}, 'root ::= "a"'),
        ({"ebnf": 'root ::= "a"'}, 'root ::= "a"'),
        ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
        ({"structured_outputs": {"json": text}}, SCHEMA),
        ({"structured_outputs": {"regex": "a"}}, "/a/"),
        ({"structured_outputs": {"choice": ["a"]}}, ["a"]),
        ({"structured_outputs": {"grammar": "a ::= b"}}, "a ::= b"),
        ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
        ({"format": "json"}, ANY_OBJECT),
        ({"format": SCHEMA}, SCHEMA),
        ({"format": ""}, None),
    ):
        for path in BODIES:
            with case(path, fields):
                assert source_of(request_of(plain, path, **fields).grammar) == source
    for path, fields in (
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}}),
        ("/v1/messages", {"output_format": {"type": "json_schema", "schema": SCHEMA}}),
    ):
        with case(path, fields):
            assert source_of(request_of(plain, path, **fields).grammar) == SCHEMA


def refusal(server: Served, path: str, fields: dict[str, Any]) -> tuple[str | None, str]:
    answer = server.http.post(path, json={**BODIES[path], **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error.get("param"), error["message"]


def test_two_forms_and_wrong_ones_are_refused_by_name(plain: Served) -> None:
    wrong = {"type": "wrong"}
    for fields, param, message in (
        ({"json_schema": SCHEMA, "regex": "a"}, "json_schema", "regex and json_schema exclude each other"),
        ({"guided_json": wrong}, "guided_json", "no type 'wrong'"),
        ({"response_format": {"type": "json_object", "schema": wrong}}, "response_format.schema", "no type 'wrong'"),
        ({"structured_outputs": {"json": wrong}}, "structured_outputs.json", "no type 'wrong'"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "is not supported"),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
            "structured_outputs",
            "whitespace_pattern",
        ),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, "structured_outputs", "white space"),
        ({"json_schema": "{"}, "json_schema", "is no JSON"),
        ({"guided_json": "[1]"}, "guided_json", "is no JSON object"),
        ({"guided_grammar": "nonsense"}, "guided_grammar", "no ::="),
        ({"format": "xml"}, "format", ""),
        ({"response_format": {"type": "regex"}}, "response_format.type", "'json_schema'"),
        ({"stop_token_ids": [999]}, "stop_token_ids", "none is 999"),
        ({"allowed_token_ids": [1, 999]}, "allowed_token_ids", "none is 999"),
        ({"bad_words": ["a", " "]}, "bad_words", "is empty"),
        ({"logit_bias": [[999, 1]]}, "logit_bias", "no token"),
        ({"logit_bias": [["Hello", False]]}, "logit_bias", "no token"),
        ({"max_tokens": 5, "n_predict": 0}, "n_predict", "at least 1"),
    ):
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
            with case(path, fields):
                found = refusal(plain, path, fields)
                assert str(found[0]).startswith(param) and message in found[1], found
    found = refusal(plain, "/v1/messages", {"output_format": {"type": "json_schema", "schema": wrong}})
    assert found[1].startswith("output_format.schema: ")


def test_the_tool_whose_schema_is_wrong_is_named(plain: Served) -> None:
    def named(name: str, schema: dict[str, Any]) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": schema}}

    tools = [named("a", SCHEMA), named("b", {"type": "wrong"})]
    for offered, param in ((tools, "tools[1].function.parameters"), (tools[1:], "tools[0].function.parameters")):
        fields = {"tools": offered, "tool_choice": "required"}
        assert refusal(plain, "/v1/chat/completions", fields)[0] == param
    flat = [{"type": "function", **tool["function"]} for tool in tools]
    assert refusal(plain, "/v1/responses", {"tools": flat[1:], "tool_choice": "required"})[0] == "tools[0].parameters"
    anthropic = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in flat]
    found = refusal(plain, "/v1/messages", {"tools": anthropic[1:], "tool_choice": {"type": "any"}})
    assert found[1].startswith("tools[0].input_schema: ")


def test_fields_that_would_rule_an_answer_are_refused_by_name(plain: Served) -> None:
    cases: dict[str, Any] = {name: ["x"] for name in REFUSED}
    cases |= {"modalities": ["text", "audio"], "skip_special_tokens": False, "include_stop_str_in_output": True}
    cases |= {"length_penalty": 2.0, "truncation": "start", "parse_tool_calls": False}
    own = {"/v1/completions": {"prompt"}, "/v1/messages": {"system"}}
    for name, value in cases.items():
        for path in BODIES:
            if name in own.get(path, ()):
                continue
            with case(path, name):
                param, message = refusal(plain, path, {name: value})
                assert message.startswith(name) and (param == name or path == "/v1/messages")
    # The nearest that pass: values that change nothing.
    for name in REFUSED:
        with case(name):
            request_of(plain, "/v1/chat/completions", **{name: None})
    for fields in ({"modalities": ["text"]}, {"skip_special_tokens": True}, {"length_penalty": 1}, {"mcp_servers": []}):
        for path in BODIES:
            with case(path, fields):
                request_of(plain, path, **fields)


def warnings_in(answer: Any) -> list[str]:
    """The warnings of an answer, whole or streamed."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return list(answer.json().get("warnings", []))
    found: list[str] = []
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            for place in (event, event.get("response", {}), event.get("message", {})):
                found += place.get("warnings", [])
    return found


def test_taste_and_unknown_fields_are_named_in_warnings(plain: Served) -> None:
    for path in BODIES:
        for streams in (False, True):
            fields: dict[str, Any] = {
                "dry_multiplier": 0.8,
                "mirostat": 2,
                "brand_new\n": 1,
                "user": "me",
                "typical_p": 1.0,
            }
            with case(path, streams):
                answer = plain.http.post(path, json={**BODIES[path], **fields, "stream": streams})
                assert warnings_in(answer) == [
                    "dry_multiplier changes nothing here",
                    "mirostat changes nothing here",
                    r"'brand_new\n' is not known here and changes nothing",
                ]
                assert warnings_in(plain.http.post(path, json={**BODIES[path], "stream": streams})) == []
    for name in TASTE:
        with case(name):
            answer = plain.http.post("/v1/responses", json={"input": "Hi", name: 0.37})
            assert warnings_in(answer) == [f"{name} changes nothing here"]
            assert warnings_in(plain.http.post("/v1/responses", json={"input": "Hi", name: TASTE[name][0]})) == []


def test_a_budget_of_thoughts_is_never_dropped_in_silence(plain: Served) -> None:
    chat = {"messages": HELLO}
    for path, body, name in (
        ("/v1/chat/completions", {**chat, "thinking_budget": 0}, "thinking_budget"),
        ("/v1/chat/completions", {**chat, "reasoning_budget": 0}, "reasoning_budget"),
        ("/v1/chat/completions", {**chat, "reasoning": {"max_tokens": 100}}, "reasoning.max_tokens"),
        ("/v1/messages", {**BODIES["/v1/messages"], "thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking."),
    ):
        with case(path, name):
            (warning,) = warnings_in(plain.http.post(path, json=body))
            assert warning.startswith(name)


def test_lengths_and_ends(plain: Served) -> None:
    for fields, length in (
        ({"n_predict": 3}, 3),
        ({"max_new_tokens": 3}, 3),
        ({"max_tokens": 9, "max_completion_tokens": 4}, 4),
        ({"max_tokens": 4, "n_predict": -1}, 4),
        ({"options": {"num_predict": 5, "num_ctx": 4096, "temperature": 0.25}}, 5),
    ):
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
            with case(path, fields):
                assert request_of(plain, path, **fields).max_tokens == length
    sampling = request_of(plain, "/v1/chat/completions", options={"temperature": 0.25, "top_k": 5}, top_k=7).sampling
    assert (sampling.temperature, sampling.top_k) == (0.25, 7)
    assert request_of(plain, "/v1/chat/completions", do_sample=False, temperature=1.0).sampling.temperature == 0
    request = request_of(plain, "/v1/chat/completions", stop_token_ids=[72], stop="!", stop_sequences=["?"])
    assert request.end_ids == {0, 1, 72} and set(request.stop) == {"!", "?"}
    request = request_of(plain, "/v1/chat/completions", stop_token_ids=[72], ignore_eos=True)
    assert request.end_ids == {72}
    for field in ("prefix", "partial"):
        last = {"role": "assistant", "content": "Well", field: True}
        request = request_of(plain, "/v1/chat/completions", messages=[*HELLO, last])
        assert "".join(map(chr, request.prompt_ids)) == "user: Hi\nassistant: Well"


def test_thinking_in_every_dialect(plain: Served) -> None:
    for fields, line in (
        ({"enable_thinking": False}, "enable_thinking=False"),
        ({"think": False}, "enable_thinking=False"),
        ({"think": "high"}, "reasoning_effort=high"),
        ({"thinking": {"type": "disabled"}}, "enable_thinking=False"),
        ({"reasoning": {"effort": "low"}}, "reasoning_effort=low"),
        ({"reasoning": {"enabled": False}}, "enable_thinking=False"),
        ({"reasoning_effort": "none"}, "enable_thinking=False"),
    ):
        with case(fields):
            request = request_of(plain, "/v1/chat/completions", **fields)
            assert "".join(map(chr, request.prompt_ids)) == f"user: Hi\n{line}\nassistant: "


def test_tools_of_services_are_left_out_and_said() -> None:
    with served(Script("Hello")) as server:
        for path, own, other in (
            ("/v1/chat/completions", TOOL, {"type": "web_search"}),
            ("/v1/responses", {"type": "function", **TOOL["function"]}, {"type": "web_search", "filters": {}}),
            ("/v1/messages", {"name": "clock", "input_schema": SCHEMA}, {"type": "bash_20250124", "name": "bash"}),
        ):
            with case(path):
                answer = server.http.post(path, json={**BODIES[path], "tools": [own, other]})
                (warning,) = warnings_in(answer)
                assert warning.startswith("tools[1]: type ")
                assert "tool: clock" in "".join(map(chr, server.scheduler.requests[-1].prompt_ids))
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}}
        second = {"type": "function", "function": {"name": "weather"}}
        body = {"messages": HELLO, "tools": [second, TOOL], "tool_choice": allowed}
        assert server.http.post("/v1/chat/completions", json=body).status_code == 200
        assert source_of(server.scheduler.requests[-1].grammar) == SCHEMA
        strict = {"type": "function", "function": {"name": "f", "strict": True}}
        answer = server.http.post("/v1/chat/completions", json={"messages": HELLO, "tools": [strict]})
        assert warnings_in(answer) == [
            "strict: a call follows its tool's schema for certain only where tool_choice demands a call"
        ]


def test_an_answer_of_json_may_be_a_call_where_there_are_tools() -> None:
    format_ = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    call = '{"name": "clock", "arguments": {"a": true}}'
    with served(Script(call), Script('{"a": true}'), Script('{"a": true}')) as server:
        body = {"messages": HELLO, "tools": [TOOL], "response_format": format_}
        choice = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "clock", "arguments": '{"a": true}'}
        choice = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", '{"a": true}')
        choice = server.http.post("/v1/chat/completions", json={**body, "tool_choice": "required"}).json()["choices"][0]
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": true}', "a format is no call's"


def test_a_call_is_told_from_other_json_as_soon_as_it_can_be() -> None:
    for text, is_call in (
        ('{"name": "clock", "arguments": {"a": "b"}}', True),
        ('{ "name" : "clock","arguments":{} }', True),
        ('{"name": "clock"}', False),
        ('{"name": "clock", "age": 3}', False),
        ('{"name": "other", "arguments": {}}', False),
        ('{"names": "clock"}', False),
        ('{"name": 5, "arguments": {}}', False),
        ('{"arguments": {}, "name": "clock"}', False),
        ('{"a": {"name": "clock", "arguments": {}}}', False),
        ("{}", False),
        ("[1, 2]", False),
    ):
        with case(text):
            parser = FormedCallParser(["clock"], can_be_content=True)
            early = [delta for character in text for delta in parser.push(character)]
            deltas = [*early, *parser.finish()]
            if is_call:
                (delta,) = deltas
                assert isinstance(delta, ToolCallDelta) and delta.name == "clock"
            else:
                assert "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)) == text
                assert early, "it is streamed"


def tokens_left(grammar: Grammar, size: int = 8) -> set[int]:
    logits = grammar.allow(torch.zeros(size))
    return {token for token, value in enumerate(logits.tolist()) if value == 0}


def test_rules_about_tokens() -> None:
    assert ruled(TokenRules(), {0}, None) is None
    every = set(range(8))
    assert tokens_left(RuledGrammar(TokenRules(allowed=frozenset({1, 3})), {0})) == {1, 3}
    assert tokens_left(RuledGrammar(TokenRules(banned=frozenset({1, 3})), {0})) == every - {1, 3}
    grammar = RuledGrammar(TokenRules(min_tokens=2, bad=((4,), (5, 6), (5, 5, 7))), {0})
    for token, left in ((2, every - {0, 4}), (5, every - {0, 4}), (5, every - {4, 6}), (1, every - {4, 6, 7})):
        assert tokens_left(grammar) == left
        grammar.accept(token)
    assert tokens_left(grammar) == every - {4}

    class Odd:
        """Allows odd tokens, and remembers what came."""

        def __init__(self) -> None:
            self.tokens: list[int] = []

        def allow(self, logits: torch.Tensor) -> torch.Tensor:
            return logits.index_fill(0, torch.arange(0, len(logits), 2), -torch.inf)

        def accept(self, token: int) -> None:
            self.tokens.append(token)

    odd = Odd()
    both = ruled(TokenRules(banned=frozenset({3})), {0}, odd)
    assert both is not None and tokens_left(both) == {1, 5, 7}
    sampler = Sampler(SamplingOptions(temperature=0, top_p=1), grammar=both)
    assert sampler.choose(torch.tensor([9.0, 1, 9, 9, 9, 2, 9, 1])) == 5 and odd.tokens == [5]
    assert sequences_of(["ab", " c"], lambda text: [ord(c) for c in text]) == ((32, 97, 98), (32, 99), (97, 98), (99,))


def test_rules_reach_the_scheduler(plain: Served) -> None:
    fields: dict[str, Any] = {"allowed_token_ids": [72, 73], "logit_bias": [[73, False], [72, 2.5]], "min_tokens": 4}
    for path in BODIES:
        with case(path):
            request = request_of(plain, path, **fields)
            assert request.sampling.logit_bias == ((72, 2.5),)
            assert request.grammar is not None and tokens_left(request.grammar, 256) == {72}
            request = request_of(plain, path, bad_words=["H"], logit_bias={"73": False})
            assert request.grammar is not None
            assert set(range(256)) - tokens_left(request.grammar, 256) == {72, 73}
