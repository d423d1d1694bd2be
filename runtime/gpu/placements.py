"""The division of a GPU's memory for experts: rows that are resident for the whole run, and memory for all others.

Only numbers: nothing is allocated here. The fractional knapsack of `runtime.offload.budgets` chooses the *static* rows:
whole selectors and the first records of each expert, which packs store hottest first. They stay for the whole run:
memory whose records came and went between tokens brought hardly anything (docs/gpu.md). *Dynamic* memory has
scratch memory for pulled records of one layer, and memory for records that are pulled before their layer begins. In
passes of many tokens it holds whole experts on their way.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.runtime.gpu.devices import LINE_BYTES
from moe_pack.runtime.offload.budgets import resident_rows

Array = NDArray[Any]
# Who has an expert's missing records: the GPU, which pulls them over the link; the CPU, which shares them with the
# link; or the CPU's own engine, which reads experts from the disk and computes whole ones.
Misses = Literal["pull", "split", "disk"]

NUM_TURNS = 2  # of page-locked memory: the host reads what one token left while the next one runs
REACH_BYTES = 16 * (2**31 - 1)  # of offsets in units of 16 bytes in 32 bits; in more memory they have 64
DYNAMIC_SHARE = 0.05  # of the memory for experts: a prompt's experts stream through it
# Of the dynamic memory, at most, if several tokens run at once: for records that one pulls and others use too.
_KEPT_SHARE = 0.5
# Of the dynamic memory, if experts are predicted: for records that are pulled ahead, of two layers. In 11 GiB it
# is some 110 MB for Mixtral; a link of 50 GB/s brings 15 MB in a layer's 0.3 ms.
_AHEAD_SHARE = 0.25
# What a record is worth, where a selector that is read as often is worth 1. If the link pulls missing records, a
# selector is worth more: without it the CPU computes the whole expert, and the link brings nothing of it. Of 0.02 to 1,
# 0.5 gives the fastest predictions on average, by `predict` of tests/bench/gpu/roofline.py.
_RECORD_WORTH, _PULLED_RECORD_WORTH = 1.0, 0.5
_USUAL_RUNNING = 0.2  # share of the neurons that run where some do not: the papers' packs are 80 to 90% sparse
_MOSTLY = 0.9  # of the rows that usually run: so many must be static for an expert to replace others
_NUM_SLICES = 64  # of an expert's rows; those of a slice are read equally often
_TABLES_A_LAYER = 16  # of tensors in the memory, each beginning on a line of its own


@dataclass(frozen=True, slots=True, eq=False)
class GpuPlacement:
    """The division of the GPU's memory for L layers of E experts with f neurons and records of several sizes."""

    misses: Misses
    has_selector: Array  # bool [L, E], whether an expert's selector is resident; True if none is stored
    first_dynamic: Array  # int64 [L, E], the records before it are resident
    static_bytes: Array  # int64 [L], of resident rows as they are laid out
    slot_bytes: Array  # int64 [L], of the memory for one of a layer's records
    num_scratch: Array  # int64 [L], records of each of a token's experts that can be pulled
    num_ahead: Array  # int64 [L], records that can be pulled ahead for each predicted expert, in either of two halves
    scratch_bytes: int  # for rows of one layer; it is the beginning of dynamic memory
    ahead_bytes: int  # for records that are pulled ahead, at its end
    dynamic_bytes: int
    other_bytes: int  # of tables
    offset_bytes: int  # of each offset in them
    num_rows: int
    num_active: int
    num_predicted: int
    kept_bytes: int = 0  # the end of scratch memory: for pulled records that other tokens of the layer use too

    @property
    def num_bytes(self) -> int:
        """All memory of the GPU for experts."""
        return int(self.static_bytes.sum()) + self.dynamic_bytes + self.other_bytes

    @property
    def is_whole(self) -> bool:
        """Whether all experts are resident for the whole run."""
        return self.dynamic_bytes == 0


