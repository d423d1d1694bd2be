"""What the protocols need of the model: prompts, grammars, parsers of answers, and answers while they are made.

The service knows its parts by protocols alone: a tokenizer, a chat template, a compiler of grammars, a scheduler. Its
methods belong in the event loop; prompts and grammars are computed in threads, each kind in its own.
"""

import asyncio
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal, Protocol, TypeVar

from moe_pack.formats import RunError
from moe_pack.runtime import SamplingOptions, templates
from moe_pack.runtime.sampling import Grammar
from moe_pack.runtime.serve import schemas
from moe_pack.runtime.serve.conversations import Conversations, Message, Template
from moe_pack.runtime.serve.parsers import AnswerParser
from moe_pack.runtime.serve.requests import Event, QueueFullError, Request, RequestError, Scheduler, Ticket
from moe_pack.runtime.serve.workers import Workers

T = TypeVar("T")

PROMPT_END_CHARACTERS = 512  # what a parser sees of the prompt: templates end it with a role, or an open thought

_LONG_CHARACTERS = 64 << 10  # of a prompt; a tokenizer takes up to some 400 bytes of memory for each
_MOST_GRAMMARS = 16  # that are kept for requests to come; and the bytes of what they were made from
_MOST_GRAMMAR_BYTES = 1 << 20
_TEMPLATE_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


class ContextLengthError(RequestError):
    """The prompt leaves no token for an answer."""


class ModelNotFoundError(RequestError):
    """The request names a model that this server does not serve."""


class NotReadyError(RunError):
    """The model is being loaded, or the engine has failed."""


class Tokenizer(Protocol):
    """Turns text into tokens."""

    end_ids: frozenset[int]
    answer_end_ids: frozenset[int]
    most_bytes_per_token: int

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the model knows."""
        ...

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Returns the tokens of a text; with `special_tokens` also those that the tokenizer puts around it."""
        ...


class CopiedGrammar(Grammar, Protocol):
    """A grammar that several answers follow, each a copy of its own."""

    def copy(self) -> Grammar:
        """Returns another grammar at this place."""
        ...


class Grammars(Protocol):
    """Compiles what an answer has to follow; every call returns a grammar at its beginning.

    Raises:  RunError if the source has an error.
    """

    def json_object(self, param: str = ...) -> CopiedGrammar:
        """Returns the grammar of any JSON object."""
        ...

    def json_schema(self, schema: Mapping[str, Any], param: str = ...) -> CopiedGrammar:
        """Returns the grammar of the JSON values that a schema describes; `param` is the request's field, here too."""
        ...

    def regex(self, pattern: str, param: str = ...) -> CopiedGrammar:
        """Returns the grammar of the texts that a regular expression matches whole."""
        ...

    def choice(self, texts: Sequence[str], param: str = ...) -> CopiedGrammar:
        """Returns the grammar of some texts, of which the answer is one."""
        ...

    def gbnf(self, text: str, param: str = ...) -> CopiedGrammar:
        """Returns a grammar written in the notation of llama.cpp."""
        ...


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a server says about its model.

    `model_id`: its name in answers.   `folder_name`: of the pack; requests may use it too.   `created`: when the pack
    was made, in seconds since 1970.   `sampling`: for requests that say nothing.   `aliases`: other names that requests
    may use; without them every name is taken.   `chat_template`, `bos_token`, `eos_token`: as the pack's files have
    them; nothing where they have none.
    """

    model_id: str
    folder_name: str
    created: int
    sampling: SamplingOptions
    aliases: tuple[str, ...] = ()
    chat_template: str = ""
    bos_token: str = ""
    eos_token: str = ""


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A tool of which the answer may be a call.

    `schema`: of its arguments.   `param`: the field of the request that has the schema.
    """

    name: str
    schema: Mapping[str, Any]
    param: str


@dataclass(frozen=True, slots=True)
class Calls:
    """Tools of which the answer is a call; `other`: or it has this form, of JSON."""

    tools: Sequence[CalledTool]
    other: "GrammarSource | None" = None


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """What an answer has to follow, as a request says it.

    `value`: nothing for `json_object`; a schema; a text; for `choice` texts; for `call` tools (`Calls`).
    `param`: the field of the request.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "gbnf", "call"]
    value: Any
    param: str


class _KnownGrammars:
    """Grammars that were compiled, or the errors in place of them, those that were used last; for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[str, CopiedGrammar | RequestError] = OrderedDict()

    def get(self, key: str) -> CopiedGrammar | None:
        """Returns a grammar by its source; None if it is not there.

        Raises:  RequestError as its compilation did.
        """
        with self._lock:
            found = self._found.get(key)
            if found is None:
                return None
            self._found.move_to_end(key)
        if isinstance(found, RequestError):
            raise RequestError(str(found), found.param)  # an exception of its own, with its own traceback
        return found

    def put(self, key: str, found: CopiedGrammar | RequestError) -> None:
        """Keeps a grammar, or why there is none; what was not used for longest goes."""
        if len(key) > _MOST_GRAMMAR_BYTES // 2:
            return
        with self._lock:
            self._found[key] = found
            while len(self._found) > _MOST_GRAMMARS or sum(map(len, self._found)) > _MOST_GRAMMAR_BYTES:
                self._found.popitem(last=False)


