"""What a quantizer says of rows that its format cannot hold.

The codes of trellis rows: the cheapest path through the states of the stream, natively or in plain torch.

A state is the stream's last 7 bits. A column adds k bits to it, so each state has 2^k states before it, and of the
paths that lead to a state only the cheapest can go on (Viterbi). With feedback a column's target depends on the errors
made before it, which differ from path to path: each path corrects its own (per-survivor processing). That is no longer
exact, and much better than corrections from the one path that looks best.

The extension of `runtime/` and `plain_search` give the same codes bit for bit: every sum is taken in one order.
Source: G. D. Forney, The Viterbi algorithm (1973); R. Raheli, A. Polydoros and C.-K. Tzou, Per-survivor processing
(1995), for channels that are estimated while they are decoded.

Rows of weights as a trellis's bytes, each from its own weights alone.

A group's scale is its weights' root mean square, in the table's unit, times one of a few factors: with larger ones the
table reaches further, which pays where a row has outliers. What is nearest to a row is also shorter than it; shortened
gate, up and down rows multiply up, and cost more than their squared error says. So scales are stretched afterwards
until the row's product with what is stored is that with itself.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_pack.formats import PartFormat
from moe_pack.formats.codecs import Trellis, trellis_steps, trellis_unit, trellis_values
from moe_pack.runtime.cpu import TrellisRows, is_available, search_trellis


class UnrepresentableError(ValueError):
    """A row has weights its codec cannot express; `row` counts from the first that was given, `advice` says why."""

    def __init__(self, row: int, advice: str) -> None:
        super().__init__(f"row {row} has {advice}")
        self.row = row
        self.advice = advice


# A path corrects its own errors of so many columns; what lies further back is the best path's. Paths merge late: with
# 32 two gate matrices of small-mixtral lose up to 3% more at 2 and 3 bit, with 128 up to 0.8% less.
SURVIVOR_COLUMNS = 64
_BITS, _STATES = 7, 128
_SUMS = 4  # column u's error lies at u % 64, and is added up in sum u % 4: sums that do not wait for each other
_PIECE_ROWS = 128  # of `plain_search` at once: 4 MiB of errors


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Codes u8 [R, num_kept], each column's new bits; the table's `values` for them, float32, not scaled; `windows`
    u8 [R]: the state after the last of these columns."""

    codes: Tensor
    values: Tensor
    windows: Tensor


def search(
    weights: Tensor,
    targets: Tensor,
    scales: Tensor,
    importance: Tensor,
    width: int,
    *,
    factor: Tensor | None = None,
    starts: Tensor | None = None,
    num_kept: int | None = None,
) -> Found:
    """The codes of rows of weights under given scales.

    Meaning: without `factor` those that minimise the sum over columns j of `importance[j] * (targets[j] - scales[j] *
             value[j])^2`, exactly but for float32's rounding. With it column j's target grows by
             `(weights[i] - scales[i] * value[i]) * factor[i, j]` for each i < j: a path's own errors for the last 63
             columns, those of the path then best for columns before, and a path that disagrees with that one ends.
             Of equal paths the one of lower states is taken.
    Args:    weights, targets, scales: float32 [R, n], the first an even column of its row.   importance: float32 [n] or
             [R, n], not negative.   width: of the trellis, bits of two weights.   factor: float32 [n, n], read
             above its diagonal (`moments.Feedback`).   starts: u8 [R], the states before the first column, zeros by
             default.   num_kept: columns whose codes are wanted, all by default; the others are only looked ahead at.
    Returns: the same for rows together and one by one. Not checked: that all numbers are finite.
    """
    num_rows, n = weights.shape
    kept = n if num_kept is None else num_kept
    starts = torch.zeros(num_rows, dtype=torch.uint8) if starts is None else starts
    assert targets.shape == scales.shape == weights.shape, f"{targets.shape}, {scales.shape} for {weights.shape}"
    assert importance.shape in ((n,), (num_rows, n)), f"importance {importance.shape} for {weights.shape}"
    assert factor is None or factor.shape == (n, n), f"factor {factor} for {n} columns"
    assert starts.shape == (num_rows,) and bool((starts < _STATES).all()), "states before the first column"
    assert n >= 1 and 0 <= kept <= n, f"{kept} of {n} columns"
    if not is_available():
        return plain_search(weights, targets, scales, importance, width, factor, starts, kept)
    rows = TrellisRows(weights, targets, scales, importance, factor, starts)
    return Found(*search_trellis(rows, width, trellis_values(width), kept))


