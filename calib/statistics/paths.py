"""Path statistics: learned from the routes of calibration text, and judged on held-out text.

T counts tokens, L MoE layers, E experts a layer, k experts a token; a *choice* is one expert of one token.
Source:  EdgeMoE (2308.14352) §III-C1, with one expert a token. With k > 1 most sets of experts are seen once, so a key
         must be seen PATH_MIN_SEEN times, and two rougher levels follow (`BackoffLevel`).
"""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack.calib.statistics.popularity import Routes, as_sets, count_pairs, count_tokens
from moe_pack.runtime.offload import PathStatistics
from moe_pack.runtime.offload.paths import PATH_MEMORY, PATH_MIN_SEEN, BackoffLevel, rows_as_keys
from moe_pack.runtime.offload.prefetch import ranked

Array = NDArray[Any]

ACCUMULATED_EXPERTS = 16  # as far as EdgeMoE's Fig. 8 can be read for models of many experts
COVERED_PERCENTS = (1, 5, 10, 20, 50)  # of the distinct paths, most frequent first
_CHUNK_TOKENS = 4096  # predicted at once in `evaluate`: bounds its memory to some [4096, E] arrays


@dataclass(frozen=True, slots=True)
class _Keys:
    """The exact keys of a layer and the experts that followed each."""

    keys: NDArray[np.uint16]  # [K, w]
    seen: NDArray[np.int64]  # [K]: how often
    # [K]: how many entries of `experts` and `counts` belong to each key, one key's after the other's
    lengths: NDArray[np.int64]
    experts: NDArray[np.int64]
    counts: NDArray[np.int64]

    def only(self, kept: NDArray[np.bool_]) -> "_Keys":
        entries = np.repeat(kept, self.lengths)
        return _Keys(self.keys[kept], self.seen[kept], self.lengths[kept], self.experts[entries], self.counts[entries])


def learn_paths(
    routes: Routes, num_experts: int, size_bytes: int, first_layers: Collection[int] = (0,)
) -> PathStatistics:
    """Returns the statistics of calibration routes [T, L, k], in at most `size_bytes` as `num_bytes` counts them.

    Tables and popularity are always kept: 4 L E + about 2 L E² counts bytes. Exact keys fill the remaining bytes, most
    seen first (of equals the earlier layer, then the lower key), up to the first key that does not fit.
    Args:    first_layers: those that begin a stack. No path enters them; they have no keys, and their counts are 0.
    """
    ordered = as_sets(routes, num_experts)
    T, L, k = ordered.shape
    known = _num_known(L, first_layers)
    count = np.dtype("<u2" if T < 2**16 else "<u4")
    popularity = count_tokens(ordered, num_experts).astype("<u4")
    after_one, after_two = (_learn_table(ordered, back, num_experts, count, known) for back in (1, 2))
    keys = [_learn_keys(ordered, l, num_experts, is_whole=known[l] == min(l, PATH_MEMORY)) for l in range(1, L)]
    tables_bytes, starts_bytes = popularity.nbytes + after_one.nbytes + after_two.nbytes, 4 * (L + 1) + 4
    kept = _prune(keys, size_bytes - tables_bytes - starts_bytes, count.itemsize)
    return PathStatistics(
        popularity=popularity,
        after_one=after_one,
        after_two=after_two,
        key_starts=_starts([0, *(len(layer.keys) for layer in kept)]),
        keys_one=np.concatenate([np.empty((0, k)), *(layer.keys for layer in kept[:1])]).astype("<u2"),
        keys_two=np.concatenate([np.empty((0, 2 * k)), *(layer.keys for layer in kept[1:])]).astype("<u2"),
        keys_seen=_joined([layer.seen for layer in kept], count),
        successor_starts=_starts(_joined([layer.lengths for layer in kept], np.dtype("<u4"))),
        successor_experts=_joined([layer.experts for layer in kept], np.dtype("<u2")),
        successor_counts=_joined([layer.counts for layer in kept], count),
    )


