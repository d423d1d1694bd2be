"""What two agents send, written by hand from their public sources, with tools of all kinds and later turns.

Codex: openai/codex, codex-rs, `ResponsesApiRequest`, `ToolSpec` and `ResponseItem`. Claude Code: Anthropic's API
reference, and the requests that its public issues quote.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from checking import ADDRESS, MODEL, TOOL_SCHEMA, check, expect, main

CODEX, CLAUDE = "Codex (its requests)", "Claude Code (its requests)"
SHELL_TOOL = {
    "type": "function",
    "name": "shell_command",
    "description": "Runs a shell command.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": "The script to run."},
            "workdir": {"type": "string"},
            "timeout_ms": {"type": "number"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}
LARK = (
    'start: begin_patch end_patch\nbegin_patch: "*** Begin Patch" LF\nend_patch: "*** End Patch" LF?\n%import common.LF'
)
PATCH_TOOL = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": LARK},
}
OTHER_TOOLS: list[dict[str, Any]] = [
    {"type": "local_shell"},
    {"type": "web_search", "external_web_access": False},
    {"type": "image_generation", "output_format": "png"},
    {"type": "namespace", "name": "mcp__files__", "description": "Files.", "tools": [SHELL_TOOL]},
    {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": TOOL_SCHEMA},
]
USER_ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Say hi."}]}
DEVELOPER_ITEM = {
    "type": "message",
    "role": "developer",
    "content": [{"type": "input_text", "text": "<permissions instructions>Ask before you write.</permissions>"}],
}
LATER_ITEMS: list[dict[str, Any]] = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": None},
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "I look."}],
        "phase": "commentary",
    },
    {"type": "function_call", "name": "shell_command", "arguments": '{"command": "ls"}', "call_id": "call_1"},
    {"type": "function_call_output", "call_id": "call_1", "output": "Exit code: 0\nOutput:\na.txt"},
]
OTHER_ITEMS: list[dict[str, Any]] = [
    {"type": "custom_tool_call", "call_id": "call_2", "name": "apply_patch", "input": "*** Begin Patch\n*** End Patch"},
    {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Done."},
    {
        "type": "local_shell_call",
        "id": "lsh_1",
        "call_id": "call_3",
        "status": "completed",
        "action": {"type": "exec", "command": ["ls"], "timeout_ms": None, "working_directory": None},
    },
    {"type": "function_call_output", "call_id": "call_3", "output": [{"type": "input_text", "text": "a.txt"}]},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
]


def post(path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> str:
    """Returns the text of an answer.

    Raises:  RuntimeError with the status and what the server says, unless the status is 200.
    """
    sent = {"Content-Type": "application/json", "Authorization": "Bearer none", **(headers or {})}
    request = urllib.request.Request(ADDRESS + path, json.dumps(body).encode(), sent)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            text: str = answer.read().decode()
            return text
    except urllib.error.HTTPError as fault:
        raise RuntimeError(f"{fault.code} {fault.read().decode()}") from fault


def events(text: str) -> Iterator[dict[str, Any]]:
    """Yields the objects of a stream of events, of which each names its type twice."""
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line and line[0] != ":")
        if "data" in fields:
            event = json.loads(fields["data"])
            expect(fields.get("event") == event["type"], block)
            yield event


def codex(*items: dict[str, Any], tools: list[dict[str, Any]] | None = None, **more: Any) -> list[dict[str, Any]]:
    """Returns the events of Codex's request with these items; they end with a response that is whole."""
    body = {
        "model": MODEL,
        "instructions": "You are Codex, based on GPT-5. You run in the Codex CLI on a user's computer.",
        "input": list(items),
        "tools": tools or [SHELL_TOOL],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199c0de-0000-7000-8000-000000000000",
        "text": {"verbosity": "medium"},
        "client_metadata": {"x-codex-installation-id": "0199c0de"},
        "max_output_tokens": 24,
        **more,
    }
    headers = {
        "Accept": "text/event-stream",
        "originator": "codex_cli_rs",
        "session-id": "0199c0de",
        "version": "0.90.0",
    }
    found = list(events(post("/v1/responses", body, headers)))
    last = found[-1]
    expect(found[0]["type"] == "response.created", found[0])
    expect(last["type"] in ("response.completed", "response.incomplete"), last)
    usage = last["response"]["usage"]
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        expect(isinstance(usage[name], int), usage)
    expect(isinstance(usage["input_tokens_details"]["cached_tokens"], int), usage)
    expect(isinstance(usage["output_tokens_details"]["reasoning_tokens"], int), usage)
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    expect(done == last["response"]["output"] or last["type"] == "response.incomplete", done)
    return found


