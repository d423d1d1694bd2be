"""Rows of a part times x, and sums of rows times factors, without ever making a code an integer.

A code masked where it stands in its word, read as float32, is a subnormal: `code * 2^(place - 149)`, exactly. A
GPU's multiply-add takes subnormals like other numbers (how fast is still to be measured), so a code costs one logical
operation and one multiply-add: the other factor carries 2^86 / 2^place, its sums 2^-63, which is taken off at the end.
Factors may be up to 2^41 in size; below 2^-60 they lose bits. Codes are masked in the lower half of a word, or in the
upper half moved down.

Codes of a group have one scale: in words side by side (`CHUNK`), those at the same place have (`QS` places a word).
Codes that are numbers themselves (`fp8`, `e5m2`, `mxfp4`) are taken as `unpack` gives them, and have no zeros. What is
looked up for a trellis is a code of 8 bits that stands first in its word, and has one zero.

Tiles for tensor cores: some rows by some columns of a part, as codes or values in the columns' order.

A tile is never wider than a group, so that a row's codes in it have one scale, which is put to the product: codes are
exact in tf32, as are 16-bit values, and only the other factor needs two parts. Unlike one hidden state (`codes`), many
are read as they lie: putting codes in order costs nothing beside their way to the tensor cores.
"""

import triton
import triton.language as tl

from moe_pack.runtime.gpu.kernels.rows import (
    AFFINE,
    F32,
    FACTORS,
    TRELLIS,
    UNITS,
    RowPart,
    columns,
    has_scales,
    is_word,
    load_between,
    load_bias,
    load_scales,
    load_stream,
    load_words,
    load_x,
    look_up,
    places,
    plane_bits,
    store_y,
    unpack,
    unpack_places,
)

_LIFT = tl.constexpr(2.0**86)  # of the other factor
_DROP = tl.constexpr(2.0**63)  # of sums: 2^149 / 2^86


@triton.constexpr_function
def has_two_planes(part: RowPart) -> bool:
    """Whether a part's codes are of 3 bits."""
    return part[0] == 0 and part[1] == 3


@triton.constexpr_function
def _are_lifted(part: RowPart) -> bool:
    """Whether codes are taken as subnormals, and have zeros."""
    return part[0] in (0, 7)


@triton.constexpr_function
def _chunk(part: RowPart, plane: int) -> int:
    """Words side by side that have one scale and are loaded together; of 64 codes at most."""
    return 1 if plane or part[0] == 7 else 2 if part[1] in (1, 3) else 4


@triton.constexpr_function
def _factor(part: RowPart, plane: int) -> float:
    """What sums of products with `_taken` codes are to be multiplied by."""
    return float(FACTORS.value[plane] * _DROP.value if part[0] in (0, 7) else UNITS.value[part[0]])


@triton.constexpr_function
def _scales(part: RowPart, bits: int) -> int:
    """How many scales the codes of a word have."""
    return 8 // bits if part[2] % 64 and part[0] != 7 else 1