def _num_known(num_layers: int, first_layers: Collection[int]) -> list[int]:
    """Returns the number of known layers before each: those of its stack, at most PATH_MEMORY."""
    begins = [max(first for first in first_layers if first <= l) for l in range(num_layers)]
    return [min(l - begin, PATH_MEMORY) for l, begin in enumerate(begins)]


def _learn_table(
    ordered: NDArray[np.uint16], back: int, num_experts: int, dtype: np.dtype[Any], known: list[int]
) -> Array:
    L = ordered.shape[1]
    table = np.zeros((max(L - back, 0), num_experts, num_experts), dtype)
    for l in range(back, L):
        if known[l] >= back:
            table[l - back] = count_pairs(ordered[:, l - back], ordered[:, l], num_experts)
    return table


def _learn_keys(ordered: NDArray[np.uint16], l: int, num_experts: int, is_whole: bool) -> _Keys:
    """Returns the choices of layer `l` after each frequent key, keys ascending; none if a key is not whole."""
    T = len(ordered)
    rows = ordered[:, max(l - PATH_MEMORY, 0) : l].reshape(T, -1)  # [T, p, k] -> [T, p k]
    keys = rows_as_keys(rows)
    _, firsts, key_numbers, seen = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    often = (seen >= PATH_MIN_SEEN) & is_whole
    numbers = np.cumsum(often) - 1  # of the keys that stay
    of_token = key_numbers.reshape(T)
    stays = often[of_token]
    of_choices = numbers[of_token[stays], None] * num_experts + ordered[stays, l]  # [tokens, k] cells of [K, E]
    cells, counts = np.unique(of_choices, return_counts=True)
    key_of, experts = np.divmod(cells, num_experts)
    lengths = np.bincount(key_of, minlength=int(often.sum()))
    return _Keys(rows[firsts[often]], seen[often], lengths, experts, counts)


def _prune(layers: list[_Keys], free_bytes: int, count_bytes: int) -> list[_Keys]:
    """Returns the keys of each layer that fit, most seen first; their order stays."""
    if not layers:
        return []
    seen = np.concatenate([layer.seen for layer in layers])
    # The stored bytes of a key: its experts, count and start, then its successors and their counts.
    each = [2 * layer.keys.shape[1] + count_bytes + 4 + layer.lengths * (2 + count_bytes) for layer in layers]
    costs = np.concatenate(each)
    order = np.argsort(-seen, kind="stable")
    kept = np.zeros(len(seen), bool)
    kept[order[np.cumsum(costs[order]) <= free_bytes]] = True
    ends = np.cumsum([0, *(len(layer.keys) for layer in layers)])
    return [layer.only(kept[a:b]) for layer, (a, b) in zip(layers, pairwise(ends), strict=True)]


def _starts(lengths: Any) -> Array:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype("<u4")


def _joined(parts: list[NDArray[np.int64]], dtype: np.dtype[Any]) -> Array:
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype)


@dataclass(frozen=True, slots=True)
class LayerRecall:
    """How well one layer's experts were predicted."""

    recall: float  # share of the chosen experts that is among the n ranked first
    recall_doubled: float  # among the first 2n
    stage_share: tuple[float, float, float]  # of the tokens that each `BackoffLevel` predicted
    stage_recall: tuple[float | None, float | None, float | None]  # recall among those, None if there are none


def evaluate(
    statistics: PathStatistics, routes: Routes, num_predicted: int, first_layers: Collection[int] = (0,)
) -> tuple[LayerRecall, ...]:
    """Returns the recall of `num_predicted` experts in each MoE layer, on routes [T, L, k] of held-out text."""
    assert num_predicted >= 1, "nothing predicted recalls nothing"
    ordered = as_sets(routes, statistics.popularity.shape[1])
    known = _num_known(ordered.shape[1], first_layers)
    return tuple(_evaluate_layer(statistics, ordered, l, known[l], num_predicted) for l in range(ordered.shape[1]))


