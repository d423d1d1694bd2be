"""Generation: a prompt goes in, and tokens come out one at a time.

`Sampler` chooses a token from logits: the likeliest one, or one at random by temperature and nucleus (top-p) with a
seed. `measure` times the generation after a prompt of random tokens; only its length ends it.
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

# Scores whose float64 bits differ only in the last 46 are in one bucket: 64 buckets for each power of two.
_BUCKET_BITS = 46


class Sampler:
    """Chooses tokens; the same seed and logits give the same tokens on every device.

    Args:    temperature: 0 always takes the likeliest token.   top_p: draws come from the smallest set of tokens with
             at least this probability.
    Raises:  RunError if one of them is out of range.
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
        """Returns a token; with temperature 0 the lowest of the likeliest.

        A draw adds up probabilities in the vocabulary's order, so that the whole vocabulary need not be sorted.
        Args:    logits: float32 [vocabulary].
        Raises:  RunError if some of them are NaN or infinite.
        """
        logits = logits.cpu()
        least, most = torch.aminmax(logits)
        if not (torch.isfinite(least) and torch.isfinite(most)):
            raise RunError(
                "the model's logits are NaN or infinite; its weights overflow or were damaged before they were packed"
            )
        if self.temperature == 0:
            return int(logits.argmax())  # the first of equals
        scores = logits.to(torch.float64).sub_(most).div_(self.temperature).exp_()
        tokens = None if self._top_p == 1 else nucleus(scores, self._top_p)
        bounds = (scores if tokens is None else scores[tokens]).cumsum(0)
        point = torch.rand(1, generator=self._generator, dtype=torch.float64) * bounds[-1]
        place = min(int(torch.searchsorted(bounds, point, right=True)), len(bounds) - 1)
        return place if tokens is None else int(tokens[place])


def nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Returns the smallest set of tokens whose share of all scores is `top_p` or more: int64 [n], in rising order.

    The set has the likeliest tokens, of equally likely ones the lowest. Scores are added up in buckets of similar size,
    so that only the bucket in which the set ends has to be sorted.
    Args:    scores: float64 [vocabulary], not negative, some positive.   top_p: above 0, at most 1.
    """
    total = scores.sum()
    enough = top_p * total
    # All tokens below this score have together less than the set leaves out.
    tokens = (scores >= (1 - top_p) * total / len(scores)).nonzero()[:, 0]
    scores = scores[tokens]
    buckets = scores.view(torch.int64) >> _BUCKET_BITS  # the bits of a positive number rise with the number
    buckets -= buckets.min()
    largest_first = torch.bincount(buckets, weights=scores).flip(0).cumsum(0)
    place = min(int((largest_first < enough).sum()), len(largest_first) - 1)
    last_bucket = len(largest_first) - 1 - place
    in_last = (buckets == last_bucket).nonzero()[:, 0]
    ranked, order = scores[in_last].sort(descending=True, stable=True)
    before = ranked.cumsum(0) - ranked + (largest_first[place - 1] if place else 0.0)
    is_kept = buckets > last_bucket
    is_kept[in_last[order[before < enough]]] = True
    return tokens[is_kept]


def context_for(num_prompt_tokens: int, max_tokens: int, max_positions: int, has_encoder: bool = False) -> int:
    """Returns the context to allocate: for prompt and continuation, at most the model's positions.

    Args:    has_encoder: whether an encoder reads the prompt; then the answer's positions begin at 0, and the longer of
             the two counts.
    Raises:  RunError if the prompt leaves no position for a new token.
    """
    if num_prompt_tokens >= max_positions:
        raise RunError(
            f"--prompt has {num_prompt_tokens} tokens, and this model's context is {max_positions}; "
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
    """Yields new tokens until one ends the text, there are `max_tokens`, or the context is full; not the end token.

    Args:    prompt_ids: at least one token; appended to the decoder's sequence, or with an encoder, a new text.
    """
    logits = decoder.begin(prompt_ids)
    for count in range(1, max_tokens + 1):
        token = sampler.choose(logits)
        if token in end_ids:
            return
        yield token
        if count == max_tokens or decoder.cache.num_tokens == decoder.cache.context_tokens:
            return
        logits = decoder.next_logits([token])


@dataclass(frozen=True, slots=True)
class BenchTimes:
    """Seconds of a run: of the prompt with the first new token, and of each token after it."""

    num_prompt_tokens: int
    prefill_s: float
    tokens_s: tuple[float, ...]

    @property
    def num_tokens(self) -> int:
        """Number of new tokens."""
        return 1 + len(self.tokens_s)

    @property
    def decode_s(self) -> float:
        """Seconds of all tokens after the first."""
        return sum(self.tokens_s)

    @property
    def prefill_rate(self) -> float:
        """Tokens of the prompt, a second."""
        return self.num_prompt_tokens / self.prefill_s

    @property
    def decode_rate(self) -> float | None:
        """Tokens after the first, a second; None if there are none."""
        return len(self.tokens_s) / self.decode_s if self.tokens_s else None

    @property
    def median_token_ms(self) -> float | None:
        """The median time of a token after the first; None if there are none."""
        return 1000 * median(self.tokens_s) if self.tokens_s else None


def random_prompt(num_tokens: int, vocab_size: int, max_positions: int, seed: int) -> list[int]:
    """Returns tokens drawn at random from the whole vocabulary.

    Raises:  RunError if they leave no position for a new token.
    """
    if num_tokens >= max_positions:
        raise RunError(
            f"--prompt-tokens: found {num_tokens}, this model's context is {max_positions}; "
            f"give at most {max_positions - 1}"
        )
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()


def measure(decoder: Decoder | EncoderDecoder, prompt_ids: list[int], sampler: Sampler, max_tokens: int) -> BenchTimes:
    """Times a run, which ends after `max_tokens` or when the context is full; no token ends it."""
    start = time.perf_counter()
    moments = [time.perf_counter() for _ in generate(decoder, prompt_ids, sampler, max_tokens, frozenset())]
    steps = tuple(after - before for before, after in pairwise(moments))
    return BenchTimes(len(prompt_ids), moments[0] - start, steps)


def peak_resident_bytes() -> int:
    """Returns the peak memory of this process, including mapped files."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