@triton.jit
def _masked(words, BITS: tl.constexpr):
    """Codes where they stand, as subnormals: float32 [R, SQ, NW] for words [R, NW]."""
    sq = tl.arange(0, 32 // BITS)[None, :, None]
    halves = words[:, None, :] >> ((sq % 4) // 2 * 16).to(tl.uint32)
    MASK: tl.constexpr = 2**BITS - 1
    masks = tl.full([1, 32 // BITS, 1], MASK, tl.uint32) << (sq % 2 * 8 + sq // 4 * BITS).to(tl.uint32)
    return (halves & masks).to(tl.float32, bitcast=True)


@triton.jit
def _taken(words, lookup_ptr, PART: tl.constexpr, PLANE: tl.constexpr):
    """Codes as a product takes them: float32 [R, SQ, NW] for words [R, NW]."""
    if PART[0] == AFFINE:
        codes = _masked(words, plane_bits(PART, PLANE))
    elif PART[0] == TRELLIS:
        codes = look_up(lookup_ptr, words, PART).to(tl.float32, bitcast=True)
    else:
        codes = unpack(words, lookup_ptr, PART, PLANE)
    return codes


@triton.jit
def _unplaced(PART: tl.constexpr, PLANE: tl.constexpr):
    """2^-place of each code in its half: float32 [SQ]."""
    sq = tl.arange(0, places(PART, PLANE))
    place = sq * 0 if PART[0] == TRELLIS else sq % 2 * 8 + sq // 4 * plane_bits(PART, PLANE)
    return ((127 - place) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _load_chunk_scales(arena_ptr, units, live, PART: tl.constexpr, PLANE: tl.constexpr, NW: tl.constexpr):
    """Scales and zeros, float32 [R, QS, NC]."""
    BITS: tl.constexpr = plane_bits(PART, PLANE)
    QS: tl.constexpr = _scales(PART, BITS)
    if PART[0] == TRELLIS:  # words first, as in its loads
        column = tl.arange(0, NW)[:, None, None] * places(PART, 0)
        mask = live[None, None, :] & (column < PART[5])
        scale, zero = load_scales(arena_ptr, units[None, None, :], column // PART[2], mask, PART)
        return tl.permute(scale, [2, 1, 0]), tl.permute(zero, [2, 1, 0])
    first = tl.arange(0, NW // _chunk(PART, PLANE))[None, :] * _chunk(PART, PLANE)
    column = (first // (2 * BITS)) * 64 + first % (2 * BITS) * 4 + tl.arange(0, QS)[:, None] * (8 * BITS)
    mask = live[:, None, None] & (first < PART[5] * BITS // 32)[None, :, :]
    return load_scales(arena_ptr, units[:, None, None], (column // PART[2])[None, :, :], mask, PART)


@triton.jit
def _spread(each, PART: tl.constexpr, PLANE: tl.constexpr, NW: tl.constexpr):
    """Values of chunks [R, QS, NC] for all their codes: [R, SQ, NW]."""
    R: tl.constexpr = each.shape[0]
    QS: tl.constexpr = each.shape[1]
    CHUNK: tl.constexpr = _chunk(PART, PLANE)
    SQ: tl.constexpr = places(PART, PLANE)
    wide = tl.broadcast_to(each[:, :, None, :, None], [R, QS, SQ // QS, NW // CHUNK, CHUNK])
    return tl.reshape(wide, [R, SQ, NW])


@triton.jit
def _chunk_sums(values, QS: tl.constexpr, CHUNK: tl.constexpr):
    """Sums of the codes of each chunk and place: [R, QS, NC] of [R, SQ, NW]."""
    R: tl.constexpr = values.shape[0]
    SQ: tl.constexpr = values.shape[1]
    NW: tl.constexpr = values.shape[2]
    sums = tl.sum(tl.reshape(values, [R, QS, SQ // QS, NW]), 2)  # first what a thread has of a word
    return tl.sum(tl.reshape(sums, [R, QS, NW // CHUNK, CHUNK]), 3)


@triton.jit
def load_part(arena_ptr, units, live, PART: tl.constexpr, NW: tl.constexpr):
    """The words of some rows by plane: two tensors; where codes lie in one plane, the second is the first again."""
    words = load_words(arena_ptr, units, live, PART, 0, NW)
    high = words
    if has_two_planes(PART):
        high = load_words(arena_ptr, units, live, PART, 1, NW // 2)
    return words, high


@triton.jit
def load_x_part(x_ptr, PART: tl.constexpr, NW: tl.constexpr):
    """A hidden state as `dot_part` takes it: for the first plane, its sums by chunk, for the second plane."""
    x = load_x(x_ptr, PART, 0, NW)
    x_sums, x_high = x, x
    if _are_lifted(PART):
        x_sums = _chunk_sums(x[None, :, :], _scales(PART, plane_bits(PART, 0)), _chunk(PART, 0))
        x = x * (_unplaced(PART, 0) * _LIFT)[:, None]
        if has_two_planes(PART):
            x_high = load_x(x_ptr, PART, 1, NW // 2) * (_unplaced(PART, 1) * _LIFT)[:, None]
    return x, x_sums, x_high


@triton.jit
def dot_part(arena_ptr, units, live, words, high, x, x_sums, x_high, lookup_ptr, PART: tl.constexpr, NW: tl.constexpr):
    """Rows times x, with their bias: float32 [R], zeros for rows that are not live.

    Args:    words, high: from `load_part`.   x, x_sums, x_high: from `load_x_part`.
    """
    if has_scales(PART):
        scale, zero = _load_chunk_scales(arena_ptr, units, live, PART, 0, NW)
        QS: tl.constexpr = _scales(PART, plane_bits(PART, 0))
        products = _taken(words, lookup_ptr, PART, 0) * x[None, :, :]
        sums = _chunk_sums(products, QS, _chunk(PART, 0)) * _factor(PART, 0)
        if _are_lifted(PART):
            sums -= zero * x_sums
        total = tl.sum(tl.sum(scale * sums, 2), 1)
        if has_two_planes(PART):
            scale, _ = _load_chunk_scales(arena_ptr, units, live, PART, 1, NW // 2)
            sums = _chunk_sums(_taken(high, lookup_ptr, PART, 1) * x_high[None, :, :], _scales(PART, 1), 1)
            total += tl.sum(tl.sum(scale * (sums * _factor(PART, 1)), 2), 1)
    else:
        total = tl.sum(tl.sum(unpack(words, lookup_ptr, PART, 0) * x[None, :, :], 1), 1)
    if PART[6] >= 0:
        total += load_bias(arena_ptr, units, live, PART)
    return total


@triton.jit
def zero_part(PART: tl.constexpr, NW: tl.constexpr):
    """Sums for `add_part` to add to: of the first plane's codes, of what zeros take off, of the second plane's."""
    y = tl.zeros([places(PART, 0), NW], tl.float32)
    less = tl.zeros([1, 1, 1], tl.float32)
    y_high = less
    if _are_lifted(PART):
        less = tl.zeros([1, _scales(PART, plane_bits(PART, 0)), NW // _chunk(PART, 0)], tl.float32)
        if has_two_planes(PART):
            y_high = tl.zeros([32, NW // 2], tl.float32)
    return y, less, y_high


@triton.jit
def add_part(y, less, y_high, arena_ptr, units, live, words, high, h, lookup_ptr, PART: tl.constexpr, NW: tl.constexpr):
    """The sums plus `h` [R] times rows."""
    if has_scales(PART):
        scale, zero = _load_chunk_scales(arena_ptr, units, live, PART, 0, NW)
        factors = scale * h[:, None, None]
        if _are_lifted(PART):
            less += tl.sum(factors * zero, 0)[None, :, :]
            factors *= _LIFT
        y += tl.sum(_taken(words, lookup_ptr, PART, 0) * _spread(factors, PART, 0, NW), 0)
        if has_two_planes(PART):
            scale, _ = _load_chunk_scales(arena_ptr, units, live, PART, 1, NW // 2)
            factors = scale * h[:, None, None]
            y_high += tl.sum(_taken(high, lookup_ptr, PART, 1) * _spread(factors * _LIFT, PART, 1, NW // 2), 0)
    else:
        y += tl.sum(unpack(words, lookup_ptr, PART, 0) * h[:, None, None], 0)
    return y, less, y_high


@triton.jit
def store_part(y_ptr, y, less, y_high, PART: tl.constexpr, NW: tl.constexpr):
    """Writes sums to y_ptr [d], each to its column; of two planes the second adds to what the first wrote."""
    if _are_lifted(PART):
        y = y * (_unplaced(PART, 0) * _factor(PART, 0))[:, None]
        y -= tl.reshape(_spread(less, PART, 0, NW), [places(PART, 0), NW])
    elif has_scales(PART):
        y *= _factor(PART, 0)
    store_y(y_ptr, y, PART, 0, NW)
    if has_two_planes(PART):
        tl.debug_barrier()  # other threads wrote those columns
        y_high = y_high * (_unplaced(PART, 1) * _factor(PART, 1))[:, None]
        y_high += tl.load(y_ptr + columns(PART, 1, NW // 2), mask=is_word(PART, 1, NW // 2)[None, :], other=0.0)
        store_y(y_ptr, y_high, PART, 1, NW // 2)


@triton.jit
def runs(a, threshold):
    """Which neurons run: one whose `a` is NaN does, and is seen."""
    return tl.where(tl.abs(a) < threshold, 0.0, a) != 0.0


def tile_cols(*parts: RowPart) -> int:
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
