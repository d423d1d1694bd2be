"""Tokens that the GPU's kernels choose, next to those of the host's `Sampler`."""

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_pack.runtime.engine.options import SamplingOptions
from moe_pack.runtime.gpu.token.choice import TokenChoice
from moe_pack.runtime.model.choosing import Choice
from moe_pack.runtime.sampling import Sampler

FORBIDDEN = -float("inf")


class ChosenTokens:
    """Chooses the tokens of answers, one row each, from logits float32 [T, V] on a device.

    A row's sequence is not the row's own number.
    """

    def __init__(self, logits: Tensor) -> None:
        self._num_rows, self._logits = len(logits), logits
        there = torch.zeros((3, self._num_rows), dtype=torch.int32, device=logits.device)
        self.choice = TokenChoice(logits, there, self._num_rows)
        self._control = torch.zeros(there.shape, dtype=torch.int32, pin_memory=logits.is_cuda)
        self._control[2] = torch.arange(self._num_rows).flip(0)

    def begin(self, choices: Sequence[Choice]) -> None:
        for row, choice in enumerate(choices):
            self.choice.begin(int(self._control[2, row]), choice)

    def next(self, choices: Sequence[Choice] | None) -> list[int]:
        """Returns the tokens by the present logits; None: the host chooses, and they mean nothing."""
        self.choice.set_choices(0, choices)
        self.choice.enter(0, self._control)
        self.choice.launch(0, self._num_rows)
        if self._logits.is_cuda:
            torch.cuda.synchronize()
        return self.choice.tokens(0, self._num_rows)


def samplers(options: Sequence[SamplingOptions], vocab_size: int) -> list[Sampler]:
    """Returns samplers after different prompts."""
    return [Sampler(each, [(7 * row + 3 * i) % vocab_size for i in range(9)]) for row, each in enumerate(options)]


def described(each: Sequence[Sampler]) -> list[Choice]:
    found = [sampler.choice() for sampler in each]
    return [choice for choice in found if choice is not None]


def mismatches(logits: Tensor, options: Sequence[SamplingOptions], num_tokens: int = 3) -> list[str]:
    """Returns where kernels choose other tokens than the host, in answers whose logits are turned after each token."""
    own, twins = (samplers(options, logits.shape[1]) for _ in range(2))
    found, wrong = ChosenTokens(logits), list[str]()
    found.begin(described(own))
    for number in range(num_tokens):
        expected = [twin.choose(row) for twin, row in zip(twins, logits, strict=True)]
        tokens = found.next(described(own))
        for sampler, right in zip(own, expected, strict=True):
            sampler.accept(right)
        pairs = zip(options, tokens, expected, strict=True)
        wrong += [f"token {number}: {token} and not {right}: {of}" for of, token, right in pairs if token != right]
        logits.copy_(logits.roll(5, 1))
    return wrong


def drawn_options(draw: random.Random) -> SamplingOptions:
    """Returns options, each of which often changes nothing."""
    return SamplingOptions(
        temperature=draw.choice([0, 0.3, 0.8, 1.0, 3.0]),
        top_p=draw.choice([1.0, 0.95, 0.5, 0.1]),
        top_k=draw.choice([0, 0, 1, 5, 40]),
        min_p=draw.choice([0.0, 0.0, 0.05, 0.3]),
        repetition_penalty=draw.choice([1.0, 1.3, 0.8]),
        frequency_penalty=draw.choice([0.0, 0.5]),
        presence_penalty=draw.choice([0.0, -0.4]),
        logit_bias=draw.choice([(), ((3, 2.0), (5, FORBIDDEN), (3, -1.5))]),
        seed=draw.randrange(1000),
    )


PLAIN = SamplingOptions(temperature=1.0, top_p=1.0)
EACH = (
    replace(PLAIN, temperature=0),
    PLAIN,
    replace(PLAIN, top_p=0.9),
    replace(PLAIN, top_k=50),
    replace(PLAIN, min_p=0.02),
    replace(PLAIN, top_k=200, top_p=0.8, min_p=0.01, temperature=0.7),
    replace(PLAIN, temperature=0.6, repetition_penalty=1.3, presence_penalty=0.5, logit_bias=((3, 4.0),)),
)
