"""How large a tile a program works on: rows at a time, and warps, for parts of rows. Tuned, not part of any answer."""

from typing import NamedTuple

import triton

from moe_pack.runtime.kernels.codes import Part

INTERPRETED = bool(triton.knobs.runtime.interpret)  # kernels run in numpy, one program after the other


class Tile(NamedTuple):
    """`rows` of a part at a time, by `num_warps` warps."""

    rows: int
    num_warps: int


def dot_tile(parts: tuple[Part, ...]) -> Tile:
    """For products with x, whose values stay in registers."""
    return _tile(max(parts, key=lambda part: part.num_words), 4)


def sum_tile(parts: tuple[Part, ...]) -> Tile:
    """For a record whose last part is summed up: its values' sums stay in registers beside x."""
    least = min(part.bits for part in parts)  # of 1 bit two rows would be 128 columns a thread: registers spill (sm_80)
    has_many = least < 4 or len(parts) > 2 or any(part.offset % 4 for part in parts)  # loads between words are many
    return _tile(parts[-1], 1 if least == 1 else 2 if has_many else 4)


def _tile(part: Part, rows: int) -> Tile:
    """So many warps that a thread loads 128 bits of a row, 64 of codes of 1 bit and 3; more rows where one is short."""
    words = 32 * (2 if part.bits in (1, 3) else 4)  # that a warp loads
    num_warps = max(1, min(8, part.num_words // words))
    if INTERPRETED:  # numpy takes as long for many rows as for one
        return Tile(64, num_warps)
    return Tile(max(1, min(64, rows * words * num_warps // part.num_words)), num_warps)


def num_partials(num_experts: int, num_rows: int, num_sms: int) -> int:
    """Into how many partial sums an expert's neurons are divided: two programs an SM, eight neurons each at least."""
    return max(1, min(2 * num_sms // num_experts, -(-num_rows // 8)))
