"""GPTQ: quantization one column or one row after another, where later ones make up for the errors of earlier ones.

A row of weights `w` is rounded to `q`. Over tokens `v` with weights `s`, the squared error of its products is `(w - q)
H (w - q)^T` with the Hessian `H = sum s v v^T / sum s`. With `H = U D U^T`, U upper triangular with ones on its
diagonal, that is

    sum over columns j of D[j] (t[j] - q[j])^2,    t[j] = w[j] + sum over i < j of (w[i] - q[i]) U[i, j]

Columns are rounded in their order, each to the code nearest to its target `t[j]`. `gptq_columns` does so with rows of
gate and up; `v` is the expert's input. `gptq_rows` does it with rows of down, each a column of the formula: `v` is `h`
of all neurons, and errors go from row to row, the largest activations first. Second rows of repeated neurons begin as
zeros and follow directly. Scales are found before codes: for gate and up from the row itself, for down from the targets
of some rows together.
Source:  GPTQ (arXiv 2210.17323) and LDLQ of QuIP (arXiv 2307.13304) for gate and up; ours for down and the gain.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from moe_pack.calib.quantize import plain, trellis
from moe_pack.formats import PartFormat
from moe_pack.formats.pack import codecs

# Shares of the diagonal's mean, added to the diagonal. Below the least (GPTQ's percdamp), a factor may not exist.
LEAST_DAMPING = 0.01
# The range of `damping`: more where columns are not much fewer than tokens, because many of their correlations are then
# chance. Chosen by KL divergence at 2 and 3 bits.
USUAL_DAMPING, MOST_DAMPING = 0.1, 1.0
_DAMPING_OF_A_COLUMN = 0.4  # over the number of tokens
_PIECE_TOKENS = 256  # weighted at once
_LEAST_MEAN = 1e-30  # of a diagonal, or a sum of weights: what is less counts as zero


def weighted_hessian(values: Tensor, weights: Tensor) -> Tensor:
    """Returns the weighted second moments of columns, `sum w v v^T / sum w`: float32 [m, m]; zeros for zero weights.

    With one torch thread the same values give the same bits.
    Args:    values: float32 [n, m], finite (not checked).   weights: float32 [n], not negative.
    """
    hessian = values.new_zeros((values.shape[1], values.shape[1]))
    total = float(weights.sum(dtype=torch.float64))
    if not total > 0:
        return hessian
    shares = (weights.to(torch.float64) / total).sqrt().to(torch.float32)  # squares of weights may be tiny
    for piece, share in zip(torch.split(values, _PIECE_TOKENS), torch.split(shares, _PIECE_TOKENS), strict=True):
        weighted = piece * share[:, None]
        hessian.addmm_(weighted.T, weighted)
    return hessian


def damping(weights: Tensor, num_columns: int) -> float:
    """Returns the share of its diagonal's mean that `gptq_factor` adds to the diagonal of a Hessian.

    Meaning: 0.4 m / n within 0.1 and 1, with n = (sum w)^2 / sum w^2: the number of tokens, if all weigh the same.
    Args:    weights: float32 [n], of the tokens of the Hessian.   num_columns: m, of one run if columns are in runs.
    """
    exact = weights.to(torch.float64)
    squares = float(exact.square().sum())
    if not squares > 0:
        return MOST_DAMPING
    return damping_of(float(exact.sum()) ** 2 / squares, num_columns)


def damping_of(num_tokens: float, num_columns: int) -> float:
    """Returns the `damping` of a number of tokens, above 0, that all weigh the same."""
    return min(max(_DAMPING_OF_A_COLUMN * num_columns / num_tokens, USUAL_DAMPING), MOST_DAMPING)


@dataclass(frozen=True, slots=True, eq=False)
class GptqFactor:
    """A damped Hessian, decomposed: the target of column j is `w[j] + sum_{i < j} (w[i] - q[i]) factor[i, j]`."""

    factor: Tensor  # float32 [m, m]: upper triangular with ones on its diagonal
    # float32 [m], above 0: the cost of a squared difference from that target. If all later columns stay unrounded, it
    # is the whole cost.
    importance: Tensor


@torch.no_grad()
def gptq_factor(hessian: Tensor, share: float = LEAST_DAMPING) -> GptqFactor:
    """Decomposes a Hessian, damped, into the factor and the importance of its columns in their order.

    Meaning: H + share * mean of its diagonal = U D U^T. With this damping a factor exists in float64: the largest
             eigenvalue is at most m / share + 1 times the smallest. A column of zeros neither gives nor takes
             corrections; a Hessian of zeros gives the identity and equal importance. It takes m^3 / 3 multiplications
             in float64 and 16 m^2 bytes: split a wider matrix into runs of columns.
    Args:    hessian: float32 [m, m], symmetric; only the upper triangle is read.   share: from `damping`, at least
             `LEAST_DAMPING`.
    """
    assert share >= LEAST_DAMPING, f"damped by {share}, a factor may not exist"
    # The lower Cholesky factor of the matrix turned by half a turn, turned back, is upper: R R^T = H, R = U sqrt(D).
    turned = hessian.flip(0, 1).to(torch.float64)
    diagonal = turned.diagonal()
    mean = float(diagonal.mean())
    diagonal += share * mean if mean > 0 else 1.0
    root = torch.linalg.cholesky(turned)
    del turned, diagonal
    root_diagonal = root.diagonal().clone()  # [m], sqrt(D) turned
    root /= root_diagonal
    return GptqFactor(root.to(torch.float32).flip(0, 1), root_diagonal.flip(0).square().to(torch.float32))


class DampedFit:
    """Least squares by which rows of weights make up for missing outputs, damped like a `GptqFactor`.

    With inputs x_t, weights s_t and missing outputs e_t it is `(H + r I)^-1 sum s x^T e`, with `H = sum s x x^T` and r
    a share of the mean of its diagonal. With fewer tokens than inputs, the products of the tokens give the same.
    Args:    inputs: float32 [n, m].   weights: float32 [n], not negative.   share: of the diagonal's mean.
    """

    def __init__(self, inputs: Tensor, weights: Tensor, share: float) -> None:
        total = max(float(weights.sum(dtype=torch.float64)), _LEAST_MEAN)
        self._roots = (weights.to(torch.float64) / total).sqrt_().to(torch.float32)
        x = self._weighted = inputs * self._roots[:, None]
        n, m = inputs.shape
        self._is_by_token = n < m
        squares = (x @ x.T if self._is_by_token else x.T @ x).to(torch.float64)
        squares.diagonal().add_(share * max(float(x.square().sum(dtype=torch.float64)) / m, _LEAST_MEAN))
        self._root = torch.linalg.cholesky(squares)

    def addition(self, missing: Tensor) -> Tensor:
        """Returns what to add to the weights, float32 [m, k], for missing outputs float32 [n, k]."""
        weighted = missing * self._roots[:, None]
        if self._is_by_token:
            return self._weighted.T @ torch.cholesky_solve(weighted.to(torch.float64), self._root).to(torch.float32)
        return torch.cholesky_solve((self._weighted.T @ weighted).to(torch.float64), self._root).to(torch.float32)


_MOST_GAIN = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class ColumnRun:
    """Consecutive columns of a matrix that correct each other's errors and no others."""

    columns: slice  # its place in a row
    importance: Tensor  # float32 [m], of `GptqFactor`
    factor: Tensor  # float32 [m, m], of `GptqFactor`


