"""Drafts: tokens are proposed cheaply, verified together in one forward pass, and kept as far as they are right.

The pass computes, for each drafted token, the logits that it would have had alone. The sampler chooses from them one
after the other, as without drafts and with the same random numbers; the first other choice ends the draft. So the
answer is the one without drafts: to the bit with native kernels, and but for rounding in torch.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from moe_pack.runtime.model import Decoder
from moe_pack.runtime.model.kv_cache import CachedSequence

# ---- the gate --------------------------------------------------------------------------------------------------------

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


@dataclass(slots=True)
class Gate:
    """Chooses the length of drafts, so that a text is done soonest, by what it has measured; one serves all texts.

    It measures the time of passes for each number of tokens, and for each position of a draft how often it was right,
    given that those before it were. It drafts as many tokens as give the most tokens a second:

        (1 + p_1 + p_1 p_2 + ... + p_1 ... p_k) / seconds(1 + k)

    It also keeps an account of the time that drafts have lost so far, or gained. The loss of a draft if all of it is
    wrong, times how likely that is, has to fit: it may become a small share of all time, and in the beginning the time
    of one token. So a text hardly takes longer than without drafts, even if earlier measurements do not hold.
    """

    spent_s: float = 0.0  # of all passes
    lost_s: float = 0.0  # by passes with drafts, compared with their tokens one by one; negative if they were shorter
    _seconds: list[_Average] = field(default_factory=lambda: [_Average() for _ in range(MOST_DRAFTED + 2)])
    _right: list[list[_Share]] = field(
        default_factory=lambda: [
            [_Share(share * _ASSUMED_WEIGHT) for _ in range(MOST_DRAFTED)] for share in _ASSUMED_RIGHT
        ]
    )
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
        bearable = self._bearable(match_length, most, most_lost)
        return self._best(match_length, bearable, lambda number: plain.value * (1 + _HOPED_STEP * (number - 1)))

    def passed(self, num_drafted: int, num_accepted: int, seconds: float) -> None:
        """Counts a pass over a token and a draft behind it, and how long it took."""
        self._seconds[1 + num_drafted].add(seconds)
        self.spent_s += seconds
        if num_drafted:
            self._since_plain, self._since_draft = self._since_plain + 1, 0
            self.lost_s += seconds - (1 + num_accepted) * self._seconds[1].value
            self.lost_s = max(self.lost_s, -_MOST_CREDIT * self.spent_s)
        else:
            self._since_plain, self._since_draft = 0, self._since_draft + 1

    def judged(self, match_length: int, place: int, is_right: bool) -> None:
        """Counts whether a proposal was right in a place, from 0 on, after it was right in all before."""
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
        """Returns the longest draft, at most `most`, with an expected loss that fits."""
        wrong = 1 - self._right[_class_of(match_length)][0].value
        can_lose, plain = most_lost - self.lost_s, self._seconds[1].value
        return next((n for n in range(most, 0, -1) if wrong * (self.seconds(1 + n) - plain) <= can_lose), 0)

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


# ---- look-up ---------------------------------------------------------------------------------------------------------

# Tokens of an end that are looked up, the longest first. Measured with 4 proposed tokens after each token of this
# project's Python and of three novels (SmolLM2's tokenizer, 9,000 tokens each): of the first proposed tokens 52% and
# 19% were right. With ends of a single token too, there are 1.8 and 3 times as many proposals, 39% and 14% right, most
# of which the gate would refuse; with 3 tokens at least there are 1,989 in place of 3,156, and 516 of 1,958. The
# longest agreement gives 3% more right tokens in code than the last place, and what most places have 2% fewer than
# the longest agreement; in prose all three are within 2%.
LONGEST, SHORTEST = 4, 2
_MOST_PLACES = 8  # that the index keeps of an n-gram: the last ones
_LONGEST_MATCH = 32  # tokens; further back places are not compared

NGram = tuple[int, ...]


class NgramDrafter:
    """Proposes what followed an earlier occurrence of the text's end: names, phrases and lines of code come again.

    It takes the longest known end, and of its last occurrences the one before which most tokens agree with the text, of
    equal ones the last. A proposal that reaches the end of the text goes on with its own tokens, so that a text in a
    loop is drafted to any length.
    Source:  prompt lookup decoding, A. Saxena (2023), and LLMA (2304.04487).
    """

    needs_hidden = False

    def __init__(self) -> None:
        self.match_length = 0  # so many tokens agreed at the last proposal; 0 if there was none
        self._ends: dict[NGram, list[int]] = {}  # the positions after the last occurrences of an n-gram
        self._num_indexed = 0  # positions after which the text went on

    def propose(self, ids: Sequence[int], hidden: Tensor | None, most: int) -> list[int]:
        """Returns the tokens that may follow, at most `most`; none if the end of the text is new.

        Args:    ids: the text; it begins with that of the last call, unless `reset` was called.   hidden: not used.
        """
        self._index(ids)
        place, self.match_length = self._best_place(ids)
        if not self.match_length or most < 1:
            return []
        number, period = len(ids), len(ids) - place
        found = list(ids[place : place + most])
        while len(found) < most:  # it has reached the end of the text
            found.append(found[len(found) - period])
        assert place < number, "a place has a token after it"
        return found

    def accepted(self, number: int) -> None:
        """Does nothing: accepted tokens are in the next text."""

    def reset(self) -> None:
        """Forgets the text."""
        self._ends.clear()
        self._num_indexed, self.match_length = 0, 0

    def _index(self, ids: Sequence[int]) -> None:
        """Enters the n-grams of new tokens; nothing follows those at the end of the text yet."""
        for place in range(max(self._num_indexed, SHORTEST), len(ids)):
            for gram in _grams_before(ids, place):
                places = self._ends.setdefault(gram, [])
                places.append(place)
                if len(places) > _MOST_PLACES:
                    del places[0]
        self._num_indexed = max(self._num_indexed, len(ids))

    def _best_place(self, ids: Sequence[int]) -> tuple[int, int]:
        """Returns the position after the best occurrence of the text's end, and how many tokens agree before it."""
        for gram in _grams_before(ids, len(ids)):
            places = self._ends.get(gram)
            if places is None:
                continue
            best, longest = 0, 0
            for place in reversed(places):
                length = _agreeing(ids, place, len(gram))
                if length > longest:
                    best, longest = place, length
            return best, longest
        return 0, 0


