"""The model as the protocols use it: prompts, grammars, parsers of answers, and answers while they are made.

The methods belong in the event loop. Prompts, long prompts and grammars are computed in threads, each kind in its own,
so that none waits for another kind.
"""

import asyncio
import json
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from moe_pack.formats import RunError
from moe_pack.runtime import ChatTemplate, SamplingOptions, Text, templates
from moe_pack.runtime.sampling import Grammar
from moe_pack.runtime.serve import schemas
from moe_pack.runtime.serve.conversations import Conversations, Message
from moe_pack.runtime.serve.grammars import GrammarCompiler, TokenGrammar
from moe_pack.runtime.serve.parsers import AnswerParser
from moe_pack.runtime.serve.requests import Event, QueueFullError, Request, RequestError

if TYPE_CHECKING:
    from moe_pack.runtime.serve.scheduler import BatchScheduler, Job

T = TypeVar("T")

PROMPT_END_CHARACTERS = 512  # of a prompt, for a parser: templates end it with a role, or an open thought

_LONG_CHARACTERS = 64 << 10  # of a prompt; a tokenizer takes up to some 400 bytes of memory for each
_MOST_GRAMMARS = 16  # that are kept for later requests
_MOST_GRAMMAR_BYTES = 1 << 20  # of their sources
_TEMPLATE_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


class ContextLengthError(RequestError):
    """The prompt leaves no token for an answer."""


class ModelNotFoundError(RequestError):
    """The request names a model that this server does not serve."""


class NotReadyError(RunError):
    """The model is being loaded, or the engine has failed."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about the model that a server tells its clients."""

    model_id: str  # its name in answers
    folder_name: str  # of the pack; requests may use it too
    created: int  # when the pack was made, in seconds since 1970
    sampling: SamplingOptions  # for fields that a request does not have
    aliases: tuple[str, ...] = ()  # other names that requests may use; without them every name is taken
    chat_template: str = ""  # as the pack's files have it, and the tokens too; empty where they have none
    bos_token: str = ""
    eos_token: str = ""


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A tool that the answer may call."""

    name: str
    schema: Mapping[str, Any]  # of its arguments
    param: str  # the field of the request that has the schema


@dataclass(frozen=True, slots=True)
class Calls:
    """The grammar's value of an answer that calls one of some tools, or has another form of JSON."""

    tools: Sequence[CalledTool]
    other: "GrammarSource | None" = None


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """The form of an answer, as a request gives it."""

    kind: Literal["json_schema", "regex", "choice", "gbnf", "call"]
    value: Any  # a schema; a text; for `choice` texts; for `call` tools (`Calls`)
    param: str  # the field of the request


class _KnownGrammars:
    """The grammars, or the errors in place of them, that were used last; several threads may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[str, TokenGrammar | RequestError] = OrderedDict()

    def get(self, key: str) -> TokenGrammar | None:
        """Returns the grammar of a source, or raises the error of its compilation; None if it is not there."""
        with self._lock:
            found = self._found.get(key)
            if found is None:
                return None
            self._found.move_to_end(key)
        if isinstance(found, RequestError):
            raise RequestError(str(found), found.param)  # an exception of its own, with its own traceback
        return found

    def put(self, key: str, found: TokenGrammar | RequestError) -> None:
        """Keeps a grammar or its error, and drops those used least recently."""
        if len(key) > _MOST_GRAMMAR_BYTES // 2:
            return
        with self._lock:
            self._found[key] = found
            while len(self._found) > _MOST_GRAMMARS or sum(map(len, self._found)) > _MOST_GRAMMAR_BYTES:
                self._found.popitem(last=False)


class Generation:
    """Requests that run at once: an asynchronous iterator of their events, each with the index of its request.

    `close` cancels requests that still run.
    Raises:  as `BatchScheduler.submit`; then none of the requests runs.
    """

    def __init__(self, scheduler: "BatchScheduler", requests: Sequence[Request]) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._jobs: list[Job] = []
        self._running = set(range(len(requests)))
        try:
            for index, request in enumerate(requests):
                num_places = len(requests) if index == 0 else 0
                self._jobs.append(scheduler.submit(request, partial(self._take, index), num_places))
        except BaseException:
            self.close()
            raise

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> tuple[int, Event]:
        if not self._running:
            raise StopAsyncIteration
        return await self._events.get()

    def end(self, index: int) -> None:
        """Notes that the last event of a request was read."""
        self._running.discard(index)

    def cancel(self, index: int) -> None:
        """Ends one of the requests; its `EndEvent` still comes."""
        self._jobs[index].cancel()

    def close(self) -> None:
        """Cancels the requests that still run."""
        for index, job in enumerate(self._jobs):
            if index in self._running:
                job.cancel()
        self._running.clear()

    def _take(self, index: int, event: Event) -> None:
        """Brings an event from the scheduler's thread to the event loop."""
        with suppress(RuntimeError):  # the loop has ended, and with it every reader of events
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))


