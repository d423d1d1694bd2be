"""Products with a matrix of the dense part in its stored bytes: for many tokens, for one token, and one row of it.

The twin of `gemm` and `gemv` is `linear` in `runtime.model.matrix`; `gather_row` reads one row, as an embedding does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_pack.runtime.gpu.kernels.products import (
    add_part,
    add_product,
    dot_part,
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
    block_tokens, block_rows = blocks(num_tokens, num_rows, MAX_TOKENS_IN_TWO if in_two else MAX_TOKENS)
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


def blocks(num_tokens: int, num_rows: int, max_tokens: int = MAX_TOKENS) -> tuple[int, int]:
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


MANY_PROGRAMS = 1024  # with more, a program takes several blocks of rows and reads x once for all


def gemv(
    x: Tensor,
    rows: Tensor,
    part: RowPart,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """Writes a matrix times a vector: `out = residual + scale * (rows @ x + bias)`.

    Args:    x: float32 [d].   rows: u8 [n, row bytes], or bf16, f16 or float32 [n, d]; contiguous, from a multiple of
             16 bytes on, a row a multiple of 16 bytes.   part: `part_of` or `stored_part`.   out: float32 [n]; may be
             `residual`.   bias, residual: float32 [n].
    """
    n, row_units = rows.shape[0], _row_units(rows)
    tile = dot_tile((part,))
    steps = max(1, min(8, n // (tile.rows * MANY_PROGRAMS)))
    _gemv[(triton.cdiv(n, tile.rows * steps),)](
        x,
        _bytes(rows),
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        lookup_for(x.device, part),
        n,
        row_units,
        scale,
        PART=part,
        NW=part.num_words,
        R=tile.rows,
        STEPS=steps,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
    )


def gather_row(rows: Tensor, part: RowPart, row_id: Tensor, out: Tensor, *, scale: float = 1.0) -> None:
    """Writes one row of a matrix, times `scale`, to `out`: the embedding of a token.

    Args:    rows, part: as for `gemv`.   row_id: int32 [1].   out: float32 [d].
    """
    tile = sum_tile((part,))
    _gather_row[(1,)](
        _bytes(rows),
        row_id,
        out,
        lookup_for(out.device, part),
        _row_units(rows),
        scale,
        PART=part,
        NW=part.num_words,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
    )


def _row_units(rows: Tensor) -> int:
    row_bytes = rows.shape[1] * rows.element_size()
    assert rows.is_contiguous() and row_bytes % 16 == 0, f"rows of {row_bytes} bytes, not a multiple of 16"
    return row_bytes // 16


def _bytes(rows: Tensor) -> Tensor:
    return rows.view(torch.uint8)


@triton.jit
def _gemv(
    x_ptr,
    rows_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    lookup_ptr,
    n,
    row_units,
    scale,
    PART: tl.constexpr,
    NW: tl.constexpr,
    R: tl.constexpr,
    STEPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    x, x_sums, x_high = load_x_part(x_ptr, PART, NW)
    for step in range(STEPS):
        row = (tl.program_id(0) * STEPS + step) * R + tl.arange(0, R)
        live = row < n
        units = row.to(tl.int64) * row_units
        codes = load_part(rows_ptr, units, live, PART, NW)
        total = dot_part(rows_ptr, units, live, codes, x, x_sums, x_high, lookup_ptr, PART, NW)
        if HAS_BIAS:
            total += tl.load(bias_ptr + row, mask=live, other=0.0)
        total *= scale
        if HAS_RESIDUAL:
            total += tl.load(residual_ptr + row, mask=live, other=0.0)
        tl.store(out_ptr + row, total, mask=live)


@triton.jit
def _gather_row(rows_ptr, id_ptr, out_ptr, lookup_ptr, row_units, scale, PART: tl.constexpr, NW: tl.constexpr):
    units = (tl.load(id_ptr) + tl.zeros([1], tl.int64)) * row_units
    live = units >= 0
    factor = tl.zeros([1], tl.float32) + scale
    codes = load_part(rows_ptr, units, live, PART, NW)
    y, less, y_high = zero_part(PART, NW)
    y, less, y_high = add_part(y, less, y_high, rows_ptr, units, live, codes, factor, lookup_ptr, PART, NW)
    store_part(out_ptr, y, less, y_high, PART, NW)
