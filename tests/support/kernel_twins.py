"""The twins of Triton kernels in plain torch that nothing else has: what tests and the GPU's checks compare with."""

import torch
from torch import Tensor

from moe_pack.formats import RowLayout
from moe_pack.runtime.gpu.kernels.cache import BYTES, HITS, NEEDED, ROWS, CacheState, Selection
from moe_pack.runtime.gpu.kernels.tables import SELECT_BLOCK, HostRows, LayerTables
from moe_pack.runtime.model import RowMatrix, StoredMatrix, linear


def gemv_twin(x: Tensor, rows: Tensor, layout: RowLayout | None) -> Tensor:
    """`rows @ x` in plain torch, float32 [n]; `layout` is None for plain values."""
    matrix = StoredMatrix(rows) if layout is None else RowMatrix(layout, rows)
    return linear(x[None], matrix)[0]


def reduce_twin(partials: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum in plain torch, float32 [d]."""
    return (partials.sum(1) * weights[:, None]).sum(0)


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
