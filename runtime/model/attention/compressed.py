"""Compressed attention (DeepSeek-V4): a window of positions, and before it entries that stand for several each.

An entry is computed once, when its last position has come; until then its positions' projections wait in a ring. An
indexer may choose entries.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_pack.formats import parts
from moe_pack.runtime.model.attention import shared
from moe_pack.runtime.model.caches import dtypes, layer_cache, ropes, storage
from moe_pack.runtime.model.compute import matrices, softmax
from moe_pack.runtime.model.compute.weights import Weights, unit


def cache_shape(spec: parts.CompressedSpec, dtype: dtypes.KvDtype) -> layer_cache.CacheShape:
    """Returns the cache of a layer: keys for one head, which are the values, too, and entries."""
    compression, entries = spec.compression, None
    if compression is not None:
        rows, width = storage.RowStorage(dtype, compression.dims(spec.head_dim)), compression.raw_width(spec.head_dim)
        entries = layer_cache.EntryShape(rows, width, compression)
    return layer_cache.CacheShape(1, storage.RowStorage(dtype, (spec.head_dim,)), None, entries=entries)


class Compressed(shared.LayerAttention):
    """Compressed attention of a layer."""

    def __init__(self, weights: Weights, spec: parts.CompressedSpec, layer: int) -> None:
        super().__init__(weights, layer)
        self._spec, self._sinks = spec, self.vector("sinks")

    def attend(self, x: Tensor, sequences: layer_cache.Batch[layer_cache.LayerCache], angles: ropes.Angles) -> Tensor:
        """Returns the attention of new tokens x float32 [T, d], normed: float32 [T, d]."""
        return softmax.joined([self._attend(x[own.rows], own.cache, own.angles(angles)) for own in sequences])

    def _attend(self, x: Tensor, cache: layer_cache.LayerCache, angles: ropes.Angles) -> Tensor:
        spec, start, number, seen = self._spec, cache.num_tokens, 0, None
        latent = self.norm(self.linear(x, "q_a"), "q_a_norm")
        q = self.linear(latent, "q_b").view(len(x), spec.num_heads, spec.head_dim)
        q = ropes.rotate_last(unit(q, self.weights).transpose(0, 1), angles, self.interleaved)
        key = self.norm(self.linear(x, "kv"), "kv_norm")
        key = ropes.rotate_last(key[None], angles, self.interleaved)
        cache.append(key, key)
        if spec.compression is not None:
            assert cache.compressed is not None, "a layer with entries"
            self._compress(x, spec.compression, cache.compressed, start)
            number = (start + len(x)) // spec.compression.window_tokens
            seen = self._seen_entries(x, latent, spec.compression, cache.compressed, number, angles, start)
        if cache.compressed is None or not cache.reads_blocks:
            entries = cache.compressed.keys(slice(0, number)) if cache.compressed else q.new_empty((0, spec.head_dim))
            mixed = self._read(q, cache, entries, seen)
        else:
            mixed = self._read_blocks(q, cache, cache.compressed, number, seen)
        mixed = ropes.rotate_last(mixed, (angles[0], -angles[1]), self.interleaved).transpose(0, 1).flatten(1)
        return self.linear(matrices.linear_by_group(mixed, self.matrix("o_a"), spec.num_groups), "o_b")

    # ---- queries read a window and entries --------------------------------------------------------------------------

    def _read(self, q: Tensor, cache: layer_cache.LayerCache, entries: Tensor, seen: Tensor | None) -> Tensor:
        """Returns the attention of queries [heads, T, head_dim]; a token alone reads only entries that it sees."""
        num_tokens, window, start = q.shape[1], self._spec.sliding_window, cache.num_tokens
        first = max(0, start + 1 - window)
        keys = cache.between(first, start + num_tokens)[0][0]
        step = max(1, softmax.MAX_SCORE_BYTES // (4 * self._spec.num_heads * (len(keys) + len(entries))))
        mixed = []
        for begin in range(0, num_tokens, step):
            piece, at = q[:, begin : begin + step], start + begin
            low, high = max(0, at + 1 - window), at + piece.shape[1]
            own = softmax.seen_positions(window, low, at, piece.shape[1], q.device)
            some, chosen = entries, None if seen is None else seen[begin : begin + step]
            if chosen is not None and len(chosen) == 1:
                some, chosen = entries[chosen[0]], None
            mask = None
            if own is not None or chosen is not None:
                near = own if own is not None else torch.ones((piece.shape[1], high - low), dtype=torch.bool)
                far = chosen if chosen is not None else torch.ones((piece.shape[1], len(some)), dtype=torch.bool)
                mask = torch.cat((near.to(q.device), far.to(q.device)), dim=1)
            values = torch.cat((keys[low - first : high - first], some))[None]
            mixed.append(softmax.attend_with_sinks(piece, values, values, mask, self._spec.scale, self._sinks))
        return softmax.joined(mixed, dim=1)

    def _read_blocks(
        self,
        q: Tensor,
        cache: layer_cache.LayerCache,
        compressed: layer_cache.EntryCache,
        num_entries: int,
        seen: Tensor | None,
    ) -> Tensor:
        """Returns the same, of keys and entries that are dequantized block by block."""
        (num_heads, num_tokens), start, window = q.shape[:2], cache.num_tokens, self._spec.sliding_window
        first = max(0, start + 1 - window)
        running = softmax.RunningSoftmax(num_heads, num_tokens, self._spec.head_dim, q.device, self._sinks)

        def add(keys: Tensor, mask: Tensor | None) -> None:
            step = max(1, softmax.MAX_DECODED_BYTES // (4 * num_heads * max(len(keys), 1)))
            for begin in range(0, num_tokens, step):
                rows = slice(begin, begin + step)
                scores = q[:, rows] @ keys.T * self._spec.scale
                if mask is not None:
                    scores.masked_fill_(~mask[rows], -torch.inf)
                running.add(scores, keys[None], rows=rows)

        near = softmax.seen_positions(window, first, start, num_tokens, q.device)
        add(cache.between(first, start + num_tokens)[0][0], near)
        if seen is not None and num_tokens == 1:
            chosen = seen[0].nonzero()[:, 0]
            for begin, end in compressed.blocks(len(chosen), softmax.MAX_DECODED_BYTES):
                add(compressed.keys(chosen[begin:end]), None)
        else:
            for begin, end in compressed.blocks(num_entries, softmax.MAX_DECODED_BYTES):
                add(compressed.keys(slice(begin, end)), None if seen is None else seen[:, begin:end])
        return running.result()

    # ---- entries ----------------------------------------------------------------------------------------------------

    def _compress(
        self, x: Tensor, compression: parts.CompressionSpec, cache: layer_cache.EntryCache, start: int
    ) -> None:
        """Caches the projections of tokens x from position `start` on, and the entries that they complete."""
        size = compression.window_tokens
        names = [*zip(("entry", "index"), compression.dims(self._spec.head_dim), strict=False)]
        raw, places = list[Tensor](), torch.arange(start, start + len(x), device=x.device) % size
        for name, _ in names:
            positions = self.matrix(f"{name}_positions").rows(0, size)[places]
            raw += [self.linear(x, f"{name}_kv"), self.linear(x, f"{name}_gate") + positions]
        cache.append(start, torch.cat(raw, dim=1))
        first, last = start // size, (start + len(x)) // size
        if first == last:
            return
        before = min(first, int(compression.overlap))  # windows that the first new entry averages too
        rows = cache.between((first - before) * size, last * size).view(last - first + before, size, -1)
        rope, begin, made = ropes.Rope(self.weights.spec.rope_of(self.layer), x.device), 0, list[Tensor]()
        angles = rope(torch.arange(first, last, device=x.device) * size, last * size)
        for name, dim in names:
            width = dim * (2 if compression.overlap else 1)
            values, logits = rows[..., begin : begin + width], rows[..., begin + width : begin + 2 * width]
            begin += 2 * width
            if compression.overlap:
                values, logits = _overlapped(values, before, 0.0), _overlapped(logits, before, -torch.inf)
            entry = self.norm((values * logits.softmax(dim=1)).sum(dim=1), f"{name}_norm")
            made.append(ropes.rotate_last(entry[None], angles, self.interleaved)[0])
        cache.enter(first, torch.cat(made, dim=1))

    @torch.no_grad()
    def _seen_entries(
        self,
        x: Tensor,
        latent: Tensor,
        spec: parts.CompressionSpec,
        cache: layer_cache.EntryCache,
        num_entries: int,
        angles: ropes.Angles,
        start: int,
    ) -> Tensor | None:
        """Returns the entries each token attends to, bool [T, n]: those that it sees, or the indexer's choice."""
        numbers, num_tokens, indexer = torch.arange(num_entries, device=x.device), len(x), spec.indexer
        ended = torch.arange(start + 1, start + num_tokens + 1, device=x.device)[:, None] // spec.window_tokens
        seen = None if num_tokens == 1 else numbers < ended
        if indexer is None or num_entries <= indexer.top_k:
            return seen
        seen = torch.ones((1, num_entries), dtype=torch.bool, device=x.device) if seen is None else seen
        q = self.linear(latent, "index_q").view(num_tokens, indexer.num_heads, -1).transpose(0, 1)
        q = ropes.rotate_last(q, angles, self.interleaved)
        head_weights = self.linear(x, "index_weights") * (indexer.num_heads * indexer.head_dim) ** -0.5

        def keys() -> Iterator[Tensor]:
            return cache.index_keys(num_entries, softmax.MAX_DECODED_BYTES)

        return shared.largest_scores(q, keys, head_weights, indexer.top_k, seen)


def _overlapped(rows: Tensor, before: int, fill: float) -> Tensor:
    """Joins the first half of the window before to the second half of each window: [n - before, 2 size, dim].

    Args:    rows: [n, size, 2 dim].   before: 1 if the first window is only one before; 0 if `fill` takes its place.
    """
    earlier, own = rows.chunk(2, dim=-1)
    if not before:
        earlier = torch.nn.functional.pad(earlier, (0, 0, 0, 0, 1, 0), value=fill)
    return torch.cat((earlier[:-1], own[before:]), dim=1)
