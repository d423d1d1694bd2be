"""The experts of a token: which neurons run, and their outputs; and one expert for many tokens.

`select` finds which neurons of the experts run: it multiplies selectors, applies the threshold, and lists the running
neurons. `neurons` computes the rest of their products and sums their down rows. It reads a record in one pass, each
byte once. Each of P programs takes an equal share of an expert's running neurons, whatever blocks list them, and writes
a partial sum; `reduce` adds partial sums in a fixed order.

`expert_many` runs one expert for many tokens, with all its rows in the arena; its twin is `run_expert` in
`runtime.model.expert`. A piece of tokens takes two launches: one computes each neuron's output (0 if it does not run),
the other the down product. One program makes each value, in one order.
"""

import triton
import triton.language as tl
from torch import Tensor

from moe_pack.runtime.gpu.kernels.cache import Selection
from moe_pack.runtime.gpu.kernels.elementwise import FUNCTIONS, act, factor
from moe_pack.runtime.gpu.kernels.matmul import MAX_TOKENS_IN_TWO, blocks, num_warps
from moe_pack.runtime.gpu.kernels.products import (
    add_part,
    add_product,
    dot_exact,
    dot_part,
    load_part,
    load_tile,
    load_tokens,
    load_x_part,
    runs,
    store_part,
    tile_cols,
    zero_part,
)
from moe_pack.runtime.gpu.kernels.rows import (
    AFFINE,
    TRELLIS,
    UNITS,
    RowPart,
    dot_tile,
    half_bytes,
    has_scales,
    load_bias,
    load_scales,
    lookup_for,
    sum_tile,
)
from moe_pack.runtime.gpu.kernels.tables import PER_LAYER, SELECT_BLOCK, ExpertKind, LayerTables, StoredPart


def select(x: Tensor, experts: Tensor, tables: LayerTables, out: Selection) -> None:
    """Finds the neurons that run; if no selector is stored, lists all of them and sets `a` to 0.

    Args:    x: float32 [d].   experts: int32 [k]; all their selector rows are in the arena.   out: overwritten.
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
            _launch_select(x, experts, tables, number, kind, out)


def _launch_select(
    x: Tensor, experts: Tensor, tables: LayerTables, number: int, kind: ExpertKind, out: Selection
) -> None:
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


def _part_in_selector(matrix: StoredPart | None) -> RowPart | None:
    return matrix.part if matrix is not None and matrix.in_selector else None


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
                codes = load_part(arena_ptr, units, live, GATE, GATE_NW)
                g = dot_part(arena_ptr, units, live, codes, gate_x, gate_sums, gate_x_high, lookup_ptr, GATE, GATE_NW)
                a = act(g, FUNCTION)
            if UP is not None:
                codes = load_part(arena_ptr, units, live, UP, UP_NW)
                u = dot_part(arena_ptr, units, live, codes, up_x, up_sums, up_x_high, lookup_ptr, UP, UP_NW)
                a = a * factor(u, FUNCTION) if IS_GATED else act(u, FUNCTION)
            tl.store(a_ptr + place * F + row, a, mask=live)
        tl.debug_barrier()  # other threads wrote the activations that are read below
        neuron = block * BLOCK + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + place * F + neuron, mask=neuron < F, other=0.0)
        chosen = runs(a, tl.load(thresholds_ptr + expert)) & (neuron < F)
        before = tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(neurons_ptr + place * F + block * BLOCK + before, neuron, mask=chosen)
        tl.store(counts_ptr + place * tl.num_programs(1) + block, tl.sum(chosen.to(tl.int32)))


def neurons(x: Tensor, experts: Tensor, tables: LayerTables, selection: Selection, partials: Tensor) -> None:
    """Writes partial sums of the running neurons' outputs; the first includes the bias of down, if there is one.

    Args:    x: float32 [d].   experts: int32 [k]; the records of all listed neurons are in the arena.   selection: from
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