@dataclass(eq=False, slots=True)
class _Call:
    """A call, and the future in the event loop that gets what it returns or raises."""

    call: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    answer: "asyncio.Future[Any]"

    def finish(self, value: Any, fault: BaseException | None) -> None:
        """Brings the result to the event loop; it is lost if the client has left."""

        def give() -> None:
            if self.answer.done():
                return
            if fault is None:
                self.answer.set_result(value)
            else:
                self.answer.set_exception(fault)

        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(give)


class WorkPool:
    """Runs calls in a few daemon threads, first come, first served.

    Args:    name: the calls, in messages.   num_threads: calls that run at once.   most_waiting: calls that may wait;
             more are refused.   deadline_s: how long a call may wait and run; then its client gets an answer, although
             a call that runs cannot be ended.
    """

    def __init__(self, name: str, num_threads: int, most_waiting: int, deadline_s: float) -> None:
        self.name, self.num_threads, self.most_waiting, self.deadline_s = name, num_threads, most_waiting, deadline_s
        self._changed, self._waiting = threading.Condition(), deque[_Call]()
        self._num_started = self._num_running = 0

    async def run(self, call: Callable[[], T]) -> T:
        """Returns or raises what a call does in one of the threads.

        Cancelling it, as when the client leaves, drops a call that has not begun.
        Raises:  QueueFullError if too many calls wait, or this one waited or ran for too long.
        """
        loop = asyncio.get_running_loop()
        job = _Call(call, loop, loop.create_future())
        with self._changed:
            if self._num_running + len(self._waiting) >= self.num_threads + self.most_waiting:
                raise QueueFullError(f"{self.most_waiting} {self.name} are waiting already; try again later")
            self._waiting.append(job)
            if self._num_running + len(self._waiting) > self._num_started < self.num_threads:
                self._num_started += 1
                threading.Thread(target=self._work, name=f"moe-serve {self.name}", daemon=True).start()
            self._changed.notify()
        try:
            async with asyncio.timeout(self.deadline_s):
                value: T = await job.answer
                return value
        except TimeoutError as fault:
            if job.answer.done() and not job.answer.cancelled():
                raise  # the call's own
            raise QueueFullError(
                f"the server did not get to it within {self.deadline_s:g} seconds, because of other {self.name}; "
                "try again later"
            ) from fault
        finally:
            with self._changed, suppress(ValueError):  # it has begun
                self._waiting.remove(job)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                job = self._waiting.popleft()
                self._num_running += 1
            value, fault = None, None
            try:
                value = job.call()
            except BaseException as raised:  # the client's answer says it, whatever it is
                fault = raised
            with self._changed:
                self._num_running -= 1
            job.finish(value, fault)
            del job, value, fault  # they may hold much memory


