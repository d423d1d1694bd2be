"""Stacked caches: a cache for each sequence, in a slot, and its rows as plain values or as codes.

A row of a cache has the values of one position and one head, in the bytes of `runtime.model.caches.storage`. It may
have several parts; those of codes are each rotated and coded on their own. Codes are read as what they stand for,
without the rotation back: queries are rotated as keys are, and the sum of values is rotated back.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moe_pack.runtime.gpu.kernels.rotation import hadamard_stage
from moe_pack.runtime.model.caches import RowStorage, block_sizes

StoredAs = tuple[RowStorage, RowStorage]  # how keys are stored, and values


class RowPositions(NamedTuple):
    """The rows of a launch, a token each. Those of one slot stand next to each other, at rising positions."""

    positions: Tensor  # int32 [T], not checked against the cache's size
    slots: Tensor  # int32 [T], of each row's sequence in stacked caches


class Cache(NamedTuple):
    """A layer's stacked keys and values, as kernels take them; `values` is a field of Triton's own tuples."""

    k: Tensor
    v: Tensor
    num_places: int
    slot_rows: int  # rows from a slot to the next, of keys and of values


def stacked(keys: Tensor, values: Tensor) -> Cache:
    """Returns keys and values [num_slots, kv heads, places, n] as kernels take them; they may be the same tensor."""
    num_places = keys.shape[2]
    slot_rows = keys.stride(0) // keys.stride(2)
    for each in (keys, values):
        head_rows = num_places if each.shape[1] > 1 else each.stride(1) // each.stride(2)
        assert each.stride(1) == head_rows * each.stride(2) and each.stride(3) == 1, "rows of a slot follow one another"
        assert each.shape[0] == 1 or each.stride(0) == slot_rows * each.stride(2), "slots are so many rows apart"
    return Cache(keys, values, num_places, slot_rows)


class Coding(NamedTuple):
    """How a part of each row is stored; the names are those of kernels' constants."""

    BITS: int  # of a code; 0: the part has plain values
    WIDTH: int  # values of the part
    STRIDE: int  # elements from a row to the next
    BEGIN: int = 0  # where the part begins in its row, in elements
    BLOCKS: int = 0
    EACH: int = 1  # values of a block
    CODE_BYTES: int = 0
    # Whether blocks are loaded whole, with a load for each scale: those of a power of two of values, except in long
    # rows of 4 bits.
    HAS_WIDE_LOADS: bool = False
    STAGES: int = 0  # of the Hadamard transform of a piece
    FACTOR: float = 1.0  # of that transform


_MOST_WIDE_VALUES = 128  # of a row of 4 bits that is loaded by blocks


def codings(cached: Tensor, width: int, rows: RowStorage | None) -> tuple[Coding, Coding | None]:
    """Returns how the first part of rows is stored, and the second one, if both together have `width` values.

    Args:    cached: [num_slots, kv heads, places, n], with these rows; None: they are plain values.
    """
    stride = cached.stride(2)
    if rows is None or not rows.is_coded:
        return Coding(0, width, stride), None
    first = _coded(rows, 0, stride)
    if width == first.WIDTH:
        return first, None
    second = _coded(rows, 1, stride)
    assert width == first.WIDTH + second.WIDTH, f"{width} values in rows with parts of {rows.parts}"
    return first, second


def _coded(rows: RowStorage, number: int, stride: int) -> Coding:
    width, place = rows.parts[number], rows.places(slice(number, number + 1))
    bits, (blocks, each) = (8 if rows.dtype == "q8" else 4), block_sizes(width)
    piece = width & -width
    code_bytes, stages = blocks * each * bits // 8, piece.bit_length() - 1
    assert stride % 2 == 0 and (place.start + code_bytes) % 2 == 0, "scales lie at whole multiples of 2 bytes"
    # With rows of 256 values of 4 bits, an H100 got others from wide loads than the interpreter (Triton 3.6).
    has_wide_loads = each & (each - 1) == 0 and not (bits == 4 and width > _MOST_WIDE_VALUES)
    return Coding(
        bits, width, stride, place.start, blocks, each, code_bytes, has_wide_loads, stages, float(piece**-0.5)
    )