def _grams_before(ids: Sequence[int], place: int) -> Iterator[NGram]:
    for length in range(min(LONGEST, place), SHORTEST - 1, -1):
        yield tuple(ids[place - length : place])


def _agreeing(ids: Sequence[int], place: int, known: int) -> int:
    """Returns how many tokens before a position agree with the end of the text; `known` of them do."""
    length, most, end = known, min(place, _LONGEST_MATCH), len(ids)
    while length < most and ids[place - 1 - length] == ids[end - 1 - length]:
        length += 1
    return length


# ---- drafts ----------------------------------------------------------------------------------------------------------

_MOST_OVERHEAD = 0.01  # of a pass's time: looking up, judging and counting
_AWAKE_PASSES = 8  # after which drafts may rest
_FIRST_REST, _LONGEST_REST = 64, 4096  # passes


class Drafter(Protocol):
    """Proposes the tokens that may come next in a sequence.

    A proposal never changes an answer: a token of it stays only if the sampler chooses that token anyway.
    """

    @property
    def needs_hidden(self) -> bool:
        """Whether `propose` needs the hidden state of the last token."""
        ...

    def propose(self, ids: Sequence[int], hidden: Tensor | None, most: int) -> list[int]:
        """Returns the tokens that may follow, in order, at most `most`; none where it has no proposal.

        Args:    ids: the whole sequence, the token that was chosen last at its end.   hidden: float32 [d], after the
                 last layer and before the final norm, of the last token that the model has run: the one before the
                 end of `ids`, since the model has not run the token chosen last. None unless `needs_hidden`.
        """
        ...

    def accepted(self, number: int) -> None:
        """Tells how many tokens of the last proposal were accepted; `propose` follows with a longer `ids`."""
        ...

    def reset(self) -> None:
        """Forgets the sequence: the next `ids` are of another text."""
        ...


@dataclass(slots=True)
class DraftCounts:
    """The counts so far."""

    passes: int = 0  # of decode, with drafts and without
    proposed: int = 0  # passes for which there was a proposal
    drafted: int = 0  # tokens that were verified behind another
    accepted: int = 0  # of these, the ones that were right

    @property
    def tokens_per_pass(self) -> float:
        """Tokens of the text that a pass computed, on average."""
        return 1 + self.accepted / self.passes if self.passes else 1.0


@dataclass(slots=True)
class _Watched:
    """A proposal that is compared with the text as it goes on: so many of its tokens were right until now."""

    match_length: int
    tokens: list[int]
    num_right: int = 0


