"""How far predictions are from the original's: the KL divergence of next-token distributions, some tokens at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_pack.runtime import Weights, head

_MOST_TOKENS = 256
_LOGITS_BYTES = 32 << 20  # of logits at once; where predictions are compared, some five times that is held


def head_tokens(vocab_size: int) -> int:
    """How many tokens are predicted at once: bounds what logits take, however large the vocabulary."""
    return max(1, min(_MOST_TOKENS, _LOGITS_BYTES // (4 * vocab_size)))


def head_pieces(start: int, stop: int, vocab_size: int) -> Iterator[slice]:
    """Tokens `start` to `stop` in pieces of as many as are predicted at once."""
    step = head_tokens(vocab_size)
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def log_probabilities(hidden: Tensor, weights: Weights, device: torch.device) -> Tensor:
    """Log-probabilities of the next token, float32 [T, V], from hidden states after the last layer, float32 [T, d]."""
    return head(hidden.to(device), weights).log_softmax(dim=-1)


def divergence(expected: Tensor, found: Tensor) -> float:
    """The KL divergence in nats of log-probabilities float32 [T, V] from those expected, summed over tokens."""
    return float((expected.exp() * (expected - found)).sum(dim=-1).to(torch.float64).sum())


def likelihood_lost(expected: Tensor, found: Tensor, next_ids: Tensor) -> float:
    """How much less log-likelihood the tokens that really came next have under `found`: nats, summed over tokens.

    Args:    expected, found: log-probabilities float32 [T, V].   next_ids: int64 [n], n <= T: after the first n tokens.
    """
    places = torch.arange(len(next_ids), device=expected.device), next_ids.to(expected.device)
    return float((expected[places] - found[places]).to(torch.float64).sum())
