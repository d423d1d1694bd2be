"""How tokens are chosen from logits: options, log-probabilities, and grammars."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How to choose tokens; the defaults are those of `moe-run`, and every other one changes nothing.

    `temperature`: 0 always takes the likeliest token.   `top_p`, `top_k`, `min_p`: draw from the smallest set of tokens
    with this probability, from so many likeliest tokens, from tokens with at least this share of the likeliest one's
    probability.   `repetition_penalty`: divides positive logits, and multiplies negative ones, of tokens of prompt and
    answer.   `frequency_penalty`, `presence_penalty`: are subtracted from the logit of a token of the answer, for each
    time it occurred, and once.   `logit_bias`: pairs of a token and what is added to its logit.   `seed`: repeats a
    draw; None: every request differs.
    """

    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a chosen token, and of the likeliest ones, best first, before any sampling option."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Grammar(Protocol):
    """What an answer has to follow, at the place that it has reached."""

    def allow(self, logits: Tensor) -> Tensor:
        """Returns logits float32 [vocabulary] with minus infinity for every token that may not come next."""
        ...

    def accept(self, token: int) -> None:
        """Goes on by a token of the answer."""
        ...
