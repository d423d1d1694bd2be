"""Eviction by importance: the mean score over the last n passes, of experts that were not chosen too.

Source:  Importance-Driven Expert Scheduling §5.3. Its shield for what the running layer needs is `Residency`'s lock.
         The paper gives no n.
"""

from collections.abc import Sequence

import numpy as np

from moe_pack.runtime.residency import Array, CacheFacts, Key

# The least that is a mean. On the demo model's routes more hit less, 512 by four points; one alone hits up to four
# more, and keeps no history (docs/papers.md).
NUM_PASSES = 2


class Importance:
    """Worth the mean of an expert's scores over the last `num_passes` forward passes through its layer.

    Scores are kept as float16, as records of routes have them, so that replay decides as the run did. Where they are
    not known, each chosen expert counts 1 and each other 0.
    """

    def __init__(self, facts: CacheFacts, num_passes: int = NUM_PASSES) -> None:
        self._last: Array = np.zeros((len(facts.pages), num_passes, facts.pages.shape[1]), np.float16)
        self._sums: Array = np.zeros(facts.pages.shape)  # exact: float64 holds sums of some thousand float16
        self._num_passes = np.zeros(len(facts.pages), np.int64)

    def routed(self, layer_idx: int, experts: Sequence[int], scores: Array | None) -> None:
        """The pass's scores take the place of the oldest."""
        if scores is None:
            scores = np.zeros(self._sums.shape[1], np.float16)
            scores[list(experts)] = 1
        held = self._last[layer_idx, self._num_passes[layer_idx] % self._last.shape[1]]
        self._sums[layer_idx] -= held
        held[:] = scores
        self._sums[layer_idx] += held
        self._num_passes[layer_idx] += 1

    def used(self, key: Key) -> None:
        """Nothing: it was counted with all others."""

    def fetched(self, key: Key) -> None:
        """Nothing."""

    def dropped(self, key: Key) -> None:
        """Nothing."""

    def worth(self, layer_idx: int) -> Array:
        """The mean scores; 0 in layers that no pass has reached."""
        seen = np.clip(self._num_passes, 1, self._last.shape[1])
        worth: Array = self._sums / seen[:, None]
        return worth
