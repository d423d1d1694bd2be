"""Which records lie in a GPU's slots: the host's decisions, which never delay a token.

The GPU computes with the tables that it has, and what it lacks the CPU computes or the link brings (`token_step`).
After a token the host knows which records it lacked. It decides which of them get slots, by any eviction policy of
`runtime.offload`, and enters them in the tables between tokens:

    slot:  free -> a landing slot, into which the GPU pulls a record by itself -> in the tables
           free -> on its way, copied while tokens run                         -> in the tables
           in the tables -> evicted: taken from the tables before the next token -> free

A slot gets another record only after a token has begun without it, so that no running token reads what is overwritten:
`decide` evicts after it has given slots, and those that it evicts are given after the next `changes`. Slots belong to
layers, and an expert is evicted with all its slots. `Residency` moves no bytes: `token_step` does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack.runtime.gpu.placement import GpuPlacement
from moe_pack.runtime.offload import ExpertKey
from moe_pack.runtime.offload.cache import Eviction

Array = NDArray[Any]
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
    """What a token has told: its experts int [L, k], and for each the neurons int32 that the CPU computed, rising.

    `scores`: float32 [L, E], the routers' scores; None if no policy needs them.
    """

    experts: Array
    left: Callable[[int, int], Array]
    scores: Array | None


@dataclass(slots=True)
class _Layer:
    """A layer's slots. `expert` int32 [slots]: the owner, -1 without one.   `neuron` int32 [slots]: whose record it is.

    `free`: slots that the tables do not name, or not after the next changes.
    """

    expert: Array
    neuron: Array
    free: list[int]


class Residency:
    """The owners of all slots, and a mirror of the table of records.

    `landing`: int32 [sum of k * landing slots], the offsets for the next token.   `promoted_rows`: since the start.
    Args:    static_at: int32 [L, E, f], the table without slots.   slots_at: int64 [L], where each layer's slots begin,
             in units of 16 bytes.   eviction: says which expert of a layer gives its slots.
    """

    def __init__(self, placement: GpuPlacement, static_at: Array, slots_at: Array, eviction: Eviction) -> None:
        self._placement, self._static_at, self._slots_at = placement, static_at, slots_at
        self._slot_units = placement.slot_bytes // 16
        self._eviction = eviction
        self._table_shape = static_at.shape
        self.promoted_rows = 0
        self._begins = np.cumsum(placement.num_active * placement.num_landing) - (
            placement.num_active * placement.num_landing
        )
        self.reset()

    def reset(self) -> None:
        """Forgets what the slots have; the caller writes `static_at` to the device's table."""
        placement, k = self._placement, self._placement.num_active
        self.at = self._static_at.copy()
        self._is_in = np.zeros(self._static_at.shape[:2], bool)
        self._is_coming = np.zeros(self._static_at.shape, bool)
        self._places, self._values = list[Array](), list[Array]()
        self._coming: list[Promotion] = []
        self._layers = [
            _Layer(np.full(number, -1, np.int32), np.zeros(number, np.int32), list(range(number))[::-1])
            for number in placement.num_slots.tolist()
        ]
        self.landing = np.zeros(int((k * placement.num_landing).sum()), np.int32)
        for l, layer in enumerate(self._layers):
            landing = self._landing_of(l)
            landing[:] = self._units(l, [layer.free.pop() for _ in range(landing.size)]).reshape(landing.shape)

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

    def pulled(self, experts: Array, counts: Array, neurons: Callable[[int], Array]) -> None:
        """Enters the records that the last token pulled into landing slots, as far as free slots can replace these.

        The other slots keep waiting for records, and what they have is forgotten.
        Args:    experts, counts: int [L, k], the token's experts and how many slots each has filled.
                 neurons: returns a layer's int32 [k, landing slots].
        """
        for l in np.flatnonzero(counts.any(axis=1)).tolist():
            layer, landing = self._layers[l], self._landing_of(l)
            place, number = np.nonzero(np.arange(landing.shape[1]) < counts[l][:, None])
            owners, names = experts[l][place], neurons(l)[place, number]
            stays = np.flatnonzero(self.at[l, owners, names] < 0)[: len(layer.free)]
            place, number, owners, names = place[stays], number[stays], owners[stays], names[stays]
            self._own(l, owners, names, landing[place, number])
            landing[place, number] = self._units(l, [layer.free.pop() for _ in range(len(stays))])

    def decide(self, token: TokenRoutes, most_rows: int) -> list[Promotion]:
        """Returns the records to promote after a token, `most_rows` at most, and evicts others for them.

        The caller copies them, and says so with `arrived`.
        """
        found, num_rows = list[Promotion](), 0
        for l, layer in enumerate(self._layers):
            chosen = token.experts[l].tolist()
            self._eviction.routed(l, sorted(set(chosen)), None if token.scores is None else token.scores[l])
            for expert in chosen:
                self._eviction.used(ExpertKey(l, expert))
            if not len(layer.expert):
                continue
            wanted = 0
            for place, expert in enumerate(chosen):
                neurons = token.left(l, place)
                neurons = neurons[~self._is_coming[l, expert, neurons]]
                wanted += len(neurons)
                number = min(len(neurons), len(layer.free), most_rows - num_rows)
                if number > 0:
                    slots = [layer.free.pop() for _ in range(number)]
                    found.append(Promotion(ExpertKey(l, expert), neurons[:number], self._units(l, slots)))
                    self._is_coming[l, expert, neurons[:number]] = True
                    num_rows += number
            self._make_space(l, min(wanted, max(len(layer.expert) // 8, 1)), chosen)
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

    def _own(self, l: int, experts: Array, neurons: Array, units: Array) -> None:
        """Gives slots to records, unless one of them has been entered meanwhile: its second slot is free again."""
        layer = self._layers[l]
        slots = (units.astype(np.int64) - self._slots_at[l]) // self._slot_units[l]
        is_new = self.at[l, experts, neurons] < 0
        layer.free += slots[~is_new].tolist()
        experts, neurons, units, slots = experts[is_new], neurons[is_new], units[is_new], slots[is_new]
        layer.expert[slots], layer.neuron[slots] = experts, neurons
        self._set(l, experts, neurons, units)
        for expert in np.unique(experts).tolist():
            if not self._is_in[l, expert]:
                self._is_in[l, expert] = True
                self._eviction.fetched(ExpertKey(l, expert))

    def _make_space(self, l: int, wanted: int, chosen: list[int]) -> None:
        """Evicts experts of a layer, those worth least, until so many slots are free."""
        layer, worth = self._layers[l], None
        while len(layer.free) < wanted:
            owners = np.unique(layer.expert[layer.expert >= 0])
            owners = owners[~np.isin(owners, chosen)]
            if not len(owners):
                return
            worth = self._eviction.worth(l)[l] if worth is None else worth
            victim = int(owners[np.argmin(worth[owners])])
            slots = np.flatnonzero(layer.expert == victim)
            self._set(l, np.full(len(slots), victim), layer.neuron[slots], np.full(len(slots), -1, np.int32))
            layer.expert[slots] = -1
            layer.free += slots.tolist()
            self._is_in[l, victim] = False
            self._eviction.evicted(ExpertKey(l, victim))

    def _set(self, l: int, experts: Array, neurons: Array, units: Array) -> None:
        _, E, f = self._table_shape
        self.at[l, experts, neurons] = units
        self._places.append((l * E + experts.astype(np.int64)) * f + neurons)
        self._values.append(units.astype(np.int32))

    def _units(self, l: int, slots: list[int]) -> Array:
        units: Array = (self._slots_at[l] + np.array(slots, np.int64) * self._slot_units[l]).astype(np.int32)
        return units

    def _landing_of(self, l: int) -> Array:
        k, number = self._placement.num_active, int(self._placement.num_landing[l])
        landing: Array = self.landing[self._begins[l] : self._begins[l] + k * number].reshape(k, number)
        return landing