class Drafts:
    """Drafts the text of one sequence at a time; `counts` and the gate are those of all texts.

    If a pass is so short that looking up takes a share of it, and drafts gain nothing, they rest, longer each time.
    Args:    gate: None: every proposal is verified whole.   most_tokens: of a pass.
    """

    def __init__(self, drafter: Drafter, gate: Gate | None, most_tokens: int = 1 + MOST_DRAFTED) -> None:
        self.counts = DraftCounts()
        self._drafter, self._gate, self._most_tokens = drafter, gate, most_tokens
        self._text: object = None
        self._is_new = False  # the first look-up reads the whole text
        self._watched: _Watched | None = None
        self._overhead_s, self._num_awake = 0.0, 0  # since the last rest
        self._rest, self._next_rest = 0, _FIRST_REST  # passes

    def begin(self, text: object) -> None:
        """Begins to draft a text, which any object stands for; nothing happens if it goes on with the same."""
        if self._text is not text:
            self._text, self._watched, self._is_new = text, None, True
            self._drafter.reset()

    def advance(
        self,
        decoder: Decoder,
        sequence: CachedSequence,
        token: int,
        most: int,
        take: Callable[[Tensor, int], int | None],
    ) -> None:
        """Appends a token to a sequence, with a draft behind it, and takes tokens from the logits after them.

        Afterwards all tokens that were taken have run, but the last.
        Args:    most: tokens that may be taken; at least one.   take: chooses a token from logits float32 [vocabulary]
                 and the number of tokens before it; None ends the text.
        Raises:  RunError as `Decoder.next_logits`, before anything runs; what `take` raises.
        """
        if self._rest:
            self._rest -= 1
            self.counts.passes += 1
            take(decoder.extend(sequence, [token]), sequence.num_tokens)
            return
        began, before = time.perf_counter(), sequence.num_tokens
        number = min(most, self._most_tokens, decoder.most_verified(sequence))
        draft = self._draft(sequence, token, number - 1)
        drafted_s = time.perf_counter() - began
        rows = decoder.verify(sequence, [token, *draft])
        seconds, kept = time.perf_counter() - began, 1
        try:
            for row, drafted in zip(rows, [*draft, None], strict=True):
                chosen = take(row, before + kept)
                if chosen is not None:
                    self._compare(chosen)
                if chosen is None or chosen != drafted:
                    break
                kept += 1
        finally:
            began = time.perf_counter()
            decoder.keep(sequence, before + kept)
            seconds += time.perf_counter() - began
            began = time.perf_counter()
            self._count(len(draft), kept - 1, seconds)
            self._overhead_s += drafted_s + time.perf_counter() - began
            self._may_rest(seconds)

    def _may_rest(self, seconds: float) -> None:
        """Begins a rest if drafts gain nothing and take a share of passes, the last of which took so long."""
        self._num_awake += 1
        if self._gate is None or self._num_awake < _AWAKE_PASSES:
            return
        is_costly = self._overhead_s > _MOST_OVERHEAD * seconds * self._num_awake
        self._overhead_s, self._num_awake = 0.0, 0
        if is_costly and self._gate.lost_s >= 0:
            self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _LONGEST_REST)
            self._watched, self._is_new = None, True
        else:
            self._next_rest = _FIRST_REST

    def _draft(self, sequence: CachedSequence, token: int, most: int) -> list[int]:
        drafter, gate = self._drafter, self._gate
        if most < 1:
            return []
        sequence.ids[sequence.num_tokens :] = [token]
        if not isinstance(drafter, NgramDrafter):
            number = min(most, MOST_DRAFTED) if gate is None else gate.length(0, most)
            hidden = sequence.hidden if drafter.needs_hidden else None
            return self._watch(0, drafter.propose(sequence.ids, hidden, number)) if number else []
        # A look-up costs nothing, so all of them are watched, whether they are verified or not.
        found = drafter.propose(sequence.ids, None, min(most, MOST_DRAFTED))
        number = len(found) if gate is None else gate.length(drafter.match_length, len(found))
        return self._watch(drafter.match_length, found)[:number]

    def _watch(self, match_length: int, found: list[int]) -> list[int]:
        if found:
            self.counts.proposed += 1
            if self._watched is None:
                self._watched = _Watched(match_length, found)
        return found

    def _compare(self, chosen: int) -> None:
        watched = self._watched
        if watched is None:
            return
        is_right = watched.tokens[watched.num_right] == chosen
        if self._gate is not None:
            self._gate.judged(watched.match_length, watched.num_right, is_right)
        watched.num_right += 1
        if not is_right or watched.num_right == len(watched.tokens):
            self._watched = None

    def _count(self, num_drafted: int, num_accepted: int, seconds: float) -> None:
        counts = self.counts
        counts.passes += 1
        counts.drafted += num_drafted
        counts.accepted += num_accepted
        if num_drafted:
            self._drafter.accepted(num_accepted)
        if self._gate is not None and not self._is_new:
            self._gate.passed(num_drafted, num_accepted, seconds)
        self._is_new = False
