"""A sequence: its tokens, and the cache of all layers for those that have run.

A new text often begins as an earlier one does: a dialogue goes on, or a system prompt comes again. Then the keys and
values of the common beginning need not be computed again. Layers that keep the whole context can be cut back to any
position. States of mixers, and rings of layers with a sliding window, cannot: they lead back to a copy, a *checkpoint*.
A sequence has room for some checkpoints, allocated once, and overwrites the one that was not used for longest.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Protocol

import torch
from torch import Tensor

from moe_pack.formats.parts import specs
from moe_pack.runtime.model.attention import kinds
from moe_pack.runtime.model.caches import Angles, KvDtype, LayerRopes, LayerState, layer_cache
from moe_pack.runtime.model.caches.states import States

LEAST_KEPT = 16  # tokens of a beginning; fewer are not worth the other rounding
_ANGLES_AT_ONCE = 256  # positions; the angles of a single position take as long to compute


def layer_cache_bytes(spec: specs.ModelSpec, layer: int, context_tokens: int, chunk_tokens: int, dtype: KvDtype) -> int:
    """Returns the bytes of all that a decoder layer caches of positions."""
    places = specs.cached_tokens(spec, layer, context_tokens, chunk_tokens)
    return kinds.cache_shape(spec.attention_of(layer), dtype).num_bytes(places, context_tokens, chunk_tokens)


@dataclass(frozen=True, slots=True)
class _Ring:
    """A tensor whose places along a dimension are a ring; a token needs the last `window` positions before it."""

    tensor: Tensor
    dim: int
    window: int

    def reaches(self, num_tokens: int, last: int) -> bool:
        return max(num_tokens - self.window, 0) >= last - self.tensor.shape[self.dim]

    def before(self, num_tokens: int) -> Tensor:
        places = layer_cache.ring_places(max(num_tokens - self.window, 0), num_tokens, self.tensor, self.dim)
        return self.tensor[:, places] if self.dim else self.tensor[places]

    def enter(self, num_tokens: int, positions: Tensor) -> None:
        places = layer_cache.ring_places(max(num_tokens - self.window, 0), num_tokens, self.tensor, self.dim)
        if self.dim:
            self.tensor[:, places] = positions
        else:
            self.tensor[places] = positions

    def empty(self) -> Tensor:
        shape = list(self.tensor.shape)
        shape[self.dim] = self.window
        return self.tensor.new_zeros(shape)


class Checkpoint:
    """Room for a copy of a cache's states, and of its rings' windows."""

    def __init__(self, parts: list[Tensor], num_states: int) -> None:
        self.num_tokens = 0  # after which it was taken; 0 if it is empty
        self.parts, self.num_states = parts, num_states

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class KVCache:
    """The keys and values of all layers, [heads, places, n] each: float32, bfloat16, or codes (`storage`).

    A layer has a place for every position of the context, or fewer with a sliding window (`cached_tokens`). A layer
    without attention has a state instead, and one with n-grams has a state as well, float32 whatever the dtype.
    `num_tokens` may rise, and may return to 0, which resets the states. Other earlier positions are those of
    `reachable`.

    Args:    context_tokens: the most positions of a sequence.   chunk_tokens: the most tokens that are appended at
             once; None: any number.   num_layers: None: the model's; else layers that keep the whole context.
             memory: the caches of layers, and the states of those with a mixer; None: they are allocated.
    """

    def __init__(
        self,
        spec: specs.ModelSpec,
        context_tokens: int,
        device: torch.device,
        num_layers: int | None = None,
        dtype: KvDtype = "f32",
        chunk_tokens: int | None = None,
        memory: tuple[Sequence[layer_cache.LayerCache], Mapping[int, LayerState]] | None = None,
    ) -> None:
        chunk = context_tokens if chunk_tokens is None else chunk_tokens
        self.device, self.dtype, self.context_tokens = device, dtype, context_tokens
        layers, mixers = (None, None) if memory is None else memory
        self.states = States(spec if num_layers is None else None, device, mixers)
        if num_layers is None:
            places = [specs.cached_tokens(spec, i, context_tokens, chunk) for i in range(spec.num_hidden_layers)]
        else:
            places = [context_tokens] * num_layers
        shapes = [kinds.cache_shape(spec.attention_of(i), dtype) for i in range(len(places))]
        if layers is None:
            layers = [s.empty(n, context_tokens, chunk, device) for s, n in zip(shapes, places, strict=True)]
        self._layers = tuple(layers)
        self.keys, self.values = (tuple(layer.keys for layer in self._layers), tuple(l.values for l in self._layers))
        num_bytes = (shape.num_bytes(n, context_tokens, chunk) for shape, n in zip(shapes, places, strict=True))
        self.num_bytes = sum(num_bytes) + self.states.num_bytes  # of keys, values and states
        self._rings = tuple(self._find_rings(spec))
        self.is_ring = bool(self._rings)  # some layer has fewer places than positions
        self._chosen = layer_cache.Chosen()
        self._num_tokens = 0
        self._saved_tokens: int | None = None  # where states were copied

    @classmethod
    def joined(cls, spec: specs.ModelSpec, caches: Sequence["KVCache"]) -> "KVCache":
        """Returns the cache of a whole model, whose memory is that of caches of its consecutive layers."""
        last, layers, states = caches[-1], list[layer_cache.LayerCache](), list[tuple[int, States]]()
        for each in caches:
            states.append((len(layers), each.states))
            layers += each._layers
        memory = layers, dict[int, LayerState]()
        found = cls(spec, last.context_tokens, last.device, dtype=last.dtype, memory=memory)
        found.states = States.joined(states, last.device)
        found.num_bytes = sum(each.num_bytes for each in caches)
        return found

    def go_with(self, whole: "KVCache") -> None:
        """Takes the position of a joined cache, which has this cache's memory."""
        self._num_tokens = whole.num_tokens

    def _find_rings(self, spec: specs.ModelSpec) -> Iterator[_Ring]:
        for number, layer in enumerate(self._layers):
            if 0 < layer.keys.shape[1] < self.context_tokens:
                window = specs.cached_tokens(spec, number, self.context_tokens, 0)
                yield _Ring(layer.keys, 1, window)
                if layer.values.data_ptr() != layer.keys.data_ptr():
                    yield _Ring(layer.values, 1, window)
            if layer.compressed is not None and len(layer.compressed.raw) < self.context_tokens:
                yield _Ring(layer.compressed.raw, 0, layer.compressed.earlier_tokens)

    @staticmethod
    def of_layer(
        spec: specs.ModelSpec, layer: int, context_tokens: int, device: torch.device
    ) -> layer_cache.LayerCache:
        """Returns the keys and values, float32, of one layer that keeps the whole context and has seen nothing."""
        shape = kinds.cache_shape(spec.attention_of(layer), "f32")
        return shape.empty(context_tokens, context_tokens, context_tokens, device)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @num_tokens.setter
    def num_tokens(self, num_tokens: int) -> None:
        if num_tokens == 0:
            self.states.reset()
            self._saved_tokens = None
        else:
            assert num_tokens >= self._num_tokens or not self.states, "states cannot be cut back"
        self._num_tokens = num_tokens

    def save(self) -> None:
        """Makes the present position one to which the cache leads back; keys and values need nothing for that."""
        if self.states:
            self.states.save()
            self._saved_tokens = self._num_tokens

    def reachable(self, num_tokens: int) -> int:
        """Returns the last position up to `num_tokens` to which the cache leads back; 0 is always one."""
        if num_tokens >= self._num_tokens:
            return self._num_tokens
        if self.states:
            saved = self._saved_tokens
            num_tokens = saved if saved is not None and saved <= num_tokens else 0
        return num_tokens if all(ring.reaches(num_tokens, self._num_tokens) for ring in self._rings) else 0

    @property
    def most_taken_back(self) -> int:
        """The most tokens of a pass that can be taken back, wherever the sequence is; states need `save` before it."""
        return min((ring.tensor.shape[ring.dim] - ring.window for ring in self._rings), default=self.context_tokens)

    def return_to(self, num_tokens: int) -> None:
        """Goes back to a position that is `reachable`."""
        assert self.reachable(num_tokens) == num_tokens, "the cache does not lead back there"
        if num_tokens and num_tokens < self._num_tokens:
            if self.states:
                self.states.restore()
            self._num_tokens = num_tokens
        else:
            self.num_tokens = num_tokens

    # ---- copies, for several sequences ------------------------------------------------------------------------------

    @property
    def is_cut_anywhere(self) -> bool:
        """Whether the cache can be cut back to any earlier position without a checkpoint."""
        return not self.states and not self._rings

    def new_checkpoint(self) -> Checkpoint:
        """Allocates a checkpoint of this cache."""
        parts = [torch.zeros_like(part) for part in self.states.parts]
        return Checkpoint([*parts, *(ring.empty() for ring in self._rings)], len(parts))

    def write_checkpoint(self, checkpoint: Checkpoint, num_tokens: int) -> None:
        """Copies the parts for the token after `num_tokens`, a position that is `reachable` without a copy."""
        states, rings = checkpoint.parts[: checkpoint.num_states], checkpoint.parts[checkpoint.num_states :]
        assert num_tokens == self._num_tokens or not self.states, "states cannot be cut back"
        for room, part in zip(states, self.states.parts, strict=True):
            room.copy_(part)
        for room, ring in zip(rings, self._rings, strict=True):
            kept = ring.before(num_tokens)
            room.narrow(ring.dim, 0, kept.shape[ring.dim]).copy_(kept)
        checkpoint.num_tokens = num_tokens

    def used_parts(self, checkpoint: Checkpoint) -> list[Tensor]:
        """Returns the parts of a checkpoint without the places that its position leaves empty; views."""
        states, rings = checkpoint.parts[: checkpoint.num_states], checkpoint.parts[checkpoint.num_states :]
        number = checkpoint.num_tokens
        return [
            *states,
            *(
                room.narrow(ring.dim, 0, min(ring.window, number))
                for room, ring in zip(rings, self._rings, strict=True)
            ),
        ]

    def return_to_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Goes to the position of a checkpoint; layers without a ring still have its keys and values."""
        number = checkpoint.num_tokens
        for part, room in zip(self.states.parts, checkpoint.parts, strict=False):
            part.copy_(room)
        for part, ring in zip(self.used_parts(checkpoint)[checkpoint.num_states :], self._rings, strict=True):
            ring.enter(number, part)
        self._num_tokens = number
        if self._saved_tokens is not None and self._saved_tokens > number:
            self._saved_tokens = None

    def whole_parts(self, num_tokens: int) -> list[Tensor]:
        """Returns the first positions of layers without a ring; views, in an order that the spec decides."""
        rings, parts = {id(ring.tensor) for ring in self._rings}, list[Tensor]()
        for layer in self._layers:
            if layer.keys.shape[1] and id(layer.keys) not in rings:
                parts.append(layer.keys[:, :num_tokens])
                if layer.values.data_ptr() != layer.keys.data_ptr():
                    parts.append(layer.values[:, :num_tokens])
        parts += [layer.index[:num_tokens] for layer in self._layers if layer.index is not None]
        for entries in (layer.compressed for layer in self._layers):
            if entries is not None:
                parts.append(entries.entries[: num_tokens // entries.window_tokens])
                if id(entries.raw) not in rings:
                    parts.append(entries.raw[:num_tokens])
        return parts

    # ---- layers -----------------------------------------------------------------------------------------------------

    def layer(self, idx: int) -> layer_cache.LayerCache:
        """Returns the keys and values of a layer with attention."""
        own = self._layers[idx]
        return layer_cache.LayerCache(
            own.keys, own.values, self._num_tokens, self._chosen, own.index, own.compressed, own.storage
        )

    def of(self, idx: int) -> layer_cache.LayerCache | LayerState:
        """Returns the keys and values of a layer, or its state."""
        state = self.states.of(idx)
        return self.layer(idx) if state is None else state

    def trial(self, idx: int) -> layer_cache.LayerCache | LayerState:
        """Returns the same for a pass whose outcome does not count, before the layer's own pass for these tokens."""
        state = self.states.of(idx)
        return replace(self.layer(idx), chosen=replace(self._chosen)) if state is None else state.copied()