@dataclass(frozen=True, slots=True)
class NumberedEvent:
    """An event of one of several requests that run at once."""

    index: int
    event: Event


class Generation:
    """Requests that run at once: an asynchronous iterator of their events, in the order in which they come.

    It is a context manager: at the end of its block it cancels what still runs.
    Raises:  as `Scheduler.submit`; then none of the requests runs.
    """

    def __init__(self, scheduler: Scheduler, requests: Sequence[Request]) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[NumberedEvent] = asyncio.Queue()
        self._tickets: list[Ticket] = []
        self._running = set(range(len(requests)))
        try:
            for index, request in enumerate(requests):
                num_places = len(requests) if index == 0 else 0
                self._tickets.append(scheduler.submit(request, partial(self._take, index), num_places))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> NumberedEvent:
        if not self._running:
            raise StopAsyncIteration
        return await self._events.get()

    def end(self, index: int) -> None:
        """Notes that the last event of a request was read."""
        self._running.discard(index)

    def cancel(self, index: int) -> None:
        """Ends one of the requests; its `EndEvent` still comes."""
        self._tickets[index].cancel()

    def close(self) -> None:
        """Cancels the requests that still run."""
        for index, ticket in enumerate(self._tickets):
            if index in self._running:
                ticket.cancel()
        self._running.clear()

    def _take(self, index: int, event: Event) -> None:
        """Brings an event from the scheduler's thread to the event loop."""
        with suppress(RuntimeError):  # the loop has ended, and with it everyone who reads events
            self._loop.call_soon_threadsafe(self._events.put_nowait, NumberedEvent(index, event))


