"""How large a tile a program works on: rows at a time, and warps, for parts of rows. Tuned, not part of any answer."""

from typing import NamedTuple

import triton

from moe_pack.runtime.kernels.codes import Part


class Tile(NamedTuple):
    """`rows` of a part at a time, by `num_warps` warps."""

    rows: int
    num_warps: int


def dot_tile(parts: tuple[Part, ...]) -> Tile:
    """For products with x, whose values stay in registers."""
    most = max(part.num_words for part in parts)
    num_warps = max(1, min(8, most // 128))
    return Tile(4, num_warps)


def sum_tile(parts: tuple[Part, ...]) -> Tile:
    """For a record whose last part is summed up: its values' sums stay in registers beside x."""
    num_warps = max(1, min(8, parts[-1].num_words // 128))
    return Tile(4, num_warps)


def num_partials(num_experts: int, num_rows: int, num_sms: int) -> int:
    """Into how many partial sums an expert's neurons are divided: two programs an SM, eight neurons each at least."""
    return max(1, min(2 * num_sms // num_experts, triton.cdiv(num_rows, 8)))
