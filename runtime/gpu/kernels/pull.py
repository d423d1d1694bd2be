"""Rows copied from host memory into the arena: all kernels of the experts that read host memory.

They bring rows for one token's layer, and change no table. Every byte is loaded by one program, once. Host memory must
be page-locked if the arena is on a GPU.
"""

import triton
import triton.language as tl
from torch import Tensor

from moe_pack.runtime.gpu.kernels.grids import INTERPRETED
from moe_pack.runtime.gpu.kernels.tables import PER_LAYER, HostRows, LayerTables, RunningNeurons, of_kind

# Two for each multiprocessor of the largest GPU today. Together they wait for 1 MiB and more, several times what is on
# its way over the fastest link, and leave most threads to kernels that run at the same time.
NUM_PROGRAMS = 4 if INTERPRETED else 264
_TILE_WORDS = 2048  # that a program loads at once: 16 a thread
_LANES = tl.constexpr(32)  # list entries that a program looks at together


def pull_records(experts: Tensor, tables: LayerTables, running: RunningNeurons, host: HostRows, is_split: bool) -> None:
    """Copies the listed records that the arena lacks from host memory to where the list says.

    Args:    experts: int32 [k].   running: from `compact`; if `is_split`, only its second range is pulled.
    """
    (k,), f = experts.shape, tables.record_at.shape[1]
    block_words = _block_words(max(kind.record_units for kind in tables.kinds))
    record_units, selector_units = zip(
        *((kind.record_units, kind.selector_units) for kind in tables.kinds), strict=True
    )
    _pull_records_kernel[k, max(1, NUM_PROGRAMS // k)](
        experts, tables.pointers, running, host, f, record_units, selector_units, is_split,
        min(_TILE_WORDS // block_words, _LANES.value), block_words, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def _block_words(row_units: int) -> int:
    return min(int(triton.next_power_of_2(4 * row_units)), _TILE_WORDS)


@triton.jit
def _load_host(words_ptr, mask):
    return tl.load(words_ptr, mask=mask, other=0)


@triton.jit
def _copy_rows(arena_ptr, host_ptr, sources, targets, live, row_units, BLOCK_W: tl.constexpr):
    """Copies rows to the arena.

    Args:    sources, targets: int64 [R], offsets in host memory and in the arena in units of 16 bytes.   live: [R].
             row_units: of each row, in such units.
    """
    host_words_ptr = host_ptr.to(tl.pointer_type(tl.uint32)) + (sources * 4)[:, None]
    arena_words_ptr = arena_ptr.to(tl.pointer_type(tl.uint32)) + (targets * 4)[:, None]
    words = tl.arange(0, BLOCK_W)[None, :]
    part = 0
    while part * BLOCK_W < row_units * 4:  # no `range`: the interpreter needs a constant as its end
        at = part * BLOCK_W + words
        mask = live[:, None] & (at < row_units * 4)
        tl.store(arena_words_ptr + at, _load_host(host_words_ptr + at, mask), mask=mask)
        part += 1


@triton.jit(do_not_specialize=PER_LAYER)
def _pull_records_kernel(
    experts_ptr,
    tables,
    running,
    host,
    f,
    RECORD_UNITS: tl.constexpr,
    SELECTOR_UNITS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    place, program = tl.program_id(0), tl.program_id(1)
    expert = tl.load(experts_ptr + place)
    kind = tl.load(tables.kind + expert)
    row_units = of_kind(kind, RECORD_UNITS)
    records = tl.load(host.extent_at + expert) + f * of_kind(kind, SELECTOR_UNITS)
    # The program's equal share of the list: if it is split, of its second range.
    first, count = 0, tl.load(running.totals + place * 4)
    if IS_SPLIT:
        first, count = count, tl.load(running.totals + place * 4 + 1)
    start = first + count * program // tl.num_programs(1)
    last = first + count * (program + 1) // tl.num_programs(1)
    while start < last:
        # Looks at some entries, and finds the missing ones among them.
        idx = start + tl.arange(0, _LANES)
        missing = idx < last
        neuron = tl.load(running.neurons + place * f + idx, mask=missing, other=0)
        target = tl.load(running.units + place * f + idx, mask=missing, other=0)
        if not IS_SPLIT:
            missing &= tl.load(tables.record_at + expert * f + neuron, mask=missing, other=0) < 0
        source = records + neuron.to(tl.int64) * row_units
        number, rank = tl.sum(missing.to(tl.int32)), tl.cumsum(missing.to(tl.int32), 0) - 1
        # Copies these, a tile at a time, so that no lane waits for a record that is there.
        copied = 0
        while copied < number:
            ranks = copied + tl.arange(0, BLOCK_R)
            is_it = missing[None, :] & (rank[None, :] == ranks[:, None])  # [R, lanes]
            sources = tl.sum(tl.where(is_it, source[None, :], 0), 1)
            targets = tl.sum(tl.where(is_it, target[None, :], 0).to(tl.int64), 1)
            _copy_rows(tables.arena, host.rows, sources, targets, ranks < number, row_units, BLOCK_W)
            copied += BLOCK_R
        start += _LANES


def pull_selectors(
    experts: Tensor, tables: LayerTables, host: HostRows, scratch_at: int, selector_units: Tensor
) -> None:
    """Copies missing selector rows to scratch memory, and writes where these experts' selector rows are.

    An expert's selector rows are all in the arena or all missing: the offset of the first says which.
    Args:    experts: int32 [k].   scratch_at: where the scratch memory begins, in units of 16 bytes; for each expert
             it is as large as the selector rows of the layer's largest kind.   selector_units: [k, f], overwritten.
    """
    assert tables.selector_at is not None, "a selector is stored"
    (k,), f = experts.shape, tables.record_at.shape[1]
    units = tuple(kind.selector_units for kind in tables.kinds)
    _pull_selectors_kernel[k, max(1, NUM_PROGRAMS // k)](
        experts, tables.pointers, selector_units, host, f, scratch_at, units, max(units), _TILE_WORDS,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=PER_LAYER)
def _pull_selectors_kernel(
    experts_ptr,
    tables,
    selector_units_ptr,
    host,
    f,
    scratch_at,
    UNITS: tl.constexpr,
    MOST_UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place, program = tl.program_id(0), tl.program_id(1)
    expert = tl.load(experts_ptr + place)
    row_units = of_kind(tl.load(tables.kind + expert), UNITS)
    selector_at_ptr = tables.selector_at + expert * f
    selector_units_ptr += place * f
    is_missing = tl.load(selector_at_ptr) < 0
    target = scratch_at + place * f * MOST_UNITS
    # Writes where the expert's selector rows are, or will be.
    lanes = tl.arange(0, BLOCK)
    part = program
    while part * BLOCK < f:
        neuron = part * BLOCK + lanes
        live = neuron < f
        there = tl.load(selector_at_ptr + neuron, mask=live, other=0)
        tl.store(selector_units_ptr + neuron, tl.where(is_missing, target + neuron * row_units, there), mask=live)
        part += tl.num_programs(1)
    # Copies them if they are missing: they lie one after another in both memories.
    if is_missing:
        host_words_ptr = host.rows.to(tl.pointer_type(tl.uint32)) + tl.load(host.extent_at + expert) * 4
        arena_words_ptr = tables.arena.to(tl.pointer_type(tl.uint32)) + target.to(tl.int64) * 4
        part = program
        while part * BLOCK < f * row_units * 4:
            at = part * BLOCK + lanes
            mask = at < f * row_units * 4
            tl.store(arena_words_ptr + at, _load_host(host_words_ptr + at, mask), mask=mask)
            part += tl.num_programs(1)
