"""Routes for tests of path statistics, and the statistics by dictionaries and loops."""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from moe_pack.calib.statistics.popularity import Routes
from moe_pack.runtime.offload.paths import BackoffLevel

EVERYTHING = 2**30
Sets = tuple[frozenset[int], ...]


@dataclass(frozen=True)
class Case:
    """A shape of routes; experts from `drawn_from` on are never chosen; a `follow` of 1 repeats the layer before."""

    T: int
    L: int
    k: int
    E: int
    drawn_from: int
    follow: float = 0.0

    def draw(self, seed: int, drawn_from: int | None = None) -> Routes:
        generator = np.random.default_rng(seed)
        width = drawn_from or self.drawn_from
        scores = generator.gumbel(size=(self.T, self.L, width)) - 0.5 * np.arange(width)
        routes = np.argsort(-scores, axis=2)[:, :, : self.k]  # best first, so unsorted
        for l in range(1, self.L):
            same = generator.random(self.T) < self.follow
            routes[same, l] = routes[same, l - 1]
        return routes


CASES = [
    Case(60, 4, 1, 6, 5),
    Case(300, 4, 1, 4, 4, follow=0.6),
    Case(60, 3, 2, 6, 5),
    Case(400, 4, 2, 4, 4, follow=0.7),
    Case(150, 3, 3, 5, 5, follow=0.8),
    Case(5, 3, 2, 4, 3),  # too few tokens for any exact key
    Case(40, 1, 2, 5, 4),
    Case(40, 2, 2, 5, 4),
    Case(40, 2, 1, 3, 3),
    Case(20, 3, 1, 4, 1),  # all tokens on one expert
    Case(9, 3, 3, 3, 3),  # every expert for every token
    Case(8, 3, 1, 1, 1),
    Case(1, 1, 1, 1, 1),
]


class Plain:
    """The same statistics by dictionaries of sets, one token and one expert at a time."""

    def __init__(self, routes: Routes, num_experts: int) -> None:
        self.E, self.tokens = num_experts, [[frozenset(chosen) for chosen in token] for token in routes.tolist()]
        self.k = routes.shape[2]
        self.seen: Counter[tuple[int, Sets]] = Counter()
        self.after: Counter[tuple[int, Sets, int]] = Counter()
        for token in self.tokens:
            for l in range(1, len(token)):
                key = l, tuple(token[max(l - 2, 0) : l])
                self.seen[key] += 1
                self.after.update((*key, e) for e in token[l])

    def popularity(self, l: int, e: int) -> float:
        return sum(e in token[l] for token in self.tokens) / float(len(self.tokens) * self.k)

    def given(self, l: int, e: int, earlier: int, before: int) -> float | None:
        """P(e at l | before at earlier), leaning on popularity by E choices; None if `before` was never chosen."""
        those = [token for token in self.tokens if before in token[earlier]]
        count = sum(e in token[l] for token in those)
        return (count + self.E * self.popularity(l, e)) / (len(those) * self.k + self.E) if those else None

    def predict(self, l: int, before: Sets) -> tuple[list[float], BackoffLevel]:
        seen = self.seen[l, before]
        if seen >= 8 and len(before) == min(l, 2):
            return [self.after[l, before, e] / (seen * self.k) for e in range(self.E)], BackoffLevel.EXACT
        pairs = [(l - len(before) + i, e) for i, chosen in enumerate(before) for e in chosen]
        factors = [[self.given(l, e, *pair) for pair in pairs] for e in range(self.E)]
        known = [[factor for factor in row if factor is not None] for row in factors]
        if not known[0]:
            return [self.popularity(l, e) for e in range(self.E)], BackoffLevel.POPULARITY
        means = [math.prod(row) ** (1 / len(row)) for row in known]
        return [mean / sum(means) for mean in means], BackoffLevel.FACTORED


def sets_before(token: list[list[int]], l: int, num_known: int = 2) -> Sets:
    return tuple(frozenset(chosen) for chosen in token[max(l - num_known, 0) : l])


HAND = np.repeat([[0, 1, 2], [0, 1, 0], [1, 1, 0]], [6, 2, 2], axis=0)[:, :, None]  # ten tokens, three layers, k = 1
