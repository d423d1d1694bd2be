"""EdgeMoE's eviction: how often an expert is chosen, over how far ahead its layer is.

Source:  EdgeMoE (2308.14352) §III-C2, its eviction score L = -f / ((S - i + I) mod S), where the highest goes first.
         As printed the denominator is 0 in the current layer and largest in the next, whose experts would go first,
         against the sentence before it ("whose layers are farther away from the current block"). Read as
         D = (i - I) mod S, and S in the current layer, which comes round again last.
"""

from collections.abc import Sequence

import numpy as np

from moe_pack.runtime.residency import Array, CacheFacts, Key


class EdgeMoE:
    """Worth f / D. f: how many forward passes chose the expert, begun with one token's choices as popularity has them.

    The paper does not say whether f is measured before or during the run: popularity stands in until there is more.
    """

    def __init__(self, facts: CacheFacts) -> None:
        self._frequency = facts.popularity.astype(np.float64) * facts.num_active
        layers = np.arange(len(facts.pages))
        distance = (layers - layers[:, None]) % len(layers)  # [current, of the expert]
        self._distance = np.where(distance == 0, len(layers), distance)

    def routed(self, layer_idx: int, experts: Sequence[int], scores: Array | None) -> None:
        """Those chosen are chosen once more."""
        self._frequency[layer_idx, experts] += 1

    def used(self, key: Key) -> None:
        """Nothing: it was counted when it was chosen."""

    def fetched(self, key: Key) -> None:
        """Nothing."""

    def dropped(self, key: Key) -> None:
        """Nothing."""

    def worth(self, layer_idx: int) -> Array:
        """f / D."""
        worth: Array = self._frequency / self._distance[layer_idx][:, None]
        return worth