@check(CODEX, "first turn: instructions, developer, function tool")
def codex_first_turn() -> None:
    codex(DEVELOPER_ITEM, USER_ITEM)


@check(CODEX, "tool of type custom")
def codex_custom_tool() -> None:
    codex(DEVELOPER_ITEM, USER_ITEM, tools=[SHELL_TOOL, PATCH_TOOL])
    choice = {"type": "custom", "name": "apply_patch"}
    found = codex(USER_ITEM, tools=[SHELL_TOOL, PATCH_TOOL], tool_choice=choice)
    (item,) = found[-1]["response"]["output"]
    expect((item["type"], item["name"]) == ("custom_tool_call", "apply_patch") and item["call_id"], item)
    names = ("delta", "done")
    texts = [event for event in found if event["type"].removeprefix("response.custom_tool_call_input.") in names]
    expect([texts[0]["delta"], texts[-1]["input"]] == [item["input"]] * 2, found)
    codex(USER_ITEM, item, {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Done."})


@check(CODEX, "tools of types local_shell, web_search, namespace")
def codex_other_tools() -> None:
    faults = []
    for tool in OTHER_TOOLS:
        try:
            codex(USER_ITEM, tools=[SHELL_TOOL, tool])
        except Exception as fault:
            faults.append(f"{tool['type']}: {fault}")
    expect(not faults, faults)


@check(CODEX, "a call of a tool of a namespace, and its result")
def codex_namespace() -> None:
    tools = [{"type": "namespace", "name": "mcp__files__", "description": "Files.", "tools": [SHELL_TOOL]}]
    (item,) = codex(USER_ITEM, tools=tools, tool_choice="required")[-1]["response"]["output"]
    expect((item["type"], item["namespace"], item["name"]) == ("function_call", "mcp__files__", "shell_command"), item)
    codex(USER_ITEM, item, {"type": "function_call_output", "call_id": item["call_id"], "output": "a.txt"}, tools=tools)


@check(CODEX, "later turn: reasoning, call, output")
def codex_later_turn() -> None:
    codex(DEVELOPER_ITEM, USER_ITEM, *LATER_ITEMS)


@check(CODEX, "later turn: custom, shell and search calls")
def codex_other_items() -> None:
    faults = []
    for items in (OTHER_ITEMS[:2], OTHER_ITEMS[2:4], OTHER_ITEMS[4:]):
        try:
            codex(USER_ITEM, *items, USER_ITEM, tools=[SHELL_TOOL, PATCH_TOOL, {"type": "local_shell"}])
        except Exception as fault:
            faults.append(f"{items[0]['type']}: {fault}")
    expect(not faults, faults)


@check(CODEX, "a developer message after the first turn")
def codex_late_developer() -> None:
    codex(USER_ITEM, *LATER_ITEMS, DEVELOPER_ITEM, USER_ITEM)


@check(CODEX, "output schema (codex exec --output-schema)")
def codex_output_schema() -> None:
    text = {
        "verbosity": "low",
        "format": {"type": "json_schema", "name": "codex_output_schema", "strict": True, "schema": TOOL_SCHEMA},
    }
    item = codex(USER_ITEM, text=text, max_output_tokens=100)[-1]["response"]["output"][-1]
    expect(item["type"] == "function_call" or json.loads(item["content"][0]["text"])["city"], item)


BETAS = (
    "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,prompt-caching-scope-2026-01-05"
)
CACHED = {"cache_control": {"type": "ephemeral"}}
READ_TOOL = {
    "name": "Read",
    "description": "Reads a file.",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"file_path": {"type": "string"}, "limit": {"type": "integer", "exclusiveMinimum": 0}},
        "required": ["file_path"],
        "additionalProperties": False,
    },
    "eager_input_streaming": True,
}
REMINDER = {"type": "text", "text": "<system-reminder>\nThe date is 2026-11-28.\n</system-reminder>"}
ASKED = {"role": "user", "content": [REMINDER, {"type": "text", "text": "Say hi.", **CACHED}]}
TOOL_TURNS: list[dict[str, Any]] = [
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "A file.", "signature": ""},
            {"type": "text", "text": "I read it."},
            {
                "type": "tool_use",
                "id": "toolu_1",
                "name": "Read",
                "input": {"file_path": "a"},
                "caller": {"type": "direct"},
            },
            {"type": "tool_use", "id": "toolu_2", "name": "Read", "input": {"file_path": "b"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "1 hello"}]},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such file", "is_error": True, **CACHED},
            REMINDER,
        ],
    },
]