def place_experts(
    layout: formats.PackLayout,
    expert_bytes: int,
    misses: Misses,
    popularity: Array | None = None,
    heat: Array | None = None,
    dynamic_share: float = DYNAMIC_SHARE,
    has_link: Array | None = None,
    is_pulled: bool = False,
    num_predicted: int = 0,
    offset_bytes: int = 4,
    num_rows: int = 1,
) -> GpuPlacement:
    """Divides a GPU's memory for experts between static rows and dynamic memory.

    All experts are static if they fit. Otherwise dynamic memory gets its share, or the least that it needs, and the
    rows that are read most are static. With `misses` disk whole experts are static.
    Args:    popularity: [L, E], in any unit; None: all equal.   heat: [L, E, H], the share of tokens for which a row
             runs, in each of H equal slices of an expert's rows; None: all rows are read equally often.   has_link:
             bool [L], layers whose experts a GPU can read in host memory: only these are pulled; None: all.
             is_pulled: whether the link brings some of a token's missing records.   num_predicted: experts of each
             layer for which records are pulled ahead.   offset_bytes: from `offset_bytes_for`.   num_rows: tokens that
             run at once, at most; with several, a part of the dynamic memory keeps pulled records for a layer.
    Raises:  RunError if the dynamic memory does not fit; it says what is needed.
    """
    sizes = _Sizes.of(layout, misses, has_link, num_predicted, is_pulled, offset_bytes, num_rows > 1)
    whole = sizes.whole()
    if whole.num_bytes <= expert_bytes:
        return whole
    least = sizes.least()
    if least.num_bytes > expert_bytes:
        raise formats.RunError(
            f"GPU memory: {formats.size_text(max(expert_bytes, 0))} are left for experts, which need at least "
            f"{formats.size_text(least.num_bytes)}: {formats.size_text(least.dynamic_bytes)} for experts on their "
            "way, and "
            f"{formats.size_text(least.other_bytes)} for tables; give more memory, or a shorter context"
        )
    shape = sizes.record_rows.shape
    popularity = np.ones(shape) if popularity is None else popularity
    # Where tables take nearly everything, dynamic memory gets less than its share: what they leave.
    share_bytes = min(int(dynamic_share * expert_bytes), expert_bytes - sizes.other_bytes)
    dynamic_bytes = max(least.dynamic_bytes, share_bytes) // LINE_BYTES * LINE_BYTES
    static_bytes = expert_bytes - sizes.other_bytes - dynamic_bytes - LINE_BYTES * shape[0] * shape[1]
    if misses == "disk":
        is_static = _most_popular(sizes.expert_bytes, popularity, static_bytes)
        return sizes.placement(is_static, sizes.num_rows * is_static, dynamic_bytes)
    heat = np.ones((*shape, 1)) if heat is None else np.minimum.accumulate(heat, axis=2)  # hottest first
    heat = heat * (_PULLED_RECORD_WORTH if is_pulled or misses == "pull" else _RECORD_WORTH)
    return sizes.with_hottest(layout, popularity, heat, max(static_bytes, 0), dynamic_bytes)


def least_placement(
    layout: formats.PackLayout,
    misses: Misses,
    has_link: Array | None = None,
    num_predicted: int = 0,
    is_pulled: bool = False,
    offset_bytes: int = 4,
) -> GpuPlacement:
    """Returns the placement with the least memory: no static rows; arguments as for `place_experts`."""
    sizes = _Sizes.of(layout, misses, has_link, num_predicted, is_pulled, offset_bytes)
    whole, least = sizes.whole(), sizes.least()
    return whole if whole.num_bytes <= least.num_bytes else least


def offset_bytes_for(layout: formats.PackLayout, most_bytes: int) -> int:
    """Returns the bytes of an offset, 4 or 8, that reach all experts in so much memory."""
    whole = _Sizes.of(layout, "split").whole().num_bytes
    return 4 if min(whole, most_bytes) <= REACH_BYTES else 8


def usual_heat(layout: formats.PackLayout, thresholds: Array) -> Array:
    """Returns how often rows are read, if it was not measured: [L, E, H], as for `place_experts`.

    Rows lie hottest first, so the frequency is assumed to fall evenly. Without a selector or a threshold all are read.
    Args:    thresholds: [L, E].
    """
    falling = 2 * _USUAL_RUNNING * (np.arange(_NUM_SLICES, 0, -1) - 0.5) / _NUM_SLICES
    drops = (thresholds > 0) & (layout.experts[0][0].selector is not None)
    return np.where(drops[:, :, None], falling, 1.0)


def mostly_static(placement: GpuPlacement, heat: Array) -> Array:
    """Returns which experts have nearly all rows in static memory that usually run: bool [L, E].

    Args:    heat: as for `place_experts`.
    """
    num_slices = heat.shape[2]
    ends = placement.first_dynamic[:, :, None] * num_slices / placement.num_rows - np.arange(num_slices)
    here = (heat * np.clip(ends, 0, 1)).sum(axis=2)
    is_static: Array = placement.has_selector & (here >= _MOSTLY * heat.sum(axis=2))
    return is_static


