"""The gate: how many tokens to draft, so that a text is done soonest.

A pass over a token and k drafted ones takes longer than a pass over one, how much depends on the model, the machine
and, where experts come from the disk, on how many more of them the drafted tokens need. The gate measures both sides
while the text runs: the time of passes for each number of tokens, and for each position of a draft how often it was
right, given that those before it were. It drafts as many tokens as give the most tokens a second:

    (1 + p_1 + p_1 p_2 + ... + p_1 ... p_k) / seconds(1 + k)

It also keeps an account of the time that drafts have lost so far, or gained. What a draft loses if all of it is wrong,
times how likely that is, has to fit: the loss may become a small share of all time, and in the beginning the time of
one token. So a text hardly takes longer than without drafts, even if what was measured does not hold for what comes.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

MOST_DRAFTED = 8  # tokens of a draft
_LEAST_GAIN = 1.03  # of tokens a second, before a draft is worth it: estimates are not better than that
_MOST_LOST = 0.01  # of the time so far
_MOST_CREDIT = 0.05  # of the time so far: what drafts gained earlier and may lose again
_ASSUMED_STEP = 0.25  # of a pass's time, for one more token in it, until it is measured
_HOPED_STEP = 0.1  # the same, where a probe finds out whether it has changed
_NEWEST_SHARE = 0.08  # of the newest measurement in an average
_LEAST_PLAIN = 3  # passes without a draft before the first with one
_PROBE_PASSES = 64  # without a draft, before a probe
_STALE_PASSES = 64  # after so many passes with drafts, one without measures again what they are compared with
# Match lengths of n-grams that are counted together begin with these; drafters without match lengths have the first.
_CLASSES = (0, 2, 3, 4, 6, 9, 16)
_ASSUMED_RIGHT = (0.6, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85)  # shares, until they are measured
_ASSUMED_WEIGHT = 3.0  # of these shares: so many observations
_FORGET = 0.97  # the weight of what was observed before, at each observation


@dataclass(slots=True)
class _Average:
    """An average of measurements in which the newer ones count more."""

    value: float = 0.0
    number: int = 0

    def add(self, value: float) -> None:
        self.number += 1
        self.value += (value - self.value) * max(1 / self.number, _NEWEST_SHARE)


@dataclass(slots=True)
class _Share:
    """How often something was so, from an assumed share on."""

    is_so: float
    number: float = _ASSUMED_WEIGHT

    @property
    def value(self) -> float:
        return self.is_so / self.number

    def add(self, is_so: bool) -> None:
        self.is_so = self.is_so * _FORGET + is_so
        self.number = self.number * _FORGET + 1


def _assumed_shares() -> list[list[_Share]]:
    return [[_Share(share * _ASSUMED_WEIGHT) for _ in range(MOST_DRAFTED)] for share in _ASSUMED_RIGHT]


@dataclass(slots=True)
class Gate:
    """Chooses the length of drafts by what it has measured; one serves all texts of an engine."""

    spent_s: float = 0.0  # of all passes
    lost_s: float = 0.0  # by passes with drafts, compared with their tokens one by one; negative if they were shorter
    _seconds: list[_Average] = field(default_factory=lambda: [_Average() for _ in range(MOST_DRAFTED + 2)])
    _right: list[list[_Share]] = field(default_factory=_assumed_shares)
    _since_plain: int = 0  # passes
    _since_draft: int = 0

    def length(self, match_length: int, most: int) -> int:
        """Returns how many tokens to draft, at most `most`; 0: none.

        Args:    match_length: of the proposal, as `NgramDrafter` says; 0 for another drafter.
        """
        most, plain = min(most, MOST_DRAFTED), self._seconds[1]
        if most < 1 or plain.number < _LEAST_PLAIN or self._since_plain >= _STALE_PASSES:
            return 0
        most_lost = _MOST_LOST * self.spent_s
        bearable = self._bearable(match_length, most, max(most_lost, plain.value))
        best = self._best(match_length, bearable, self.seconds)
        if best or self._since_draft < _PROBE_PASSES:
            return best
        # What was measured may be past: a probe measures again.
        return self._best(match_length, self._bearable(match_length, most, most_lost), self._hoped_seconds)

    def passed(self, num_drafted: int, num_accepted: int, seconds: float) -> None:
        """Takes note of a pass over a token and a draft behind it, and how long it took."""
        self._seconds[1 + num_drafted].add(seconds)
        self.spent_s += seconds
        if num_drafted:
            self._since_plain, self._since_draft = self._since_plain + 1, 0
            self.lost_s += seconds - (1 + num_accepted) * self._seconds[1].value
            self.lost_s = max(self.lost_s, -_MOST_CREDIT * self.spent_s)
        else:
            self._since_plain, self._since_draft = 0, self._since_draft + 1

    def judged(self, match_length: int, place: int, is_right: bool) -> None:
        """Takes note of whether a proposal was right in a place, from 0 on, after it was right in all before."""
        if place < MOST_DRAFTED:
            self._right[_class_of(match_length)][place].add(is_right)

    def seconds(self, num_tokens: int) -> float:
        """Returns the estimated seconds of a pass over so many tokens, from those of the nearest numbers measured."""
        each = self._seconds[num_tokens]
        if each.number:
            return each.value
        measured = [number for number in range(1, len(self._seconds)) if self._seconds[number].number]
        below = max(number for number in measured if number < num_tokens)
        above = min((number for number in measured if number > num_tokens), default=None)
        least = self._seconds[below].value
        if above is not None:
            share = (num_tokens - below) / (above - below)
            return least + share * (self._seconds[above].value - least)
        step = _ASSUMED_STEP * least if below == 1 else (least - self._seconds[1].value) / (below - 1)
        return least + (num_tokens - below) * max(step, 0.0)

    def _bearable(self, match_length: int, most: int, most_lost: float) -> int:
        """Returns the longest draft, at most `most`, whose loss if it is wrong, times how likely that is, fits."""
        wrong = 1 - self._right[_class_of(match_length)][0].value
        can_lose, plain = most_lost - self.lost_s, self._seconds[1].value
        return next((n for n in range(most, 0, -1) if wrong * (self.seconds(1 + n) - plain) <= can_lose), 0)

    def _hoped_seconds(self, num_tokens: int) -> float:
        return self._seconds[1].value * (1 + _HOPED_STEP * (num_tokens - 1))

    def _best(self, match_length: int, most: int, seconds: Callable[[int], float]) -> int:
        """Returns the draft with the most tokens a second; 0 if they are not clearly more than without a draft."""
        shares, plain = self._right[_class_of(match_length)], seconds(1)
        best, gain, expected, reached = 0, _LEAST_GAIN, 1.0, 1.0
        for number in range(1, most + 1):
            reached *= shares[number - 1].value
            expected += reached
            found = expected * plain / seconds(1 + number)
            if found > gain:
                best, gain = number, found
        return best


def _class_of(match_length: int) -> int:
    return bisect_right(_CLASSES, match_length) - 1