# ---- sequences ------------------------------------------------------------------------------------------------------


class Follower(Protocol):
    """Follows the hidden states of a sequence, for drafts."""

    def follow(self, ids: Sequence[int], first: int, hidden: Tensor) -> None:
        """Takes note of hidden states float32 [T, w], after the last layer and before the final norm.

        Args:    ids: the sequence up to these tokens.   first: the position of the first of them; a position that was
                 there before, and all after it, are new.
        """


class CachedSequence:
    """A sequence's tokens and cache, with room for checkpoints apart from the cache's own copy of states."""

    def __init__(self, spec: specs.ModelSpec, cache: KVCache, ropes: LayerRopes, num_checkpoints: int = 0) -> None:
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
        return self.cache.num_bytes + sum(each.num_bytes for each in self._checkpoints)

    def reset(self) -> None:
        """Forgets the sequence; everything stays allocated."""
        self.cache.num_tokens = 0
        self.ids = []
        for checkpoint in self._checkpoints:
            checkpoint.num_tokens = 0

    def cut_to(self, num_tokens: int) -> None:
        """Drops the tokens from a `reachable` position on."""
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
        """Begins a text with this prompt; returns the tokens left to append, at least one; the others are kept."""
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

    def copy_checkpoint(self, num_tokens: int, room: Checkpoint) -> None:
        """Copies what this sequence keeps at a `reachable` position to a checkpoint of another sequence."""
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
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The checkpoints that are not empty, the one used last comes last."""
        return tuple(each for each in self._checkpoints if each.num_tokens)

    def room_for(self, num_checkpoints: int) -> list[Checkpoint]:
        """Returns so many checkpoints to write to, or all if there are fewer; the last ones are kept longest."""
        return self._checkpoints[len(self._checkpoints) - min(num_checkpoints, len(self._checkpoints)) :]

    def _use(self, checkpoint: Checkpoint) -> None:
        self._checkpoints.remove(checkpoint)
        self._checkpoints.append(checkpoint)

    # ---- rotary positions -------------------------------------------------------------------------------------------

    def are_angles_same(self, before: int, after: int) -> bool:
        return self._ropes.are_same(before, after)

    def outgrows(self, num_new: int) -> bool:
        """Returns whether all positions must be computed again when so many tokens are appended."""
        return self._ropes.outgrows(self.num_tokens, self.num_tokens + num_new)

    def angles_at(self, start: int, stop: int, num_tokens: int) -> tuple[Angles, ...]:
        """Returns the angles at positions `start` to `stop`, a kind each, in a sequence of `num_tokens`."""
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
