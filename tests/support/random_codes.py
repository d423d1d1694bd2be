"""Parts with every code that is a number (`fp8`, `e5m2`, `mxfp4`), scales of the edge; a trellis with all windows."""

import numpy as np
import torch
from torch import Tensor

from moe_pack.formats import PartFormat, RowLayout, trellis_format
from moe_pack.formats.pack.codecs import pack_codes
from moe_pack.formats.pack.layouts import row_layout, write_rows
from moe_pack.formats.pack.plans import E5M2, FP8, KEPT

NUMBERS = KEPT


def edge_rows(stored: PartFormat) -> tuple[RowLayout, Tensor]:
    """Rows of 320 columns with every code, one row for each of some scales; of the last, which is no number.

    The last group of 128 has 64 columns. Scales are the usual, of 24 bits, small, large; of powers the least and the
    largest.
    """
    codes = torch.arange(320).remainder(2**stored.width).to(torch.uint8).repeat(6, 1)
    if stored == FP8:
        scales = torch.tensor([1.0, 1 / 3, -1e-30, 2.0**100, 0.0, torch.nan])[:, None] * torch.tensor([1.0, 2.0, 3.0])
        return _rows_of(stored, codes, scales.view(torch.uint8))
    exponents = torch.tensor([127, 0, 1, 200, 254, 255], dtype=torch.uint8)
    return _rows_of(stored, codes, exponents[:, None].repeat(1, stored.num_groups(320)))


def every_code(stored: PartFormat) -> tuple[RowLayout, Tensor]:
    """Rows of 64 columns, of which the first has each code in turn, and the others zeros; scales are 1."""
    codes = torch.zeros(2**stored.width, 64, dtype=torch.uint8)
    codes[:, 0] = torch.arange(2**stored.width)
    one = torch.tensor([1.0]).view(torch.uint8) if stored == FP8 else torch.tensor([127], dtype=torch.uint8)
    return _rows_of(stored, codes, one.repeat(len(codes), stored.num_groups(64)))


def every_window(width: int) -> tuple[RowLayout, Tensor]:
    """32 rows of a trellis in which each step of a block sees every window; refinements are random, scales are 1.

    Right before the codes of `weight` lie those of a part whose bits are all set.
    """
    num_rows, num_cols = 32, 8320
    layout = row_layout([("before", E5M2, False), ("weight", trellis_format(width, 0), False)], num_cols)
    generator = torch.Generator().manual_seed(width)
    codes = torch.randint(0, 256, (num_rows, num_cols * width // 16), generator=generator, dtype=torch.uint8)
    nibbles, windows = torch.zeros(num_rows, num_cols // 2, dtype=torch.uint8), _all_windows()
    for row in range(num_rows):
        nibbles[row, row : row + len(windows)] = windows
    codes[:, : num_cols // 4] = nibbles[:, ::2] | nibbles[:, 1::2] << 4
    ones = torch.ones(num_rows, 1, dtype=torch.float16).view(torch.uint8)
    out = np.zeros((num_rows, layout.row_bytes), np.uint8)
    sections = {
        "before": np.full((num_rows, num_cols + 1), 0xFF, np.uint8),
        "weight": torch.cat([codes, ones], dim=1).numpy(),
    }
    write_rows(layout, sections, out)
    return layout, torch.from_numpy(out)


def _all_windows() -> Tensor:
    """Nibbles, u8 [4098], of which each three neighbours are others: a de Bruijn sequence, by the greedy rule."""
    nibbles, seen = [0, 0], set[tuple[int, int, int]]()
    while len(nibbles) < 16**3 + 2:
        tried = [value for value in reversed(range(16)) if (nibbles[-2], nibbles[-1], value) not in seen]
        seen.add((nibbles[-2], nibbles[-1], tried[0]))
        nibbles.append(tried[0])
    return torch.tensor(nibbles, dtype=torch.uint8)


def _rows_of(stored: PartFormat, codes: Tensor, scales: Tensor) -> tuple[RowLayout, Tensor]:
    layout = row_layout([("weight", stored, False)], codes.shape[1])
    out = np.zeros((len(codes), layout.row_bytes), np.uint8)
    section = torch.cat([pack_codes(codes, stored.width), scales], dim=1)
    write_rows(layout, {"weight": section.numpy()}, out)
    return layout, torch.from_numpy(out)
