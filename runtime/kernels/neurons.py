"""What a token's running neurons add to its output: the rest of their products, and their down rows summed up.

A record is read in one pass, each byte once. Each of P programs takes an equal share of an expert's running neurons,
whatever blocks they are listed in, and writes a partial sum; `reduce` adds them in a fixed order.
"""

import triton
import triton.language as tl
from torch import Tensor

from moe_pack.runtime.kernels.codes import Part, lookup_for
from moe_pack.runtime.kernels.functions import FUNCTIONS, act, factor
from moe_pack.runtime.kernels.products import (
    add_part,
    dot_part,
    load_part,
    load_x_part,
    runs,
    store_part,
    zero_part,
)
from moe_pack.runtime.kernels.tables import PER_LAYER, SELECT_BLOCK, Held, LayerTables, Selection
from moe_pack.runtime.kernels.tiles import sum_tile


def neurons(x: Tensor, experts: Tensor, tables: LayerTables, selection: Selection, partials: Tensor) -> None:
    """Partial sums of the running neurons' outputs; the bias of down, where there is one, is in the first.

    Args:    x: float32 [d].   experts: int32 [k]; the records of all neurons listed are there.   selection: from
             `select`.   partials: float32 [k, P, d], overwritten.
    """
    k, num_partials, _ = partials.shape
    for number, kind in enumerate(tables.kinds):
        gate, up = _part_in_record(kind.gate), _part_in_record(kind.up)
        down = kind.down.part
        tile = sum_tile(tuple(part for part in (gate, up, down) if part is not None))
        _neurons[k, num_partials](
            x,
            experts,
            tables.arena,
            tables.record_at,
            tables.kind,
            tables.thresholds,
            selection.a,
            selection.neurons,
            selection.counts,
            tables.down_bias,
            partials,
            lookup_for(x.device, gate, up, down),
            number,
            F=kind.num_rows,
            BLOCK=SELECT_BLOCK,
            GATE=gate,
            UP=up,
            DOWN=down,
            GATE_NW=0 if gate is None else gate.num_words,
            UP_NW=0 if up is None else up.num_words,
            NW=down.num_words,
            NUM_BLOCKS=selection.counts.shape[1],
            BLOCKS_POW2=triton.next_power_of_2(selection.counts.shape[1]),
            IS_GATED=kind.gate is not None,
            FUNCTION=FUNCTIONS[kind.function],
            IS_SELECTED=kind.selector != "none",
            R=tile.rows,
            num_warps=tile.num_warps,
            enable_fp_fusion=True,
        )


def _part_in_record(held: Held | None) -> Part | None:
    return held.part if held is not None and not held.in_selector else None


@triton.jit(do_not_specialize=PER_LAYER)
def _neurons(
    x_ptr,
    experts_ptr,
    arena_ptr,
    record_at_ptr,
    kind_ptr,
    thresholds_ptr,
    a_ptr,
    neurons_ptr,
    counts_ptr,
    down_bias_ptr,
    partials_ptr,
    lookup_ptr,
    kind_number,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    DOWN: tl.constexpr,
    GATE_NW: tl.constexpr,
    UP_NW: tl.constexpr,
    NW: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS_POW2: tl.constexpr,
    IS_GATED: tl.constexpr,
    FUNCTION: tl.constexpr,
    IS_SELECTED: tl.constexpr,
    R: tl.constexpr,
):
    place, program = tl.program_id(0), tl.program_id(1)
    expert = tl.load(experts_ptr + place)
    if tl.load(kind_ptr + expert) == kind_number:
        threshold = tl.load(thresholds_ptr + expert)
        if GATE is not None:
            gate_x, gate_sums, gate_x_high = load_x_part(x_ptr, GATE, GATE_NW)
        if UP is not None:
            up_x, up_sums, up_x_high = load_x_part(x_ptr, UP, UP_NW)
        y, less, y_high = zero_part(DOWN, NW)

        block = tl.arange(0, BLOCKS_POW2)
        counts = tl.load(counts_ptr + place * NUM_BLOCKS + block, mask=block < NUM_BLOCKS, other=0)
        ends = tl.cumsum(counts, 0)
        num_running = tl.sum(counts)
        start = num_running * program // tl.num_programs(1)
        last = num_running * (program + 1) // tl.num_programs(1)
        while start < last:
            # The running neurons start + 0, 1, ...: in which block's list each stands, and where in it.
            idx = start + tl.arange(0, R)
            live = idx < last
            is_before = (ends[None, :] <= idx[:, None]).to(tl.int32)  # [R, blocks]
            in_block = idx - tl.sum(is_before * counts[None, :], 1)
            listed = tl.sum(is_before, 1) * BLOCK + in_block
            neuron = tl.load(neurons_ptr + place * F + listed, mask=live, other=0)
            units = tl.load(record_at_ptr + expert * F + neuron, mask=live, other=0).to(tl.int64)
            # All that is needed is asked for before anything is waited for.
            if GATE is not None:
                gate, gate_high = load_part(arena_ptr, units, live, GATE, GATE_NW)
            if UP is not None:
                up, up_high = load_part(arena_ptr, units, live, UP, UP_NW)
            down, down_high = load_part(arena_ptr, units, live, DOWN, NW)
            h = tl.full([R], 1.0, tl.float32)
            if IS_SELECTED:
                h = tl.load(a_ptr + place * F + neuron, mask=live, other=0.0)
            if GATE is not None:
                g = dot_part(
                    arena_ptr, units, live, gate, gate_high, gate_x, gate_sums, gate_x_high, lookup_ptr, GATE, GATE_NW
                )
                h *= act(g, FUNCTION)
            if UP is not None:
                u = dot_part(arena_ptr, units, live, up, up_high, up_x, up_sums, up_x_high, lookup_ptr, UP, UP_NW)
                h *= factor(u, FUNCTION) if IS_GATED else act(u, FUNCTION)
            if not IS_SELECTED:
                h = tl.where(runs(h, threshold), h, 0.0)
            h = tl.where(live, h, 0.0)
            y, less, y_high = add_part(
                y, less, y_high, arena_ptr, units, live, down, down_high, h, lookup_ptr, DOWN, NW
            )
            start += R
        partial_ptr = partials_ptr + (place * tl.num_programs(1) + program) * DOWN[5]
        store_part(partial_ptr, y, less, y_high, DOWN, NW)
        if down_bias_ptr is not None:
            tl.debug_barrier()  # what is read was written by other threads
            if program == 0:
                _add_bias(partial_ptr, down_bias_ptr + expert.to(tl.int64) * DOWN[5], DOWN[5])


@triton.jit
def _add_bias(y_ptr, bias_ptr, D: tl.constexpr):
    """Adds a bias to y [D]."""
    for begin in range(0, D, 1024):
        c = begin + tl.arange(0, 1024)
        y = tl.load(y_ptr + c, mask=c < D, other=0.0)
        tl.store(y_ptr + c, y + tl.load(bias_ptr + c, mask=c < D, other=0.0), mask=c < D)
