"""One expert for many tokens, all its rows being in the arena: the twin of `expert.run_expert`.

Two launches a piece of tokens: what each neuron does (0 where it does not run), then the down product. Every value is
made by one program, in one order.
"""

import triton
import triton.language as tl
from torch import Tensor

from moe_pack.runtime.kernels.codes import AFFINE, UNITS, Part, has_scales, load_bias, load_scales, lookup_for
from moe_pack.runtime.kernels.dot_tiles import add_product, dot_exact, load_tile, load_tokens, tile_cols
from moe_pack.runtime.kernels.functions import FUNCTIONS, act, factor
from moe_pack.runtime.kernels.gemm import MAX_TOKENS_IN_TWO, blocks, num_warps
from moe_pack.runtime.kernels.tables import ExpertKind, LayerTables

PIECE_TOKENS = 128  # tokens that go through an expert together: bounds the workspace
_BLOCK_NEURONS = 32
# What differs from one expert to the next, and makes no other kernel: a list of tokens begins anywhere among others.
_PER_EXPERT = ("tokens_ptr", "weights_ptr", "num_tokens", "expert")


def workspace_floats(num_tokens: int, num_rows: int) -> int:
    """Values of the workspace for so many tokens and neurons: what these do for one piece of the tokens."""
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

    Not checked: that all its rows are in the arena, and that its tokens differ.

    Args:    x: float32 [T, d], contiguous.   tokens: int32 [Te].   weights: float32 [Te].   kind: the expert's (the
             host knows it: reading `tables.kind` would wait for the device).   y: float32 [T, d], contiguous.
             workspace: float32, contiguous, `workspace_floats(Te, f)` values or more.
    """
    for start in range(0, tokens.shape[0], PIECE_TOKENS):
        piece = tokens[start : start + PIECE_TOKENS]
        _hidden_of_piece(x, piece, tables, expert, kind, workspace)
        _down_of_piece(workspace, piece, weights[start : start + PIECE_TOKENS], tables, expert, kind, y)


def _hidden_of_piece(x: Tensor, tokens: Tensor, tables: LayerTables, expert: int, kind: ExpertKind, h: Tensor) -> None:
    """Writes h float32 [Te, f], 0 where a neuron does not run."""
    num_tokens, f = tokens.shape[0], kind.num_rows
    gate = kind.gate
    parts = [kind.up.part] if gate is None else [gate.part, kind.up.part]
    most = MAX_TOKENS_IN_TWO // 2 if any(part.bits == 1 for part in parts) else MAX_TOKENS_IN_TWO
    block_tokens, block_rows = blocks(num_tokens, f, most)
    if block_tokens == MAX_TOKENS_IN_TWO:
        block_rows = 64  # what tensor cores of sm_90 take; with 32, registers spill
    _hidden[triton.cdiv(f, block_rows), triton.cdiv(num_tokens, block_tokens)](
        x,
        tokens,
        tables.arena,
        None if gate is None else _places(tables, gate.in_selector),
        _places(tables, kind.up.in_selector),
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
    part: Part = kind.down.part
    num_tokens, cols = tokens.shape[0], tile_cols(part)
    block_tokens, _ = blocks(num_tokens, part.num_cols)
    _down[triton.cdiv(part.num_cols, cols), triton.cdiv(num_tokens, block_tokens)](
        h,
        tokens,
        weights,
        tables.arena,
        _places(tables, kind.down.in_selector),
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


def _places(tables: LayerTables, in_selector: bool) -> Tensor:
    """Where the rows lie that hold a matrix."""
    found = tables.selector_at if in_selector else tables.record_at
    assert found is not None, "a matrix of selector rows needs their table"
    return found


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
    D: tl.constexpr = UP[5]
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
        if UP[6] >= 0:
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
        if UP[6] >= 0:
            up += load_bias(arena_ptr, up_units, live, UP)[:, None]
        if GATE[6] >= 0:
            gate += load_bias(arena_ptr, gate_units, live, GATE)[:, None]
        active, up = act(gate, FUNCTION), factor(up, FUNCTION)
        h = active * up
        a = up if SELECTOR == "up" else active if SELECTOR == "gate" else h
    below = tl.abs(a) < tl.load(thresholds_ptr + expert)
    h = tl.where((a == 0) | below, 0.0, h)  # a NaN is neither: it runs and is seen
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
    D: tl.constexpr = PART[5]
    tile = tl.program_id(0)
    m = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    is_token = m < num_tokens
    sums = tl.zeros([COLS, BLOCK_TOKENS], tl.float32)
    less = tl.zeros([BLOCK_TOKENS], tl.float32)  # what zeros take off every column
    for block in range(tl.cdiv(F, BLOCK_ROWS)):
        r = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        units = tl.load(down_at_ptr + expert * F + r, mask=r < F, other=0).to(tl.int64)
        w = load_tile(arena_ptr, units, r < F, tile, lookup_ptr, PART, COLS, TURNED=True)
        h = load_tokens(h_ptr, m, is_token, block, F, BLOCK_ROWS)
        if has_scales(PART):
            scale, zero = load_scales(arena_ptr, units, (tile * COLS) // PART[2], r < F, PART)
            h *= scale[:, None]
            if PART[0] == AFFINE:
                less += tl.sum(h * zero[:, None], 0)
        sums += dot_exact(w, h)
    sums = sums * UNITS[PART[0]] - less[None, :]
    t = tl.load(tokens_ptr + m, mask=is_token, other=0).to(tl.int64)
    factors = tl.load(weights_ptr + m, mask=is_token, other=0.0)
    cols = tile * COLS + tl.arange(0, COLS)
    places = y_ptr + t[None, :] * D + cols[:, None]
    mask = (cols < D)[:, None] & is_token[None, :]
    if down_bias_ptr is not None:
        sums += tl.load(down_bias_ptr + expert * D + cols, mask=cols < D, other=0.0)[:, None]
    tl.store(places, tl.load(places, mask=mask, other=0.0) + factors[None, :] * sums, mask=mask)
