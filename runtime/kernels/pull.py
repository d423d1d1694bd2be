"""Rows that a layer needs and has not: copied by the device itself from page-locked host memory into their pages.

It is the only kernel that touches host memory, and one program alone loads each byte. What is copied is entered in the
tables, so that it crosses the link once while its expert keeps its pages (`admit`).
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from moe_pack.runtime.kernels.admit import CacheState
from moe_pack.runtime.kernels.tables import PER_LAYER, SELECT_BLOCK, LayerTables, Selection
from moe_pack.runtime.kernels.tiles import INTERPRETED

# Four for each multiprocessor of the largest card today; the link is slower than all of them.
NUM_PROGRAMS = 4 if INTERPRETED else 528
_TILE_WORDS = 2048  # that a program has on their way at once: 16 a thread


@dataclass(frozen=True, slots=True, eq=False)
class HostRows:
    """A layer's experts in host memory.

    `rows`: u8, all their extents, on the host, page-locked where the tables are on a card; its first byte at a multiple
    of 128.   `extent_at`: int64 [E], on the tables' device, where each begins in it, in units of 16 bytes.
    """

    rows: Tensor
    extent_at: Tensor


def pull_selectors(
    experts: Tensor, tables: LayerTables, state: CacheState, host: HostRows, num_programs: int = NUM_PROGRAMS
) -> None:
    """Brings all selector rows of these experts that are not there; they have their pages.

    Args:    experts: int32 [n], each once, on the device.
    """
    if tables.selector_at is not None:
        _launch(experts, None, tables, state, host, num_programs, of_selector=True)


def pull_records(
    experts: Tensor,
    selection: Selection | None,
    tables: LayerTables,
    state: CacheState,
    host: HostRows,
    num_programs: int = NUM_PROGRAMS,
) -> None:
    """Brings the records of the selected neurons of these experts that are not there; all their records for None.

    Args:    experts: int32 [n], each once, on the device; the selection is theirs.
    """
    _launch(experts, selection, tables, state, host, num_programs, of_selector=False)


def _launch(
    experts: Tensor,
    selection: Selection | None,
    tables: LayerTables,
    state: CacheState,
    host: HostRows,
    num_programs: int,
    of_selector: bool,
) -> None:
    at = tables.selector_at if of_selector else tables.record_at
    assert at is not None, "there are rows to pull"
    num_experts, f = len(experts), at.shape[1]
    num_blocks = triton.cdiv(f, SELECT_BLOCK)
    # A block's rows are dealt to several programs where there are few blocks.
    splits = 1
    while splits < 16 and 2 * splits * num_experts * num_blocks <= num_programs:
        splits *= 2
    num_tasks = num_experts * num_blocks * splits
    for number, kind in enumerate(tables.kinds):
        units = kind.selector_units if of_selector else kind.record_units
        rows_per_page = state.page_units // units
        has_selector = not of_selector and kind.selector_units > 0
        selector_pages = triton.cdiv(f, state.page_units // kind.selector_units) if has_selector else 0
        block_words = min(triton.next_power_of_2(4 * units), _TILE_WORDS)
        _pull[(min(num_tasks, num_programs),)](
            experts,
            at if selection is None else selection.neurons,
            at if selection is None else selection.counts,
            tables.arena,
            host.rows,
            host.extent_at,
            at,
            tables.kind,
            state.page_list,
            state.selector_is_dynamic,
            state.first_dynamic,
            state.counters,
            num_experts,
            num_tasks,
            f,
            num_blocks,
            state.page_list.shape[1],
            state.pages_begin,
            state.page_units,
            number,
            BEHIND=0 if of_selector else f * kind.selector_units,
            SELECTOR_PAGES=selector_pages,
            UNITS=units,
            ROWS_PER_PAGE=rows_per_page,
            OF_SELECTOR=of_selector,
            LISTED=selection is not None,
            SPLITS=splits,
            LANES=SELECT_BLOCK,
            BLOCK_R=min(_TILE_WORDS // block_words, SELECT_BLOCK),
            BLOCK_W=block_words,
            num_warps=4,
            enable_fp_fusion=True,
        )


@triton.jit
def _load_host(words_ptr, mask):
    """Words of rows in host memory."""
    return tl.load(words_ptr, mask=mask, other=0)


@triton.jit(do_not_specialize=PER_LAYER)
def _pull(
    experts_ptr,
    neurons_ptr,
    counts_ptr,
    arena_ptr,
    host_ptr,
    extent_at_ptr,
    at_ptr,
    kind_ptr,
    page_list_ptr,
    selector_is_dynamic_ptr,
    first_dynamic_ptr,
    counters_ptr,
    num_experts,
    num_tasks,
    f,
    num_blocks,
    max_pages,
    pages_begin,
    page_units,
    kind_number,
    BEHIND: tl.constexpr,
    SELECTOR_PAGES: tl.constexpr,
    UNITS: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    OF_SELECTOR: tl.constexpr,
    LISTED: tl.constexpr,
    SPLITS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    host_words_ptr = host_ptr.to(tl.pointer_type(tl.uint32))
    arena_words_ptr = arena_ptr.to(tl.pointer_type(tl.uint32))
    lanes = tl.arange(0, LANES)
    words = tl.arange(0, BLOCK_W)[None, :]
    task = tl.program_id(0)
    while task < num_tasks:  # not `range`, whose end the interpreter needs as a constant
        split = task % SPLITS
        place = (task // SPLITS) % num_experts
        block = task // (SPLITS * num_experts)
        e = tl.load(experts_ptr + place)
        if tl.load(kind_ptr + e) == kind_number:
            if LISTED:
                live = lanes < tl.load(counts_ptr + place * num_blocks + block)
                neurons = tl.load(neurons_ptr + place * f + block * LANES + lanes, mask=live, other=0)
            else:
                neurons = block * LANES + lanes
                live = neurons < f
            live = live & (lanes % SPLITS == split)  # by lane: what one program enters, no other looks at
            missing = live & (tl.load(at_ptr + e * f + neurons, mask=live, other=0) < 0)
            number = tl.sum(missing.to(tl.int32))
            if number > 0:
                page, row = 0, neurons
                if not OF_SELECTOR:
                    page = tl.load(selector_is_dynamic_ptr + e) * SELECTOR_PAGES
                    row = neurons - tl.load(first_dynamic_ptr + e)
                slot = tl.load(page_list_ptr + e * max_pages + page + row // ROWS_PER_PAGE, mask=missing, other=0)
                to = pages_begin + slot * page_units + row % ROWS_PER_PAGE * UNITS
                source = tl.load(extent_at_ptr + e) + BEHIND + neurons.to(tl.int64) * UNITS
                rank = tl.cumsum(missing.to(tl.int32)) - 1
                first = 0
                while first < number:
                    wanted = first + tl.arange(0, BLOCK_R)
                    is_it = missing[None, :] & (rank[None, :] == wanted[:, None])  # [R, lanes]
                    from_words = tl.sum(tl.where(is_it, source[None, :], 0), 1) * 4
                    to_words = tl.sum(tl.where(is_it, to[None, :], 0).to(tl.int64), 1) * 4
                    for begin in range(0, 4 * UNITS, BLOCK_W):
                        mask = (wanted < number)[:, None] & (begin + words < 4 * UNITS)
                        held = _load_host(host_words_ptr + from_words[:, None] + begin + words, mask)
                        tl.store(arena_words_ptr + to_words[:, None] + begin + words, held, mask=mask)
                    first += BLOCK_R
                tl.store(at_ptr + e * f + neurons, to, mask=missing)
                tl.atomic_add(counters_ptr + 2, number.to(tl.int64))
                tl.atomic_add(counters_ptr + 3, number.to(tl.int64) * (16 * UNITS))
        task += tl.num_programs(0)
