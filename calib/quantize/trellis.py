"""Quantization to a trellis: the search for the codes of rows, and the quantizer `nearest` built on it.

`search` is a beam search through the states of a trellis. A state is the last two nibbles of the stream; a step adds
one. Only the cheapest path to a state goes on (Viterbi), and only the cheapest few of these. With a GPTQ factor each
path corrects its own errors (per-survivor processing). The native kernel and `plain_search` give the same codes bit for
bit: both take every sum in the same order.

`TrellisQuantizer` quantizes each row from its own weights. A group's scale is its root mean square times one of a few
factors. The nearest codes shorten a row, and shortened gate, up and down multiply; so scales are stretched until the
product of the weights with the stored row equals their product with themselves.
Source:  G. D. Forney, The Viterbi algorithm (1973); J. B. Anderson and S. Mohan, Sequential coding algorithms (1984);
         R. Raheli, A. Polydoros and C.-K. Tzou, Per-survivor processing (1995).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from moe_pack.formats import PartFormat
from moe_pack.formats.pack import codecs
from moe_pack.runtime import cpu


class UnrepresentableError(ValueError):
    """A row has weights that its codec cannot represent.

    `row`: its number among the given rows.   `advice`: the fault and what to do, to follow "row 3 has".
    """

    def __init__(self, row: int, advice: str) -> None:
        super().__init__(f"row {row} has {advice}")
        self.row = row
        self.advice = advice


TOO_LARGE_FOR_SCALES = "weights too large for float16 scales; store it in 16 bits"  # an `advice`

# The paths that go on after a step. Without factors, 64 find what all 256 states find but for 1% of the error.
FED_PATHS, FREE_PATHS = 32, 64
# A path corrects its own errors of so many steps; errors further back are those of the best path.
OWN_STEPS = 32
_NIBBLES, _STATES = 16, 256
# Steps searched between two products that carry their errors on: their part of the factor stays in cache. The factor of
# 4,096 columns takes 64 MiB and does not. The search looks ahead at the next steps, because paths merge late.
_BLOCK_STEPS, _AHEAD_STEPS = 64, 4
_PIECE_ROWS = 32  # that `plain_search` takes at once: 2 MiB of errors


@dataclass(frozen=True, slots=True, eq=False)
class TrellisCodes:
    """The codes of R rows, by step."""

    codes: Tensor  # u8 [R, S], as `Trellis.encode` takes them
    values: Tensor  # float32 [R, 2 S]: the levels of the weights of each step, not scaled


@torch.no_grad()
def search(
    weights: Tensor, scales: Tensor, importance: Tensor, width: int, factors: Sequence[Tensor] = ()
) -> TrellisCodes:
    """Returns the codes of rows of weights under given scales.

    Meaning: a small sum over columns j of `importance[j] * (weights[j] - scales[j] * value[j])^2`, the least for rows
             of two steps. With factors, the target of column j grows by `(weights[i] - scales[i] * value[i]) *
             factor[i, j]` for each i < j of the same factor: by the path's own errors in the last 32 steps, before them
             by those of the path that was best then; other paths end. The lower state wins between equal paths.
    Args:    weights, scales: float32 [R, 2 S], in the order of S steps (`trellis_columns`), finite (not checked); a
             scale of 0 makes all values 0.   importance: float32 [2 S], not negative.   width: of the trellis, bits of
             two weights.   factors: float32 [m, m], of consecutive runs of m columns, even numbers of them, read above
             their diagonals (`GptqFactor`).
    """
    num_rows, n = weights.shape
    assert scales.shape == weights.shape and importance.shape == (n,), f"{scales.shape}, {importance.shape}"
    assert n >= 2 and n % 2 == 0, f"{n} columns"
    assert not factors or sum(len(factor) for factor in factors) == n, f"factors for {n} columns"
    starts = torch.zeros(num_rows, dtype=torch.uint8)
    if not factors:
        rows = cpu.TrellisRows(weights, weights, scales, importance, None, starts)
        return TrellisCodes(*_search_rows(rows, width, n // 2)[:2])
    codes, values = torch.empty((num_rows, n // 2), dtype=torch.uint8), torch.empty((num_rows, n))
    first = 0
    for factor in factors:
        end = first + len(factor)
        run = slice(first, end)
        rows = cpu.TrellisRows(weights[:, run], weights[:, run], scales[:, run], importance[run], factor, starts)
        starts = _search_run(rows, width, codes[:, first // 2 : end // 2], values[:, run])
        first = end
    return TrellisCodes(codes, values)


def _search_run(rows: cpu.TrellisRows, width: int, codes: Tensor, values: Tensor) -> Tensor:
    """Writes a run's codes and values; returns the states after the run."""
    num_steps, starts, targets, factor = codes.shape[1], rows.starts, rows.targets.clone(), rows.factor
    assert factor is not None and len(factor) == 2 * num_steps, f"factor {factor} for {num_steps} steps"
    for first in range(0, num_steps, _BLOCK_STEPS):
        end = min(first + _BLOCK_STEPS, num_steps)
        block, later = slice(2 * first, 2 * end), slice(2 * end, 2 * num_steps)
        seen = slice(2 * first, 2 * min(end + _AHEAD_STEPS, num_steps))
        piece = cpu.TrellisRows(
            rows.weights[:, seen],
            targets[:, seen],
            rows.scales[:, seen],
            rows.importance[seen],
            factor[seen, seen],
            starts,
        )
        codes[:, first:end], values[:, block], starts = _search_rows(piece, width, end - first)
        errors = rows.weights[:, block] - rows.scales[:, block] * values[:, block]
        targets[:, later] += errors @ factor[block, later]
    return starts


