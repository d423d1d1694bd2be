"""Quantization to a trellis: the search for the codes of rows, and the quantizer `nearest` built on it.

`search` finds the cheapest path through the states of the code stream. A state is the stream's last 7 bits. A column
adds k bits, so each state has 2^k predecessors, and of the paths that lead to a state only the cheapest can go on
(Viterbi). With a GPTQ factor, a column's target depends on earlier errors, which differ from path to path: each path
corrects its own errors (per-survivor processing). This is no longer exact, but much better than corrections from the
one path that looks best. The native kernel and `plain_search` give the same codes bit for bit: both take every sum in
the same order.
Source: G. D. Forney, The Viterbi algorithm (1973); R. Raheli, A. Polydoros and C.-K. Tzou, Per-survivor processing
(1995), for channels that are estimated while they are decoded.

`TrellisQuantizer` quantizes each row from its own weights. A group's scale is its root mean square, in the table's
unit, times one of a few factors: larger ones let the table reach the outliers of a row. The nearest codes make a row
shorter. Shortened rows of gate, up and down multiply, and cost more than their squared error says. So the scales are
stretched until the product of the weights with the stored row equals their product with themselves.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_pack.formats import PartFormat
from moe_pack.formats.codecs import Trellis, trellis_steps, trellis_unit, trellis_values
from moe_pack.runtime.cpu import TrellisRows, is_available, search_trellis


class UnrepresentableError(ValueError):
    """A row has weights that its codec cannot represent.

    `row`: its number among the given rows.   `advice`: the fault and what to do, to follow "row 3 has".
    """

    def __init__(self, row: int, advice: str) -> None:
        super().__init__(f"row {row} has {advice}")
        self.row = row
        self.advice = advice


TOO_LARGE_FOR_SCALES = "weights too large for float16 scales; store it in 16 bits"  # an `advice`

# A path corrects its own errors of so many columns; errors further back are those of the best path. Paths merge late:
# with 32 columns two gate matrices of small-mixtral lose up to 3% more at 2 and 3 bits, with 128 up to 0.8% less.
SURVIVOR_COLUMNS = 64
_BITS, _STATES = 7, 128
_SUMS = 4  # column u's error is at u % 64, and is added to sum u % 4: these sums do not wait for each other
_PIECE_ROWS = 128  # rows that `plain_search` takes at once: 4 MiB of errors


@dataclass(frozen=True, slots=True, eq=False)
class TrellisCodes:
    """The codes of R rows.

    `codes` u8 [R, num_kept]: each column's new bits.   `values` float32 [R, num_kept]: their values in the table, not
    scaled.   `windows` u8 [R]: the state after the last of these columns.
    """

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
) -> TrellisCodes:
    """Returns the codes of rows of weights under given scales.

    Meaning: without `factor`, the codes with the least sum over columns j of `importance[j] * (targets[j] - scales[j] *
             value[j])^2`, exact but for float32's rounding. With `factor`, the target of column j grows by
             `(weights[i] - scales[i] * value[i]) * factor[i, j]` for each i < j. For the last 63 columns these are the
             errors of the path itself; for earlier columns they are those of the path that was best then, and paths
             that disagree with it end. Of equal paths the one with lower states wins.
             A row's codes do not depend on the other rows.
    Args:    weights, targets, scales: float32 [R, n], finite (not checked); the first is an even column of its row.
             importance: float32 [n] or [R, n], not negative.   width: of the trellis, bits of two weights.
             factor: float32 [n, n], read above its diagonal (`GptqFactor`).   starts: u8 [R], the states before the
             first column; zeros by default.   num_kept: columns whose codes are returned, all by default; the search
             only looks ahead at the others.
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
    return TrellisCodes(*search_trellis(rows, width, trellis_values(width), kept))


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
) -> TrellisCodes:
    """Computes `search` in torch: the twin of the native kernel, and its substitute if that is not installed."""
    pieces = []
    for first in range(0, max(1, len(weights)), _PIECE_ROWS):
        piece = slice(first, first + _PIECE_ROWS)
        importances = (importance if importance.dim() == 2 else importance.expand_as(weights))[piece]
        rows = TrellisRows(weights[piece], targets[piece], scales[piece], importances, factor, starts[piece])
        pieces.append(_read_codes(_best_path(rows, width), width, rows.starts, num_kept))
    return TrellisCodes(
        torch.cat([piece.codes for piece in pieces]),
        torch.cat([piece.values for piece in pieces]),
        torch.cat([piece.windows for piece in pieces]),
    )


def _best_path(rows: TrellisRows, width: int) -> Tensor:
    """Returns the states after each column on the best path: int64 [R, n]."""
    num_rows, n = rows.weights.shape
    tables, targets = trellis_values(width), rows.targets.clone()
    costs = torch.full((num_rows, _STATES), torch.inf)
    costs.scatter_(1, rows.starts[:, None].long(), 0.0)
    errors = torch.zeros((num_rows, _STATES, SURVIVOR_COLUMNS if rows.factor is not None else 0))
    parents = []  # for each column, the best predecessor of the states that share their newest bits: [R, 128 / 2^k]
    for t in range(n):
        k = trellis_steps(width)[t % 2]
        if rows.factor is not None and t >= SURVIVOR_COLUMNS:
            _commit_error(rows.factor, t, costs, errors, targets)
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
    return _trace_back(costs, parents)


