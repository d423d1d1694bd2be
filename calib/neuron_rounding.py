"""Rows of down to codes: a neuron's error is made up for by the neurons that come after it.

A row aims at its weights and at what earlier rows' errors, as activations hang together, ask of it; it is rounded to
the least squared miss of that aim, to which all columns are alike. Scales are found for some neurons at once.
"""

import torch
from torch import Tensor

from moe_pack.calib.affine_scales import affine_pairs, code_values, stored_pairs
from moe_pack.calib.column_rounding import ColumnRun, gains
from moe_pack.calib.quantize import nearest_codes
from moe_pack.calib.trellis_rows import TrellisRounding
from moe_pack.calib.unholdable import UnholdableError
from moe_pack.formats import PartFormat
from moe_pack.formats.codecs import affine

_BLOCK_NEURONS = 32  # between two products that carry their errors on


def round_neurons(part: PartFormat, weights: Tensor, factor: Tensor | None) -> Tensor:
    """Rows of weights as a part's bytes.

    Args:    part: affine or trellis.   weights: float32 [n, d], finite.   factor: float32 [n, n], upper triangular, of
             the rows' activations (`moments.Feedback`); None: each row on its own.
    Returns: u8 [n, part_bytes].
    Raises:  UnholdableError for a row whose weights float16 scales cannot express.
    """
    rows = TrellisRounding(part, weights.shape[1]) if part.codec == "trellis" else _AffineRows(part, weights.shape[1])
    made = list[Tensor]()
    aims, errors = weights.clone(), torch.empty_like(weights)
    for first in range(0, len(weights), _BLOCK_NEURONS):
        end = min(first + _BLOCK_NEURONS, len(weights))
        try:
            scales = rows.scales(aims[first:end])
        except UnholdableError as fault:
            raise UnholdableError(first + fault.row, fault.advice) from fault
        if factor is None:
            made.append(rows.encode(aims[first:end], scales)[0])
            continue
        for i in range(first, end):
            aim = (aims[i] + factor[first:i, i] @ errors[first:i])[None]
            row, rounded = rows.encode(aim, scales[i - first : i - first + 1])
            made.append(row)
            errors[i] = weights[i] - rounded[0]
        aims[end:].addmm_(factor[first:end, end:].T, errors[first:end])
    return torch.cat(made)


class _AffineRows:
    def __init__(self, part: PartFormat, num_cols: int) -> None:
        self._width = part.width
        self._codec = affine(part, num_cols)
        self._alike = torch.ones((self._codec.num_groups, num_cols // self._codec.num_groups))

    def scales(self, aims: Tensor) -> Tensor:
        """For rows [n, d] scales and zeros, as stored: [n, 2, groups]."""
        groups = aims.view(len(aims), self._codec.num_groups, -1)
        return torch.stack(stored_pairs(self._codec, *affine_pairs(groups, self._alike, self._width)), dim=1)

    def encode(self, aims: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Bytes of rows, and what is read from them."""
        scale, zero = scales[:, 0, :, None], scales[:, 1, :, None]
        groups = aims.view(len(aims), self._codec.num_groups, -1)
        codes = nearest_codes(groups, scale, zero, self._width)
        rounded = code_values(codes, scale, zero).flatten(1)
        gain = _gain(aims, rounded)
        stored = self._codec.store_scales(scales[:, 0] * gain, scales[:, 1])
        return self._codec.encode(codes.flatten(1).to(torch.uint8), *stored), rounded.mul_(gain)


def _gain(aims: Tensor, rounded: Tensor) -> Tensor:
    """`gains` of columns that are alike."""
    return gains(aims, rounded, [ColumnRun(0, torch.ones(aims.shape[1]), None)])
