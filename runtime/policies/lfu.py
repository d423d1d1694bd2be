"""Least frequently used: one of the classic policies that EdgeMoE is compared with (EdgeMoE §III-C2, Fig. 14)."""

from collections.abc import Sequence

import numpy as np

from moe_pack.runtime.residency import Array, CacheFacts, Key


class LFU:
    """What was used most often is worth most; among equals, what was used last."""

    def __init__(self, facts: CacheFacts) -> None:
        self._uses = np.zeros(facts.pages.shape)
        self._last = np.zeros(facts.pages.shape)
        self._clock = 0

    def routed(self, layer_idx: int, experts: Sequence[int], scores: Array | None) -> None:
        """Nothing: what is chosen is used soon."""

    def used(self, key: Key) -> None:
        """Once more, and the latest now."""
        self._clock += 1
        self._uses[key] += 1
        self._last[key] = self._clock

    def fetched(self, key: Key) -> None:
        """Nothing: it counts when it is used."""

    def dropped(self, key: Key) -> None:
        """Nothing: uses are counted whether it is in or not."""

    def worth(self, layer_idx: int) -> Array:
        """How often each was used; below a whole use, how lately."""
        return self._uses + self._last / (self._clock + 1)