def column_gains(weights: Tensor, rounded: Tensor, runs: Sequence[ColumnRun]) -> Tensor:
    """Returns the factors [rows, 1] by which the outputs of rounded rows become as large as those of the weights.

    Meaning: `(w H w) / (w H q)`, H of the runs; 1 for a row of zeros. Codes nearest to their targets shrink a row: `w H
             q` is `q H q`, less than `w H w` by the error. Products of three such matrices shrink three times.
    """
    exact, mixed = weights.new_zeros(len(weights)), weights.new_zeros(len(weights))
    for run in runs:  # H = U D U^T
        w, q = weights[:, run.columns] @ run.factor, rounded[:, run.columns] @ run.factor
        exact += (w.square() * run.importance).sum(dim=1)
        mixed += (w * q * run.importance).sum(dim=1)
    return _bounded_gains(exact, mixed)


def _bounded_gains(exact: Tensor, mixed: Tensor) -> Tensor:
    """Returns `exact / mixed` of each row, from 1/2 to 2; 1 if `mixed` is not above 0."""
    gain = exact / mixed
    return torch.where(mixed > 0, gain, torch.ones_like(gain)).clamp_(1 / _MOST_GAIN, _MOST_GAIN)[:, None]


# Columns rounded between two products that carry their errors on: their part of the factor stays in cache. The factor
# of 4,096 columns takes 64 MiB and does not.
_BLOCK_COLUMNS = 128


