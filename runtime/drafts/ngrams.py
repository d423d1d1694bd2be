"""Drafts by look-up: the last tokens are looked for earlier in the text, and what followed them is proposed.

Texts repeat themselves: names, phrases, lines of code, what a question quotes. The longest end of the text that
occurred before, of some lengths, is looked up in an index, and the tokens after it are proposed. It needs no model and
takes microseconds. Source: prompt lookup decoding, A. Saxena (2023), and LLMA (2304.04487).
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

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
    """Proposes what followed an earlier occurrence of the text's end.

    Of the last occurrences of the longest end that is known, it takes the one before which most tokens agree with the
    text, and of equal ones the last. A proposal that reaches the end of the text goes on with its own tokens, so that a
    text in a loop is drafted to any length.
    `match_length`: so many tokens agreed at the last proposal; 0 if there was none.
    """

    needs_hidden = False

    def __init__(self) -> None:
        self.match_length = 0
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
        """Does nothing: what was accepted is in the next text."""

    def reset(self) -> None:
        """Forgets the text."""
        self._ends.clear()
        self._num_indexed, self.match_length = 0, 0

    def _index(self, ids: Sequence[int]) -> None:
        """Enters the n-grams of new tokens, without those at the end of the text, which nothing follows yet."""
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
    """Yields the n-grams that end before a position, the longest first."""
    for length in range(min(LONGEST, place), SHORTEST - 1, -1):
        yield tuple(ids[place - length : place])


def _agreeing(ids: Sequence[int], place: int, known: int) -> int:
    """Returns how many tokens before a position agree with the end of the text; `known` of them do."""
    length, most, end = known, min(place, _LONGEST_MATCH), len(ids)
    while length < most and ids[place - 1 - length] == ids[end - 1 - length]:
        length += 1
    return length
