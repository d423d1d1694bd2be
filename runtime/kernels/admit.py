"""Which experts of a layer have pages: LRU kept on the device, so that a token needs no decision of the host's.

An expert takes pages for its rows that are not always there, its *dynamic* ones: first those of its selector, then
those of its records. Rows never straddle pages. Nothing is copied here: evicted rows are marked as gone, and `pull`
brings those that are wanted.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_pack.runtime.kernels.tables import PER_LAYER, LayerTables

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


def admit(experts: Tensor, state: CacheState, tables: LayerTables) -> None:
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
