"""Path statistics: the experts of a MoE layer foretold from those its token chose at the two layers before.

Not a predictor that reads hidden states. Here T counts tokens, L MoE layers, E experts a layer, k experts a token; a
*choice* is one expert of one token. The file of a profile that holds the arrays is its writer's affair.

Source:  EdgeMoE (2308.14352) §III-C1. Its dictionary holds probabilities for pairs of layers, one expert a token; with
         k > 1 most sets of experts are seen once, so a key must be seen MIN_SEEN times, and two rougher stages follow.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack.calib.coverage import Routes, as_sets, count_pairs, count_tokens
from moe_pack.formats import PackError

Array = NDArray[Any]

MIN_SEEN = 8  # how often calibration must have seen an exact key for it to be used
# Choices, for each expert of a layer, by which counts lean towards popularity. On the demo model's routes of 16,384
# tokens anything from 0.25 to 4 recalls the same; of 512 tokens 16 and more recalls less.
SMOOTHING = 1
MEMORY = 2  # how many layers back the statistics look
ACCUMULATED_EXPERTS = 16  # as far as EdgeMoE's Fig. 8 could be read for models of many experts
COVERED_PERCENTS = (1, 5, 10, 20, 50)  # of the distinct paths, most frequent first
_CHUNK_TOKENS = 4096  # predicted at once in `evaluate`: bounds its memory to some [4096, E] arrays


class Stage(IntEnum):
    """Which statistics answered a query."""

    EXACT = 0
    FACTORED = 1
    POPULARITY = 2


@dataclass(frozen=True, slots=True, eq=False)
class PathStatistics:
    """What calibration saw of the paths through L layers of E experts, as stored: counts of tokens.

    `popularity` u32 [L, E]. `after_one[l-1, e', e]`, `after_two[l-2, e', e]`: tokens that chose e at l and e' one or
    two layers before. Exact keys, layer by layer, ascending: those of layer l are `key_starts[l]` to
    `key_starts[l+1]`; `keys_one` [K1, k] holds layer 1's, the set at layer 0; `keys_two` [K2, 2k] all others, the set
    at l-2 and that at l-1; both u16, starts u32. A key was seen `keys_seen` times and followed by `successor_experts`
    (u16), each `successor_counts` times, from `successor_starts[key]` to `successor_starts[key + 1]`. Counts but for
    popularity are u16 where T < 65536, else u32.
    """

    popularity: Array
    after_one: Array
    after_two: Array
    key_starts: Array
    keys_one: Array
    keys_two: Array
    keys_seen: Array
    successor_starts: Array
    successor_experts: Array
    successor_counts: Array

    @property
    def experts_per_token(self) -> int:
        """The k of the routes learned from."""
        return int(self.keys_one.shape[1])

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, in memory as in a file (whose header comes on top)."""
        return sum(int(array.nbytes) for array in self.arrays().values())

    def arrays(self) -> dict[str, Array]:
        """Everything, as little-endian arrays by name: what `from_arrays` reads."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, Array], place: str, num_layers: int, num_experts: int, experts_per_token: int
    ) -> "PathStatistics":
        """The statistics that `arrays()` gave, for a model of this shape; nothing in them is trusted.

        Args:    place: the file they come from, for messages.
        Raises:  PackError naming the array that is missing, unknown, of another dtype or shape, or whose values
                 cannot be counts of T tokens. Not checked: that exact keys agree with the tables.
        """
        known = [field.name for field in fields(cls)]
        for name in (*arrays, *known):
            if name not in known or name not in arrays:
                state = "unknown" if name in arrays else "missing"
                raise PackError(f"{place}: tensor {name!r} is {state}; profile the model anew")
        foreign = cls(**{name: arrays[name] for name in known})
        _Foreign(foreign, place, num_layers, num_experts, experts_per_token).check()
        return foreign

    def predict(self, l: int, before: Routes) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        """How likely each expert of layer `l` is, for N tokens, and the Stage that says so.

        Meaning: the probability that one choice falls on the expert, summing to 1 over a layer's experts.
                 EXACT: key = the sets at l-2 and l-1 (layer 1: at 0): count after key / (k * times key seen).
                 FACTORED: geometric mean over the e' before that calibration saw, of P(e | e') =
                 (count[e', e] + s * popularity_e) / (sum_e count[e', e] + s), s = SMOOTHING * E, normalised.
                 POPULARITY: tokens / (k T), where no layer before is given or none of its experts was ever seen.
        Args:    before: [N, p, k], as sets, the p layers just before l, oldest first; p at most 2. With fewer layers
                 than l has before it, exact keys are passed over. Expert indices are not checked.
        Returns: [N, E], and [N] u8; rank the first with `ranked`.
        """
        ordered = np.sort(before, axis=2)  # the same sums in the same order, however a token's experts are listed
        share = self._share(l)
        shares = np.tile(share.astype(np.float32), (len(ordered), 1))
        stages = np.full(len(ordered), Stage.POPULARITY, np.uint8)
        keys = self._find(l, ordered)
        exact = keys >= 0
        shares[exact], stages[exact] = self._exact(keys[exact]), Stage.EXACT
        rest = np.flatnonzero(~exact)
        factored, known = self._factored(l, ordered[rest])
        shares[rest[known]], stages[rest[known]] = factored, Stage.FACTORED
        return shares, stages

    def _share(self, l: int) -> NDArray[np.float64]:
        share: NDArray[np.float64] = self.popularity[l] / self.popularity[l].sum()
        return share

    def _find(self, l: int, ordered: Routes) -> NDArray[np.int64]:
        """The exact key of each token, -1 for none: [N, p, k] gives [N]."""
        first, end = (int(start) for start in self.key_starts[l : l + 2])
        if first == end or ordered.shape[1] != min(l, MEMORY):
            return np.full(len(ordered), -1)
        in_one = len(self.keys_one)
        stored = _as_bytes(self.keys_one if l == 1 else self.keys_two[first - in_one : end - in_one])
        wanted = _as_bytes(ordered.reshape(len(ordered), stored.dtype.itemsize // 2))  # [N, p, k] -> [N, p k]
        places = np.searchsorted(stored, wanted)
        there = stored[np.minimum(places, end - first - 1)] == wanted
        return np.where(there, first + places, -1)

    def _exact(self, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """What followed each key, as shares of choices: [N] gives [N, E]."""
        starts, ends = (self.successor_starts[places].astype(np.int64) for places in (keys, keys + 1))
        entries, rows = _slices(starts, ends)
        shares = np.zeros((len(keys), self.popularity.shape[1]), np.float32)
        choices = self.keys_seen[keys].astype(np.int64) * self.experts_per_token
        shares[rows, self.successor_experts[entries]] = self.successor_counts[entries] / choices[rows]
        return shares

    def _factored(self, l: int, ordered: Routes) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """The second stage for those tokens [N] of which some expert was seen before, and which those are."""
        share, smoothing = self._share(l), SMOOTHING * self.popularity.shape[1]
        logs = np.zeros((len(ordered), len(share)))
        num_known = np.zeros(len(ordered), np.int64)
        for back in range(1, ordered.shape[1] + 1):
            table = (self.after_one, self.after_two)[back - 1][l - back]
            used, places = np.unique(ordered[:, -back], return_inverse=True)
            counts = table[used]
            totals = counts.sum(axis=1, keepdims=True, dtype=np.int64)
            with np.errstate(divide="ignore"):  # an expert that no token chose has the logarithm -inf throughout
                row_logs = np.log((counts + smoothing * share) / (totals + smoothing))
            known = totals[:, 0] > 0
            row_logs[~known] = 0
            for column in places.reshape(ordered[:, -back].shape).T:  # [N, k]: k gathers need no [N, k, E]
                logs += row_logs[column]
                num_known += known[column]
        some = num_known > 0
        mean = logs[some] / num_known[some, None]
        weights = np.exp(mean - mean.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True), some


def _as_bytes(keys: Routes) -> Array:
    """Rows of expert indices as one value each, compared as the rows are: [N, w] gives [N]."""
    big_endian = np.ascontiguousarray(keys, dtype=">u2")
    return big_endian.view(np.dtype((np.void, 2 * keys.shape[1])))[:, 0]


def _slices(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All positions of the slices one after another, and for each the slice it is of."""
    lengths = ends - starts
    rows = np.repeat(np.arange(len(starts)), lengths)
    return np.arange(len(rows)) + (starts - (np.cumsum(lengths) - lengths))[rows], rows


