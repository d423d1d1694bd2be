"""Choosing tokens from logits: the sampler, log-probabilities, and grammars; options.py has the options.

A choice goes through these steps. A step is left out if its option has the value that changes nothing.

1. the grammar's mask
2. `logit_bias`
3. the penalties: repetition, then frequency and presence
4. `temperature`; 0 takes the likeliest token, without the steps below
5. `top_k`
6. `top_p`, of the probabilities that `top_k` left
7. `min_p`
8. the draw

Sources: vLLM's documentation of `vllm.v1.sample.sampler` for steps 1 to 4, and for log-probabilities from logits before
any option; llama.cpp's server documentation for the order of 5 to 7. llama.cpp divides by the temperature after them,
and vLLM cuts by `min_p` before them. Repetition penalty: CTRL (1909.05858), section 4.1.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from moe_pack.formats import RunError
from moe_pack.runtime.engine.options import SamplingOptions, check_sampling
from moe_pack.runtime.model import choosing

# Scores whose float64 bits differ only in the last 46 are in one bucket: 64 buckets for each power of two.
_BUCKET_BITS = 46
_INFINITE = float("inf")
NOT_FINITE = "the model's logits are NaN or infinite; its weights overflow or were damaged before they were packed"
_FAULTS = {
    choosing.NOT_FINITE: NOT_FINITE,
    choosing.NONE_LEFT: "no token is left to choose; grammar and logit_bias forbid all of them: relax one",
}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token, before any sampling option."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # of the likeliest tokens, best first
    rank: int | None = None  # 1 for the likeliest token; None for tokens of an answer


class Grammar(Protocol):
    """The grammar of an answer, at the place that it has reached."""

    def allow(self, logits: Tensor) -> Tensor:
        """Returns logits float32 [vocabulary] with minus infinity for every token that may not come next."""

    def accept(self, token: int) -> None:
        """Goes on by a token of the answer."""


class Sampler:
    """Chooses the tokens of one answer; the same options, seed and logits give the same tokens on every device.

    Args:    prompt_ids: the prompt's tokens, for the repetition penalty.   grammar: gets each chosen token.
    Raises:  RunError if an option is out of range.
    """

    def __init__(
        self, options: SamplingOptions, prompt_ids: Sequence[int] = (), grammar: Grammar | None = None
    ) -> None:
        check_sampling(options)
        self.temperature = options.temperature
        self.seed = secrets.randbits(32) if options.seed is None else options.seed
        self._options, self._grammar = options, grammar
        self._generator = torch.Generator().manual_seed(self.seed)
        self._occurrences: _Occurrences | None = None
        repeats = options.repetition_penalty != 1
        if repeats or options.frequency_penalty or options.presence_penalty:
            self._occurrences = _Occurrences(prompt_ids if repeats else ())
        self._bias: tuple[Tensor, Tensor] | None = None
        if options.logit_bias:
            tokens, biases = zip(*options.logit_bias, strict=True)
            self._bias = torch.tensor(tokens), torch.tensor(biases, dtype=torch.float32)

    def choose(self, logits: Tensor) -> int:
        """Returns a token; with temperature 0 the lowest of the likeliest.

        A draw adds up probabilities in the vocabulary's order, so that the whole vocabulary need not be sorted.
        Args:    logits: float32 [vocabulary].
        Raises:  RunError if some of them are NaN or infinite, if grammar and `logit_bias` leave no token, or if
                 `logit_bias` names a token that is not in the vocabulary.
        """
        logits = logits.cpu()
        least, most = torch.aminmax(logits)
        if not (torch.isfinite(least) and torch.isfinite(most)):
            raise RunError(_FAULTS[choosing.NOT_FINITE])
        changed = self._changed(logits)
        if changed is not logits:
            most = changed.max()
            if most == -_INFINITE:
                raise RunError(_FAULTS[choosing.NONE_LEFT])
        # numpy's argmax returns the first of equals, as torch's does, in a tenth of the time.
        token = int(changed.numpy().argmax()) if self.temperature == 0 else self._draw(changed, most)
        self.accept(token)
        return token

    def accept(self, token: int) -> None:
        """Goes on by a token that was chosen; raises RunError if it is `NOT_FINITE` or `NONE_LEFT`."""
        if token < 0:
            raise RunError(_FAULTS[token])
        if self._occurrences is not None:
            self._occurrences.add(token)
        if self._grammar is not None:
            self._grammar.accept(token)

    def choice(self) -> choosing.Choice | None:
        """Returns how tokens are chosen, for a decoder that does it; None if a grammar decides which may come."""
        options, occurrences = self._options, self._occurrences
        if self._grammar is not None:
            return None
        return choosing.Choice(
            options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty,
            options.frequency_penalty, options.presence_penalty, self._bias,
            None if occurrences is None else occurrences.found(), self._uniform,
        )  # fmt: skip

    @staticmethod
    def logprobs(logits: Tensor, token: int, top: int) -> TokenLogprob:
        """Returns a token's log-probability, log(exp(logit) / sum(exp(logits))), and those of the `top` likeliest.

        Args:    logits: float32 [vocabulary], as the model gives them.   top: of equally likely tokens the lower comes
                 first; at most the vocabulary.
        """
        logits = logits.cpu().to(torch.float64)
        scale = torch.logsumexp(logits, 0)
        places = _likeliest(logits, min(top, len(logits))) if top else torch.empty(0, dtype=torch.int64)
        ranked, order = logits[places].sort(descending=True, stable=True)
        best = zip(places[order].tolist(), (ranked - scale).tolist(), strict=True)
        return TokenLogprob(token, float(logits[token] - scale), tuple(best))

    def _uniform(self) -> float:
        """Returns the random number of the next draw; 0 if nothing is drawn."""
        if self.temperature == 0:
            return 0.0
        return float(torch.rand(1, generator=self._generator, dtype=torch.float64))

    def _changed(self, logits: Tensor) -> Tensor:
        changed = logits if self._grammar is None else self._grammar.allow(logits)
        if self._bias is None and self._occurrences is None:
            return changed
        changed = changed.clone()
        if self._bias is not None:
            tokens, biases = self._bias
            last = int(tokens.max())
            if last >= len(changed):
                raise RunError(f"logit_bias: the vocabulary has {len(changed)} tokens, and none is {last}; remove it")
            changed.index_add_(0, tokens, biases)
            changed[tokens] = _without_overflow(changed[tokens])
        if self._occurrences is not None:
            self._occurrences.penalize(changed, self._options)
        return changed

    def _draw(self, logits: Tensor, most: Tensor) -> int:
        options = self._options
        tokens: Tensor | None = None  # all of them
        if self._grammar is not None or self._bias is not None:
            # Few tokens are left. The exponential of minus infinity is also slow: six times that of a number.
            tokens = _places(logits > -_INFINITE)
        if 0 < options.top_k < (len(logits) if tokens is None else len(tokens)):
            kept = _likeliest(logits if tokens is None else logits[tokens], options.top_k)
            tokens = kept if tokens is None else tokens[kept]
        scores = (logits if tokens is None else logits[tokens]).to(torch.float64)
        scores = scores.sub_(most).div_(self.temperature).exp_()
        if options.top_p < 1:
            kept = nucleus(scores, options.top_p)
            tokens, scores = kept if tokens is None else tokens[kept], scores[kept]
        if options.min_p:
            kept = _places(scores >= options.min_p)  # the likeliest token's score is 1
            tokens, scores = kept if tokens is None else tokens[kept], scores[kept]
        bounds = scores.cumsum(0)
        point = (self._uniform() * bounds[-1])[None]
        place = int(torch.searchsorted(bounds, point, right=True))
        if place == len(bounds):  # by rounding
            place = int(_places(scores > 0)[-1])
        return place if tokens is None else int(tokens[place])


def logprobs_of_rows(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Returns `Sampler.logprobs` for a token after each row of logits float32 [n, vocabulary], and its rank.

    Memory for two copies of 8 bytes a value is needed.
    Raises:  RunError if some of the logits are NaN or infinite.
    """
    if not bool(torch.isfinite(logits).all()):
        raise RunError(NOT_FINITE)
    own = torch.tensor(list(tokens), device=logits.device)[:, None]
    ranks = (logits > logits.gather(1, own)).sum(1) + 1
    places, values = _likeliest_of_rows(logits, min(top, logits.shape[1]))
    precise = logits.to(torch.float64)
    scales = torch.logsumexp(precise, 1, keepdim=True)
    found = (precise.gather(1, own) - scales)[:, 0].tolist()
    best = zip(places.tolist(), (values.to(torch.float64) - scales).tolist(), strict=True)
    return [
        TokenLogprob(token, logprob, tuple(zip(*each, strict=True)), rank)
        for token, logprob, each, rank in zip(tokens, found, best, ranks.tolist(), strict=True)
    ]