def _search_rows(rows: cpu.TrellisRows, width: int, num_kept: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the codes and values of the first steps of rows, and the states after these."""
    if cpu.is_available():
        return cpu.search_trellis(rows, trellis_tables(width), num_kept)
    return plain_search(rows, width, num_kept)


@cache
def trellis_tables(width: int) -> cpu.TrellisTables:
    """Returns the tables of a trellis for the native kernel."""
    hashes = torch.tensor([list(bytes.fromhex(table)) for table in codecs.TRELLIS_HASH], dtype=torch.uint8)
    return cpu.TrellisTables(hashes, *codecs.trellis_levels(width))


@torch.no_grad()
def plain_search(rows: cpu.TrellisRows, width: int, num_kept: int) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `search_trellis` in torch: codes u8 [R, num_kept], values float32 [R, 2 num_kept], states u8 [R]."""
    pieces = list[tuple[Tensor, Tensor, Tensor]]()
    for first in range(0, max(1, len(rows.weights)), _PIECE_ROWS):
        piece = slice(first, first + _PIECE_ROWS)
        some = rows._replace(
            weights=rows.weights[piece],
            targets=rows.targets[piece],
            scales=rows.scales[piece],
            starts=rows.starts[piece],
        )
        pieces.append(_read_codes(_PlainPaths(some, width).codes()[:, :num_kept], width, some.starts))
    codes, values, ends = zip(*pieces, strict=True)
    return torch.cat(codes), torch.cat(values), torch.cat(ends)


def _read_codes(codes: Tensor, width: int, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Reads codes after states `starts`: codes, values, and the states after them."""
    before = torch.stack((starts >> 4, starts & 15), dim=1)
    nibbles = torch.cat((before, codes & 15), dim=1)
    hashes = codecs.trellis_hashes()[codecs.trellis_windows(nibbles)[:, 2:]].long()
    first, second = codecs.trellis_levels(width)
    low, high = (codes >> 4 & 3).long(), (codes >> 6).long()
    values = torch.stack((first[low << 4 | hashes & 15], second[high << 4 | hashes >> 4]), dim=2).flatten(1)
    return codes, values, nibbles[:, -2] << 4 | nibbles[:, -1]


class _PlainPaths:
    """The paths to all states; those that do not go on cost infinity.

    A state is the nibble before the last times 16, plus the last. Tensors of paths to the states after a step are [R,
    16, 16]: by the last nibble before the step, and that of the step.
    """

    def __init__(self, rows: cpu.TrellisRows, width: int) -> None:
        self._rows = rows
        self._levels = [levels.view(-1, _NIBBLES) for levels in codecs.trellis_levels(width)]  # [levels, 16] each
        # By the two nibbles before, and that of the step: [16, 16, 16], of windows with the newest nibble highest.
        self._sets = codecs.trellis_hashes().long().view(_NIBBLES, _NIBBLES, _NIBBLES).permute(2, 1, 0)
        self._targets = rows.targets.clone()  # with the corrections of settled steps
        self._costs = torch.full((len(rows.weights), _STATES), torch.inf)
        self._costs.scatter_(1, rows.starts[:, None].long(), 0.0)
        num_steps = 0 if rows.factor is None else OWN_STEPS
        self._errors = torch.zeros((len(rows.weights), _STATES, num_steps, 2))  # step u's at u % OWN_STEPS

    def codes(self) -> Tensor:
        num_steps = self._targets.shape[1] // 2
        parents, chosen = list[Tensor](), list[Tensor]()
        for t in range(num_steps):
            if self._rows.factor is not None and t >= OWN_STEPS:
                self._settle(t)
            parent, code = self._extend(t)
            parents.append(parent)
            chosen.append(code)
        codes = torch.empty((len(self._targets), num_steps), dtype=torch.uint8)
        state = self._costs.argmin(dim=1, keepdim=True)
        for t in reversed(range(num_steps)):
            codes[:, t] = chosen[t].gather(1, state)[:, 0].to(torch.uint8)
            state = parents[t].gather(1, state)
        return codes

    def _settle(self, t: int) -> None:
        """Adds the best path's corrections of step t - 32 to the targets, and ends paths that made other errors."""
        assert self._rows.factor is not None
        made = self._errors[:, :, t % OWN_STEPS]  # [R, states, 2]
        best = self._costs.argmin(dim=1)
        kept = made[torch.arange(len(best)), best]  # [R, 2]
        self._costs[(made != kept[:, None]).any(dim=2)] = torch.inf
        for half in range(2):
            column = 2 * (t - OWN_STEPS) + half
            self._targets[:, 2 * t :] += kept[:, half, None] * self._rows.factor[column, 2 * t :]

    def _extend(self, t: int) -> tuple[Tensor, Tensor]:
        """Extends the paths by step t; returns the state before and the code of each state, [R, 256]."""
        rows, columns = self._rows, (2 * t, 2 * t + 1)
        targets = [
            self._targets[:, column, None, None] + sums for column, sums in zip(columns, self._sums(t), strict=True)
        ]
        sets = self._sets.flatten(0, 1)  # [256, 16]: by the state before, and the step's nibble
        first, low = self._nearest(0, columns[0], targets[0], sets & 15)
        errors = rows.weights[:, columns[0], None, None] - first
        target = targets[1] if rows.factor is None else targets[1] + errors * rows.factor[columns[0], columns[1]]
        second, high = self._nearest(1, columns[1], target, sets >> 4)
        costs = self._costs[:, :, None]
        for j, misses in zip(columns, (targets[0] - first, target - second), strict=True):
            costs = costs + (rows.importance[j] * misses) * misses
        # Of the paths to a state, whose states before differ in their older nibble, the cheapest.
        best = costs.view(-1, _NIBBLES, _NIBBLES, _NIBBLES).min(dim=1)  # [R, 16, 16]
        oldest = costs.view(-1, _NIBBLES, _NIBBLES, _NIBBLES).argmin(dim=1)
        parents = (oldest * _NIBBLES + torch.arange(_NIBBLES)[:, None]).flatten(1)  # [R, 256]
        nibbles = torch.arange(_STATES) % _NIBBLES
        path = parents * _NIBBLES + nibbles  # in [256, 16]
        self._costs = self._cheapest(best.values.flatten(1))
        codes = (low.flatten(1).gather(1, path) << 4 | high.flatten(1).gather(1, path) << 6) | nibbles
        if rows.factor is not None:
            self._errors = self._errors.gather(1, parents[:, :, None, None].expand(-1, -1, OWN_STEPS, 2))
            made = torch.stack((errors, rows.weights[:, columns[1], None, None] - second), dim=3).flatten(1, 2)
            self._errors[:, :, t % OWN_STEPS] = made.gather(1, path[:, :, None].expand(-1, -1, 2))
        return parents, codes

    def _sums(self, t: int) -> list[Tensor]:
        """Returns the corrections of both targets of step t by earlier errors, [R, 256, 1] each."""
        factor, sums = self._rows.factor, list[Tensor]()
        for column in (2 * t, 2 * t + 1):
            if factor is None or t == 0:
                sums.append(torch.zeros((len(self._targets), _STATES, 1)))
                continue
            halves = [torch.zeros((len(self._targets), _STATES)) for _ in range(2)]
            # Steps by their places, but the last one after all others.
            for step in sorted(range(max(0, t - OWN_STEPS + 1), t - 1), key=lambda step: step % OWN_STEPS):
                for half in range(2):
                    halves[half] += self._errors[:, :, step % OWN_STEPS, half] * factor[2 * step + half, column]
            total = halves[0] + halves[1]
            for half in range(2):
                total = total + self._errors[:, :, (t - 1) % OWN_STEPS, half] * factor[2 * t - 2 + half, column]
            sums.append(total[:, :, None])
        return sums

    def _nearest(self, half: int, column: int, targets: Tensor, sets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the scaled levels of sets [256, 16] nearest to targets, and their numbers: [R, 256, 16]."""
        scaled = self._rows.scales[:, column, None, None] * self._levels[half]  # [R, levels, 16]
        of_sets = scaled[:, :, sets]  # [R, levels, 256, 16]
        number = (targets[:, None] - of_sets).abs().argmin(dim=1, keepdim=True)
        return of_sets.gather(1, number)[:, 0], number[:, 0]

    def _cheapest(self, costs: Tensor) -> Tensor:
        """Sets the costs of all but the cheapest paths to infinity."""
        most = FREE_PATHS if self._rows.factor is None else FED_PATHS
        kept = costs.sort(dim=1, stable=True).indices[:, :most]
        return torch.full_like(costs, torch.inf).scatter_(1, kept, costs.gather(1, kept))


# A group's scale in units of its root mean square: the first for normal weights, the others for heavy tails.
SCALE_FACTORS = (1.0, 1.1, 1.2, 1.35, 1.6, 2.0)
_MOST_GAIN = 2.0
_ERROR_OVER_BOUND = 1.25  # of a trellis on normal weights, over 4^-bits


def trellis_scales(rows: Tensor, codec: codecs.Trellis) -> Tensor:
    """Returns the scales for rows float32 [n, num_cols] with the least estimated error: float32 [n, groups], as stored.

    Meaning: errors within the reach of the levels grow with the square of the scale; beyond, they are the distance to
             the last level.
    Raises:  UnrepresentableError for a row whose scales, stretched to the most, overflow float16.
    """
    groups = rows.reshape(len(rows), codec.num_groups, -1)
    spread = groups.double().square().mean(dim=2).sqrt().float()  # [n, groups]
    unit = codecs.TRELLIS_UNITS[codec.part.width]
    best, least = torch.empty_like(spread), torch.full_like(spread, torch.inf)
    for factor in SCALE_FACTORS:
        scales = codec.load_scales(codec.store_scales(spread * (factor * unit)))
        finite = codec.load_scales(codec.store_scales(scales * _MOST_GAIN)).isfinite()
        if factor == SCALE_FACTORS[0] and not finite.all():
            raise UnrepresentableError(int((~finite).any(dim=1).nonzero()[0, 0]), TOO_LARGE_FOR_SCALES)
        error = _expected_errors(groups, scales, spread * factor, codec.part.width)
        better = finite & (error < least)
        best, least = torch.where(better, scales, best), torch.where(better, error, least)
    return best


def _expected_errors(groups: Tensor, scales: Tensor, spread: Tensor, width: int) -> Tensor:
    """Returns the expected mean squared errors of groups, [n, groups], for normal weights of rms `spread`."""
    reach = min(float(levels.abs().max()) for levels in codecs.trellis_levels(width))
    beyond = (groups.abs() - (scales * reach)[:, :, None]).clamp_(min=0).square_().mean(dim=2)
    return beyond + _ERROR_OVER_BOUND * 2.0**-width * spread.square()


class TrellisQuantizer:
    """Quantizes rows of `num_cols` weights to a trellis by least squared error: scales first, then codes."""

    def __init__(self, part: PartFormat, num_cols: int) -> None:
        self._codec = codecs.Trellis(part, num_cols)
        self._columns = codecs.trellis_columns(num_cols).flatten()
        self._places = self._columns.argsort()
        self._group = num_cols // self._codec.num_groups

    def scales(self, rows: Tensor) -> Tensor:
        """Returns the scales of rows, float32 [n, groups]: `trellis_scales`."""
        return trellis_scales(rows, self._codec)

    def expected_errors(self, rows: Tensor, scales: Tensor) -> Tensor:
        """Returns the squared errors to expect of rows under these scales, summed over their columns: float32 [n]."""
        groups, width = rows.reshape(len(rows), self._codec.num_groups, -1), self._codec.part.width
        return self._group * _expected_errors(groups, scales, scales / codecs.TRELLIS_UNITS[width], width).sum(dim=1)

    def encode(self, rows: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the bytes of rows under these scales, then stretched, and the weights that a reader finds in them."""
        codec, of_columns = self._codec, scales.repeat_interleave(self._group, dim=1)
        ones = torch.ones(codec.num_cols)
        nearest = search(rows[:, self._columns], of_columns[:, self._columns], ones, codec.part.width)
        values = nearest.values[:, self._places]
        stored = codec.store_scales(scales * unbiasing_gain(rows, of_columns * values))
        return codec.encode(nearest.codes, stored), codec.load_scales(stored).repeat_interleave(self._group, 1) * values


def unbiasing_gain(rows: Tensor, rounded: Tensor) -> Tensor:
    """Returns the factors that stretch rounded rows, float32 [n, 1]: `w . w / w . q`, at most 2; 1 if not a number."""
    exact = rows.double()
    gain = exact.square().sum(dim=1) / (exact * rounded.double()).sum(dim=1)
    sound = gain.isfinite() & (gain > 0)
    return torch.where(sound, gain, torch.ones_like(gain)).clamp(max=_MOST_GAIN).float()[:, None]