class Service:
    """A model that answers requests.

    Args:    template: None if the model has none; then it takes no conversations.   parsers: returns the parser of an
             answer, from the end of the prompt and the tools.   token_bytes: returns the bytes of a token in a text.
             failure: returns why the engine runs no more; None while it does.   keeps_special: whether special tokens
             are marks that parsers read.
    """

    def __init__(
        self,
        facts: ModelFacts,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        template: Template | None,
        parsers: Callable[[str, list[dict[str, Any]]], AnswerParser],
        grammars: Grammars,
        token_bytes: Callable[[int], bytes],
        failure: Callable[[], str | None] = lambda: None,
        keeps_special: bool = False,
    ) -> None:
        self.model_id, self.created, self.default_sampling = facts.model_id, facts.created, facts.sampling
        self.scheduler, self.context_tokens = scheduler, scheduler.context_tokens
        self.token_bytes, self.failure, self.keeps_special = token_bytes, failure, keeps_special
        self.facts = facts
        self._names = {facts.model_id, facts.folder_name, *facts.aliases}
        self._tokenizer, self._template = tokenizer, template
        self._conversations = None if template is None else Conversations(template)
        self._parsers, self._grammars, self._known = parsers, grammars, _KnownGrammars()
        self._workers = Workers()
        self._most_prompt_bytes = self.context_tokens * tokenizer.most_bytes_per_token

    @property
    def takes_chats(self) -> bool:
        """Whether there is a chat template."""
        return self._template is not None

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the model knows."""
        return self._tokenizer.vocab_size

    @property
    def listed_names(self) -> tuple[str, ...]:
        """The names under which lists of models have the served one: its own first, then the aliases."""
        return tuple(dict.fromkeys((self.model_id, *self.facts.aliases)))

    def writes_tools(self) -> bool:
        """Whether the chat template writes tools; it is tried once, in `chat_prompt`."""
        return self._conversations is not None and self._conversations.writes_tools()

    def check_model(self, name: str | None) -> None:
        """Accepts the names of the served model, and no name; every name if there are no aliases.

        Many clients have names of models built in, and there is one model here: answers say its own name.
        Raises:  ModelNotFoundError.
        """
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

        Args:    tools: objects as OpenAI writes them.   template_kwargs: the template's own variables.   continues:
                 whether the answer continues the last message.
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

        return await self._computed([messages, tools, template_kwargs], work)

    def text_ids(self, text: str) -> list[int]:
        """Returns the tokens of a text within another one."""
        return self._tokenizer.encode(text, special_tokens=False)

    async def completion_prompts(self, texts: Sequence[str], special_tokens: bool = True) -> list[tuple[int, ...]]:
        """Returns the tokens of texts that the model continues; without `special_tokens`, nothing around the texts.

        Raises:  ContextLengthError if a text is far longer than the context; QueueFullError.
        """

        def work() -> list[tuple[int, ...]]:
            for text in texts:
                self._refuse_length(text)
            return [tuple(self._tokenizer.encode(text, special_tokens)) for text in texts]

        return await self._computed(texts, work)

    async def _computed(self, source: object, work: Callable[[], T]) -> T:
        """Returns what `work` makes of a source in a thread: of a long one, in the thread for long ones."""
        pool = self._workers.long_prompts if _is_long(source) else self._workers.prompts
        return await pool.run(work)

    def _refuse_length(self, text: str) -> None:
        """Refuses a text that has more tokens than the context has, whatever they are, before it is made tokens."""
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
        """Returns grammars at their beginning, one for each of some answers; None if there is no source.

        Raises:  RequestError if the source has an error; QueueFullError.
        """
        if source is None:
            return (None,) * count
        key = json.dumps(asdict(source))
        found = self._known.get(key)  # does not wait for others that are compiled
        if found is None:
            found = await self._workers.grammars.run(lambda: self._compiled(source, key))
        return tuple(found.copy() for _ in range(count))

    def _compiled(self, source: GrammarSource, key: str) -> CopiedGrammar:
        """Compiles a grammar, unless it was while this call waited. Raises: RequestError."""
        found = self._known.get(key)
        if found is not None:
            return found
        try:
            found = self._compile(source)
        except RequestError as fault:
            self._known.put(key, fault)
            raise
        self._known.put(key, found)
        return found

    def _compile(self, source: GrammarSource) -> CopiedGrammar:
        try:
            return self._made(source)
        except (RequestError, QueueFullError):
            raise
        except (RunError, RecursionError) as fault:
            raise RequestError(f"{source.param}: the grammar has an error: {fault}", source.param) from fault

    def _made(self, source: GrammarSource) -> CopiedGrammar:
        make, param = self._grammars, source.param
        match source.kind:
            case "json_object":
                return make.json_object(param)
            case "json_schema":
                return make.json_schema(source.value, param)
            case "regex":
                return make.regex(source.value, param)
            case "choice":
                return make.choice(source.value, param)
            case "gbnf":
                return make.gbnf(source.value, param)
            case "call":
                return self._call_grammar(source.value, param)

    def _call_grammar(self, calls: Calls, param: str) -> CopiedGrammar:
        """Returns the grammar of the arguments of one tool; with several, of objects with a name and arguments."""
        tools, other = calls.tools, calls.other
        if len(tools) == 1 and other is None:
            return self._grammars.json_schema(tools[0].schema, tools[0].param)
        form = None if other is None else other.value or {"type": "object"}
        try:
            return self._grammars.json_schema(
                schemas.of_calls([(each.name, each.schema) for each in tools], form), param
            )
        except RunError:
            for tool in tools:  # the fault is that of the first schema that is wrong alone
                self._grammars.json_schema(tool.schema, tool.param)
            if other is not None:
                self._made(other)
            raise

    def end_ids(self, chat: bool) -> frozenset[int]:
        """Returns the tokens that end an answer in a chat, or a text."""
        return self._tokenizer.answer_end_ids if chat else self._tokenizer.end_ids

    def max_tokens(self, prompt_tokens: int, asked: int | None) -> int:
        """Returns how long an answer may be: what the request asks, at most the rest of the context.

        Raises:  ContextLengthError if there is no rest.
        """
        rest = self.context_tokens - prompt_tokens
        if rest < 1:
            raise ContextLengthError(
                f"the prompt has {prompt_tokens} tokens, and the context of this server has {self.context_tokens}; "
                f"shorten the prompt to at most {self.context_tokens - 1} tokens"
            )
        return rest if asked is None else min(asked, rest)

    def generate(self, requests: Sequence[Request]) -> Generation:
        """Submits requests that run at once, and returns their events; use it in a `with` block.

        Raises:  RequestError, QueueFullError as `Scheduler.submit`.
        """
        return Generation(self.scheduler, requests)


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
