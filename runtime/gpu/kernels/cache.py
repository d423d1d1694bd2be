"""The expert cache of the graph engine on the GPU: how experts are stored, which have pages, and how rows come to them.

`LayerTables` say where each row of a layer's experts lies in an arena.

`lru_update` gives pages to the experts that a token needs and takes them from the least recently used ones, on the
device: the host decides nothing. An expert takes pages for its *dynamic* rows, those that are not resident for the
whole run: first the rows of its selector, then its records. Rows never straddle pages. `lru_update` copies nothing; it
marks evicted rows as missing.

`gather_selectors_from_host` and `gather_records_from_host` copy missing rows from page-locked host memory into their
pages. Their kernel is the only one that reads host memory, and one program alone loads each byte. It enters copied rows
in the tables, so that a row crosses the link once while its expert keeps its pages.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_pack.runtime.gpu.kernels.rows import INTERPRETED
from moe_pack.runtime.gpu.kernels.tables import (
    PER_LAYER,
    SELECT_BLOCK,
    HostRows,
    LayerTables,
)


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Which neurons of a token's k experts run; allocated once, on the device.

    `a`: float32 [k, f], the selector's activations.   `neurons`: int32 [k, f]; the running neurons of each block of
    `SELECT_BLOCK` stand at the block's beginning, in ascending order.   `counts`: int32 [k, blocks], how many run.
    """

    a: Tensor
    neurons: Tensor
    counts: Tensor

    @classmethod
    def allocate(cls, k: int, num_rows: int, device: torch.device) -> "Selection":
        """Allocates for k experts with so many neurons."""
        blocks = -(-num_rows // SELECT_BLOCK)
        return cls(
            torch.zeros((k, num_rows), device=device),
            torch.zeros((k, num_rows), dtype=torch.int32, device=device),
            torch.zeros((k, blocks), dtype=torch.int32, device=device),
        )


NEEDED, HITS, ROWS, BYTES = range(4)  # places in `CacheState.counters`
_RESET_BLOCK = 512  # rows that are marked as missing at once, and pages that are moved at once
_NEVER = tl.constexpr(2**31 - 1)


@dataclass(frozen=True, slots=True, eq=False)
class CacheState:
    """Which experts of a layer have which pages; all tensors are on the tables' device, int32 except `counters`.

    `last_used` [E]: the step in which an expert was last needed.   `is_in` [E]: 1 if the expert has its pages or takes
    none.   `num_pages_of` [E]: pages that it takes.   `page_list` [E, most pages of an expert].   `free` [pages]: the
    first `num_free` [1] of them are free.   `clock` [1]: steps until now.   `selector_is_dynamic` [E].
    `first_dynamic` [E]: the first dynamic record.   `counters` int64 [4]: experts NEEDED, HITS among them, ROWS copied
    from host memory, and their BYTES.   `pages_begin`: offset of page 0 in the arena, `page_units`: length of a page,
    in units of 16 bytes.   `num_active`: the most experts of a step; any so many fit into the pages.   `keeps`: False
    if other layers use the same pages in between, so that no expert stays from step to step.
    """

    last_used: Tensor
    is_in: Tensor
    num_pages_of: Tensor
    page_list: Tensor
    free: Tensor
    num_free: Tensor
    clock: Tensor
    selector_is_dynamic: Tensor
    first_dynamic: Tensor
    counters: Tensor
    pages_begin: int
    page_units: int
    num_active: int
    keeps: bool

    @classmethod
    def empty(
        cls,
        num_pages_of: Tensor,
        selector_is_dynamic: Tensor,
        first_dynamic: Tensor,
        num_pages: int,
        pages_begin: int,
        page_units: int,
        num_active: int,
        keeps: bool = True,
    ) -> "CacheState":
        """Returns the state of a layer in which no expert has pages yet, on the host.

        Args:    num_pages_of, selector_is_dynamic, first_dynamic: int32 [E].   num_pages: of the layer.
        """
        largest = num_pages_of.sort(descending=True).values[:num_active]
        assert int(largest.sum()) <= num_pages, "the experts of one step fit into the pages"
        E = len(num_pages_of)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32)

        return cls(
            last_used=zeros(E),
            is_in=(num_pages_of == 0).to(torch.int32),
            num_pages_of=num_pages_of,
            page_list=zeros(E, max(int(largest[0]), 1)),
            free=torch.arange(num_pages - 1, -1, -1, dtype=torch.int32),  # page 0 is given first
            num_free=torch.tensor([num_pages], dtype=torch.int32),
            clock=zeros(1),
            selector_is_dynamic=selector_is_dynamic,
            first_dynamic=first_dynamic,
            counters=torch.zeros(4, dtype=torch.int64),
            pages_begin=pages_begin,
            page_units=page_units,
            num_active=num_active,
            keeps=keeps,
        )

    def put(self, put: Callable[[Tensor], Tensor], counters: Tensor) -> "CacheState":
        """Returns the same state with its tensors where `put` puts them, and with the given counters."""
        return replace(
            self,
            last_used=put(self.last_used),
            is_in=put(self.is_in),
            num_pages_of=put(self.num_pages_of),
            page_list=put(self.page_list),
            free=put(self.free),
            num_free=put(self.num_free),
            clock=put(self.clock),
            selector_is_dynamic=put(self.selector_is_dynamic),
            first_dynamic=put(self.first_dynamic),
            counters=counters,
        )


