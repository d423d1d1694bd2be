"""Rows of gate and up to codes: a column's error is made up for by the columns that come after it.

What is minimised is `(w - q) H (w - q)^T` (`moments`): each column aims at its weight and the corrections of the errors
before it, and a miss of that aim costs the column's importance. Scales come first, from the row as it is, then codes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_pack.calib.affine_scales import affine_pairs, code_values, stored_pairs
from moe_pack.calib.quantize import check_holdable, nearest_codes
from moe_pack.calib.trellis_search import search
from moe_pack.formats import PartFormat
from moe_pack.formats.codecs import Trellis, affine, trellis_unit

# Columns rounded between two products that carry their errors on: the factor among these stays in cache, where that
# of 4,096 columns, 64 MiB, does not fit.
_BLOCK_COLUMNS = 128
_AHEAD_COLUMNS = 8  # that a trellis's search looks beyond a block: its last codes are part of the next values
_MOST_GAIN = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class ColumnRun:
    """Columns `first` and following, whose errors hang together among each other and with no others.

    `importance` float32 [m]: what a squared miss of an aim costs.   `factor` float32 [m, m], upper triangular
    (`moments.Feedback`): how errors move the aims of later columns; None: not at all.
    """

    first: int
    importance: Tensor
    factor: Tensor | None

    @property
    def columns(self) -> slice:
        """Where they lie in a row."""
        return slice(self.first, self.first + len(self.importance))


def round_columns(part: PartFormat, weights: Tensor, runs: Sequence[ColumnRun]) -> Tensor:
    """Rows of weights as a part's bytes.

    Args:    part: affine or trellis.   weights: float32 [rows, d], finite.   runs: all columns, in their order.
    Returns: u8 [rows, part_bytes].
    Raises:  UnholdableError for a row whose weights float16 scales cannot express.
    """
    return _trellis_rows(part, weights, runs) if part.codec == "trellis" else _affine_rows(part, weights, runs)


def gains(weights: Tensor, rounded: Tensor, runs: Sequence[ColumnRun]) -> Tensor:
    """What rounded rows are multiplied by so that their outputs are not smaller, on average, than those of the weights.

    Meaning: `(w H w) / (w H q)` of each row, H of the runs. Codes nearest to their aims shrink: `w H q` is `q H q`,
             and less than `w H w` by the error. Products of three such matrices shrink three times as much.
    Returns: float32 [rows, 1]; 1 where all is zero.
    """
    whole, held = weights.new_zeros(len(weights)), weights.new_zeros(len(weights))
    for run in runs:
        w, q = weights[:, run.columns], rounded[:, run.columns]
        if run.factor is not None:  # H = U D U^T
            w, q = w @ run.factor, q @ run.factor
        whole += (w.square() * run.importance).sum(dim=1)
        held += (w * q * run.importance).sum(dim=1)
    gain = whole / held
    return torch.where(held > 0, gain, torch.ones_like(gain)).clamp_(1 / _MOST_GAIN, _MOST_GAIN)[:, None]


def _trellis_rows(part: PartFormat, weights: Tensor, runs: Sequence[ColumnRun]) -> Tensor:
    num_rows, d = weights.shape
    codec = Trellis(part, d)
    spread = weights.view(num_rows, codec.num_groups, -1).square().mean(dim=2).sqrt()  # [rows, groups]
    scales = codec.load_scales(codec.store_scales(spread * trellis_unit(part.width)))
    check_holdable(scales, scales)
    each = scales.repeat_interleave(d // codec.num_groups, dim=1)
    codes = torch.empty((num_rows, d), dtype=torch.uint8)
    rounded = torch.empty((num_rows, d))
    states = torch.zeros(num_rows, dtype=torch.uint8)
    for run in runs:
        places = run.columns
        states = _searched(
            part.width, weights[:, places], each[:, places], run, states, codes[:, places], rounded[:, places]
        )
    rounded *= each
    return codec.encode(codes, codec.store_scales(scales * gains(weights, rounded, runs)))


def _searched(
    width: int, weights: Tensor, scales: Tensor, run: ColumnRun, states: Tensor, codes: Tensor, values: Tensor
) -> Tensor:
    """Writes a run's codes and values; returns the states after it."""
    n, aims, factor = weights.shape[1], weights.clone(), run.factor
    for first in range(0, n, _BLOCK_COLUMNS):
        end = min(first + _BLOCK_COLUMNS, n)
        seen = slice(first, min(end + _AHEAD_COLUMNS, n))
        found = search(
            weights[:, seen],
            aims[:, seen],
            scales[:, seen],
            run.importance[seen],
            width,
            factor=None if factor is None else factor[seen, seen],
            starts=states,
            num_kept=end - first,
        )
        codes[:, first:end], values[:, first:end], states = found.codes, found.values, found.windows
        if factor is not None:
            errors = weights[:, first:end] - found.values * scales[:, first:end]
            aims[:, end:] += errors @ factor[first:end, end:]
    return states


def _affine_rows(part: PartFormat, weights: Tensor, runs: Sequence[ColumnRun]) -> Tensor:
    num_rows, d = weights.shape
    codec = affine(part, d)
    groups = weights.view(num_rows, codec.num_groups, -1)
    importance = torch.cat([run.importance for run in runs]).view(codec.num_groups, -1)
    scale, zero = stored_pairs(codec, *affine_pairs(groups, importance, part.width))
    codes = torch.empty((num_rows, d))
    group_of = torch.arange(d) // groups.shape[2]
    for run in runs:
        of = group_of[run.columns]
        codes[:, run.columns] = _coded(part.width, weights[:, run.columns], scale[:, of], zero[:, of], run.factor)
    rounded = code_values(codes.view_as(groups), scale[:, :, None], zero[:, :, None]).view(num_rows, d)
    stored = codec.store_scales(scale * gains(weights, rounded, runs), zero)
    return codec.encode(codes.to(torch.uint8), *stored)


def _coded(width: int, weights: Tensor, scale: Tensor, zero: Tensor, factor: Tensor | None) -> Tensor:
    """Codes of a run's columns, float32 [rows, m]: each the nearest to its aim."""
    if factor is None:
        return nearest_codes(weights, scale, zero, width)
    w, scale, zero = (values.T.contiguous() for values in (weights, scale, zero))  # [m, rows]: a column is contiguous
    aims, codes = w.clone(), torch.empty_like(w)
    for first in range(0, len(w), _BLOCK_COLUMNS):
        end = min(first + _BLOCK_COLUMNS, len(w))
        errors = torch.empty((end - first, w.shape[1]))
        for j in range(first, end):
            codes[j] = nearest_codes(aims[j], scale[j], zero[j], width)
            errors[j - first] = w[j] - code_values(codes[j], scale[j], zero[j])
            aims[j + 1 : end].addr_(factor[j, j + 1 : end], errors[j - first])
        aims[end:].addmm_(factor[first:end, end:].T, errors)
    return codes.T