def ranked(probabilities: NDArray[np.float32], num_predicted: int) -> NDArray[np.int64]:
    """The likeliest experts of each row, best first, equals by lowest index: [N, E] gives [N, num_predicted]."""
    return np.argsort(-probabilities, axis=1, kind="stable")[:, :num_predicted].astype(np.int64, copy=False)


@dataclass(frozen=True, slots=True)
class _Keys:
    """Exact keys: `keys` [K, w], each seen `seen` times; `lengths` of them follow in `experts` and `counts`."""

    keys: NDArray[np.uint16]
    seen: NDArray[np.int64]
    lengths: NDArray[np.int64]
    experts: NDArray[np.int64]
    counts: NDArray[np.int64]

    def only(self, kept: NDArray[np.bool_]) -> "_Keys":
        """Those of a mask [K]."""
        entries = np.repeat(kept, self.lengths)
        return _Keys(self.keys[kept], self.seen[kept], self.lengths[kept], self.experts[entries], self.counts[entries])


def learn_paths(routes: Routes, num_experts: int, size_bytes: int) -> PathStatistics:
    """The statistics of calibration routes that take at most `size_bytes`, as `num_bytes` counts them.

    Tables and popularity are always kept: 4 L E + about 2 L E² counts bytes, even where they alone exceed the size.
    What room they leave goes to exact keys, most seen first (equals: earlier layer, then lower key), up to the first
    that does not fit.

    Args:    routes: [T, L, k], what the router chose; the order within a token's k does not matter.
    """
    ordered = as_sets(routes, num_experts)
    T, L, k = ordered.shape
    count = np.dtype("<u2" if T < 2**16 else "<u4")
    popularity = count_tokens(ordered, num_experts).astype("<u4")
    after_one, after_two = (_learn_table(ordered, back, num_experts, count) for back in (1, 2))
    found = [_learn_keys(ordered, l, num_experts) for l in range(1, L)]
    tables_bytes = popularity.nbytes + after_one.nbytes + after_two.nbytes
    starts_bytes = 4 * (L + 1) + 4
    kept = _prune(found, size_bytes - tables_bytes - starts_bytes, count.itemsize)
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


