"""The key-value cache, and the rotary positions of the keys in it.

`Rope` gives the angles of positions under each scaling, and `rotate` turns queries and keys by them. `KVCache` keeps
the keys and values of earlier tokens, and the states of layers without attention; it is allocated once.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from moe_pack.formats.parts import AttentionSpec, CompressedSpec, GroupedQuerySpec, LatentSpec, RopeSpec, specs
from moe_pack.formats.parts.compressed import raw_places
from moe_pack.formats.parts.positions import (
    DynamicSpec,
    LinearSpec,
    Llama3Spec,
    LongRopeSpec,
    ProportionalSpec,
    YarnSpec,
)
from moe_pack.runtime.model import mixers
from moe_pack.runtime.model.caches.dtypes import KvDtype
from moe_pack.runtime.model.caches.storage import (
    RowStorage,
    attention_cache_bytes,
    entry_storage,
    layer_cache_bytes,
    plain_dtype,
    plain_rows,
    position_blocks,
    row_storages,
)

Angles = tuple[Tensor, Tensor]  # cosine and sine, float32 [T, rotary_dim / 2] each
Kept = TypeVar("Kept")


class Rope:
    """Rotary angles of positions; without rotary positions, none.

    Source: transformers, modeling_rope_utils.py. There a sequence that outgrows longrope's original context keeps the
    keys that it has; here they are computed again with the long factors, as in Phi-3.5-MoE's own code.
    """

    def __init__(self, spec: RopeSpec | None, device: torch.device) -> None:
        if spec is None:
            spec = RopeSpec(theta=1.0, rotary_dim=0, interleaved=False, scaling=None)
        self._exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32, device=device)
        self._exponents /= max(spec.rotary_dim, 1)
        powers, scaling = spec.theta**self._exponents, spec.scaling
        self._spec, self._frequencies, self._factor = spec, 1.0 / powers, 1.0
        self._limit: int | None = None  # of the length, beyond which angles depend on it
        if isinstance(scaling, LinearSpec):
            self._frequencies /= scaling.factor
        elif isinstance(scaling, YarnSpec):
            self._frequencies, self._factor = _yarn(powers, scaling, spec), scaling.attention_factor
        elif isinstance(scaling, Llama3Spec):
            self._frequencies = _llama3(self._frequencies, scaling)
        elif isinstance(scaling, ProportionalSpec):
            is_still = torch.arange(len(powers), device=device) >= scaling.rotated_pairs
            self._frequencies = self._frequencies.masked_fill(is_still, 0.0) / scaling.factor
        elif isinstance(scaling, DynamicSpec):
            self._limit = scaling.original_max_position_embeddings
        elif isinstance(scaling, LongRopeSpec):
            self._limit = scaling.original_max_position_embeddings
            self._frequencies, self._long = (
                1.0 / (torch.tensor(factors, dtype=torch.float32, device=device) * powers)
                for factors in (scaling.short_factor, scaling.long_factor)
            )
            self._factor = scaling.short_mscale

    def are_same(self, before: int, after: int) -> bool:
        """Returns whether what ran in a sequence of one length has the angles of one of another length.

        With dynamic scaling, beyond the limit each token may have a base of its own: there, nothing is sure to have.
        """
        if self._limit is None or max(before, after) <= self._limit:
            return True
        return isinstance(self._spec.scaling, LongRopeSpec) and min(before, after) > self._limit

    def outgrows(self, before: int, after: int) -> bool:
        """Returns whether all positions must be computed again when a sequence grows from one length to another."""
        return isinstance(self._spec.scaling, LongRopeSpec) and before > 0 and not self.are_same(before, after)

    def __call__(self, positions: Tensor, num_tokens: int) -> Angles:
        """Returns the angles at positions [T] of a sequence of `num_tokens`."""
        frequencies, factor = self._frequencies, self._factor
        if self._limit is not None and num_tokens > self._limit:
            frequencies, factor = self._beyond(torch.tensor(num_tokens))
        angles = positions.to(torch.float32)[:, None] * frequencies
        return angles.cos() * factor, angles.sin() * factor

    def as_last(self, num_positions: int) -> Angles:
        """Returns the angles at all positions below `num_positions`, each that of a sequence's last token."""
        every = torch.arange(num_positions, device=self._exponents.device)
        cos, sin = self(every, 0)
        if self._limit is not None and num_positions > self._limit:
            late = every[self._limit :, None]
            frequencies, factor = self._beyond(late + 1)
            angles = late.to(torch.float32) * frequencies
            cos[self._limit :], sin[self._limit :] = angles.cos() * factor, angles.sin() * factor
        return cos, sin

    def _beyond(self, lengths: Tensor) -> tuple[Tensor, float]:
        """Returns frequencies and factor in sequences of lengths, int64 [] or [T, 1], which are above the limit."""
        scaling, n = self._spec.scaling, self._spec.rotary_dim
        if isinstance(scaling, LongRopeSpec):
            return self._long, scaling.long_mscale
        assert isinstance(scaling, DynamicSpec), "a scaling that depends on the length"
        stretch = scaling.factor * lengths.double() / scaling.original_max_position_embeddings - (scaling.factor - 1)
        base = self._spec.theta * stretch ** (n / (n - 2))
        return 1.0 / base.float().to(self._exponents.device) ** self._exponents, self._factor


