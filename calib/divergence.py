"""How far predictions are from the original's: the KL divergence of next-token distributions, some tokens at a time."""

import torch
from torch import Tensor

from moe_pack.runtime import Weights, head

HEAD_TOKENS = 256  # at once: bounds what logits take


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
