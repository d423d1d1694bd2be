"""Anthropic's protocol: messages, and counting their tokens.

A last message of the assistant is continued. Without `thinking` the chat template decides whether the model thinks.
Thinking blocks have an empty signature; those of a request need none. Source: Anthropic's API reference.
"""

import json
from collections.abc import AsyncGenerator
from contextlib import closing
from dataclasses import replace
from typing import Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from sse_starlette import ServerSentEvent

from moe_pack.runtime.serve.protocols import answers, constraints, fields, formed, openai_api
from moe_pack.runtime.serve.requests import RequestError
from moe_pack.runtime.serve.service import Generation, GrammarSource, Service

router = APIRouter()


class InputBlock(fields.Body):
    """A block of a message's content: text, thinking, a tool call, or a tool's result."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: fields.JsonObject | None = None
    tool_use_id: str | None = None
    is_error: bool | None = None
    content: "str | fields.Many[InputBlock] | None" = None


class InputMessage(fields.Body):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | fields.Many[InputBlock]


class InputTool(fields.Body):
    """A tool that the model may call; `type` is custom, or absent."""

    type: str | None = None
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: fields.JsonObject | None = None
    strict: bool | None = None


class InputChoice(fields.Body):
    """Whether the model may call tools, or has to."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(fields.Body):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0)


class OutputFormat(fields.Body):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: fields.JsonObject = Field(alias="schema")


class OutputConfig(fields.Body):
    """How the answer is made: its form, and how much effort the model takes."""

    format: OutputFormat | None = None
    effort: str | None = None


class CountRequest(fields.RequestBody):
    """A conversation whose tokens are to be counted."""

    model: str | None = None
    messages: fields.Many[InputMessage] = Field(min_length=1)
    system: str | fields.Many[InputBlock] | None = None
    tools: fields.Many[InputTool] | None = None
    tool_choice: InputChoice | None = None
    thinking: Thinking | None = None
    thread: fields.JsonObject | None = Field(None, description="refused: nothing is stored")


class MessagesRequest(constraints.AnswerFields, CountRequest):
    """A request for an answer in a conversation."""

    max_tokens: int = Field(ge=1, lt=2**31)
    stop_sequences: fields.Many[str] | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="an older name of output_config.format")
    stream: bool | None = None


class AnthropicErrorFields(BaseModel):
    """The message and the kind of an error; `details` has a code that clients know."""

    type: str
    message: str
    details: dict[str, str] | None = None


class AnthropicError(BaseModel):
    """An error in Anthropic's shape."""

    type: Literal["error"]
    error: AnthropicErrorFields


class MessageAnswer(BaseModel):
    """An answer with what it took."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: dict[str, int]


class TokenCountAnswer(BaseModel):
    """How many tokens a conversation has."""

    input_tokens: int


ANTHROPIC_ERRORS: dict[int | str, dict[str, Any]] = {"default": {"model": AnthropicError, "description": "An error"}}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"model": MessageAnswer, "content": answers.EVENT_STREAM},
    **ANTHROPIC_ERRORS,
}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(problem: answers.Problem) -> dict[str, Any]:
    """Returns a problem in Anthropic's shape."""
    usual = "invalid_request_error" if problem.status < 500 else "api_error"
    error: dict[str, Any] = {"type": _ERROR_TYPES.get(problem.status, usual), "message": problem.message}
    if problem.param == "thread":
        error["details"] = {"error_code": "thread_unsupported_request"}  # clients then send whole conversations
    return {"type": "error", "error": error}


def _event(name: str, **values: object) -> ServerSentEvent:
    return answers.event_of({"type": name, **values}, name)


@router.post("/v1/messages", response_model=MessageAnswer, responses=STREAMED)
async def create_message(http: HttpRequest, body: MessagesRequest) -> Response:
    """Answers a conversation."""
    return await answers.respond(http, _answered(answers.service_of(http), body))


async def _answered(service: Service, body: MessagesRequest) -> Response:
    prepared = await answers.prepare_chat(service, _question(service, body))
    if body.stream:
        events = _streamed(service, prepared)
        return await answers.stream(
            events, lambda problem: answers.event_of(anthropic_error(problem), "error"), lambda: _event("ping")
        )
    (answer,) = await answers.whole_answers(service, prepared)
    content = [_whole_block(block) for block in answer.blocks]
    ended = {**_stop(answer), "usage": _usage(answer)}
    return JSONResponse({**_head(service), "content": content, **ended, **prepared.warned})


@router.post("/v1/messages/count_tokens", response_model=TokenCountAnswer, responses=ANTHROPIC_ERRORS)
async def count_tokens(http: HttpRequest, body: CountRequest) -> Response:
    """Counts the tokens of a conversation as the model reads it."""
    return await answers.respond(http, _counted(answers.service_of(http), body))


