"""Numbers as float16, for products on tensor cores: rows of a pack are decoded once a pass, hidden states are rounded.

A row is scaled by a power of two, so that its largest value is below 2^15: float16 then has 11 bits of each value down
to 2^-29 of the largest. With a second float16, the rest of each value, it has 22. The factor that undoes the scale is
the row's, and multiplies its products. `grouped` multiplies what is written here.

Relative errors of an expert's outputs with outlier channels are below 6e-4 with one float16 and 3e-7 with two
(`tests/runtime/gpu/kernels/test_grouped.py`).
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_pack.runtime.gpu.kernels.grids import INTERPRETED
from moe_pack.runtime.gpu.kernels.products import load_tile, tile_cols
from moe_pack.runtime.gpu.kernels.rows import (
    AFFINE,
    E5M2,
    FP8,
    TRELLIS,
    UNITS,
    RowPart,
    has_scales,
    load_scales,
    lookup_for,
    loop_range,
)

_TOP = tl.constexpr(14)  # a row's largest value is 2^14 or more, and below 2^15
DECODED_ROWS = 64 if INTERPRETED else 16  # that a program decodes at once
_ROUNDED_ROWS = 64 if INTERPRETED else 1  # hidden states of a program
_COLUMNS = tl.constexpr(1024)  # of a hidden state, that a program looks at together


def padded(num_cols: int) -> int:
    """Returns the columns of halves for rows of so many."""
    return -(-num_cols // 64) * 64


class Halves(NamedTuple):
    """Rows of numbers: `values.sum(0) * factors[:, None]`."""

    # float16 [1 or 2, rows, columns], the values and, if there are two, their rests; columns are a multiple of 64, with
    # zeros behind the last one
    values: Tensor
    factors: Tensor  # float32 [rows], powers of two

    @classmethod
    def allocate(cls, num_halves: int, num_rows: int, num_cols: int, device: torch.device) -> "Halves":
        """Allocates rows of one or two float16 a number."""
        shape = (num_halves, num_rows, padded(num_cols))
        values = torch.empty(shape, dtype=torch.float16, device=device)
        return cls(values, torch.empty(num_rows, device=device))

    @property
    def at(self) -> "HalvesAt":
        """The rows as kernels take them."""
        return HalvesAt(self.values, self.factors, self.values.stride(0))


class HalvesAt(NamedTuple):
    """Rows as kernels take them; `values` is a field of Triton's own tuples."""

    numbers: Tensor
    factors: Tensor
    stride: int  # values between the two halves of a number


