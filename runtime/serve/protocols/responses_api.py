"""OpenAI's protocol of responses: input items go in, output items come out.

Nothing is stored: a client sends the whole conversation each time. Reasoning comes as items of type reasoning, whose
text is the model's own. Source: OpenAI's API reference.
"""

import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from sse_starlette import ServerSentEvent

from moe_pack.runtime.serve.protocols.answers import (
    EVENT_STREAM,
    Answer,
    AnswerError,
    Block,
    BlockEvent,
    BlockKind,
    ChatQuestion,
    OfferedTool,
    Prepared,
    Problem,
    ToolChoice,
    Usage,
    event_of,
    prepare_chat,
    respond,
    service_of,
    steps,
    stream,
    whole_answers,
)
from moe_pack.runtime.serve.protocols.constraints import (
    AnswerFields,
    grammar_source,
    limits,
    strict_warning,
    warnings_of,
)
from moe_pack.runtime.serve.protocols.fields import Body, JsonObject, Many, TokenCount
from moe_pack.runtime.serve.protocols.formed import new_id
from moe_pack.runtime.serve.protocols.openai_api import (
    OPENAI_ERRORS,
    FunctionTool,
    effort_kwargs,
    function_tool,
    openai_error,
    some_tools,
    template_call,
    unknown_tool,
    warned,
)
from moe_pack.runtime.serve.requests import RequestError
from moe_pack.runtime.serve.service import GrammarSource, Service

router = APIRouter()

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class InputPart(Body):
    """A part of an item's content; text alone is taken."""

    type: str
    text: str | None = None


class InputItem(Body):
    """An item of the conversation: a message, a tool call, its result, or reasoning."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Many[InputPart] | None = None
    summary: Many[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Many[InputPart] | None = None


class ResponseTool(Body):
    """A tool; functions alone are taken."""

    type: str
    name: str | None = Field(None, min_length=1, max_length=256)
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ResponseChoice(Body):
    """A tool that the answer has to call."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = "answer"
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """Options of the answer's text."""

    format: TextFormat | None = None


class ReasoningOptions(Body):
    """Options of reasoning."""

    effort: str | None = None


class ResponsesRequest(AnswerFields):
    """A request for a response."""

    model: str | None = None
    input: str | Many[InputItem]
    instructions: str | None = None
    tools: Many[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_tokens: TokenCount | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    stream: bool | None = None
    chat_template_kwargs: JsonObject | None = None


class ResponseAnswer(BaseModel):
    """A response with what it took."""

    id: str
    object: Literal["response"]
    created_at: float
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"model": ResponseAnswer, "content": EVENT_STREAM},
    **OPENAI_ERRORS,
}


@router.post("/v1/responses", response_model=ResponseAnswer, responses=STREAMED)
async def create_response(http: HttpRequest, body: ResponsesRequest) -> Response:
    """Answers input items."""
    return await respond(http, _answered(service_of(http), body))


async def _answered(service: Service, body: ResponsesRequest) -> Response:
    prepared = await prepare_chat(service, _question(service, body))
    writer = _Writer(service, body)
    if body.stream:
        return await stream(writer.streamed(prepared), writer.broken)
    return await writer.written(prepared)


def _question(service: Service, body: ResponsesRequest) -> ChatQuestion:
    """Returns the question of a request.

    Raises:  RequestError if it asks for what this server cannot do; ModelNotFoundError.
    """
    service.check_model(body.model)
    warnings = warnings_of(body)
    if body.previous_response_id is not None:
        raise RequestError(
            "previous_response_id: this server stores no responses; send the whole conversation as input",
            "previous_response_id",
        )
    if body.background:
        raise RequestError("background: this server stores no responses; remove it", "background")
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning is not None and body.reasoning.effort is not None:
        kwargs = {**effort_kwargs(body.reasoning.effort), **kwargs}
    choice = body.tool_choice or "auto"
    found = ToolChoice("required", choice.name) if isinstance(choice, ResponseChoice) else ToolChoice(choice)
    tools, unknown = _offered_tools(body)
    stricts = [tool.strict for tool in body.tools or ()]
    return ChatQuestion(
        messages=_messages(body),
        sampling=body.over(service.default_sampling, service.vocab_size),
        limits=limits(service, body, body.max_tokens),
        tools=tools,
        choice=found,
        several_calls=body.parallel_tool_calls is not False,
        template_kwargs=kwargs,
        grammar=grammar_source(body, _text_format(body)),
        warnings=(*warnings, *unknown, *strict_warning(stricts, found.kind == "required")),
    )


