"""Products of rows with x, and sums of rows times factors, without making any code an integer.

A code that is masked where it stands in its word and read as float32 is a subnormal: `code * 2^(place - 149)`, exactly.
The multiply-add of a GPU takes subnormals as any other numbers (how fast is not measured), so a code costs one logical
operation and one multiply-add. The other factor carries 2^86 / 2^place, and sums are multiplied by 2^63 at the end.
Factors may be as large as 2^41; below 2^-60 they lose bits. Codes are masked in the lower half of a word, or in the
upper half after it is moved down.

Codes of a group have one scale: codes in `_chunk` neighbouring words, at the same of `QS` places a word. Codes that are
numbers themselves (`fp8`, `e5m2`, `mxfp4`) are multiplied as `unpack_places` returns them, and have no zeros. A level
of a trellis is treated as a code that stands first in its word, with one zero for all.

`load_tile` decodes for many hidden states (`halves`): some rows by some columns of a part, in the order of columns. A
tile is never wider than a group, so that a row's codes in it have one scale.
"""

import triton
import triton.language as tl

from moe_pack.runtime.gpu.kernels.rows import (
    AFFINE,
    FACTORS,
    TRELLIS,
    UNITS,
    ZERO,
    RowPart,
    columns,
    has_scales,
    is_word,
    load_bias,
    load_scales,
    load_trellis,
    load_words,
    load_x,
    look_up,
    places,
    plane_bits,
    plane_words,
    store_y,
    unpack_places,
)

_LIFT = tl.constexpr(2.0**86)  # the other factor is multiplied by it
_DROP = tl.constexpr(2.0**63)  # sums are multiplied by it: 2^149 / 2^86


@triton.constexpr_function
def has_two_planes(part: RowPart) -> bool:
    """Whether a part's codes have 3 bits, and so lie in two planes."""
    part = RowPart(*part)
    return part.kind == AFFINE.value and part.bits == 3


@triton.constexpr_function
def _are_lifted(part: RowPart) -> bool:
    """Whether codes are multiplied as subnormals and have zeros."""
    part = RowPart(*part)
    return part.kind in (AFFINE.value, TRELLIS.value)


@triton.constexpr_function
def _chunk(part: RowPart, plane: int) -> int:
    """Returns how many neighbouring words have one scale and are loaded together; 64 codes at most."""
    part = RowPart(*part)
    return 1 if plane else 2 if part.bits < 4 else 4


@triton.constexpr_function
def _factor(part: RowPart, plane: int) -> float:
    """Returns the factor for sums of products with `_product_codes` codes."""
    part = RowPart(*part)
    return float(
        FACTORS.value[plane] * _DROP.value if part.kind in (AFFINE.value, TRELLIS.value) else UNITS.value[part.kind]
    )


@triton.constexpr_function
def _scales(part: RowPart, bits: int) -> int:
    """Returns how many scales the codes of a word have."""
    part = RowPart(*part)
    return 8 // bits if part.group % 64 else 1


