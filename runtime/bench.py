"""How fast a pack runs: a prompt of random tokens, then a continuation that nothing but its length ends."""

import resource
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from moe_pack.formats import RunError
from moe_pack.runtime.decoder import Decoder
from moe_pack.runtime.encoder_decoder import EncoderDecoder
from moe_pack.runtime.generate import generate
from moe_pack.runtime.sampling import Sampler


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