@triton.constexpr_function
def block_width(width: int) -> int:
    """Returns the columns of a block that has so many values, at least as many as a product of tiles needs."""
    return max(16, int(triton.next_power_of_2(width)))


@triton.jit
def store_row(row_ptr, x, c, CODING: tl.constexpr):
    """Writes a part of a row: values `x` of columns `c`, float32 [BLOCK], with zeros behind them."""
    if CODING.BITS:
        _store_codes(row_ptr + CODING.BEGIN, x, c, CODING)
    else:
        tl.store(row_ptr + CODING.BEGIN + c, x, mask=c < CODING.WIDTH)


@triton.jit
def turned(x, c, CODING: tl.constexpr):
    """Returns a query's values of columns `c`, rotated as a part of codes is; those of plain values as they are."""
    y = x
    if CODING.BITS:
        y = _hadamard(x * _signs(c), CODING)
    return y


@triton.jit
def turned_back(y, c, CODING: tl.constexpr):
    """Returns a sum of rows, float32 [BLOCK], rotated back where rows are codes."""
    x = y
    if CODING.BITS:
        x = _hadamard(y, CODING) * _signs(c)
    return x


@triton.jit
def _signs(c):
    """Returns the signs of columns, as `storage.rotation` has them."""
    # Bit 15 of a product depends on the low 16 bits of its factors; these are 2654435761's.
    return 1.0 - 2.0 * ((c * 31153 >> 15) & 1).to(tl.float32)


@triton.jit
def _hadamard(x, CODING: tl.constexpr):
    """Returns values, float32 [BLOCK], each piece multiplied by the Hadamard matrix; zeros behind them stay zeros."""
    BLOCK: tl.constexpr = x.shape[0]
    STAGES: tl.constexpr = CODING.STAGES
    for stage in tl.static_range(STAGES):
        x = hadamard_stage(x, BLOCK, 1 << stage)
    return x * CODING.FACTOR


@triton.jit
def _store_codes(row_ptr, x, c, CODING: tl.constexpr):
    """Writes a row of values, float32 [BLOCK] with zeros behind them; one that is not finite makes all of them NaN."""
    # Signs and the transform make values of a row alike in size.
    y = turned(x, c, CODING)
    nan_or_zero = tl.sum(y * 0.0)  # a maximum leaves NaNs out
    block, in_block = c // CODING.EACH, c % CODING.EACH
    halves_ptr = (row_ptr + CODING.CODE_BYTES).to(tl.pointer_type(tl.float16))
    # Stores each block's scale, and with 4 bits its least value, as float16; codes are made by what was stored.
    scales, minima = y * 0.0, y * 0.0
    BLOCKS: tl.constexpr = CODING.BLOCKS
    for b in tl.static_range(BLOCKS):
        own = block == b
        if CODING.BITS == 8:
            scale = tl.div_rn(tl.max(tl.where(own, tl.abs(y), 0.0)) + nan_or_zero, 127.0).to(tl.float16)
        else:
            least = (tl.min(tl.where(own, y, float("inf"))) + nan_or_zero).to(tl.float16)
            most = tl.max(tl.where(own, y, -float("inf")))
            scale = tl.div_rn(most - least.to(tl.float32), 15.0).to(tl.float16)
            tl.store(halves_ptr + BLOCKS + b, least)
            minima = tl.where(own, least.to(tl.float32), minima)
        tl.store(halves_ptr + b, scale)
        scales = tl.where(own, scale.to(tl.float32), scales)
    # Stores the codes; with 4 bits, those of a block's second half stand in the upper halves of its bytes.
    steps = (y - minima) * tl.div_rn(1.0, tl.where(scales > 0, scales, 1.0))
    codes = _rounded(tl.where(scales > 0, steps, 0.0))
    is_stored = c < BLOCKS * CODING.EACH
    if CODING.BITS == 8:
        codes = tl.minimum(tl.maximum(codes, -127.0), 127.0).to(tl.int32)
        tl.store(row_ptr + c, (codes & 255).to(tl.uint8), mask=is_stored)
    else:
        codes = tl.minimum(tl.maximum(codes, 0.0), 15.0).to(tl.int32)
        half = CODING.EACH // 2
        is_low = (in_block < half) & is_stored
        high = tl.gather(codes, tl.where(is_low, c + half, c), 0)
        tl.store(row_ptr + block * half + in_block, (codes | high << 4).to(tl.uint8), mask=is_low)


