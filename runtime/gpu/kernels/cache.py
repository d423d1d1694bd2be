"""What kernels know of a layer's experts: how they are stored, and where each row lies in an arena.

Which experts of a layer have pages: LRU kept on the device, so that a token needs no decision of the host's.

An expert takes pages for its rows that are not always there, its *dynamic* ones: first those of its selector, then
those of its records. Rows never straddle pages. Nothing is copied here: evicted rows are marked as gone, and `pull`
brings those that are wanted.

Rows that a layer needs and has not: copied by the device itself from page-locked host memory into their pages.

It is the only kernel that touches host memory, and one program alone loads each byte. What is copied is entered in the
tables, so that it crosses the link once while its expert keeps its pages (`lru_update`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_pack.formats import ExpertLayout, Matrix, NeuronFunction, PartFormat, Selector
from moe_pack.runtime.gpu.kernels.rows import INTERPRETED, RowPart, part_of

SELECT_BLOCK = 64  # neurons that are selected, and listed, together
# Arguments that differ from one layer to the next, for which Triton must not compile a kernel each: a layer's routes
# may begin at any multiple of 4 bytes, and a format may be the first kind of one layer and the second of another.
PER_LAYER = ("experts_ptr", "kind_number", "max_pages", "pages_begin")


class StoredPart(NamedTuple):
    """A matrix of an expert: in selector rows, or in records; where in such a row, and how it is stored."""

    in_selector: bool
    part: RowPart
    format: PartFormat


@dataclass(frozen=True, slots=True)
class ExpertKind:
    """One way in which experts are stored and run; a layer of mixed widths has several.

    `function`: what neurons do.   `gate` is None where the family has none.   `selector_units`, `record_units`: bytes
    of a row by 16.
    """

    selector: Selector
    function: NeuronFunction
    gate: StoredPart | None
    up: StoredPart
    down: StoredPart
    num_rows: int
    num_cols: int
    selector_units: int
    record_units: int


def kind_of(layout: ExpertLayout, selector: Selector, function: NeuronFunction) -> ExpertKind:
    """The kind of an expert of this layout."""

    def held(matrix: Matrix) -> StoredPart | None:
        found = layout.find(matrix)
        return (
            None
            if found is None
            else StoredPart(found[0] is layout.selector, part_of(found[0], matrix), found[1].format)
        )

    up, down = held("up"), held("down")
    assert up is not None and down is not None, "every expert has up and down"
    selector_units = layout.selector.row_bytes // 16 if layout.selector else 0
    return ExpertKind(
        selector,
        function,
        held("gate"),
        up,
        down,
        layout.num_rows,
        layout.records.num_cols,
        selector_units,
        layout.records.row_bytes // 16,
    )


@dataclass(frozen=True, slots=True, eq=False)
class LayerTables:
    """Where the rows of a layer's experts lie; all tensors are on one device.

    `arena`: u8, its first byte at a multiple of 128.   `selector_at`, `record_at`: int32 [E, f], a row's offset in it
    in units of 16 bytes, -1 where the row is not there; `selector_at` is None where no selector is stored.
    `kind`: int32 [E], which of `kinds` an expert is of.   `thresholds`: float32 [E].
    `down_bias`: float32 [E, d], contiguous, where experts have one.
    """

    arena: Tensor
    selector_at: Tensor | None
    record_at: Tensor
    kind: Tensor
    thresholds: Tensor
    kinds: tuple[ExpertKind, ...]
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Which neurons of a token's k experts run: room for it, made once, on the device.

    `a`: float32 [k, f], the selector's activations.   `neurons`: int32 [k, f]; those of each block of `SELECT_BLOCK`
    that run stand at its beginning, rising.   `counts`: int32 [k, blocks], how many.
    """

    a: Tensor
    neurons: Tensor
    counts: Tensor

    @classmethod
    def room(cls, k: int, num_rows: int, device: torch.device) -> "Selection":
        """Room for k experts of so many neurons."""
        blocks = -(-num_rows // SELECT_BLOCK)
        return cls(
            torch.zeros((k, num_rows), device=device),
            torch.zeros((k, num_rows), dtype=torch.int32, device=device),
            torch.zeros((k, blocks), dtype=torch.int32, device=device),
        )


NEEDED, HITS, ROWS, BYTES = range(4)  # places in `CacheState.counters`
_RESET_BLOCK = 512  # rows marked as gone at once, and pages moved
_NEVER = tl.constexpr(2**31 - 1)


@dataclass(frozen=True, slots=True, eq=False)
class CacheState:
    """Who has which pages of a layer; all tensors are on the tables' device, int32 but for `counters`.

    `last_used` [E]: the step in which an expert was last needed.   `is_in` [E]: 1 where it has its pages, or takes
    none.
    `num_pages_of` [E]: what it takes.   `page_list` [E, most pages of an expert].   `free` [pages], of which the first
    `num_free` [1] are free.   `clock` [1]: steps until now.   `selector_is_dynamic` [E].   `first_dynamic` [E]: the
    records from here on are dynamic.   `counters` int64 [4]: experts NEEDED, of which HITS were in; ROWS pulled, and
    BYTES.   `pages_begin`: where page 0 lies in the arena, `page_units`: how long a page is, in units of 16 bytes.
    `num_active`: experts of a step, at most: the pages hold any so many.   `keeps`: False where other layers use the
    same pages in between, so that nothing is left of the step before.
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
        """The state of a layer into which no expert has come yet, on the host.

        Args:    num_pages_of, selector_is_dynamic, first_dynamic: int32 [E].   num_pages: all pages.
        """
        largest = num_pages_of.sort(descending=True).values[:num_active]
        assert int(largest.sum()) <= num_pages, "what a step needs has room beside nothing else"
        E = len(num_pages_of)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32)

        return cls(
            zeros(E),
            (num_pages_of == 0).to(torch.int32),
            num_pages_of,
            zeros(E, max(int(largest[0]), 1)),
            torch.arange(num_pages - 1, -1, -1, dtype=torch.int32),  # page 0 is given first
            torch.tensor([num_pages], dtype=torch.int32),
            zeros(1),
            selector_is_dynamic,
            first_dynamic,
            torch.zeros(4, dtype=torch.int64),
            pages_begin,
            page_units,
            num_active,
            keeps,
        )

    def put(self, put: Callable[[Tensor], Tensor], counters: Tensor) -> "CacheState":
        """The same where `put` puts its tensors, counting in the given ones."""
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
    """Gives pages to those of these experts that have none; the least recently used others lose theirs.

    Among equals the lowest goes first. Rows of who loses its pages are -1 in the tables; rows of who gets some still
    are, until they are pulled.
    Args:    experts: int32 [n], each once, on the device; n at most `num_active`.
    """
    assert len(experts) <= state.num_active, "the pages hold no more experts at once"
    E, f = tables.record_at.shape
    selector_at = tables.record_at if tables.selector_at is None else tables.selector_at
    _admit[(1,)](
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
    """Takes an expert's pages, and marks its dynamic rows as gone; how many pages are free now."""
    lanes = tl.arange(0, BLOCK)
    given = tl.load(num_pages_of_ptr + victim)
    begin = 0  # not `range`, whose end the interpreter needs as a constant
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
def _admit(
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
    last_used = tl.load(last_used_ptr + ids, mask=live, other=0)  # not above, where the loop had no registers for it
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
            if KEEPS:  # else all pages are free by now, and a step has room beside nothing else
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
            tl.debug_barrier()  # other threads wrote what is read from `free`
            begin = 0
            while begin < count:
                some = begin + lanes < count
                pages = tl.load(free_ptr + num_free - 1 - begin - lanes, mask=some, other=0)
                tl.store(page_list_ptr + e * max_pages + begin + lanes, pages, mask=some)
                begin += BLOCK
            num_free -= count
            is_in = tl.where(ids == e, 1, is_in)
            tl.debug_barrier()  # what was read from `free` may be overwritten now
    tl.store(last_used_ptr + ids, last_used, mask=live)
    tl.store(is_in_ptr + ids, is_in, mask=live)
    tl.store(num_free_ptr, num_free)
    tl.store(clock_ptr, clock)
    tl.store(counters_ptr, tl.load(counters_ptr) + NUM_EXPERTS)
    tl.store(counters_ptr + 1, tl.load(counters_ptr + 1) + hits)


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


def gather_selectors_from_host(
    experts: Tensor, tables: LayerTables, state: CacheState, host: HostRows, num_programs: int = NUM_PROGRAMS
) -> None:
    """Brings all selector rows of these experts that are not there; they have their pages.

    Args:    experts: int32 [n], each once, on the device.
    """
    if tables.selector_at is not None:
        _launch(experts, None, tables, state, host, num_programs, of_selector=True)


def gather_records_from_host(
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