@triton.jit
def _masked(words, BITS: tl.constexpr):
    """Returns codes where they stand, as subnormals: float32 [R, SQ, NW] for words [R, 1, NW]."""
    sq = tl.arange(0, 32 // BITS)[None, :, None]
    halves = words >> ((sq % 4) // 2 * 16).to(tl.uint32)
    MASK: tl.constexpr = 2**BITS - 1
    masks = tl.full([1, 32 // BITS, 1], MASK, tl.uint32) << (sq % 2 * 8 + sq // 4 * BITS).to(tl.uint32)
    return (halves & masks).to(tl.float32, bitcast=True)


@triton.jit
def _unpack(codes, lookup_ptr, PART: tl.constexpr):
    """Returns codes or values of the first plane as `unpack_places` does: float32 [R, SQ, NW] for [R, 1, NW] words."""
    if PART.kind == TRELLIS:
        levels = look_up(lookup_ptr, codes, tl.arange(0, 8), 0, PART, True)
        values = (levels.to(tl.int32) - ZERO).to(tl.float32)
    else:
        values = unpack_places(codes[0], tl.arange(0, places(PART, 0))[None, :, None], PART, 0)
    return values


@triton.jit
def _product_codes(codes, lookup_ptr, PART: tl.constexpr, PLANE: tl.constexpr):
    """Returns codes as products take them: float32 [R, SQ, NW] for `load_part`'s."""
    if PART.kind == AFFINE:
        values = _masked(codes[PLANE], plane_bits(PART, PLANE))
    elif PART.kind == TRELLIS:
        values = look_up(lookup_ptr, codes, tl.arange(0, 8), 0, PART, True).to(tl.float32, bitcast=True)
    else:
        values = _unpack(codes, lookup_ptr, PART)
    return values


@triton.jit
def _unplaced(PART: tl.constexpr, PLANE: tl.constexpr):
    """Returns 2^-place of each code in its half word: float32 [SQ]."""
    sq = tl.arange(0, places(PART, PLANE))
    place = sq * 0 if PART.kind == TRELLIS else sq % 2 * 8 + sq // 4 * plane_bits(PART, PLANE)
    return ((127 - place) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _load_chunk_scales(arena_ptr, units, live, PART: tl.constexpr, PLANE: tl.constexpr):
    """Loads scales and zeros of chunks: float32 [R, QS, NC]."""
    BITS: tl.constexpr = plane_bits(PART, PLANE)
    QS: tl.constexpr = _scales(PART, BITS)
    first = tl.arange(0, plane_words(PART, PLANE) // _chunk(PART, PLANE))[None, :] * _chunk(PART, PLANE)
    column = (first // (2 * BITS)) * 64 + first % (2 * BITS) * 4 + tl.arange(0, QS)[:, None] * (8 * BITS)
    mask = live[:, None, None] & (first < PART.num_cols * BITS // 32)[None, :, :]
    return load_scales(arena_ptr, units[:, None, None], (column // PART.group)[None, :, :], mask, PART)


@triton.jit
def _spread(each, PART: tl.constexpr, PLANE: tl.constexpr):
    """Repeats values of chunks [R, QS, NC] for all their codes: [R, SQ, NW]."""
    R: tl.constexpr = each.shape[0]
    QS: tl.constexpr = each.shape[1]
    CHUNK: tl.constexpr = _chunk(PART, PLANE)
    SQ: tl.constexpr = places(PART, PLANE)
    NW: tl.constexpr = plane_words(PART, PLANE)
    wide = tl.broadcast_to(each[:, :, None, :, None], [R, QS, SQ // QS, NW // CHUNK, CHUNK])
    return tl.reshape(wide, [R, SQ, NW])


@triton.jit
def _chunk_sums(values, QS: tl.constexpr, CHUNK: tl.constexpr):
    """Returns the sums over each chunk's codes: [R, QS, NC] of [R, SQ, NW]."""
    R: tl.constexpr = values.shape[0]
    SQ: tl.constexpr = values.shape[1]
    NW: tl.constexpr = values.shape[2]
    sums = tl.sum(tl.reshape(values, [R, QS, SQ // QS, NW]), 2)  # first within a thread
    return tl.sum(tl.reshape(sums, [R, QS, NW // CHUNK, CHUNK]), 3)


@triton.jit
def load_part(arena_ptr, units, live, PART: tl.constexpr):
    """Loads the codes of some rows: a tuple of their words by plane, for a trellis what `load_trellis` does."""
    if PART.kind == TRELLIS:
        block = tl.arange(0, plane_words(PART, 0) // 4)
        mask = live[:, None] & (block < PART.num_cols // 64)[None, :]
        codes = load_trellis(arena_ptr, units, block, mask, PART)
    elif has_two_planes(PART):
        codes = (load_words(arena_ptr, units, live, PART, 0), load_words(arena_ptr, units, live, PART, 1))
    else:
        codes = (load_words(arena_ptr, units, live, PART, 0),)
    return codes


@triton.jit
def load_x_part(x_ptr, PART: tl.constexpr):
    """Loads a hidden state as `dot_part` takes it: for the first plane, its sums by chunk, for the second plane."""
    x = load_x(x_ptr, PART, 0)
    x_high = x
    if has_two_planes(PART):
        x_high = load_x(x_ptr, PART, 1)
    return _lifted(x, x_high, PART)


@triton.jit
def load_normed_part(x_ptr, norm, PART: tl.constexpr):
    """Loads a hidden state, normed by a `Norm`, as `dot_part` takes it, and the factor for its products.

    The factor is that of an rms norm, so that no product waits for it; it is 1 for a layer norm.
    """
    x, weight = load_x(x_ptr, PART, 0), load_x(norm.weight, PART, 0)
    x_high = x
    if has_two_planes(PART):
        x_high = load_x(x_ptr, PART, 1)
    factor = 1.0
    if norm.bias is not None:
        mean = tl.sum(tl.sum(x, 0), 0) / PART.num_cols
        centered = tl.where(is_word(PART, 0)[None, :], x - mean, 0.0)
        scale = tl.rsqrt(tl.sum(tl.sum(centered * centered, 0), 0) / PART.num_cols + norm.eps)
        x = centered * scale * weight + load_x(norm.bias, PART, 0)
        if has_two_planes(PART):
            weight, bias = load_x(norm.weight, PART, 1), load_x(norm.bias, PART, 1)
            x_high = (x_high - mean) * scale * weight + bias
    else:
        factor = tl.rsqrt(tl.sum(tl.sum(x * x, 0), 0) / PART.num_cols + norm.eps)
        x *= weight
        if has_two_planes(PART):
            x_high *= load_x(norm.weight, PART, 1)
    return _lifted(x, x_high, PART), factor


@triton.jit
def _lifted(x, x_high, PART: tl.constexpr):
    """Returns a hidden state in the order of a part's codes as `dot_part` takes it."""
    x_sums = x
    if _are_lifted(PART):
        x_sums = _chunk_sums(x[None, :, :], _scales(PART, plane_bits(PART, 0)), _chunk(PART, 0))
        x = x * (_unplaced(PART, 0) * _LIFT)[:, None]
        if has_two_planes(PART):
            x_high = x_high * (_unplaced(PART, 1) * _LIFT)[:, None]
    return x, x_sums, x_high


@triton.jit
def load_part_scales(arena_ptr, units, live, PART: tl.constexpr):
    """Loads all that `dot_loaded` and `add_loaded` need of some rows in addition to their codes.

    Returns:  scales and zeros of the first plane's chunks, float32 [R, QS, NC], scales of the second plane's chunks,
              and biases, float32 [R]. A part without one of them gets another one, which is not used.
    """
    bias = tl.zeros([units.shape[0]], tl.float32)
    if PART.bias >= 0:
        bias = load_bias(arena_ptr, units, live, PART)
    scale, zero, high = bias, bias, bias
    if has_scales(PART):
        scale, zero = _load_chunk_scales(arena_ptr, units, live, PART, 0)
        high = scale
        if has_two_planes(PART):
            high, _ = _load_chunk_scales(arena_ptr, units, live, PART, 1)
    return scale, zero, high, bias


@triton.jit
def load_rows(arena_ptr, units, live, PART: tl.constexpr):
    """Loads what `dot_loaded` and `add_loaded` take: a tuple of `load_part`'s codes and `load_part_scales`' scales."""
    return load_part(arena_ptr, units, live, PART), load_part_scales(arena_ptr, units, live, PART)


@triton.jit
def dot_part(arena_ptr, units, live, codes, x, lookup_ptr, PART: tl.constexpr):
    """Returns rows times x, plus their bias: float32 [R], zeros for rows that are not live.

    Args:    codes: from `load_part`.   x: from `load_x_part`.
    """
    scales = load_part_scales(arena_ptr, units, live, PART)
    return dot_loaded(codes, scales, x, lookup_ptr, PART)


@triton.jit
def dot_loaded(codes, scales, x, lookup_ptr, PART: tl.constexpr):
    """Returns the result of `dot_part` from `scales` of `load_part_scales`."""
    scale, zero, high, bias = scales
    x_low, x_sums, x_high = x
    if has_scales(PART):
        QS: tl.constexpr = _scales(PART, plane_bits(PART, 0))
        products = _product_codes(codes, lookup_ptr, PART, 0) * x_low[None, :, :]
        sums = _chunk_sums(products, QS, _chunk(PART, 0)) * _factor(PART, 0)
        if _are_lifted(PART):
            sums -= zero * x_sums
        total = tl.sum(tl.sum(scale * sums, 2), 1)
        if has_two_planes(PART):
            sums = _chunk_sums(_product_codes(codes, lookup_ptr, PART, 1) * x_high[None, :, :], _scales(PART, 1), 1)
            total += tl.sum(tl.sum(high * (sums * _factor(PART, 1)), 2), 1)
    else:
        total = tl.sum(tl.sum(_unpack(codes, lookup_ptr, PART) * x_low[None, :, :], 1), 1)
    if PART.bias >= 0:
        total += bias
    return total


@triton.jit
def zero_part(PART: tl.constexpr, GROUPS: tl.constexpr = 1):
    """Returns zero sums for `add_part`: of the first plane's codes, of the zeros, of the second plane's codes.

    With several GROUPS, row `r` of a tile is added to the sums of group `r % GROUPS`: where a program has more threads
    than a row has words, the threads add what they have loaded, and `store_part` adds the groups.
    """
    NW: tl.constexpr = plane_words(PART, 0)
    y = tl.zeros([GROUPS, places(PART, 0), NW], tl.float32)
    less = tl.zeros([1, 1, 1], tl.float32)
    y_high = less
    if _are_lifted(PART):
        less = tl.zeros([GROUPS, _scales(PART, plane_bits(PART, 0)), NW // _chunk(PART, 0)], tl.float32)
        if has_two_planes(PART):
            y_high = tl.zeros([GROUPS, 32, NW // 2], tl.float32)
    return y, less, y_high


@triton.jit
def add_part(sums, arena_ptr, units, live, codes, h, lookup_ptr, PART: tl.constexpr):
    """Returns the sums plus `h` [R] times rows."""
    scales = load_part_scales(arena_ptr, units, live, PART)
    return add_loaded(sums, codes, scales, h, lookup_ptr, PART)


@triton.jit
def add_loaded(sums, codes, scales, h, lookup_ptr, PART: tl.constexpr):
    """Returns the same as `add_part`, with `scales` from `load_part_scales`."""
    y, less, y_high = sums
    scale, zero, high, _ = scales
    GROUPS: tl.constexpr = y.shape[0]
    if has_scales(PART):
        factors = scale * h[:, None, None]
        if _are_lifted(PART):
            less += _group_sums(factors * zero, GROUPS)
            factors *= _LIFT
        y += _group_sums(_product_codes(codes, lookup_ptr, PART, 0) * _spread(factors, PART, 0), GROUPS)
        if has_two_planes(PART):
            factors = high * h[:, None, None] * _LIFT
            products = _product_codes(codes, lookup_ptr, PART, 1) * _spread(factors, PART, 1)
            y_high += _group_sums(products, GROUPS)
    else:
        y += _group_sums(_unpack(codes, lookup_ptr, PART) * h[:, None, None], GROUPS)
    return y, less, y_high


@triton.jit
def _group_sums(values, GROUPS: tl.constexpr):
    """Returns the sums over the rows of each group: [GROUPS, A, B] of [R, A, B]."""
    R: tl.constexpr = values.shape[0]
    return tl.sum(tl.reshape(values, [R // GROUPS, GROUPS, values.shape[1], values.shape[2]]), 0)


@triton.jit
def store_part(y_ptr, sums, PART: tl.constexpr):
    """Writes sums to y_ptr [d], each to its column; the second of two planes adds to what the first wrote."""
    y, less, y_high = sums
    y = tl.sum(y, 0)
    if _are_lifted(PART):
        y = y * (_unplaced(PART, 0) * _factor(PART, 0))[:, None]
        y -= tl.reshape(_spread(tl.sum(less, 0)[None, :, :], PART, 0), y.shape)
    elif has_scales(PART):
        y *= _factor(PART, 0)
    store_y(y_ptr, y, PART, 0)
    if has_two_planes(PART):
        tl.debug_barrier()  # other threads wrote those columns
        y_high = tl.sum(y_high, 0) * (_unplaced(PART, 1) * _factor(PART, 1))[:, None]
        y_high += tl.load(y_ptr + columns(PART, 1), mask=is_word(PART, 1)[None, :], other=0.0)
        store_y(y_ptr, y_high, PART, 1)


@triton.jit
def runs(a, threshold):
    """Returns which neurons run; one whose activation `a` is NaN runs, so that the NaN reaches the output."""
    return tl.where(tl.abs(a) < threshold, 0.0, a) != 0.0


def tile_cols(*parts: RowPart) -> int:
    """Returns how many columns tiles of these parts have: a block of codes, or the smallest group."""
    return min(64, *(part.group for part in parts if part.group), 64)


@triton.jit
def load_tile(arena_ptr, units, live, tile, lookup_ptr, PART: tl.constexpr, COLS: tl.constexpr):
    """Loads codes or values as `unpack_places` returns them: float32 [R, COLS].

    They are zeros past the row and for rows that are not live. A block is `8 / BITS` runs of columns; each run has its
    own bits of every byte, and a word has one code of a run in each of its 4 bytes.
    """
    R: tl.constexpr = units.shape[0]
    BITS: tl.constexpr = plane_bits(PART, 0)
    if has_scales(PART):
        RUN: tl.constexpr = 8 * BITS
        NUM_RUNS: tl.constexpr = max(COLS // RUN, 1)
        NW: tl.constexpr = COLS // NUM_RUNS // 4
        block, first = tile // (64 // COLS), tile % (64 // COLS) * COLS
        w = first % RUN // 4 + tl.arange(0, NW)
        sq = (first // RUN * 4 + tl.arange(0, 4 * NUM_RUNS))[None, :, None]  # (run, byte)
        mask = (live & (block < PART.num_cols // 64))[:, None]
        if PART.kind == TRELLIS:
            codes = load_trellis(arena_ptr, units, block + tl.zeros([1], tl.int32), mask, PART)
            if COLS == 64:
                values = _unpack(codes, lookup_ptr, PART)
            else:  # runs 0 and 1 are the steps' first weights: of even steps, of odd steps
                step = first // RUN % 2 * 4 + tl.arange(0, 4 * NUM_RUNS)
                levels = look_up(lookup_ptr, codes, step, first // 32, PART, False)
                values = (levels.to(tl.int32) - ZERO).to(tl.float32)
        elif PART.bits == 3:
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
        mask = live[:, None] & (w < PART.num_cols // SQ)[None, :]
        values = _unpack((_read_words(arena_ptr, units, w, mask, PART)[:, None, :],), lookup_ptr, PART)
        values = tl.reshape(values, [R, 1, SQ, COLS // SQ])
    return tl.reshape(tl.permute(values, [0, 1, 3, 2]), [R, COLS])


@triton.jit
def _read_words(arena_ptr, units, at, mask, PART: tl.constexpr):
    """Loads words of some rows' part by their places in it: uint32 [R, NW]."""
    words_ptr = arena_ptr.to(tl.pointer_type(tl.uint32)) + (units * 4)[:, None] + PART.offset // 4
    return tl.load(words_ptr + at[None, :], mask=mask, other=0)
