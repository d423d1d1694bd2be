"""The cache of a layer with attention: keys and values, an indexer's keys, compressed entries."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from moe_pack.formats.parts import CompressionSpec
from moe_pack.formats.parts.compressed import raw_places
from moe_pack.runtime.model.caches.ropes import Angles
from moe_pack.runtime.model.caches.storage import RowStorage, plain_dtype, plain_rows

Kept = TypeVar("Kept")


@dataclass(slots=True)
class Chosen:
    """The positions that an indexer chose for the tokens of a pass; later layers of the pass may share them."""

    positions: Tensor | None = None  # bool [T, S]; None: each token attends to all positions before it


@dataclass(frozen=True, slots=True)
class EntryShape:
    """How compressed entries are stored, and the rows that they are computed from."""

    storage: RowStorage
    raw_width: int  # values of a position from which entries follow
    compression: CompressionSpec

    def raw_places(self, context_tokens: int, chunk_tokens: int) -> int:
        return raw_places(self.compression, context_tokens, chunk_tokens)

    def empty(self, context_tokens: int, chunk_tokens: int, device: torch.device) -> "EntryCache":
        shape, window = (self.raw_places(context_tokens, chunk_tokens), self.raw_width), self.compression.window_tokens
        raw = torch.zeros(shape, dtype=plain_dtype(self.storage.dtype), device=device)
        entries = self.storage.empty(1, context_tokens // window, device)[0]
        return EntryCache(raw, entries, window, self.compression.earlier_tokens, self.storage)


@dataclass(frozen=True, slots=True)
class EntryCache:
    """The compressed entries of a layer, and the projections for the next ones."""

    raw: Tensor  # [places, width], projections of the last positions and logits of their weights; position p in a ring
    entries: Tensor  # [windows of the context, n], the key of each, then the indexer's
    window_tokens: int  # positions that an entry stands for
    earlier_tokens: int  # positions before a token from which its next entry may follow
    storage: RowStorage  # of entries

    def append(self, start: int, raw: Tensor) -> None:
        """Writes the projections of positions from `start` on, float32 [T, width]."""
        self.raw[ring_places(start, start + len(raw), self.raw, 0)] = raw.to(self.raw.dtype)

    def between(self, start: int, stop: int) -> Tensor:
        """Returns the projections of positions that are still there, float32 [stop - start, width]."""
        return self.raw[ring_places(start, stop, self.raw, 0)].float()

    def enter(self, first: int, made: Tensor) -> None:
        """Writes entries, float32 [n, width], from number `first` on."""
        self.entries[first : first + len(made)] = self.storage.encode(made)

    def keys(self, numbers: slice | Tensor) -> Tensor:
        """Returns the keys of some entries, float32 [n, head_dim]."""
        own = slice(0, 1)
        return self.storage.decode(self.entries[numbers, self.storage.places(own)], own)

    def blocks(self, num_entries: int, most_bytes: int) -> Iterator[tuple[int, int]]:
        """Yields (begin, end) of the first entries; a block dequantizes to about `most_bytes`."""
        yield from position_blocks(0, num_entries, copies_bytes(self.storage), most_bytes)

    def index_keys(self, num_entries: int, most_bytes: int) -> Iterator[Tensor]:
        """Yields the indexer's keys of the first entries in blocks, float32 [n, index_dim]."""
        indexed = slice(1, 2)
        for begin, end in self.blocks(num_entries, most_bytes):
            yield self.storage.decode(self.entries[begin:end, self.storage.places(indexed)], indexed)


def ring_places(start: int, stop: int, ring: Tensor, dim: int) -> slice | Tensor:
    """Returns the places of positions `start` to `stop` in a ring, whose places are along a dimension."""
    num_places = ring.shape[dim]
    assert stop - start <= num_places, f"positions {start} to {stop} in {num_places} places"
    first = start % num_places if num_places else 0
    if first + stop - start <= num_places:
        return slice(first, first + stop - start)
    return torch.arange(start, stop, device=ring.device) % num_places


def copies_bytes(storage: RowStorage) -> int:
    """Returns the bytes that reading a row takes: a float32 copy, and of codes one more while it is rotated back."""
    return 4 * sum(storage.parts) * (2 if storage.is_coded else 1)


