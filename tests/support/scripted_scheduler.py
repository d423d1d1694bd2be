"""A scheduler that plays scripted tokens, and a service around it: for tests of the protocols without a model.

A token is a character: its number is the character's code, below 256, so that every prompt can be read in tokens. An
answer's script is the text that the model says; several requests take scripts in turn.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from moe_pack.formats import RunError
from moe_pack.runtime import SamplingOptions
from moe_pack.runtime.sampling import TokenLogprob
from moe_pack.runtime.serve.parsers import ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from moe_pack.runtime.serve.requests import (
    EndEvent,
    EndReason,
    Event,
    PromptEvent,
    QueueFullError,
    Request,
    RequestError,
    SchedulerCounts,
    Timings,
    TokenEvent,
)
from moe_pack.runtime.serve.service import ModelFacts, Service
from support.waiting import HANG_S

VOCABULARY = 256
CONTEXT_TOKENS = 2048


@dataclass
class Script:
    """What the model says. `error`: the engine fails after the text.   `cached`: tokens of the prompt in a cache."""

    text: str = "Hello there!"
    error: str = ""
    cached: int = 0


@dataclass(eq=False)
class PlayedTicket:
    """A request that is being played."""

    cancelled: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.cancelled.set()


class ScriptedScheduler:
    """Plays scripts, each request in a thread of its own, a token every `delay_s`.

    The last script is repeated. `most`: so many requests at once; more are refused.   `speaks`: while it is cleared, no
    token comes.
    """

    context_tokens = CONTEXT_TOKENS
    failure: str | None = None
    memory = None  # it runs on the CPU

    def __init__(self, *scripts: Script, delay_s: float = 0.0, most: int = 64) -> None:
        self.scripts = list(scripts) or [Script()]
        self.delay_s, self.most = delay_s, most
        self.requests: list[Request] = []
        self.tickets: list[PlayedTicket] = []
        self.generated = 0
        self.speaks = threading.Event()
        self.speaks.set()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def submit(self, request: Request, on_event: Callable[[Event], None], num_places: int = 1) -> PlayedTicket:
        with self._lock:
            if sum(not ticket.ended.is_set() for ticket in self.tickets) >= self.most:
                raise QueueFullError("the queue is full; try again later")
            script = self.scripts[min(len(self.requests), len(self.scripts) - 1)]
            ticket = PlayedTicket()
            self.requests.append(request)
            self.tickets.append(ticket)
            thread = threading.Thread(target=self._play, args=(request, script, ticket, on_event))
            self._threads.append(thread)
            thread.start()  # before `close` can wait for it
        return ticket

    def counts(self) -> SchedulerCounts:
        running = sum(not ticket.ended.is_set() for ticket in self.tickets)
        tokens = sum(len(request.prompt_ids) for request in self.requests)
        return SchedulerCounts(self.most, running, 0, len(self.requests), tokens, 0, self.generated, 0.5, 1.5, 7, 5, 4)

    def close(self) -> None:
        """Ends all that still runs."""
        with self._lock:
            tickets, threads = list(self.tickets), list(self._threads)
        for ticket in tickets:
            ticket.cancel()
        self.speaks.set()
        for thread in threads:
            thread.join(HANG_S)

    def _play(self, request: Request, script: Script, ticket: PlayedTicket, on_event: Callable[[Event], None]) -> None:
        text, stop = script.text, None
        for one in request.stop:
            if one in text:
                text, stop = text[: text.index(one)], one
        count, reason = 0, _reason(script, request, text)
        if request.prompt_logprobs is not None:
            on_event(PromptEvent((None, *(_scored(token, request) for token in request.prompt_ids[1:]))))
        for character in text[: request.max_tokens]:
            if self.delay_s:
                time.sleep(self.delay_s)
            self.speaks.wait()
            if ticket.cancelled.is_set():
                reason = "cancelled"
                break
            count += 1
            on_event(TokenEvent(ord(character), character, _logprob(character, request)))
        cached = script.cached if request.prompt_logprobs is None else 0
        with self._lock:
            self.generated += count
        ticket.ended.set()
        timings = Timings(0.25, 0.5)
        on_event(EndEvent(reason, "", stop, len(request.prompt_ids), cached, count, timings, message=script.error))


def _reason(script: Script, request: Request, text: str) -> EndReason:
    if script.error:
        return "error"
    return "length" if len(text) > request.max_tokens else "stop"


def _logprob(character: str, request: Request) -> TokenLogprob | None:
    if request.top_logprobs is None:
        return None
    top = tuple((ord(character) + i, -0.5 - i) for i in range(request.top_logprobs))
    return TokenLogprob(ord(character), -0.5, top)


def _scored(token: int, request: Request) -> TokenLogprob:
    """A token of a prompt: the third likeliest, behind the two characters after it."""
    top = tuple((token + 2 - i, -0.25 - i) for i in range(request.prompt_logprobs or 0))
    return TokenLogprob(token, -2.25, top, 3)


class Characters:
    """A tokenizer whose tokens are characters."""

    end_ids = frozenset({0})
    answer_end_ids = frozenset({0, 1})
    vocab_size = VOCABULARY
    most_bytes_per_token = 4  # of any character

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        return [ord(character) % VOCABULARY for character in text]


class LinesTemplate:
    """Writes a message a line, then the tools' names and the variables, so that a test can read them."""

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, object] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        if any(message["content"] == "REFUSE" for message in messages):
            raise RunError("the model's chat template failed (it refuses)")
        lines = [f"{message['role']}: {_written(message)}" for message in messages]
        lines += [f"tool: {tool['function']['name']}" for tool in tools or ()]
        lines += [f"{name}={value}" for name, value in (extra or {}).items()]
        ending = "\nassistant: " if add_generation_prompt else ""
        return "\n".join(lines) + ending


