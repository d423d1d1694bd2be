"""What a request asks of the engine, and what comes back: between the protocols of HTTP and the scheduler.

A protocol (`openai_api`, `anthropic_api`, …) makes a `Request` and submits it. The scheduler calls back with one event
after the other, from its own thread: a `PromptEvent` if the request asks for it, `TokenEvent` for each new token, then
one `EndEvent`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from moe_pack.formats import RunError
from moe_pack.runtime import SamplingOptions
from moe_pack.runtime.sampling import Grammar, TokenLogprob

EndReason = Literal["stop", "length", "cancelled", "error"]
PromptLogprobs = tuple[TokenLogprob | None, ...]  # of a prompt's tokens; the first has nothing before it


class QueueFullError(RunError):
    """There are as many waiting requests as the server takes; the client may try again later."""


class RequestError(RunError):
    """A request that cannot be run as it is; the client has to change it.

    Args:    param: the name of the field of the request that is wrong; None if there is no single one.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue. `max_tokens` 0 computes the prompt alone.

    `end_ids`: the tokens that end the answer; none with `ignore_eos`.   `stop`: texts that end the answer, which do not
    belong to it.   `grammar`: what the answer has to follow; it is this request's own.   `top_logprobs`: how many of
    the likeliest tokens to report with each token; 0 reports the token alone, None nothing.   `keeps_special`: special
    tokens are text too.   `stable_tokens`: with so many of the prompt's tokens the next turn of the conversation
    probably begins; None: with all.   `prompt_logprobs`: how many of the likeliest tokens to report with each token of
    the prompt, as `top_logprobs`; the whole prompt is computed for it, and with `top_logprobs` the token that ends the
    answer is reported too.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingOptions
    max_tokens: int
    end_ids: frozenset[int]
    stop: tuple[str, ...] = ()
    grammar: Grammar | None = field(default=None, compare=False)
    top_logprobs: int | None = None
    keeps_special: bool = False
    stable_tokens: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """The log-probabilities of the prompt's tokens, each after those before it; of the first there is none."""

    logprobs: PromptLogprobs


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A new token.

    `text`: the text that it completes: whole characters, without what may be the beginning of a stop text. It may be
    empty; the pieces of all events together are the answer.   `logprob`: None unless the request asks for it.
    """

    token: int
    text: str
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """How long a request took, in seconds: `waited_s` in the queue, `prefill_s` until the first new token, `decode_s`
    for the tokens after it.
    """

    waited_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class EndEvent:
    """The end of an answer.

    `text`: what was held back until the end.   `stop`: the stop text that ended it; None if another thing did.
    `cached_tokens`: of the prompt, those that were not computed again.   `message`: what went wrong, for `error`.
    """

    reason: EndReason
    text: str
    stop: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    timings: Timings
    message: str = ""


Event = PromptEvent | TokenEvent | EndEvent


class Ticket(Protocol):
    """A submitted request."""

    def cancel(self) -> None:
        """Ends the request as soon as possible, with an `EndEvent` of reason `cancelled`; does nothing after its end.

        May be called from any thread.
        """
        ...


@dataclass(frozen=True, slots=True)
class SchedulerCounts:
    """Counts since the start, and what is going on now.

    `decode_s`, `prefill_s`: seconds of computation.   `drafted`: tokens that were verified behind another, of which
    `accepted` were right.
    """

    running: int
    waiting: int
    num_slots: int
    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    prefill_s: float
    decode_s: float
    decode_steps: int
    drafted: int = 0
    accepted: int = 0


class Scheduler(Protocol):
    """Runs requests, several at once. All methods may be called from any thread."""

    context_tokens: int

    def submit(self, request: Request, on_event: Callable[[Event], None], num_places: int = 1) -> Ticket:
        """Queues a request. `on_event` is called from the scheduler's thread and must not wait.

        Args:    num_places: that the queue needs to have: those of all requests that are submitted together for the
                 first of them, and 0 for the others.
        Raises:  RequestError if the prompt is empty, or too long for the context; QueueFullError.
        """
        ...

    def counts(self) -> SchedulerCounts:
        """Returns the counts so far."""
        ...
