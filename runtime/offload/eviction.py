"""The eviction policies: how much each expert is worth keeping, and which experts are in the cache before a run.

A new policy is a class derived from `Eviction` (cache.py) with a line in `_EVICTIONS`; presets.py gives it a name in
`EvictionName` and uses it in a `Preset`, which has `needs_scores` if the policy uses the routers' scores. The tables of
docs/streaming.md and docs/moe-run.md list the presets.
"""

from collections.abc import Callable, Sequence

import numpy as np

from moe_pack.runtime.offload import cache, presets


class NoEviction(cache.Eviction):
    """Every expert is worth the same: for policies that place experts and keep no others."""

    def __init__(self, facts: cache.CacheFacts) -> None:
        self._worth = np.zeros(facts.pages.shape)

    def worth(self, layer_idx: int) -> cache.Array:
        return self._worth


class LRU(cache.Eviction):
    """Least recently used, over all layers at once: the expert that was used last is worth most."""

    def __init__(self, facts: cache.CacheFacts) -> None:
        self._last = np.zeros(facts.pages.shape)
        self._clock = 0

    def used(self, key: cache.ExpertKey) -> None:
        self._clock += 1
        self._last[key] = self._clock

    def fetched(self, key: cache.ExpertKey) -> None:
        self.used(key)  # a predicted expert is needed soon

    def worth(self, layer_idx: int) -> cache.Array:
        return self._last


class LayerLRU(LRU):
    """Least recently used of a layer; each layer has the same share of the pages.

    A layer with a full share evicts its own experts. Another layer evicts from layers that have more than their share:
    a share need not be a whole number of experts, and pages are not left free.
    Source:  CORM §4.3: "a fixed storage space ... to cache a fixed number of experts", by LRU; §1: "an expert cache for
             each MoE layer".
    """

    def __init__(self, facts: cache.CacheFacts) -> None:
        super().__init__(facts)
        self._pages = facts.pages
        self._share = facts.num_pages / len(facts.pages)
        self._layer_pages = np.zeros(len(facts.pages), np.int64)  # without those of placed experts

    def fetched(self, key: cache.ExpertKey) -> None:
        super().fetched(key)
        self._layer_pages[key.layer_idx] += self._pages[key]

    def evicted(self, key: cache.ExpertKey) -> None:
        self._layer_pages[key.layer_idx] -= self._pages[key]

    def worth(self, layer_idx: int) -> cache.Array:
        if self._layer_pages[layer_idx] + self._pages[layer_idx].max() > self._share:
            gives = np.arange(len(self._layer_pages)) == layer_idx
        else:
            gives = self._layer_pages > self._share
        return np.where(gives[:, None], self._last - self._clock - 1, self._last)


class EdgeMoE(cache.Eviction):
    """The frequency of an expert over the distance to its layer.

    Meaning: worth = f / D. f: the forward passes that chose the expert, plus one token's choices by popularity; 0 for
             an encoder's experts, which run once and not again while the answer is decoded.
             D = (i - I) mod S layers from the current layer I to the expert's layer i of the decoder's S, and S if that
             is 0, because the current layer is the last to run again. While the encoder runs, D = i - I, the layers
             until the expert's layer is reached. The paper does not say whether f is measured before the run or during
             it: popularity stands in until the run has counts.
    Source:  EdgeMoE (2308.14352) §III-C2, its eviction score L = -f / ((S - i + I) mod S), where the highest is evicted
             first. As printed the denominator is 0 in the current layer and largest in the next, whose experts would go
             first, against the sentence before it ("whose layers are farther away from the current block").
    """

    def __init__(self, facts: cache.CacheFacts) -> None:
        self._frequency = facts.popularity.astype(np.float64) * facts.num_active
        self._num_encoder_layers = facts.num_encoder_layers
        self._frequency[: facts.num_encoder_layers] = 0
        layers, size = np.arange(len(facts.pages)), len(facts.pages) - facts.num_encoder_layers
        ahead = layers - layers[:, None]  # [current, of the expert]
        decoding = np.where(ahead % size == 0, size, ahead % size)
        is_encoding = layers[:, None] < facts.num_encoder_layers
        self._distance = np.where(is_encoding, np.maximum(ahead, 1), decoding)

    def routed(self, layer_idx: int, experts: Sequence[int], scores: cache.Array | None) -> None:
        if layer_idx >= self._num_encoder_layers:
            self._frequency[layer_idx, experts] += 1

    def worth(self, layer_idx: int) -> cache.Array:
        worth: cache.Array = self._frequency / self._distance[layer_idx][:, None]
        return worth


# The smallest number that is a mean. On the demo model's routes more passes have fewer hits, 512 four points fewer; one
# pass alone has up to four points more and keeps no history (docs/papers.md).
NUM_PASSES = 2


class Importance(cache.Eviction):
    """The mean of an expert's scores over the last `num_passes` passes through its layer, chosen or not.

    Scores are kept as float16, as in recordings, so that replay decides as the run did. If scores are not known, each
    chosen expert counts 1 and each other expert 0.
    Source:  Importance-Driven Expert Scheduling §5.3; the paper gives no number of passes. The experts that it protects
             because the running layer needs them are locked by `ExpertCache`.
    """

    def __init__(self, facts: cache.CacheFacts, num_passes: int = NUM_PASSES) -> None:
        self._last: cache.Array = np.zeros((len(facts.pages), num_passes, facts.pages.shape[1]), np.float16)
        self._sums: cache.Array = np.zeros(facts.pages.shape)  # exact: float64 is, for sums of some thousand float16
        self._num_passes = np.zeros(len(facts.pages), np.int64)

    def routed(self, layer_idx: int, experts: Sequence[int], scores: cache.Array | None) -> None:
        if scores is None:
            scores = np.zeros(self._sums.shape[1], np.float16)
            scores[list(experts)] = 1
        oldest = self._last[layer_idx, self._num_passes[layer_idx] % self._last.shape[1]]
        self._sums[layer_idx] -= oldest
        oldest[:] = scores
        self._sums[layer_idx] += oldest
        self._num_passes[layer_idx] += 1

    def worth(self, layer_idx: int) -> cache.Array:
        num_known = np.clip(self._num_passes, 1, self._last.shape[1])
        worth: cache.Array = self._sums / num_known[:, None]
        return worth