def _part_in_record(matrix: StoredPart | None) -> RowPart | None:
    return matrix.part if matrix is not None and not matrix.in_selector else None


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
            # Finds running neurons start + 0, 1, ...: the block that lists each, and its place in the list.
            idx = start + tl.arange(0, R)
            live = idx < last
            is_before = (ends[None, :] <= idx[:, None]).to(tl.int32)  # [R, blocks]
            in_block = idx - tl.sum(is_before * counts[None, :], 1)
            listed = tl.sum(is_before, 1) * BLOCK + in_block
            neuron = tl.load(neurons_ptr + place * F + listed, mask=live, other=0)
            units = tl.load(record_at_ptr + expert * F + neuron, mask=live, other=0).to(tl.int64)
            # All loads are issued before the first is used.
            if GATE is not None:
                gate = load_part(arena_ptr, units, live, GATE, GATE_NW)
            if UP is not None:
                up = load_part(arena_ptr, units, live, UP, UP_NW)
            down = load_part(arena_ptr, units, live, DOWN, NW)
            h = tl.full([R], 1.0, tl.float32)
            if IS_SELECTED:
                h = tl.load(a_ptr + place * F + neuron, mask=live, other=0.0)
            if GATE is not None:
                g = dot_part(arena_ptr, units, live, gate, gate_x, gate_sums, gate_x_high, lookup_ptr, GATE, GATE_NW)
                h *= act(g, FUNCTION)
            if UP is not None:
                u = dot_part(arena_ptr, units, live, up, up_x, up_sums, up_x_high, lookup_ptr, UP, UP_NW)
                h *= factor(u, FUNCTION) if IS_GATED else act(u, FUNCTION)
            if not IS_SELECTED:
                h = tl.where(runs(h, threshold), h, 0.0)
            h = tl.where(live, h, 0.0)
            y, less, y_high = add_part(y, less, y_high, arena_ptr, units, live, down, h, lookup_ptr, DOWN, NW)
            start += R
        partial_ptr = partials_ptr + (place * tl.num_programs(1) + program) * DOWN.num_cols
        store_part(partial_ptr, y, less, y_high, DOWN, NW)
        if down_bias_ptr is not None:
            tl.debug_barrier()  # other threads wrote what is read below
            if program == 0:
                _add_bias(partial_ptr, down_bias_ptr + expert.to(tl.int64) * DOWN.num_cols, DOWN.num_cols)


@triton.jit
def _add_bias(y_ptr, bias_ptr, D: tl.constexpr):
    """Adds a bias to y [D]."""
    for begin in range(0, D, 1024):
        c = begin + tl.arange(0, 1024)
        y = tl.load(y_ptr + c, mask=c < D, other=0.0)
        tl.store(y_ptr + c, y + tl.load(bias_ptr + c, mask=c < D, other=0.0), mask=c < D)


PIECE_TOKENS = 128  # tokens that go through an expert together; they bound the workspace
_BLOCK_NEURONS = 32
# Arguments that differ between experts; Triton must not compile a kernel for each of their values.
_PER_EXPERT = ("tokens_ptr", "weights_ptr", "num_tokens", "expert")


def workspace_floats(num_tokens: int, num_rows: int) -> int:
    """Returns the values of the workspace for so many tokens and neurons: one piece's neuron outputs."""
    return min(num_tokens, PIECE_TOKENS) * num_rows


def expert_many(
    x: Tensor,
    tokens: Tensor,
    weights: Tensor,
    tables: LayerTables,
    expert: int,
    kind: ExpertKind,
    y: Tensor,
    workspace: Tensor,
) -> None:
    """Adds an expert's outputs, times the router's weights, to its tokens' rows of y.

    The caller makes sure that all its rows are in the arena and that tokens are not repeated.

    Args:    x: float32 [T, d], contiguous.   tokens: int32 [Te].   weights: float32 [Te].   kind: the expert's; the
             host gives it, because reading `tables.kind` would wait for the device.   y: float32 [T, d], contiguous.
             workspace: float32, contiguous, `workspace_floats(Te, f)` values or more.
    """
    for start in range(0, tokens.shape[0], PIECE_TOKENS):
        piece = tokens[start : start + PIECE_TOKENS]
        _hidden_of_piece(x, piece, tables, expert, kind, workspace)
        _down_of_piece(workspace, piece, weights[start : start + PIECE_TOKENS], tables, expert, kind, y)