async def _counted(service: Service, body: CountRequest) -> Response:
    _check_request(service, body)
    is_without = body.tool_choice is not None and body.tool_choice.type == "none"
    tools = [] if is_without else [tool.definition for tool in _offered_tools(body)[0]]
    prompt = await service.chat_prompt(
        _messages(body), tools, _template_kwargs(body), body.messages[-1].role == "assistant"
    )
    return JSONResponse({"input_tokens": len(prompt.ids)})


def _question(service: Service, body: MessagesRequest) -> answers.ChatQuestion:
    """Returns the question of a request. Raises: RequestError if this server cannot do it; ModelNotFoundError."""
    _check_request(service, body)
    warnings = constraints.warnings_of(body)
    if body.thinking is not None and body.thinking.budget_tokens is not None:
        budget = ["thinking.budget_tokens changes nothing here; max_tokens bounds thoughts and answer together"]
    else:
        budget = []
    choice = body.tool_choice or InputChoice(type="auto")
    found = _tool_choice(choice)
    tools, unknown = _offered_tools(body)
    strict = constraints.strict_warning([tool.strict for tool in body.tools or ()], found.kind == "required")
    kwargs = _template_kwargs(body)
    if body.output_config is not None and body.output_config.effort is not None:
        kwargs = {**openai_api.effort_kwargs(body.output_config.effort), **kwargs}
    return answers.ChatQuestion(
        messages=_messages(body),
        sampling=body.over(service.default_sampling, service.vocab_size),
        limits=constraints.limits(
            service, body, body.max_tokens, fields.stop_texts(body.stop_sequences or (), "stop_sequences")
        ),
        tools=tools,
        choice=found,
        several_calls=choice.disable_parallel_tool_use is not True,
        template_kwargs=kwargs,
        continues=body.messages[-1].role == "assistant",
        grammar=constraints.grammar_source(body, _output_form(body)),
        warnings=(*warnings, *unknown, *budget, *strict),
    )


def _output_form(body: MessagesRequest) -> GrammarSource | None:
    """Returns the form in Anthropic's own fields. Raises: RequestError if two of them have one."""
    configured = None if body.output_config is None else body.output_config.format
    if configured is not None and body.output_format is not None:
        raise RequestError("output_config.format and output_format exclude each other; remove one", "output_format")
    if configured is not None:
        return GrammarSource("json_schema", configured.schema_, "output_config.format.schema")
    if body.output_format is not None:
        return GrammarSource("json_schema", body.output_format.schema_, "output_format.schema")
    return None


def _check_request(service: Service, body: CountRequest) -> None:
    """Refuses another model, and a conversation that the server would have to keep."""
    service.check_model(body.model)
    if body.thread is not None:
        raise RequestError(
            "thread: this server stores no conversations; send the whole conversation without thread", "thread"
        )


def _template_kwargs(body: CountRequest) -> dict[str, Any]:
    if body.thinking is None or body.thinking.type == "adaptive":
        return {}
    return {"enable_thinking": body.thinking.type == "enabled"}


def _tool_choice(choice: InputChoice) -> answers.ToolChoice:
    if choice.type == "tool":
        if choice.name is None:
            raise RequestError("tool_choice has type tool and no name; add it", "tool_choice")
        return answers.ToolChoice("required", choice.name)
    if choice.type == "any":
        return answers.ToolChoice("required")
    return answers.ToolChoice("none" if choice.type == "none" else "auto")


def _offered_tools(body: CountRequest) -> tuple[list[answers.OfferedTool], list[str]]:
    """Returns the tools that the client runs, and warnings about those that Anthropic's servers run."""
    offered: list[answers.OfferedTool] = []
    unknown: list[str] = []
    for i, tool in enumerate(body.tools or []):
        if tool.type not in (None, "custom"):
            unknown.append(openai_api.unknown_tool(f"tools[{i}]", tool.type))
        elif tool.input_schema is None:
            raise RequestError(f"tools[{i}]: has no input_schema; add it")
        else:
            param = f"tools[{i}].input_schema"
            offered.append(answers.OfferedTool.of(tool.name, tool.description, tool.input_schema, param))
    return openai_api.some_tools(offered, unknown)


