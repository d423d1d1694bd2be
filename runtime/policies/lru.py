"""Least recently used: over all layers at once, or each layer in its own share of the pages.

Source:  CORM §4.3: "a fixed storage space ... to cache a fixed number of experts", by LRU; §1: "an expert cache for
         each MoE layer". Over all layers at once is what others call LRU.
"""

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

    def dropped(self, key: Key) -> None:
        """Nothing: when it was used stays true."""

    def worth(self, layer_idx: int) -> Array:
        """When each was used last."""
        return self._last


class LayerLRU(LRU):
    """The same, every layer in its share of the pages, all alike.

    A layer whose share is full gives up its own. One whose share is not takes from those that hold more than theirs,
    as they may until others come: a share need not be a whole number of experts.
    """

    def __init__(self, facts: CacheFacts) -> None:
        super().__init__(facts)
        self._pages = facts.pages
        self._share = facts.num_pages / len(facts.pages)
        self._held = np.zeros(len(facts.pages), np.int64)  # pages by layer; what is placed is not in them

    def fetched(self, key: Key) -> None:
        """It is the latest now, and takes of its layer's share."""
        super().fetched(key)
        self._held[key.layer_idx] += self._pages[key]

    def dropped(self, key: Key) -> None:
        """It takes no more of its layer's share."""
        self._held[key.layer_idx] -= self._pages[key]

    def worth(self, layer_idx: int) -> Array:
        """When each was used last, those of layers that have to give before all others."""
        if self._held[layer_idx] + self._pages[layer_idx].max() > self._share:
            gives = np.arange(len(self._held)) == layer_idx
        else:
            gives = self._held > self._share
        return np.where(gives[:, None], self._last - self._clock - 1, self._last)
