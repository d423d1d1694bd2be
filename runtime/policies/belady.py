"""Belady's optimum: what is needed again last goes first. It knows the future, so only replay can have it.

Source:  L. A. Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5 (1966).
         Optimal where every expert takes as many pages and what is missing is always brought in; where sizes differ,
         a good figure to measure by and no bound.
"""

from collections.abc import Sequence

import numpy as np

from moe_pack.runtime.residency import Array, CacheFacts, Key


class Belady:
    """Worth the less the later it is needed again.

    Args:    steps: what is going to be routed, in order: the layer and its experts.
    """

    def __init__(self, facts: CacheFacts, steps: Sequence[tuple[int, Sequence[int]]]) -> None:
        never = float(len(steps) + 1)
        self._worth = np.full(facts.pages.shape, -never)  # of each expert: minus the step that needs it next
        self._next: list[Array] = []  # of each step: what its experts are worth once it is over
        for number in range(len(steps) - 1, -1, -1):
            layer_idx, experts = steps[number]
            self._next.append(self._worth[layer_idx, experts])  # a copy
            self._worth[layer_idx, experts] = -number
        self._steps = steps
        self._num_done = 0

    def routed(self, layer_idx: int, experts: Sequence[int], scores: Array | None) -> None:
        """The step that comes now."""
        assert self._steps[self._num_done] == (layer_idx, experts), "the future is as it was foretold"
        self._num_done += 1
        self._worth[layer_idx, experts] = self._next.pop()

    def used(self, key: Key) -> None:
        """Nothing: what comes is known."""

    def fetched(self, key: Key) -> None:
        """Nothing."""

    def dropped(self, key: Key) -> None:
        """Nothing."""

    def worth(self, layer_idx: int) -> Array:
        """Minus the step at which each is needed next."""
        return self._worth
