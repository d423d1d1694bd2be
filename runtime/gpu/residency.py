"""The records in a GPU's slots: the host's decisions, made while a token runs.

The GPU computes with the tables that it has, and the CPU or the link has the rest (`token_step`). While a token runs,
the host reads what the token before it lacked, and decides on the changes before the token after it. It gives slots to
missing records and takes them from others by any eviction policy of `runtime.offload`:

    slot:  free -> a landing slot, into which the GPU pulls a record by itself -> in the tables
           free -> on its way, copied while tokens run                         -> in the tables
           in the tables -> evicted: no longer in the tables of the next token -> free

A slot gets another record only after a token has begun without it, so that no running token reads overwritten memory:
`decide` evicts after it has given slots, and the evicted ones are given after the next `changes`. Tokens use two sets
of landing slots in turn, so that the host has the time of a token to read one. Slots belong to layers; of an expert
that gives slots, the coldest records go first. `Residency` moves no bytes: `decoder` does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack.runtime.gpu import placements
from moe_pack.runtime.offload import cache

Array = NDArray[Any]
MOST_KEPT = 1 << 10  # records that a token brings to slots: the host takes some 1 ms for so many
_LAYERS_AT_ONCE = 8  # that promote: with fewer numpy's calls take the time, with more layers that come too late
_NO_NUMBERS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class TableChanges:
    """Entries of the table of records that change before a token."""

    places: Array  # int64 [n] in the flat table, each place once
    values: Array


@dataclass(frozen=True, slots=True, eq=False)
class Promotion:
    """Records of an expert to copy into slots while tokens run."""

    key: cache.ExpertKey
    neurons: Array  # int32 [n]
    units: Array  # [n], offsets of their slots


@dataclass(frozen=True, slots=True, eq=False)
class TokenRoutes:
    """The experts of a token, and the neurons that it left to the CPU."""

    experts: Array  # int [L, k]
    left_counts: Array  # int [L, k], how many neurons it left
    left: Callable[[int, int], Array]  # returns these of a layer and a place, int32, rising
    scores: Array | None  # float32 [L, E], the routers' scores; None if no policy needs them


class Residency:
    """The owners of all slots, and a mirror of the table of records.

    Slots are numbered from layer to layer, and records by their places in the flat table. Most steps take all layers at
    once: a step for each of 48 layers would take longer than a GPU needs for a token.

    `at`: [L, E, f], the mirror.   `landing`: [turns, sum of k * landing slots], the offsets for the tokens of each
    turn.   `promoted_rows`: since the start.   `most_changes`: of entries of the tables between two tokens.
    Args:    static_at: int32 or int64 [L, E, f], the table without slots.   slots_at: int64 [L], where each layer's
             slots begin, in units of 16 bytes.   eviction: says which expert of a layer gives its slots.
    """

    def __init__(
        self, placement: placements.GpuPlacement, static_at: Array, slots_at: Array, eviction: cache.Eviction
    ) -> None:
        self._static_at, self._eviction = static_at, eviction
        self.promoted_rows = 0
        # Records that were pulled, records that have arrived, and as many that are evicted for the next.
        self.most_changes = 3 * MOST_KEPT
        self._first_layer = self._num_kept = 0
        self._num_slots, self._k = placement.num_slots, placement.num_active
        self._begins = np.cumsum(self._num_slots) - self._num_slots  # the first slot of each layer
        self._layer_of = np.repeat(np.arange(len(static_at)), self._num_slots)  # of each slot
        number = np.arange(len(self._layer_of)) - self._begins[self._layer_of]
        slot_units = placement.slot_bytes // 16
        units = slots_at[self._layer_of] + number * slot_units[self._layer_of]
        self._units = units.astype(static_at.dtype)  # of each slot
        # Of each landing slot of a turn: the place of its expert, among all L * k, and its number there.
        self._num_landing = placement.num_landing
        each = np.repeat(self._num_landing, self._k)
        self._landing_place = np.repeat(np.arange(len(each)), each)
        self._landing_number = np.arange(len(self._landing_place)) - np.repeat(np.cumsum(each) - each, each)
        self.reset()

    def reset(self) -> None:
        """Forgets what the slots have; the caller writes `static_at` to the device's table."""
        self.at = self._static_at.copy()
        self._flat_at = self.at.reshape(-1)
        self._is_coming = np.zeros(self.at.size, bool)
        self._places = list[Array]()
        self._coming = dict[Promotion, Array]()  # with their slots
        # Of each slot: the expert of its layer that owns it, -1 without one, and the record that it has.
        self._expert, self._record = (np.full(len(self._layer_of), -1, dtype) for dtype in (np.int32, np.int64))
        self._counts = np.zeros(self.at.shape[:2], np.int64)  # slots that each expert owns
        # A stack for each layer: slots that the tables do not name, or not after the next changes.
        self._free, self._num_free = np.arange(len(self._layer_of)), self._num_slots.copy()
        self._num_pulled = np.zeros(len(self.at), np.int64)  # slots of each layer that the last token filled by pulling
        self._landing_slots = np.stack(
            [self._take(self._landing_place // self._k) for _ in range(placements.NUM_TURNS)]
        )
        self.landing = self._units[self._landing_slots]

    def changes(self) -> TableChanges:
        """Returns the changes of the tables for the next token, and takes note that they are carried out."""
        places = np.sort(np.concatenate([_NO_NUMBERS, *self._places]))
        places = places[np.diff(places, prepend=-1) > 0]  # several times faster than numpy's `unique`
        self._places = []
        return TableChanges(places, self._flat_at[places])

    def pulled(self, turn: int, experts: Array, counts: Array, neurons: Callable[[int], Array]) -> None:
        """Enters the records that a token pulled into landing slots, as far as free slots can replace these.

        The other slots keep waiting for records, and what they have is forgotten. Each time another layer is first.
        Args:    turn: the token's.   experts, counts: int [L, k], its experts and how many slots each has filled.
                 neurons: returns a layer's int32 [k, landing slots].
        """
        self._first_layer, self._num_kept = (self._first_layer + 1) % len(self.at), 0
        self._num_pulled = counts.sum(axis=1)
        if not self._num_pulled.any():
            return
        names = np.concatenate([neurons(l).reshape(-1) for l in range(len(self.at))])
        filled = np.flatnonzero(self._landing_number < counts.reshape(-1)[self._landing_place])
        before = np.searchsorted(self._landing_place[filled], self._first_layer * self._k)
        filled = np.roll(filled, -before)
        places, (_, E, f) = self._landing_place[filled], self.at.shape
        records = (places // self._k * E + experts.reshape(-1)[places]) * f + names[filled]
        is_missing = self._flat_at[records] < 0
        filled, records = filled[is_missing], records[is_missing]
        layers = self._landing_place[filled] // self._k
        stays = np.flatnonzero(_numbers(layers) < self._num_free[layers])[:MOST_KEPT]
        filled, self._num_kept = filled[stays], len(stays)
        self._own(records[stays], self._landing_slots[turn, filled])
        taken = self._take(layers[stays])
        self._landing_slots[turn, filled], self.landing[turn, filled] = taken, self._units[taken]

    def decide(self, token: TokenRoutes, most_rows: int) -> list[Promotion]:
        """Returns at most `most_rows` records to promote after a token, and evicts others to free slots for the next.

        The caller copies them, and says so with `arrived`. Pulled records come first: they are there already.
        """
        for l, chosen in enumerate(token.experts.tolist()):
            self._eviction.routed(l, sorted(set(chosen)), None if token.scores is None else token.scores[l])
            for expert in chosen:
                self._eviction.used(cache.ExpertKey(l, expert))
        order = (np.arange(len(self.at)) + self._first_layer) % len(self.at)
        found, rows_left, wanted = list[Promotion](), min(most_rows, MOST_KEPT - self._num_kept), self._num_pulled
        for begin in range(0, len(order), _LAYERS_AT_ONCE):
            if rows_left > 0:
                promotions, lacking = self._promote(token, order[begin : begin + _LAYERS_AT_ONCE], rows_left)
                found += promotions
                rows_left -= sum(len(promotion.neurons) for promotion in promotions)
                wanted = wanted + lacking
        wanted = np.clip(wanted - self._num_free, 0, MOST_KEPT)
        self._num_pulled = np.zeros_like(wanted)
        can_give = self._counts.copy()
        np.put_along_axis(can_give, token.experts.astype(np.int64), 0, axis=1)  # those chosen keep theirs
        space_left = MOST_KEPT
        for l in order[np.minimum(wanted, can_give.sum(axis=1))[order] > 0].tolist():
            space_left -= self._make_space(l, min(int(wanted[l]), space_left), can_give[l])
            if not space_left:
                break
        return found

    def arrived(self, promotions: list[Promotion]) -> None:
        """Enters promoted records that have been copied, unless they have been forgotten meanwhile."""
        arrived = [promotion for promotion in promotions if promotion in self._coming]
        if not arrived:
            return
        slots = np.concatenate([self._coming.pop(promotion) for promotion in arrived])
        _, E, f = self.at.shape
        begins = [(each.key.layer_idx * E + each.key.expert) * f for each in arrived]
        records = np.repeat(begins, [len(each.neurons) for each in arrived])
        records += np.concatenate([each.neurons for each in arrived])
        self._is_coming[records] = False
        self._own(records, slots)
        self.promoted_rows += len(records)

    def _promote(self, token: TokenRoutes, order: Array, most: int) -> tuple[list[Promotion], Array]:
        """Gives free slots to missing records of some layers; returns these, and how many each of all layers lacks.

        For layers that come too late to give any it returns zero.
        """
        L, E, f = self.at.shape
        lacking = np.zeros(L, np.int64)
        steps, places = np.nonzero((token.left_counts[order] > 0) & (self._num_slots[order] > 0)[:, None])
        if not len(steps):
            return [], lacking
        layers_of = order[steps]
        left = [token.left(l, place) for l, place in zip(layers_of.tolist(), places.tolist(), strict=True)]
        lengths, neurons = [len(each) for each in left], np.concatenate(left)
        list_of, experts_of = np.repeat(np.arange(len(left)), lengths), token.experts[layers_of, places]
        records = np.repeat((layers_of * E + experts_of) * f, lengths) + neurons
        missing = np.flatnonzero((self._flat_at[records] < 0) & ~self._is_coming[records])
        layers = layers_of[list_of[missing]]
        lacking += np.bincount(layers, minlength=L)
        given = np.minimum(lacking, self._num_free)[order]
        lacking[order[np.cumsum(given) - given >= most]] = 0
        has_slot = np.flatnonzero(_numbers(layers) < self._num_free[layers])[:most]
        slots, missing = self._take(layers[has_slot]), missing[has_slot]
        self._is_coming[records[missing]] = True
        neurons, units, list_of = neurons[missing], self._units[slots], list_of[missing]
        begins = np.flatnonzero(np.diff(list_of, prepend=-1))
        found = list[Promotion]()
        for number, (begin, end) in zip(
            list_of[begins].tolist(), pairwise([*begins.tolist(), len(slots)]), strict=True
        ):
            key = cache.ExpertKey(int(layers_of[number]), int(experts_of[number]))
            found.append(Promotion(key, neurons[begin:end], units[begin:end]))
            self._coming[found[-1]] = slots[begin:end]
        return found, lacking

    def _own(self, records: Array, slots: Array) -> None:
        """Gives slots to records, unless one of them has been entered meanwhile: its second slot is free again."""
        _, E, f = self.at.shape
        is_new = self._flat_at[records] < 0
        if not is_new.all():
            self._give(slots[~is_new])
            records, slots = records[is_new], slots[is_new]
        experts, counts = records // f, self._counts.reshape(-1)
        self._expert[slots], self._record[slots] = experts % E, records
        self._set(records, self._units[slots])
        num_new = np.bincount(experts, minlength=len(counts))
        for expert in np.flatnonzero((num_new > 0) & (counts == 0)).tolist():
            self._eviction.fetched(cache.ExpertKey(*divmod(expert, E)))
        counts += num_new

    def _make_space(self, l: int, number: int, can_give: Array) -> int:
        """Evicts a layer's records, those of the least worthy experts first, the coldest first; returns their number.

        Args:    can_give: int64 [E], slots of each expert that may go.
        """
        by_worth = np.argsort(self._eviction.worth(l)[l], kind="stable")
        by_worth = by_worth[can_give[by_worth] > 0]
        victims = by_worth[: 1 + np.searchsorted(np.cumsum(can_give[by_worth]), number)]
        rank = np.full(len(can_give) + 1, -1)  # the last is of slots without an owner
        rank[victims] = np.arange(len(victims))
        begin = self._begins[l]
        rank_of = rank[self._expert[begin : begin + self._num_slots[l]]]
        slots = np.flatnonzero(rank_of >= 0)
        by_rank = rank_of[slots] * self.at.size - self._record[begin + slots]
        slots = begin + slots[np.argsort(by_rank)[:number]]
        self._set(self._record[slots], -1)
        self._counts[l] -= np.bincount(self._expert[slots], minlength=len(can_give))
        self._expert[slots] = -1
        top = begin + self._num_free[l]
        self._free[top : top + len(slots)] = slots
        self._num_free[l] += len(slots)
        for victim in victims[self._counts[l, victims] == 0].tolist():
            self._eviction.evicted(cache.ExpertKey(l, victim))
        return len(slots)

    def _set(self, records: Array, units: Array | int) -> None:
        self._flat_at[records] = units
        self._places.append(records)

    def _take(self, layers: Array) -> Array:
        """Takes a free slot of each of these layers, in which equal ones follow each other."""
        slots: Array = self._free[self._begins[layers] + self._num_free[layers] - 1 - _numbers(layers)]
        self._num_free -= np.bincount(layers, minlength=len(self._num_free))
        return slots

    def _give(self, slots: Array) -> None:
        slots = slots[np.argsort(self._layer_of[slots], kind="stable")]
        layers = self._layer_of[slots]
        self._free[self._begins[layers] + self._num_free[layers] + _numbers(layers)] = slots
        self._num_free += np.bincount(layers, minlength=len(self._num_free))


def _numbers(groups: Array) -> Array:
    """Returns the number of each entry in its group; the entries of a group follow each other."""
    begins = np.flatnonzero(np.diff(groups, prepend=-1))
    numbers: Array = np.arange(len(groups)) - np.repeat(begins, np.diff(begins, append=len(groups)))
    return numbers
