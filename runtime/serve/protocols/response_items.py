"""The tools and input items of OpenAI's protocol of responses, in the form that templates read, and back.

A custom tool takes a text; the model knows it as a function of that argument. The tools of a namespace are functions
with the namespace before their names. Tools that the service runs itself are left out, with a warning, and so are the
items that report their work. Sources: OpenAI's API reference, and the public requests of Codex for namespaces.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from moe_pack.runtime.serve.protocols import answers, fields, openai_api
from moe_pack.runtime.serve.requests import RequestError

MAX_NAME = 256
INPUT = "input"  # the argument of a custom tool
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
# Calls of tools that have no name of their own: the tool's name, and the field that says what it did.
_ACTIONS = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
}
_CALLS = ("function_call", "custom_tool_call", *_ACTIONS)
_RESULTS = tuple(f"{name}_output" for name in _CALLS)
# Items that say what a service, or the client's own machinery, did.
_REPORTS = frozenset(
    """
    web_search_call file_search_call code_interpreter_call image_generation_call computer_call computer_call_output
    mcp_call mcp_list_tools mcp_approval_request mcp_approval_response tool_search_call tool_search_output
    compaction compaction_summary context_compaction compaction_trigger ghost_snapshot program program_output
    """.split()  # noqa: SIM905  # a table of words
)


class CustomFormat(fields.Body):
    """The form of a custom tool's text."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class ResponseTool(fields.Body):
    """A tool: a function, a custom tool, or a namespace of both; others are left out."""

    type: str
    name: str | None = Field(None, min_length=1, max_length=MAX_NAME)
    description: str | None = None
    parameters: fields.JsonObject | None = None
    strict: bool | None = None
    format: CustomFormat | None = None
    tools: "fields.Many[ResponseTool] | None" = None


class ResponseChoice(fields.Body):
    """A tool that the answer has to call, or those among which it chooses (`allowed_tools`)."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: fields.Many[fields.JsonObject] | None = None


class InputPart(fields.Body):
    """A part of an item's content; text alone is taken."""

    type: str
    text: str | None = None


