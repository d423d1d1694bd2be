"""How kernels read rows of a pack: words of 32 bits whose codes, shifted and masked, belong to known columns.

A kernel gets a part of a row as a tuple of constants (`RowPart`). It reads the part's words as they lie, 64 or 128
bits a thread, and never puts codes in order: it reads the other factor of a product in their order. Word `w` has `SQ`
codes; code `sq` of it belongs to column `columns(...)[sq, w]`. Codes of 3 bits lie in two planes, of 2 bits and of
1 bit, which are read as two parts. Floating-point codes of 8 or 4 bits become float16 by shifts and masks, two at a
time; any GPU turns these into float32. E4M3 and E2M1 keep the bits of their exponents, so their values come out smaller
by a power of two, which `UNITS` has.

A tile of `R` rows is [R, SQ, NW]: NW is a power of two, and words past the row are masked. A row is given by its offset
in an arena in units of 16 bytes, so that the compiler knows its alignment.

A nibble of a trellis has two weights. Its words, columns and scales are those of codes of 2 bits (`plane_bits`), and a
block of 64 columns is 4 words, which a thread loads at once with the word before them and the block's refinements. The
last three nibbles of a step select an entry of a table (`lookup`) with all levels that the step's two weights may have,
stored with `ZERO` added: 2 bytes for width 4, 4 for widths 5 and 6, 8 for 7 and 8. So two weights cost one load, and
refinements select their bytes of it. `lookup_ptr` is None if no part is a trellis. The compiler divides the first
dimension of a load among threads if it sees no neighbouring addresses: blocks come first, so that a thread looks up its
own.

The last section chooses the rows and warps of a program's tile, for speed; results do not depend on them.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_pack.formats import PartFormat, RowLayout
from moe_pack.formats.pack.codecs import trellis_hashes, trellis_levels, trellis_refinements
from moe_pack.formats.pack.plans import TRELLIS_WIDTHS
from moe_pack.runtime.gpu.kernels.grids import INTERPRETED, Registers, resident_warps, warp_threads

ZERO = tl.constexpr(64)  # added to the levels of a table
_WINDOWS = tl.constexpr(4096)  # of three nibbles
_FIRST = tl.constexpr(TRELLIS_WIDTHS[0])
_REFINEMENTS = tl.constexpr(tuple(trellis_refinements(width) for width in TRELLIS_WIDTHS))  # bits of both weights


@triton.constexpr_function
def _half_bytes(width: int) -> int:
    """Returns how many levels of each of a step's weights an entry of a trellis's table has: half of its bytes."""
    return 1 << int(_REFINEMENTS.value[width - _FIRST.value][1])  # the second weight has as many bits or more


@triton.constexpr_function
def _table_begin(width: int) -> int:
    """Returns where the table of a width begins in `lookup`, in bytes."""
    return sum(2 * _half_bytes(before) * _WINDOWS.value for before in range(_FIRST.value, width))


@cache
def lookup(device: torch.device) -> Tensor:
    """Returns the tables of all widths, one after another, u8, 104 KiB; once a device.

    A table is [4096, 2, _half_bytes]: by window, then the levels of the step's first and second weight, `ZERO` added. A
    weight with fewer levels than the other has them again.
    """
    hashes, tables = trellis_hashes().to(torch.int64), []
    for width in TRELLIS_WIDTHS:
        for levels, sets in zip(trellis_levels(width), (hashes & 15, hashes >> 4), strict=True):
            of_sets = levels.view(-1, 16)[:, sets]  # [levels in a set, windows]
            tables.append(of_sets.repeat(_half_bytes(width) // len(of_sets), 1))
    entries = [torch.cat(pair).T.flatten() for pair in zip(tables[::2], tables[1::2], strict=True)]
    return torch.cat(entries).add_(ZERO.value).to(torch.uint8).to(device)


AFFINE, BF16, F16, F32, FP8, E5M2, MXFP4, TRELLIS = (tl.constexpr(kind) for kind in range(8))
FACTORS = tl.constexpr((1.0, 4.0))  # what 1 in a plane's codes counts
UNITS = tl.constexpr(
    (1.0, 1.0, 1.0, 1.0, 2.0**8, 1.0, 2.0**14, 1.0)
)  # by kind: what 1 in the values of `unpack_places` stands for
_KINDS = {"BF16": BF16.value, "F16": F16.value, "F32": F32.value}
_CODECS = {"affine": AFFINE.value, "fp8": FP8.value, "e5m2": E5M2.value, "mxfp4": MXFP4.value, "trellis": TRELLIS.value}


class RowPart(NamedTuple):
    """A part of a row as kernels take it: all fields are constants when a kernel is compiled.

    Triton passes a named tuple to `constexpr_function`s as a plain one; they begin with `RowPart(*part)`.
    """

    kind: int  # codes with scales, or 16- or 32-bit values
    bits: int  # of a code or value; of two codes of a trellis
    group: int  # columns that share a scale, 0 where there are no scales
    # For affine codes and a trellis 16 (float16) or 8 (bytes times one float16 a row), for others 32 (float32) or 8
    # (E8M0).
    scale_bits: int
    offset: int  # of the codes in the row, in bytes, a multiple of 16
    scales: int  # where the scales begin, in bytes
    num_cols: int  # d
    bias: int  # where a float32 bias begins, -1 where there is none

    @property
    def num_words(self) -> int:
        """NW of a tile of whole rows: words of the first plane, rounded up to a power of two."""
        return int(triton.next_power_of_2(self.num_cols // int(places(self, 0))))


def part_of(rows: RowLayout, name: str) -> RowPart:
    """Returns a matrix's part of rows in the pack's row layout."""
    part = rows.part(name)
    assert part is not None, f"rows have no part {name}"
    form: PartFormat = part.format
    places = (part.offset, part.scales_offset, rows.num_cols, part.bias_offset if part.has_bias else -1)
    if form.codec == "bf16":
        return RowPart(BF16.value, 16, 0, 0, *places)
    return RowPart(_CODECS[form.codec], form.width, form.group or rows.num_cols, form.scale_bits, *places)


def lookup_for(device: torch.device, *parts: RowPart | None) -> Tensor | None:
    """Returns the tables that kernels need for these parts, or None where none is a trellis."""
    return lookup(device) if any(part is not None and part.kind == TRELLIS.value for part in parts) else None


def stored_part(dtype: str, num_cols: int) -> RowPart:
    """Returns the part of rows of plain values; `dtype` is BF16, F16 or F32, as in safetensors."""
    return RowPart(_KINDS[dtype], 32 if dtype == "F32" else 16, 0, 0, 0, 0, num_cols, -1)


@triton.constexpr_function
def plane_bits(part: RowPart, plane: int) -> int:
    """Returns the bits of a code in this plane: 3-bit codes have 2 bits in plane 0 and 1 in plane 1.

    The nibbles of a trellis are two codes of 2 bits each, with which they share their columns.
    """
    part = RowPart(*part)
    if part.kind == TRELLIS.value:
        return 2
    return part.bits if part.kind != AFFINE.value or part.bits != 3 else 1 if plane else 2


@triton.constexpr_function
def plane_words(part: RowPart, plane: int) -> int:
    """Returns NW of a tile of whole rows: words of this plane, rounded up to a power of two."""
    return RowPart(*part).num_words // (2 if plane else 1)


@triton.constexpr_function
def places(part: RowPart, plane: int) -> int:
    """Returns SQ: how many codes or values of this plane a word contains."""
    return int(32 // plane_bits(RowPart(*part), plane))


@triton.constexpr_function
def trellis_bits(part: RowPart) -> tuple[int, int]:
    """Returns the bits of refinements of a trellis's steps: of their first and of their second weights."""
    refinements: tuple[int, int] = _REFINEMENTS.value[RowPart(*part).bits - _FIRST.value]
    return refinements


