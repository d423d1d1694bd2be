"""Drafts: tokens are proposed cheaply, verified together in one forward pass, and kept as far as they are right.

The pass computes, for each drafted token, the logits that it would have had alone. The sampler chooses from them one
after the other, as without drafts and with the same random numbers; while it chooses what was drafted, the pass has
computed the next logits already. What follows the first other choice is dropped. So the answer is the one without
drafts: to the bit with native kernels, and but for rounding in torch.

`Drafter` is what proposes, `Gate` says how much is worth a pass, and `Drafts` carries it out.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moe_pack.runtime.drafts.gate import MOST_DRAFTED, Gate
from moe_pack.runtime.drafts.ngrams import NgramDrafter
from moe_pack.runtime.model import Decoder
from moe_pack.runtime.model.kv_cache import CachedSequence

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

    Where a pass is so short that looking up takes a share of it, and drafts gain nothing, they rest, longer each time.
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
        """Begins a rest where drafts gain nothing and take a share of passes, of which the last took so long."""
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
        """Returns the tokens to verify behind a token, at most `most`."""
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
        """Compares the watched proposal with the next token of the text."""
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