def _offered_tools(body: ResponsesRequest) -> tuple[list[OfferedTool], list[str]]:
    """Returns the functions that the model may call, and what to say about tools of other types."""
    offered: list[OfferedTool] = []
    unknown: list[str] = []
    for i, tool in enumerate(body.tools or ()):
        if tool.type != "function":
            unknown.append(unknown_tool(f"tools[{i}]", tool.type))
        elif tool.name is None:
            raise RequestError(f"tools[{i}]: has no name; add it", "tools")
        else:
            function = FunctionTool(name=tool.name, description=tool.description, parameters=tool.parameters)
            offered.append(OfferedTool(function_tool(function), f"tools[{i}].parameters"))
    return some_tools(offered, unknown)


def _text_format(body: ResponsesRequest) -> GrammarSource | None:
    wanted = None if body.text is None else body.text.format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return GrammarSource("json_object", None, "text.format")
    if wanted.schema_ is None:
        raise RequestError("text.format has type json_schema and no schema; add it", "text.format.schema")
    return GrammarSource("json_schema", wanted.schema_, "text.format.schema")


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Returns the conversation as templates read it.

    Reasoning, content and calls of one answer are items of their own; to templates they are one message.
    Raises:  RequestError if an item has what this server cannot read, or there is none.
    """
    made: list[dict[str, Any]] = []
    if body.instructions:
        made.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*made, {"role": "user", "content": body.input}]
    if not body.input:
        raise RequestError("input: has no items; add a message", "input")
    names: dict[str, str] = {}
    for i, item in enumerate(body.input):
        place = f"input[{i}]"
        if item.type == "message" and item.role != "assistant":
            made.append(_other_message(item, place))
        elif item.type == "function_call_output":
            made.append(_result_message(item, place, names))
        else:
            _add_to_answer(made, item, place, names)
    return made


def _other_message(item: InputItem, place: str) -> dict[str, Any]:
    if item.role is None or item.content is None:
        raise RequestError(f"{place}: a message needs role and content", "input")
    role = "system" if item.role == "developer" else item.role
    return {"role": role, "content": _text(item.content, place)}


def _result_message(item: InputItem, place: str, names: dict[str, str]) -> dict[str, Any]:
    if item.call_id is None or item.output is None:
        raise RequestError(f"{place}: a function_call_output needs call_id and output", "input")
    made = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output, place)}
    return {**made, "name": names[item.call_id]} if item.call_id in names else made


def _add_to_answer(made: list[dict[str, Any]], item: InputItem, place: str, names: dict[str, str]) -> None:
    """Adds an item to the assistant's last message, or to a new one after another's."""
    if not made or made[-1]["role"] != "assistant":
        made.append({"role": "assistant", "content": ""})
    answer = made[-1]
    if item.type == "message":
        answer["content"] += _text(item.content or "", place)
    elif item.type == "reasoning":
        answer["reasoning_content"] = _text(item.content or item.summary or "", place)
    else:
        if item.call_id is None or item.name is None:
            raise RequestError(f"{place}: a function_call needs call_id and name", "input")
        names[item.call_id] = item.name
        calls = answer.setdefault("tool_calls", [])
        calls.append(template_call(item.call_id, item.name, item.arguments or "{}"))


def _text(content: str | list[InputPart], place: str) -> str:
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type not in _TEXT_PARTS or part.text is None:
            raise RequestError(
                f"{place}.content[{i}]: type {part.type[:40]!r} is not supported; this server reads text alone", "input"
            )
    return "\n".join(part.text or "" for part in content)


_ITEM_PREFIXES: dict[BlockKind, str] = {"content": "msg_", "reasoning": "rs_", "call": "fc_"}


class _Writer:
    """Writes one response, whole or as events with numbers."""

    def __init__(self, service: Service, body: ResponsesRequest) -> None:
        self._service = service
        sampling = body.over(service.default_sampling, service.vocab_size)
        choice = body.tool_choice or "auto"
        wanted = body.text.format if body.text is not None else None
        self._frame: dict[str, Any] = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "model": service.model_id,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"} if wanted is None else _written_format(wanted)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [{"strict": False, **tool.model_dump(exclude_none=True)} for tool in body.tools or []],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        self._number = 0

    async def written(self, prepared: Prepared) -> Response:
        """Returns the response with a whole answer."""
        (answer,) = await whole_answers(self._service, prepared)
        for block in answer.blocks:
            block.item_id = new_id(_ITEM_PREFIXES[block.kind])
        return JSONResponse({**self._ended(answer), **warned(prepared)})

    async def streamed(self, prepared: Prepared) -> AsyncGenerator[ServerSentEvent, None]:
        """Yields the events of a stream."""
        answer = Answer()
        begun = {**self._frame, "status": "in_progress", "output": []}
        with self._service.generate(prepared.requests) as run:
            yield self._event("response.created", response=begun)
            yield self._event("response.in_progress", response=begun)
            try:
                async for step in steps(run, prepared):
                    for change in answer.take(step):
                        for event in self._block_events(change):
                            yield event
            except AnswerError as fault:
                error = {"code": "server_error", "message": str(fault)}
                output = [_item(block, "incomplete") for block in answer.blocks]
                failed = {**self._frame, "status": "failed", "error": error, "output": output}
                yield self._event("response.failed", response=failed)
                return
        ended = {**self._ended(answer), **warned(prepared)}
        yield self._event(f"response.{ended['status']}", response=ended)

    def broken(self, problem: Problem) -> ServerSentEvent:
        """Returns the event that says that the server failed."""
        error = openai_error(problem)["error"]
        return self._event("error", code=error["code"], message=error["message"], param=error["param"])

    def _ended(self, answer: Answer) -> dict[str, Any]:
        """Returns the response after its end."""
        found = Usage.of([answer])
        is_whole = answer.ended.reason != "length"
        status = "completed" if is_whole else "incomplete"
        items = [_item(block, "completed") for block in answer.blocks]
        if items and not is_whole:
            items[-1] = _item(answer.blocks[-1], "incomplete")
        return {
            **self._frame,
            "status": status,
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "output": items,
            "usage": {
                "input_tokens": found.prompt,
                "input_tokens_details": {"cached_tokens": found.cached, "cache_write_tokens": 0},
                "output_tokens": found.completion,
                "output_tokens_details": {"reasoning_tokens": found.reasoning},
                "total_tokens": found.prompt + found.completion,
            },
        }

    def _event(self, name: str, /, **values: object) -> ServerSentEvent:
        event = event_of({"type": name, "sequence_number": self._number, **values}, name)
        self._number += 1
        return event

    def _block_events(self, change: BlockEvent) -> Iterator[ServerSentEvent]:
        """Yields the events for a change of a block: an item is opened, added to, or closed."""
        block = change.block
        if change.change == "open":
            block.item_id = new_id(_ITEM_PREFIXES[block.kind])
            item = _item(block, "in_progress", is_empty=True)
            yield self._event("response.output_item.added", output_index=block.index, item=item)
            if block.kind != "call":
                yield self._part_event("response.content_part.added", block, part=_part(block.kind, ""))
        elif change.change == "add":
            yield self._text_event("delta", block, delta=change.text)
        else:
            if block.kind == "call":
                yield self._text_event("done", block, arguments=block.text, name=block.name)
            else:
                yield self._text_event("done", block, text=block.text)
                yield self._part_event("response.content_part.done", block, part=_part(block.kind, block.text))
            item = _item(block, "completed")
            yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _part_event(self, name: str, block: Block, /, **values: object) -> ServerSentEvent:
        return self._event(name, item_id=block.item_id, output_index=block.index, content_index=0, **values)

    def _text_event(self, what: Literal["delta", "done"], block: Block, /, **values: object) -> ServerSentEvent:
        if block.kind == "call":
            name = f"response.function_call_arguments.{what}"
            return self._event(name, item_id=block.item_id, output_index=block.index, **values)
        if block.kind == "reasoning":
            return self._part_event(f"response.reasoning_text.{what}", block, **values)
        return self._part_event(f"response.output_text.{what}", block, logprobs=[], **values)


def _written_format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    return {"type": "json_schema", "name": wanted.name, "schema": wanted.schema_, "strict": True}


def _part(kind: BlockKind, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item(block: Block, status: str, is_empty: bool = False) -> dict[str, Any]:
    """Returns a block as an output item; `is_empty`: without its text, as it begins."""
    made: dict[str, Any] = {"id": block.item_id, "status": status}
    text = "" if is_empty else block.text
    if block.kind == "call":
        return {**made, "type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": text}
    content = [] if is_empty else [_part(block.kind, text)]
    if block.kind == "reasoning":
        return {**made, "type": "reasoning", "summary": [], "content": content}
    return {**made, "type": "message", "role": "assistant", "content": content}
