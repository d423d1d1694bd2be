"""Answers, from a protocol's question to what a protocol writes: shared by all protocols.

`prepare_chat` turns a question into requests. `steps` follows their events and says what each one adds to which answer.
An `Answer` keeps what was added as blocks: reasoning, content, tool calls. `respond` and `stream` give an answer to the
client, and end it when the client leaves.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, assert_never

from fastapi import Request as HttpRequest
from fastapi.responses import Response
from sse_starlette import EventSourceResponse, ServerSentEvent

from moe_pack.formats import RunError
from moe_pack.runtime import SamplingOptions
from moe_pack.runtime.sampling import Grammar, TokenLogprob
from moe_pack.runtime.serve import access_log
from moe_pack.runtime.serve.grammars import TokenGrammar
from moe_pack.runtime.serve.parsers import AnswerParser, ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from moe_pack.runtime.serve.protocols import formed
from moe_pack.runtime.serve.protocols.constraints import AnswerLimits
from moe_pack.runtime.serve.requests import (
    EndEvent,
    PromptEvent,
    PromptLogprobs,
    QueueFullError,
    Request,
    RequestError,
)
from moe_pack.runtime.serve.rules import RuledGrammar, TokenRules, ruled
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

# How the API's description writes a stream: this is one of its events.
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


@dataclass(frozen=True, slots=True)
class Problem:
    """What went wrong with a request, for a protocol to write in its own shape. `status` is that of HTTP."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_s: int = RETRY_SECONDS

    @property
    def headers(self) -> dict[str, str]:
        """The headers of HTTP that belong to it."""
        if self.status in (429, 503):
            return {"Retry-After": str(self.retry_s)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


def problem_of(fault: Exception) -> Problem:
    """Returns what a client is told about an exception; one that nobody expects is logged, and not told."""
    if isinstance(fault, ModelNotFoundError):
        return Problem(404, str(fault), fault.param, "model_not_found")
    if isinstance(fault, ContextLengthError):
        return Problem(400, str(fault), fault.param, "context_length_exceeded")
    if isinstance(fault, RequestError):
        return Problem(400, str(fault), fault.param)
    if isinstance(fault, QueueFullError):
        return Problem(429, str(fault), code="queue_full")
    if isinstance(fault, NotReadyError):
        return Problem(503, str(fault), code="not_ready", retry_s=LOADING_RETRY_SECONDS)
    if isinstance(fault, RunError):
        return Problem(500, str(fault))
    access_log.LOG.error("a request failed", exc_info=fault)
    return Problem(500, "the server failed; its log says why")


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may call tools, or has to, and which one; `name` is None unless the request names one."""

    kind: Literal["none", "auto", "required"] = "auto"
    name: str | None = None


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A function that the model may call.

    `definition`: as templates read it, which is OpenAI's form.   `schema_param`: the field of the request that has the
    schema of its arguments.
    """

    definition: dict[str, Any]
    schema_param: str

    @property
    def name(self) -> str:
        """The function's name."""
        return str(self.definition["function"]["name"])

    def called(self) -> CalledTool:
        """Returns what a grammar of its calls needs."""
        schema = self.definition["function"].get("parameters") or {"type": "object"}
        return CalledTool(self.name, schema, self.schema_param)


@dataclass(frozen=True, slots=True)
class ChatQuestion:
    """A conversation and what the answer may be, whatever protocol it comes by.

    `messages`: as templates read them, which is OpenAI's form.   `continues`: whether the answer continues the last
    message.   `num_answers`: how many answers to make at once.   `warnings`: what the answer says about the request.
    """

    messages: list[dict[str, Any]]
    sampling: SamplingOptions
    limits: AnswerLimits
    tools: list[OfferedTool] = field(default_factory=list)
    choice: ToolChoice = ToolChoice()
    several_calls: bool = True
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    continues: bool = False
    grammar: GrammarSource | None = None
    top_logprobs: int | None = None
    num_answers: int = 1
    warnings: tuple[str, ...] = ()
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """Requests for the scheduler, a parser for each one's answer, and what the answers say about the request."""

    requests: tuple[Request, ...]
    parsers: tuple[AnswerParser, ...]
    several_calls: bool = True
    warnings: tuple[str, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt that all requests share."""
        return len(self.requests[0].prompt_ids)

    def begins_prompt(self, index: int) -> bool:
        """Whether a request is the first of those that share its prompt."""
        return index == 0 or self.requests[index].prompt_ids is not self.requests[index - 1].prompt_ids


async def prepare_chat(service: Service, question: ChatQuestion) -> Prepared:
    """Returns the requests that answer a question.

    An answer of a given form, or a call that the request demands, begins with the first token: the model is asked not
    to think, if the request does not say otherwise, and its family's marks for thoughts and calls are not looked for.
    Raises:  RequestError if the question cannot be answered; QueueFullError.
    """
    is_forced = question.choice.kind == "required"
    tools = [] if question.choice.kind == "none" else question.tools
    called = _called_tools(question) if is_forced else []
    source = question.grammar
    if is_forced:  # whatever form the request gives to text: there is none
        source = GrammarSource("call", Calls([tool.called() for tool in called]), "tools")
    elif tools and source is not None and source.kind in ("json_object", "json_schema"):
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
        end_ids=limits.ends(service.end_ids(chat=True)),
        stop=limits.stop,
        top_logprobs=question.top_logprobs,
        keeps_special=service.keeps_special and not is_formed,
        stable_tokens=prompt.stable_tokens,
        prompt_logprobs=question.prompt_logprobs,
    )

    def parser() -> AnswerParser:
        if source is not None and source.kind == "call":
            return formed.FormedCallParser([tool.name for tool in called or tools], can_be_content=not is_forced)
        return formed.PlainParser() if is_formed else service.parser(prompt.text, definitions)

    requests = several(request, await service.grammars(source, question.num_answers), limits.rules)
    warnings = question.warnings
    if tools and not service.writes_tools():
        warnings += ("tools: the model's chat template does not write tools, so the model does not know of them",)
    return Prepared(requests, tuple(parser() for _ in requests), question.several_calls, warnings)


def several(request: Request, grammars: Sequence[Grammar | None], rules: TokenRules) -> tuple[Request, ...]:
    """Returns requests of a kind: each with a grammar and, if there is one, a seed of its own."""
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
    """Returns the tools of which the answer has to call one."""
    name = question.choice.name
    called = [tool for tool in question.tools if name is None or tool.name == name]
    if not called:
        missing = "there are no tools" if name is None else f"there is no tool {name[:200]!r} in tools"
        raise RequestError(f"tool_choice asks for a call, but {missing}", "tool_choice")
    return called


@dataclass(slots=True, eq=False)
class Block:
    """A part of an answer: reasoning, content, or one tool call. `index` counts the blocks of the answer."""

    kind: BlockKind
    index: int
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
    """What the model has answered so far, as blocks one after the other, with counts and log-probabilities."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: PromptLogprobs | None = None
        self.reasoning_tokens = 0
        self.end: EndEvent | None = None
        self._call_index = -1

    def take(self, step: "Step") -> list[BlockEvent]:
        """Adds a step, and returns how the blocks change by it."""
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

    def _add(self, delta: Delta) -> Iterator[BlockEvent]:
        match delta:
            case ContentDelta(text):
                kind: BlockKind = "content"
            case ReasoningDelta(text):
                kind = "reasoning"
            case ToolCallDelta(arguments=text):
                kind = "call"
            case _:
                assert_never(delta)
        call_index = delta.index if isinstance(delta, ToolCallDelta) else -1
        if kind != "call" and not text:
            return
        if not self.blocks or self.blocks[-1].kind != kind or self._call_index != call_index:
            yield from self._close()
            block = Block(kind, len(self.blocks))
            if isinstance(delta, ToolCallDelta):
                block.call_id, block.name = delta.call_id or formed.new_id("call_"), delta.name or ""
            self.blocks.append(block)
            self._call_index = call_index
            yield BlockEvent("open", block)
        if text:
            self.blocks[-1].pieces.append(text)
            yield BlockEvent("add", self.blocks[-1], text)

    def _close(self) -> list[BlockEvent]:
        """Closes the block that is open: the last one. A call without arguments gets an empty object of them."""
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
    """What an event adds to one of several answers; the last step of an answer has its `end`."""

    index: int
    deltas: tuple[Delta, ...]
    logprob: TokenLogprob | None
    end: EndEvent | None
    prompt_logprobs: PromptLogprobs | None = None  # a step of their own, before all others


async def steps(run: Generation, prepared: Prepared) -> AsyncIterator[Step]:
    """Yields what each event adds, until all answers have ended.

    Raises:  AnswerError if the engine could not finish one; RequestError if its grammar cannot be followed.
    """
    record = access_log.RECORD.get()
    whole: set[int] = set()  # answers that need no more: one call was asked for, and a second one began
    async for numbered in run:
        index, event = numbered.index, numbered.event
        if isinstance(event, PromptEvent):
            yield Step(index, (), None, None, event.logprobs)
            continue
        if record is not None:
            record.note_event(event, prepared.begins_prompt(index))
        end = event if isinstance(event, EndEvent) else None
        parser = prepared.parsers[index]
        deltas = list(parser.push(event.text))
        if end is not None:
            run.end(index)
            deltas += parser.finish()
            _refuse_grammar(end, prepared.requests[index].grammar)
            end = _checked_end(end, index in whole)
        if index in whole:
            deltas = []
        elif not prepared.several_calls and len(first := _first_call(deltas)) < len(deltas):
            deltas = first
            whole.add(index)
            if end is None:
                run.cancel(index)
        logprob = None if isinstance(event, EndEvent) else event.logprob
        yield Step(index, tuple(deltas), logprob, end)


def _refuse_grammar(end: EndEvent, grammar: Grammar | None) -> None:
    """Refuses a request whose grammar turned out to be too large while it was followed. Raises: RequestError."""
    if end.reason == "error" and isinstance(grammar, TokenGrammar | RuledGrammar) and grammar.fault is not None:
        raise RequestError(grammar.fault, "grammar")


def _first_call(deltas: list[Delta]) -> list[Delta]:
    """Returns the deltas before a second tool call."""
    return list(itertools.takewhile(lambda d: not (isinstance(d, ToolCallDelta) and d.index > 0), deltas))


def _checked_end(end: EndEvent, is_whole: bool) -> EndEvent:
    """Returns the end of an answer; that of one which was cancelled because it is whole is a stop."""
    if is_whole and end.reason in ("cancelled", "length"):
        return replace(end, reason="stop")
    if end.reason == "error":
        raise AnswerError(end.message or "the engine could not finish the answer")
    if end.reason == "cancelled":
        raise AnswerError("the server ended the request before it was finished; try again")
    return end


async def whole_answers(service: Service, prepared: Prepared) -> list[Answer]:
    """Returns the answers to requests when all have ended."""
    answers = [Answer() for _ in prepared.requests]
    with service.generate(prepared.requests) as run:
        async for step in steps(run, prepared):
            answers[step.index].take(step)
    return answers


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of a request. `cached`: of the prompt, those that were not computed again."""

    prompt: int
    cached: int
    completion: int
    reasoning: int

    @classmethod
    def of(cls, answers: Sequence[Answer], answers_each: int = 1) -> "Usage":
        """Returns the sums over answers, `answers_each` of which share a prompt, which counts once."""
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
    failure = service.failure()
    if failure is not None:
        raise NotReadyError(f"the engine has failed ({failure}); start the server again")
    return service


async def respond(http: HttpRequest, answering: Coroutine[Any, Any, Response]) -> Response:
    """Returns a response when it is there; ends the work on it when the client leaves.

    Args:    http: a request whose body was read.
    """
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
    """Returns when the client has left."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


class _Started:
    """The events of a stream whose first one is there; an exception becomes the last event.

    A generator that has begun is closed when nobody needs it any more, so its `with` blocks end.
    """

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

    The first event is awaited here: what a request is refused for then has a status of its own.
    Args:    failed: returns the event that says what went wrong later.   ping: returns the event that keeps a silent
             connection open; None for a comment.
    """
    first = await anext(events)
    return EventSourceResponse(_Started(first, events, failed), ping=PING_SECONDS, sep="\n", ping_message_factory=ping)


def event_of(value: dict[str, Any], name: str | None = None) -> ServerSentEvent:
    """Returns an event with a JSON object."""
    return ServerSentEvent(json.dumps(value, ensure_ascii=False, allow_nan=False), event=name, sep="\n")