@torch.no_grad()
def plain_search(
    weights: Tensor,
    targets: Tensor,
    scales: Tensor,
    importance: Tensor,
    width: int,
    factor: Tensor | None,
    starts: Tensor,
    num_kept: int,
) -> Found:
    """`search` in torch, for where there is no extension, and as its twin."""
    pieces = []
    for first in range(0, max(1, len(weights)), _PIECE_ROWS):
        piece = slice(first, first + _PIECE_ROWS)
        importances = (importance if importance.dim() == 2 else importance.expand_as(weights))[piece]
        rows = TrellisRows(weights[piece], targets[piece], scales[piece], importances, factor, starts[piece])
        pieces.append(_replayed(_path(rows, width), width, rows.starts, num_kept))
    return Found(
        torch.cat([piece.codes for piece in pieces]),
        torch.cat([piece.values for piece in pieces]),
        torch.cat([piece.windows for piece in pieces]),
    )


def _path(rows: TrellisRows, width: int) -> Tensor:
    """The states after each column on the best path: int64 [R, n]."""
    num_rows, n = rows.weights.shape
    tables, targets = trellis_values(width), rows.targets.clone()
    costs = torch.full((num_rows, _STATES), torch.inf)
    costs.scatter_(1, rows.starts[:, None].long(), 0.0)
    errors = torch.zeros((num_rows, _STATES, SURVIVOR_COLUMNS if rows.factor is not None else 0))
    parents = []  # of the states with the same newest bits, before each column: [R, 128 / 2^k]
    for t in range(n):
        k = trellis_steps(width)[t % 2]
        if rows.factor is not None and t >= SURVIVOR_COLUMNS:
            _commit(rows.factor, t, costs, errors, targets)
        choices = costs.view(num_rows, _STATES >> k, 1 << k)  # a state's oldest bits are its lowest, and leave it
        oldest = choices.argmin(dim=2)
        parents.append(torch.arange(choices.shape[1]) << k | oldest)
        cheapest = choices.gather(2, oldest[:, :, None])[:, None, :, 0]  # [R, 1, 128 / 2^k]
        target = targets[:, t, None]
        if rows.factor is not None:
            errors = errors.gather(1, parents[t][:, :, None].expand(-1, -1, SURVIVOR_COLUMNS))
            target = target + _corrections(rows.factor, t, errors)
        values = rows.scales[:, t, None, None] * tables[t % 2].view(1 << k, -1)  # [R, 2^k, 128 / 2^k]
        misses = target[:, None, :] - values
        costs = (cheapest + (rows.importance[:, t, None, None] * misses) * misses).view(num_rows, _STATES)
        if rows.factor is not None:
            errors = errors.repeat(1, 1 << k, 1)
            errors[:, :, t % SURVIVOR_COLUMNS] = (rows.weights[:, t, None, None] - values).view(num_rows, _STATES)
    return _traced(costs, parents)


def _commit(factor: Tensor, t: int, costs: Tensor, errors: Tensor, targets: Tensor) -> None:
    """The error of column t - 64 is what the best path has; its corrections join the targets, other paths end."""
    column = t - SURVIVOR_COLUMNS
    made = errors[:, :, column % SURVIVOR_COLUMNS]
    kept = made.gather(1, costs.argmin(dim=1, keepdim=True))  # [R, 1]
    costs[made != kept] = torch.inf
    targets[:, t:] += kept * factor[column, t:]


def _corrections(factor: Tensor, t: int, errors: Tensor) -> Tensor:
    """What errors [R, states, 64] of columns before t add to its target: [R, states]."""
    sums = [torch.zeros(errors.shape[:2]) for _ in range(_SUMS)]
    for slot in range(min(t, SURVIVOR_COLUMNS)):
        column = slot + (t - 1 - slot) // SURVIVOR_COLUMNS * SURVIVOR_COLUMNS  # the last before t that lies there
        if max(0, t - SURVIVOR_COLUMNS + 1) <= column < t - 1:
            sums[slot % _SUMS] += errors[:, :, slot] * factor[column, t]
    if t == 0:
        return sums[0]
    newest = errors[:, :, (t - 1) % SURVIVOR_COLUMNS] * factor[t - 1, t]
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + newest


def _traced(costs: Tensor, parents: list[Tensor]) -> Tensor:
    states = torch.empty((len(costs), len(parents)), dtype=torch.int64)
    last = costs.argmin(dim=1)
    for t in reversed(range(len(parents))):
        states[:, t] = last
        last = parents[t].gather(1, last[:, None] % parents[t].shape[1])[:, 0]
    return states


def _replayed(states: Tensor, width: int, starts: Tensor, num_kept: int) -> Found:
    """The codes of states, and what a reader makes of them."""
    tables, window = trellis_values(width), starts.long()
    codes = torch.empty((len(states), num_kept), dtype=torch.uint8)
    values = torch.empty((len(states), num_kept))
    for t in range(num_kept):
        k = trellis_steps(width)[t % 2]
        code = states[:, t] >> (_BITS - k)
        window = window >> k | code << (_BITS - k)
        codes[:, t] = code.to(torch.uint8)
        values[:, t] = tables[t % 2, window]
    return Found(codes, values, window.to(torch.uint8))


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
                raise UnrepresentableError(row, "weights beyond float16 scales; store it in 16 bits")
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
