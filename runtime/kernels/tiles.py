"""Tiles of weights for tensor cores: some rows by some columns of a part, decoded into registers in the columns' order.

Unlike a single hidden state, which is read in the codes' order (`codes`), many are read as they lie: here the weights
are put in order, which costs nothing beside the way to the tensor cores, where each value changes its thread anyway.
"""

import triton
import triton.language as tl

from moe_pack.runtime.kernels.codes import AFFINE, Part, load_scales, plane_bits, unpack


def tile_cols(*parts: Part) -> int:
    """Columns of a tile of these parts: 64, or what makes 16 bytes of codes."""
    return max(128 if part.kind == AFFINE.value and part.bits == 1 else 64 for part in parts)


@triton.jit
def load_tile(arena_ptr, units, live, tile, PART: tl.constexpr, COLS: tl.constexpr):
    """Weights of rows in columns `tile * COLS` and on, float32 [R, COLS]; finite past the row, 0 in rows not live.

    Args:    units: int64 [R], rows' offsets in units of 16 bytes.   COLS: a multiple of 64.
    """
    R: tl.constexpr = units.shape[0]
    BITS: tl.constexpr = plane_bits(PART, 0)
    NW: tl.constexpr = COLS * BITS // 32
    w = tile * NW + tl.arange(0, NW)
    mask = live[:, None] & (w < PART[5] * BITS // 32)[None, :]
    if PART[0] == AFFINE:
        if PART[1] == 3:
            blocks = (w // 4) * 6
            values = unpack(_read_words(arena_ptr, units, blocks + w % 4, mask, PART), PART, 0)
            high = _read_words(arena_ptr, units, blocks + 4 + w % 2, mask, PART)
            # Code c of a block is bit c / 8 of byte c % 8: both words that plane 0 has to a byte's codes share it.
            sq = tl.arange(0, 16)[None, :, None]
            shift = (sq % 4) * 8 + (sq // 4) * 2 + (tl.arange(0, NW)[None, None, :] % 4) // 2
            values += ((high[:, None, :] >> shift.to(tl.uint32)) & 1).to(tl.int32).to(tl.float32) * 4
        else:
            values = unpack(_read_words(arena_ptr, units, w, mask, PART), PART, 0)
        # [R, SQ, NW]: code sq of word w is column (sq / 4, w, sq % 4) of its block of 64
        values = tl.reshape(values, [R, 8 // BITS, 4, COLS // 64, 2 * BITS])
        values = tl.permute(values, [0, 3, 1, 4, 2])
        GROUP: tl.constexpr = min(PART[2], COLS)
        groups = (tile * COLS) // PART[2] + tl.arange(0, COLS // GROUP)
        in_row = live[:, None] & (groups < PART[5] // PART[2])[None, :]
        scale, zero = load_scales(arena_ptr, units[:, None], groups[None, :], in_row, PART)
        values = tl.reshape(values, [R, COLS // GROUP, GROUP])
        values = (values - zero[:, :, None]) * scale[:, :, None]
    else:
        values = tl.permute(unpack(_read_words(arena_ptr, units, w, mask, PART), PART, 0), [0, 2, 1])
    return tl.reshape(values, [R, COLS])


@triton.jit
def _read_words(arena_ptr, units, places, mask, PART: tl.constexpr):
    """Words of some rows' part, uint32 [R, NW], by their places in it."""
    OFFSET: tl.constexpr = PART[4]
    if OFFSET % 4 == 0:
        words_ptr = arena_ptr.to(tl.pointer_type(tl.uint32))
        words = tl.load(words_ptr + (units * 4)[:, None] + OFFSET // 4 + places[None, :], mask=mask, other=0)
    else:  # after byte scales of an odd number of groups: the part begins between words
        halves_ptr = arena_ptr.to(tl.pointer_type(tl.uint16)) + (units * 8)[:, None] + OFFSET // 2 + 2 * places[None, :]
        low = tl.load(halves_ptr, mask=mask, other=0).to(tl.uint32)
        words = low | (tl.load(halves_ptr + 1, mask=mask, other=0).to(tl.uint32) << 16)
    return words
