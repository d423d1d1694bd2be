"""Products with a matrix of the dense part in its stored bytes: for many tokens, for one token, and one row of it.

The twin of `gemm` and `gemv` is `linear` in `runtime.model.matrix`; `gather_row` reads one row, as an embedding does.
`normed_gemv` normalizes the token before several products, and `gated` makes the neurons of a dense expert, each in one
launch. A program of these multiplies some blocks of rows, and loads the codes of a block while it multiplies the one
before.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_pack.formats import NeuronFunction
from moe_pack.runtime.gpu.kernels.elementwise import FUNCTIONS, Norm, act, factor
from moe_pack.runtime.gpu.kernels.products import (
    add_part,
    add_product,
    dot_part,
    load_normed_part,
    load_part,
    load_tokens,
    load_x_part,
    store_part,
    tile_cols,
    zero_part,
)
from moe_pack.runtime.gpu.kernels.rows import F32, TRELLIS, RowPart, dot_tile, lookup_for, sum_tile

MAX_TOKENS = 64  # that a program takes
# With two kinds of weights or of sums, codes of 1 bit, or a trellis: with more, registers spill (sm_80).
MAX_TOKENS_IN_TWO = 32
_MANY_PROGRAMS = 256  # with fewer, smaller blocks of rows keep more of the GPU busy


def gemm(x: Tensor, rows: Tensor, part: RowPart, row_units: int, out: Tensor, *, bias: Tensor | None = None) -> None:
    """Writes `x @ W.T + bias` to `out`; W is decoded in registers only.

    If x is float32, products are as exact as float32's. If x is bfloat16, W is rounded to bfloat16 (codes are exact in
    it), and products are summed in float32.

    Args:    x: float32 or bfloat16 [T, d], contiguous.   rows: u8 [n, row bytes], or bf16, f16 or float32 [n, d];
             contiguous, from a multiple of 16 bytes on.   part: `part_of` or `stored_part`.   row_units: bytes of a row
             by 16.   out: float32 [T, n], contiguous.   bias: float32 [n].
    """
    num_tokens, num_rows = out.shape
    in_two = part.bits == 1 or part.kind in (F32.value, TRELLIS.value)
    block_tokens, block_rows = _blocks(num_tokens, num_rows, MAX_TOKENS_IN_TWO if in_two else MAX_TOKENS)
    _gemm[triton.cdiv(num_rows, block_rows), triton.cdiv(num_tokens, block_tokens)](
        x,
        rows.view(torch.uint8),
        bias,
        out,
        lookup_for(x.device, part),
        num_tokens,
        num_rows,
        row_units,
        PART=part,
        COLS=tile_cols(part),
        BLOCK_TOKENS=block_tokens,
        BLOCK_ROWS=block_rows,
        num_warps=num_warps(block_tokens, block_rows),
        enable_fp_fusion=True,
    )


def _blocks(num_tokens: int, num_rows: int, max_tokens: int) -> tuple[int, int]:
    """Returns how many of all tokens and of all rows a program takes."""
    tokens = min(max_tokens, max(16, triton.next_power_of_2(num_tokens)))
    programs = triton.cdiv(num_tokens, tokens) * triton.cdiv(num_rows, 64)
    return tokens, 64 if programs >= _MANY_PROGRAMS else 32


def num_warps(block_tokens: int, block_rows: int) -> int:
    """Returns the warps of a program: so many that its sums stay in registers."""
    return 8 if block_tokens * block_rows >= 1024 else 4


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _gemm(
    x_ptr,
    rows_ptr,
    bias_ptr,
    out_ptr,
    lookup_ptr,
    num_tokens,
    num_rows,
    row_units,
    PART: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    D: tl.constexpr = PART.num_cols
    r = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    t = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    live, is_token = r < num_rows, t < num_tokens
    units = r.to(tl.int64) * row_units
    # Rows are the larger dimension of a tensor core's product, so that a few tokens fill it too.
    sums = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
    for tile in range(tl.cdiv(D, COLS)):
        x = load_tokens(x_ptr, t, is_token, tile, D, COLS)
        sums = add_product(sums, rows_ptr, units, live, tile, x, lookup_ptr, PART, COLS)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + r, mask=live, other=0.0)[:, None]
    places = t.to(tl.int64)[None, :] * num_rows + r[:, None]
    tl.store(out_ptr + places, sums, mask=live[:, None] & is_token[None, :])


FEW_PROGRAMS = 256  # about two for each multiprocessor of a large GPU; with more rows, programs take more blocks
MOST_BLOCKS = 8  # of rows that a program multiplies one after the other, so that it reads x once for all


class StoredRows(NamedTuple):
    """A matrix's rows as they are stored, with their part.

    `rows`: u8 [n, row bytes], or bf16, f16 or float32 [n, d]; contiguous, from a multiple of 16 bytes on, a row a
    multiple of 16 bytes.   `part`: `part_of` or `stored_part`.
    """

    rows: Tensor
    part: RowPart

    @property
    def raw(self) -> Tensor:
        """The rows' bytes: u8 [n, row bytes]."""
        return self.rows.view(torch.uint8)

    @property
    def row_units(self) -> int:
        """The bytes of a row, divided by 16."""
        row_bytes = self.rows.shape[1] * self.rows.element_size()
        assert self.rows.is_contiguous() and row_bytes % 16 == 0, f"rows of {row_bytes} bytes, not a multiple of 16"
        return row_bytes // 16