def _evaluate_layer(
    statistics: PathStatistics, ordered: Routes, l: int, num_known: int, num_predicted: int
) -> LayerRecall:
    hits, levels = _hits(statistics, ordered, l, num_known, 2 * num_predicted)
    k = ordered.shape[2]
    first = hits[:, min(num_predicted, hits.shape[1]) - 1]
    answered = [levels == level for level in BackoffLevel]
    exact, factored, popularity = (float(first[mask].mean()) / k if mask.any() else None for mask in answered)
    share_exact, share_factored, share_popularity = (float(mask.mean()) for mask in answered)
    return LayerRecall(
        recall=float(first.mean()) / k,
        recall_doubled=float(hits[:, -1].mean()) / k,
        stage_share=(share_exact, share_factored, share_popularity),
        stage_recall=(exact, factored, popularity),
    )


def _hits(
    statistics: PathStatistics, ordered: Routes, l: int, num_known: int, num_predicted: int
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Counts each token's experts among the first 1, ..., n predicted, int64 [T, n], n <= E; and levels u8 [T]."""
    hits, levels = [], []
    for start in range(0, len(ordered), _CHUNK_TOKENS):
        tokens = ordered[start : start + _CHUNK_TOKENS]
        probabilities, level = statistics.predict(l, tokens[:, max(l - num_known, 0) : l])
        chosen = np.zeros(probabilities.shape, bool)
        np.put_along_axis(chosen, tokens[:, l].astype(np.int64), True, axis=1)
        hits.append(np.take_along_axis(chosen, ranked(probabilities, num_predicted), axis=1).cumsum(axis=1))
        levels.append(level)
    return np.concatenate(hits), np.concatenate(levels)


def accumulated_frequency(
    statistics: PathStatistics, routes: Routes, first_layers: Collection[int] = (0,)
) -> NDArray[np.float64]:
    """Returns the share of choices among the n likeliest experts, [3, L, n] by the number of known layers before.

    Source:  EdgeMoE Fig. 8, right, on calibration text; held-out text gives the true value. n is at most E and 16.
    """
    ordered = as_sets(routes, statistics.popularity.shape[1])
    _, L, k = ordered.shape
    known = _num_known(L, first_layers)
    return np.array(
        [
            [_hits(statistics, ordered, l, min(n, known[l]), ACCUMULATED_EXPERTS)[0].mean(axis=0) / k for l in range(L)]
            for n in range(PATH_MEMORY + 1)
        ]
    )


@dataclass(frozen=True, slots=True, eq=False)
class PathCoverage:
    """How unevenly tokens spread over the paths through `num_layers` MoE layers from `first_layer` on."""

    first_layer: int
    num_layers: int
    frequencies: NDArray[np.uint32]  # tokens of each distinct path, most frequent first
    # Share of all tokens on the most frequent 1, 5, 10, 20 and 50% of the distinct paths (COVERED_PERCENTS; rounded up
    # to whole paths).
    covered: tuple[float, ...]


def path_coverage(routes: Routes, num_experts: int, first_layers: Collection[int] = (0,)) -> tuple[PathCoverage, ...]:
    """Returns the spread over whole paths if a token has one expert, else over the sets of each three layers.

    Args:    routes: [T, L, k]; with k > 1 and fewer than three layers, all of them are one path.   first_layers: those
             that begin a stack; no path leads into another.
    Source:  EdgeMoE Fig. 4, with k = 1. Whole paths of more experts would all be distinct.
    """
    ordered = as_sets(routes, num_experts)
    T, L, k = ordered.shape
    coverages = []
    for begin, end in pairwise([*sorted(first_layers), L]):
        length = end - begin if k == 1 else min(3, end - begin)
        windows = range(begin, end - length + 1)
        coverages += [_cover(l, length, ordered[:, l : l + length].reshape(T, -1)) for l in windows]  # [T, length k]
    return tuple(coverages)


def _cover(first_layer: int, num_layers: int, paths: Routes) -> PathCoverage:
    _, counts = np.unique(rows_as_keys(paths), return_counts=True)
    frequencies = np.sort(counts)[::-1].astype(np.uint32)
    taken = np.cumsum(frequencies, dtype=np.int64)
    nums = [-(-percent * len(counts) // 100) for percent in COVERED_PERCENTS]
    return PathCoverage(first_layer, num_layers, frequencies, tuple(float(taken[n - 1] / len(paths)) for n in nums))