def _hidden_of_piece(x: Tensor, tokens: Tensor, tables: LayerTables, expert: int, kind: ExpertKind, h: Tensor) -> None:
    """Writes h float32 [Te, f], 0 for a neuron that does not run."""
    num_tokens, f = tokens.shape[0], kind.num_rows
    gate = kind.gate
    parts = [kind.up.part] if gate is None else [gate.part, kind.up.part]
    # With codes of 1 bit, and with words of two registers from a trellis's table, 32 tokens spill registers (sm_120).
    is_wide = any(part.bits == 1 or (part.kind == TRELLIS.value and half_bytes(part.bits) == 4) for part in parts)
    most = MAX_TOKENS_IN_TWO // 2 if is_wide else MAX_TOKENS_IN_TWO
    block_tokens, block_rows = blocks(num_tokens, f, most)
    if block_tokens == MAX_TOKENS_IN_TWO:
        block_rows = 64  # as tensor cores of sm_90 take; with 32, registers spill
    _hidden[triton.cdiv(f, block_rows), triton.cdiv(num_tokens, block_tokens)](
        x,
        tokens,
        tables.arena,
        None if gate is None else _row_table(tables, gate.in_selector),
        _row_table(tables, kind.up.in_selector),
        tables.thresholds,
        h,
        lookup_for(x.device, *parts),
        num_tokens,
        expert,
        GATE=None if gate is None else gate.part,
        UP=kind.up.part,
        SELECTOR=kind.selector,
        FUNCTION=FUNCTIONS[kind.function],
        F=f,
        COLS=tile_cols(*parts),
        BLOCK_TOKENS=block_tokens,
        BLOCK_ROWS=block_rows,
        num_warps=num_warps(block_tokens, block_rows),
        enable_fp_fusion=True,
    )


def _down_of_piece(
    h: Tensor, tokens: Tensor, weights: Tensor, tables: LayerTables, expert: int, kind: ExpertKind, y: Tensor
) -> None:
    """Adds weights * (h @ down + bias) to the tokens' rows of y."""
    part: RowPart = kind.down.part
    num_tokens, cols = tokens.shape[0], tile_cols(part)
    block_tokens, _ = blocks(num_tokens, part.num_cols)
    _down[triton.cdiv(part.num_cols, cols), triton.cdiv(num_tokens, block_tokens)](
        h,
        tokens,
        weights,
        tables.arena,
        _row_table(tables, kind.down.in_selector),
        tables.down_bias,
        y,
        lookup_for(y.device, part),
        num_tokens,
        expert,
        PART=part,
        F=kind.num_rows,
        COLS=cols,
        BLOCK_TOKENS=block_tokens,
        BLOCK_ROWS=_BLOCK_NEURONS,
        num_warps=num_warps(block_tokens, cols),
        enable_fp_fusion=True,
    )


def _row_table(tables: LayerTables, in_selector: bool) -> Tensor:
    """Returns the table of the rows that contain a matrix."""
    row_at = tables.selector_at if in_selector else tables.record_at
    assert row_at is not None, "a matrix of selector rows needs their table"
    return row_at


