"""Path statistics: predict the experts of a MoE layer from those that the token chose in the two layers before.

T is the number of tokens, L of MoE layers, E of experts a layer, k of experts a token; a *choice* is one expert of one
token.

Source:  EdgeMoE (2308.14352) §III-C1. Its dictionary has probabilities for pairs of layers, with one expert a token.
         With k > 1, calibration sees most sets of experts once; therefore a key must be seen PATH_MIN_SEEN times, and
         two rougher stages follow.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import PackError

Array = NDArray[Any]

PATH_MIN_SEEN = 8  # the fewest tokens of an exact key


def slices(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns all positions of the slices, one slice after another, and the slice of each position."""
    lengths = ends - starts
    rows = np.repeat(np.arange(len(starts)), lengths)
    return np.arange(len(rows)) + (starts - (np.cumsum(lengths) - lengths))[rows], rows


@dataclass(frozen=True, slots=True)
class PathChecks:
    """The checks of path statistics from a file: sizes before values, and first the arrays that others refer to."""

    arrays: Mapping[str, Array]
    place: str
    L: int
    E: int
    k: int

    def check(self) -> None:
        """Checks all arrays. Raises PackError, which names the first array that cannot be right."""
        arrays, L, E, k = self.arrays, self.L, self.E, self.k
        self._form("popularity", "<u4", (L, E))
        choices, most = arrays["popularity"].sum(axis=1, dtype=np.int64), arrays["popularity"].max(axis=1)
        T = int(choices[0]) // k
        fits = np.equal(choices, max(T, 1) * k)
        expected = f"{k} choices of each token, and equally many tokens in every layer"
        self._all("popularity", fits, "layer", choices, expected)
        self._all("popularity", most <= T, "layer", most, f"at most all {T} tokens")
        count = "<u2" if T < 2**16 else "<u4"
        for back, name in enumerate(("after_one", "after_two"), start=1):
            self._form(name, count, (max(L - back, 0), E, E))
            self._check_table(name, back)
        self._check_keys(T, count)
        self._check_successors(count)

    def _check_table(self, name: str, back: int) -> None:
        table, popularity = self.arrays[name], self.arrays["popularity"].astype(np.int64) * self.k
        before, after = popularity[: max(self.L - back, 0)], popularity[back:]
        wrong = (table.sum(axis=2, dtype=np.int64) != before) | (table.sum(axis=1, dtype=np.int64) != after)
        is_counted = (table > 0).any(axis=(1, 2))  # otherwise the layer before is of another stack
        num_wrong = wrong.sum(axis=1) * is_counted
        self._all(name, num_wrong == 0, "table", num_wrong, "0 experts whose counts do not add up to their popularity")

    def _check_keys(self, T: int, count: str) -> None:
        arrays, k = self.arrays, self.k
        starts = self._starts("key_starts", self.L + 1)
        self._all("key_starts", starts[:2] == 0, "position", starts, "0: no layer is before layer 0")
        in_one = int(starts[min(2, self.L)])
        self._form("keys_one", "<u2", (in_one, k))
        self._form("keys_two", "<u2", (int(starts[-1]) - in_one, 2 * k))
        self._form("keys_seen", count, (int(starts[-1]),))
        for name, first in (("keys_one", 0), ("keys_two", in_one)):
            keys: Any = arrays[name]
            sets = keys.reshape(len(keys), keys.shape[1] // k, k)  # [K, p k] -> [K, p, k]
            fits = (keys < self.E).all(axis=1) & (sets[..., 1:] > sets[..., :-1]).all(axis=(1, 2))
            self._all(name, fits, "key", keys, f"sets of ascending experts below {self.E}")
            rises = np.ones(len(keys), bool)
            rises[1:] = _above(keys[1:], keys[:-1])
            rises[starts[(starts >= first) & (starts < first + len(keys))] - first] = True  # the first key of a layer
            self._all(name, rises, "key", keys, "keys in ascending order")
        fits = (arrays["keys_seen"] >= PATH_MIN_SEEN) & (arrays["keys_seen"] <= T)
        self._all("keys_seen", fits, "key", arrays["keys_seen"], f"from {PATH_MIN_SEEN} to {T} tokens")

    def _check_successors(self, count: str) -> None:
        arrays, k = self.arrays, self.k
        starts = self._starts("successor_starts", len(arrays["keys_seen"]) + 1)
        self._form("successor_experts", "<u2", (int(starts[-1]),))
        self._form("successor_counts", count, (int(starts[-1]),))
        experts, counts = arrays["successor_experts"], arrays["successor_counts"]
        seen = arrays["keys_seen"].astype(np.int64)
        _, rows = slices(starts[:-1], starts[1:])
        fits = experts < self.E
        fits[1:] &= (experts[1:] > experts[:-1]) | (rows[1:] != rows[:-1])
        self._all("successor_experts", fits, "position", experts, f"ascending experts below {self.E}")
        fits = (counts > 0) & (counts <= seen[rows])
        self._all("successor_counts", fits, "position", counts, "at least 1 and at most the count of its key")
        totals = np.bincount(rows, counts, minlength=len(seen)).astype(np.int64)  # as float64: exact to 2^53
        self._all("successor_counts", totals == seen * k, "key", totals, f"{k} choices of each token")

    def _starts(self, name: str, length: int) -> NDArray[np.int64]:
        self._form(name, "<u4", (length,))
        starts: NDArray[np.int64] = self.arrays[name].astype(np.int64)
        rises = starts == np.maximum.accumulate(starts)
        rises[0] &= starts[0] == 0
        self._all(name, rises, "position", starts, "ascending numbers from 0")
        return starts

    def _form(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        array = self.arrays[name]
        if array.dtype != np.dtype(dtype) or array.shape != shape:
            found, expected = (f"{np.dtype(d).str} {list(s)}" for d, s in ((array.dtype, array.shape), (dtype, shape)))
            place = f"{self.place}: tensor {name!r}"
            raise PackError(f"{place}: found {found}, expected {expected}; profile the model again")

    def _all(self, name: str, fits: NDArray[np.bool_], where: str, values: Array, expected: str) -> None:
        wrong = np.flatnonzero(~fits)
        if wrong.size:
            place = f"{self.place}: tensor {name!r}, {where} {wrong[0]}"
            raise PackError(f"{place}: found {values[wrong[0]].tolist()}, expected {expected}; profile the model again")


def _above(keys: Array, others: Array) -> NDArray[np.bool_]:
    differs = keys != others
    column = differs.argmax(axis=1)
    rows = np.arange(len(keys))
    above: NDArray[np.bool_] = keys[rows, column] > others[rows, column]  # equal rows: column 0, not above
    return above


Routes = NDArray[np.integer[Any]]

# Additional choices for each expert of a layer, distributed by popularity, that smooth the counts. On the demo model's
# routes of 16,384 tokens the recall is the same from 0.25 to 4; on 512 tokens it falls from 16 on.
SMOOTHING = 1
PATH_MEMORY = 2  # layers before the predicted one


class BackoffLevel(IntEnum):
    """The statistics that answered a query."""

    EXACT = 0
    FACTORED = 1
    POPULARITY = 2


@dataclass(frozen=True, slots=True, eq=False)
class PathStatistics:
    """Counts of calibration tokens on the paths through L layers of E experts, as stored.

    All counts except popularity are u16 if T < 65536, else u32; starts are u32, experts u16.
    """

    popularity: Array  # u32 [L, E]
    after_one: Array  # [l-1, e', e]: tokens that chose e at l and e' one layer before; 0 if that is of another stack
    after_two: Array  # [l-2, e', e]: likewise, two layers before
    key_starts: Array  # [L + 1]: exact keys stand layer by layer, ascending; those of l are before `key_starts[l + 1]`
    keys_one: Array  # [K1, k]: keys of layer 1, the set at layer 0
    keys_two: Array  # [K2, 2k]: all others, the set at l-2 and that at l-1
    keys_seen: Array  # how often a key was seen
    successor_starts: Array  # by key: where the experts after it begin
    successor_experts: Array
    successor_counts: Array

    @property
    def experts_per_token(self) -> int:
        """The k of the counted routes."""
        return int(self.keys_one.shape[1])

    @property
    def num_bytes(self) -> int:
        """The bytes of all arrays."""
        return sum(int(array.nbytes) for array in self.arrays().values())

    def arrays(self) -> dict[str, Array]:
        """Returns all arrays by name, little-endian."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, Array], place: str, num_layers: int, num_experts: int, experts_per_token: int
    ) -> "PathStatistics":
        """Returns the statistics with these arrays after all checks.

        Args:    place: the file of the arrays, for messages.
        Raises:  PackError, which names an array that is missing, unknown, of another dtype or shape, or with values
                 that cannot be counts. It does not check that exact keys agree with the tables.
        """
        known = [field.name for field in fields(cls)]
        for name in (*arrays, *known):
            if name not in known or name not in arrays:
                state = "unknown" if name in arrays else "missing"
                raise PackError(f"{place}: tensor {name!r} is {state}; profile the model again")
        PathChecks(arrays, place, num_layers, num_experts, experts_per_token).check()
        return cls(**{name: arrays[name] for name in known})

    def predict(self, l: int, before: Routes) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        """Returns how likely each expert of layer `l` is for N tokens, float32 [N, E], and the `BackoffLevel`, u8 [N].

        Meaning: the probability that one choice falls on the expert, summing to 1 over a layer's experts.
                 EXACT: key = the sets at l-2 and l-1 (layer 1: at 0): count after key / (k * times key seen).
                 FACTORED: geometric mean, over the e' before that calibration has seen, of P(e | e') =
                 (count[e', e] + s * popularity_e) / (sum_e count[e', e] + s), s = SMOOTHING * E, normalized.
                 POPULARITY: tokens / (k T), if no layer before is given or calibration saw none of its experts.
        Args:    before: [N, p, k], as sets, the p <= 2 layers just before l, oldest first. If p is less than the number
                 of layers before l, there are no exact keys. Expert indices are not checked.
        """
        ordered = np.sort(before, axis=2)  # the order of a token's experts does not change the sums
        if len(ordered) == 1:
            return self._predict_one(l, ordered)
        share = self._share(l)
        shares = np.tile(share.astype(np.float32), (len(ordered), 1))
        stages = np.full(len(ordered), BackoffLevel.POPULARITY, np.uint8)
        keys = self._find(l, ordered)
        exact = keys >= 0
        shares[exact], stages[exact] = self._exact(keys[exact]), BackoffLevel.EXACT
        rest = np.flatnonzero(~exact)
        factored, known = self._factored(l, ordered[rest])
        shares[rest[known]], stages[rest[known]] = factored, BackoffLevel.FACTORED
        return shares, stages

    def _predict_one(self, l: int, ordered: Routes) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        """Does the same for one token in a fraction of the time: a run does this for every layer of every token."""
        keys = self._find(l, ordered)
        if keys[0] >= 0:
            return self._exact(keys), np.full(1, BackoffLevel.EXACT, np.uint8)
        share = self._share(l)
        tables = ((self.after_one, self.after_two)[back - 1][l - back] for back in range(1, ordered.shape[1] + 1))
        rows = [table[ordered[0, -back]] for back, table in enumerate(tables, start=1)]
        counts = np.concatenate(rows) if rows else np.empty((0, len(share)))  # [p k, E], the layer just before first
        logs, known = self._logs(l, counts)
        if not known.any():
            return share.astype(np.float32)[None], np.full(1, BackoffLevel.POPULARITY, np.uint8)
        mean = logs.sum(axis=0) / known.sum()
        weights = np.exp(mean - mean.max())
        return (weights / weights.sum()).astype(np.float32)[None], np.full(1, BackoffLevel.FACTORED, np.uint8)

    def log_shares(self, l: int, back: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Returns log P(e | e') of the second stage, [E, E], and the e' for which calibration knows it, bool [E].

        Rows of the others are 0.
        Args:    back: how many layers before `l` the e' are.
        """
        return self._logs(l, (self.after_one, self.after_two)[back - 1][l - back])

    def exact_keys(self, l: int, num_before: int) -> tuple[int, Array]:
        """Returns a layer's exact keys, u16 [n, p k], and the number of the first; for another p than theirs none."""
        first, end = (int(start) for start in self.key_starts[l : l + 2])
        if num_before != min(l, PATH_MEMORY):
            end = first
        in_one = len(self.keys_one)
        keys = self.keys_one[first:end] if l == 1 else self.keys_two[first - in_one : end - in_one]
        return first, keys

    def _logs(self, l: int, counts: Array) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Returns log P(e | e') for counts [n, E] of tokens with both, and which of the n e' have any; 0 without."""
        smoothing, totals = SMOOTHING * self.popularity.shape[1], counts.sum(axis=1, keepdims=True, dtype=np.int64)
        with np.errstate(divide="ignore"):  # an expert that no token chose has the logarithm -inf throughout
            logs = np.log((counts + smoothing * self._share(l)) / (totals + smoothing))
        known = totals[:, 0] > 0
        logs[~known] = 0
        return logs, known

    def _share(self, l: int) -> NDArray[np.float64]:
        share: NDArray[np.float64] = self.popularity[l] / self.popularity[l].sum()
        return share

    def _find(self, l: int, ordered: Routes) -> NDArray[np.int64]:
        """Returns the exact key of each token, -1 for none: [N] for [N, p, k]."""
        first, exact = self.exact_keys(l, ordered.shape[1])
        if not len(exact):
            return np.full(len(ordered), -1)
        stored = rows_as_keys(exact)
        keys = rows_as_keys(ordered.reshape(len(ordered), exact.shape[1]))  # [N, p, k] -> [N, p k]
        places = np.searchsorted(stored, keys)
        is_stored = stored[np.minimum(places, len(stored) - 1)] == keys
        return np.where(is_stored, first + places, -1)

    def _exact(self, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the shares of choices after each key: float32 [N, E] for [N]."""
        starts, ends = (self.successor_starts[places].astype(np.int64) for places in (keys, keys + 1))
        entries, rows = slices(starts, ends)
        shares = np.zeros((len(keys), self.popularity.shape[1]), np.float32)
        choices = self.keys_seen[keys].astype(np.int64) * self.experts_per_token
        shares[rows, self.successor_experts[entries]] = self.successor_counts[entries] / choices[rows]
        return shares

    def _factored(self, l: int, ordered: Routes) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Returns the second stage for the tokens that have an expert with counts, and which of the N these are."""
        logs = np.zeros((len(ordered), self.popularity.shape[1]))
        num_known = np.zeros(len(ordered), np.int64)
        for back in range(1, ordered.shape[1] + 1):
            table = (self.after_one, self.after_two)[back - 1][l - back]
            used, places = np.unique(ordered[:, -back], return_inverse=True)
            row_logs, known = self._logs(l, table[used])
            for column in places.reshape(ordered[:, -back].shape).T:  # [N, k]: k gathers need no [N, k, E]
                logs += row_logs[column]
                num_known += known[column]
        some = num_known > 0
        mean = logs[some] / num_known[some, None]
        weights = np.exp(mean - mean.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True), some


def rows_as_keys(keys: Routes) -> Array:
    """Returns one value for each row of expert indices, in the same order as the rows: [N] for [N, w]."""
    big_endian = np.ascontiguousarray(keys, dtype=">u2")
    return big_endian.view(np.dtype((np.void, 2 * keys.shape[1])))[:, 0]