@triton.constexpr_function
def has_scales(part: RowPart) -> bool:
    """Whether a part's codes have scales."""
    part = RowPart(*part)
    return part.group > 0


@triton.jit
def columns(PART: tl.constexpr, PLANE: tl.constexpr):
    """Returns the column of each code of each word, int32 [SQ, NW]; past the row for words past the row."""
    BITS: tl.constexpr = plane_bits(PART, PLANE)
    SQ: tl.constexpr = places(PART, PLANE)
    sq = tl.arange(0, SQ)[:, None]
    w = tl.arange(0, plane_words(PART, PLANE))[None, :]
    if has_scales(PART):
        # A block of 64 codes is 2 BITS words; byte j holds codes j, j + 8 BITS, ...
        WORDS: tl.constexpr = 2 * BITS
        column = (w // WORDS) * 64 + (sq // 4) * (8 * BITS) + (w % WORDS) * 4 + sq % 4
    else:
        column = w * SQ + sq
    return column


@triton.jit
def word_places(PART: tl.constexpr, PLANE: tl.constexpr):
    """Returns where each word lies, in words from the part's first: int32 [NW]."""
    w = tl.arange(0, plane_words(PART, PLANE))
    if PART.kind == AFFINE and PART.bits == 3:
        WORDS: tl.constexpr = 2 if PLANE else 4
        FIRST: tl.constexpr = 4 if PLANE else 0
        # In blocks of 24 bytes a thread can load 64 bits at once, and as many columns of the other plane.
        w = tl.max_contiguous((w // WORDS) * 6 + FIRST + w % WORDS, 1 if PLANE else 2)
    elif PART.bits < 3:
        # 128 bits would be 64 columns a thread or more, too many for its registers: a thread loads 64 bits.
        w = tl.max_contiguous(w, 2)
    return w


@triton.jit
def is_word(PART: tl.constexpr, PLANE: tl.constexpr):
    """Returns which words are in the row: bool [NW]."""
    return tl.arange(0, plane_words(PART, PLANE)) < PART.num_cols // places(PART, PLANE)


@triton.jit
def load_words(arena_ptr, units, live, PART: tl.constexpr, PLANE: tl.constexpr):
    """Loads the words of some rows: uint32 [R, 1, NW], zeros for rows that are not live.

    The dimension of 1 is that of a word's codes: they are then made in the registers of the thread that loads the word.
    Args:    units: int64 [R], offsets of the rows in units of 16 bytes.
    """
    mask = live[:, None, None] & is_word(PART, PLANE)[None, None, :]
    at = PART.offset // 4 + word_places(PART, PLANE)
    words_ptr = arena_ptr.to(tl.pointer_type(tl.uint32))
    return tl.load(words_ptr + (units * 4)[:, None, None] + at[None, None, :], mask=mask, other=0)


@triton.jit
def load_trellis(arena_ptr, units, block, mask, PART: tl.constexpr):
    """Loads blocks of rows of a trellis: their words, uint32 [R, NB, 4], and those before each; their refinements.

    Refinements of the steps' first weights, and of the second ones, are [R, NB, 4] too: those of the weights of step
    `2 b + p` of a word begin at bit `8 b + 4 p`, the lowest. Without any they are the words again, and not used.

    Args:    units: int64 [R], offsets of the rows in units of 16 bytes.   block: int32 [NB].   mask: bool [R, NB].
    """
    words_ptr = arena_ptr.to(tl.pointer_type(tl.uint32)) + (units * 4)[:, None] + PART.offset // 4
    w = tl.arange(0, 4)[None, None, :]
    words = tl.load((words_ptr + block[None, :] * 4)[:, :, None] + w, mask=mask[:, :, None], other=0)
    before = tl.load(words_ptr + (block * 4 - 1)[None, :], mask=mask & (block > 0)[None, :], other=0)
    even, odd = tl.split(tl.reshape(words, [words.shape[0], words.shape[1], 2, 2]))
    first, third = tl.split(even)
    second, _ = tl.split(odd)
    before = tl.reshape(tl.join(tl.join(before, second), tl.join(first, third)), words.shape)
    BITS: tl.constexpr = trellis_bits(PART)
    refinements_ptr = words_ptr + PART.num_cols // 16 + (block * (BITS[0] + BITS[1]))[None, :]
    first = words
    if BITS[0] > 0:
        first = _load_refinements(refinements_ptr, mask, BITS[0])
    second = words
    if BITS[1] > 0:
        second = _load_refinements(refinements_ptr + BITS[0], mask, BITS[1])
    return words, before, first, second


@triton.jit
def _load_refinements(words_ptr, mask, BITS: tl.constexpr):
    """Loads a half's refinements: uint32 [R, NB, 4], the bits that belong to a word's steps shifted to their places."""
    if BITS == 1:  # one word for all four: bit q of byte r is that of column 4 q + r
        w = tl.arange(0, 4)[None, None, :]
        words = tl.load(words_ptr, mask=mask, other=0)[:, :, None] >> w.to(tl.uint32)
    else:  # bits 2 q and 2 q + 1 of byte r are those of column 8 q + r
        pair_ptr = words_ptr[:, :, None] + tl.arange(0, 2)[None, None, :]
        pair = tl.load(pair_ptr, mask=mask[:, :, None], other=0)
        both = tl.join(pair, pair >> 2)  # [R, NB, 2, 2]: by word of the pair, by shift
        words = tl.reshape(tl.permute(both, [0, 1, 3, 2]), [mask.shape[0], mask.shape[1], 4])
    return words


@triton.jit
def look_up(lookup_ptr, codes, step, half, PART: tl.constexpr, BOTH: tl.constexpr):
    """Returns levels of steps, with `ZERO` added: uint32 [R, 2 n, NW] of both weights, else [R, n, NW] of one half.

    Args:    lookup_ptr: to `lookup`.   codes: from `load_trellis`.   step: int32 [n], `4 p + b` for step `2 b + p` of a
             word.   half: 0 for the steps' first weights, 1 for their second ones; not used for both.
    """
    words, before, first, second = codes
    R: tl.constexpr = words.shape[0]
    NB: tl.constexpr = words.shape[1]
    N: tl.constexpr = step.shape[0]
    words, before = tl.permute(words, [1, 0, 2])[:, :, :, None], tl.permute(before, [1, 0, 2])[:, :, :, None]
    s = step[None, None, None, :]
    place = ((s % 4) * 8 + s // 4 * 4).to(tl.uint32)  # of the step's nibble in its word
    early = ((words << 8) | (before >> 24)) >> place
    windows = tl.where(place < 24, early, words >> ((place + 24) & 31)) & (_WINDOWS - 1)
    HALF: tl.constexpr = _half_bytes(PART.bits)
    if HALF == 1:
        entries_ptr = (lookup_ptr + _table_begin(PART.bits)).to(tl.pointer_type(tl.uint16))
    elif HALF == 2:
        entries_ptr = (lookup_ptr + _table_begin(PART.bits)).to(tl.pointer_type(tl.uint32))
    else:
        entries_ptr = (lookup_ptr + _table_begin(PART.bits)).to(tl.pointer_type(tl.uint64))
    entries = tl.load(entries_ptr + windows, eviction_policy="evict_last")  # [NB, R, 4, n]
    BITS: tl.constexpr = trellis_bits(PART)
    left = _refined(entries.to(tl.uint32), first, place, BITS[0])
    right = _refined((entries >> (8 * HALF)).to(tl.uint32), second, place, BITS[1])
    if BOTH:
        levels = tl.reshape(tl.permute(tl.join(left, right), [1, 4, 3, 0, 2]), [R, 2 * N, NB * 4])
    else:
        levels = tl.reshape(tl.permute(tl.where(half == 0, left, right), [1, 3, 0, 2]), [R, N, NB * 4])
    return levels


@triton.jit
def _refined(levels, refinements, place, BITS: tl.constexpr):
    """Returns the bytes of words of up to four levels that refinements of BITS bits select: uint32 [NB, R, 4, n]."""
    if BITS > 0:
        chosen = (tl.permute(refinements, [1, 0, 2])[:, :, :, None] >> place) & (2**BITS - 1)
        levels = levels >> (chosen * 8)
    return levels & 255


@triton.jit
def unpack_places(words, sq, PART: tl.constexpr, PLANE: tl.constexpr):
    """Returns codes as numbers, or values divided by their `UNITS`, at places `sq` of words, not of a trellis: float32.

    Args:    words, sq: of one shape, after broadcasting.
    """
    BITS: tl.constexpr = plane_bits(PART, PLANE)
    if PART.kind == AFFINE:
        MASK: tl.constexpr = 2**BITS - 1
        shift = ((sq % 4) * 8 + (sq // 4) * BITS).to(tl.uint32)
        values = ((words >> shift) & MASK).to(tl.int32).to(tl.float32)
    elif PART.kind == F32:
        values = words.to(tl.float32, bitcast=True)
    elif PART.kind == BF16:
        values = ((words >> (sq * 16).to(tl.uint32)) << 16).to(tl.float32, bitcast=True)
    elif PART.kind == F16:
        values = _half(words, sq)
    elif PART.kind == MXFP4:
        # Moves the code that `sq` names to the top of its half word: a sign, then 3 bits of exponent and mantissa.
        turned = words << (12 - (sq % 2 * 8 + sq // 4 * 4)).to(tl.uint32)
        values = _half((turned & 0x80008000) | ((turned >> 3) & 0x0E000E00), sq % 4 // 2)
    else:
        to_top = (8 - sq % 2 * 8).to(tl.uint32)  # moves the byte that `sq` names to the upper one of its half word
        turned = words << to_top
        if PART.kind == E5M2:  # a float16 without its last 8 bits
            values = _half(turned & 0xFF00FF00, sq // 2)
        else:
            # Exponents have one bit less than float16's. All 7 bits set are a NaN, and stay one with that bit set.
            no_number = ((words & 0x7F7F7F7F) + 0x01010101) << to_top
            below = (turned & 0x7F007F00) | (no_number & 0x80008000)
            values = _half((turned & 0x80008000) | ((below >> 1) & 0x7F807F80), sq // 2)
    return values


@triton.jit
def _half(words, place):
    """Returns the lower or the upper float16 of words (`place` 0 or 1) as float32."""
    halves = ((words >> (place * 16).to(tl.uint32)) & 0xFFFF).to(tl.uint16)
    return halves.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_scales(arena_ptr, units, groups, mask, PART: tl.constexpr):
    """Loads scales and zeros, float32, of groups of rows; `units`, `groups` and `mask` broadcast to one shape.

    For codes without zeros the zeros are the scales again, and not used. The zero of a trellis is `ZERO`.
    """
    D: tl.constexpr = PART.num_cols
    BEGIN: tl.constexpr = PART.scales
    if PART.kind != AFFINE and PART.kind != TRELLIS:
        if PART.scale_bits == 32:
            scale = _load_float32(arena_ptr, units, groups, mask, BEGIN)
        else:
            scale = _power_of_two(tl.load(arena_ptr + units * 16 + BEGIN + groups, mask=mask, other=0))
        return scale, scale
    NUM_GROUPS: tl.constexpr = D // PART.group
    if PART.scale_bits == 16:
        scale = _load_float16(arena_ptr, units, groups, mask, BEGIN)
        if PART.kind == TRELLIS:
            return scale, tl.zeros_like(scale) + ZERO
        zero = _load_float16(arena_ptr, units, groups, mask, BEGIN + 2 * NUM_GROUPS)
    else:
        bytes_ptr = arena_ptr + units * 16 + BEGIN
        step = _load_float16(arena_ptr, units, groups * 0, mask, BEGIN)
        scale = tl.load(bytes_ptr + 2 + groups, mask=mask, other=0).to(tl.float32) * step
        if PART.kind == TRELLIS:
            return scale, tl.zeros_like(scale) + ZERO
        step = _load_float16(arena_ptr, units, groups * 0, mask, BEGIN + 2 + NUM_GROUPS)
        steps = tl.load(bytes_ptr + 4 + NUM_GROUPS + groups, mask=mask, other=0).to(tl.int8, bitcast=True)
        zero = steps.to(tl.float32) * step
    return scale, zero


@triton.jit
def _load_float16(arena_ptr, units, places, mask, BEGIN: tl.constexpr):
    """Loads float16 numbers of rows as float32; they lie one after the other, from any byte on."""
    if BEGIN % 2 == 0:
        halves_ptr = arena_ptr.to(tl.pointer_type(tl.float16)) + units * 8 + BEGIN // 2
        numbers = tl.load(halves_ptr + places, mask=mask, other=0.0)
    else:
        bytes_ptr = arena_ptr + units * 16 + BEGIN + 2 * places
        low = tl.load(bytes_ptr, mask=mask, other=0).to(tl.uint16)
        high = tl.load(bytes_ptr + 1, mask=mask, other=0).to(tl.uint16)
        numbers = (low | (high << 8)).to(tl.float16, bitcast=True)
    return numbers.to(tl.float32)


@triton.jit
def _load_float32(arena_ptr, units, places, mask, BEGIN: tl.constexpr):
    """Loads float32 numbers of rows; they lie one after the other, from any byte on."""
    if BEGIN % 4 == 0:
        floats_ptr = arena_ptr.to(tl.pointer_type(tl.float32)) + units * 4 + BEGIN // 4
        numbers = tl.load(floats_ptr + places, mask=mask, other=0.0)
    else:
        PIECE: tl.constexpr = 2 - BEGIN % 2  # bytes that are loaded at once
        pieces_ptr = arena_ptr + units * 16 + BEGIN + 4 * places
        if PIECE == 2:
            pieces_ptr = pieces_ptr.to(tl.pointer_type(tl.uint16))
        bits = tl.load(pieces_ptr, mask=mask, other=0).to(tl.uint32)
        for piece in tl.static_range(1, 4 // PIECE):
            bits |= tl.load(pieces_ptr + piece, mask=mask, other=0).to(tl.uint32) << (8 * PIECE * piece)
        numbers = bits.to(tl.float32, bitcast=True)
    return numbers


@triton.jit
def _power_of_two(exponents):
    """Returns the values of E8M0 bytes; 0 is a subnormal and 255 a NaN: both have the mantissa's highest bit."""
    wide = exponents.to(tl.int32)
    bits = (wide << 23) | tl.where((wide == 0) | (wide == 255), 1 << 22, 0)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_bias(arena_ptr, units, live, PART: tl.constexpr):
    """Loads the biases of some rows: float32 [R]."""
    return _load_float32(arena_ptr, units, units * 0, live, PART.bias)


@triton.jit
def load_x(x_ptr, PART: tl.constexpr, PLANE: tl.constexpr):
    """Loads a hidden state in the order of a part's codes: float32 [SQ, NW], zeros past the row."""
    return tl.load(x_ptr + columns(PART, PLANE), mask=is_word(PART, PLANE)[None, :], other=0.0)


@triton.jit
def store_y(y_ptr, y, PART: tl.constexpr, PLANE: tl.constexpr):
    """Writes y [SQ, NW] to y_ptr [d], each value to its column."""
    tl.store(y_ptr + columns(PART, PLANE), y, mask=is_word(PART, PLANE)[None, :])


def _interpreted_range(*bounds: Any, num_stages: int = 1) -> Iterable[int]:
    """Returns a range of the interpreter's scalars, which are arrays of one number for numpy before 2.4."""
    return range(*(int(bound.handle.data.item()) if isinstance(bound, tl.tensor) else bound for bound in bounds))


loop_range = _interpreted_range if INTERPRETED else tl.range


class Tile(NamedTuple):
    """`rows` of a part that a program takes at a time, with `num_warps` warps."""

    rows: int
    num_warps: int


def dot_tile(parts: tuple[RowPart, ...]) -> Tile:
    """Returns the tile for products with x, whose values stay in registers."""
    # A block of a trellis has 32 entries of a table on their way to registers.
    rows = 4 if not any(part.kind == TRELLIS.value for part in parts) else 1 if has_wide_entries(parts) else 2
    return _tile(max(parts, key=lambda part: part.num_words // _thread_words(part)), rows)


def sum_tile(parts: tuple[RowPart, ...]) -> Tile:
    """Returns the tile for records whose last part is summed up: the sums stay in registers, as x does."""
    least = min(part.bits for part in parts)  # with 1 bit, two rows are 128 columns a thread: registers spill (sm_80)
    has_many = least == 3 or len(parts) > 2
    if has_wide_entries(parts):  # half a block a thread, or registers spill (sm_120)
        tile = _tile(parts[-1], 1)
        return Tile(tile.rows, min(8, 2 * tile.num_warps))
    if least == 1 or any(part.kind == TRELLIS.value for part in parts):
        return _tile(parts[-1], 1)
    return _tile(parts[-1], 2 if has_many else 4)


def ahead_tile(tile: Tile, parts: tuple[RowPart, ...]) -> Tile:
    """Returns the tile for a loop that has two in registers: the rows that it multiplies and the next ones.

    It has half as many rows, so as many bytes are on their way, and more programs fit; but no fewer than give each
    thread `_thread_words` of every part.
    """
    least = max(warp_threads() * tile.num_warps * _thread_words(part) // part.num_words for part in parts)
    return Tile(max(1, tile.rows // 2, min(tile.rows, least)), tile.num_warps)


def has_wide_entries(parts: tuple[RowPart, ...]) -> bool:
    """Whether a part is a trellis of width 7 or 8: an entry of its table takes two registers."""
    return any(part.kind == TRELLIS.value and _half_bytes(part.bits) == 4 for part in parts)


def _tile(part: RowPart, rows: int) -> Tile:
    """Returns a tile with so many warps that a thread takes `_thread_words` of a row; more rows if rows are short."""
    words = warp_threads() * _thread_words(part)  # of a warp
    num_warps = max(1, min(8, part.num_words // words))
    if INTERPRETED:  # numpy takes as long for many rows as for one
        return Tile(64, num_warps)
    return Tile(max(1, min(64, rows * words * num_warps // part.num_words)), num_warps)


def _thread_words(part: RowPart) -> int:
    """Returns a thread's words of a row: 128 bits, 64 for codes of fewer than 4 bits."""
    return 2 if part.bits < 4 else 4


SUM_WARPS = 4  # of a program that sums records, at least: with fewer, more programs would each write a sum
_SUM_RESIDENT = resident_warps(Registers.NEURONS) // SUM_WARPS


def num_partials(num_experts: int, num_rows: int, num_sms: int, resident: int = _SUM_RESIDENT) -> int:
    """Returns how many partial sums an expert's output has: one wave of programs, each with eight neurons or more.

    Args:    resident: programs that a multiprocessor runs at once.
    """
    return max(1, min(resident * num_sms // num_experts, -(-num_rows // 8)))
