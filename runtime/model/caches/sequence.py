"""A sequence: its tokens, and the cache of those that have run.

A new text often begins as an earlier one does: a dialogue goes on, or a system prompt comes again. Then the keys and
values of the common beginning need not be computed again. Those of layers that keep the whole context can be cut back
to any position. States of mixers, and rings of layers with a sliding window, cannot: they lead back to where a copy of
them was made, a *checkpoint*. A sequence has room for some checkpoints, allocated once, and uses the one that was not
used for longest for the next.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

import torch
from torch import Tensor

from moe_pack.formats import ModelSpec
from moe_pack.runtime.model.caches import kv_cache
from moe_pack.runtime.model.caches.ropes import Angles, LayerRopes

LEAST_KEPT = 16  # tokens of a beginning; fewer are not worth the other rounding
_ANGLES_AT_ONCE = 256  # positions; the angles of a single position take as long to compute


class Follower(Protocol):
    """Follows the hidden states of a sequence, for drafts."""

    def follow(self, ids: Sequence[int], first: int, hidden: Tensor) -> None:
        """Takes note of hidden states float32 [T, w], after the last layer and before the final norm.

        Args:    ids: the sequence with the tokens that have them.   first: the position of the first of these; a
                 position that was there before, and all after it, are new.
        """
        ...


class CachedSequence:
    """The tokens of a sequence, and the keys, values and states of those that have run.

    Args:    num_checkpoints: room for so many, apart from the cache's own copy of states.
    """

    def __init__(self, spec: ModelSpec, cache: kv_cache.KVCache, ropes: LayerRopes, num_checkpoints: int = 0) -> None:
        self.spec, self.cache = spec, cache
        self.ids: list[int] = []  # while a pass runs, its new tokens are already there
        # Of the last token that ran, after the last layer and before the final norm, float32 [w], for drafts.
        self.hidden: Tensor | None = None
        self.follower: Follower | None = None  # gets the hidden states of all tokens
        number = 0 if cache.is_cut_anywhere else num_checkpoints
        self._checkpoints = [cache.new_checkpoint() for _ in range(number)]  # the one used last comes last
        self._ropes = ropes
        self._angle_run: tuple[Angles, ...] = ((torch.empty(0), torch.empty(0)),)  # of consecutive positions
        self._first_angle, self._angle_length = 0, 0  # the length of the sequence that has these angles

    @property
    def num_tokens(self) -> int:
        """The number of tokens that have run."""
        return self.cache.num_tokens

    @property
    def num_bytes(self) -> int:
        """The bytes of the cache and of all checkpoints."""
        return self.cache.num_bytes + sum(each.num_bytes for each in self._checkpoints)

    def reset(self) -> None:
        """Forgets the sequence; everything stays allocated."""
        self.cache.num_tokens = 0
        self.ids = []
        for checkpoint in self._checkpoints:
            checkpoint.num_tokens = 0

    def cut_to(self, num_tokens: int) -> None:
        """Drops the tokens from a position on that is `reachable`."""
        if self.cache.reachable(num_tokens) == num_tokens:
            self.cache.return_to(num_tokens)
        else:
            (checkpoint,) = (each for each in self._checkpoints if each.num_tokens == num_tokens)
            self.cache.return_to_checkpoint(checkpoint)
            self._use(checkpoint)
        del self.ids[num_tokens:]
        for checkpoint in self._checkpoints:
            if checkpoint.num_tokens > num_tokens:
                checkpoint.num_tokens = 0

    # ---- common beginnings ------------------------------------------------------------------------------------------

    def reachable(self, num_tokens: int) -> int:
        """Returns the last position up to `num_tokens` to which the sequence can be cut back; 0 is always one."""
        copied = (each.num_tokens for each in self._checkpoints if each.num_tokens <= num_tokens)
        return max(self.cache.reachable(num_tokens), max(copied, default=0))

    def num_common(self, prompt_ids: Sequence[int]) -> int:
        """Returns how many tokens a prompt has in common with the sequence, at most all but the prompt's last."""
        pairs = zip(self.ids[: self.num_tokens], prompt_ids[:-1], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def num_kept(self, prompt_ids: Sequence[int]) -> int:
        """Returns how many tokens of a prompt need not run again if it takes the place of this sequence."""
        kept = self.reachable(self.num_common(prompt_ids))
        if kept < LEAST_KEPT or not self.are_angles_same(self.num_tokens, len(prompt_ids)):
            return 0
        return kept

    def keep_beginning(self, prompt_ids: list[int]) -> list[int]:
        """Begins a text with this prompt; returns the tokens that are left to append, at least one.

        The others are the beginning of the sequence so far, whose keys, values and states stay.
        """
        kept = self.num_kept(prompt_ids)
        if not kept:
            self.reset()
            return prompt_ids
        self.cut_to(kept)
        return prompt_ids[kept:]

    def take_beginning(self, other: "CachedSequence", num_tokens: int) -> None:
        """Becomes a copy of another sequence's first tokens, up to a position that is `reachable` there."""
        self.reset()
        for own, part in zip(self.cache.whole_parts(num_tokens), other.cache.whole_parts(num_tokens), strict=True):
            own.copy_(part)
        if self.cache.is_cut_anywhere:
            self.cache.num_tokens = num_tokens
        else:
            assert self._checkpoints, "sequences that share beginnings have checkpoints"
            checkpoint = self._checkpoints[0]
            other.copy_checkpoint(num_tokens, checkpoint)
            self.cache.return_to_checkpoint(checkpoint)
            self._use(checkpoint)
        self.ids = other.ids[:num_tokens]

    def copy_checkpoint(self, num_tokens: int, room: kv_cache.Checkpoint) -> None:
        """Fills a checkpoint of another sequence with what this sequence keeps at a position that is `reachable`."""
        for checkpoint in self._checkpoints:
            if checkpoint.num_tokens == num_tokens:
                for own, part in zip(room.parts, checkpoint.parts, strict=True):
                    own.copy_(part)
                room.num_tokens = num_tokens
                return
        self.cache.write_checkpoint(room, num_tokens)

    def save_checkpoint(self) -> None:
        """Makes the present position one to which the sequence can be cut back."""
        self.cache.save()
        if not self._checkpoints or not self.num_tokens:
            return
        same = [each for each in self._checkpoints if each.num_tokens == self.num_tokens]
        checkpoint = same[0] if same else min(self._checkpoints, key=lambda each: each.num_tokens > 0)
        self.cache.write_checkpoint(checkpoint, self.num_tokens)
        self._use(checkpoint)

    @property
    def checkpoints(self) -> tuple[kv_cache.Checkpoint, ...]:
        """The checkpoints that are not empty, the one used last comes last."""
        return tuple(each for each in self._checkpoints if each.num_tokens)

    def room_for(self, num_checkpoints: int) -> list[kv_cache.Checkpoint]:
        """Returns so many checkpoints to write to, or all if there are fewer; the last ones are kept longest."""
        return self._checkpoints[len(self._checkpoints) - min(num_checkpoints, len(self._checkpoints)) :]

    def _use(self, checkpoint: kv_cache.Checkpoint) -> None:
        self._checkpoints.remove(checkpoint)
        self._checkpoints.append(checkpoint)

    # ---- rotary positions -------------------------------------------------------------------------------------------

    def are_angles_same(self, before: int, after: int) -> bool:
        """Returns whether what ran in a sequence of one length has the angles of one of another length."""
        return self._ropes.are_same(before, after)

    def outgrows(self, num_new: int) -> bool:
        """Returns whether all positions must be computed again when so many tokens are appended."""
        return self._ropes.outgrows(self.num_tokens, self.num_tokens + num_new)

    def angles_at(self, start: int, stop: int, num_tokens: int) -> tuple[Angles, ...]:
        """Returns the angles at positions `start` to `stop` for each kind of attention; many are computed at once.

        Args:    num_tokens: of the sequence when its new tokens have run.
        """
        first = self._first_angle
        is_same = num_tokens == self._angle_length or self.are_angles_same(self._angle_length, num_tokens)
        if not is_same or not first <= start < stop <= first + len(self._angle_run[0][0]):
            positions = torch.arange(start, max(stop, start + _ANGLES_AT_ONCE), device=self.cache.device)
            self._angle_run = self._ropes(positions, num_tokens)
            self._first_angle, self._angle_length = start, num_tokens
            first = start
        rows = slice(start - first, stop - first)
        return tuple((cosines[rows], sines[rows]) for cosines, sines in self._angle_run)


def joined_angles(each: Sequence[tuple[Angles, ...]]) -> tuple[Angles, ...]:
    """Returns the angles of several sequences' tokens, one after the other, for each kind of attention."""
    if len(each) == 1:
        return each[0]

    return tuple(
        (torch.cat([cosines for cosines, _ in kinds]), torch.cat([sines for _, sines in kinds]))
        for kinds in zip(*each, strict=True)
    )
