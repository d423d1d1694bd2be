"""From logits to a token: greedy, or temperature and nucleus (top-p) with a seed.

Generation: prompt in, tokens out, one at a time.

How fast a pack runs: a prompt of random tokens, then a continuation that nothing but its length ends.
"""

import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

from moe_pack.formats import RunError
from moe_pack.runtime.model import Decoder, EncoderDecoder

# Scores whose float64 bits differ in the last 46 alone are in one bucket: 64 buckets for each power of two.
_BUCKET_BITS = 46


class Sampler:
    """Chooses tokens; the same seed and logits give the same tokens on every device.

    Args:    temperature: 0 is greedy.   top_p: the smallest set of tokens with at least this probability is kept.
    Raises:  RunError if these are out of range.
    """

    def __init__(self, temperature: float, top_p: float, seed: int) -> None:
        if not 0 <= temperature < float("inf"):
            raise RunError(f"--temperature: found {temperature}, expected a number from 0 up")
        if not 0 < top_p <= 1:
            raise RunError(f"--top-p: found {top_p}, expected more than 0 and at most 1")
        self.temperature, self.seed = temperature, seed
        self._top_p = top_p
        self._generator = torch.Generator().manual_seed(seed)

    def choose(self, logits: Tensor) -> int:
        """Returns a token, the lowest among equals where greedy.

        Where a draw falls is found in the vocabulary's order, which needs sums of probabilities but no sorting.
        Args:    logits: float32 [vocabulary].
        Raises:  RunError if they are not all numbers.
        """
        logits = logits.cpu()
        least, most = torch.aminmax(logits)
        if not (torch.isfinite(least) and torch.isfinite(most)):
            raise RunError("the model's logits are not numbers; its weights overflow or were broken before packing")
        if self.temperature == 0:
            return int(logits.argmax())  # the first of equals
        scores = logits.to(torch.float64).sub_(most).div_(self.temperature).exp_()
        tokens = None if self._top_p == 1 else nucleus(scores, self._top_p)
        bounds = (scores if tokens is None else scores[tokens]).cumsum(0)
        point = torch.rand(1, generator=self._generator, dtype=torch.float64) * bounds[-1]
        place = min(int(torch.searchsorted(bounds, point, right=True)), len(bounds) - 1)
        return place if tokens is None else int(tokens[place])


def nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Returns the smallest set of tokens whose share of all scores is `top_p` or more: int64 [n], rising.

    The likeliest are kept, among equals those with the lowest numbers. Scores are added up in buckets of like size, so
    that only the bucket in which the set ends has to be sorted.
    Args:    scores: float64 [vocabulary], not negative, some positive.   top_p: above 0, at most 1.
    """
    total = scores.sum()
    wanted = top_p * total
    # All tokens below this together are less than what the set leaves out.
    tokens = (scores >= (1 - top_p) * total / len(scores)).nonzero()[:, 0]
    scores = scores[tokens]
    buckets = scores.view(torch.int64) >> _BUCKET_BITS  # the bits of positive numbers rise with their size
    buckets -= buckets.min()
    largest_first = torch.bincount(buckets, weights=scores).flip(0).cumsum(0)
    place = min(int((largest_first < wanted).sum()), len(largest_first) - 1)
    last_bucket = len(largest_first) - 1 - place
    in_last = (buckets == last_bucket).nonzero()[:, 0]
    ranked, order = scores[in_last].sort(descending=True, stable=True)
    before = ranked.cumsum(0) - ranked + (largest_first[place - 1] if place else 0.0)
    is_kept = buckets > last_bucket
    is_kept[in_last[order[before < wanted]]] = True
    return tokens[is_kept]


def context_for(num_prompt_tokens: int, max_tokens: int, max_positions: int, has_encoder: bool = False) -> int:
    """The context to allocate: prompt and continuation, as far as the model's positions go.

    Args:    has_encoder: the prompt is read by an encoder, and the answer's positions begin anew: the longer of both.
    Raises:  RunError if the prompt leaves no position for a new token.
    """
    if num_prompt_tokens >= max_positions:
        raise RunError(
            f"--prompt: has {num_prompt_tokens} tokens, this model's context is {max_positions}; "
            f"shorten it to at most {max_positions - 1}"
        )
    needed = max(num_prompt_tokens, max_tokens) if has_encoder else num_prompt_tokens + max_tokens
    return min(needed, max_positions)


def generate(
    decoder: Decoder | EncoderDecoder,
    prompt_ids: list[int],
    sampler: Sampler,
    max_tokens: int,
    end_ids: frozenset[int],
) -> Iterator[int]:
    """New tokens until one ends the text, `max_tokens` are made, or the context is full; the end token is not given.

    Args:    prompt_ids: at least one token, appended to what the decoder already holds; with an encoder, a new text.
    """
    logits = decoder.begin(prompt_ids)
    for made in range(1, max_tokens + 1):
        token = sampler.choose(logits)
        if token in end_ids:
            return
        yield token
        if made == max_tokens or decoder.cache.num_tokens == decoder.cache.context_tokens:
            return
        logits = decoder.next_logits([token])


@dataclass(frozen=True, slots=True)
class BenchTimes:
    """Seconds of a run: of the prompt and the first token, and of each token after it."""

    num_prompt_tokens: int
    prefill_s: float
    tokens_s: tuple[float, ...]

    @property
    def num_tokens(self) -> int:
        """How many tokens were made."""
        return 1 + len(self.tokens_s)

    @property
    def decode_s(self) -> float:
        """Seconds of all tokens after the first."""
        return sum(self.tokens_s)

    @property
    def prefill_rate(self) -> float:
        """Tokens of the prompt a second."""
        return self.num_prompt_tokens / self.prefill_s

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second after the first; None if there are none."""
        return len(self.tokens_s) / self.decode_s if self.tokens_s else None

    @property
    def median_token_ms(self) -> float | None:
        """The median time of a token after the first; None if there are none."""
        return 1000 * median(self.tokens_s) if self.tokens_s else None


def random_prompt(num_tokens: int, vocab_size: int, max_positions: int, seed: int) -> list[int]:
    """Tokens at random, all alike probable.

    Raises:  RunError if they leave no position for a new one.
    """
    if num_tokens >= max_positions:
        raise RunError(
            f"--prompt-tokens: found {num_tokens}, this model's context is {max_positions}; "
            f"give at most {max_positions - 1}"
        )
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()


def measure(decoder: Decoder | EncoderDecoder, prompt_ids: list[int], sampler: Sampler, max_tokens: int) -> BenchTimes:
    """Times a run; no token ends it, only `max_tokens` or a full context."""
    start = time.perf_counter()
    moments = [time.perf_counter() for _ in generate(decoder, prompt_ids, sampler, max_tokens, frozenset())]
    steps = tuple(after - before for before, after in pairwise(moments))
    return BenchTimes(len(prompt_ids), moments[0] - start, steps)


def peak_resident_bytes() -> int:
    """What of this process was in memory at most, mapped files too."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