@triton.jit
def _rounded(x):
    """Returns whole numbers, the nearest to values below 2^22, even ones for halves."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def load_columns(rows_ptr, is_row, begin, COLUMNS: tl.constexpr, CODING: tl.constexpr):
    """Returns `COLUMNS` columns of a part of rows from `begin` on, zeros past it: float32 [rows, COLUMNS]."""
    rows_ptr += CODING.BEGIN
    if CODING.BITS and CODING.HAS_WIDE_LOADS:
        values = _load_blocks(rows_ptr, is_row, begin, COLUMNS, CODING)
    else:
        c = begin + tl.arange(0, COLUMNS)
        values = _load_values(rows_ptr, c, is_row[:, None] & (c < CODING.WIDTH)[None, :], CODING)
    return values


@triton.jit
def _load_values(rows_ptr, c, mask, CODING: tl.constexpr):
    """Returns some columns of rows, float32 [rows, columns]; of codes, what they stand for, not rotated back."""
    if CODING.BITS == 0:
        values = tl.load(rows_ptr[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
    else:
        block, in_block = c // CODING.EACH, c % CODING.EACH
        halves_ptr = (rows_ptr + CODING.CODE_BYTES).to(tl.pointer_type(tl.float16))[:, None] + block[None, :]
        scales = tl.load(halves_ptr, mask=mask, other=0.0).to(tl.float32)
        if CODING.BITS == 8:
            codes = tl.load(rows_ptr[:, None] + c[None, :], mask=mask, other=0)
            values = codes.to(tl.int8, bitcast=True).to(tl.float32) * scales
        else:
            half = CODING.EACH // 2
            place, shift = block * half + in_block % half, in_block // half * 4
            codes = tl.load(rows_ptr[:, None] + place[None, :], mask=mask, other=0).to(tl.int32)
            minima = tl.load(halves_ptr + CODING.BLOCKS, mask=mask, other=0.0).to(tl.float32)
            values = ((codes >> shift[None, :]) & 15).to(tl.float32) * scales + minima
    return values


@triton.jit
def _load_blocks(rows_ptr, is_row, begin, COLUMNS: tl.constexpr, CODING: tl.constexpr):
    """Returns `COLUMNS` columns of cached rows, by blocks; column `begin` is the first of a block."""
    ROWS: tl.constexpr = rows_ptr.shape[0]
    EACH: tl.constexpr = CODING.EACH
    block = begin // EACH + tl.arange(0, COLUMNS // EACH)
    mask = is_row[:, None] & (block < CODING.BLOCKS)[None, :]
    halves_ptr = (rows_ptr + CODING.CODE_BYTES).to(tl.pointer_type(tl.float16))[:, None] + block[None, :]
    scales = tl.load(halves_ptr, mask=mask, other=0.0).to(tl.float32)[:, :, None]
    if CODING.BITS == 8:
        places = (block * EACH)[:, None] + tl.arange(0, EACH)[None, :]
        codes = tl.load(rows_ptr[:, None, None] + places[None, :, :], mask=mask[:, :, None], other=0)
        values = codes.to(tl.int8, bitcast=True).to(tl.float32) * scales
    else:
        places = (block * (EACH // 2))[:, None] + tl.arange(0, EACH // 2)[None, :]
        pairs = tl.load(rows_ptr[:, None, None] + places[None, :, :], mask=mask[:, :, None], other=0)
        minima = tl.load(halves_ptr + CODING.BLOCKS, mask=mask, other=0.0).to(tl.float32)[:, :, None]
        low, high = (pairs & 15).to(tl.float32) * scales + minima, (pairs >> 4).to(tl.float32) * scales + minima
        values = tl.permute(tl.join(low, high), [0, 1, 3, 2])
    return tl.reshape(values, [ROWS, COLUMNS])
