"""The checks of path statistics that come out of a file: arrays that could not have been counted are refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import PackError

Array = NDArray[Any]

PATH_MIN_SEEN = 8  # how often calibration must have seen an exact key for it to be used


def slices(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All positions of the slices one after another, and for each the slice it is of."""
    lengths = ends - starts
    rows = np.repeat(np.arange(len(starts)), lengths)
    return np.arange(len(rows)) + (starts - (np.cumsum(lengths) - lengths))[rows], rows


@dataclass(frozen=True, slots=True)
class PathChecks:
    """The arrays of path statistics out of a file, checked one by one: size before meaning, what others rest on first.

    For `L` MoE layers of `E` experts, `k` a token; `place` is the file, for messages.
    """

    found: Mapping[str, Array]
    place: str
    L: int
    E: int
    k: int

    def check(self) -> None:
        """Raises PackError for the first array that cannot be."""
        found, L, E, k = self.found, self.L, self.E, self.k
        self._form("popularity", "<u4", (L, E))
        choices, most = found["popularity"].sum(axis=1, dtype=np.int64), found["popularity"].max(axis=1)
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
        table, popularity = self.found[name], self.found["popularity"].astype(np.int64) * self.k
        before, after = popularity[: max(self.L - back, 0)], popularity[back:]
        wrong = (table.sum(axis=2, dtype=np.int64) != before) | (table.sum(axis=1, dtype=np.int64) != after)
        is_counted = (table > 0).any(axis=(1, 2))  # else no path leads there, from another stack's layer
        num_wrong = wrong.sum(axis=1) * is_counted
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
            keys: Any = found[name]
            sets = keys.reshape(len(keys), keys.shape[1] // k, k)  # [K, p k] -> [K, p, k]
            fits = (keys < self.E).all(axis=1) & (sets[..., 1:] > sets[..., :-1]).all(axis=(1, 2))
            self._all(name, fits, "key", keys, f"sets of ascending experts below {self.E}")
            rises = np.ones(len(keys), bool)
            rises[1:] = _above(keys[1:], keys[:-1])
            rises[starts[(starts >= first) & (starts < first + len(keys))] - first] = True  # a layer begins anew
            self._all(name, rises, "key", keys, "one above that before it")
        fits = (found["keys_seen"] >= PATH_MIN_SEEN) & (found["keys_seen"] <= T)
        self._all("keys_seen", fits, "key", found["keys_seen"], f"from {PATH_MIN_SEEN} to {T} tokens")

    def _check_successors(self, count: str) -> None:
        found, k = self.found, self.k
        starts = self._starts("successor_starts", len(found["keys_seen"]) + 1)
        self._form("successor_experts", "<u2", (int(starts[-1]),))
        self._form("successor_counts", count, (int(starts[-1]),))
        experts, counts = found["successor_experts"], found["successor_counts"]
        seen = found["keys_seen"].astype(np.int64)
        _, rows = slices(starts[:-1], starts[1:])
        fits = experts < self.E
        fits[1:] &= (experts[1:] > experts[:-1]) | (rows[1:] != rows[:-1])
        self._all("successor_experts", fits, "position", experts, f"ascending experts below {self.E}")
        fits = (counts > 0) & (counts <= seen[rows])
        self._all("successor_counts", fits, "position", counts, "at least 1 and at most what its key was seen")
        totals = np.bincount(rows, counts, minlength=len(seen)).astype(np.int64)  # as float64: exact to 2^53
        self._all("successor_counts", totals == seen * k, "key", totals, f"{k} choices of each token")

    def _starts(self, name: str, length: int) -> NDArray[np.int64]:
        self._form(name, "<u4", (length,))
        starts: NDArray[np.int64] = self.found[name].astype(np.int64)
        rises = starts == np.maximum.accumulate(starts)
        rises[0] &= starts[0] == 0
        self._all(name, rises, "position", starts, "numbers that rise from 0")
        return starts

    def _form(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        array = self.found[name]
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