def position_blocks(first: int, stop: int, position_bytes: int, most_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields (begin, end) of consecutive positions; those of a block take at most so many bytes, or are one."""
    step = max(1, most_bytes // max(position_bytes, 1))
    for begin in range(first, stop, step):
        yield begin, min(begin + step, stop)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """A layer's keys and values of a sequence, position p in place `p % places`."""

    keys: Tensor  # [heads, places, n], as `storage` says, and values too
    values: Tensor
    num_tokens: int  # of the sequence so far
    chosen: Chosen = field(default_factory=Chosen)
    # Keys of an indexer of blocks [places, head_dim]. With `pooled`, the last position of a complete block has the
    # block's key; all other positions have their own, from before the mean.
    index: Tensor | None = None
    compressed: EntryCache | None = None
    storage: tuple[RowStorage, RowStorage] | None = None  # of keys and of values; None: they are plain tensors

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
        """Writes the keys and values [heads, T, width] of new tokens; `values` is `keys` where values are the keys."""
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
        """Yields (begin, end) of positions; a block dequantizes to about `most_bytes`."""
        position_bytes = len(self.keys) * sum(copies_bytes(each) for each in self.rows)
        yield from position_blocks(first, stop, position_bytes, most_bytes)

    def enter_parts(self, values: Tensor, parts: slice) -> None:
        """Writes parts of the keys of new tokens, float32 [T, width of the parts], of a cache that is no ring."""
        rows, _ = self.rows
        start = self.num_tokens
        self.keys[0, start : start + len(values), rows.places(parts)] = rows.encode(values, parts)

    def read_parts(self, begin: int, end: int, parts: slice) -> Tensor:
        """Returns parts of the keys of positions, float32 [n, width of the parts], of a cache that is no ring."""
        rows, _ = self.rows
        return rows.decode(self.keys[0, begin:end, rows.places(parts)], parts)

    def _places(self, start: int, stop: int) -> slice | Tensor:
        return ring_places(start, stop, self.keys, 1)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The sizes and formats of a layer's cache, which its kind of attention decides."""

    heads: int
    keys: RowStorage
    values: RowStorage | None  # None: the keys are the values, or begin with them
    value_width: int | None = None  # values are so many of the first values of plain keys
    index_width: int = 0  # of the keys of an indexer of blocks
    entries: EntryShape | None = None

    @property
    def rows(self) -> tuple[RowStorage, ...]:
        return (self.keys,) if self.values is None else (self.keys, self.values)

    @property
    def row_bytes(self) -> int:
        """The bytes of a position's keys and values."""
        return self.heads * sum(each.row_bytes for each in self.rows)

    def num_bytes(self, places: int, context_tokens: int, chunk_tokens: int) -> int:
        """Returns the bytes of a cache of one layer with places for so many positions."""
        if not places:
            return 0
        itemsize, entries = plain_dtype(self.keys.dtype).itemsize, self.entries
        num_bytes = places * (self.row_bytes + self.index_width * itemsize)
        if entries is not None:
            num_bytes += entries.raw_places(context_tokens, chunk_tokens) * entries.raw_width * itemsize
            num_bytes += context_tokens // entries.compression.window_tokens * entries.storage.row_bytes
        return num_bytes

    def empty(self, places: int, context_tokens: int, chunk_tokens: int, device: torch.device) -> LayerCache:
        """Allocates the cache of a layer for passes of at most `chunk_tokens` tokens."""
        keys, values, index = self._allocated((), places, device)
        entries, storage = None, (self.keys, self.values or self.keys)
        if self.entries is not None and places:
            entries = self.entries.empty(context_tokens, chunk_tokens, device)
        return LayerCache(keys, values, 0, index=index, compressed=entries, storage=storage)

    def stacked(self, number: int, places: int, device: torch.device) -> "StackedCache":
        """Allocates the caches of a layer for so many sequences, without compressed entries."""
        return StackedCache(*self._allocated((number,), places, device), (self.keys, self.values or self.keys))

    def _allocated(
        self, stack: tuple[int, ...], places: int, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns keys, values and keys of an indexer, with the dimensions of a stack before their own."""

        def rows(storage: RowStorage) -> Tensor:
            empty = storage.empty(math.prod(stack) * self.heads, places, device)
            return empty.view(*stack, self.heads, *empty.shape[1:]) if stack else empty

        keys, index = rows(self.keys), None
        values = keys if self.values is None else rows(self.values)
        if self.values is None and self.value_width is not None and not self.keys.is_coded:
            values = keys[..., : self.value_width]
        if self.index_width:
            shape = (*stack, places, self.index_width)
            index = torch.zeros(shape, dtype=plain_dtype(self.keys.dtype), device=device)
        return keys, values, index


@dataclass(frozen=True, slots=True)
class StackedCache:
    """The caches of a layer of several sequences, each a slot: fields as in `LayerCache`, with a leading dimension."""

    keys: Tensor
    values: Tensor
    index: Tensor | None
    storage: tuple[RowStorage, RowStorage]

    def slots(self) -> Iterator[LayerCache]:
        """Yields the cache of each sequence, which shares this memory."""
        for slot, keys in enumerate(self.keys):
            values = keys if self.values is self.keys else self.values[slot]
            index = None if self.index is None else self.index[slot]
            yield LayerCache(keys, values, 0, index=index, storage=self.storage)


@dataclass(frozen=True, slots=True)
class SequenceRows(Generic[Kept]):
    """A sequence of a pass: its rows among all rows, and its cache in a layer."""

    rows: slice
    cache: Kept

    def angles(self, all_angles: Angles) -> Angles:
        return all_angles[0][self.rows], all_angles[1][self.rows]


Batch = tuple[SequenceRows[Kept], ...]


def each_sequence(cache: Kept | Batch[Kept], num_rows: int) -> Batch[Kept]:
    """Returns the sequences of a pass; a cache that is given alone has all rows."""
    return cache if isinstance(cache, tuple) else (SequenceRows(slice(0, num_rows), cache),)
