"""A dense matrix times one hidden state; and one row of it, as an embedding is."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_pack.runtime.kernels.codes import Part, lookup_for
from moe_pack.runtime.kernels.products import add_part, dot_part, load_part, load_x_part, store_part, zero_part
from moe_pack.runtime.kernels.tiles import dot_tile, sum_tile

MANY_PROGRAMS = 1024  # beyond, a program takes several blocks of rows: it reads x once for all


def gemv(
    x: Tensor,
    rows: Tensor,
    part: Part,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """A matrix times a vector: `out = residual + scale * (rows @ x + bias)`.

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


def gather_row(rows: Tensor, part: Part, row_id: Tensor, out: Tensor, *, scale: float = 1.0) -> None:
    """One row of a matrix, times `scale`: the embedding of a token.

    Args:    rows, part: as of `gemv`.   row_id: int32 [1].   out: float32 [d].
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
        words, high = load_part(rows_ptr, units, live, PART, NW)
        total = dot_part(rows_ptr, units, live, words, high, x, x_sums, x_high, lookup_ptr, PART, NW)
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
    words, high = load_part(rows_ptr, units, live, PART, NW)
    y, less, y_high = zero_part(PART, NW)
    y, less, y_high = add_part(y, less, y_high, rows_ptr, units, live, words, high, factor, lookup_ptr, PART, NW)
    store_part(out_ptr, y, less, y_high, PART, NW)
