"""Which records lie in a GPU's slots: the host's decisions, which never delay a token.

The GPU computes with the tables that it has, and what it lacks the CPU computes or the link brings (`token_step`).
While a token runs, the host looks at what the token before it lacked, and decides what changes before the token after
it. It gives slots to missing records and takes them from others by any eviction policy of `runtime.offload`:

    slot:  free -> a landing slot, into which the GPU pulls a record by itself -> in the tables
           free -> on its way, copied while tokens run                         -> in the tables
           in the tables -> evicted: no longer in the tables of the next token -> free

A slot gets another record only after a token has begun without it, so that no running token reads what is overwritten:
`decide` evicts after it has given slots, and what it evicts is given after the next `changes`. Landing slots are of two
sets, which tokens use in turn, so that the host has the time of a token to look at one. Slots belong to layers; of an
expert that gives slots, the coldest records go first. `Residency` moves no bytes: `token_step` does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack.runtime.gpu.placement import NUM_TURNS, GpuPlacement
from moe_pack.runtime.offload import ExpertKey
from moe_pack.runtime.offload.cache import Eviction

Array = NDArray[Any]
MOST_KEPT = 1 << 12  # records that a token brings to slots: with more, the host would take longer than the token
_NO_NUMBERS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class TableChanges:
    """Entries of the table of records that change before a token: `places` int64 [n] in the flat table, `values` int32.

    A place occurs once.
    """

    places: Array
    values: Array


@dataclass(frozen=True, slots=True, eq=False)
class Promotion:
    """Records to copy into slots while tokens run: of an expert its neurons int32 [n], and their offsets int32 [n]."""

    key: ExpertKey
    neurons: Array
    units: Array


@dataclass(frozen=True, slots=True, eq=False)
class TokenRoutes:
    """What a token has told: `experts` int [L, k], and what it left to the CPU.

    `left`: returns the neurons int32 of a layer and a place, rising.   `left_counts`: int [L, k], how many these are.
    `scores`: float32 [L, E], the routers' scores; None if no policy needs them.
    """

    experts: Array
    left_counts: Array
    left: Callable[[int, int], Array]
    scores: Array | None


@dataclass(slots=True)
class _Layer:
    """A layer's slots. `expert` int32 [slots]: the owner, -1 without one.   `neuron` int32 [slots]: whose record it is.

    `counts`: int64 [E], slots that each expert owns.   `free`: slots that the tables do not name, or not after the next
    changes.   `num_pulled`: slots that the last token filled by pulling.
    """

    expert: Array
    neuron: Array
    counts: Array
    free: list[int]
    num_pulled: int = 0


class Residency:
    """The owners of all slots, and a mirror of the table of records.

    `landing`: int32 [turns, sum of k * landing slots], the offsets for the tokens of each turn.   `promoted_rows`:
    since the start.   `most_changes`: of entries of the tables between two tokens.
    Args:    static_at: int32 [L, E, f], the table without slots.   slots_at: int64 [L], where each layer's slots begin,
             in units of 16 bytes.   eviction: says which expert of a layer gives its slots.
    """

    def __init__(self, placement: GpuPlacement, static_at: Array, slots_at: Array, eviction: Eviction) -> None:
        self._placement, self._static_at, self._slots_at = placement, static_at, slots_at
        self._slot_units = placement.slot_bytes // 16
        self._eviction = eviction
        self.promoted_rows = 0
        num_landing = placement.num_active * placement.num_landing
        self._begins = np.cumsum(num_landing) - num_landing
        # Records that were pulled, records that have arrived, and as many that are evicted for the next.
        self.most_changes = 3 * MOST_KEPT
        self._first_layer = self._num_kept = 0
        self.reset()

    def reset(self) -> None:
        """Forgets what the slots have; the caller writes `static_at` to the device's table."""
        placement, k = self._placement, self._placement.num_active
        self.at = self._static_at.copy()
        self._is_coming = np.zeros(self._static_at.shape, bool)
        self._places, self._values = list[Array](), list[Array]()
        self._coming: list[Promotion] = []
        self._layers = [
            _Layer(
                np.full(number, -1, np.int32),
                np.zeros(number, np.int32),
                np.zeros(self.at.shape[1], np.int64),
                list(range(number))[::-1],
            )
            for number in placement.num_slots.tolist()
        ]
        self.landing = np.zeros((NUM_TURNS, int((k * placement.num_landing).sum())), np.int32)
        for turn in range(NUM_TURNS):
            for l, layer in enumerate(self._layers):
                landing = self._landing_of(turn, l)
                landing[:] = self._units(l, _taken(layer.free, landing.size)).reshape(landing.shape)

    def changes(self) -> TableChanges:
        """Returns the changes of the tables for the next token, and takes note that they are carried out."""
        places = np.concatenate([_NO_NUMBERS, *self._places])
        values = np.concatenate([np.zeros(0, np.int32), *self._values])
        self._places, self._values = [], []
        if len(places):  # of several changes of an entry the last counts
            _, last = np.unique(places[::-1], return_index=True)
            last = np.sort(len(places) - 1 - last)
            places, values = places[last], values[last]
        return TableChanges(places, values)

    def pulled(self, turn: int, experts: Array, counts: Array, neurons: Callable[[int], Array]) -> None:
        """Enters the records that a token pulled into landing slots, as far as free slots can replace these.

        The other slots keep waiting for records, and what they have is forgotten. Each time another layer is first.
        Args:    turn: the token's.   experts, counts: int [L, k], its experts and how many slots each has filled.
                 neurons: returns a layer's int32 [k, landing slots].
        """
        self._first_layer, self._num_kept = (self._first_layer + 1) % len(self._layers), 0
        with_pulled = np.roll(counts.any(axis=1), -self._first_layer)
        for step in np.flatnonzero(with_pulled).tolist():
            l = (self._first_layer + step) % len(self._layers)
            layer, landing = self._layers[l], self._landing_of(turn, l)
            layer.num_pulled = int(counts[l].sum())
            most = min(len(layer.free), MOST_KEPT - self._num_kept)
            if not most:
                continue
            place, number = np.nonzero(np.arange(landing.shape[1]) < counts[l][:, None])
            owners, names = experts[l][place], neurons(l)[place, number]
            stays = np.flatnonzero(self.at[l, owners, names] < 0)[:most]
            self._num_kept += len(stays)
            place, number, owners, names = place[stays], number[stays], owners[stays], names[stays]
            self._own(l, owners, names, landing[place, number])
            landing[place, number] = self._units(l, _taken(layer.free, len(stays)))

    def decide(self, token: TokenRoutes, most_rows: int) -> list[Promotion]:
        """Returns the records to promote after a token, and evicts others so that slots are free for the next.

        The caller copies them, and says so with `arrived`. Pulled records come first: they are there already.
        Args:    most_rows: to promote.
        """
        found, num_layers = list[Promotion](), len(self._layers)
        for l in range(num_layers):
            chosen = token.experts[l].tolist()
            self._eviction.routed(l, sorted(set(chosen)), None if token.scores is None else token.scores[l])
            for expert in chosen:
                self._eviction.used(ExpertKey(l, expert))
        rows_left, space_left = min(most_rows, MOST_KEPT - self._num_kept), MOST_KEPT
        for step in range(num_layers):
            l = (self._first_layer + step) % num_layers
            layer, wanted = self._layers[l], self._layers[l].num_pulled
            layer.num_pulled = 0
            if not len(layer.expert):
                continue
            if rows_left > 0:
                promotions, lacking = self._promote(l, token, rows_left)
                found += promotions
                rows_left -= sum(len(promotion.neurons) for promotion in promotions)
                wanted += lacking
            space_left -= self._make_space(l, min(wanted, MOST_KEPT), space_left, token.experts[l])
        self._coming += found
        return found

    def arrived(self, promotions: list[Promotion]) -> None:
        """Enters promoted records that have been copied."""
        for promotion in promotions:
            if promotion not in self._coming:
                continue  # forgotten meanwhile
            self._coming.remove(promotion)
            l, expert = promotion.key
            self._is_coming[l, expert, promotion.neurons] = False
            self._own(l, np.full(len(promotion.neurons), expert), promotion.neurons, promotion.units)
            self.promoted_rows += len(promotion.neurons)

    def _promote(self, l: int, token: TokenRoutes, most_rows: int) -> tuple[list[Promotion], int]:
        """Gives free slots to a layer's missing records; returns these, and how many are missing."""
        layer, found, lacking = self._layers[l], list[Promotion](), 0
        for place in np.flatnonzero(token.left_counts[l] > 0).tolist():
            expert, neurons = int(token.experts[l, place]), token.left(l, place)
            neurons = neurons[(self.at[l, expert, neurons] < 0) & ~self._is_coming[l, expert, neurons]]
            lacking += len(neurons)
            number = min(len(neurons), len(layer.free), most_rows)
            if number > 0:
                units = self._units(l, _taken(layer.free, number))
                found.append(Promotion(ExpertKey(l, expert), neurons[:number], units))
                self._is_coming[l, expert, neurons[:number]] = True
                most_rows -= number
        return found, lacking

    def _own(self, l: int, experts: Array, neurons: Array, units: Array) -> None:
        """Gives slots to records, unless one of them has been entered meanwhile: its second slot is free again."""
        layer = self._layers[l]
        slots = (units.astype(np.int64) - self._slots_at[l]) // self._slot_units[l]
        is_new = self.at[l, experts, neurons] < 0
        layer.free += slots[~is_new].tolist()
        experts, neurons, units, slots = experts[is_new], neurons[is_new], units[is_new], slots[is_new]
        layer.expert[slots], layer.neuron[slots] = experts, neurons
        self._set(l, experts, neurons, units)
        num_new = np.bincount(experts, minlength=len(layer.counts))
        for expert in np.flatnonzero((num_new > 0) & (layer.counts == 0)).tolist():
            self._eviction.fetched(ExpertKey(l, expert))
        layer.counts += num_new

    def _make_space(self, l: int, wanted: int, most: int, chosen: Array) -> int:
        """Evicts records of a layer's experts, those worth least first, until `wanted` slots are free.

        Experts that the token has chosen keep theirs. Returns how many were evicted, at most `most`.
        """
        layer, evicted = self._layers[l], 0
        number = min(wanted - len(layer.free), most)
        if number <= 0:
            return 0
        worth = np.where(layer.counts > 0, self._eviction.worth(l)[l], np.inf)
        worth[chosen] = np.inf
        while evicted < number:
            victim = int(np.argmin(worth))
            if worth[victim] == np.inf:
                break
            worth[victim] = np.inf
            slots = np.flatnonzero(layer.expert == victim)
            coldest = slots[np.argsort(-layer.neuron[slots])][: number - evicted]
            layer.counts[victim] -= len(coldest)
            self._set(l, np.full(len(coldest), victim), layer.neuron[coldest], np.full(len(coldest), -1, np.int32))
            layer.expert[coldest] = -1
            layer.free += coldest.tolist()
            evicted += len(coldest)
            if not layer.counts[victim]:
                self._eviction.evicted(ExpertKey(l, victim))
        return evicted

    def _set(self, l: int, experts: Array, neurons: Array, units: Array) -> None:
        _, E, f = self.at.shape
        self.at[l, experts, neurons] = units
        self._places.append((l * E + experts.astype(np.int64)) * f + neurons)
        self._values.append(units.astype(np.int32))

    def _units(self, l: int, slots: list[int]) -> Array:
        units: Array = (self._slots_at[l] + np.array(slots, np.int64) * self._slot_units[l]).astype(np.int32)
        return units

    def _landing_of(self, turn: int, l: int) -> Array:
        k, number = self._placement.num_active, int(self._placement.num_landing[l])
        landing: Array = self.landing[turn, self._begins[l] : self._begins[l] + k * number].reshape(k, number)
        return landing


def _taken(free: list[int], number: int) -> list[int]:
    """Takes so many slots from the end of a list."""
    taken = free[len(free) - number :]
    del free[len(free) - number :]
    return taken
