"""Least recently used: over all layers at once, or each layer in its own share of the pages.

Source:  CORM §4.3: "a fixed storage space ... to cache a fixed number of experts", by LRU; §1: "an expert cache for
         each MoE layer". Over all layers at once is what others call LRU.

Least frequently used: one of the classic policies that EdgeMoE is compared with (EdgeMoE §III-C2, Fig. 14).

EdgeMoE's eviction: how often an expert is chosen, over how far ahead its layer is.

Source:  EdgeMoE (2308.14352) §III-C2, its eviction score L = -f / ((S - i + I) mod S), where the highest goes first.
         As printed the denominator is 0 in the current layer and largest in the next, whose experts would go first,
         against the sentence before it ("whose layers are farther away from the current block"). Read as
         D = (i - I) mod S, and S in the current layer, which comes round again last.

Eviction by importance: the mean score over the last n passes, of experts that were not chosen too.

Source:  Importance-Driven Expert Scheduling §5.3. Its shield for what the running layer needs is `Residency`'s lock.
         The paper gives no n.

What is in fast memory from the start and stays: the most popular experts, some or as many as there is room for.

Source:  Fiddler (2402.07033) §3.2: "as many experts as the memory capacity permits in order of popularity".

Belady's optimum: what is needed again last goes first. It knows the future, so only replay can have it.

Source:  L. A. Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5 (1966).
         Optimal where every expert takes as many pages and what is missing is always brought in; where sizes differ,
         a good figure to measure by and no bound.
"""

from collections.abc import Sequence

import numpy as np

from moe_pack.runtime.offload.cache import Array, CacheFacts, ExpertKey


class LRU:
    """What was used last is worth most."""

    def __init__(self, facts: CacheFacts) -> None:
        self._last = np.zeros(facts.pages.shape)
        self._clock = 0

    def routed(self, layer_idx: int, experts: Sequence[int], scores: Array | None) -> None:
        """Nothing: what is chosen is used soon."""

    def used(self, key: ExpertKey) -> None:
        """It is the latest now."""
        self._clock += 1
        self._last[key] = self._clock

    def fetched(self, key: ExpertKey) -> None:
        """It is the latest now: foretold, it is needed soon."""
        self.used(key)

    def dropped(self, key: ExpertKey) -> None:
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

    def fetched(self, key: ExpertKey) -> None:
        """It is the latest now, and takes of its layer's share."""
        super().fetched(key)
        self._held[key.layer_idx] += self._pages[key]

    def dropped(self, key: ExpertKey) -> None:
        """It takes no more of its layer's share."""
        self._held[key.layer_idx] -= self._pages[key]

    def worth(self, layer_idx: int) -> Array:
        """When each was used last, those of layers that have to give before all others."""
        if self._held[layer_idx] + self._pages[layer_idx].max() > self._share:
            gives = np.arange(len(self._held)) == layer_idx
        else:
            gives = self._held > self._share
        return np.where(gives[:, None], self._last - self._clock - 1, self._last)


class LFU:
    """What was used most often is worth most; among equals, what was used last."""

    def __init__(self, facts: CacheFacts) -> None:
        self._uses = np.zeros(facts.pages.shape)
        self._last = np.zeros(facts.pages.shape)
        self._clock = 0

    def routed(self, layer_idx: int, experts: Sequence[int], scores: Array | None) -> None:
        """Nothing: what is chosen is used soon."""

    def used(self, key: ExpertKey) -> None:
        """Once more, and the latest now."""
        self._clock += 1
        self._uses[key] += 1
        self._last[key] = self._clock

    def fetched(self, key: ExpertKey) -> None:
        """Nothing: it counts when it is used."""

    def dropped(self, key: ExpertKey) -> None:
        """Nothing: uses are counted whether it is in or not."""

    def worth(self, layer_idx: int) -> Array:
        """How often each was used; below a whole use, how lately."""
        return self._uses + self._last / (self._clock + 1)


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

    def used(self, key: ExpertKey) -> None:
        """Nothing: it was counted when it was chosen."""

    def fetched(self, key: ExpertKey) -> None:
        """Nothing."""

    def dropped(self, key: ExpertKey) -> None:
        """Nothing."""

    def worth(self, layer_idx: int) -> Array:
        """f / D."""
        worth: Array = self._frequency / self._distance[layer_idx][:, None]
        return worth


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

    def used(self, key: ExpertKey) -> None:
        """Nothing: it was counted with all others."""

    def fetched(self, key: ExpertKey) -> None:
        """Nothing."""

    def dropped(self, key: ExpertKey) -> None:
        """Nothing."""

    def worth(self, layer_idx: int) -> Array:
        """The mean scores; 0 in layers that no pass has reached."""
        seen = np.clip(self._num_passes, 1, self._last.shape[1])
        worth: Array = self._sums / seen[:, None]
        return worth


def placed_by_popularity(facts: CacheFacts, num_pages: int) -> list[ExpertKey]:
    """The experts to place in so many pages, most popular first, over all layers.

    What fits no more is passed over for what does. Unless all are placed, room is left in which the others take turns:
    for the largest expert. Among equals the lower layer, then the lower expert comes first.
    """
    if facts.pages.sum() <= num_pages:
        return [ExpertKey(*divmod(place, facts.pages.shape[1])) for place in range(facts.pages.size)]
    room, placed = min(num_pages, facts.num_pages - int(facts.pages.max())), []
    for place in np.argsort(-facts.popularity.ravel(), kind="stable").tolist():
        key = ExpertKey(*divmod(place, facts.pages.shape[1]))
        if facts.pages[key] <= room:
            room -= int(facts.pages[key])
            placed.append(key)
    return placed


class NoEviction:
    """Nothing is worth more than another: for those that place experts and keep none beside."""

    def __init__(self, facts: CacheFacts) -> None:
        self._worth = np.zeros(facts.pages.shape)

    def routed(self, layer_idx: int, experts: Sequence[int], scores: Array | None) -> None:
        """Nothing."""

    def used(self, key: ExpertKey) -> None:
        """Nothing."""

    def fetched(self, key: ExpertKey) -> None:
        """Nothing."""

    def dropped(self, key: ExpertKey) -> None:
        """Nothing."""

    def worth(self, layer_idx: int) -> Array:
        """All alike."""
        return self._worth


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

    def used(self, key: ExpertKey) -> None:
        """Nothing: what comes is known."""

    def fetched(self, key: ExpertKey) -> None:
        """Nothing."""

    def dropped(self, key: ExpertKey) -> None:
        """Nothing."""

    def worth(self, layer_idx: int) -> Array:
        """Minus the step at which each is needed next."""
        return self._worth
