"""How kernels read a trellis: words of 32 bits of its stream, out of which windows of 7 are cut and looked up.

Word `w` of a row ends with the last bit of columns `SQ w` to `SQ w + SQ - 1`, and so holds their windows whole: `SQ` is
8; 16 of width 3; 4 of width 8. Words overlap, and begin at whatever bit: each is put together from two that lie in the
row. What lies before the stream's first bit is taken for zeros.

A window's value is a byte of a table, kept with 128 added: 128 bytes are a line of a cache, which a warp reads at once
whichever bytes its threads want. Where a compiler sees no addresses side by side, it lays the first dimension of a load
among threads: words come first in loads, so that a thread has all columns of its words.

How kernels read a row of a pack: words of 32 bits whose codes, shifted and masked, stand in known columns.

A part is given to a kernel as a tuple of constants (`RowPart`). Its words are read as they lie, 128 bits a thread, and
its codes are never put in order: the other factor of a product is read in their order. Word `w` has `SQ` codes; code
`sq` of it belongs to column `columns(...)[sq, w]`. Codes of 3 bits lie in two planes, of 2 bits and of 1, read as two parts.
Codes that are floating-point numbers of 8 or 4 bits become float16 by shifts and masks, two at a time, which any GPU
makes float32: no hardware for float8 is needed. E4M3 and E2M1 keep their exponents' bits there, so that they come out
smaller by a power of two, which `UNITS` gives back. Values of a trellis are looked up (`trellis`), for which what reads
codes takes `lookup_ptr`; it is None where no part is a trellis.

A tile of `R` rows is [R, SQ, NW]: NW is a power of two, words beyond the row are masked. Rows are found by their offset
in an arena in units of 16 bytes, so that the compiler knows them aligned.

How large a tile a program works on: rows at a time, and warps, for parts of rows. Tuned, not part of any answer.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_pack.formats import PartFormat, RowLayout
from moe_pack.formats.codecs import trellis_values
from moe_pack.formats.plan import TRELLIS_WIDTHS

ZERO = tl.constexpr(128)  # what is added to a table's values
_FIRST = tl.constexpr(TRELLIS_WIDTHS[0])


@cache
def lookup(device: torch.device) -> Tensor:
    """All tables, with `ZERO` added: u8 [widths, 2, 128], of even and of odd columns; made once a device."""
    tables = torch.stack([trellis_values(width) for width in TRELLIS_WIDTHS])
    return tables.add_(ZERO.value).to(torch.uint8).to(device)


@triton.constexpr_function
def codes_of_word(width: int) -> int:
    """SQ: of how many columns a word holds the windows."""
    return 16 if width == 3 else 4 if width == 8 else 8


@triton.jit
def load_stream(arena_ptr, units, w, mask, PART: tl.constexpr):
    """Words `w` [NW] of rows' streams, uint32 [R, NW].

    Args:    units: int64 [R], rows' offsets in units of 16 bytes.   mask: [R, NW].
    """
    units, w, mask = units[None, :], w[:, None], tl.trans(mask)
    OFFSET: tl.constexpr = PART[4]
    BITS: tl.constexpr = codes_of_word(PART[1]) * PART[1] // 2  # that a word has of its own
    begin = OFFSET * 8 + (w + 1) * BITS - 32
    place = begin >> 5
    words_ptr = arena_ptr.to(tl.pointer_type(tl.uint32)) + units * 4 + place
    low = tl.load(words_ptr, mask=mask & (place >= 0) if OFFSET < 4 else mask, other=0)
    high = tl.load(words_ptr + 1, mask=mask, other=0)  # of the row too: after a stream come scales
    shift = (begin & 31).to(tl.uint32)
    words = (low >> shift) | ((high << 1) << (31 - shift))
    if OFFSET > 0:
        OWN: tl.constexpr = 2**32 - 2 ** (32 - BITS)
        words = tl.where(w == 0, words & OWN, words)
    return tl.trans(words)


@triton.jit
def look_up(lookup_ptr, words, PART: tl.constexpr):
    """The values of all columns of words [R, NW], with `ZERO` added: uint32 [R, SQ, NW].

    Args:    lookup_ptr: to `lookup`.
    """
    WIDTH: tl.constexpr = PART[1]
    BITS: tl.constexpr = codes_of_word(WIDTH) * WIDTH // 2
    sq = tl.arange(0, codes_of_word(WIDTH))[None, :, None]
    end = sq // 2 * WIDTH + tl.where(sq % 2 == 0, WIDTH // 2, WIDTH)
    windows = (tl.trans(words)[:, None, :] >> (end + (32 - BITS - 7)).to(tl.uint32)) & 127
    table_ptr = lookup_ptr + (WIDTH - _FIRST) * 256
    if WIDTH % 2:
        table_ptr += sq % 2 * 128
    found = tl.load(table_ptr + windows, eviction_policy="evict_last")  # [NW, SQ, R]
    return tl.permute(found, [2, 1, 0]).to(tl.uint32)


AFFINE, BF16, F16, F32, FP8, E5M2, MXFP4, TRELLIS = (tl.constexpr(kind) for kind in range(8))
FACTORS = tl.constexpr((1.0, 4.0))  # what a plane's codes count
UNITS = tl.constexpr(
    (1.0, 1.0, 1.0, 1.0, 2.0**8, 1.0, 2.0**14, 1.0)
)  # by kind: what 1 in the values of `unpack` stands for
_KINDS = {"BF16": BF16.value, "F16": F16.value, "F32": F32.value}
_CODECS = {"affine": AFFINE.value, "fp8": FP8.value, "e5m2": E5M2.value, "mxfp4": MXFP4.value, "trellis": TRELLIS.value}


class RowPart(NamedTuple):
    """A part of a row, as kernels take it: all constants.

    `kind`: codes with scales, or 16- or 32-bit values.   `bits`: of a code or value; of two codes of a trellis.
    `group`: columns of a scale (0 where there are none).   `scale_bits`: of affine codes and a trellis 16: float16; 8:
    bytes times one float16 a row. Of others 32: float32; 8: E8M0.   `offset`: in the row, bytes.
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
        return int(triton.next_power_of_2(self.num_cols // self.codes_of_word))

    @property
    def codes_of_word(self) -> int:
        """SQ of its first plane."""
        return int(places(self, 0))


def part_of(rows: RowLayout, name: str) -> RowPart:
    """A part of rows in the row layout."""
    part = rows.part(name)
    assert part is not None, f"rows have no part {name}"
    form: PartFormat = part.format
    bias = part.offset + part.num_bytes if part.has_bias else -1
    if form.codec == "bf16":
        return RowPart(BF16.value, 16, 0, 0, part.offset, rows.num_cols, bias)
    group = form.group or rows.num_cols
    return RowPart(_CODECS[form.codec], form.width, group, form.scale_bits, part.offset, rows.num_cols, bias)


def lookup_for(device: torch.device, *parts: RowPart | None) -> Tensor | None:
    """What kernels look the values of these parts up in; None where none is a trellis."""
    return lookup(device) if any(part is not None and part.kind == TRELLIS.value for part in parts) else None


def stored_part(dtype: str, num_cols: int) -> RowPart:
    """Rows of plain values, by their dtype's name in safetensors: BF16, F16 or F32."""
    return RowPart(_KINDS[dtype], 32 if dtype == "F32" else 16, 0, 0, 0, num_cols, -1)


@triton.constexpr_function
def plane_bits(part: RowPart, plane: int) -> int:
    """Bits of a code of this plane: 3-bit codes are 2 bits in plane 0 and 1 in plane 1."""
    return part[1] if part[0] or part[1] != 3 else 1 if plane else 2


@triton.constexpr_function
def places(part: RowPart, plane: int) -> int:
    """SQ: how many codes or values of this plane a word holds."""
    return int(codes_of_word(part[1]) if part[0] == 7 else 32 // plane_bits(part, plane))


@triton.constexpr_function
def has_scales(part: RowPart) -> bool:
    """Whether a part is of codes with scales."""
    return part[2] > 0


@triton.jit
def columns(PART: tl.constexpr, PLANE: tl.constexpr, NW: tl.constexpr):
    """The column of each code of each word, int32 [SQ, NW]; past the row for words that are not the row's."""
    BITS: tl.constexpr = plane_bits(PART, PLANE)
    SQ: tl.constexpr = places(PART, PLANE)
    sq = tl.arange(0, SQ)[:, None]
    w = tl.arange(0, NW)[None, :]
    if has_scales(PART) and PART[0] != TRELLIS:
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
    return tl.arange(0, NW) < PART[5] // places(PART, PLANE)


@triton.jit
def load_words(arena_ptr, units, live, PART: tl.constexpr, PLANE: tl.constexpr, NW: tl.constexpr):
    """The words of some rows, uint32 [R, NW]; zeros for rows that are not live.

    Args:    units: int64 [R], rows' offsets in units of 16 bytes.
    """
    OFFSET: tl.constexpr = PART[4]
    mask = live[:, None] & is_word(PART, PLANE, NW)[None, :]
    at = word_places(PART, PLANE, NW)[None, :]
    if PART[0] == TRELLIS:
        words = load_stream(arena_ptr, units, tl.arange(0, NW), mask, PART)
    elif OFFSET % 4 == 0:
        words_ptr = arena_ptr.to(tl.pointer_type(tl.uint32))
        words = tl.load(words_ptr + (units * 4)[:, None] + OFFSET // 4 + at, mask=mask, other=0)
    else:
        words = load_between(arena_ptr, units[:, None], at, mask, OFFSET)
    return words


@triton.jit
def load_between(arena_ptr, units, at, mask, BEGIN: tl.constexpr):
    """Words of rows that begin between words, at byte BEGIN, as after an odd number of scales of one byte: uint32.

    Args:    units, at, mask: of one shape, after broadcasting.
    """
    if BEGIN % 2 == 0:
        halves_ptr = arena_ptr.to(tl.pointer_type(tl.uint16)) + units * 8 + BEGIN // 2 + 2 * at
        words = tl.load(halves_ptr, mask=mask, other=0).to(tl.uint32)
        words |= tl.load(halves_ptr + 1, mask=mask, other=0).to(tl.uint32) << 16
    else:
        bytes_ptr = arena_ptr + units * 16 + BEGIN + 4 * at
        words = tl.load(bytes_ptr, mask=mask, other=0).to(tl.uint32)
        for place in tl.static_range(1, 4):
            words |= tl.load(bytes_ptr + place, mask=mask, other=0).to(tl.uint32) << (8 * place)
    return words


@triton.jit
def unpack(words, lookup_ptr, PART: tl.constexpr, PLANE: tl.constexpr):
    """Codes as they are, or values by their `UNITS`: float32 [R, SQ, NW] for words [R, NW]."""
    if PART[0] == TRELLIS:
        values = (look_up(lookup_ptr, words, PART).to(tl.int32) - ZERO).to(tl.float32)
    else:
        sq = tl.arange(0, places(PART, PLANE))[None, :, None]
        values = unpack_places(words[:, None, :], sq, PART, PLANE)
    return values


@triton.jit
def unpack_places(words, sq, PART: tl.constexpr, PLANE: tl.constexpr):
    """The same of other codes than a trellis's for some places `sq` of words; both of one shape, after broadcasting."""
    BITS: tl.constexpr = plane_bits(PART, PLANE)
    if PART[0] == AFFINE:
        MASK: tl.constexpr = 2**BITS - 1
        shift = ((sq % 4) * 8 + (sq // 4) * BITS).to(tl.uint32)
        values = ((words >> shift) & MASK).to(tl.int32).to(tl.float32)
    elif PART[0] == F32:
        values = words.to(tl.float32, bitcast=True)
    elif PART[0] == BF16:
        values = ((words >> (sq * 16).to(tl.uint32)) << 16).to(tl.float32, bitcast=True)
    elif PART[0] == F16:
        values = _half(words, sq)
    elif PART[0] == MXFP4:
        # Of the four codes of a half word that `sq` names comes first, as sign, exponent and mantissa: 3 bits of 15.
        turned = words << (12 - (sq % 2 * 8 + sq // 4 * 4)).to(tl.uint32)
        values = _half((turned & 0x80008000) | ((turned >> 3) & 0x0E000E00), sq % 4 // 2)
    else:
        to_top = (8 - sq % 2 * 8).to(tl.uint32)  # the byte that `sq` names, to the upper of its half word
        turned = words << to_top
        if PART[0] == E5M2:  # a float16 without its last 8 bits
            values = _half(turned & 0xFF00FF00, sq // 2)
        else:
            # Exponents have one bit less than float16's. All 7 bits set are no number, there and with that bit set too.
            no_number = ((words & 0x7F7F7F7F) + 0x01010101) << to_top
            below = (turned & 0x7F007F00) | (no_number & 0x80008000)
            values = _half((turned & 0x80008000) | ((below >> 1) & 0x7F807F80), sq // 2)
    return values


@triton.jit
def _half(words, place):
    """The lower or the upper float16 of words (`place` 0 or 1), as float32."""
    halves = ((words >> (place * 16).to(tl.uint32)) & 0xFFFF).to(tl.uint16)
    return halves.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_scales(arena_ptr, units, groups, mask, PART: tl.constexpr):
    """Scales and zeros float32, for groups of rows: `units`, `groups` and `mask` of one shape, after broadcasting.

    Codes that have no zeros have their scales twice; the zero of a trellis is that of its tables.
    """
    D: tl.constexpr = PART[5]
    BEGIN: tl.constexpr = PART[4] + D * PART[1] // (16 if PART[0] == TRELLIS else 8)
    if PART[0] != AFFINE and PART[0] != TRELLIS:
        if PART[3] == 32:
            scale = _load_float32(arena_ptr, units, groups, mask, BEGIN)
        else:
            scale = _power_of_two(tl.load(arena_ptr + units * 16 + BEGIN + groups, mask=mask, other=0))
        return scale, scale
    NUM_GROUPS: tl.constexpr = D // PART[2]
    if PART[3] == 16:
        scale = _load_float16(arena_ptr, units, groups, mask, BEGIN)
        if PART[0] == TRELLIS:
            return scale, tl.zeros_like(scale) + ZERO
        zero = _load_float16(arena_ptr, units, groups, mask, BEGIN + 2 * NUM_GROUPS)
    else:
        bytes_ptr = arena_ptr + units * 16 + BEGIN
        step = _load_float16(arena_ptr, units, groups * 0, mask, BEGIN)
        scale = tl.load(bytes_ptr + 2 + groups, mask=mask, other=0).to(tl.float32) * step
        if PART[0] == TRELLIS:
            return scale, tl.zeros_like(scale) + ZERO
        step = _load_float16(arena_ptr, units, groups * 0, mask, BEGIN + 2 + NUM_GROUPS)
        steps = tl.load(bytes_ptr + 4 + NUM_GROUPS + groups, mask=mask, other=0).to(tl.int8, bitcast=True)
        zero = steps.to(tl.float32) * step
    return scale, zero


@triton.jit
def _load_float16(arena_ptr, units, places, mask, BEGIN: tl.constexpr):
    """Numbers of rows as float32: float16 one after the other, from whatever byte on."""
    if BEGIN % 2 == 0:
        halves_ptr = arena_ptr.to(tl.pointer_type(tl.float16)) + units * 8 + BEGIN // 2
        found = tl.load(halves_ptr + places, mask=mask, other=0.0)
    else:
        bytes_ptr = arena_ptr + units * 16 + BEGIN + 2 * places
        low = tl.load(bytes_ptr, mask=mask, other=0).to(tl.uint16)
        high = tl.load(bytes_ptr + 1, mask=mask, other=0).to(tl.uint16)
        found = (low | (high << 8)).to(tl.float16, bitcast=True)
    return found.to(tl.float32)


@triton.jit
def _load_float32(arena_ptr, units, places, mask, BEGIN: tl.constexpr):
    """Numbers of rows: float32 one after the other, from whatever byte on."""
    if BEGIN % 4 == 0:
        floats_ptr = arena_ptr.to(tl.pointer_type(tl.float32)) + units * 4 + BEGIN // 4
        found = tl.load(floats_ptr + places, mask=mask, other=0.0)
    else:
        found = load_between(arena_ptr, units, places, mask, BEGIN).to(tl.float32, bitcast=True)
    return found


@triton.jit
def _power_of_two(exponents):
    """What E8M0 bytes stand for; 0 is a subnormal, and 255 no number: both have the highest bit of a mantissa."""
    wide = exponents.to(tl.int32)
    bits = (wide << 23) | tl.where((wide == 0) | (wide == 255), 1 << 22, 0)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_bias(arena_ptr, units, live, PART: tl.constexpr):
    """The biases of some rows, float32 [R]."""
    return _load_float32(arena_ptr, units, units * 0, live, PART[6])


@triton.jit
def load_x(x_ptr, PART: tl.constexpr, PLANE: tl.constexpr, NW: tl.constexpr):
    """A hidden state in the order of a part's codes: float32 [SQ, NW], zeros past the row."""
    return tl.load(x_ptr + columns(PART, PLANE, NW), mask=is_word(PART, PLANE, NW)[None, :], other=0.0)


@triton.jit
def store_y(y_ptr, y, PART: tl.constexpr, PLANE: tl.constexpr, NW: tl.constexpr):
    """Writes y [SQ, NW] to y_ptr [d], each value to its column."""
    tl.store(y_ptr + columns(PART, PLANE, NW), y, mask=is_word(PART, PLANE, NW)[None, :])


INTERPRETED = bool(triton.knobs.runtime.interpret)  # kernels run in numpy, one program after the other


class Tile(NamedTuple):
    """`rows` of a part at a time, by `num_warps` warps."""

    rows: int
    num_warps: int


def dot_tile(parts: tuple[RowPart, ...]) -> Tile:
    """For products with x, whose values stay in registers."""
    # What is looked up for a row stands in as many registers as it has columns.
    rows = 2 if any(part.kind == TRELLIS.value for part in parts) else 4
    return _tile(max(parts, key=lambda part: part.num_words // _thread_words(part)), rows)


def sum_tile(parts: tuple[RowPart, ...]) -> Tile:
    """For a record whose last part is summed up: its values' sums stay in registers beside x."""
    least = min(part.bits for part in parts)  # of 1 bit two rows would be 128 columns a thread: registers spill (sm_80)
    has_many = least < 4 or len(parts) > 2 or any(part.offset % 4 for part in parts)  # loads between words are many
    if least == 1 or any(part.kind == TRELLIS.value for part in parts):
        return _tile(parts[-1], 1)
    return _tile(parts[-1], 2 if has_many else 4)


def _tile(part: RowPart, rows: int) -> Tile:
    """So many warps that a thread takes `_thread_words` of a row; more rows where one is short."""
    words = 32 * _thread_words(part)  # that a warp loads
    num_warps = max(1, min(8, part.num_words // words))
    if INTERPRETED:  # numpy takes as long for many rows as for one
        return Tile(64, num_warps)
    return Tile(max(1, min(64, rows * words * num_warps // part.num_words)), num_warps)


def _thread_words(part: RowPart) -> int:
    """Words of a row that a thread takes: 128 bits, 64 of codes of 1 bit and 3; of a trellis 32 columns."""
    if part.kind == TRELLIS.value:
        return 32 // part.codes_of_word
    return 2 if part.bits in (1, 3) else 4


def num_partials(num_experts: int, num_rows: int, num_sms: int) -> int:
    """Into how many partial sums an expert's neurons are divided: two programs an SM, eight neurons each at least."""
    return max(1, min(2 * num_sms // num_experts, -(-num_rows // 8)))
