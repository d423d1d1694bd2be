"""How large a tile a program works on: rows at a time, and warps, for parts of rows. Tuned, not part of any answer."""

from typing import NamedTuple

import triton

from moe_pack.runtime.kernels.codes import TRELLIS, Part

INTERPRETED = bool(triton.knobs.runtime.interpret)  # kernels run in numpy, one program after the other


class Tile(NamedTuple):
    """`rows` of a part at a time, by `num_warps` warps."""

    rows: int
    num_warps: int


def dot_tile(parts: tuple[Part, ...]) -> Tile:
    """For products with x, whose values stay in registers."""
    # What is looked up for a row stands in as many registers as it has columns.
    rows = 2 if any(part.kind == TRELLIS.value for part in parts) else 4
    return _tile(max(parts, key=lambda part: part.num_words // _thread_words(part)), rows)


def sum_tile(parts: tuple[Part, ...]) -> Tile:
    """For a record whose last part is summed up: its values' sums stay in registers beside x."""
    least = min(part.bits for part in parts)  # of 1 bit two rows would be 128 columns a thread: registers spill (sm_80)
    has_many = least < 4 or len(parts) > 2 or any(part.offset % 4 for part in parts)  # loads between words are many
    if least == 1 or any(part.kind == TRELLIS.value for part in parts):
        return _tile(parts[-1], 1)
    return _tile(parts[-1], 2 if has_many else 4)


def _tile(part: Part, rows: int) -> Tile:
    """So many warps that a thread takes `_thread_words` of a row; more rows where one is short."""
    words = 32 * _thread_words(part)  # that a warp loads
    num_warps = max(1, min(8, part.num_words // words))
    if INTERPRETED:  # numpy takes as long for many rows as for one
        return Tile(64, num_warps)
    return Tile(max(1, min(64, rows * words * num_warps // part.num_words)), num_warps)


def _thread_words(part: Part) -> int:
    """Words of a row that a thread takes: 128 bits, 64 of codes of 1 bit and 3; of a trellis 32 columns."""
    if part.kind == TRELLIS.value:
        return 32 // part.codes_of_word
    return 2 if part.bits in (1, 3) else 4


def num_partials(num_experts: int, num_rows: int, num_sms: int) -> int:
    """Into how many partial sums an expert's neurons are divided: two programs an SM, eight neurons each at least."""
    return max(1, min(2 * num_sms // num_experts, -(-num_rows // 8)))
