"""Least recently used: over all layers at once (CORM §4.4), or each layer apart."""

from collections.abc import Sequence

import numpy as np

from moe_pack.runtime.residency import Array, CacheFacts, Key


class LRU:
    """What was used last is worth most."""

    def __init__(self, facts: CacheFacts) -> None:
        self._last = np.zeros(facts.pages.shape)
        self._clock = 0

    def routed(self, layer_idx: int, experts: Sequence[int], scores: Array | None) -> None:
        """Nothing: what is chosen is used soon."""

    def used(self, key: Key) -> None:
        """It is the latest now."""
        self._clock += 1
        self._last[key] = self._clock

    def fetched(self, key: Key) -> None:
        """It is the latest now: foretold, it is needed soon."""
        self.used(key)

    def worth(self, layer_idx: int) -> Array:
        """When each was used last."""
        return self._last