@triton.jit
def _scale_and_factor(top):
    """Returns the power of two that brings rows' largest values to `_TOP`, and its inverse: float32 as `top`."""
    exponent = ((top.to(tl.int32, bitcast=True) >> 23) & 255) - 127
    shift = tl.minimum(_TOP - exponent, 126)  # of a row of zeros, or nearly so
    return ((shift + 127) << 23).to(tl.float32, bitcast=True), ((127 - shift) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _store_halves(values_ptr, half_stride, values, mask, HALVES: tl.constexpr):
    high = values.to(tl.float16)
    tl.store(values_ptr, high, mask=mask)
    if HALVES == 2:
        tl.store(values_ptr + half_stride, (values - high.to(tl.float32)).to(tl.float16), mask=mask)


def round_rows(x: Tensor, out: Halves, starts: Tensor | None = None, first: int = 0, number: int = 0) -> None:
    """Writes rows of x, float32 [n, columns], contiguous, as halves.

    Args:    starts: int32 on the device: only rows from `starts[first]` to `starts[first + number]` are written;
             None: all are.
    """
    if len(x):
        _round_rows_kernel[(triton.cdiv(len(x), _ROUNDED_ROWS),)](
            x, out.at, starts, first, number, len(x), x.shape[1], out.values.shape[2], len(out.values), _ROUNDED_ROWS,
            num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first", "number", "num_rows"])
def _round_rows_kernel(
    x_ptr, out, starts_ptr, first, number, num_rows, D: tl.constexpr, STRIDE: tl.constexpr, HALVES: tl.constexpr,
    ROWS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    live = row < num_rows
    if starts_ptr is not None:
        begin, end = tl.load(starts_ptr + first), tl.load(starts_ptr + first + number)
        live = (row >= begin) & (row < end)
        if (tl.program_id(0) * ROWS >= end) | (tl.program_id(0) * ROWS + ROWS <= begin):
            return
    lanes = tl.arange(0, _COLUMNS)
    tops = tl.zeros([ROWS, _COLUMNS], tl.float32)
    for column in range(0, D, _COLUMNS):
        c = column + lanes
        mask = live[:, None] & (c < D)[None, :]
        tops = tl.maximum(tops, tl.abs(tl.load(x_ptr + row[:, None] * D + c[None, :], mask=mask, other=0.0)))
    scale, factor = _scale_and_factor(tl.max(tops, 1))
    for column in range(0, STRIDE, _COLUMNS):
        c = column + lanes
        mask = live[:, None] & (c < D)[None, :]
        x = tl.load(x_ptr + row[:, None] * D + c[None, :], mask=mask, other=0.0)
        stored = live[:, None] & (c < STRIDE)[None, :]
        _store_halves(out.numbers + row[:, None] * STRIDE + c[None, :], out.stride, x * scale[:, None], stored, HALVES)
    tl.store(out.factors + row, factor, mask=live)


def decode_rows(rows: Tensor, row_units: int, part: RowPart, first: int, out: Halves) -> None:
    """Writes rows of a dense matrix, from `first` on, as halves.

    Args:    rows: u8, all bytes of the matrix.   row_units: the bytes of a row, divided by 16.   out: all its rows are
             written; those past the matrix are zeros.
    """
    num_halves, num_rows, _ = out.values.shape
    _decode_rows_kernel[(triton.cdiv(num_rows, DECODED_ROWS),)](
        rows, out.at, lookup_for(rows.device, part), first,
        rows.numel() // (16 * row_units), row_units, num_rows, part,
        DecodeBlock(DECODED_ROWS, tile_cols(part), num_halves), num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


class DecodeBlock(NamedTuple):
    """A program's part of the decoding, constants of kernels."""

    rows: int
    cols: int  # of a step
    halves: int


@triton.jit(do_not_specialize=["first", "last", "num_rows"])
def _decode_rows_kernel(
    rows_ptr, target, lookup_ptr, first, last, row_units, num_rows, PART: tl.constexpr, BLOCK: tl.constexpr
):
    r = tl.program_id(0) * BLOCK.rows + tl.arange(0, BLOCK.rows)
    row = first + r
    live = row < last
    decode(
        rows_ptr, row.to(tl.int64) * row_units, live, r, r < num_rows, target, lookup_ptr, PART, BLOCK, num_rows, False
    )


@triton.jit
def decode(
    arena_ptr, units, live, r, is_out, target, lookup_ptr, PART: tl.constexpr, BLOCK: tl.constexpr, num_rows,
    TRANSPOSED: tl.constexpr
):  # fmt: skip
    """Writes rows as halves to rows `r` of a target, zeros for rows that are not live.

    Args:    num_rows: of the target; it is [columns, num_rows] if TRANSPOSED.
    """
    D: tl.constexpr = PART.num_cols
    STRIDE: tl.constexpr = (D + 63) // 64 * 64
    COLS: tl.constexpr = BLOCK.cols
    ROWS: tl.constexpr = BLOCK.rows
    top = tl.zeros([ROWS], tl.float32)
    if has_scales(PART):
        for group in range(tl.cdiv(D, PART.group)):
            top = tl.maximum(top, _largest(arena_ptr, units, live, group, PART))
    else:
        for tile in range(tl.cdiv(D, COLS)):
            w = load_tile(arena_ptr, units, live, tile, lookup_ptr, PART, COLS)
            top = tl.maximum(top, tl.max(tl.abs(w), 1))
    scale, factor = _scale_and_factor(top)
    for tile in range(STRIDE // COLS):
        w = load_tile(arena_ptr, units, live, tile, lookup_ptr, PART, COLS)
        if PART.kind == AFFINE:
            step, zero = load_scales(arena_ptr, units, (tile * COLS) // PART.group, live, PART)
            w = (w - zero[:, None]) * step[:, None]
        elif has_scales(PART):
            step, _ = load_scales(arena_ptr, units, (tile * COLS) // PART.group, live, PART)
            w *= (step * UNITS[PART.kind])[:, None]
        c = tile * COLS + tl.arange(0, COLS)
        mask = is_out[:, None] & (c < STRIDE)[None, :]
        if TRANSPOSED:
            values_ptr = target.numbers + r[:, None] + c.to(tl.int64)[None, :] * num_rows
        else:
            values_ptr = target.numbers + r.to(tl.int64)[:, None] * STRIDE + c[None, :]
        _store_halves(values_ptr, target.stride, tl.where(live[:, None], w * scale[:, None], 0.0), mask,
                      BLOCK.halves)  # fmt: skip
    tl.store(target.factors + r, tl.where(live, factor, 1.0), mask=is_out)


@triton.constexpr_function
def _largest_code(part: RowPart) -> float:
    """Returns the largest absolute value of a code that is not of affine codes, in units of its scale."""
    part = RowPart(*part)
    if part.kind == TRELLIS.value:
        return 192.0  # no level is larger
    return 448.0 if part.kind == FP8.value else 57344.0 if part.kind == E5M2.value else 6.0


@triton.jit
def _largest(arena_ptr, units, live, group, PART: tl.constexpr):
    """Returns what no absolute value in a group of rows exceeds: float32 [R]."""
    step, zero = load_scales(arena_ptr, units, group, live, PART)
    if PART.kind == AFFINE:
        LAST: tl.constexpr = 2**PART.bits - 1
        most = tl.maximum(tl.abs(zero), tl.abs(LAST - zero))
    else:
        most = _largest_code(PART)
    return tl.where(live, tl.abs(step) * most, 0.0)


class ProductTile(NamedTuple):
    """A program's part of a product, and its steps: constants of kernels."""

    rows: int  # of weights
    tokens: int
    cols: int  # of a step
    stages: int  # steps whose loads are on their way
    num_warps: int


_MOST_TOKENS, _LEAST_TOKENS = 128, 16  # of a program
_USED_BYTES = 4096  # of shared memory, by what is no tile
_MUCH_SHARED_BYTES = 200_000  # of a program: on sm_90 and 100, whose tiles do not stand in registers


def product_tile(num_tokens: int, num_matrices: int, num_cols: int) -> ProductTile:
    """Returns the tile for products of about so many tokens with one or two matrices of weights at once.

    Args:    num_cols: of rows, a multiple of 64.
    """
    if INTERPRETED:  # numpy takes as long for large tiles
        return ProductTile(64, 64, min(num_cols & -num_cols, 512), 1, 4)
    shared_bytes = _shared_bytes(triton.runtime.driver.active.get_current_device())
    tokens = min(_MOST_TOKENS, max(_LEAST_TOKENS, triton.next_power_of_2(num_tokens)))
    rows = 128 if shared_bytes > _MUCH_SHARED_BYTES or num_matrices == 1 else 64
    step_bytes = 2 * 64 * (rows * num_matrices + tokens)
    stages = min(4, (shared_bytes - _USED_BYTES) // step_bytes)
    return ProductTile(rows, tokens, 64, stages, 8 if rows * tokens >= 1 << 13 or num_matrices > 1 else 4)


@cache
def _shared_bytes(device: int) -> int:
    """Returns the shared memory that one program may take on a GPU, by the number that Triton gives it."""
    return int(triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"])


@triton.jit
def sum_products(w_ptr, other_ptr, w_stride, w_rows, x_ptr, x_stride, x_rows, d, HALVES: tl.constexpr,
                 TILE: tl.constexpr):  # fmt: skip
    """Returns products of rows of one or two matrices with rows of x, without factors: float32 [rows, tokens] each.

    With two halves a number, the products of rests with rests are left out: they are below 2^-22 of the others.
    Args:    w_ptr, other_ptr: to the halves of rows; `other_ptr` None: the second result is not used.   w_stride,
             x_stride: between halves.   w_rows, x_rows: int64 [rows] and [tokens], rows' numbers.   d: the number of
             columns, a multiple of 64.
    """
    ROWS: tl.constexpr = TILE.rows
    TOKENS: tl.constexpr = TILE.tokens
    c = tl.arange(0, TILE.cols)
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    other = sums
    w_at, x_at = w_rows[:, None] * d + c[None, :], x_rows[:, None] * d + c[None, :]
    num_steps = d // TILE.cols
    for step in loop_range(0, num_steps * (2 * HALVES - 1), num_stages=TILE.stages):
        w_begin, x_begin = step * TILE.cols, step * TILE.cols
        if HALVES == 2:
            # First the weights' rests, then the hidden states' ones, and last the largest products.
            part = step // num_steps
            w_begin = (step - part * num_steps) * TILE.cols
            x_begin = w_begin + tl.where(part == 1, x_stride, 0)
            w_begin += tl.where(part == 0, w_stride, 0)
        x = tl.trans(tl.load(x_ptr + x_begin + x_at))
        sums = tl.dot(tl.load(w_ptr + w_begin + w_at), x, sums)
        if other_ptr is not None:
            other = tl.dot(tl.load(other_ptr + w_begin + w_at), x, other)
    return sums, other


def multiply(x: Halves, rows: Halves, out: Tensor, bias: Tensor | None = None) -> None:
    """Writes `x @ rows.T + bias` to columns of `out`.

    Args:    x: [T, d].   rows: [m, d].   out: float32 [T, n], a view of m or fewer columns of a contiguous tensor.
             bias: float32 [n].
    """
    (num_tokens, num_rows), num_cols = out.shape, x.values.shape[2]
    tile = product_tile(num_tokens, 1, num_cols)
    _multiply_kernel[triton.cdiv(num_rows, tile.rows), triton.cdiv(num_tokens, tile.tokens)](
        x.at, rows.at, bias, out, num_tokens, num_rows, out.stride(0), num_cols, len(x.values), tile,
        num_warps=tile.num_warps, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["out_ptr", "bias_ptr", "num_tokens", "num_rows"])
def _multiply_kernel(
    x, rows, bias_ptr, out_ptr, num_tokens, num_rows, out_stride, num_cols, HALVES: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    r = tl.program_id(0) * TILE.rows + tl.arange(0, TILE.rows)
    t = tl.program_id(1) * TILE.tokens + tl.arange(0, TILE.tokens)
    live, is_token = r < num_rows, t < num_tokens
    # Rows and tokens past the last are those again: what is loaded of them is not stored.
    row, token = tl.minimum(r, num_rows - 1).to(tl.int64), tl.minimum(t, num_tokens - 1).to(tl.int64)
    sums, _ = sum_products(rows.numbers, None, rows.stride, row, x.numbers, x.stride, token, num_cols, HALVES, TILE)
    sums *= tl.load(rows.factors + row)[:, None] * tl.load(x.factors + token)[None, :]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + r, mask=live, other=0.0)[:, None]
    tl.store(out_ptr + token[None, :] * out_stride + r[:, None], sums, mask=live[:, None] & is_token[None, :])