def lru_update(experts: Tensor, state: CacheState, tables: LayerTables) -> None:
    """Gives pages to those of these experts that have none, and evicts the least recently used other experts.

    Of experts used equally long ago the lowest is evicted first. Rows of an evicted expert are -1 in the tables; rows
    of an expert with new pages are -1 until they are copied.
    Args:    experts: int32 [n], each once, on the device; n is at most `num_active`.
    """
    assert len(experts) <= state.num_active, "no more experts fit into the pages at once"
    E, f = tables.record_at.shape
    selector_at = tables.record_at if tables.selector_at is None else tables.selector_at
    _lru_update_kernel[(1,)](
        experts,
        state.last_used,
        state.is_in,
        state.num_pages_of,
        state.page_list,
        state.free,
        state.num_free,
        state.clock,
        state.selector_is_dynamic,
        state.first_dynamic,
        state.counters,
        selector_at,
        tables.record_at,
        E,
        f,
        state.page_list.shape[1],
        KEEPS=state.keeps,
        NUM_EXPERTS=len(experts),
        BLOCK_E=triton.next_power_of_2(E),
        BLOCK=_RESET_BLOCK,
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit
def _evict(
    victim,
    num_free,
    num_pages_of_ptr,
    page_list_ptr,
    free_ptr,
    selector_is_dynamic_ptr,
    first_dynamic_ptr,
    selector_at_ptr,
    record_at_ptr,
    f,
    max_pages,
    BLOCK: tl.constexpr,
):
    """Takes an expert's pages and marks its dynamic rows as missing; returns how many pages are free now."""
    lanes = tl.arange(0, BLOCK)
    given = tl.load(num_pages_of_ptr + victim)
    begin = 0  # no `range`: the interpreter needs a constant as its end
    while begin < given:
        some = begin + lanes < given
        pages = tl.load(page_list_ptr + victim * max_pages + begin + lanes, mask=some, other=0)
        tl.store(free_ptr + num_free + begin + lanes, pages, mask=some)
        begin += BLOCK
    first = tl.load(first_dynamic_ptr + victim)
    while first < f:
        tl.store(record_at_ptr + victim * f + first + lanes, -1, mask=first + lanes < f)
        first += BLOCK
    if tl.load(selector_is_dynamic_ptr + victim) != 0:
        start = 0
        while start < f:
            tl.store(selector_at_ptr + victim * f + start + lanes, -1, mask=start + lanes < f)
            start += BLOCK
    return num_free + given


@triton.jit(do_not_specialize=PER_LAYER)
def _lru_update_kernel(
    experts_ptr,
    last_used_ptr,
    is_in_ptr,
    num_pages_of_ptr,
    page_list_ptr,
    free_ptr,
    num_free_ptr,
    clock_ptr,
    selector_is_dynamic_ptr,
    first_dynamic_ptr,
    counters_ptr,
    selector_at_ptr,
    record_at_ptr,
    E,
    f,
    max_pages,
    KEEPS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    ids = tl.arange(0, BLOCK_E)
    lanes = tl.arange(0, BLOCK)
    live = ids < E
    is_in = tl.load(is_in_ptr + ids, mask=live, other=0)
    num_pages_of = tl.load(num_pages_of_ptr + ids, mask=live, other=0)
    num_free = tl.load(num_free_ptr)
    if not KEEPS:
        num_left = tl.sum(((is_in == 1) & (num_pages_of > 0)).to(tl.int32))
        while num_left > 0:
            victim = tl.min(tl.where((is_in == 1) & (num_pages_of > 0), ids, BLOCK_E))
            num_free = _evict(
                victim,
                num_free,
                num_pages_of_ptr,
                page_list_ptr,
                free_ptr,
                selector_is_dynamic_ptr,
                first_dynamic_ptr,
                selector_at_ptr,
                record_at_ptr,
                f,
                max_pages,
                BLOCK,
            )
            is_in = tl.where(ids == victim, 0, is_in)
            num_left -= 1
    last_used = tl.load(
        last_used_ptr + ids, mask=live, other=0
    )  # not loaded above, where the loop has no registers for it
    clock = tl.load(clock_ptr) + 1
    hits = 0
    for i in range(NUM_EXPERTS):
        last_used = tl.where(ids == tl.load(experts_ptr + i), clock, last_used)
    for i in range(NUM_EXPERTS):
        e = tl.load(experts_ptr + i)
        was_in = tl.sum(tl.where(ids == e, is_in, 0))
        hits += was_in
        if was_in == 0:
            count = tl.load(num_pages_of_ptr + e)
            if KEEPS:  # otherwise all pages are free by now, and one step's experts fit
                while num_free < count:
                    may_go = (is_in == 1) & (num_pages_of > 0) & (last_used < clock)
                    age = tl.where(may_go, last_used, _NEVER)
                    victim = tl.min(tl.where(age == tl.min(age), ids, BLOCK_E))
                    num_free = _evict(
                        victim,
                        num_free,
                        num_pages_of_ptr,
                        page_list_ptr,
                        free_ptr,
                        selector_is_dynamic_ptr,
                        first_dynamic_ptr,
                        selector_at_ptr,
                        record_at_ptr,
                        f,
                        max_pages,
                        BLOCK,
                    )
                    is_in = tl.where(ids == victim, 0, is_in)
            tl.debug_barrier()  # `free` is read below and was written by other threads
            begin = 0
            while begin < count:
                some = begin + lanes < count
                pages = tl.load(free_ptr + num_free - 1 - begin - lanes, mask=some, other=0)
                tl.store(page_list_ptr + e * max_pages + begin + lanes, pages, mask=some)
                begin += BLOCK
            num_free -= count
            is_in = tl.where(ids == e, 1, is_in)
            tl.debug_barrier()  # only now may `free` be overwritten
    tl.store(last_used_ptr + ids, last_used, mask=live)
    tl.store(is_in_ptr + ids, is_in, mask=live)
    tl.store(num_free_ptr, num_free)
    tl.store(clock_ptr, clock)
    tl.store(counters_ptr, tl.load(counters_ptr) + NUM_EXPERTS)
    tl.store(counters_ptr + 1, tl.load(counters_ptr + 1) + hits)


# Four for each multiprocessor of the largest GPU today; the link is slower than all of them.
NUM_PROGRAMS = 4 if INTERPRETED else 528
_TILE_WORDS = 2048  # that a program loads at once: 16 a thread


def gather_selectors_from_host(
    experts: Tensor, tables: LayerTables, state: CacheState, host: HostRows, num_programs: int = NUM_PROGRAMS
) -> None:
    """Copies all missing selector rows of these experts, which have their pages, from host memory.

    Args:    experts: int32 [n], each once, on the device.
    """
    if tables.selector_at is not None:
        _gather(experts, None, tables, state, host, num_programs, of_selector=True)


def gather_records_from_host(
    experts: Tensor,
    selection: Selection | None,
    tables: LayerTables,
    state: CacheState,
    host: HostRows,
    num_programs: int = NUM_PROGRAMS,
) -> None:
    """Copies the missing records of these experts' selected neurons from host memory; all records, if None.

    Args:    experts: int32 [n], each once, on the device; the selection is theirs.
    """
    _gather(experts, selection, tables, state, host, num_programs, of_selector=False)


def _gather(
    experts: Tensor,
    selection: Selection | None,
    tables: LayerTables,
    state: CacheState,
    host: HostRows,
    num_programs: int,
    of_selector: bool,
) -> None:
    at = tables.selector_at if of_selector else tables.record_at
    assert at is not None, "a kernel gathers rows that are stored"
    num_experts, f = len(experts), at.shape[1]
    num_blocks = triton.cdiv(f, SELECT_BLOCK)
    # With few blocks, several programs share the rows of a block.
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
        _gather_kernel[(min(num_tasks, num_programs),)](
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
            FIRST_UNIT=0 if of_selector else f * kind.selector_units,
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
    """Loads words of rows in host memory."""
    return tl.load(words_ptr, mask=mask, other=0)


@triton.jit(do_not_specialize=PER_LAYER)
def _gather_kernel(
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
    FIRST_UNIT: tl.constexpr,
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
    while task < num_tasks:  # no `range`: the interpreter needs a constant as its end
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
            live = live & (lanes % SPLITS == split)  # by lane: no program reads what another one enters
            missing = live & (tl.load(at_ptr + e * f + neurons, mask=live, other=0) < 0)
            number = tl.sum(missing.to(tl.int32))
            if number > 0:
                page, row = 0, neurons
                if not OF_SELECTOR:
                    page = tl.load(selector_is_dynamic_ptr + e) * SELECTOR_PAGES
                    row = neurons - tl.load(first_dynamic_ptr + e)
                slot = tl.load(page_list_ptr + e * max_pages + page + row // ROWS_PER_PAGE, mask=missing, other=0)
                to = pages_begin + slot * page_units + row % ROWS_PER_PAGE * UNITS
                source = tl.load(extent_at_ptr + e) + FIRST_UNIT + neurons.to(tl.int64) * UNITS
                rank = tl.cumsum(missing.to(tl.int32)) - 1
                first = 0
                while first < number:
                    ranks = first + tl.arange(0, BLOCK_R)
                    is_it = missing[None, :] & (rank[None, :] == ranks[:, None])  # [R, lanes]
                    from_words = tl.sum(tl.where(is_it, source[None, :], 0), 1) * 4
                    to_words = tl.sum(tl.where(is_it, to[None, :], 0).to(tl.int64), 1) * 4
                    for begin in range(0, 4 * UNITS, BLOCK_W):
                        mask = (ranks < number)[:, None] & (begin + words < 4 * UNITS)
                        row_words = _load_host(host_words_ptr + from_words[:, None] + begin + words, mask)
                        tl.store(arena_words_ptr + to_words[:, None] + begin + words, row_words, mask=mask)
                    first += BLOCK_R
                tl.store(at_ptr + e * f + neurons, to, mask=missing)
                tl.atomic_add(counters_ptr + 2, number.to(tl.int64))
                tl.atomic_add(counters_ptr + 3, number.to(tl.int64) * (16 * UNITS))
        task += tl.num_programs(0)
