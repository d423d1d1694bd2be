"""The twins of Triton kernels in plain torch that nothing else has: what tests and the GPU's checks compare with."""

import torch
from torch import Tensor

from moe_pack.formats import RowLayout
from moe_pack.runtime.gpu.kernels.cache import BYTES, HITS, NEEDED, ROWS, CacheState, Selection
from moe_pack.runtime.gpu.kernels.tables import (
    HERE,
    PULLED,
    SELECT_BLOCK,
    WHOLE,
    HostRows,
    Landing,
    LayerTables,
    LeftToCpu,
    RunningNeurons,
)
from moe_pack.runtime.model import RowMatrix, StoredMatrix, linear


def gemv_twin(x: Tensor, rows: Tensor, layout: RowLayout | None) -> Tensor:
    """`rows @ x` in plain torch, float32 [n]; `layout` is None for plain values."""
    matrix = StoredMatrix(rows) if layout is None else RowMatrix(layout, rows)
    return linear(x[None], matrix)[0]


def reduce_twin(partials: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum in plain torch, float32 [d]."""
    return (partials.sum(1) * weights[:, None]).sum(0)


def listed_in_blocks(running: RunningNeurons, place: int) -> list[int]:
    """The running neurons of a place, as `select` lists them."""
    blocks, counts = torch.split(running.blocks[place], running.block), running.counts[0, place].tolist()
    return [neuron for block, n in zip(blocks, counts, strict=True) for neuron in block[:n].tolist()]


def compact_plain(
    experts: Tensor,
    tables: LayerTables,
    running: RunningNeurons,
    landing: Landing,
    share: Tensor,
    left: LeftToCpu,
    is_split: bool,
) -> None:
    """Does as `compact`, on the host, a neuron at a time."""
    f, num_slots = tables.record_at.shape[1], landing.slots.shape[1]
    for place, e in enumerate(experts.tolist()):
        listed = listed_in_blocks(running, place)
        at = tables.record_at[e].tolist()
        missing = [neuron for neuron in listed if at[neuron] < 0]
        num_pulled = min(int((len(missing) * share).floor()) if is_split else len(missing), num_slots)
        to_slot = dict(zip(missing[:num_pulled], landing.slots[place].tolist(), strict=False))
        if is_split:
            here = [neuron for neuron in listed if at[neuron] >= 0]
            entries = [(neuron, at[neuron]) for neuron in here] + list(to_slot.items())
            to_cpu = missing[num_pulled:]
            running.totals[place] = torch.tensor([len(here), num_pulled, len(to_cpu), num_pulled + len(to_cpu)])
            is_whole = tables.selector_at is not None and tables.selector_at[e, 0] < 0
            left.counts[place] = WHOLE if is_whole else len(to_cpu)
            left.neurons[place, : len(to_cpu)] = torch.tensor(to_cpu, dtype=torch.int32)
            if tables.selector_at is not None:
                left.a[place, : len(to_cpu)] = running.a[place, to_cpu]
        else:
            scratch = [landing.scratch_at + (place * f + j) * landing.slot_units for j in range(len(missing))]
            target = dict(zip(missing, scratch, strict=True)) | to_slot
            entries = [(neuron, target.get(neuron, at[neuron])) for neuron in listed]
            running.totals[place] = torch.tensor([len(entries), 0, 0, len(missing)])
        left.pulled_counts[place] = num_pulled
        left.pulled[place, :num_pulled] = torch.tensor(list(to_slot), dtype=torch.int32)
        for number, (neuron, units) in enumerate(entries):
            running.neurons[place, number], running.units[place, number] = neuron, units


def pull_records_plain(
    experts: Tensor, tables: LayerTables, running: RunningNeurons, host: HostRows, is_split: bool
) -> None:
    """Does as `pull_records`, on the host, a row at a time."""
    for place, e in enumerate(experts.tolist()):
        kind = tables.kinds[int(tables.kind[e])]
        here, pulled = running.totals[place, [HERE, PULLED]].tolist()
        for entry in range(here, here + pulled) if is_split else range(here):
            neuron, units = int(running.neurons[place, entry]), int(running.units[place, entry])
            if tables.record_at[e, neuron] < 0:
                source = int(host.extent_at[e]) + kind.num_rows * kind.selector_units + neuron * kind.record_units
                _copy_row(host.rows, source, tables.arena, units, kind.record_units)


def pull_selectors_plain(
    experts: Tensor, tables: LayerTables, host: HostRows, scratch_at: int, selector_units: Tensor
) -> None:
    """Does as `pull_selectors`, on the host, a row at a time."""
    assert tables.selector_at is not None
    f, most = tables.selector_at.shape[1], max(kind.selector_units for kind in tables.kinds)
    for place, e in enumerate(experts.tolist()):
        units = tables.kinds[int(tables.kind[e])].selector_units
        selector_units[place] = tables.selector_at[e]
        for neuron in range(f) if tables.selector_at[e, 0] < 0 else ():
            target = scratch_at + place * f * most + neuron * units
            selector_units[place, neuron] = target
            _copy_row(host.rows, int(host.extent_at[e]) + neuron * units, tables.arena, target, units)


def bring_plain(sources: Tensor, targets: Tensor, row_units: int, host_rows: Tensor, arena: Tensor) -> None:
    """Does as `bring`, on the host, a row at a time."""
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        _copy_row(host_rows, source, arena, target, row_units)


def _copy_row(host_rows: Tensor, source: int, arena: Tensor, target: int, units: int) -> None:
    arena[16 * target : 16 * (target + units)] = host_rows[16 * source : 16 * (source + units)]


def lru_update_plain(experts: Tensor, state: CacheState, tables: LayerTables) -> None:
    """Does as `lru_update`, on the host."""
    if not state.keeps:
        for victim in torch.nonzero((state.is_in == 1) & (state.num_pages_of > 0))[:, 0].tolist():
            _evict_plain(victim, state, tables)
    state.clock.add_(1)
    state.last_used[experts.long()] = state.clock
    state.counters[NEEDED] += len(experts)
    for e in experts.tolist():
        if state.is_in[e]:
            state.counters[HITS] += 1
            continue
        count = int(state.num_pages_of[e])
        while state.num_free < count:
            may_go = (state.is_in == 1) & (state.num_pages_of > 0) & (state.last_used < state.clock)
            victim = int(torch.where(may_go, state.last_used, torch.iinfo(torch.int32).max).argmin())
            _evict_plain(victim, state, tables)
        state.num_free.sub_(count)
        begin = int(state.num_free)
        state.page_list[e, :count] = state.free[begin : begin + count].flip(0)
        state.is_in[e] = 1


def _evict_plain(victim: int, state: CacheState, tables: LayerTables) -> None:
    begin, count = int(state.num_free), int(state.num_pages_of[victim])
    state.free[begin : begin + count] = state.page_list[victim, :count]
    state.num_free.add_(count)
    state.is_in[victim] = 0
    tables.record_at[victim, int(state.first_dynamic[victim]) :] = -1
    if tables.selector_at is not None and state.selector_is_dynamic[victim]:
        tables.selector_at[victim] = -1


def gather_plain(
    experts: Tensor,
    selection: Selection | None,
    tables: LayerTables,
    state: CacheState,
    host: HostRows,
    of_selector: bool,
) -> None:
    """Does as `gather_selectors_from_host` and `gather_records_from_host`, on the host, a row at a time."""
    at = tables.selector_at if of_selector else tables.record_at
    if at is None:
        return
    for place, e in enumerate(experts.tolist()):
        kind = tables.kinds[int(tables.kind[e])]
        units = kind.selector_units if of_selector else kind.record_units
        for neuron in _wanted(place, selection, kind.num_rows):
            if at[e, neuron] >= 0:
                continue
            to = _place_plain(e, neuron, tables, state, of_selector)
            behind = 0 if of_selector else kind.num_rows * kind.selector_units
            begin = 16 * (int(host.extent_at[e]) + behind + neuron * units)
            tables.arena[16 * to : 16 * (to + units)] = host.rows[begin : begin + 16 * units]
            at[e, neuron] = to
            state.counters[ROWS] += 1
            state.counters[BYTES] += 16 * units


def _wanted(place: int, selection: Selection | None, num_rows: int) -> list[int]:
    if selection is None:
        return list(range(num_rows))
    counts = selection.counts[place].tolist()
    lists = (selection.neurons[place, SELECT_BLOCK * b :][:n].tolist() for b, n in enumerate(counts))
    return [neuron for listed in lists for neuron in listed]


def _place_plain(e: int, neuron: int, tables: LayerTables, state: CacheState, of_selector: bool) -> int:
    kind = tables.kinds[int(tables.kind[e])]
    page, row, units = 0, neuron, kind.selector_units
    if not of_selector:
        row, units = neuron - int(state.first_dynamic[e]), kind.record_units
        if state.selector_is_dynamic[e]:
            page = -(-kind.num_rows // (state.page_units // kind.selector_units))
    rows_per_page = state.page_units // units
    slot = int(state.page_list[e, page + row // rows_per_page])
    return state.pages_begin + slot * state.page_units + row % rows_per_page * units