def _written(message: Mapping[str, object]) -> str:
    more = {name: value for name, value in message.items() if name not in ("role", "content")}
    return f"{message['content']} {more}" if more else str(message["content"])


class BracketParser:
    """Reads `[think]…[/think]` as reasoning and `[call NAME]…[/call]` as a tool call; the rest is content."""

    def __init__(self) -> None:
        self._text = ""
        self._state = "content"
        self._calls = 0

    def push(self, text: str) -> list[Delta]:
        self._text += text
        found: list[Delta] = []
        while self._text:
            start, end = self._text.find("["), self._text.find("]")
            if start != 0:
                plain, self._text = (self._text, "") if start < 0 else (self._text[:start], self._text[start:])
                found.append(self._plain(plain))
            elif end < 0:
                break
            else:
                mark, self._text = self._text[1:end], self._text[end + 1 :]
                found += self._marked(mark)
        return found

    def finish(self) -> list[Delta]:
        rest, self._text = self._text, ""
        return [self._plain(rest)] if rest else []

    def _plain(self, text: str) -> Delta:
        if self._state == "call":
            return ToolCallDelta(self._calls - 1, None, None, text)
        return ReasoningDelta(text) if self._state == "think" else ContentDelta(text)

    def _marked(self, mark: str) -> list[Delta]:
        if mark.startswith("/"):
            self._state = "content"
            return []
        self._state, _, name = mark.partition(" ")
        if self._state != "call":
            return []
        self._calls += 1
        return [ToolCallDelta(self._calls - 1, f"call_{self._calls}", name, "")]


@dataclass
class NamedGrammar:
    """A grammar that allows everything, and says what it was made of."""

    source: object

    def copy(self) -> "NamedGrammar":
        return replace(self)

    def allow(self, logits: Tensor) -> Tensor:
        return logits

    def accept(self, token: int) -> None:
        pass


class NamedGrammars:
    """Compiles nothing; refuses what says `wrong`."""

    def token_bytes(self, token: int) -> bytes:
        return bytes([token % VOCABULARY])

    def json_schema(self, schema: Mapping[str, Any], param: str) -> NamedGrammar:
        if "'type': 'wrong'" in str(schema):
            raise RequestError(f"{param}: there is no type 'wrong'", param)
        return NamedGrammar(schema)

    def regex(self, pattern: str, param: str) -> NamedGrammar:
        return NamedGrammar(f"/{pattern}/")

    def choice(self, texts: Sequence[str], param: str) -> NamedGrammar:
        return NamedGrammar(list(texts))

    def gbnf(self, text: str, param: str) -> NamedGrammar:
        if "::=" not in text:
            raise RequestError(f"{param}: line 1 has no ::=", param)
        return NamedGrammar(text)


FACTS = ModelFacts("demo-moe", "packed", 1_700_000_000, SamplingOptions(temperature=1.0, top_p=1.0), eos_token="$")


def scripted_service(
    scheduler: ScriptedScheduler, has_template: bool = True, template: Any = None, grammars: Any = None, **facts: Any
) -> Service:
    """Returns a service of a model that says what the scheduler's scripts say."""
    played: Any = scheduler
    characters: Any = Characters()
    written: Any = (template or LinesTemplate()) if has_template else None
    grammars = grammars or NamedGrammars()
    return Service(replace(FACTS, **facts), played, characters, written, lambda *_: BracketParser(), grammars)