class Service:
    """A model that answers requests.

    Args:    template: None if the model takes no conversations.   parsers: returns the parser of an answer, from the
             end of the prompt and the tools.   keeps_special: whether special tokens are marks that parsers read.
    """

    def __init__(
        self,
        facts: ModelFacts,
        scheduler: "BatchScheduler",
        tokenizer: Text,
        template: ChatTemplate | None,
        parsers: Callable[[str, list[dict[str, Any]]], AnswerParser],
        grammars: GrammarCompiler,
        keeps_special: bool = False,
    ) -> None:
        self.model_id, self.created, self.default_sampling = facts.model_id, facts.created, facts.sampling
        self.scheduler, self.context_tokens = scheduler, scheduler.context_tokens
        self.token_bytes, self.keeps_special = grammars.token_bytes, keeps_special
        self.facts, self.vocab_size, self.takes_chats = facts, tokenizer.vocab_size, template is not None
        self.listed_names = tuple(dict.fromkeys((facts.model_id, *facts.aliases)))  # in lists of models
        self.end_ids, self.answer_end_ids = tokenizer.end_ids, tokenizer.answer_end_ids
        self._names = {facts.model_id, facts.folder_name, *facts.aliases}
        self._tokenizer, self._template = tokenizer, template
        self._conversations = None if template is None else Conversations(template)
        self._parsers, self._grammars, self._known = parsers, grammars, _KnownGrammars()
        self._most_prompt_bytes = self.context_tokens * tokenizer.most_bytes_per_token
        self._prompt_pool = WorkPool("prompts", num_threads=2, most_waiting=256, deadline_s=120)
        # A long prompt takes much memory, and a grammar computes on one core for seconds.
        self._long_pool = WorkPool("long prompts", num_threads=1, most_waiting=8, deadline_s=120)
        self._grammar_pool = WorkPool("grammars", num_threads=1, most_waiting=16, deadline_s=60)

    def writes_tools(self) -> bool:
        """Whether the chat template writes tools; it is tried once, in `chat_prompt`."""
        return self._conversations is not None and self._conversations.writes_tools()

    def check_model(self, name: str | None) -> None:
        """Refuses a name that is not one of the model's, if it has aliases. Raises: ModelNotFoundError."""
        # Without aliases every name is taken, since many clients have one built in; answers have the model's own.
        if self.facts.aliases and name is not None and name not in self._names:
            raise ModelNotFoundError(
                f"this server has no model {name[:200]!r}; use {self.model_id!r}, or leave the model out", "model"
            )

    async def chat_prompt(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]],
        template_kwargs: Mapping[str, object],
        continues: bool,
    ) -> templates.ChatPrompt:
        """Returns the prompt of a conversation.

        Args:    tools: objects in OpenAI's form.   template_kwargs: the template's own variables.   continues: whether
                 the answer continues the last message.
        Raises:  RequestError if there is no template, or it fails, or the prompt is far longer than the context;
                 QueueFullError.
        """
        template, conversations = self._template, self._conversations
        if template is None or conversations is None:
            raise RequestError(f"{self.model_id} has no chat template; use /v1/completions")
        brought: list[Message] = []
        own = sorted(_TEMPLATE_OWN & template_kwargs.keys())
        if own:
            raise RequestError(f"chat_template_kwargs cannot set {own[0]}; remove it", "chat_template_kwargs")

        def render(adds: bool) -> str:
            text = template.render(
                brought,
                add_generation_prompt=adds,
                tools=tools or None,
                extra=template_kwargs,
                continue_final_message=continues,
            )
            self._refuse_length(text)
            return text

        def work() -> templates.ChatPrompt:
            nonlocal brought
            try:
                brought = conversations.brought(messages, bool(tools))
                if tools:
                    conversations.writes_tools()
                return templates.prompt_of(self._tokenizer, render, continues)
            except RequestError:
                raise
            except RunError as fault:
                raise RequestError(str(fault), "messages") from fault

        return await self._pool([messages, tools, template_kwargs]).run(work)

    def text_ids(self, text: str) -> list[int]:
        """Returns the tokens of a text within another one."""
        return self._tokenizer.encode(text, special_tokens=False)

    async def completion_prompts(self, texts: Sequence[str], special_tokens: bool = True) -> list[tuple[int, ...]]:
        """Returns the tokens of texts to continue, with or without special tokens around them.

        Raises:  ContextLengthError if a text is far longer than the context; QueueFullError.
        """

        def work() -> list[tuple[int, ...]]:
            for text in texts:
                self._refuse_length(text)
            return [tuple(self._tokenizer.encode(text, special_tokens)) for text in texts]

        return await self._pool(texts).run(work)

    def _pool(self, source: object) -> WorkPool:
        return self._long_pool if _is_long(source) else self._prompt_pool

    def _refuse_length(self, text: str) -> None:
        """Refuses a text that surely has more tokens than the context, before it is made tokens."""
        num_bytes = len(text.encode("utf-8", "replace"))
        if num_bytes > self._most_prompt_bytes:
            raise ContextLengthError(
                f"the prompt has {num_bytes} bytes, and the context of this server has {self.context_tokens} tokens, "
                f"of {self._tokenizer.most_bytes_per_token} bytes at most; shorten the prompt"
            )

    def parser(self, prompt: str, tools: list[dict[str, Any]]) -> AnswerParser:
        """Returns the parser of an answer to a prompt."""
        return self._parsers(prompt[-PROMPT_END_CHARACTERS:], tools)

    async def grammars(self, source: GrammarSource | None, count: int) -> tuple[Grammar | None, ...]:
        """Returns a grammar at its beginning for each of some answers; None if there is no source.

        Raises:  RequestError if the source has an error; QueueFullError.
        """
        if source is None:
            return (None,) * count
        key = json.dumps(asdict(source))
        found = self._known.get(key)  # does not wait for others that are compiled
        if found is None:
            found = await self._grammar_pool.run(lambda: self._compiled(source, key))
        return tuple(found.copy() for _ in range(count))

    def _compiled(self, source: GrammarSource, key: str) -> TokenGrammar:
        """Compiles a grammar, unless that happened while this call waited. Raises: RequestError."""
        found = self._known.get(key)
        if found is not None:
            return found
        try:
            found = self._made(source)
        except RequestError as fault:
            self._known.put(key, fault)
            raise
        self._known.put(key, found)
        return found

    def _made(self, source: GrammarSource) -> TokenGrammar:
        if source.kind == "call":
            return self._call_grammar(source.value, source.param)
        compiler = self._grammars
        make: dict[str, Callable[[Any, str], TokenGrammar]] = {
            "json_schema": compiler.json_schema,
            "regex": compiler.regex,
            "choice": compiler.choice,
            "gbnf": compiler.gbnf,
        }
        return make[source.kind](source.value, source.param)

    def _call_grammar(self, calls: Calls, param: str) -> TokenGrammar:
        """Returns the grammar of one tool's arguments; for several tools, of objects with a name and arguments."""
        tools, other = calls.tools, calls.other
        if len(tools) == 1 and other is None:
            return self._grammars.json_schema(tools[0].schema, tools[0].param)
        named = [(tool.name, tool.schema) for tool in tools]
        try:
            return self._grammars.json_schema(schemas.of_calls(named, None if other is None else other.value), param)
        except RunError:
            for tool in tools:  # the first schema that is wrong alone has a better message
                self._grammars.json_schema(tool.schema, tool.param)
            if other is not None:
                self._made(other)
            raise

    def max_tokens(self, prompt_tokens: int, asked: int | None) -> int:
        """Returns how long an answer may be: the number that the request has, at most the rest of the context.

        Raises:  ContextLengthError if there is no rest.
        """
        rest = self.context_tokens - prompt_tokens
        if rest < 1:
            raise ContextLengthError(
                f"the prompt has {prompt_tokens} tokens, and the context of this server has {self.context_tokens}; "
                f"shorten the prompt to at most {self.context_tokens - 1} tokens"
            )
        return rest if asked is None else min(asked, rest)


def _is_long(source: object) -> bool:
    """Whether a JSON value has much text, or very many parts."""
    left, size = [source], 0
    while left and size <= _LONG_CHARACTERS:
        value = left.pop()
        size += 1
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, Mapping):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, Sequence):
            left += value
    return size > _LONG_CHARACTERS