def _commit_error(factor: Tensor, t: int, costs: Tensor, errors: Tensor, targets: Tensor) -> None:
    """Fixes the error of column t - 64: adds the best path's correction to the targets and ends paths that differ."""
    column = t - SURVIVOR_COLUMNS
    path_errors = errors[:, :, column % SURVIVOR_COLUMNS]
    kept = path_errors.gather(1, costs.argmin(dim=1, keepdim=True))  # [R, 1]
    costs[path_errors != kept] = torch.inf
    targets[:, t:] += kept * factor[column, t:]


def _corrections(factor: Tensor, t: int, errors: Tensor) -> Tensor:
    """Returns what the errors [R, states, 64] of columns before t add to its target: [R, states]."""
    sums = [torch.zeros(errors.shape[:2]) for _ in range(_SUMS)]
    for slot in range(min(t, SURVIVOR_COLUMNS)):
        column = slot + (t - 1 - slot) // SURVIVOR_COLUMNS * SURVIVOR_COLUMNS  # the last one before t at this place
        if max(0, t - SURVIVOR_COLUMNS + 1) <= column < t - 1:
            sums[slot % _SUMS] += errors[:, :, slot] * factor[column, t]
    if t == 0:
        return sums[0]
    newest = errors[:, :, (t - 1) % SURVIVOR_COLUMNS] * factor[t - 1, t]
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + newest


def _trace_back(costs: Tensor, parents: list[Tensor]) -> Tensor:
    """Returns the states of the cheapest path, int64 [R, n], from the costs after its end and all predecessors."""
    states = torch.empty((len(costs), len(parents)), dtype=torch.int64)
    last = costs.argmin(dim=1)
    for t in reversed(range(len(parents))):
        states[:, t] = last
        last = parents[t].gather(1, last[:, None] % parents[t].shape[1])[:, 0]
    return states


def _read_codes(states: Tensor, width: int, starts: Tensor, num_kept: int) -> TrellisCodes:
    """Returns the codes of a path of states, and the values that a reader finds for them."""
    tables, window = trellis_values(width), starts.long()
    codes = torch.empty((len(states), num_kept), dtype=torch.uint8)
    values = torch.empty((len(states), num_kept))
    for t in range(num_kept):
        k = trellis_steps(width)[t % 2]
        code = states[:, t] >> (_BITS - k)
        window = window >> k | code << (_BITS - k)
        codes[:, t] = code.to(torch.uint8)
        values[:, t] = tables[t % 2, window]
    return TrellisCodes(codes, values, window.to(torch.uint8))


# The first is best for normal weights, one of the others for heavy tails.
SCALE_FACTORS = (1.0, 1.1, 1.2, 1.35)
_MOST_GAIN = 2.0


class TrellisQuantizer:
    """Quantizes rows of `num_cols` weights to a trellis by least squared error: scales first, then codes."""

    def __init__(self, part: PartFormat, num_cols: int) -> None:
        self._codec = Trellis(part, num_cols)
        self._importance = torch.ones(num_cols)

    def scales(self, rows: Tensor) -> Tensor:
        """Returns the scales, float32 [n, groups] as stored, with the least error for each row float32 [n, num_cols].

        Raises:  UnrepresentableError for a row whose scales, stretched to the most, overflow float16.
        """
        codec = self._codec
        spread = rows.reshape(len(rows), codec.num_groups, -1).double().square().mean(dim=2).sqrt().float()
        best, least = torch.empty_like(spread), torch.full((len(rows), 1), torch.inf)
        for factor in SCALE_FACTORS:
            scales = codec.load_scales(codec.store_scales(spread * (factor * trellis_unit(codec.part.width))))
            finite = codec.load_scales(codec.store_scales(scales * _MOST_GAIN)).isfinite().all(dim=1, keepdim=True)
            if factor == SCALE_FACTORS[0] and not finite.all():
                raise UnrepresentableError(int((~finite).nonzero()[0, 0]), TOO_LARGE_FOR_SCALES)
            values = self._search(rows, scales).values
            error = (self._of_columns(scales).mul_(values) - rows).square().sum(dim=1, keepdim=True)
            better = finite & (error < least)
            best, least = torch.where(better, scales, best), torch.where(better, error, least)
        return best

    def encode(self, rows: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the bytes of rows under these scales, then stretched, and the weights that a reader finds in them."""
        nearest, codec = self._search(rows, scales), self._codec
        gain = unbiasing_gain(rows, self._of_columns(scales).mul_(nearest.values))
        stored = codec.store_scales(scales * gain)
        rounded = self._of_columns(codec.load_scales(stored)).mul_(nearest.values)
        return codec.encode(nearest.codes, stored), rounded

    def _search(self, rows: Tensor, scales: Tensor) -> TrellisCodes:
        return search(rows, rows, self._of_columns(scales), self._importance, self._codec.part.width)

    def _of_columns(self, scales: Tensor) -> Tensor:
        """Returns the scale of each column, [n, num_cols], from those of groups, [n, groups]."""
        return scales.repeat_interleave(len(self._importance) // self._codec.num_groups, dim=1)


def unbiasing_gain(rows: Tensor, rounded: Tensor) -> Tensor:
    """Returns the factors that stretch rounded rows, float32 [n, 1]: `w . w / w . q`, at most 2; 1 if not a number."""
    exact = rows.double()
    gain = exact.square().sum(dim=1) / (exact * rounded.double()).sum(dim=1)
    sound = gain.isfinite() & (gain > 0)
    return torch.where(sound, gain, torch.ones_like(gain)).clamp(max=_MOST_GAIN).float()[:, None]