def _learn_table(ordered: NDArray[np.uint16], back: int, num_experts: int, dtype: np.dtype[Any]) -> Array:
    L = ordered.shape[1]
    table = np.empty((max(L - back, 0), num_experts, num_experts), dtype)
    for l in range(back, L):
        table[l - back] = count_pairs(ordered[:, l - back], ordered[:, l], num_experts)
    return table


def _learn_keys(ordered: NDArray[np.uint16], l: int, num_experts: int) -> _Keys:
    """What layer `l` chose after each key that was seen MIN_SEEN times or more, keys ascending."""
    T = len(ordered)
    rows = ordered[:, max(l - MEMORY, 0) : l].reshape(T, -1)  # [T, p, k] -> [T, p k]
    _, firsts, places, seen = np.unique(_as_bytes(rows), return_index=True, return_inverse=True, return_counts=True)
    often = seen >= MIN_SEEN
    numbers = np.cumsum(often) - 1  # of the keys that stay
    of_token = places.reshape(T)
    stays = often[of_token]
    cells, counts = np.unique(
        numbers[of_token[stays], None] * num_experts + ordered[stays, l], return_counts=True
    )  # [tokens, k] cells of [K, E]
    key_of, experts = np.divmod(cells, num_experts)
    lengths = np.bincount(key_of, minlength=int(often.sum()))
    return _Keys(rows[firsts[often]], seen[often], lengths, experts, counts)


