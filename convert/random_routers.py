"""Routers whose choices are as popular, and as alike from layer to layer, as was asked for.

    logit_e = popular_e + own_e . z        z: the token's own part of its normed hidden state, deviation 1 in each row
    own rows of the next layer = C * those of this layer + sqrt(1 - C^2) * fresh ones, experts renamed

The hidden state has the same value in every dimension beside z (`random_weights`): that is what `popular_e` is read
from. All rows are orthogonal, to each other and to the constant, so that logits are independent. What `popular_e` gives
the popularity asked for is found by drawing logits and letting the router choose.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from moe_pack.calib import Profile
from moe_pack.convert.random_weights import CONSTANT, OWN, random_stream
from moe_pack.formats import ModelSpec, PlanError, RouterSpec
from moe_pack.runtime import TORCH

Floats = NDArray[np.float64]

_RANKS, _LOGITS, _ROWS = 1, 2, 3  # keys of random streams
_DRAWS = 16384  # tokens for which logits are drawn
_ROUNDS = 12
_MOST = 0.95  # an expert that every token chose would leave no choice
_LEAST = 0.02  # of an even share: an expert that nobody ever chose would be a smaller model


def skewed_popularity(spec: ModelSpec, skew: float, seed: int) -> Floats:
    """The share of tokens that choose each expert, [L, E], by Zipf's law: the r-th has a share as `r ** -skew`.

    Which expert is the r-th is drawn for each layer.
    """
    E = spec.router.num_experts
    shares = _shares(np.arange(1.0, E + 1) ** -skew, spec.router.num_experts_per_tok)
    generator = np.random.Generator(random_stream(seed, _RANKS))
    return np.stack([shares[generator.permutation(E)] for _ in spec.moe_layers])


def profiled_popularity(spec: ModelSpec, profile: Profile) -> Floats:
    """The share of tokens that chose each expert when the profile was made, [L, E].

    Raises:  PlanError if the profile has other layers or experts.
    """
    found = (len(profile.spec.moe_layers), profile.spec.router.num_experts)
    wanted = (len(spec.moe_layers), spec.router.num_experts)
    if found != wanted:
        raise PlanError(
            f"--profile: found {found[0]} layers of {found[1]} experts, expected {wanted[0]} of {wanted[1]}; "
            "give a profile of the same model, or --layers"
        )
    k = spec.router.num_experts_per_tok
    return np.stack([_shares(profile.statistics(l).tokens.astype(np.float64), k) for l in range(wanted[0])])


def _shares(weights: Floats, k: int) -> Floats:
    """Shares in proportion to weights that add up to `k`, none above `_MOST` if that can be."""
    E, most = len(weights), max(_MOST, k / len(weights))
    shares: Floats = np.maximum(weights, _LEAST * weights.mean())
    shares = shares * k / shares.sum()
    for _ in range(E):  # each round gives what the largest have too much to the others
        free = shares < most
        if not (shares > most + 1e-12).any() or not free.any():
            break
        shares = np.where(free, shares, most)
        shares[free] *= (k - most * (E - free.sum())) / shares[free].sum()
    return shares


def popular_logits(shares: Floats, router: RouterSpec, seed: int) -> Floats:
    """What to add to an expert's random logits, [E], so that this share of tokens chooses it.

    Args:    shares: [E], which add up to the number of experts a token.
    """
    E = len(shares)
    if np.ptp(shares) < 1e-9:
        return np.zeros(E)
    noise = np.random.Generator(random_stream(seed, _LOGITS)).standard_normal((_DRAWS, E), np.float32)
    drawn, wanted = torch.from_numpy(noise), torch.special.ndtri(torch.from_numpy(shares))
    logits = torch.zeros(E, dtype=torch.float64)
    bias = torch.zeros(E) if router.bias else None
    for _ in range(_ROUNDS):
        chosen, _ = TORCH.route(drawn + logits.to(torch.float32), router, bias)
        found = torch.bincount(chosen.flatten(), minlength=E).to(torch.float64) / _DRAWS
        # Were the last one chosen always at the same logit, one round would do.
        logits += wanted - torch.special.ndtri(found.clamp(0.5 / _DRAWS, 1 - 0.5 / _DRAWS))
        logits -= logits.mean()
    return logits.numpy()


def router_weights(spec: ModelSpec, popularity: Floats, path_correlation: float, seed: int) -> Iterator[Floats]:
    """The router of each MoE layer, one after the other: [E, d].

    Args:    popularity: [L, E], the share of tokens that shall choose each.   path_correlation: from 0 (a layer's
             choice says nothing of the next one's but popularity) to 1 (it says all).
    """
    E, d = spec.router.num_experts, spec.hidden_size
    generator = np.random.Generator(random_stream(seed, _ROWS))
    found: dict[bytes, Floats] = {}
    own = np.empty((0, d))
    for shares in popularity:
        # By rank, so that popular experts follow popular ones; among equals by chance.
        by_rank = np.lexsort((generator.random(E), -shares))
        fresh = _fresh_rows(E, own, d, generator)
        own = _unit_rows(path_correlation * own + np.sqrt(1 - path_correlation**2) * fresh) if len(own) else fresh
        rows = np.empty((E, d))
        rows[by_rank] = own / OWN
        # Groups are of neighbours: there an expert's popularity hangs on its number too.
        key = shares if spec.router.n_group > 1 else shares[by_rank]
        if key.tobytes() not in found:
            found[key.tobytes()] = popular_logits(key, spec.router, seed)
        popular = found[key.tobytes()].copy()
        if spec.router.n_group == 1:
            popular[by_rank] = found[key.tobytes()]
        yield rows + popular[:, None] / (CONSTANT * d)


def _fresh_rows(num_rows: int, rows: Floats, d: int, generator: np.random.Generator) -> Floats:
    """Random unit rows orthogonal to each other, to `rows` and to the constant, as far as `d` dimensions allow it."""
    drawn = generator.standard_normal((num_rows, d))
    taken = np.concatenate((np.ones((1, d)), rows))
    if len(taken) + num_rows > d:
        return _unit_rows(drawn - drawn.mean(axis=1, keepdims=True))
    columns, _ = torch.linalg.qr(torch.from_numpy(np.concatenate((taken, drawn)).T))
    return np.ascontiguousarray(columns.numpy().T[len(taken) :])


def _unit_rows(rows: Floats) -> Floats:
    unit: Floats = rows / np.sqrt((rows**2).sum(axis=1, keepdims=True))
    return unit