class Product(NamedTuple):
    """A matrix that multiplies a vector: `out = matrix @ x + bias`.

    `matrix`: [n, d].   `out`: float32 [n], overwritten.   `bias`: float32 [n].
    """

    matrix: StoredRows
    out: Tensor
    bias: Tensor | None = None


def gemv(
    x: Tensor,
    matrix: StoredRows,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """Writes a matrix times a vector: `out = residual + scale * (matrix @ x + bias)`.

    Args:    x: float32 [d].   matrix: [n, d].   out: float32 [n]; may be `residual`.   bias, residual: float32 [n].
    """
    _launch_gemv(x, None, [Product(matrix, out, bias)], residual, scale)


_AT_ONCE = 3  # matrices of one launch: queries, keys and values


def normed_gemv(x: Tensor, norm: Norm, products: Sequence[Product]) -> None:
    """Writes matrices times a vector that is normalized first; one launch for up to three matrices of one format.

    Each program normalizes x for itself: x is read from the cache, and a launch is saved.
    Args:    x: float32 [d], which no `out` may be.   products: of matrices [n, d], each with its own n.
    """
    alike: dict[object, list[Product]] = {}
    for product in products:
        alike.setdefault((product.matrix.part, product.bias is None), []).append(product)
    for group in alike.values():
        for first in range(0, len(group), _AT_ONCE):
            _launch_gemv(x, norm, group[first : first + _AT_ONCE], None, 1.0)


def _launch_gemv(
    x: Tensor, norm: Norm | None, products: Sequence[Product], residual: Tensor | None, scale: float
) -> None:
    part, tile = products[0].matrix.part, dot_tile((products[0].matrix.part,))
    rows, outs, biases = zip(*((matrix.raw, out, bias) for matrix, out, bias in products), strict=True)
    assert norm is None or part.bias < 0, "a norm's factor multiplies the products, and no bias"
    last, nums = len(products) - 1, [len(out) for out in outs]
    num_blocks = blocks_of_program(sum(nums), tile.rows)
    programs = sum(triton.cdiv(n, tile.rows * num_blocks) for n in nums)
    _gemv[(programs,)](
        x,
        None if norm is None else norm.weight,
        None if norm is None else norm.bias,
        rows[0],
        rows[min(1, last)],
        rows[last],
        biases[0],
        biases[min(1, last)],
        biases[last],
        outs[0],
        outs[min(1, last)],
        outs[last],
        residual,
        lookup_for(x.device, part),
        nums[0],
        nums[min(1, last)],
        nums[last],
        products[0].matrix.row_units,
        scale,
        0.0 if norm is None else norm.eps,
        PART=part,
        NW=part.num_words,
        R=tile.rows,
        BLOCKS=num_blocks,
        COUNT=len(products),
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
    )


def blocks_of_program(num_rows: int, block_rows: int) -> int:
    """Returns how many blocks of rows a program multiplies: several where there are programs enough without."""
    return max(1, min(MOST_BLOCKS, num_rows // (block_rows * FEW_PROGRAMS)))


def gated(
    x: Tensor,
    gate: StoredRows | None,
    up: StoredRows,
    function: NeuronFunction,
    out: Tensor,
    *,
    norm: Norm | None = None,
    weight: Tensor | None = None,
) -> None:
    """Writes the neurons of a dense expert: `weight * act(gate @ x) * factor(up @ x)`, or act(up @ x) without a gate.

    Args:    x: float32 [d], which is normalized first if there is a norm.   gate, up: [f, d].   out: float32 [f].
             weight: float32 [1], 1 if it is None.
    """
    parts = (up.part,) if gate is None else (gate.part, up.part)
    tile, f, lookup = dot_tile(parts), len(out), lookup_for(x.device, *parts)
    assert norm is None or max(part.bias for part in parts) < 0, "a norm's factor multiplies the products, and no bias"
    # Both matrices' codes are loaded at once: with as many rows of a trellis or of two planes, registers spill.
    has_much = lookup is not None or any(part.num_planes > 1 for part in parts)
    block_rows = max(1, tile.rows // len(parts)) if has_much else tile.rows
    num_blocks = blocks_of_program(f, block_rows)
    _gated[(triton.cdiv(f, block_rows * num_blocks),)](
        x,
        None if norm is None else norm.weight,
        None if norm is None else norm.bias,
        None if gate is None else gate.raw,
        up.raw,
        weight,
        out,
        lookup,
        f,
        0 if gate is None else gate.row_units,
        up.row_units,
        0.0 if norm is None else norm.eps,
        GATE=None if gate is None else gate.part,
        UP=up.part,
        GATE_NW=0 if gate is None else gate.part.num_words,
        UP_NW=up.part.num_words,
        FUNCTION=FUNCTIONS[function],
        R=block_rows,
        BLOCKS=num_blocks,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
    )


def gather_row(matrix: StoredRows, row_id: Tensor, out: Tensor, *, scale: float = 1.0) -> None:
    """Writes one row of a matrix, times `scale`, to `out`: the embedding of a token.

    Args:    row_id: int32 [1].   out: float32 [d].
    """
    part = matrix.part
    tile = sum_tile((part,))
    _gather_row[(1,)](
        matrix.raw,
        row_id,
        out,
        lookup_for(out.device, part),
        matrix.row_units,
        scale,
        PART=part,
        NW=part.num_words,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
    )


@triton.constexpr_function
def loads_ahead(part: RowPart) -> bool:
    """Returns whether codes are loaded while those before are multiplied: a trellis takes too many registers."""
    part = RowPart(*part)
    return bool(part.kind != TRELLIS.value)


@triton.jit
def load_input(x_ptr, norm_weight_ptr, norm_bias_ptr, eps, PART: tl.constexpr, NW: tl.constexpr):
    """Loads x as `dot_part` takes it, normalized if there is a norm's weight, and the factor for its products."""
    if norm_weight_ptr is not None:
        x, x_sums, x_high, factor = load_normed_part(x_ptr, norm_weight_ptr, norm_bias_ptr, eps, PART, NW)
    else:
        x, x_sums, x_high = load_x_part(x_ptr, PART, NW)
        factor = 1.0
    return x, x_sums, x_high, factor


@triton.jit(do_not_specialize=["n", "n_1", "n_2"])
def _gemv(
    x_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    rows_ptr,
    rows_1_ptr,
    rows_2_ptr,
    bias_ptr,
    bias_1_ptr,
    bias_2_ptr,
    out_ptr,
    out_1_ptr,
    out_2_ptr,
    residual_ptr,
    lookup_ptr,
    n,
    n_1,
    n_2,
    row_units,
    scale,
    eps,
    PART: tl.constexpr,
    NW: tl.constexpr,
    R: tl.constexpr,
    BLOCKS: tl.constexpr,
    COUNT: tl.constexpr,
):
    program = tl.program_id(0)
    if COUNT > 1:
        begin_1 = tl.cdiv(n, R * BLOCKS)
        begin_2 = begin_1 + tl.cdiv(n_1, R * BLOCKS)
        is_1 = program >= begin_1
        rows_ptr, out_ptr = tl.where(is_1, rows_1_ptr, rows_ptr), tl.where(is_1, out_1_ptr, out_ptr)
        if bias_ptr is not None:
            bias_ptr = tl.where(is_1, bias_1_ptr, bias_ptr)
        n, begin = tl.where(is_1, n_1, n), tl.where(is_1, begin_1, 0)
        if COUNT > 2:
            is_2 = program >= begin_2
            rows_ptr, out_ptr = tl.where(is_2, rows_2_ptr, rows_ptr), tl.where(is_2, out_2_ptr, out_ptr)
            if bias_ptr is not None:
                bias_ptr = tl.where(is_2, bias_2_ptr, bias_ptr)
            n, begin = tl.where(is_2, n_2, n), tl.where(is_2, begin_2, begin)
        program -= begin
    row = program * (BLOCKS * R) + tl.arange(0, R)
    live = row < n
    if loads_ahead(PART):
        codes = load_part(rows_ptr, row.to(tl.int64) * row_units, live, PART, NW)
    x, x_sums, x_high, x_factor = load_input(x_ptr, norm_weight_ptr, norm_bias_ptr, eps, PART, NW)
    for block in range(BLOCKS):
        at, is_row, units = row, live, row.to(tl.int64) * row_units
        row += R
        live = (row < n) & (block + 1 < BLOCKS)
        if loads_ahead(PART):
            current = codes
            codes = load_part(rows_ptr, row.to(tl.int64) * row_units, live, PART, NW)
        else:
            current = load_part(rows_ptr, units, is_row, PART, NW)
        total = dot_part(rows_ptr, units, is_row, current, x, x_sums, x_high, lookup_ptr, PART, NW)
        if norm_weight_ptr is not None:
            total *= x_factor
        if bias_ptr is not None:
            total += tl.load(bias_ptr + at, mask=is_row, other=0.0)
        total *= scale
        if residual_ptr is not None:
            total += tl.load(residual_ptr + at, mask=is_row, other=0.0)
        tl.store(out_ptr + at, total, mask=is_row)


@triton.jit(do_not_specialize=["f"])
def _gated(
    x_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    gate_ptr,
    up_ptr,
    weight_ptr,
    out_ptr,
    lookup_ptr,
    f,
    gate_units,
    up_units,
    eps,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    GATE_NW: tl.constexpr,
    UP_NW: tl.constexpr,
    FUNCTION: tl.constexpr,
    R: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0) * (BLOCKS * R) + tl.arange(0, R)
    live = row < f
    LOADS_AHEAD: tl.constexpr = loads_ahead(UP) and (GATE is None or loads_ahead(GATE))
    if LOADS_AHEAD:
        up_codes = load_part(up_ptr, row.to(tl.int64) * up_units, live, UP, UP_NW)
        if GATE is not None:
            gate_codes = load_part(gate_ptr, row.to(tl.int64) * gate_units, live, GATE, GATE_NW)
    x, x_sums, x_high, x_factor = load_input(x_ptr, norm_weight_ptr, norm_bias_ptr, eps, UP, UP_NW)
    if GATE is not None and GATE != UP:
        gate_x, gate_sums, gate_high, _ = load_input(x_ptr, norm_weight_ptr, norm_bias_ptr, eps, GATE, GATE_NW)
    for block in range(BLOCKS):
        at, is_row = row, live
        row += R
        live = (row < f) & (block + 1 < BLOCKS)
        units = at.to(tl.int64) * up_units
        if LOADS_AHEAD:
            up_now = up_codes
            up_codes = load_part(up_ptr, row.to(tl.int64) * up_units, live, UP, UP_NW)
            if GATE is not None:
                gate_now = gate_codes
                gate_codes = load_part(gate_ptr, row.to(tl.int64) * gate_units, live, GATE, GATE_NW)
        else:
            up_now = load_part(up_ptr, units, is_row, UP, UP_NW)
        u = dot_part(up_ptr, units, is_row, up_now, x, x_sums, x_high, lookup_ptr, UP, UP_NW)
        if norm_weight_ptr is not None:
            u *= x_factor
        if GATE is None:
            h = act(u, FUNCTION)
        else:
            units = at.to(tl.int64) * gate_units
            if not LOADS_AHEAD:
                gate_now = load_part(gate_ptr, units, is_row, GATE, GATE_NW)
            if GATE == UP:
                g = dot_part(gate_ptr, units, is_row, gate_now, x, x_sums, x_high, lookup_ptr, GATE, GATE_NW)
            else:
                g = dot_part(gate_ptr, units, is_row, gate_now, gate_x, gate_sums, gate_high, lookup_ptr, GATE, GATE_NW)
            if norm_weight_ptr is not None:
                g *= x_factor
            h = act(g, FUNCTION) * factor(u, FUNCTION)
        if weight_ptr is not None:
            h *= tl.load(weight_ptr)
        tl.store(out_ptr + at, h, mask=is_row)


@triton.jit
def _gather_row(rows_ptr, id_ptr, out_ptr, lookup_ptr, row_units, scale, PART: tl.constexpr, NW: tl.constexpr):
    units = (tl.load(id_ptr) + tl.zeros([1], tl.int64)) * row_units
    live = units >= 0
    factor = tl.zeros([1], tl.float32) + scale
    codes = load_part(rows_ptr, units, live, PART, NW)
    y, less, y_high = zero_part(PART, NW)
    y, less, y_high = add_part(y, less, y_high, rows_ptr, units, live, codes, factor, lookup_ptr, PART, NW)
    store_part(out_ptr, y, less, y_high, PART, NW)