def _messages(body: CountRequest) -> list[dict[str, Any]]:
    """Returns the conversation as templates read it.

    Raises:  RequestError if it has blocks that this server cannot read.
    """
    made: list[dict[str, Any]] = []
    if body.system:
        made.append({"role": "system", "content": _text(body.system, "system")})
    names: dict[str, str] = {}  # of tools, by the calls that later results answer
    for i, message in enumerate(body.messages):
        place = f"messages[{i}].content"
        if message.role == "assistant":
            made.append(_assistant_message(message.content, place, names))
        elif message.role == "system":
            made.append({"role": "system", "content": _text(message.content, place)})
        else:
            made += _user_messages(message.content, place, names)
    return made


def _assistant_message(content: str | list[InputBlock], place: str, names: dict[str, str]) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(content):
        if block.type == "tool_use":
            if block.name is None:
                raise RequestError(f"{place}[{i}]: has type tool_use and no name; add it")
            if block.id is not None:
                names[block.id] = block.name
            calls.append(openai_api.template_call(block.id, block.name, block.input or {}))
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type != "redacted_thinking":
            texts.append(_block_text(block, f"{place}[{i}]"))
    made: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        made["reasoning_content"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return made


def _user_messages(content: str | list[InputBlock], place: str, names: dict[str, str]) -> list[dict[str, Any]]:
    """Returns a message of the user: results of tools first, each a message of its own, then the text."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results: list[dict[str, Any]] = []
    texts = []
    for i, block in enumerate(content):
        if block.type != "tool_result":
            texts.append(_block_text(block, f"{place}[{i}]"))
            continue
        result = {"role": "tool", "content": _result_text(block, f"{place}[{i}].content")}
        if block.tool_use_id is not None:
            result["tool_call_id"] = block.tool_use_id
            if block.tool_use_id in names:
                result["name"] = names[block.tool_use_id]
        results.append(result)
    return [*results, {"role": "user", "content": "\n".join(texts)}] if texts or not results else results


def _result_text(block: InputBlock, place: str) -> str:
    """Returns the text of a tool's result; an error's begins with a word, since templates have no field for it."""
    text = _text(block.content or "", place)
    return f"Error: {text}" if block.is_error and "error" not in text[:100].lower() else text


def _text(content: str | list[InputBlock], place: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_block_text(block, f"{place}[{i}]") for i, block in enumerate(content))


def _block_text(block: InputBlock, place: str) -> str:
    if block.type != "text":
        raise RequestError(f"{place}: type {block.type[:40]!r} is not supported here; this server reads text alone")
    if block.text is None:
        raise RequestError(f"{place}: has type text and no text; add it")
    return block.text


def _head(service: Service) -> dict[str, Any]:
    return {"id": formed.new_id("msg_"), "type": "message", "role": "assistant", "model": service.model_id}


def _whole_block(block: answers.Block) -> dict[str, Any]:
    if block.kind == "content":
        return {"type": "text", "text": block.text}  # without citations: null, which @ai-sdk/anthropic refuses
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(block.text)}


def _input(arguments: str) -> dict[str, Any]:
    """Returns a call's arguments; none if it was cut off."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _stop(answer: answers.Answer) -> dict[str, Any]:
    """Returns the reason of an answer's end in Anthropic's words."""
    end = answer.ended
    if end.reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if answer.calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    return {"stop_reason": "end_turn" if end.stop is None else "stop_sequence", "stop_sequence": end.stop}


def _usage(answer: answers.Answer) -> dict[str, int]:
    """Returns the tokens of an answer; `input_tokens` are those that no cache had."""
    found = answers.Usage.of([answer])
    return {
        "input_tokens": found.prompt - found.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": found.cached,
        "output_tokens": found.completion,
    }


async def _streamed(service: Service, prepared: answers.Prepared) -> AsyncGenerator[ServerSentEvent, None]:
    answer = answers.Answer()
    with closing(Generation(service.scheduler, prepared.requests)) as run:
        usage = {
            "input_tokens": len(prepared.requests[0].prompt_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message={**_head(service), **begun, **prepared.warned})
        yield _event("ping")
        async for step in answers.steps(run, prepared):
            for change in answer.take(step):
                yield _block_event(change)
    yield _event("message_delta", delta=_stop(answer), usage=_usage(answer))
    yield _event("message_stop")


def _block_event(change: answers.BlockEvent) -> ServerSentEvent:
    index, kind = change.block.index, change.block.kind
    if change.change == "close":
        return _event("content_block_stop", index=index)
    if change.change == "open":
        empty = replace(change.block, pieces=[])
        return _event("content_block_start", index=index, content_block=_whole_block(empty))
    if kind == "call":
        delta = {"type": "input_json_delta", "partial_json": change.text}
    elif kind == "reasoning":
        delta = {"type": "thinking_delta", "thinking": change.text}
    else:
        delta = {"type": "text_delta", "text": change.text}
    return _event("content_block_delta", index=index, delta=delta)
