"""Rows of weights as a trellis's bytes, each from its own weights alone.

A group's scale is its weights' root mean square, in the table's unit, times one of a few factors: with larger ones the
table reaches further, which pays where a row has outliers. What is nearest to a row is also shorter than it; shortened
gate, up and down rows multiply up, and cost more than their squared error says. So scales are stretched afterwards
until the row's product with what is stored is that with itself.
"""

import torch
from torch import Tensor

from moe_pack.calib.trellis_search import Found, search
from moe_pack.calib.unholdable import UnholdableError
from moe_pack.formats import PartFormat
from moe_pack.formats.codecs import Trellis, trellis_unit

# Of normal weights the first is best, of heavy tails one of the others.
SCALE_FACTORS = (1.0, 1.1, 1.2, 1.35)
_MOST_GAIN = 2.0


class TrellisRounding:
    """Rows of `num_cols` weights to a trellis's bytes by least squared error: their scales, then their codes."""

    def __init__(self, part: PartFormat, num_cols: int) -> None:
        self._codec = Trellis(part, num_cols)
        self._alike = torch.ones(num_cols)

    def scales(self, rows: Tensor) -> Tensor:
        """For rows, float32 [n, num_cols], the scales [n, groups], as they are stored, under which each errs least.

        Raises:  UnholdableError for a row whose scales float16 cannot hold, stretched as far as may be.
        """
        codec = self._codec
        spread = rows.reshape(len(rows), codec.num_groups, -1).double().square().mean(dim=2).sqrt().float()
        best, least = torch.empty_like(spread), torch.full((len(rows), 1), torch.inf)
        for factor in SCALE_FACTORS:
            tried = codec.load_scales(codec.store_scales(spread * (factor * trellis_unit(codec.part.width))))
            held = codec.load_scales(codec.store_scales(tried * _MOST_GAIN)).isfinite().all(dim=1, keepdim=True)
            if factor == SCALE_FACTORS[0] and not held.all():
                row = int((~held).nonzero()[0, 0])
                raise UnholdableError(row, "weights beyond float16 scales; store it in 16 bits")
            error = (self._each(tried).mul_(self._found(rows, tried).values) - rows).square().sum(dim=1, keepdim=True)
            better = held & (error < least)
            best, least = torch.where(better, tried, best), torch.where(better, error, least)
        return best

    def encode(self, rows: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Bytes of rows by the codes nearest under these scales, then stretched; and what is read from them."""
        found, codec = self._found(rows, scales), self._codec
        stored = codec.store_scales(scales * unbiasing_gain(rows, self._each(scales).mul_(found.values)))
        return codec.encode(found.codes, stored), self._each(codec.load_scales(stored)).mul_(found.values)

    def _found(self, rows: Tensor, scales: Tensor) -> Found:
        return search(rows, rows, self._each(scales), self._alike, self._codec.part.width)

    def _each(self, scales: Tensor) -> Tensor:
        """Scales of groups as those of their columns."""
        return scales.repeat_interleave(len(self._alike) // self._codec.num_groups, dim=1)


def unbiasing_gain(rows: Tensor, rounded: Tensor) -> Tensor:
    """By how much rounded rows are to be stretched: `w . w / w . q`, at most 2, [n, 1]; 1 where that is no number."""
    exact = rows.double()
    gain = exact.square().sum(dim=1) / (exact * rounded.double()).sum(dim=1)
    sound = gain.isfinite() & (gain > 0)
    return torch.where(sound, gain, torch.ones_like(gain)).clamp(max=_MOST_GAIN).float()[:, None]
