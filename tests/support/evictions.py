"""Eviction policies that the product has not: those that papers compare theirs with."""

import numpy as np

from moe_pack.runtime.offload import CacheFacts, ExpertKey
from moe_pack.runtime.offload.cache import Array, Eviction


class FIFO(Eviction):
    """First in, first out: the expert that was fetched first is evicted first."""

    def __init__(self, facts: CacheFacts) -> None:
        self._fetched = np.zeros(facts.pages.shape)
        self._clock = 0

    def fetched(self, key: ExpertKey) -> None:
        self._clock += 1
        self._fetched[key] = self._clock

    def worth(self, layer_idx: int) -> Array:
        return self._fetched


class LFU(Eviction):
    """Least frequently used; of equally frequent experts the one that was used last is worth more.

    Source:  one of the classic policies that EdgeMoE is compared with (EdgeMoE §III-C2, Fig. 14).
    """

    def __init__(self, facts: CacheFacts) -> None:
        self._uses = np.zeros(facts.pages.shape)
        self._last = np.zeros(facts.pages.shape)
        self._clock = 0

    def used(self, key: ExpertKey) -> None:
        self._clock += 1
        self._uses[key] += 1
        self._last[key] = self._clock

    def worth(self, layer_idx: int) -> Array:
        return self._uses + self._last / (self._clock + 1)  # of equal numbers of uses the last one counts


class Random(Eviction):
    """Any resident expert is evicted with the same chance; the draws are the same in every run."""

    def __init__(self, facts: CacheFacts) -> None:
        self._shape = facts.pages.shape
        self._generator = np.random.default_rng(0)

    def worth(self, layer_idx: int) -> Array:
        drawn: Array = self._generator.random(self._shape)
        return drawn
