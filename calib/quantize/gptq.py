"""Second moments of what an expert's weights are multiplied with, and what error feedback makes of them.

A row of weights `w` is rounded to `q`; over tokens `v` with weights `s` the squared error of its products is
`(w - q) H (w - q)^T`, `H = sum s v v^T / sum s`. With `H = U D U^T`, U upper triangular, ones on its diagonal, it is

    sum over columns j of D[j] (t[j] - q[j])^2,    t[j] = w[j] + sum over i < j of (w[i] - q[i]) U[i, j]

so rounding the columns in their order, each to what is nearest to `t[j]`, makes up for the errors before as far as
columns to come can (GPTQ, LDLQ). `U` and `D` are `GptqFactor.factor` and `GptqFactor.importance`.

Rows of down are summed, not multiplied: there `v` is `h` of all neurons, and feedback goes from neuron to neuron.

Rows of gate and up to codes: a column's error is made up for by the columns that come after it.

What is minimised is `(w - q) H (w - q)^T` (`moments`): each column aims at its weight and the corrections of the errors
before it, and a miss of that aim costs the column's importance. Scales come first, from the row as it is, then codes.

Rows of down to codes: a neuron's error is made up for by the neurons that come after it.

A row aims at its weights and at what earlier rows' errors, as activations hang together, ask of it; it is rounded to
the least squared miss of that aim, to which all columns are alike. Scales are found for some neurons at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_pack.calib.quantize.plain import affine_pairs, check_holdable, code_values, nearest_codes, stored_pairs
from moe_pack.calib.quantize.trellis import TrellisRounding, UnrepresentableError, search
from moe_pack.formats import PartFormat
from moe_pack.formats.codecs import Trellis, affine, trellis_unit

# Shares of the mean of the diagonal, added to it. Less than the least (GPTQ's percdamp), and a factor may not exist.
LEAST_DAMPING = 0.01
# What `damping` says: more where columns are not much fewer than tokens, for then much of what seems to hang together
# does so by chance. Chosen by KL divergence at 2 and 3 bits.
USUAL_DAMPING, MOST_DAMPING = 0.1, 1.0
_DAMPING_OF_A_COLUMN = 0.4  # over the number of tokens
_PIECE_TOKENS = 256  # weighted at once


def second_moments(values: Tensor, weights: Tensor) -> Tensor:
    """Weighted second moments of columns, `sum w v v^T / sum w`.

    With one torch thread the same values give the same bits. 2 n m^2 operations; beside the result what 256 tokens'
    values take. For moments among some of the columns pass these columns.

    Args:    values: float32 [n, m].   weights: float32 [n], not negative.
    Returns: float32 [m, m]; zeros where no weight is above 0. Not checked: that all are finite.
    """
    moments = values.new_zeros((values.shape[1], values.shape[1]))
    total = float(weights.sum(dtype=torch.float64))
    if not total > 0:
        return moments
    shares = (weights.to(torch.float64) / total).sqrt().to(torch.float32)  # squares of weights may be tiny
    for piece, share in zip(torch.split(values, _PIECE_TOKENS), torch.split(shares, _PIECE_TOKENS), strict=True):
        weighted = piece * share[:, None]
        moments.addmm_(weighted.T, weighted)
    return moments


def damping(weights: Tensor, num_columns: int) -> float:
    """What `feedback` is to add to the diagonal of the moments of so many columns, as a share of its mean.

    Meaning: 0.4 m / n within 0.1 and 1, with n = (sum w)^2 / sum w^2: of tokens of equal weight, their number.
    Args:    weights: float32 [n], of the tokens that moments are made of.   num_columns: of a block, where these are
             taken by blocks.
    """
    exact = weights.to(torch.float64)
    squares = float(exact.square().sum())
    if not squares > 0:
        return MOST_DAMPING
    num_tokens = float(exact.sum()) ** 2 / squares
    return min(max(_DAMPING_OF_A_COLUMN * num_columns / num_tokens, USUAL_DAMPING), MOST_DAMPING)


@dataclass(frozen=True, slots=True, eq=False)
class GptqFactor:
    """How errors of columns are made up for by later ones.

    `factor` float32 [m, m]: upper triangular with ones on its diagonal; rounding column j aims at
    `w[j] + sum over i < j of (w[i] - q[i]) factor[i, j]`.   `importance` float32 [m]: what a squared error of that
    aim costs, above 0; with all later columns left unrounded it is all that is lost.
    """

    factor: Tensor
    importance: Tensor


@torch.no_grad()
def feedback(moments: Tensor, share: float = LEAST_DAMPING) -> GptqFactor:
    """The factor and importance of columns in their order, from their second moments, damped.

    Meaning: H + share * mean of its diagonal = U D U^T. So damped, moments of any values have a factor in float64:
             their largest eigenvalue is at most m / share + 1 times the smallest. A column that was always zero takes
             and gives no feedback; moments that are all zero give none, every column as important as the next.
    Cost:    m^3 / 3 multiplications in float64, and 16 m^2 bytes for a while: 256 MiB for 4,096 columns. Wider
             matrices go in blocks of columns: pass `moments[a:b, a:b]`, and let errors end at b.
    Args:    moments: float32 [m, m], symmetric: the upper triangle is read.   share: `damping` says how much; at
             least `LEAST_DAMPING`.
    """
    assert share >= LEAST_DAMPING, f"damped by {share}, a factor may not exist"
    # The lower Cholesky factor of the matrix turned by half a turn, turned back, is upper: R R^T = H, R = U sqrt(D).
    turned = moments.flip(0, 1).to(torch.float64)
    diagonal = turned.diagonal()
    mean = float(diagonal.mean())
    diagonal += share * mean if mean > 0 else 1.0
    root = torch.linalg.cholesky(turned)
    del turned, diagonal
    steps = root.diagonal().clone()  # [m], sqrt(D) turned
    root /= steps  # columns by their diagonal
    return GptqFactor(root.to(torch.float32).flip(0, 1), steps.flip(0).square().to(torch.float32))


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
        except UnrepresentableError as fault:
            raise UnrepresentableError(first + fault.row, fault.advice) from fault
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