def _likeliest_of_rows(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the places of the `count` largest values of each row, best first, of equals the lowest; and values."""
    if not count:
        return logits.new_empty((len(logits), 0), dtype=torch.int64), logits[:, :0]
    values, places = torch.topk(logits, count)
    # topk orders equal values in no way, and takes any of those that equal the least one.
    has_equals = (logits >= values[:, -1:]).sum(1) > count
    has_equals |= (values[:, 1:] == values[:, :-1]).any(1)
    for row in has_equals.nonzero()[:, 0].tolist():
        own = logits[row].cpu()
        kept = _likeliest(own, count)
        ranked, order = own[kept].sort(descending=True, stable=True)
        values[row], places[row] = ranked.to(values.device), kept[order].to(places.device)
    return places, values


class _Occurrences:
    """The tokens that occurred, each once, and how often each occurred in the answer."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        distinct = dict.fromkeys(prompt_ids)
        self._places = {token: place for place, token in enumerate(distinct)}
        self._tokens = torch.tensor(list(distinct), dtype=torch.int64)
        self._counts = torch.zeros(len(distinct))

    def add(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            self._tokens = torch.cat((self._tokens, torch.tensor([token])))
            self._counts = torch.cat((self._counts, torch.zeros(1)))
        self._counts[place] += 1

    def found(self) -> tuple[Tensor, Tensor]:
        return self._tokens, self._counts

    def penalize(self, logits: Tensor, options: SamplingOptions) -> None:
        values, penalty = logits[self._tokens], options.repetition_penalty
        if penalty != 1:
            values = torch.where(values > 0, values / penalty, values * penalty)
        values -= options.frequency_penalty * self._counts + options.presence_penalty * (self._counts > 0)
        logits[self._tokens] = _without_overflow(values)


def _without_overflow(values: Tensor) -> Tensor:
    """Replaces infinity by the largest number; minus infinity stays, because it forbids a token."""
    return values.clamp_(max=torch.finfo(values.dtype).max)


def _places(chosen: Tensor) -> Tensor:
    """Returns the true places of a bool tensor [n]; numpy takes a tenth of torch's time for it."""
    return torch.from_numpy(np.flatnonzero(chosen.numpy()))


def _likeliest(values: Tensor, count: int) -> Tensor:
    """Returns the places of the `count` largest values [n], of equals the lowest: int64 [count], in rising order."""
    least = torch.topk(values, count, sorted=False).values.min()
    places = _places(values >= least)
    surplus = len(places) - count
    if surplus:  # several equal the least one, and the last of them are too many
        is_kept = torch.ones(len(places), dtype=torch.bool)
        is_kept[_places(values[places] == least)[-surplus:]] = False
        places = places[is_kept]
    return places


def nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Returns the smallest set of tokens whose share of all scores is `top_p` or more: int64 [n], in rising order.

    The set has the likeliest tokens, of equally likely ones the lowest. Scores are added up in buckets of similar size,
    so that only the bucket in which the set ends has to be sorted.
    Args:    scores: float64 [vocabulary], not negative, some positive.   top_p: above 0, at most 1.
    """
    total = scores.sum()
    enough = top_p * total
    # All tokens below this score have together less than the set leaves out.
    tokens = _places(scores >= (1 - top_p) * total / len(scores))
    scores = scores[tokens]
    buckets = scores.view(torch.int64) >> _BUCKET_BITS  # the bits of a positive number rise with the number
    buckets -= buckets.min()
    largest_first = torch.bincount(buckets, weights=scores).flip(0).cumsum(0)
    place = min(int((largest_first < enough).sum()), len(largest_first) - 1)
    last_bucket = len(largest_first) - 1 - place
    in_last = _places(buckets == last_bucket)
    ranked, order = scores[in_last].sort(descending=True, stable=True)
    before = ranked.cumsum(0) - ranked + (largest_first[place - 1] if place else 0.0)
    is_kept = buckets > last_bucket
    is_kept[in_last[order[before < enough]]] = True
    return tokens[is_kept]