def work_of_whole(layout: formats.PackLayout, heat: Array) -> Array:
    """Returns how many records are as much work for the CPU as a whole expert with its selector: float64 [L].

    Work is counted in bytes that are read, of the rows that usually run.
    Args:    heat: as for `place_experts`.
    """
    rows = np.array([[_row_bytes(expert) for expert in layer] for layer in layout.experts], np.float64)
    of_row = rows[:, :, 0] / rows[:, :, 1] + heat.mean(axis=2)  # of a neuron, in records
    num_records: Array = layout.experts[0][0].num_rows * of_row.mean(axis=1)
    return num_records


def _most_popular(expert_bytes: Array, popularity: Array, num_bytes: int) -> Array:
    """Returns the most popular experts of all layers for so many bytes: smaller ones where others do not fit."""
    is_static = np.zeros(expert_bytes.shape, bool)
    shares = popularity / popularity.sum(axis=1, keepdims=True)
    for place in np.argsort(-shares.ravel(), kind="stable").tolist():
        key = divmod(place, expert_bytes.shape[1])
        if expert_bytes[key] <= num_bytes:
            is_static[key] = True
            num_bytes -= int(expert_bytes[key])
    return is_static


@dataclass(frozen=True, slots=True, eq=False)
class _Sizes:
    """Sizes of experts' rows, [L, E] in bytes, and the placements that follow from them."""

    misses: Misses
    has_link: Array
    selector_rows: Array
    record_rows: Array
    num_rows: int
    num_active: int
    num_predicted: int
    is_pulled: bool
    offset_bytes: int
    has_many: bool  # tokens at once
    extra_bytes: int

    @classmethod
    def of(
        cls,
        layout: formats.PackLayout,
        misses: Misses,
        has_link: Array | None = None,
        num_predicted: int = 0,
        is_pulled: bool = False,
        offset_bytes: int = 4,
        has_many: bool = False,
    ) -> "_Sizes":
        rows = np.array([[_row_bytes(expert) for expert in layer] for layer in layout.experts], np.int64)
        first = layout.experts[0][0]
        num_active = layout.spec.router.num_experts_per_tok
        has_link = np.full(len(rows), misses != "disk") if has_link is None else has_link
        counts = (first.num_rows, num_active, num_predicted, is_pulled, offset_bytes, has_many)
        return cls(misses, has_link, rows[:, :, 0], rows[:, :, 1], *counts, first.extra_bytes)

    @property
    def expert_bytes(self) -> Array:
        """Bytes of whole experts as they lie in memory: int64 [L, E]."""
        rows: Array = (self.selector_rows + self.record_rows) * self.num_rows
        return -(-rows // LINE_BYTES) * LINE_BYTES

    @property
    def other_bytes(self) -> int:
        """Bytes of tables: offsets of rows, kinds, thresholds, biases of down."""
        L, E = self.record_rows.shape
        offsets = self.offset_bytes * self.num_rows * L * E * (1 + bool(self.selector_rows.any()))
        return int(offsets + L * (_TABLES_A_LAYER * LINE_BYTES + 24 * E) + self.extra_bytes * L * E)

    def whole(self) -> GpuPlacement:
        shape = self.record_rows.shape
        return self.placement(np.ones(shape, bool), np.full(shape, self.num_rows), 0)

    def least(self) -> GpuPlacement:
        """Returns the placement without static rows, with memory for everything that a larger one has memory for."""
        has_selector = self.selector_rows == 0
        first = np.zeros_like(self.selector_rows)
        num_pulled = self.num_active * (self.misses == "split" and self.is_pulled)
        num_records = num_pulled + 2 * self.num_predicted if self.has_link.any() else 0
        dynamic_bytes = num_records * int(self.record_rows.max())
        if self.misses == "pull":
            dynamic_bytes += self._scratch_bytes(has_selector, first)
        dynamic_bytes = max(dynamic_bytes, int(self.expert_bytes.max()))
        return self.placement(has_selector, first, -(-dynamic_bytes // LINE_BYTES) * LINE_BYTES)

    def with_hottest(
        self, layout: formats.PackLayout, popularity: Array, heat: Array, static_bytes: int, dynamic_bytes: int
    ) -> GpuPlacement:
        """Returns the placement whose static rows are those read most, in so many bytes."""
        # `resident_rows` itself leaves memory for biases.
        num_bytes = static_bytes + self.extra_bytes * self.record_rows.size
        selector_share, row_shares = resident_rows(layout, popularity, heat, num_bytes)[:2]
        edges = np.diff(np.linspace(0, self.num_rows, row_shares.shape[2] + 1).astype(np.int64))
        records = np.rint(row_shares * edges).astype(np.int64)
        is_full = np.cumprod(records == edges, axis=2)
        before = np.concatenate([np.ones_like(is_full[:, :, :1]), is_full[:, :, :-1]], axis=2)
        has_selector = (selector_share >= 1) | (self.selector_rows == 0)
        # Without its selector no neuron of an expert is known to run: its records would lie there in vain.
        first = (records * before).sum(axis=2) * has_selector
        return self.placement(has_selector, first, dynamic_bytes)

    def placement(self, has_selector: Array, first_dynamic: Array, dynamic_bytes: int) -> GpuPlacement:
        """Returns the placement with these static rows, and the division of so much dynamic memory."""
        static = np.where(has_selector, self.selector_rows * self.num_rows, 0) + first_dynamic * self.record_rows
        is_missing = np.asarray((first_dynamic < self.num_rows).any(axis=1))
        slot_bytes = self.record_rows.max(axis=1)
        of_place, num_scratch = self.num_active * slot_bytes, np.full_like(slot_bytes, self.num_rows)
        scratch_bytes = kept_bytes = 0
        if self.misses == "pull" and dynamic_bytes:
            scratch_bytes = self._scratch_bytes(has_selector, first_dynamic)
        num_ahead, ahead_bytes = self._ahead(is_missing, dynamic_bytes - scratch_bytes)
        if self.misses != "pull":
            most = np.minimum((dynamic_bytes - ahead_bytes) // of_place, self.num_rows)
            num_scratch = np.where(is_missing, most * (self.has_link & self.is_pulled), num_scratch)
            scratch_bytes = int(-(-(num_scratch * of_place * is_missing).max() // LINE_BYTES) * LINE_BYTES)
        elif dynamic_bytes and self.has_many:
            free_bytes = dynamic_bytes - scratch_bytes - ahead_bytes
            most = min(_KEPT_SHARE * free_bytes, self._all_pulled_bytes(first_dynamic))
            kept_bytes = int(most) // LINE_BYTES * LINE_BYTES
            scratch_bytes += kept_bytes
        return GpuPlacement(
            misses=self.misses,
            has_selector=has_selector,
            first_dynamic=first_dynamic,
            static_bytes=(-(-static // LINE_BYTES) * LINE_BYTES).sum(axis=1),
            slot_bytes=slot_bytes,
            num_scratch=num_scratch,
            num_ahead=num_ahead,
            scratch_bytes=scratch_bytes,
            ahead_bytes=ahead_bytes,
            dynamic_bytes=dynamic_bytes,
            other_bytes=self.other_bytes,
            offset_bytes=self.offset_bytes,
            num_rows=self.num_rows,
            num_active=self.num_active,
            num_predicted=self.num_predicted,
            kept_bytes=kept_bytes,
        )

    def _ahead(self, is_missing: Array, free_bytes: int) -> tuple[Array, int]:
        """Returns how many records of each layer's predicted experts can be pulled ahead, and the bytes for them."""
        slot_bytes = self.record_rows.max(axis=1)
        if not self.num_predicted:
            return np.zeros_like(slot_bytes), 0
        of_place = 2 * self.num_predicted * slot_bytes
        most = np.minimum(np.maximum(_AHEAD_SHARE * free_bytes // of_place, 1), self.num_rows).astype(np.int64)
        num_ahead = most * (self.has_link & is_missing & (of_place <= free_bytes))
        return num_ahead, int((num_ahead * of_place).max())

    def _scratch_bytes(self, has_selector: Array, first_dynamic: Array) -> int:
        """Returns the bytes for the missing rows of a token's experts of one layer, in slots of the largest record."""
        selectors = np.where(has_selector, 0, self.selector_rows.max(axis=1, keepdims=True) * self.num_rows)
        # Any expert may stand at any place of a token, so that each place has memory for the largest.
        of_place = self._most_missing(first_dynamic) + selectors.max(axis=1)
        return int(-(-self.num_active * of_place.max() // LINE_BYTES) * LINE_BYTES)

    def _all_pulled_bytes(self, first_dynamic: Array) -> int:
        """Returns the bytes for the missing records of a token's experts of one layer."""
        return int(self.num_active * self._most_missing(first_dynamic).max())

    def _most_missing(self, first_dynamic: Array) -> Array:
        """Returns the bytes of each layer for the records of an expert that lacks some, in slots of the largest."""
        is_missing = (first_dynamic < self.num_rows).any(axis=1)
        most: Array = np.where(is_missing, self.record_rows.max(axis=1) * self.num_rows, 0)
        return most


def _row_bytes(expert: formats.ExpertLayout) -> tuple[int, int]:
    return expert.selector.row_bytes if expert.selector else 0, expert.records.row_bytes