def column_order(num_cols: int) -> Tensor:
    """Returns the order in which columns are quantized, int64 [num_cols]: that of a trellis's steps."""
    return codecs.trellis_columns(num_cols).flatten()


def gptq_columns(part: PartFormat, weights: Tensor, runs: Sequence[ColumnRun]) -> Tensor:
    """Quantizes rows column by column: u8 [rows, part_bytes].

    Args:    part: affine or trellis.   weights: float32 [rows, d], finite.   runs: all columns, in `column_order`.
    Raises:  UnrepresentableError for a row with weights too large for float16 scales.
    """
    return _trellis_rows(part, weights, runs) if part.codec == "trellis" else _affine_rows(part, weights, runs)


def _trellis_rows(part: PartFormat, weights: Tensor, runs: Sequence[ColumnRun]) -> Tensor:
    d = weights.shape[1]
    codec, order = codecs.Trellis(part, d), column_order(d)
    scales = trellis.trellis_scales(weights, codec)
    column_scales = scales.repeat_interleave(d // codec.num_groups, dim=1)[:, order]
    ordered = weights[:, order]
    importance = torch.cat([run.importance for run in runs])
    found = trellis.search(ordered, column_scales, importance, part.width, [run.factor for run in runs])
    rounded = found.values * column_scales
    return codec.encode(found.codes, codec.store_scales(scales * column_gains(ordered, rounded, runs)))


def _affine_rows(part: PartFormat, weights: Tensor, runs: Sequence[ColumnRun]) -> Tensor:
    num_rows, d = weights.shape
    codec, order = codecs.affine(part, d), column_order(d)
    groups = weights.view(num_rows, codec.num_groups, -1)
    importance = torch.cat([run.importance for run in runs])[order.argsort()].view(codec.num_groups, -1)
    scale, zero = plain.stored_pairs(codec, *plain.affine_pairs(groups, importance, part.width))
    ordered, codes = weights[:, order], torch.empty((num_rows, d))
    group_of = order // groups.shape[2]
    for run in runs:
        group = group_of[run.columns]
        codes[:, run.columns] = _affine_codes(
            part.width, ordered[:, run.columns], scale[:, group], zero[:, group], run.factor
        )
    gain = column_gains(ordered, plain.code_values(codes, scale[:, group_of], zero[:, group_of]), runs)
    stored = codec.store_scales(scale * gain, zero)
    return codec.encode(codes[:, order.argsort()].to(torch.uint8), *stored)


def _affine_codes(width: int, weights: Tensor, scale: Tensor, zero: Tensor, factor: Tensor) -> Tensor:
    """Returns the codes of a run's columns, float32 [rows, m]; weights, scale and zero are of each column."""
    w, scale, zero = (values.T.contiguous() for values in (weights, scale, zero))  # [m, rows]: a column is contiguous
    targets, codes = w.clone(), torch.empty_like(w)
    for first in range(0, len(w), _BLOCK_COLUMNS):
        end = min(first + _BLOCK_COLUMNS, len(w))
        errors = torch.empty((end - first, w.shape[1]))
        for j in range(first, end):
            codes[j] = plain.nearest_codes(targets[j], scale[j], zero[j], width)
            errors[j - first] = w[j] - plain.code_values(codes[j], scale[j], zero[j])
            targets[j + 1 : end].addr_(factor[j, j + 1 : end], errors[j - first])
        targets[end:].addmm_(factor[first:end, end:].T, errors)
    return codes.T


_BLOCK_ROWS = 32  # rows rounded between two products that carry their errors on


def gptq_rows(
    part: PartFormat, weights: Tensor, hessian: Tensor, share: float = LEAST_DAMPING, repeated: Sequence[int] = ()
) -> Tensor:
    """Quantizes rows one after another, by falling diagonal of the Hessian; repeated rows first.

    Args:    part: affine or trellis.   weights: float32 [n, d], finite.   hessian: float32 [n, n], of the rows'
             activations.   share: its damping, as for `gptq_factor`.   repeated: rows that get a second row, which is
             added to the first.
    Returns: u8 [n + len(repeated), part_bytes]: all rows, then the second ones.
    Raises:  UnrepresentableError for a row with weights too large for float16 scales.
    """
    n, d, twice = *weights.shape, torch.tensor(repeated, dtype=torch.int64)
    order = hessian.diagonal().argsort(descending=True, stable=True)
    is_repeated = torch.zeros(n, dtype=torch.bool).index_fill_(0, twice, True)
    neurons = torch.cat((twice, twice, order[~is_repeated[order]]))  # of each row, in the order of rounding
    order = torch.cat((twice, torch.arange(n, n + len(twice)), order[~is_repeated[order]]))
    factor = gptq_factor(hessian[neurons][:, neurons], share).factor
    weights = torch.cat((weights, weights.new_zeros((len(twice), d))))[order]
    quantizer = square_quantizer(part, d)
    rows = torch.empty((len(weights), part.part_bytes(d)), dtype=torch.uint8)
    targets, errors = weights.clone(), torch.empty_like(weights)
    for first, end in _row_blocks(len(twice), len(weights)):
        try:
            scales = quantizer.scales(targets[first:end])
        except trellis.UnrepresentableError as fault:
            raise trellis.UnrepresentableError(int(neurons[first + fault.row]), fault.advice) from fault
        for i in range(first, end):
            target = (targets[i] + factor[first:i, i] @ errors[first:i])[None]
            row, rounded = quantizer.encode(target, scales[i - first : i - first + 1])
            rows[order[i]] = row[0]
            errors[i] = weights[i] - rounded[0]
        targets[end:].addmm_(factor[first:end, end:].T, errors[first:end])
    return rows


def _row_blocks(num_repeated: int, num_rows: int) -> Iterator[tuple[int, int]]:
    """Yields (first, end) of rows whose scales are found together, second rows apart from first ones."""
    bounds = (0, num_repeated, 2 * num_repeated, num_rows)
    for begin, stop in pairwise(bounds):
        for first in range(begin, stop, _BLOCK_ROWS):
            yield first, min(first + _BLOCK_ROWS, stop)


def square_quantizer(part: PartFormat, num_cols: int) -> "trellis.TrellisQuantizer | AffineQuantizer":
    """Returns the quantizer that minimizes the squared error of each row of `num_cols` weights alone."""
    return trellis.TrellisQuantizer(part, num_cols) if part.codec == "trellis" else AffineQuantizer(part, num_cols)


class AffineQuantizer:
    """Quantizes rows of `num_cols` weights to affine codes by least squared error, all columns of equal importance."""

    def __init__(self, part: PartFormat, num_cols: int) -> None:
        self._width = part.width
        self._codec = codecs.affine(part, num_cols)
        self._importance = torch.ones((self._codec.num_groups, num_cols // self._codec.num_groups))

    def scales(self, rows: Tensor) -> Tensor:
        """Returns scales and zeros as stored, float32 [n, 2, groups], for rows float32 [n, num_cols]."""
        groups = rows.view(len(rows), self._codec.num_groups, -1)
        return torch.stack(
            plain.stored_pairs(self._codec, *plain.affine_pairs(groups, self._importance, self._width)), dim=1
        )

    def expected_errors(self, rows: Tensor, scales: Tensor) -> Tensor:
        """Returns the squared errors of rows under these scales, summed over their columns: float32 [n]."""
        groups = rows.view(len(rows), self._codec.num_groups, -1)
        scale, zero = scales[:, 0, :, None], scales[:, 1, :, None]
        values = plain.code_values(plain.nearest_codes(groups, scale, zero, self._width), scale, zero)
        return values.sub_(groups).square_().sum(dim=(1, 2))

    def encode(self, rows: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the bytes of rows under these scales, then stretched, and the weights that a reader finds in them."""
        scale, zero = scales[:, 0, :, None], scales[:, 1, :, None]
        groups = rows.view(len(rows), self._codec.num_groups, -1)
        codes = plain.nearest_codes(groups, scale, zero, self._width)
        rounded = plain.code_values(codes, scale, zero).flatten(1)
        gain = _bounded_gains(rows.square().sum(dim=1), (rows * rounded).sum(dim=1))
        stored = self._codec.store_scales(scales[:, 0] * gain, scales[:, 1])
        return self._codec.encode(codes.flatten(1).to(torch.uint8), *stored), rounded.mul_(gain)