class LayerRopes:
    """The rotary angles of a model's kinds of attention, in the order of `ModelSpec.attention_kinds`."""

    def __init__(self, spec: specs.ModelSpec, device: torch.device) -> None:
        self._ropes = tuple(Rope(rope, device) for _, rope in spec.attention_kinds)

    def are_same(self, before: int, after: int) -> bool:
        """See `Rope.are_same`."""
        return all(rope.are_same(before, after) for rope in self._ropes)

    def outgrows(self, before: int, after: int) -> bool:
        """See `Rope.outgrows`."""
        return any(rope.outgrows(before, after) for rope in self._ropes)

    def __call__(self, positions: Tensor, num_tokens: int) -> tuple[Angles, ...]:
        """Returns the angles at positions [T] of a sequence of `num_tokens`, for each kind."""
        return tuple(rope(positions, num_tokens) for rope in self._ropes)

    def as_last(self, num_positions: int) -> tuple[Angles, ...]:
        """See `Rope.as_last`."""
        return tuple(rope.as_last(num_positions) for rope in self._ropes)


def _yarn(powers: Tensor, yarn: YarnSpec, spec: RopeSpec) -> Tensor:
    """Returns YaRN's frequencies: high ones stay, low ones are divided by the factor, those between are mixed."""

    def bound(turns: float) -> float:
        """Returns the dimension whose frequency makes this many turns in the original context."""
        length = yarn.original_max_position_embeddings
        return spec.rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = bound(yarn.beta_fast), bound(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    if low == high:
        high += 0.001
    steps = torch.arange(len(powers), dtype=torch.float32, device=powers.device)
    kept = 1 - ((steps - low) / (high - low)).clamp(0, 1)
    return 1.0 / (yarn.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _llama3(frequencies: Tensor, spec: Llama3Spec) -> Tensor:
    """Returns Llama 3.1's frequencies: high ones stay, low ones are divided by the factor, those between are mixed."""
    turns = spec.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = spec.low_freq_factor, spec.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1) if high > low else (turns >= low).float()
    return kept * frequencies + (1 - kept) * frequencies / spec.factor


def rotate(x: Tensor, angles: Angles, interleaved: bool) -> Tensor:
    """Returns x [heads, T, n] with its first `rotary_dim` values turned by the angles of its positions."""
    cos, sin = angles
    half = cos.shape[1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = (first * cos - second * sin, second * cos + first * sin)
    both = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return both if rest.shape[-1] == 0 else torch.cat((both, rest), dim=-1)


@dataclass(slots=True)
class Chosen:
    """The positions that an indexer chose for the tokens of a pass, and that later layers of the pass may share.

    `positions`: bool [T, S]; None: each token attends to all positions before it.
    """

    positions: Tensor | None = None


@dataclass(frozen=True, slots=True)
class EntryCache:
    """The compressed entries of a layer, and what the next ones follow from.

    `raw`: projections of the last positions and the logits of their weights [places, width], a ring; position p is in
    place `p % places`.   `entries`: [windows of the context, n], the key of each, then the indexer's.   `storage`: of
    entries.   `window_tokens`: the positions that an entry stands for.
    """

    raw: Tensor
    entries: Tensor
    window_tokens: int
    storage: RowStorage

    @classmethod
    def empty(
        cls, spec: CompressedSpec, context_tokens: int, chunk_tokens: int, dtype: KvDtype, device: torch.device
    ) -> "EntryCache | None":
        """Returns the entries of a layer for passes of at most `chunk_tokens` tokens; None if it has none."""
        compression, storage = spec.compression, entry_storage(spec, dtype)
        if compression is None or storage is None:
            return None
        places = raw_places(compression, context_tokens, chunk_tokens)
        raw = torch.zeros((places, compression.raw_width(spec.head_dim)), dtype=plain_dtype(dtype), device=device)
        entries = storage.empty(1, context_tokens // compression.window_tokens, device)[0]
        return cls(raw, entries, compression.window_tokens, storage)

    def append(self, start: int, raw: Tensor) -> None:
        """Writes what entries follow from, float32 [T, width], of positions from `start` on."""
        self.raw[_ring_places(start, start + len(raw), self.raw, 0)] = raw.to(self.raw.dtype)

    def between(self, start: int, stop: int) -> Tensor:
        """Returns what entries follow from, float32 [stop - start, width], of positions that are still there."""
        return self.raw[_ring_places(start, stop, self.raw, 0)].float()

    def enter(self, first: int, made: Tensor) -> None:
        """Writes entries, float32 [n, width], from number `first` on."""
        self.entries[first : first + len(made)] = self.storage.encode(made)

    def keys(self, numbers: slice | Tensor) -> Tensor:
        """Returns the keys of some entries, float32 [n, head_dim]."""
        own = slice(0, 1)
        return self.storage.decode(self.entries[numbers, self.storage.places(own)], own)

    def blocks(self, num_entries: int, most_bytes: int) -> Iterator[tuple[int, int]]:
        """Yields (begin, end) of the first entries, of which a block dequantizes to about so many bytes."""
        yield from position_blocks(0, num_entries, _copies_bytes(self.storage), most_bytes)

    def index_keys(self, num_entries: int, most_bytes: int) -> Iterator[Tensor]:
        """Yields the indexer's keys of the first entries in blocks, float32 [n, index_dim]."""
        indexed = slice(1, 2)
        for begin, end in self.blocks(num_entries, most_bytes):
            yield self.storage.decode(self.entries[begin:end, self.storage.places(indexed)], indexed)


def _ring_places(start: int, stop: int, ring: Tensor, dim: int) -> slice | Tensor:
    """Returns the places of positions `start` to `stop` in a ring, whose places are along a dimension."""
    num_places = ring.shape[dim]
    assert stop - start <= num_places, f"positions {start} to {stop} in {num_places} places"
    first = start % num_places if num_places else 0
    if first + stop - start <= num_places:
        return slice(first, first + stop - start)
    return torch.arange(start, stop, device=ring.device) % num_places


def _copies_bytes(storage: RowStorage) -> int:
    """Returns the bytes that reading a row takes: a copy as float32, and of codes one more while it is rotated back."""
    return 4 * sum(storage.parts) * (2 if storage.is_coded else 1)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """A layer's keys and values [heads, places, n] of a sequence of `num_tokens`, as `storage` says.

    Position p is in place `p % places`. With fewer places than positions it is a ring, which has the last positions.
    `index`: keys of an indexer of blocks [places, head_dim]; None without one. With `pooled`, the last position of a
    complete block has the block's key; all other positions have their own, from before the mean.
    `chosen`: what a layer with an indexer writes, and a layer that shares its choice reads.
    `compressed`: the entries of compressed attention; None without any.
    `storage`: of keys and of values; None: they are plain tensors.
    """

    keys: Tensor
    values: Tensor
    num_tokens: int
    chosen: Chosen = field(default_factory=Chosen)
    index: Tensor | None = None
    compressed: EntryCache | None = None
    storage: tuple[RowStorage, RowStorage] | None = None

    @property
    def rows(self) -> tuple[RowStorage, RowStorage]:
        """How keys are stored, and values."""
        return self.storage or (plain_rows(self.keys), plain_rows(self.values))

    @property
    def reads_blocks(self) -> bool:
        """Whether keys and values are dequantized block by block; a GPU reads plain ones as they are."""
        key_rows, _ = self.rows
        return key_rows.is_coded or (key_rows.dtype != "f32" and self.keys.device.type == "cpu")

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Writes the keys and values [heads, T, width] of new tokens, at most as many as there are places.

        Where values are the keys, `values` is `keys`.
        """
        places, (key_rows, value_rows) = self._places(self.num_tokens, self.num_tokens + keys.shape[1]), self.rows
        self.keys[:, places] = key_rows.encode(keys)
        if self.values is not self.keys:
            self.values[:, places] = value_rows.encode(values)

    def between(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values of positions `start` to `stop`, float32 [heads, stop - start, width]."""
        places, (key_rows, value_rows) = self._places(start, stop), self.rows
        keys = key_rows.decode(self.keys[:, places])
        return keys, keys if self.values is self.keys else value_rows.decode(self.values[:, places])

    def blocks(self, first: int, stop: int, most_bytes: int) -> Iterator[tuple[int, int]]:
        """Yields (begin, end) of positions, of which a block dequantizes to about so many bytes."""
        position_bytes = len(self.keys) * sum(_copies_bytes(each) for each in self.rows)
        yield from position_blocks(first, stop, position_bytes, most_bytes)

    def enter_parts(self, values: Tensor, parts: slice) -> None:
        """Writes some parts of the keys of new tokens, float32 [T, width of the parts], of a cache that is no ring."""
        rows, _ = self.rows
        start = self.num_tokens
        self.keys[0, start : start + len(values), rows.places(parts)] = rows.encode(values, parts)

    def read_parts(self, begin: int, end: int, parts: slice) -> Tensor:
        """Returns some parts of the keys of positions, float32 [n, width of the parts], of a cache that is no ring."""
        rows, _ = self.rows
        return rows.decode(self.keys[0, begin:end, rows.places(parts)], parts)

    def _places(self, start: int, stop: int) -> slice | Tensor:
        return _ring_places(start, stop, self.keys, 1)


@dataclass(frozen=True, slots=True)
class SequenceRows(Generic[Kept]):
    """One of the sequences of a pass: its rows among all rows, and what a layer keeps of its earlier tokens."""

    rows: slice
    cache: Kept


Batch = tuple[SequenceRows[Kept], ...]


def each_sequence(cache: Kept | Batch[Kept], num_rows: int) -> Batch[Kept]:
    """Returns the sequences of a pass; a cache that is given alone has all rows."""
    return cache if isinstance(cache, tuple) else (SequenceRows(slice(0, num_rows), cache),)


@dataclass(frozen=True, slots=True)
class _Rows:
    """A layer's empty keys and values, and how they are stored."""

    keys: Tensor
    values: Tensor
    storage: tuple[RowStorage, RowStorage]

    @classmethod
    def empty(cls, attention: AttentionSpec, places: int, dtype: KvDtype, device: torch.device) -> "_Rows":
        """Returns empty rows; the values of latent attention are in the keys, those of compressed one are the keys."""
        heads, rows = row_storages(attention, dtype)
        keys = rows[0].empty(heads, places, device)
        if len(rows) > 1:
            return cls(keys, rows[1].empty(heads, places, device), (rows[0], rows[1]))
        values = keys
        if isinstance(attention, LatentSpec) and not rows[0].is_coded:
            values = keys[..., : attention.kv_lora_rank]
        return cls(keys, values, (rows[0], rows[0]))


def _entries(
    attention: AttentionSpec, context_tokens: int, chunk_tokens: int, dtype: KvDtype, device: torch.device
) -> EntryCache | None:
    if not isinstance(attention, CompressedSpec):
        return None
    return EntryCache.empty(attention, context_tokens, chunk_tokens, dtype, device)


def _index_keys(attention: AttentionSpec, places: int, dtype: KvDtype, device: torch.device) -> Tensor | None:
    """Returns a layer's empty keys of an indexer of blocks; None without one."""
    if not isinstance(attention, GroupedQuerySpec) or attention.indexer is None:
        return None
    return torch.zeros((places, attention.indexer.head_dim), dtype=plain_dtype(dtype), device=device)


@dataclass(frozen=True, slots=True)
class _Ring:
    """A tensor whose places along a dimension are a ring; a token needs the last `window` positions before it."""

    tensor: Tensor
    dim: int
    window: int

    def reaches(self, num_tokens: int, last: int) -> bool:
        """Whether all that the token after `num_tokens` needs is still there after `last` tokens."""
        return max(num_tokens - self.window, 0) >= last - self.tensor.shape[self.dim]

    def before(self, num_tokens: int) -> Tensor:
        """Returns what the token after `num_tokens` needs, positions in their order."""
        places = _ring_places(max(num_tokens - self.window, 0), num_tokens, self.tensor, self.dim)
        return self.tensor[:, places] if self.dim else self.tensor[places]

    def enter(self, num_tokens: int, positions: Tensor) -> None:
        """Writes what `before` returned."""
        places = _ring_places(max(num_tokens - self.window, 0), num_tokens, self.tensor, self.dim)
        if self.dim:
            self.tensor[:, places] = positions
        else:
            self.tensor[places] = positions

    def empty(self) -> Tensor:
        """Returns room for what `before` returns."""
        shape = list(self.tensor.shape)
        shape[self.dim] = self.window
        return self.tensor.new_zeros(shape)


class Checkpoint:
    """Room for a copy of what a cache cannot be cut back to: its states, and what its rings have of a window.

    `num_tokens`: after which it was taken; 0 if it is empty.   `parts`: the tensors, allocated once.
    """

    def __init__(self, parts: list[Tensor], num_states: int) -> None:
        self.num_tokens, self.parts, self.num_states = 0, parts, num_states

    @property
    def num_bytes(self) -> int:
        """The bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


class KVCache:
    """The keys and values of all layers, [heads, places, n] each: float32, bfloat16, or codes (`storage`).

    A layer has a place for every position of the context, or fewer with a sliding window (`cached_tokens`). With latent
    attention the key of a token is its latent and then its rotated key, for one head (then the indexer's key, if there
    is one), and the latent is its value too: `values` are views of `keys`, or the same codes. `is_ring`: whether some
    layer has fewer places than positions. `num_bytes`: of keys, values and states.

    A layer without attention has a state instead, and one with n-grams has a state as well (`states`), float32 whatever
    the dtype. `num_tokens` may rise, and may
    return to 0, which resets the states. Other earlier positions are those of `reachable`: with states, only where they
    were copied (`save`).

    Args:    context_tokens: the most positions of a sequence.   chunk_tokens: the most tokens that are appended at
             once; None: any number.   num_layers: None: the model's; else layers that keep the whole context.
    """

    def __init__(
        self,
        spec: specs.ModelSpec,
        context_tokens: int,
        device: torch.device,
        num_layers: int | None = None,
        dtype: KvDtype = "f32",
        chunk_tokens: int | None = None,
    ) -> None:
        chunk = context_tokens if chunk_tokens is None else chunk_tokens
        self.states = mixers.States(spec if num_layers is None else None, device)
        if num_layers is None:
            places = [
                specs.cached_tokens(spec, layer, context_tokens, chunk) for layer in range(spec.num_hidden_layers)
            ]
        else:
            places = [context_tokens] * num_layers
        self.device, self.dtype = device, dtype
        made = [_Rows.empty(spec.attention_of(i), n, dtype, device) for i, n in enumerate(places)]
        self.keys, self.values = (tuple(each.keys for each in made), tuple(each.values for each in made))
        self._storage = tuple(each.storage for each in made)
        self._index = [_index_keys(spec.attention_of(i), n, dtype, device) for i, n in enumerate(places)]
        self._entries = {
            i: _entries(spec.attention_of(i), context_tokens, chunk, dtype, device)
            for i, number in enumerate(places)
            if number
        }
        if num_layers is None:
            num_bytes = sum(layer_cache_bytes(spec, i, context_tokens, chunk, dtype) for i in range(len(places)))
        else:
            each = (spec.attention_of(i) for i in range(num_layers))
            num_bytes = sum(attention_cache_bytes(one, context_tokens, context_tokens, chunk, dtype) for one in each)
        self.num_bytes = num_bytes + self.states.num_bytes
        self._rings = tuple(self._find_rings(spec, context_tokens))
        self.is_ring = bool(self._rings)
        self.context_tokens = context_tokens
        self._chosen = Chosen()
        self._num_tokens = 0
        self._saved_tokens: int | None = None  # where states were copied

    def _find_rings(self, spec: specs.ModelSpec, context_tokens: int) -> Iterator["_Ring"]:
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            if 0 < keys.shape[1] < context_tokens:
                window = specs.cached_tokens(spec, layer, context_tokens, 0)
                yield _Ring(keys, 1, window)
                if values.data_ptr() != keys.data_ptr():
                    yield _Ring(values, 1, window)
            entries, attention = self._entries.get(layer), spec.attention_of(layer)
            if entries is None or len(entries.raw) >= context_tokens:
                continue
            assert isinstance(attention, CompressedSpec) and attention.compression is not None, "it has entries"
            yield _Ring(entries.raw, 0, attention.compression.earlier_tokens)

    @staticmethod
    def of_layer(spec: specs.ModelSpec, layer: int, context_tokens: int, device: torch.device) -> LayerCache:
        """Returns the keys and values, float32, of one layer that keeps the whole context and has seen nothing."""
        attention = spec.attention_of(layer)
        index = _index_keys(attention, context_tokens, "f32", device)
        kept = _Rows.empty(attention, context_tokens, "f32", device)
        entries = _entries(attention, context_tokens, context_tokens, "f32", device)
        return LayerCache(kept.keys, kept.values, 0, index=index, compressed=entries, storage=kept.storage)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the sequence so far."""
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
        """Returns the last position up to `num_tokens` to which the cache leads back; 0 is always one.

        A ring leads as far back as it still has what a position sees. States lead to where they are, and to where they
        were copied.
        """
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
        """Returns room for a checkpoint of this cache."""
        parts = [torch.zeros_like(part) for part in self.states.parts]
        return Checkpoint([*parts, *(ring.empty() for ring in self._rings)], len(parts))

    def write_checkpoint(self, checkpoint: Checkpoint, num_tokens: int) -> None:
        """Copies what the token after `num_tokens` needs; that position has to be `reachable` without a copy."""
        states, rings = checkpoint.parts[: checkpoint.num_states], checkpoint.parts[checkpoint.num_states :]
        assert num_tokens == self._num_tokens or not self.states, "states cannot be cut back"
        for room, part in zip(states, self.states.parts, strict=True):
            room.copy_(part)
        for room, ring in zip(rings, self._rings, strict=True):
            kept = ring.before(num_tokens)
            room.narrow(ring.dim, 0, kept.shape[ring.dim]).copy_(kept)
        checkpoint.num_tokens = num_tokens

    def used_parts(self, checkpoint: Checkpoint) -> list[Tensor]:
        """Returns the parts of a checkpoint without what its position leaves empty; views."""
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
        """Goes to the position of a checkpoint, whose keys and values in layers without a ring are in this cache."""
        number = checkpoint.num_tokens
        for part, room in zip(self.states.parts, checkpoint.parts, strict=False):
            part.copy_(room)
        for part, ring in zip(self.used_parts(checkpoint)[checkpoint.num_states :], self._rings, strict=True):
            ring.enter(number, part)
        self._num_tokens = number
        if self._saved_tokens is not None and self._saved_tokens > number:
            self._saved_tokens = None

    def whole_parts(self, num_tokens: int) -> list[Tensor]:
        """Returns what layers without a ring keep of the first positions; views, in an order that the spec decides."""
        rings = {id(ring.tensor) for ring in self._rings}
        parts = []
        for keys, values in zip(self.keys, self.values, strict=True):
            if keys.shape[1] and id(keys) not in rings:
                parts.append(keys[:, :num_tokens])
                if values.data_ptr() != keys.data_ptr():
                    parts.append(values[:, :num_tokens])
        parts += [index[:num_tokens] for index in self._index if index is not None]
        for entries in self._entries.values():
            if entries is not None:
                parts.append(entries.entries[: num_tokens // entries.window_tokens])
                if id(entries.raw) not in rings:
                    parts.append(entries.raw[:num_tokens])
        return parts

    # ---- layers -----------------------------------------------------------------------------------------------------

    def layer(self, idx: int) -> LayerCache:
        """Returns the keys and values of a layer with attention, in which it reads and writes."""
        own = self.keys[idx], self.values[idx], self.num_tokens
        return LayerCache(*own, self._chosen, self._index[idx], self._entries.get(idx), self._storage[idx])

    def of(self, idx: int) -> LayerCache | mixers.LayerState:
        """Returns what a layer keeps of earlier tokens: keys and values, or a state."""
        state = self.states.of(idx)
        return self.layer(idx) if state is None else state

    def of_ngrams(self, idx: int) -> mixers.LayerState | None:
        """Returns the state of a layer's n-grams; None if it has none."""
        return self.states.of_ngrams(idx)

    def trial_of_ngrams(self, idx: int) -> mixers.LayerState | None:
        """Returns the same for a pass whose outcome does not count."""
        state = self.states.of_ngrams(idx)
        return None if state is None else state.copied()

    def trial(self, idx: int) -> LayerCache | mixers.LayerState:
        """Returns the same for a pass whose outcome does not count, before the layer's own pass for these tokens."""
        state = self.states.of(idx)
        return replace(self.layer(idx), chosen=replace(self._chosen)) if state is None else state.copied()
