"""Answers to the questions of all protocols.

`prepare_chat` turns a question into requests. `steps` follows their events: each step adds something to one answer. An
`Answer` is a list of blocks: reasoning, content, tool calls. `respond` and `stream` give an answer to the client, and
end it when the client leaves.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, assert_never

from fastapi import Request as HttpRequest
from fastapi.responses import Response
from sse_starlette import EventSourceResponse, ServerSentEvent

from moe_pack.formats import RunError
from moe_pack.runtime import SamplingOptions
from moe_pack.runtime.sampling import Grammar, TokenLogprob
from moe_pack.runtime.serve import access_log, parsers
from moe_pack.runtime.serve.grammars import TokenRules, ruled
from moe_pack.runtime.serve.memory import NoMemoryError
from moe_pack.runtime.serve.protocols import constraints, formed
from moe_pack.runtime.serve.requests import EndEvent, PromptEvent, PromptLogprobs, QueueFullError, Request, RequestError
from moe_pack.runtime.serve.service import (
    CalledTool,
    Calls,
    ContextLengthError,
    Generation,
    GrammarSource,
    ModelNotFoundError,
    NotReadyError,
    Service,
)

PING_SECONDS = 15
RETRY_SECONDS = 1
LOADING_RETRY_SECONDS = 5  # clients try two or three times
LEFT = 499  # nginx's status for a client that left; nobody reads it

# One event of a stream, for the description of the API.
EVENT_STREAM: dict[str, Any] = {
    "text/event-stream": {
        "schema": {
            "type": "object",
            "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
            "required": ["data"],
        }
    }
}

BlockKind = Literal["reasoning", "content", "call"]


class AnswerError(RunError):
    """The engine could not finish an answer."""


class UnreadyError(AnswerError):
    """The engine could not begin an answer, because the memory that it gave back is not free now."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault of a request, which each protocol writes in its own shape."""

    status: int  # of HTTP
    message: str
    param: str | None = None
    code: str | None = None
    retry_s: int = RETRY_SECONDS

    @property
    def headers(self) -> dict[str, str]:
        """The headers of HTTP for this status."""
        if self.status in (429, 503):
            return {"Retry-After": str(self.retry_s)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


def problem_of(fault: Exception) -> Problem:
    """Returns the problem that a client is told of an exception; an unexpected one is logged instead."""
    if isinstance(fault, ModelNotFoundError):
        return Problem(404, str(fault), fault.param, "model_not_found")
    if isinstance(fault, ContextLengthError):
        return Problem(400, str(fault), fault.param, "context_length_exceeded")
    if isinstance(fault, RequestError):
        return Problem(400, str(fault), fault.param)
    if isinstance(fault, QueueFullError):
        return Problem(429, str(fault), code="queue_full")
    if isinstance(fault, NotReadyError | UnreadyError):
        return Problem(503, str(fault), code="not_ready", retry_s=LOADING_RETRY_SECONDS)
    if isinstance(fault, NoMemoryError):
        return Problem(409, str(fault), code="no_memory")
    if isinstance(fault, RunError):
        return Problem(500, str(fault))
    access_log.LOG.error("a request failed", exc_info=fault)
    return Problem(500, "the server failed; its log says why")


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may call tools, or has to."""

    kind: Literal["none", "auto", "required"] = "auto"
    name: str | None = None  # of the tool, if the request names one


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A function that the model may call."""

    definition: dict[str, Any]  # in OpenAI's form, which templates read
    schema_param: str  # the field of the request that has the schema of its arguments

    @classmethod
    def of(
        cls, name: str, description: str | None, parameters: dict[str, Any] | None, schema_param: str
    ) -> "OfferedTool":
        """Returns a function with a JSON schema of its parameters."""
        function: dict[str, Any] = {"name": name}
        if description is not None:
            function["description"] = description
        function["parameters"] = parameters or {"type": "object", "properties": {}}
        return cls({"type": "function", "function": function}, schema_param)

    @property
    def name(self) -> str:
        """The function's name."""
        return str(self.definition["function"]["name"])

    def called(self) -> CalledTool:
        """Returns the tool for a grammar of its calls."""
        schema = self.definition["function"].get("parameters") or {"type": "object"}
        return CalledTool(self.name, schema, self.schema_param)


@dataclass(frozen=True, slots=True)
class ChatQuestion:
    """A conversation and the form of its answer, from any protocol."""

    messages: list[dict[str, Any]]  # in OpenAI's form, which templates read
    sampling: SamplingOptions
    limits: constraints.AnswerLimits
    tools: list[OfferedTool]
    choice: ToolChoice
    several_calls: bool
    template_kwargs: dict[str, Any]
    continues: bool = False  # the answer continues the last message
    grammar: GrammarSource | None = None
    top_logprobs: int | None = None
    num_answers: int = 1  # at once
    warnings: tuple[str, ...] = ()  # about the request; they come with the answer
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """Requests for the scheduler, a parser for each one's answer, and warnings for the answers."""

    requests: tuple[Request, ...]
    answer_parsers: tuple[parsers.AnswerParser, ...]
    several_calls: bool = True
    warnings: tuple[str, ...] = ()

    @property
    def warned(self) -> dict[str, list[str]]:
        """The field of an answer with the warnings; none without any."""
        return {"warnings": list(self.warnings)} if self.warnings else {}


async def prepare_chat(service: Service, question: ChatQuestion) -> Prepared:
    """Returns the requests that answer a question.

    An answer of a given form, or a call that the request demands, begins with the first token: the model is asked not
    to think, unless the request asks for it, and the answer has none of its family's marks for thoughts and calls.
    Raises:  RequestError if the question cannot be answered; QueueFullError.
    """
    is_forced = question.choice.kind == "required"
    tools = [] if question.choice.kind == "none" else question.tools
    called = _called_tools(question) if is_forced else []
    source = question.grammar
    if is_forced:  # there is no text whose form the request could give
        source = GrammarSource("call", Calls([tool.called() for tool in called]), "tools")
    elif tools and source is not None and source.kind == "json_schema":
        source = GrammarSource("call", Calls([tool.called() for tool in tools], source), "tools")
    is_formed = source is not None and source.kind != "gbnf"
    kwargs = {"enable_thinking": False, **question.template_kwargs} if is_formed else question.template_kwargs
    definitions = [tool.definition for tool in tools]
    prompt = await service.chat_prompt(question.messages, definitions, kwargs, question.continues)
    limits = question.limits
    request = Request(
        prompt_ids=prompt.ids,
        sampling=question.sampling,
        max_tokens=service.max_tokens(len(prompt.ids), limits.max_tokens),
        end_ids=limits.ends(service.answer_end_ids),
        stop=limits.stop,
        top_logprobs=question.top_logprobs,
        keeps_special=service.keeps_special and not is_formed,
        stable_tokens=prompt.stable_tokens,
        prompt_logprobs=question.prompt_logprobs,
    )

    def parser() -> parsers.AnswerParser:
        if source is not None and source.kind == "call":
            return formed.FormedCallParser([tool.name for tool in called or tools], can_be_content=not is_forced)
        return formed.PlainParser() if is_formed else service.parser(prompt.text, definitions)

    requests = several(request, await service.grammars(source, question.num_answers), limits.rules)
    warnings = question.warnings
    if tools and not service.writes_tools():
        warnings += ("tools: the model's chat template does not write tools, so the model does not know of them",)
    return Prepared(requests, tuple(parser() for _ in requests), question.several_calls, warnings)


def several(request: Request, grammars: Sequence[Grammar | None], rules: TokenRules) -> tuple[Request, ...]:
    """Returns copies of a request, each with its own grammar and, if the request has a seed, its own seed."""
    seed = request.sampling.seed
    return tuple(
        replace(
            request,
            grammar=ruled(rules, request.end_ids, grammar),
            sampling=request.sampling if seed is None else replace(request.sampling, seed=seed + index),
        )
        for index, grammar in enumerate(grammars)
    )


def _called_tools(question: ChatQuestion) -> list[OfferedTool]:
    """Returns the tools, one of which the answer has to call."""
    name = question.choice.name
    called = [tool for tool in question.tools if name is None or tool.name == name]
    if not called:
        missing = "there are no tools" if name is None else f"there is no tool {name[:200]!r} in tools"
        raise RequestError(f"tool_choice asks for a call, but {missing}", "tool_choice")
    return called


@dataclass(slots=True, eq=False)
class Block:
    """A part of an answer: reasoning, content, or one tool call."""

    kind: BlockKind
    index: int  # among the answer's blocks
    call_id: str = ""
    name: str = ""
    item_id: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """A change of a block: it opens, `text` is added, or it closes."""

    change: Literal["open", "add", "close"]
    block: Block
    text: str = ""


class Answer:
    """The answer so far, as blocks in their order, with counts and log-probabilities."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: PromptLogprobs | None = None
        self.reasoning_tokens = 0
        self.end: EndEvent | None = None
        self._call_index = -1

    def take(self, step: "Step") -> list[BlockEvent]:
        """Adds a step, and returns the changes of the blocks."""
        if step.prompt_logprobs is not None:
            self.prompt_logprobs = step.prompt_logprobs
            return []
        changes = [change for delta in step.deltas for change in self._add(delta)]
        if step.logprob is not None:
            self.logprobs.append(step.logprob)
        if step.end is None:
            self.reasoning_tokens += bool(self.blocks) and self.blocks[-1].kind == "reasoning"
        else:
            self.end = step.end
            changes += self._close()
        return changes

    @property
    def ended(self) -> EndEvent:
        """The end of the answer, which has come."""
        assert self.end is not None
        return self.end

    @property
    def calls(self) -> list[Block]:
        """The tool calls."""
        return [block for block in self.blocks if block.kind == "call"]

    def text(self, kind: BlockKind) -> str:
        """Returns the text of all blocks of a kind."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    def _add(self, delta: parsers.Delta) -> Iterator[BlockEvent]:
        match delta:
            case parsers.ContentDelta(text):
                kind: BlockKind = "content"
            case parsers.ReasoningDelta(text):
                kind = "reasoning"
            case parsers.ToolCallDelta(arguments=text):
                kind = "call"
            case _:
                assert_never(delta)
        call_index = delta.index if isinstance(delta, parsers.ToolCallDelta) else -1
        if kind != "call" and not text:
            return
        if not self.blocks or self.blocks[-1].kind != kind or self._call_index != call_index:
            yield from self._close()
            block = Block(kind, len(self.blocks))
            if isinstance(delta, parsers.ToolCallDelta):
                block.call_id, block.name = delta.call_id or formed.new_id("call_"), delta.name or ""
            self.blocks.append(block)
            self._call_index = call_index
            yield BlockEvent("open", block)
        if text:
            self.blocks[-1].pieces.append(text)
            yield BlockEvent("add", self.blocks[-1], text)

    def _close(self) -> list[BlockEvent]:
        """Closes the last block, which is open; a call without arguments gets an empty object."""
        if not self.blocks:
            return []
        last = self.blocks[-1]
        closed = [BlockEvent("close", last)]
        if last.kind == "call" and not last.pieces:
            last.pieces.append("{}")
            closed.insert(0, BlockEvent("add", last, "{}"))
        return closed


@dataclass(frozen=True, slots=True)
class Step:
    """An addition to one of several answers."""

    index: int  # of the answer
    deltas: tuple[parsers.Delta, ...] = ()
    logprob: TokenLogprob | None = None
    end: EndEvent | None = None  # in the answer's last step
    prompt_logprobs: PromptLogprobs | None = None  # in a step of their own, before all others


async def steps(run: Generation, prepared: Prepared) -> AsyncIterator[Step]:
    """Yields the additions of events to answers, until all answers have ended.

    Raises:  AnswerError if the engine could not finish one; RequestError if its grammar cannot be followed.
    """
    record = access_log.RECORD.get()
    whole: set[int] = set()  # answers that need no more: one call was asked for, and a second one began
    async for index, event in run:
        request = prepared.requests[index]
        if isinstance(event, PromptEvent):
            yield Step(index, prompt_logprobs=event.logprobs)
            continue
        if record is not None:
            is_first = index == 0 or request.prompt_ids is not prepared.requests[index - 1].prompt_ids
            record.note_event(event, is_first)
        end = event if isinstance(event, EndEvent) else None
        parser = prepared.answer_parsers[index]
        deltas = list(parser.push(event.text))
        if end is not None:
            run.end(index)
            deltas += parser.finish()
            end = _checked_end(end, request.grammar, index in whole)
        second = next((i for i, d in enumerate(deltas) if isinstance(d, parsers.ToolCallDelta) and d.index > 0), None)
        if index in whole:
            deltas = []
        elif not prepared.several_calls and second is not None:
            deltas = deltas[:second]
            whole.add(index)
            if end is None:
                run.cancel(index)
        yield Step(index, tuple(deltas), None if isinstance(event, EndEvent) else event.logprob, end)


def _checked_end(end: EndEvent, grammar: Grammar | None, is_whole: bool) -> EndEvent:
    """Returns the end of an answer, a stop if it is whole. Raises: RequestError for a grammar's fault; AnswerError."""
    fault: str | None = getattr(grammar, "fault", None)
    if end.reason == "error" and fault is not None:
        raise RequestError(fault, "grammar")
    if is_whole and end.reason in ("cancelled", "length"):
        return replace(end, reason="stop")
    if end.reason == "error":
        raise AnswerError(end.message or "the engine could not finish the answer")
    if end.reason == "unready":
        raise UnreadyError(end.message)
    if end.reason == "cancelled":
        raise AnswerError("the server ended the request before it was finished; try again")
    return end


async def whole_answers(service: Service, prepared: Prepared) -> list[Answer]:
    """Returns the answers to requests when all have ended."""
    answers = [Answer() for _ in prepared.requests]
    with closing(Generation(service.scheduler, prepared.requests)) as run:
        async for step in steps(run, prepared):
            answers[step.index].take(step)
    return answers


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of a request."""

    prompt: int
    cached: int  # tokens of the prompt that were not computed again
    completion: int
    reasoning: int

    @classmethod
    def of(cls, answers: Sequence[Answer], answers_each: int = 1) -> "Usage":
        """Returns the sums over answers; each `answers_each` of them share a prompt, which counts once."""
        firsts = [answer.ended for answer in answers[::answers_each]]
        return cls(
            prompt=sum(end.prompt_tokens for end in firsts),
            cached=sum(end.cached_tokens for end in firsts),
            completion=sum(answer.ended.completion_tokens for answer in answers),
            reasoning=sum(answer.reasoning_tokens for answer in answers),
        )


def service_of(http: HttpRequest) -> Service:
    """Returns the service of a request.

    Raises:  NotReadyError if the model is being loaded, or the engine has failed.
    """
    service: Service | None = http.app.state.service
    if service is None:
        raise NotReadyError("the model is being loaded; try again soon")
    failure = service.scheduler.failure
    if failure is not None:
        raise NotReadyError(f"the engine has failed ({failure}); start the server again")
    return service


async def respond(http: HttpRequest, answering: Coroutine[Any, Any, Response]) -> Response:
    """Returns a response; ends the work on it if the client leaves. The request's body was read."""
    work = asyncio.ensure_future(answering)
    leaving = asyncio.ensure_future(_left(http))
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else Response(status_code=LEFT)
    finally:
        work.cancel()
        leaving.cancel()
        await asyncio.gather(work, leaving, return_exceptions=True)


async def _left(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


class _Started:
    """The events of a stream that has begun; an exception becomes the last event, `aclose` ends its `with` blocks."""

    def __init__(
        self,
        first: ServerSentEvent,
        rest: AsyncGenerator[ServerSentEvent, None],
        failed: Callable[[Problem], ServerSentEvent],
    ) -> None:
        self._first: ServerSentEvent | None = first
        self._rest, self._failed = rest, failed

    def __aiter__(self) -> "_Started":
        return self

    async def __anext__(self) -> ServerSentEvent:
        first, self._first = self._first, None
        if first is not None:
            return first
        try:
            return await anext(self._rest)
        except StopAsyncIteration:
            raise
        except Exception as fault:  # the status was sent already
            problem, record = problem_of(fault), access_log.RECORD.get()
            if record is not None:
                record.refuse(problem.status, problem.message, problem.param, problem.code)
            return self._failed(problem)

    async def aclose(self) -> None:
        await self._rest.aclose()


async def stream(
    events: AsyncGenerator[ServerSentEvent, None],
    failed: Callable[[Problem], ServerSentEvent],
    ping: Callable[[], ServerSentEvent] | None = None,
) -> Response:
    """Returns a response that sends events as they come.

    The first event is awaited here, so that a request can be refused with a status of its own.
    Args:    failed: returns the event of a later fault.   ping: returns the event that keeps a silent connection open;
             None for a comment.
    """
    first = await anext(events)
    return EventSourceResponse(_Started(first, events, failed), ping=PING_SECONDS, sep="\n", ping_message_factory=ping)


def event_of(value: dict[str, Any], name: str | None = None) -> ServerSentEvent:
    """Returns an event with a JSON object."""
    return ServerSentEvent(json.dumps(value, ensure_ascii=False, allow_nan=False), event=name, sep="\n")
