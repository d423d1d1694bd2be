"""Rows of weights as a trellis's bytes, from the weights alone.

A group's scale is its weights' root mean square, in the table's unit, times one of a few factors: with larger ones the
table reaches further, which pays where a row has outliers. What is nearest to a row is also shorter than it; shortened
gate, up and down rows multiply up, and cost more than their squared error says. So scales are stretched afterwards
until the row's product with what is stored is that with itself.
"""

import torch
from torch import Tensor

from moe_pack.calib.trellis_search import search
from moe_pack.calib.unholdable import UnholdableError
from moe_pack.formats.codecs import Trellis
from moe_pack.formats.trellis_tables import TRELLIS_UNITS

# Of normal weights the first is best, of heavy tails one of the others; more of them gain little.
SCALE_FACTORS = (1.0, 1.1, 1.2, 1.35)


def nearest_rows(codec: Trellis, weights: Tensor) -> Tensor:
    """The rows' bytes: for each row the scales of least squared error, the nearest codes, then scales stretched.

    Args:    weights: float32 [rows, num_cols], finite.
    Returns: u8 [rows, part_bytes]; rows of zeros are read as zeros.
    Raises:  UnholdableError for a row whose scales float16 cannot hold.
    """
    scales, found = _nearest(codec, weights)
    rows = codec.encode(found, scales)
    stretched = codec.store_scales(codec.load_scales(scales) * unbiasing_gain(weights, codec.decode(rows)))
    check_scales(codec, stretched)
    return torch.cat((rows[:, : codec.code_bytes], stretched), dim=1)


def group_scales(codec: Trellis, weights: Tensor) -> Tensor:
    """The scales under which each group of rows [rows, num_cols] is as large as the table expects: [rows, groups]."""
    groups = weights.reshape(len(weights), codec.num_groups, -1)
    return groups.double().square().mean(dim=2).sqrt().mul_(TRELLIS_UNITS[codec.part.width]).float()


def column_scales(codec: Trellis, scales: Tensor) -> Tensor:
    """What stored scales are for each column: float32 [rows, num_cols] for u8 [rows, scale_bytes]."""
    return codec.load_scales(scales).repeat_interleave(codec.num_cols // codec.num_groups, dim=1)


def unbiasing_gain(weights: Tensor, stored: Tensor) -> Tensor:
    """By how much stored rows are to be stretched: `w . w / w . q`, [rows, 1]; 1 where a row is stored as nothing."""
    exact = weights.double()
    gain = exact.square().sum(dim=1) / (exact * stored.double()).sum(dim=1)
    return torch.where(gain.isfinite() & (gain > 0), gain, torch.ones_like(gain)).float()[:, None]


def check_scales(codec: Trellis, scales: Tensor) -> None:
    """Refuses stored scales, u8 [rows, scale_bytes], that are no numbers: UnholdableError names the first row."""
    wrong = ~codec.load_scales(scales).isfinite().all(dim=1)
    if wrong.any():
        raise UnholdableError(int(wrong.nonzero()[0]), "weights beyond float16 scales; store it in 16 bits")


def _nearest(codec: Trellis, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Stored scales and codes of each row, by the factor that serves it best."""
    plain, importance = group_scales(codec, weights), torch.ones(codec.num_cols)
    best = torch.full((len(weights), 1), torch.inf, dtype=torch.float64)
    scales, codes = codec.store_scales(plain), torch.zeros_like(weights, dtype=torch.uint8)
    check_scales(codec, scales)
    for factor in SCALE_FACTORS:
        tried = codec.store_scales(plain * factor)
        spread = column_scales(codec, tried)
        found = search(weights, weights, spread, importance, codec.part.width)
        error = (weights.double() - spread * found.values).square().sum(dim=1, keepdim=True)
        better = error < best  # a scale beyond float16 makes it no number
        best = torch.where(better, error, best)
        scales, codes = torch.where(better, tried, scales), torch.where(better, found.codes, codes)
    return scales, codes