def claude(*messages: dict[str, Any], stream: bool = True, **more: Any) -> list[dict[str, Any]]:
    """Returns the events of Claude Code's request with these messages, or the answer alone; they end in order."""
    body = {
        "model": MODEL,
        "max_tokens": 24,
        "messages": list(messages),
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.198; cc_entrypoint=cli;"},
            {"type": "text", "text": "You are Claude Code, Anthropic's official CLI for Claude.", **CACHED},
            {"type": "text", "text": "You help with code.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ],
        "tools": [READ_TOOL, {**READ_TOOL, "name": "Write", **CACHED}],
        "metadata": {"user_id": "user_0_account__session_0"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": stream,
        **more,
    }
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": BETAS,
        "x-app": "cli",
        "User-Agent": "claude-cli/2.1.198 (external, cli)",
    }
    text = post("/v1/messages?beta=true", body, headers)
    if not stream:
        return [json.loads(text)]
    found = [event for event in events(text) if event["type"] != "ping"]
    expect([found[0]["type"], found[-1]["type"]] == ["message_start", "message_stop"], found)
    open_index = -1
    for event in found[1:-2]:
        if event["type"] == "content_block_start":
            open_index += 1
        expect(event["index"] == open_index, event)
    expect(found[-2]["delta"]["stop_reason"] in ("end_turn", "max_tokens", "tool_use"), found[-2])
    expect(isinstance(found[-2]["usage"]["output_tokens"], int), found[-2])
    return found


@check(CLAUDE, "first turn: system blocks, cache_control, betas")
def claude_first_turn() -> None:
    claude(ASKED)


@check(CLAUDE, "later turn: thinking, tool results, is_error")
def claude_later_turn() -> None:
    claude(ASKED, *TOOL_TURNS)


@check(CLAUDE, "thinking with a budget, without a stream")
def claude_thinking() -> None:
    (answer,) = claude(ASKED, stream=False, thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"})
    expect(answer["type"] == "message", answer)
    expect(all(value is not None for block in answer["content"] for value in block.values()), answer)


@check(CLAUDE, "a system message after the first turn")
def claude_late_system() -> None:
    claude(ASKED, *TOOL_TURNS, {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go on."})


@check(CLAUDE, "title as JSON by output_config.format")
def claude_title() -> None:
    config = {"format": {"type": "json_schema", "schema": TOOL_SCHEMA}}
    (answer,) = claude(ASKED, stream=False, tools=[], output_config=config, max_tokens=100)
    expect(json.loads(answer["content"][-1]["text"])["city"], answer)


@check(CLAUDE, "tools of the server (web_search), tool_reference")
def claude_server_tools() -> None:
    tools = [READ_TOOL, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]
    claude(ASKED, tools=tools)


@check(CLAUDE, "count_tokens")
def claude_count() -> None:
    body = {"model": MODEL, "messages": [ASKED, *TOOL_TURNS], "tools": [READ_TOOL], "thinking": {"type": "adaptive"}}
    answer = json.loads(post("/v1/messages/count_tokens?beta=true", body))
    expect(answer["input_tokens"] > 10, answer)


@check(CLAUDE, "the name of one of Anthropic's models")
def claude_model_name() -> None:
    claude(ASKED, model="claude-sonnet-4-5-20250929")


if __name__ == "__main__":
    main()