class InputItem(fields.Body):
    """An item of the conversation: a message, a tool call, its result, reasoning, or more tools."""

    type: str = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | fields.Many[InputPart] | None = None
    summary: fields.Many[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    action: fields.JsonObject | None = None
    operation: fields.JsonObject | None = None
    output: str | fields.JsonObject | fields.Many[fields.JsonObject] | None = None
    tools: fields.Many[ResponseTool] | None = None


# ---- tools ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolName:
    """A tool as a client knows it."""

    kind: str  # function or custom
    name: str
    namespace: str | None = None

    @property
    def offered(self) -> str:
        """The tool's name for the model."""
        if self.namespace is None:
            return self.name
        return f"{self.namespace}{'' if self.namespace.endswith('_') else '__'}{self.name}"


@dataclass(slots=True)
class Tools:
    """The tools of a request. Names are those for the model, except where it says otherwise."""

    offered: list[answers.OfferedTool] = field(default_factory=list)  # to the model
    names: dict[str, ToolName] = field(default_factory=dict)
    meant: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # names by a client's types and names
    left_out: set[str] = field(default_factory=set)  # a client's types and names of tools that are not offered
    warnings: list[str] = field(default_factory=list)
    stricts: list[bool | None] = field(default_factory=list)  # `strict` of each offered tool
    written: list[dict[str, Any]] = field(default_factory=list)  # the offered tools in the request's form

    def item(self, block: answers.Block, status: str, text: str) -> dict[str, Any]:
        """Returns a call as an output item with the `text` of its arguments so far."""
        tool = self.names.get(block.name, ToolName("function", block.name))
        head = {"id": block.item_id, "status": status, "call_id": block.call_id, "name": tool.name}
        if tool.namespace is not None:
            head["namespace"] = tool.namespace
        if tool.kind == "custom":
            return {"type": "custom_tool_call", **head, "input": custom_input(text)}
        return {"type": "function_call", **head, "arguments": text}

    def is_custom(self, block: answers.Block) -> bool:
        """Whether a block is a call of a custom tool."""
        return block.kind == "call" and block.name in self.names and self.names[block.name].kind == "custom"


def custom_input(arguments: str) -> str:
    """Returns the text of a custom tool's call: its argument, or all arguments if they are no object with a text."""
    try:
        found = json.loads(arguments) if arguments else {INPUT: ""}
    except (ValueError, RecursionError):
        return arguments
    if isinstance(found, dict) and isinstance(found.get(INPUT), str):
        return str(found[INPUT])
    if isinstance(found, str):
        return found
    return "" if found == {} else arguments


def known_tools(tools: Iterable[ResponseTool], items: Iterable[InputItem] = ()) -> Tools:
    """Returns the tools of a request, those of its items too.

    Raises:  RequestError if one has no name, or the model could know none of them.
    """
    made = Tools()
    _add_tools(made, tools, "tools", None)
    for i, item in enumerate(items):
        if item.type == "additional_tools":
            _add_tools(made, item.tools or (), f"input[{i}].tools", None)
    openai_api.some_tools(made.offered, made.warnings)
    return made


def _add_tools(made: Tools, tools: Iterable[ResponseTool], where: str, namespace: str | None) -> None:
    for i, tool in enumerate(tools):
        place = f"{where}[{i}]"
        is_nested = tool.type == "namespace" and namespace is None
        if tool.type not in ("function", "custom") and not is_nested:
            made.warnings.append(openai_api.unknown_tool(place, tool.type))
            made.left_out |= {tool.type, tool.name or tool.type}
            continue
        if tool.name is None:
            raise RequestError(f"{place}: has no name; add it", where)
        if namespace is None:
            usual = {"strict": False} if tool.type == "function" else {}
            made.written.append({**usual, **tool.model_dump(exclude_none=True)})
        if is_nested:
            _add_tools(made, tool.tools or (), f"{place}.tools", tool.name)
            continue
        name = ToolName(tool.type, tool.name, namespace)
        if len(name.offered) > MAX_NAME:
            raise RequestError(
                f"{place}: its name and its namespace's have over {MAX_NAME} characters; shorten one", where
            )
        made.names[name.offered] = name
        for meant in {(tool.type, name.offered), (tool.type, name.name), ("namespace", namespace or "")}:
            made.meant.setdefault(meant, []).append(name.offered)
        made.stricts.append(tool.strict)
        is_function = tool.type == "function"
        parameters = tool.parameters if is_function else _custom_parameters(tool.format)
        param = f"{place}.{'parameters' if is_function else 'format'}"
        made.offered.append(answers.OfferedTool.of(name.offered, tool.description, parameters, param))
        if is_function:
            continue
        if tool.format is not None and tool.format.type != "text":
            made.warnings.append(f"{place}.format: the model is told of this format, and may not keep to it")


def _custom_parameters(form: CustomFormat | None) -> dict[str, Any]:
    """Returns the schema of a custom tool's one argument, its text."""
    told = "The whole text that the tool takes."
    if form is not None and form.definition:
        told = f"{told} It follows this grammar ({form.syntax or form.type}):\n{form.definition}"
    return {
        "type": "object",
        "properties": {INPUT: {"type": "string", "description": told}},
        "required": [INPUT],
        "additionalProperties": False,
    }


def chosen(choice: str | ResponseChoice | None, tools: Tools) -> tuple[answers.ToolChoice, list[answers.OfferedTool]]:
    """Returns whether the answer calls a tool, and the tools that it may call.

    Raises:  RequestError if the choice names a tool that is not there, or that was left out.
    """
    if not isinstance(choice, ResponseChoice):
        kind: Any = choice or "auto"
        return answers.ToolChoice(kind), tools.offered
    param = "tool_choice"
    if choice.type == "allowed_tools":
        found = {name for each in choice.tools or () for name in _allowed(each, tools)}
        allowed = [tool for tool in tools.offered if tool.name in found]
        if not allowed:
            raise RequestError(f"{param}: allows none of the tools that the model knows; add one", param)
        return answers.ToolChoice(choice.mode or "auto"), allowed
    if choice.type not in ("function", "custom"):
        raise RequestError(
            f"{param}: a tool of type {choice.type[:40]!a} is not supported and was left out; choose a function", param
        )
    if choice.name is None:
        raise RequestError(f"{param}: has no name; add it", param)
    name = choice.name if choice.name in tools.names else tools.meant.get((choice.type, choice.name), [choice.name])[0]
    if name not in tools.names and name in tools.left_out:
        raise RequestError(f"{param}: {name[:80]!a} is a tool that was left out; choose a function", param)
    return answers.ToolChoice("required", name), tools.offered


def _allowed(tool: fields.JsonObject, tools: Tools) -> list[str]:
    """Returns the names of an entry of `allowed_tools`; none for a tool that was left out."""
    kind = str(tool.get("type"))
    name = str(tool.get("name") or kind)
    found = tools.meant.get((kind, name), [])
    if not found and name not in tools.left_out and kind not in tools.left_out:
        raise RequestError(f"tool_choice allows {ascii(name)[:80]}, which is not in tools; add it", "tool_choice")
    return found


# ---- items ----------------------------------------------------------------------------------------------------------


def conversation(instructions: str | None, items: str | list[InputItem]) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the conversation as templates read it, and warnings about items that are left out.

    Reasoning, content and calls of one answer are items of their own; templates read them as one message.
    Raises:  RequestError if an item has what this server cannot read, or there is none.
    """
    made: list[dict[str, Any]] = []
    if instructions:
        made.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*made, {"role": "user", "content": items}], []
    names: dict[str, str] = {}
    left_out: dict[str, int] = {}
    for i, item in enumerate(items):
        place = f"input[{i}]"
        if item.type in _REPORTS:
            left_out.setdefault(item.type, i)
        elif item.type == "message" and item.role != "assistant":
            made.append(_other_message(item, place))
        elif item.type in _RESULTS:
            made.append(_result_message(item, place, names))
        elif item.type in ("message", "reasoning", *_CALLS):
            _add_to_answer(made, item, place, names)
        elif item.type != "additional_tools":
            raise _unknown_item(item, place)
    if not items or (left_out and all(message["role"] == "system" for message in made)):
        raise RequestError("input: has no items that this server can read; add a message", "input")
    for message in made:
        if message["role"] == "assistant":
            message["content"] = "".join(message["content"])
            if "reasoning_content" in message:
                message["reasoning_content"] = "\n".join(message["reasoning_content"])
    return made, [
        f"input[{i}]: items of type {kind!r} are left out, since they report what a service did"
        for kind, i in left_out.items()
    ]


def _unknown_item(item: InputItem, place: str) -> RequestError:
    if item.type == "item_reference":
        advice = "this server stores no responses; send the item itself (store: false makes the client do so)"
        return RequestError(f"{place}: item_reference: {advice}", "input")
    return RequestError(f"{place}: type {item.type[:40]!a} is not supported; remove the item", "input")


def _other_message(item: InputItem, place: str) -> dict[str, Any]:
    if item.role is None or item.content is None:
        raise RequestError(f"{place}: a message needs role and content", "input")
    role = "system" if item.role == "developer" else item.role
    return {"role": role, "content": _text(item.content, f"{place}.content")}


def _result_message(item: InputItem, place: str, names: dict[str, str]) -> dict[str, Any]:
    call_id = item.call_id or item.id
    if call_id is None or item.output is None:
        raise RequestError(f"{place}: a {item.type} needs call_id and output", "input")
    made = {"role": "tool", "tool_call_id": call_id, "content": _output(item, place)}
    return {**made, "name": names[call_id]} if call_id in names else made


def _output(item: InputItem, place: str) -> str:
    """Returns the result of a call as text; a shell's, which has no parts, as JSON."""
    if isinstance(item.output, str):
        return item.output
    if isinstance(item.output, dict):
        return json.dumps(item.output, ensure_ascii=False)
    parts = item.output or []
    if item.type == "shell_call_output" or any(not isinstance(part.get("type"), str) for part in parts):
        return json.dumps(parts, ensure_ascii=False)
    texts = (part.get("text") for part in parts)
    read = [
        InputPart(type=part["type"], text=text if isinstance(text, str) else None)
        for part, text in zip(parts, texts, strict=True)
    ]
    return _text(read, f"{place}.output")


def _add_to_answer(made: list[dict[str, Any]], item: InputItem, place: str, names: dict[str, str]) -> None:
    """Adds an item to the assistant's message, or begins one; its texts are lists of pieces."""
    thought = _text(item.content or item.summary or "", f"{place}.content") if item.type == "reasoning" else ""
    if item.type == "reasoning" and not thought:
        return  # its text is encrypted, or was never sent
    if not made or made[-1]["role"] != "assistant":
        made.append({"role": "assistant", "content": []})
    answer = made[-1]
    if item.type == "message":
        answer["content"].append(_text(item.content or "", f"{place}.content"))
    elif thought:
        answer.setdefault("reasoning_content", []).append(thought)
    else:
        call_id, name, arguments = _call(item, place)
        names[call_id] = name
        answer.setdefault("tool_calls", []).append(openai_api.template_call(call_id, name, arguments))


def _call(item: InputItem, place: str) -> tuple[str, str, object]:
    action = _ACTIONS.get(item.type)
    name = item.name if action is None else action[0]
    call_id = item.call_id or (item.id if item.type == "local_shell_call" else None)
    if call_id is None or name is None:
        raise RequestError(f"{place}: a {item.type} needs call_id{' and name' if action is None else ''}", "input")
    if action is not None:
        found = getattr(item, action[1]) or {}
        return call_id, name, {key: value for key, value in found.items() if value is not None}
    offered = ToolName("", name, item.namespace).offered
    return call_id, offered, {INPUT: item.input or ""} if item.type == "custom_tool_call" else item.arguments or "{}"


def _text(content: str | list[InputPart], place: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if part.type not in _TEXT_PARTS or part.text is None:
            raise RequestError(
                f"{place}[{i}]: type {part.type[:40]!r} is not supported; this server reads text alone", "input"
            )
        texts.append(part.text)
    return "\n".join(texts)
