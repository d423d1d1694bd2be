"""Tiles for tensor cores: some rows by some columns of a part, as codes or values in the columns' order.

A tile is never wider than a group, so that a row's codes in it have one scale, which is put to the product: codes are
exact in tf32, as are 16-bit values, and only the other factor needs two parts. Unlike one hidden state (`codes`), many
are read as they lie: putting codes in order costs nothing beside their way to the tensor cores.
"""

import triton
import triton.language as tl

from moe_pack.runtime.kernels.codes import (
    AFFINE,
    F32,
    TRELLIS,
    UNITS,
    Part,
    has_scales,
    load_between,
    load_scales,
    places,
    plane_bits,
    unpack,
    unpack_places,
)
from moe_pack.runtime.kernels.trellis import load_stream


def tile_cols(*parts: Part) -> int:
    """Columns of tiles of these parts: a block of codes, or as many as have one scale."""
    return min(64, *(part.group for part in parts if part.group), 64)


@triton.jit
def add_product(sums, arena_ptr, units, live, tile, x, lookup_ptr, PART: tl.constexpr, COLS: tl.constexpr):
    """`sums` [R, T] plus a tile's share of rows times `x` [COLS, T], which is zero past the row.

    Args:    units: int64 [R], rows' offsets in units of 16 bytes.   tile: its columns begin at `tile * COLS`.
    """
    w = load_tile(arena_ptr, units, live, tile, lookup_ptr, PART, COLS)
    if PART[0] == AFFINE:
        scale, zero = load_scales(arena_ptr, units, (tile * COLS) // PART[2], live, PART)
        sums += scale[:, None] * (dot_exact(w, x) - zero[:, None] * tl.sum(x, 0)[None, :])
    elif has_scales(PART):
        scale, _ = load_scales(arena_ptr, units, (tile * COLS) // PART[2], live, PART)
        sums += scale[:, None] * (dot_exact(w, x) * UNITS[PART[0]])
    elif PART[0] == F32:
        sums = tl.dot(w, x, sums, input_precision="tf32x3")
    else:
        sums += dot_exact(w, x)
    return sums


@triton.jit
def dot_exact(w, x):
    """w [M, K], exact in tf32, times x [K, N] in two tf32 parts, which hold 21 of its 24 bits or more."""
    high = (x.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
    low = tl.dot(w, x - high, input_precision="tf32")
    return tl.dot(w, high, low, input_precision="tf32")


@triton.jit
def load_tile(
    arena_ptr, units, live, tile, lookup_ptr, PART: tl.constexpr, COLS: tl.constexpr, TURNED: tl.constexpr = False
):
    """Codes or values, as of `unpack`, float32 [R, COLS], turned [COLS, R]; zeros past the row, and for rows not live.

    A block is `8 / BITS` runs of columns, of 4 bytes' codes each word; byte by byte, a run has its own bits.
    """
    R: tl.constexpr = units.shape[0]
    BITS: tl.constexpr = plane_bits(PART, 0)
    if has_scales(PART) and PART[0] != TRELLIS:
        RUN: tl.constexpr = 8 * BITS
        NUM_RUNS: tl.constexpr = max(COLS // RUN, 1)
        NW: tl.constexpr = COLS // NUM_RUNS // 4
        block, first = tile // (64 // COLS), tile % (64 // COLS) * COLS
        w = first % RUN // 4 + tl.arange(0, NW)
        sq = (first // RUN * 4 + tl.arange(0, 4 * NUM_RUNS))[None, :, None]  # (run, byte)
        mask = (live & (block < PART[5] // 64))[:, None]
        if PART[1] == 3:
            words = _read_words(arena_ptr, units, block * 6 + w, mask, PART)[:, None, :]
            high = _read_words(arena_ptr, units, block * 6 + 4 + w % 2, mask, PART)[:, None, :]
            # Plane 1 has column c at bit c / 8 of byte c % 8.
            shift = (sq % 4 * 8 + sq // 4 * 2).to(tl.uint32)
            codes = ((words >> shift) & 3) | (((high >> (shift + (w // 2)[None, None, :])) & 1) << 2)
            values = codes.to(tl.int32).to(tl.float32)
        else:
            words = _read_words(arena_ptr, units, block * RUN // 4 + w, mask, PART)[:, None, :]
            values = unpack_places(words, sq, PART, 0)
        values = tl.reshape(values, [R, NUM_RUNS, 4, NW])  # a column is (run, word, byte)
    else:
        SQ: tl.constexpr = places(PART, 0)
        w = tile * (COLS // SQ) + tl.arange(0, COLS // SQ)
        mask = live[:, None] & (w < PART[5] // SQ)[None, :]
        values = unpack(_read_words(arena_ptr, units, w, mask, PART), lookup_ptr, PART, 0)
        values = tl.reshape(values, [R, 1, SQ, COLS // SQ])
    if TURNED:  # here, where it costs nothing: sm_100 cannot compile a product with a tile that is turned afterwards
        found = tl.reshape(tl.permute(values, [1, 3, 2, 0]), [COLS, R])
    else:
        found = tl.reshape(tl.permute(values, [0, 1, 3, 2]), [R, COLS])
    return found


@triton.jit
def load_tokens(x_ptr, t, is_token, tile, D: tl.constexpr, COLS: tl.constexpr):
    """Columns `tile * COLS` and on of some rows of x [T, D], float32 [COLS, len(t)]; zeros past the row."""
    cols = tile * COLS + tl.arange(0, COLS)
    mask = is_token[None, :] & (cols < D)[:, None]
    return tl.load(x_ptr + t.to(tl.int64)[None, :] * D + cols[:, None], mask=mask, other=0.0)


@triton.jit
def _read_words(arena_ptr, units, at, mask, PART: tl.constexpr):
    """Words of some rows' part, uint32 [R, NW], by their places in it."""
    OFFSET: tl.constexpr = PART[4]
    if PART[0] == TRELLIS:
        words = load_stream(arena_ptr, units, at, mask, PART)
    elif OFFSET % 4 == 0:
        words_ptr = arena_ptr.to(tl.pointer_type(tl.uint32))
        words = tl.load(words_ptr + (units * 4)[:, None] + OFFSET // 4 + at[None, :], mask=mask, other=0)
    else:
        words = load_between(arena_ptr, units[:, None], at[None, :], mask, OFFSET)
    return words
