"""What routers find in fast memory, token by token: replayed with the runtime's own decisions, without weights.

`runtime.replay` counts hits; a cost model also has to know which of a layer's experts came together, and how long each
has been there.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack.runtime import CacheFacts, Compute, Fetch, Passes, Preset, Residency, residency_for

Array = NDArray[Any]

_SURE_VISITS = 16  # of an expert: with so many its own rate of misses counts half, with none that of all
MAX_AGE = 15  # visits are not told apart beyond


@dataclass(frozen=True, slots=True, eq=False)
class Visits:
    """Experts visited by some tokens: `steps` int64 [V], token * L + layer; `keys` int64 [V], layer * E + expert.

    `ages` int64 [V]: visits since the expert was brought in, 0 for the one that brings it in, at most MAX_AGE.
    """

    num_tokens: int
    steps: Array
    keys: Array
    ages: Array

    @property
    def hit_rate(self) -> float:
        """The share of visits that found their expert there; 1 where there was no visit."""
        return float((self.ages > 0).mean()) if len(self.ages) else 1.0


def visits(passes: Passes, facts: CacheFacts, preset: Preset, num_warm: int, is_filled: bool = False) -> Visits:
    """The visits of tokens decoded one by one, nothing foretold, but for the first `num_warm`, which fill the cache.

    Where all experts have room, every visit finds its expert after as many as are told apart.
    Args:    is_filled: the cache begins with the most popular experts instead of empty: few tokens then warm it.
    """
    L, E = facts.pages.shape
    routes = np.sort(passes.routes.astype(np.int64), axis=2)  # [T, L, k]
    if int(facts.pages.sum()) <= facts.num_pages:
        warm = routes[num_warm:]
        steps = np.repeat(np.arange(len(warm) * L), routes.shape[2])
        keys = (warm + E * np.arange(L)[:, None]).ravel()
        return Visits(len(warm), steps, keys, np.full(len(keys), MAX_AGE))
    residency = residency_for(preset, facts)
    ages = np.zeros((L, E), np.int64)
    if is_filled:
        _fill(residency, facts)
        ages[residency.is_resident] = MAX_AGE
    found: list[tuple[int, int, int]] = []
    for token, layers in enumerate(routes.tolist()):
        for l, experts in enumerate(layers):
            for event in residency.walk(l, experts):
                if isinstance(event, Fetch):
                    ages[event.key] = 0
                elif isinstance(event, Compute):
                    if token >= num_warm:
                        found.append(((token - num_warm) * L + l, l * E + event.key.expert, int(ages[event.key])))
                    ages[event.key] += 1
    columns = np.array(found, np.int64).reshape(-1, 3).T
    return Visits(max(len(routes) - num_warm, 0), columns[0], columns[1], np.minimum(columns[2], MAX_AGE))


def _fill(residency: Residency, facts: CacheFacts) -> None:
    """Brings in experts by falling popularity while there is room, as if they had been foretold."""
    order = np.argsort(-facts.popularity, axis=None, kind="stable").tolist()
    for layer_idx, expert in (divmod(place, facts.pages.shape[1]) for place in order):
        if facts.pages[layer_idx, expert] <= residency.free_pages:
            for _ in residency.ahead(layer_idx, [expert], during=layer_idx):
                pass  # nothing is carried out


def expected_misses(found: Visits, runs: Array) -> Array:
    """How often a token will find each expert missing: float64 [L, E].

    Meaning: runs * (missed + n * m) / (came + n), m being the share of all visits that missed, n _SURE_VISITS. Experts
             that few visits came to are not told apart: a plan made for these visits alone would be bad for others.
    Args:    runs: [L, E], how often a token chooses the expert.
    """
    came, missed = (np.bincount(keys, minlength=runs.size) for keys in (found.keys, found.keys[found.ages == 0]))
    of_all = missed.sum() / max(came.sum(), 1)
    expected: Array = runs * ((missed + _SURE_VISITS * of_all) / (came + _SURE_VISITS)).reshape(runs.shape)
    return expected


def drawn_passes(popularity: Array, num_active: int, num_tokens: int, seed: int = 0) -> Passes:
    """Routes of independent draws: each layer's experts by its popularity [L, E], k different ones a token."""
    shares = popularity / popularity.sum(axis=1, keepdims=True)
    generator = np.random.default_rng(seed)
    # The k largest of log p + Gumbel noise: draws without replacement.
    noise = generator.gumbel(size=(num_tokens, *shares.shape))
    with np.errstate(divide="ignore"):
        scores = np.log(shares) + noise
    routes = np.argsort(-scores, axis=2, kind="stable")[:, :, :num_active].astype("<u2")
    return Passes(routes, np.ones(num_tokens, np.uint32), None, shares.astype("<f4"))
