"""How kernels read a row of a pack: words of 32 bits whose codes, shifted and masked, stand in known columns.

A part is given to a kernel as a tuple of constants (`Part`). Its words are read as they lie, 128 bits a thread, and its
codes are never put in order: the other factor of a product is read in theirs. Word `w` holds `SQ` codes; code `sq` of
it belongs to column `columns(...)[sq, w]`. Codes of 3 bits lie in two planes, of 2 bits and of 1, read as two parts.

A tile of `R` rows is [R, SQ, NW]: NW is a power of two, words beyond the row are masked. Rows are found by their offset
in an arena in units of 16 bytes, so that the compiler knows them aligned.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from moe_pack.formats import PartFormat, RowLayout

AFFINE, BF16, F16, F32 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
FACTORS = tl.constexpr((1.0, 4.0))  # what a plane's codes count
_KINDS = {"BF16": BF16.value, "F16": F16.value, "F32": F32.value}


class Part(NamedTuple):
    """A part of a row, as kernels take it: all constants.

    `kind`: codes with scales, or 16- or 32-bit values.   `bits`: of a code or value.   `group`: columns of a scale (0
    where there are none).   `scale_bits`: 16: float16; 8: bytes times one float16 a row.   `offset`: in the row, bytes.
    `num_cols`: d.   `bias`: where its float32 lies in the row, in bytes; -1: it has none.
    """

    kind: int
    bits: int
    group: int
    scale_bits: int
    offset: int
    num_cols: int
    bias: int

    @property
    def num_planes(self) -> int:
        """In how many planes its codes lie."""
        return 2 if self.kind == AFFINE.value and self.bits == 3 else 1

    @property
    def num_words(self) -> int:
        """Words of the first plane, rounded up to a power of two: NW of a tile that holds a whole row."""
        bits = 2 if self.num_planes == 2 else self.bits
        return int(triton.next_power_of_2(self.num_cols * bits // 32))


def part_of(rows: RowLayout, name: str) -> Part:
    """A part of rows in the row layout."""
    part = rows.part(name)
    assert part is not None, f"rows have no part {name}"
    form: PartFormat = part.format
    bias = part.offset + part.num_bytes if part.has_bias else -1
    if form.codec == "bf16":
        return Part(BF16.value, 16, 0, 0, part.offset, rows.num_cols, bias)
    group = form.group or rows.num_cols
    return Part(AFFINE.value, form.width, group, form.scale_bits, part.offset, rows.num_cols, bias)


def stored_part(dtype: str, num_cols: int) -> Part:
    """Rows of plain values, by their dtype's name in safetensors: BF16, F16 or F32."""
    return Part(_KINDS[dtype], 32 if dtype == "F32" else 16, 0, 0, 0, num_cols, -1)


@triton.constexpr_function
def plane_bits(part: Part, plane: int) -> int:
    """Bits of a code of this plane: 3-bit codes are 2 bits in plane 0 and 1 in plane 1."""
    return part[1] if part[0] or part[1] != 3 else 1 if plane else 2


