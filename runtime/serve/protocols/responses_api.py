"""OpenAI's protocol of responses: from input items to output items.

Nothing is stored: a client sends the whole conversation each time. Items of type reasoning have the model's own text.
Source: OpenAI's API reference.
"""

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import closing
from typing import Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from sse_starlette import ServerSentEvent

from moe_pack.runtime.serve.protocols import answers, constraints, fields, formed, openai_api, response_items
from moe_pack.runtime.serve.requests import RequestError
from moe_pack.runtime.serve.service import Generation, GrammarSource, Service

router = APIRouter()


class TextFormat(fields.Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = "answer"
    schema_: fields.JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(fields.Body):
    """Options of the answer's text."""

    format: TextFormat | None = None


class ReasoningOptions(fields.Body):
    """Options of reasoning."""

    effort: str | None = None


class ResponsesRequest(constraints.AnswerFields):
    """A request for a response."""

    model: str | None = None
    input: str | fields.Many[response_items.InputItem]
    instructions: str | None = None
    tools: fields.Many[response_items.ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | response_items.ResponseChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_tokens: fields.TokenCount | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    stream: bool | None = None
    chat_template_kwargs: fields.JsonObject | None = None


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
    200: {"model": ResponseAnswer, "content": answers.EVENT_STREAM},
    **openai_api.OPENAI_ERRORS,
}


@router.post("/v1/responses", response_model=ResponseAnswer, responses=STREAMED)
async def create_response(http: HttpRequest, body: ResponsesRequest) -> Response:
    """Answers input items."""
    return await answers.respond(http, _answered(answers.service_of(http), body))


async def _answered(service: Service, body: ResponsesRequest) -> Response:
    tools = response_items.known_tools(body.tools or (), [] if isinstance(body.input, str) else body.input)
    prepared = await answers.prepare_chat(service, _question(service, body, tools))
    writer = _Writer(service, body, tools)
    if body.stream:
        return await answers.stream(writer.streamed(prepared), writer.broken)
    return await writer.written(prepared)


def _question(service: Service, body: ResponsesRequest, tools: response_items.Tools) -> answers.ChatQuestion:
    """Returns the question of a request. Raises: RequestError if this server cannot do it; ModelNotFoundError."""
    service.check_model(body.model)
    warnings = constraints.warnings_of(body)
    if body.previous_response_id is not None:
        raise RequestError(
            "previous_response_id: this server stores no responses; send the whole conversation as input",
            "previous_response_id",
        )
    if body.background:
        raise RequestError("background: this server stores no responses; remove it", "background")
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning is not None and body.reasoning.effort is not None:
        kwargs = {**openai_api.effort_kwargs(body.reasoning.effort), **kwargs}
    messages, left_out = response_items.conversation(body.instructions, body.input)
    choice, offered = response_items.chosen(body.tool_choice, tools)
    return answers.ChatQuestion(
        messages=messages,
        sampling=body.over(service.default_sampling, service.vocab_size),
        limits=constraints.limits(service, body, body.max_tokens),
        tools=offered,
        choice=choice,
        several_calls=body.parallel_tool_calls is not False,
        template_kwargs=kwargs,
        grammar=constraints.grammar_source(body, _text_format(body)),
        warnings=(
            *warnings,
            *tools.warnings,
            *left_out,
            *constraints.strict_warning(tools.stricts, choice.kind == "required"),
        ),
    )


def _text_format(body: ResponsesRequest) -> GrammarSource | None:
    wanted = None if body.text is None else body.text.format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return GrammarSource("json_schema", constraints.ANY_OBJECT, "text.format")
    if wanted.schema_ is None:
        raise RequestError("text.format has type json_schema and no schema; add it", "text.format.schema")
    return GrammarSource("json_schema", wanted.schema_, "text.format.schema")


_ITEM_PREFIXES: dict[answers.BlockKind, str] = {"content": "msg_", "reasoning": "rs_", "call": "fc_"}


class _Writer:
    """Writes one response, whole or as events with numbers."""

    def __init__(self, service: Service, body: ResponsesRequest, tools: response_items.Tools) -> None:
        self._service, self._tools = service, tools
        sampling = body.over(service.default_sampling, service.vocab_size)
        choice = body.tool_choice or "auto"
        wanted = body.text.format if body.text is not None else None
        self._frame: dict[str, Any] = {
            "id": formed.new_id("resp_"),
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
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
            "tools": tools.written,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        self._number = 0

    async def written(self, prepared: answers.Prepared) -> Response:
        (answer,) = await answers.whole_answers(self._service, prepared)
        for block in answer.blocks:
            block.item_id = self._new_item_id(block)
        return JSONResponse({**self._ended(answer), **prepared.warned})

    async def streamed(self, prepared: answers.Prepared) -> AsyncGenerator[ServerSentEvent, None]:
        answer = answers.Answer()
        begun = {**self._frame, "status": "in_progress", "output": []}
        with closing(Generation(self._service.scheduler, prepared.requests)) as run:
            yield self._event("response.created", response=begun)
            yield self._event("response.in_progress", response=begun)
            try:
                async for step in answers.steps(run, prepared):
                    for change in answer.take(step):
                        for event in self._block_events(change):
                            yield event
            except answers.AnswerError as fault:
                error = {"code": "server_error", "message": str(fault)}
                output = [self._item(block, "incomplete") for block in answer.blocks]
                failed = {**self._frame, "status": "failed", "error": error, "output": output}
                yield self._event("response.failed", response=failed)
                return
        ended = {**self._ended(answer), **prepared.warned}
        yield self._event(f"response.{ended['status']}", response=ended)

    def broken(self, problem: answers.Problem) -> ServerSentEvent:
        error = openai_api.openai_error(problem)["error"]
        return self._event("error", code=error["code"], message=error["message"], param=error["param"])

    def _ended(self, answer: answers.Answer) -> dict[str, Any]:
        found = answers.Usage.of([answer])
        is_whole = answer.ended.reason != "length"
        status = "completed" if is_whole else "incomplete"
        items = [self._item(block, "completed") for block in answer.blocks]
        if items and not is_whole:
            items[-1] = self._item(answer.blocks[-1], "incomplete")
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
        event = answers.event_of({"type": name, "sequence_number": self._number, **values}, name)
        self._number += 1
        return event

    def _block_events(self, change: answers.BlockEvent) -> Iterator[ServerSentEvent]:
        block = change.block
        if change.change == "open":
            block.item_id = self._new_item_id(block)
            item = self._item(block, "in_progress", is_empty=True)
            yield self._event("response.output_item.added", output_index=block.index, item=item)
            if block.kind != "call":
                yield self._part_event("response.content_part.added", block, part=_part(block.kind, ""))
        elif change.change == "add":
            if not self._tools.is_custom(block):  # its text is known at the end of its arguments
                yield self._text_event("delta", block, delta=change.text)
        else:
            if self._tools.is_custom(block):
                text = response_items.custom_input(block.text)
                place = {"item_id": block.item_id, "output_index": block.index}
                yield self._event("response.custom_tool_call_input.delta", **place, delta=text)
                yield self._event("response.custom_tool_call_input.done", **place, input=text)
            elif block.kind == "call":
                yield self._text_event("done", block, arguments=block.text, name=block.name)
            else:
                yield self._text_event("done", block, text=block.text)
                yield self._part_event("response.content_part.done", block, part=_part(block.kind, block.text))
            item = self._item(block, "completed")
            yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _part_event(self, name: str, block: answers.Block, /, **values: object) -> ServerSentEvent:
        return self._event(name, item_id=block.item_id, output_index=block.index, content_index=0, **values)

    def _text_event(self, what: Literal["delta", "done"], block: answers.Block, /, **values: object) -> ServerSentEvent:
        if block.kind == "call":
            name = f"response.function_call_arguments.{what}"
            return self._event(name, item_id=block.item_id, output_index=block.index, **values)
        if block.kind == "reasoning":
            return self._part_event(f"response.reasoning_text.{what}", block, **values)
        return self._part_event(f"response.output_text.{what}", block, logprobs=[], **values)

    def _new_item_id(self, block: answers.Block) -> str:
        return formed.new_id("ctc_" if self._tools.is_custom(block) else _ITEM_PREFIXES[block.kind])

    def _item(self, block: answers.Block, status: str, is_empty: bool = False) -> dict[str, Any]:
        """Returns a block as an output item; `is_empty`: without its text, as it begins."""
        text = "" if is_empty else block.text
        if block.kind == "call":
            return self._tools.item(block, status, text)
        made: dict[str, Any] = {"id": block.item_id, "status": status}
        content = [] if is_empty else [_part(block.kind, text)]
        if block.kind == "reasoning":
            return {**made, "type": "reasoning", "summary": [], "content": content}
        return {**made, "type": "message", "role": "assistant", "content": content}


def _written_format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    return {"type": "json_schema", "name": wanted.name, "schema": wanted.schema_, "strict": True}


def _part(kind: answers.BlockKind, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
