"""How kernels read a trellis: words of 32 bits of its stream, out of which windows of 7 are cut and looked up.

Word `w` of a row ends with the last bit of columns `SQ w` to `SQ w + SQ - 1`, and so holds their windows whole: `SQ` is
8; 16 of width 3; 4 of width 8. Words overlap, and begin at whatever bit: each is put together from two that lie in the
row. What lies before the stream's first bit is taken for zeros.

A window's value is a byte of a table, kept with 128 added: 128 bytes are a line of a cache, which a warp reads at once
whichever bytes its threads want. Where a compiler sees no addresses side by side, it lays the first dimension of a load
among threads: words come first in loads, so that a thread has all columns of its words.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_pack.formats import TRELLIS_WIDTHS
from moe_pack.formats.codecs import trellis_values

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