@triton.jit
def columns(PART: tl.constexpr, PLANE: tl.constexpr, NW: tl.constexpr):
    """The column of each code of each word, int32 [SQ, NW]; past the row for words that are not the row's."""
    BITS: tl.constexpr = plane_bits(PART, PLANE)
    SQ: tl.constexpr = 32 // BITS
    sq = tl.arange(0, SQ)[:, None]
    w = tl.arange(0, NW)[None, :]
    if PART[0] == AFFINE:
        # A block of 64 codes is 2 BITS words; byte j holds codes j, j + 8 BITS, ...
        WORDS: tl.constexpr = 2 * BITS
        found = (w // WORDS) * 64 + (sq // 4) * (8 * BITS) + (w % WORDS) * 4 + sq % 4
    else:
        found = w * SQ + sq
    return found


@triton.jit
def word_places(PART: tl.constexpr, PLANE: tl.constexpr, NW: tl.constexpr):
    """Where each word lies, in words from the part's first: int32 [NW]."""
    w = tl.arange(0, NW)
    if PART[0] == AFFINE and PART[1] == 3:
        WORDS: tl.constexpr = 2 if PLANE else 4
        FIRST: tl.constexpr = 4 if PLANE else 0
        # Of blocks of 24 bytes 64 bits can be loaded at once, and as many columns of the other plane.
        w = tl.max_contiguous((w // WORDS) * 6 + FIRST + w % WORDS, 1 if PLANE else 2)
    elif PART[1] == 1:
        # 128 bits a thread were 128 columns, for which a thread has no registers: 64 bits are loaded.
        w = tl.max_contiguous(w, 2)
    return w


@triton.jit
def is_word(PART: tl.constexpr, PLANE: tl.constexpr, NW: tl.constexpr):
    """Which words are the row's: bool [NW]."""
    return tl.arange(0, NW) < PART[5] * plane_bits(PART, PLANE) // 32


@triton.jit
def load_words(arena_ptr, units, live, PART: tl.constexpr, PLANE: tl.constexpr, NW: tl.constexpr):
    """The words of some rows, uint32 [R, NW]; zeros for rows that are not live.

    Args:    units: int64 [R], rows' offsets in units of 16 bytes.
    """
    OFFSET: tl.constexpr = PART[4]
    mask = live[:, None] & is_word(PART, PLANE, NW)[None, :]
    places = word_places(PART, PLANE, NW)[None, :]
    if OFFSET % 4 == 0:
        words_ptr = arena_ptr.to(tl.pointer_type(tl.uint32))
        words = tl.load(words_ptr + (units * 4)[:, None] + OFFSET // 4 + places, mask=mask, other=0)
    else:  # after byte scales of an odd number of groups: the part begins between words
        halves_ptr = arena_ptr.to(tl.pointer_type(tl.uint16)) + (units * 8)[:, None] + OFFSET // 2 + 2 * places
        low = tl.load(halves_ptr, mask=mask, other=0).to(tl.uint32)
        words = low | (tl.load(halves_ptr + 1, mask=mask, other=0).to(tl.uint32) << 16)
    return words


@triton.jit
def unpack(words, PART: tl.constexpr, PLANE: tl.constexpr):
    """Codes as they are, or values: float32 [R, SQ, NW] for words [R, NW]."""
    BITS: tl.constexpr = plane_bits(PART, PLANE)
    SQ: tl.constexpr = 32 // BITS
    words = words[:, None, :]
    sq = tl.arange(0, SQ)[None, :, None]
    if PART[0] == AFFINE:
        MASK: tl.constexpr = 2**BITS - 1
        shift = ((sq % 4) * 8 + (sq // 4) * BITS).to(tl.uint32)
        values = ((words >> shift) & MASK).to(tl.int32).to(tl.float32)
    elif PART[0] == F32:
        values = words.to(tl.float32, bitcast=True)
    elif PART[0] == BF16:
        values = ((words >> (sq * 16).to(tl.uint32)) << 16).to(tl.float32, bitcast=True)
    else:
        halves = ((words >> (sq * 16).to(tl.uint32)) & 0xFFFF).to(tl.uint16)
        values = halves.to(tl.float16, bitcast=True).to(tl.float32)
    return values


@triton.jit
def load_scales(arena_ptr, units, groups, mask, PART: tl.constexpr):
    """Scales and zeros float32, for groups of rows: `units`, `groups` and `mask` of one shape, after broadcasting."""
    D: tl.constexpr = PART[5]
    NUM_GROUPS: tl.constexpr = D // PART[2]
    BEGIN: tl.constexpr = PART[4] + D * PART[1] // 8
    halves_ptr = arena_ptr.to(tl.pointer_type(tl.float16)) + units * 8 + BEGIN // 2
    if PART[3] == 16:
        scale = tl.load(halves_ptr + groups, mask=mask, other=0.0).to(tl.float32)
        zero = tl.load(halves_ptr + groups + NUM_GROUPS, mask=mask, other=0.0).to(tl.float32)
    else:
        bytes_ptr = arena_ptr + units * 16 + BEGIN
        step = tl.load(halves_ptr + groups * 0, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(bytes_ptr + 2 + groups, mask=mask, other=0).to(tl.float32) * step
        # Zeros' multiplier comes after the scales' bytes, where a float16 may begin at any byte.
        low = tl.load(bytes_ptr + 2 + NUM_GROUPS + groups * 0, mask=mask, other=0).to(tl.uint16)
        high = tl.load(bytes_ptr + 3 + NUM_GROUPS + groups * 0, mask=mask, other=0).to(tl.uint16)
        step = (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)
        steps = tl.load(bytes_ptr + 4 + NUM_GROUPS + groups, mask=mask, other=0).to(tl.int8, bitcast=True)
        zero = steps.to(tl.float32) * step
    return scale, zero


@triton.jit
def load_bias(arena_ptr, units, live, PART: tl.constexpr):
    """The biases of some rows, float32 [R]."""
    BIAS: tl.constexpr = PART[6]
    halves_ptr = arena_ptr.to(tl.pointer_type(tl.uint16)) + units * 8 + BIAS // 2
    low = tl.load(halves_ptr, mask=live, other=0).to(tl.uint32)
    high = tl.load(halves_ptr + 1, mask=live, other=0).to(tl.uint32)
    return (low | (high << 16)).to(tl.float32, bitcast=True)


@triton.jit
def load_x(x_ptr, PART: tl.constexpr, PLANE: tl.constexpr, NW: tl.constexpr):
    """A hidden state in the order of a part's codes: float32 [SQ, NW], zeros past the row."""
    return tl.load(x_ptr + columns(PART, PLANE, NW), mask=is_word(PART, PLANE, NW)[None, :], other=0.0)


@triton.jit
def store_y(y_ptr, y, PART: tl.constexpr, PLANE: tl.constexpr, NW: tl.constexpr):
    """Writes y [SQ, NW] to y_ptr [d], each value to its column."""
    tl.store(y_ptr + columns(PART, PLANE, NW), y, mask=is_word(PART, PLANE, NW)[None, :])
