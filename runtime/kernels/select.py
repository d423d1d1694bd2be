"""Which neurons of a token's experts run: selector products, threshold, and a list of those that do."""

import triton
import triton.language as tl
from torch import Tensor

from moe_pack.runtime.kernels.codes import lookup_for
from moe_pack.runtime.kernels.functions import FUNCTIONS, act, factor
from moe_pack.runtime.kernels.products import dot_part, load_part, load_x_part, runs
from moe_pack.runtime.kernels.tables import PER_LAYER, SELECT_BLOCK, ExpertKind, Held, LayerTables, Selection
from moe_pack.runtime.kernels.tiles import dot_tile


def select(x: Tensor, experts: Tensor, tables: LayerTables, out: Selection) -> None:
    """Finds the neurons that run; where no selector is stored, all are listed and `a` is 0.

    Args:    x: float32 [d].   experts: int32 [k]; all their selector rows are there.   out: overwritten.
    """
    for number, kind in enumerate(tables.kinds):
        if kind.selector == "none":
            _list_all[out.counts.shape](
                experts,
                tables.kind,
                out.a,
                out.neurons,
                out.counts,
                number,
                F=kind.num_rows,
                BLOCK=SELECT_BLOCK,
                num_warps=1,
                enable_fp_fusion=True,
            )
        else:
            _launch(x, experts, tables, number, kind, out)


def _launch(x: Tensor, experts: Tensor, tables: LayerTables, number: int, kind: ExpertKind, out: Selection) -> None:
    gate, up = _part_in_selector(kind.gate), _part_in_selector(kind.up)
    tile = dot_tile(tuple(part for part in (gate, up) if part is not None))
    assert tables.selector_at is not None, "a selector is stored"
    _select[out.counts.shape](
        x,
        experts,
        tables.arena,
        tables.selector_at,
        tables.kind,
        tables.thresholds,
        out.a,
        out.neurons,
        out.counts,
        lookup_for(x.device, gate, up),
        number,
        F=kind.num_rows,
        BLOCK=SELECT_BLOCK,
        GATE=gate,
        UP=up,
        GATE_NW=0 if gate is None else gate.num_words,
        UP_NW=0 if up is None else up.num_words,
        IS_GATED=kind.gate is not None,
        FUNCTION=FUNCTIONS[kind.function],
        R=tile.rows,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
    )


def _part_in_selector(held: Held | None):
    return held.part if held is not None and held.in_selector else None


@triton.jit(do_not_specialize=PER_LAYER)
def _list_all(
    experts_ptr,
    kind_ptr,
    a_ptr,
    neurons_ptr,
    counts_ptr,
    kind_number,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place, block = tl.program_id(0), tl.program_id(1)
    if tl.load(kind_ptr + tl.load(experts_ptr + place)) == kind_number:
        neuron = block * BLOCK + tl.arange(0, BLOCK)
        live = neuron < F
        tl.store(a_ptr + place * F + neuron, tl.zeros([BLOCK], tl.float32), mask=live)
        tl.store(neurons_ptr + place * F + neuron, neuron, mask=live)
        tl.store(counts_ptr + place * tl.num_programs(1) + block, tl.sum(live.to(tl.int32)))


@triton.jit(do_not_specialize=PER_LAYER)
def _select(
    x_ptr,
    experts_ptr,
    arena_ptr,
    selector_at_ptr,
    kind_ptr,
    thresholds_ptr,
    a_ptr,
    neurons_ptr,
    counts_ptr,
    lookup_ptr,
    kind_number,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    GATE_NW: tl.constexpr,
    UP_NW: tl.constexpr,
    IS_GATED: tl.constexpr,
    FUNCTION: tl.constexpr,
    R: tl.constexpr,
):
    place, block = tl.program_id(0), tl.program_id(1)
    expert = tl.load(experts_ptr + place)
    if tl.load(kind_ptr + expert) == kind_number:
        if GATE is not None:
            gate_x, gate_sums, gate_x_high = load_x_part(x_ptr, GATE, GATE_NW)
        if UP is not None:
            up_x, up_sums, up_x_high = load_x_part(x_ptr, UP, UP_NW)
        for start in range(0, BLOCK, R):
            row = block * BLOCK + start + tl.arange(0, R)
            live = row < F
            units = tl.load(selector_at_ptr + expert * F + row, mask=live, other=0).to(tl.int64)
            a = tl.full([R], 1.0, tl.float32)
            if GATE is not None:
                words, high = load_part(arena_ptr, units, live, GATE, GATE_NW)
                g = dot_part(
                    arena_ptr, units, live, words, high, gate_x, gate_sums, gate_x_high, lookup_ptr, GATE, GATE_NW
                )
                a = act(g, FUNCTION)
            if UP is not None:
                words, high = load_part(arena_ptr, units, live, UP, UP_NW)
                u = dot_part(arena_ptr, units, live, words, high, up_x, up_sums, up_x_high, lookup_ptr, UP, UP_NW)
                a = a * factor(u, FUNCTION) if IS_GATED else act(u, FUNCTION)
            tl.store(a_ptr + place * F + row, a, mask=live)
        tl.debug_barrier()  # the block's activations were written by other threads than read them
        neuron = block * BLOCK + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + place * F + neuron, mask=neuron < F, other=0.0)
        chosen = runs(a, tl.load(thresholds_ptr + expert)) & (neuron < F)
        before = tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(neurons_ptr + place * F + block * BLOCK + before, neuron, mask=chosen)
        tl.store(counts_ptr + place * tl.num_programs(1) + block, tl.sum(chosen.to(tl.int32)))
