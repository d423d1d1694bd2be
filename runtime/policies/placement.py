"""What is in fast memory from the start and stays: the most popular experts, some or as many as there is room for.

Source:  Fiddler (2402.07033) §3.2: "as many experts as the memory capacity permits in order of popularity".
"""

from collections.abc import Sequence

import numpy as np

from moe_pack.runtime.residency import Array, CacheFacts, Key


def placed_by_popularity(facts: CacheFacts, num_pages: int) -> list[Key]:
    """The experts to place in so many pages, most popular first, over all layers.

    What fits no more is passed over for what does. Unless all are placed, room is left in which the others take turns:
    for the largest expert. Among equals the lower layer, then the lower expert comes first.
    """
    if facts.pages.sum() <= num_pages:
        return [Key(*divmod(place, facts.pages.shape[1])) for place in range(facts.pages.size)]
    room, placed = min(num_pages, facts.num_pages - int(facts.pages.max())), []
    for place in np.argsort(-facts.popularity.ravel(), kind="stable").tolist():
        key = Key(*divmod(place, facts.pages.shape[1]))
        if facts.pages[key] <= room:
            room -= int(facts.pages[key])
            placed.append(key)
    return placed


class Static:
    """Nothing is worth more than another: for those that place experts and keep none beside."""

    def __init__(self, facts: CacheFacts) -> None:
        self._worth = np.zeros(facts.pages.shape)

    def routed(self, layer_idx: int, experts: Sequence[int], scores: Array | None) -> None:
        """Nothing."""

    def used(self, key: Key) -> None:
        """Nothing."""

    def fetched(self, key: Key) -> None:
        """Nothing."""

    def dropped(self, key: Key) -> None:
        """Nothing."""

    def worth(self, layer_idx: int) -> Array:
        """All alike."""
        return self._worth