@triton.jit(do_not_specialize=_PER_EXPERT)
def _hidden(
    x_ptr,
    tokens_ptr,
    arena_ptr,
    gate_at_ptr,
    up_at_ptr,
    thresholds_ptr,
    h_ptr,
    lookup_ptr,
    num_tokens,
    expert,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    SELECTOR: tl.constexpr,
    FUNCTION: tl.constexpr,
    F: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    D: tl.constexpr = UP.num_cols
    r = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    m = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    live, is_token = r < F, m < num_tokens
    t = tl.load(tokens_ptr + m, mask=is_token, other=0)
    up_units = tl.load(up_at_ptr + expert * F + r, mask=live, other=0).to(tl.int64)
    up = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
    if GATE is None:
        for tile in range(tl.cdiv(D, COLS)):
            x = load_tokens(x_ptr, t, is_token, tile, D, COLS)
            up = add_product(up, arena_ptr, up_units, live, tile, x, lookup_ptr, UP, COLS)
        if UP.bias >= 0:
            up += load_bias(arena_ptr, up_units, live, UP)[:, None]
        h = act(up, FUNCTION)
        a = h
    else:
        gate_units = tl.load(gate_at_ptr + expert * F + r, mask=live, other=0).to(tl.int64)
        gate = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
        for tile in range(tl.cdiv(D, COLS)):
            x = load_tokens(x_ptr, t, is_token, tile, D, COLS)
            up = add_product(up, arena_ptr, up_units, live, tile, x, lookup_ptr, UP, COLS)
            gate = add_product(gate, arena_ptr, gate_units, live, tile, x, lookup_ptr, GATE, COLS)
        if UP.bias >= 0:
            up += load_bias(arena_ptr, up_units, live, UP)[:, None]
        if GATE.bias >= 0:
            gate += load_bias(arena_ptr, gate_units, live, GATE)[:, None]
        active, up = act(gate, FUNCTION), factor(up, FUNCTION)
        h = active * up
        a = up if SELECTOR == "up" else active if SELECTOR == "gate" else h
    below = tl.abs(a) < tl.load(thresholds_ptr + expert)
    h = tl.where((a == 0) | below, 0.0, h)  # a NaN is neither, so its neuron runs and the NaN reaches the output
    tl.store(h_ptr + m[None, :] * F + r[:, None], h, mask=live[:, None] & is_token[None, :])


@triton.jit(do_not_specialize=_PER_EXPERT)
def _down(
    h_ptr,
    tokens_ptr,
    weights_ptr,
    arena_ptr,
    down_at_ptr,
    down_bias_ptr,
    y_ptr,
    lookup_ptr,
    num_tokens,
    expert,
    PART: tl.constexpr,
    F: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    D: tl.constexpr = PART.num_cols
    tile = tl.program_id(0)
    m = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    is_token = m < num_tokens
    sums = tl.zeros([COLS, BLOCK_TOKENS], tl.float32)
    less = tl.zeros([BLOCK_TOKENS], tl.float32)  # what the zeros subtract from every column
    for block in range(tl.cdiv(F, BLOCK_ROWS)):
        r = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        units = tl.load(down_at_ptr + expert * F + r, mask=r < F, other=0).to(tl.int64)
        w = load_tile(arena_ptr, units, r < F, tile, lookup_ptr, PART, COLS, TRANSPOSED=True)
        h = load_tokens(h_ptr, m, is_token, block, F, BLOCK_ROWS)
        if has_scales(PART):
            scale, zero = load_scales(arena_ptr, units, (tile * COLS) // PART.group, r < F, PART)
            h *= scale[:, None]
            if PART.kind == AFFINE:
                less += tl.sum(h * zero[:, None], 0)
        sums += dot_exact(w, h)
    sums = sums * UNITS[PART.kind] - less[None, :]
    t = tl.load(tokens_ptr + m, mask=is_token, other=0).to(tl.int64)
    factors = tl.load(weights_ptr + m, mask=is_token, other=0.0)
    cols = tile * COLS + tl.arange(0, COLS)
    places = y_ptr + t[None, :] * D + cols[:, None]
    mask = (cols < D)[:, None] & is_token[None, :]
    if down_bias_ptr is not None:
        sums += tl.load(down_bias_ptr + expert * D + cols, mask=cols < D, other=0.0)[:, None]
    tl.store(places, tl.load(places, mask=mask, other=0.0) + factors[None, :] * sums, mask=mask)