class Belady(cache.Eviction):
    """Belady's optimum: the expert that is needed again last is evicted first. Only replay knows the future.

    Args:    steps: all steps to come, in order: a layer and its experts.
    Source:  L. A. Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5
             (1966). Optimal if every expert takes equally many pages and every miss is fetched; if sizes differ, a good
             figure for comparison and no bound.
    """

    def __init__(self, facts: cache.CacheFacts, steps: Sequence[tuple[int, Sequence[int]]]) -> None:
        never = float(len(steps) + 1)
        self._worth = np.full(facts.pages.shape, -never)  # of each expert: minus the step that needs it next
        self._next: list[cache.Array] = []  # of each step, last first: the worth of its experts after it
        for number in range(len(steps) - 1, -1, -1):
            layer_idx, experts = steps[number]
            self._next.append(self._worth[layer_idx, experts])  # a copy
            self._worth[layer_idx, experts] = -number
        self._steps = steps
        self._num_done = 0

    def routed(self, layer_idx: int, experts: Sequence[int], scores: cache.Array | None) -> None:
        assert self._steps[self._num_done] == (layer_idx, experts), "the steps are those that were given"
        self._num_done += 1
        self._worth[layer_idx, experts] = self._next.pop()

    def worth(self, layer_idx: int) -> cache.Array:
        return self._worth


def placed_by_popularity(facts: cache.CacheFacts, num_pages: int) -> list[cache.ExpertKey]:
    """Returns the experts to place in `num_pages` pages, most popular first, over all layers.

    An expert that does not fit is skipped, and a smaller one may follow. Unless all experts are placed, pages for the
    largest expert stay free, which the other experts take in turn. Equally popular experts come in order.
    Source:  Fiddler (2402.07033) §3.2: "as many experts as the memory capacity permits in order of popularity".
    """
    if facts.is_elsewhere is None and facts.pages.sum() <= num_pages:
        return [cache.ExpertKey(*divmod(place, facts.pages.shape[1])) for place in range(facts.pages.size)]
    order = np.argsort(-facts.popularity.ravel(), kind="stable").tolist()
    return _fitting(order, min(num_pages, facts.num_pages - int(facts.pages.max())), facts)


def experts_to_start_with(facts: cache.CacheFacts) -> list[cache.ExpertKey]:
    """Returns the experts that fill an empty cache before a run, in the order in which they are fetched.

    An encoder's experts come first, in the order in which they run; then all others, most popular first. An expert that
    does not fit is skipped, and a smaller one may follow.
    Source:  EdgeMoE (2308.14352) §III-C2: "When initializing the expert buffer, we load encoder expert weights
             sequentially. For encoder-only models, the expert buffer is initialized with the experts having the highest
             frequency of usage." The paper says nothing of the memory that an encoder leaves, and nothing of a decoder
             alone, which its Table III initializes "in the way in §III-C2": both get the most popular experts.
    """
    first_place = facts.num_encoder_layers * facts.pages.shape[1]
    others = first_place + np.argsort(-facts.popularity.ravel()[first_place:], kind="stable")
    return _fitting([*range(first_place), *others.tolist()], facts.num_pages, facts)


def _fitting(places: Sequence[int], num_pages: int, facts: cache.CacheFacts) -> list[cache.ExpertKey]:
    """Returns those of the experts, given as flat indices, that fit one after the other; the others are skipped.

    Experts that a GPU computes are skipped too.
    """
    chosen, elsewhere = [], facts.is_elsewhere
    for place in places:
        key = cache.ExpertKey(*divmod(place, facts.pages.shape[1]))
        if facts.pages[key] <= num_pages and (elsewhere is None or not elsewhere[key]):
            num_pages -= int(facts.pages[key])
            chosen.append(key)
    return chosen


_EVICTIONS: dict[presets.EvictionName, Callable[[cache.CacheFacts], cache.Eviction]] = {
    "lru": LRU,
    "layer_lru": LayerLRU,
    "edgemoe": EdgeMoE,
    "importance": Importance,
    "none": NoEviction,
}


def eviction_of(preset: presets.Preset, facts: cache.CacheFacts) -> cache.Eviction:
    """Returns a new instance of the preset's eviction policy."""
    return _EVICTIONS[preset.eviction](facts)


def expert_cache_for(
    preset: presets.Preset, facts: cache.CacheFacts, made_by: Callable[..., cache.ExpertCache] = cache.ExpertCache
) -> cache.ExpertCache:
    """Returns a cache under the preset's policies; the experts that it places or starts with are resident."""
    placed = placed_by_popularity(facts, int(preset.placed_share * facts.num_pages))
    # Experts of no page are placed, whatever the share.
    initial = [key for key in experts_to_start_with(facts) if key not in placed] if preset.starts_filled else []
    return made_by(facts, eviction_of(preset, facts), placed, preset.keeps, initial)
