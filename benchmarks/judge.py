"""The judge of benchmarks: how far a decoder's predictions are from the source's on a text, block by block.

Not the product's evaluation: everything is kept in memory, the source's log-probabilities first of all.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.calib import Tokens
from moe_pack.runtime import Decoder

BLOCK_TOKENS = 128

Blocks = NDArray[np.float64]  # [num_blocks]: the mean KL divergence of each block of tokens, nats a token


class Judge:
    """Measures decoders against the source's predictions for the sequences of a text, which it keeps.

    Args:    tokens: sequences whose length is a multiple of `BLOCK_TOKENS`.
    """

    def __init__(self, source: Decoder, tokens: Tokens) -> None:
        assert tokens.sequences.shape[1] % BLOCK_TOKENS == 0, tokens.sequences.shape
        self._sequences: list[list[int]] = tokens.sequences.tolist()
        self._expected = [_log_probabilities(source, ids) for ids in self._sequences]

    def blocks(self, decoder: Decoder) -> Blocks:
        """The KL divergence from the source in each block of tokens, in order."""
        found = []
        for ids, expected in zip(self._sequences, self._expected, strict=True):
            kl = (expected.exp() * (expected - _log_probabilities(decoder, ids))).sum(dim=1)  # [S]
            found.append(kl.double().view(-1, BLOCK_TOKENS).mean(dim=1))
        return np.asarray(torch.cat(found).numpy(), np.float64)

    def kl(self, decoder: Decoder) -> float:
        """The mean KL divergence from the source, nats a token."""
        return float(self.blocks(decoder).mean())

    def losses(self, decoder: Decoder) -> tuple[float, float]:
        """Nats a token: the mean KL divergence, and how much less log-likelihood the tokens have that come next."""
        kl, nll, num_next = 0.0, 0.0, 0
        for ids, expected in zip(self._sequences, self._expected, strict=True):
            change = expected - _log_probabilities(decoder, ids)
            kl += float((expected.exp() * change).sum())
            nll += float(change[:-1].gather(1, torch.tensor(ids[1:])[:, None]).sum())
            num_next += len(ids) - 1
        return kl / sum(map(len, self._sequences)), nll / num_next


def _log_probabilities(decoder: Decoder, ids: list[int]) -> Tensor:
    decoder.reset()
    return decoder.logits(ids).log_softmax(dim=1)
