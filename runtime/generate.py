"""Generation: a prompt goes in, and tokens come out one at a time. `measure` times it."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_pack.formats import RunError
from moe_pack.runtime import model
from moe_pack.runtime.model import choosing
from moe_pack.runtime.sampling import Sampler

if TYPE_CHECKING:
    from moe_pack.runtime.drafts import Drafts

USUAL_CONTEXT = 4096  # tokens of prompt and answers, where the model has as many positions


def context_for(num_prompt_tokens: int, max_tokens: int, max_positions: int, has_encoder: bool = False) -> int:
    """Returns the context to allocate: for prompt and continuation, at most the model's positions.

    Args:    has_encoder: an encoder reads the prompt; the answer's positions then begin at 0, and the longer of the two
             counts.
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
    decoder: model.Decoder | model.EncoderDecoder,
    prompt_ids: list[int],
    sampler: Sampler,
    max_tokens: int,
    end_ids: frozenset[int],
    drafts: Drafts | None = None,
) -> Iterator[int]:
    """Yields new tokens until one ends the text, there are `max_tokens`, or the context is full; not the end token.

    Args:    prompt_ids: at least one token, after the decoder's sequence.   drafts: change no token.
    """
    if drafts is not None:
        assert isinstance(decoder, model.Decoder), "drafts are for decoders alone"
        yield from _drafted(decoder, prompt_ids, sampler, max_tokens, end_ids, drafts)
        return
    logits = decoder.begin(prompt_ids)
    if max_tokens:
        with closing(_chosen(decoder, logits, sampler, max_tokens)) as tokens:
            for token in tokens:
                if token in end_ids:
                    return
                yield token


def _chosen(
    decoder: model.Decoder | model.EncoderDecoder, logits: Tensor, sampler: Sampler, max_tokens: int
) -> Generator[int, None, None]:
    """Yields tokens until there are `max_tokens`, or the context is full; the first one by the logits after a prompt.

    A decoder that chooses may have appended the last token that is yielded.
    """
    chooser, sequences = (decoder.chooser, decoder.sequences[:1]) if isinstance(decoder, model.Decoder) else (None, ())

    def goes_on() -> bool:
        return number + 2 <= max_tokens

    token, number = sampler.choose(logits), 1
    yield token
    while number < max_tokens and decoder.cache.num_tokens < decoder.cache.context_tokens:
        rows = choosing.chosen_rows(chooser, sequences, [token], [sampler.choice()])
        if chooser is None or rows is None:
            token, number = sampler.choose(decoder.next_logits([token])), number + 1
            yield token
            continue
        with closing(chooser.steps(rows, goes_on)) as steps:
            for (found,) in steps:
                assert isinstance(found, int), "the decoder chooses"
                sampler.accept(found)
                token, number = found, number + 1
                yield token


def _drafted(
    decoder: model.Decoder,
    prompt_ids: list[int],
    sampler: Sampler,
    max_tokens: int,
    end_ids: frozenset[int],
    drafts: Drafts,
) -> Iterator[int]:
    """Yields what `generate` yields; all tokens of a pass are chosen before the first of them."""
    sequence = decoder.sequences[0]
    drafts.begin(object())  # a text of its own, whatever it has in common with the last
    logits, chosen = decoder.begin(prompt_ids), list[int]()
    is_over = False

    def take(logits: Tensor, num_tokens: int) -> int | None:
        nonlocal is_over
        token = sampler.choose(logits)
        if token in end_ids:
            is_over = True
            return None
        chosen.append(token)
        is_over = num_tokens == sequence.cache.context_tokens
        return token

    last, left = take(logits, sequence.num_tokens), max_tokens
    while True:
        yield from chosen
        left -= len(chosen)
        if is_over or last is None or left == 0:
            return
        last = chosen[-1]
        chosen.clear()
        drafts.advance(decoder, sequence, last, left, take)


class Clock:
    """A clock of a generation."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.num_tokens = 0
        self.prefill_s = 0.0  # to the first token
        self.decode_s = 0.0  # from there to the last

    def tick(self) -> None:
        """Notes that there is a new token."""
        elapsed = time.perf_counter() - self._start
        if self.num_tokens == 0:
            self.prefill_s = elapsed
        self.decode_s = elapsed - self.prefill_s
        self.num_tokens += 1


def rate_text(num_tokens: int, seconds: float) -> str:
    """Returns tokens a second as text."""
    return f"{num_tokens / seconds:.1f} tokens/s" if num_tokens > 0 and seconds > 0 else "no rate"


@dataclass(frozen=True, slots=True)
class BenchTimes:
    """Seconds of a run."""

    num_prompt_tokens: int
    prefill_s: float  # of the prompt with the first new token
    tokens_s: tuple[float, ...]  # of each token after it

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
    """Returns random tokens of the vocabulary; raises RunError if they leave no position for a new one."""
    if num_tokens >= max_positions:
        raise RunError(
            f"--prompt-tokens: found {num_tokens}, this model's context is {max_positions}; "
            f"give at most {max_positions - 1}"
        )
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()


def measure(
    decoder: model.Decoder | model.EncoderDecoder,
    prompt_ids: list[int],
    sampler: Sampler,
    max_tokens: int,
    drafts: Drafts | None = None,
) -> BenchTimes:
    """Times a run, which ends after `max_tokens` or when the context is full; no token ends it."""
    start = time.perf_counter()
    moments = [time.perf_counter() for _ in generate(decoder, prompt_ids, sampler, max_tokens, frozenset(), drafts)]
    steps = tuple(after - before for before, after in pairwise(moments))
    return BenchTimes(len(prompt_ids), moments[0] - start, steps)
