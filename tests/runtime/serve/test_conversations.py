"""Conversations as protocols allow them, in templates that refuse or leave out much of it."""

import random
from typing import Any

import pytest
from support.cases import case, random_seed
from support.published_templates import TEMPLATES
from support.scripted_scheduler import Script, ScriptedScheduler, scripted_service
from support.served import served

from moe_pack.runtime import ChatTemplate
from moe_pack.runtime.serve.conversations import Conversations
from moe_pack.runtime.serve.requests import RequestError

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
WITHOUT_TOOLS = ("Gemma 2", "Gemma 3")
Talk = list[dict[str, Any]]


def said(roles: str) -> Talk:
    """A conversation of numbered words: s, u and a for system, user and assistant, c for a call with its result."""
    talk: Talk = []
    for place, role in enumerate(roles):
        word = f"word{place:02}."
        if role == "c":
            call = {"id": f"call{place:05}", "type": "function", "function": {"name": "look", "arguments": {}}}
            talk.append({"role": "assistant", "content": "", "tool_calls": [call]})
            talk.append({"role": "tool", "tool_call_id": call["id"], "name": "look", "content": word})
        else:
            talk.append({"role": {"s": "system", "u": "user", "a": "assistant"}[role], "content": word})
    return talk


def written(name: str, talk: Talk, tools: bool = False) -> str:
    template = ChatTemplate(TEMPLATES[name], "<s>", "</s>")
    brought = Conversations(template).brought(talk, tools)
    return template.render(brought, add_generation_prompt=True, tools=[TOOL] if tools else None)


def assert_whole(text: str, talk: Talk) -> None:
    """Every word is there, once, in order."""
    words = [message["content"] for message in talk if message["content"]]
    places = [text.find(word) for word in words]
    assert -1 not in places and places == sorted(places), text
    assert all(text.count(word) == 1 for word in words), text


def test_no_text_is_lost_or_moved_in_any_template() -> None:
    for name in TEMPLATES:
        for roles in ("u", "su", "ssu", "susu", "usu", "uasu", "uasau", "uu", "uaau", "sssuuaasu", "s", "ss", "us"):
            with case(name, roles):
                talk = said(roles)
                before = [dict(message) for message in talk]
                assert_whole(written(name, talk), talk)
                assert talk == before, "what the caller gave is changed"
        for roles in ("uc", "suc", "ucu", "ucau", "ucsu", "uccu", "ucacau", "suacu"):
            with case(name, roles):
                talk = said(roles)
                if name in WITHOUT_TOOLS:
                    with pytest.raises(RequestError, match="cannot write results of tools"):
                        written(name, talk, tools=True)
                    continue
                if name == "ChatML":  # it writes no calls, and takes their results
                    talk = [message for message in talk if "tool_calls" not in message]
                assert_whole(written(name, talk, tools=True), talk)


@pytest.mark.slow
def test_no_text_is_lost_in_random_conversations() -> None:
    drawn = random.Random(random_seed())
    for _ in range(400):
        name = drawn.choice([each for each in TEMPLATES if each not in WITHOUT_TOOLS])
        roles = "".join(drawn.choices("suac", (2, 4, 3, 2), k=drawn.randint(1, 12)))
        with case(name, roles):
            talk = said("u" + roles)
            assert_whole(written(name, talk, tools=True), talk)


def test_forms_that_a_template_takes_stay_as_they_are() -> None:
    for name, roles in (("ChatML", "susuuaasu"), ("Qwen3.5", "suuaau"), ("gpt-oss", "suuaau"), ("Mistral", "suaua")):
        with case(name):
            template = ChatTemplate(TEMPLATES[name], "<s>", "</s>")
            assert Conversations(template).brought(said(roles), False) == said(roles)
    (only,) = Conversations(ChatTemplate(TEMPLATES["ChatML"])).brought(said("ss"), False)
    assert only == {"role": "system", "content": "word00.\n\nword01."}


def test_a_conversation_that_no_form_helps_is_refused_in_plain_words() -> None:
    for name in ("Mistral", "Gemma 2", "Gemma 3"):
        with case(name), pytest.raises(RequestError, match="begins with the user; add a message before"):
            written(name, said("au"))
    assert_whole(written("Qwen3.5", said("au")), said("au"))


def test_tools_that_the_template_does_not_write_are_said() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
    for name, is_said in (("Qwen3.5", False), ("gpt-oss", False), ("ChatML", True), ("Gemma 3", True)):
        with case(name), served(Script("Hello"), loading=True) as server:
            server.app.state.service = scripted_service(server.scheduler, template=ChatTemplate(TEMPLATES[name]))
            answer = server.http.post("/v1/chat/completions", json=body).json()
            assert [each.partition(":")[0] for each in answer.get("warnings", [])] == ["tools"] * is_said


def test_clients_of_every_protocol_work_with_a_strict_template() -> None:
    """As Codex sends instructions and a developer's message, and Claude Code a late system message and an error."""
    strict = ChatTemplate(TEMPLATES["Qwen3.5"])
    with served(Script("Hello"), loading=True) as server:
        scheduler: ScriptedScheduler = server.scheduler
        server.app.state.service = scripted_service(scheduler, template=strict)
        rules = [{"role": "developer", "content": "rules"}, {"role": "user", "content": "hi"}]
        bodies: list[tuple[str, dict[str, Any], list[str]]] = [
            ("/v1/responses", {"instructions": "agent", "input": rules}, ["system\nagent\n\nrules<", "user\nhi<"]),
            (
                "/v1/chat/completions",
                {"messages": [{"role": "system", "content": "agent"}, *rules]},
                ["agent\n\nrules<"],
            ),
        ]
        late = [{"role": "user", "content": "x"}, {"role": "system", "content": "b"}, {"role": "user", "content": "y"}]
        bodies.append(("/v1/messages", {"system": "a", "messages": late, "max_tokens": 4}, ["system\na<", "user\nb<"]))
        call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": "no such file"}
        used = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
        ]
        expected = ["<tool_response>Error: no such file</tool_response>", "user\nand?<"]
        bodies.append(("/v1/messages", {"messages": used, "max_tokens": 4}, expected))
        for path, body, parts in bodies:
            with case(path, body):
                answer = server.http.post(path, json=body)
                assert answer.status_code == 200, answer.text
                prompt = "".join(map(chr, scheduler.requests[-1].prompt_ids))
                assert all(part in prompt for part in parts), prompt
