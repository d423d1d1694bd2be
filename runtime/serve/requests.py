"""Requests for the scheduler, and the events that it answers with.

A protocol (`openai_api`, `anthropic_api`, …) makes a `Request` and submits it. The scheduler calls back from its own
thread: with a `PromptEvent` if the request asks for it, a `TokenEvent` for each new token, then one `EndEvent`.
"""

from dataclasses import dataclass, field
from typing import Literal

from moe_pack.formats import RunError
from moe_pack.runtime import SamplingOptions
from moe_pack.runtime.sampling import Grammar, TokenLogprob

EndReason = Literal["stop", "length", "cancelled", "error", "unready"]  # unready: it has not begun, and may be repeated
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
    """A prompt to continue."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingOptions
    max_tokens: int  # 0 computes the prompt alone
    end_ids: frozenset[int]  # end the answer; none with `ignore_eos`
    stop: tuple[str, ...] = ()  # texts that end the answer and are not part of it
    grammar: Grammar | None = field(default=None, compare=False)  # of this request alone
    top_logprobs: int | None = None  # so many likeliest tokens are reported with each token; None: not even its own
    keeps_special: bool = False  # special tokens are text too
    stable_tokens: int | None = None  # the conversation's next turn probably begins with so many; None: with all
    # As `top_logprobs` for the tokens of the prompt, which is computed whole. With both, the token that ends the
    # answer is reported too.
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """The log-probabilities of the prompt's tokens."""

    logprobs: PromptLogprobs


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A new token."""

    token: int
    text: str  # whole characters that it completes, without a possible beginning of a stop text; may be empty
    logprob: TokenLogprob | None = None  # if the request asks for it


@dataclass(frozen=True, slots=True)
class Timings:
    """How long the parts of a request took, in seconds."""

    prefill_s: float  # until the first new token
    decode_s: float  # for the tokens after it


@dataclass(frozen=True, slots=True)
class EndEvent:
    """The end of an answer."""

    reason: EndReason
    text: str  # was held back until the end
    stop: str | None  # the stop text that ended the answer, if one did
    prompt_tokens: int
    cached_tokens: int  # tokens of the prompt that were not computed again
    completion_tokens: int
    timings: Timings
    message: str = ""  # of an `error`, or `unready`


Event = PromptEvent | TokenEvent | EndEvent


@dataclass(slots=True)
class SchedulerCounts:
    """Counts since the start, and the requests at this moment."""

    num_slots: int
    running: int = 0
    waiting: int = 0
    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prefill_s: float = 0.0  # seconds of computation
    decode_s: float = 0.0
    decode_steps: int = 0
    drafted: int = 0  # tokens that were verified behind another one
    accepted: int = 0  # those that were right
