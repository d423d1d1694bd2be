"""What is kept of a prediction over a large vocabulary, and how far another is from it: KL divergences in nats.

    kept of p:  its K likeliest tokens with log p;  log of the tail's mass;  m tokens drawn from the tail, with log p
    bound       KL over K + 1 outcomes, the tail as one: what is lumped together can only come closer
    estimate    sum over the K likeliest of g(p, q)  +  tail mass of p * mean over tokens drawn of g(p, q) / p
                g(p, q) = p log(p / q) - p + q,  whose sum over all tokens is KL; without a tail it is exact

No term of g is negative, and it is of second order in the difference: so rounding of log-probabilities and of what
they add up to hardly shows, and few tokens drawn tell the tail's share. Its mean over draws is the tail's true one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_OUTCOMES = 256  # likeliest tokens that are kept
NUM_DRAWN = 32  # of the tail's tokens
_ROWS_AT_ONCE = 32  # of a vocabulary's length: bounds what temporaries take


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What is kept of n predictions.

    `ids` int64, `log_probs` float32 [n, K]: the likeliest tokens, falling.   `log_tail` float32 [n]: of the mass of all
    others, -inf where there are none.   `drawn_ids` int64, `drawn_log_probs` float32 [n, m]: of those others.
    """

    ids: Tensor
    log_probs: Tensor
    log_tail: Tensor
    drawn_ids: Tensor
    drawn_log_probs: Tensor


@dataclass(frozen=True, slots=True)
class Distances:
    """How far predictions are from n others, float64 [n] each; `tail`: their own mass outside the K outcomes."""

    bound: Tensor
    estimate: Tensor
    tail: Tensor


def num_kept(vocab_size: int) -> tuple[int, int]:
    """K and m for a vocabulary."""
    return (vocab_size, 0) if vocab_size <= NUM_OUTCOMES else (NUM_OUTCOMES, NUM_DRAWN)


def kept_outcomes(log_probs: Tensor, generator: torch.Generator) -> Outcomes:
    """What is kept of log-probabilities float32 [n, V]; `generator`, the CPU's, draws from the tail."""
    pieces = [_kept(piece, generator) for piece in torch.split(log_probs, _ROWS_AT_ONCE)]
    names = ("ids", "log_probs", "log_tail", "drawn_ids", "drawn_log_probs")
    return Outcomes(*(torch.cat([getattr(piece, name) for piece in pieces]) for name in names))


def distances(expected: Outcomes, log_probs: Tensor) -> Distances:
    """How far log-probabilities float32 [n, V] are from the outcomes expected."""
    tops, tails, bounds, drawn = [], [], [], []
    for start in range(0, len(log_probs), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        found, ids = log_probs[rows], expected.ids[rows]
        top = _terms(expected.log_probs[rows], found.gather(1, ids)).sum(dim=1, dtype=torch.float64)
        log_tail = _without(found, ids).logsumexp(dim=1)
        tops.append(top)
        tails.append(log_tail.double().exp())
        if found.shape[1] > ids.shape[1]:
            bounds.append(top + _terms(expected.log_tail[rows].double(), log_tail.double()))
            ratio = (expected.drawn_log_probs[rows] - found.gather(1, expected.drawn_ids[rows])).double()
            share = expected.log_tail[rows].double().exp()
            drawn.append(share * (ratio + (-ratio).expm1()).mean(dim=1))
    top, tail = torch.cat(tops), torch.cat(tails)
    if not bounds:
        return Distances(top, top, tail)
    return Distances(torch.cat(bounds), top + torch.cat(drawn), tail)


def whole_divergence(expected: Tensor, found: Tensor) -> Tensor:
    """The KL divergence of log-probabilities float32 [n, V] from those expected, over all tokens: float64 [n]."""
    pieces = zip(torch.split(expected, _ROWS_AT_ONCE), torch.split(found, _ROWS_AT_ONCE), strict=True)
    return torch.cat([_terms(one, other).sum(dim=1, dtype=torch.float64) for one, other in pieces])


def _kept(log_probs: Tensor, generator: torch.Generator) -> Outcomes:
    number, drawn = num_kept(log_probs.shape[1])
    likeliest = log_probs.topk(number, dim=1)
    others = _without(log_probs, likeliest.indices)
    drawn_ids = likeliest.indices[:, :0]
    if drawn:
        # softmax: a tail of little mass is no zeros
        drawn_ids = torch.multinomial(others.softmax(dim=1).cpu(), drawn, replacement=True, generator=generator)
    drawn_ids = drawn_ids.to(log_probs.device)
    return Outcomes(
        likeliest.indices, likeliest.values, others.logsumexp(dim=1), drawn_ids, log_probs.gather(1, drawn_ids)
    )


def _without(log_probs: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities with nothing left to these tokens."""
    return log_probs.scatter(1, ids, -torch.inf)


def _terms(expected: Tensor, found: Tensor) -> Tensor:
    """g(p, q) of log-probabilities; for close ones by log p - log q, where p and q would cancel."""
    ratio, p = expected - found, expected.exp()
    near = ratio.clamp(-1, 1)
    return torch.where(ratio.abs() < 1, p * (near + (-near).expm1()), p * ratio - p + found.exp())