def _prune(found: list[_Keys], room_bytes: int, count_bytes: int) -> list[_Keys]:
    """The keys that fit, most seen first, in their old order."""
    if not found:
        return []
    seen = np.concatenate([layer.seen for layer in found])
    costs = np.concatenate([_key_bytes(layer, count_bytes) for layer in found])
    order = np.argsort(-seen, kind="stable")
    kept = np.zeros(len(seen), bool)
    kept[order[np.cumsum(costs[order]) <= room_bytes]] = True
    ends = np.cumsum([0, *(len(layer.keys) for layer in found)])
    return [layer.only(kept[a:b]) for layer, (a, b) in zip(found, pairwise(ends), strict=True)]


def _key_bytes(layer: _Keys, count_bytes: int) -> NDArray[np.int64]:
    """Stored bytes of each key: its experts, times seen and start; its successors and their counts."""
    costs: NDArray[np.int64] = 2 * layer.keys.shape[1] + count_bytes + 4 + layer.lengths * (2 + count_bytes)
    return costs


def _starts(lengths: Any) -> Array:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype("<u4")


def _joined(parts: list[NDArray[np.int64]], dtype: np.dtype[Any]) -> Array:
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype)


@dataclass(frozen=True, slots=True)
class _Foreign:
    """Statistics out of a file, checked array by array: size before meaning, each before what rests on it."""

    found: PathStatistics
    place: str
    L: int
    E: int
    k: int

    def check(self) -> None:
        """Raises PackError for the first array that cannot be."""
        found, L, E, k = self.found, self.L, self.E, self.k
        self._form("popularity", "<u4", (L, E))
        choices, most = found.popularity.sum(axis=1, dtype=np.int64), found.popularity.max(axis=1)
        T = int(choices[0]) // k
        fits = np.equal(choices, max(T, 1) * k)
        self._all("popularity", fits, "layer", choices, f"{k} choices of each token, of equally many at every layer")
        self._all("popularity", most <= T, "layer", most, f"at most all {T} tokens")
        count = "<u2" if T < 2**16 else "<u4"
        for back, name in enumerate(("after_one", "after_two"), start=1):
            self._form(name, count, (max(L - back, 0), E, E))
            self._check_table(name, back)
        self._check_keys(T, count)
        self._check_successors(count)

    def _check_table(self, name: str, back: int) -> None:
        table, popularity = getattr(self.found, name), self.found.popularity.astype(np.int64) * self.k
        before, after = popularity[: max(self.L - back, 0)], popularity[back:]
        wrong = (table.sum(axis=2, dtype=np.int64) != before) | (table.sum(axis=1, dtype=np.int64) != after)
        num_wrong = wrong.sum(axis=1)
        self._all(name, num_wrong == 0, "table", num_wrong, "no expert whose counts do not add up to its popularity")

    def _check_keys(self, T: int, count: str) -> None:
        found, k = self.found, self.k
        starts = self._starts("key_starts", self.L + 1)
        self._all("key_starts", starts[:2] == 0, "position", starts, "0: layer 0 has none before it")
        in_one = int(starts[min(2, self.L)])
        self._form("keys_one", "<u2", (in_one, k))
        self._form("keys_two", "<u2", (int(starts[-1]) - in_one, 2 * k))
        self._form("keys_seen", count, (int(starts[-1]),))
        for name, first in (("keys_one", 0), ("keys_two", in_one)):
            keys = getattr(found, name)
            sets = keys.reshape(len(keys), keys.shape[1] // k, k)  # [K, p k] -> [K, p, k]
            fits = (keys < self.E).all(axis=1) & (sets[..., 1:] > sets[..., :-1]).all(axis=(1, 2))
            self._all(name, fits, "key", keys, f"sets of ascending experts below {self.E}")
            rises = np.ones(len(keys), bool)
            rises[1:] = _above(keys[1:], keys[:-1])
            rises[starts[(starts >= first) & (starts < first + len(keys))] - first] = True  # a layer begins anew
            self._all(name, rises, "key", keys, "one above that before it")
        fits = (found.keys_seen >= MIN_SEEN) & (found.keys_seen <= T)
        self._all("keys_seen", fits, "key", found.keys_seen, f"from {MIN_SEEN} to {T} tokens")

    def _check_successors(self, count: str) -> None:
        found, k = self.found, self.k
        starts = self._starts("successor_starts", len(found.keys_seen) + 1)
        self._form("successor_experts", "<u2", (int(starts[-1]),))
        self._form("successor_counts", count, (int(starts[-1]),))
        experts, counts, seen = found.successor_experts, found.successor_counts, found.keys_seen.astype(np.int64)
        _, rows = _slices(starts[:-1], starts[1:])
        fits = experts < self.E
        fits[1:] &= (experts[1:] > experts[:-1]) | (rows[1:] != rows[:-1])
        self._all("successor_experts", fits, "position", experts, f"ascending experts below {self.E}")
        fits = (counts > 0) & (counts <= seen[rows])
        self._all("successor_counts", fits, "position", counts, "at least 1 and at most what its key was seen")
        totals = np.bincount(rows, counts, minlength=len(seen)).astype(np.int64)  # as float64: exact to 2^53
        self._all("successor_counts", totals == seen * k, "key", totals, f"{k} choices of each token")

    def _starts(self, name: str, length: int) -> NDArray[np.int64]:
        self._form(name, "<u4", (length,))
        starts: NDArray[np.int64] = getattr(self.found, name).astype(np.int64)
        rises = starts == np.maximum.accumulate(starts)
        rises[0] &= starts[0] == 0
        self._all(name, rises, "position", starts, "numbers that rise from 0")
        return starts

    def _form(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        array = getattr(self.found, name)
        if array.dtype != np.dtype(dtype) or array.shape != shape:
            found, expected = (f"{np.dtype(d).str} {list(s)}" for d, s in ((array.dtype, array.shape), (dtype, shape)))
            raise PackError(
                f"{self.place}: tensor {name!r}: found {found}, expected {expected}; profile the model anew"
            )

    def _all(self, name: str, fits: NDArray[np.bool_], where: str, values: Array, expected: str) -> None:
        wrong = np.flatnonzero(~fits)
        if wrong.size:
            place = f"{self.place}: tensor {name!r}, {where} {wrong[0]}"
            raise PackError(f"{place}: found {values[wrong[0]].tolist()}, expected {expected}; profile the model anew")


def _above(keys: Array, others: Array) -> NDArray[np.bool_]:
    """Whether each row comes after the other's: [N, w] and [N, w] give [N]."""
    differs = keys != others
    column = differs.argmax(axis=1)
    rows = np.arange(len(keys))
    above: NDArray[np.bool_] = keys[rows, column] > others[rows, column]  # equal rows: column 0, not above
    return above


@dataclass(frozen=True, slots=True)
class LayerRecall:
    """How well one layer's experts were foretold.

    `recall`: share of the truly chosen experts among the n ranked first; `recall_doubled`: among the first 2n.
    `stage_share`: share of the tokens each Stage answered; `stage_recall`: recall among those, None where none.
    """

    recall: float
    recall_doubled: float
    stage_share: tuple[float, float, float]
    stage_recall: tuple[float | None, float | None, float | None]


def evaluate(statistics: PathStatistics, routes: Routes, num_predicted: int) -> tuple[LayerRecall, ...]:
    """For each MoE layer, how much of what was chosen lay among the `num_predicted` experts ranked first.

    Args:    routes: [T, L, k], of held-out text: on calibration's own the figures flatter.
    """
    assert num_predicted >= 1, "nothing predicted recalls nothing"
    ordered = as_sets(routes, statistics.popularity.shape[1])
    return tuple(_evaluate_layer(statistics, ordered, l, num_predicted) for l in range(ordered.shape[1]))


def _evaluate_layer(statistics: PathStatistics, ordered: Routes, l: int, num_predicted: int) -> LayerRecall:
    hits, stages = _hits(statistics, ordered, l, MEMORY, 2 * num_predicted)
    k = ordered.shape[2]
    first = hits[:, min(num_predicted, hits.shape[1]) - 1]
    answered = [stages == stage for stage in Stage]
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
    """How many of each token's experts lie among the first 1, 2, ... predicted, [T, n], n at most E; and the Stage.

    The prediction knows the experts at `num_known` layers before `l`, or as many as there are.
    """
    hits, stages = [], []
    for start in range(0, len(ordered), _CHUNK_TOKENS):
        tokens = ordered[start : start + _CHUNK_TOKENS]
        probabilities, stage = statistics.predict(l, tokens[:, max(l - num_known, 0) : l])
        chosen = np.zeros(probabilities.shape, bool)
        np.put_along_axis(chosen, tokens[:, l].astype(np.int64), True, axis=1)
        hits.append(np.take_along_axis(chosen, ranked(probabilities, num_predicted), axis=1).cumsum(axis=1))
        stages.append(stage)
    return np.concatenate(hits), np.concatenate(stages)


def accumulated_frequency(statistics: PathStatistics, routes: Routes) -> NDArray[np.float64]:
    """How much of each layer's choices falls on the n experts held likeliest, knowing 0, 1 or 2 layers before.

    Args:    routes: [T, L, k]; of calibration's own text this is what EdgeMoE shows, of held-out text what it is worth.
    Returns: [3, L, n] by how many layers are known (where fewer come before, those), n up to E, at most 16.
    Source:  EdgeMoE Fig. 8 (right).
    """
    ordered = as_sets(routes, statistics.popularity.shape[1])
    _, L, k = ordered.shape
    return np.array(
        [
            [_hits(statistics, ordered, l, num_known, ACCUMULATED_EXPERTS)[0].mean(axis=0) / k for l in range(L)]
            for num_known in range(MEMORY + 1)
        ]
    )


@dataclass(frozen=True, slots=True, eq=False)
class PathCoverage:
    """How unevenly tokens spread over the paths through `num_layers` MoE layers from `first_layer` on.

    `frequencies`: tokens of each distinct path, most frequent first. `covered`: share of all tokens on the most
    frequent 1, 5, 10, 20 and 50% of the distinct paths (COVERED_PERCENTS; rounded up to whole paths).
    """

    first_layer: int
    num_layers: int
    frequencies: NDArray[np.uint32]
    covered: tuple[float, ...]

    @property
    def num_paths(self) -> int:
        """Distinct paths."""
        return len(self.frequencies)


def path_coverage(routes: Routes, num_experts: int) -> tuple[PathCoverage, ...]:
    """The spread over whole paths where a token has one expert, else over each three successive layers' sets.

    Args:    routes: [T, L, k]; with k > 1 and fewer than three layers, all of them are one path.
    Source:  EdgeMoE Fig. 4, whose models have k = 1; of more experts whole paths would all be distinct.
    """
    ordered = as_sets(routes, num_experts)
    T, L, k = ordered.shape
    length = L if k == 1 else min(3, L)
    return tuple(
        _cover(l, length, ordered[:, l : l + length].reshape(T, -1))  # [T, length, k] -> [T, length k]
        for l in range(L - length + 1)
    )


def _cover(first_layer: int, num_layers: int, paths: Routes) -> PathCoverage:
    _, counts = np.unique(_as_bytes(paths), return_counts=True)
    frequencies = np.sort(counts)[::-1].astype(np.uint32)
    taken = np.cumsum(frequencies, dtype=np.int64)
    nums = [-(-percent * len(counts) // 100) for percent in COVERED_PERCENTS]
    return PathCoverage(first_layer, num_layers, frequencies, tuple(float(taken[n - 1] / len(paths)) for n in nums))
