"""Compressed attention (DeepSeek-V4): a window of positions, and before it entries that stand for several each.

An entry is computed once, when its last position has come; until then its positions' projections wait in a ring. An
indexer may choose entries.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_pack.formats import parts
from moe_pack.runtime.model import matrices
from moe_pack.runtime.model.attention import shared, softmax
from moe_pack.runtime.model.caches import dtypes, layer_cache, ropes, storage
from moe_pack.runtime.model.weights import Weights


def cache_shape(spec: parts.CompressedSpec, dtype: dtypes.KvDtype) -> layer_cache.CacheShape:
    """Returns what a layer caches: keys for one head, which are the values, too, and entries."""
    compression, entries = spec.compression, None
    if compression is not None:
        rows, width = storage.RowStorage(dtype, compression.dims(spec.head_dim)), compression.raw_width(spec.head_dim)
        entries = layer_cache.EntryShape(rows, width, compression)
    return layer_cache.CacheShape(1, storage.RowStorage(dtype, (spec.head_dim,)), None, entries=entries)


def attend(
    x: Tensor,
    weights: Weights,
    spec: parts.CompressedSpec,
    layer: int,
    sequences: layer_cache.Batch[layer_cache.LayerCache],
    angles: ropes.Angles,
) -> Tensor:
    """Returns a layer's attention for new tokens x float32 [T, d], normed: float32 [T, d]."""
    return softmax.joined(
        [_attend_alone(x[own.rows], weights, spec, layer, own.cache, own.angles(angles)) for own in sequences]
    )


def _attend_alone(
    x: Tensor,
    weights: Weights,
    spec: parts.CompressedSpec,
    layer: int,
    cache: layer_cache.LayerCache,
    angles: ropes.Angles,
) -> Tensor:
    """Returns a layer's compressed attention; keys of new tokens, and entries that they complete, enter the cache."""
    role, eps, operations = f"layers.{layer}.attention", weights.spec.norm.eps, weights.operations
    start, stop, interleaved = cache.num_tokens, cache.num_tokens + len(x), shared.is_interleaved(weights.spec, layer)
    latent = operations.rms_norm(
        matrices.linear(x, weights.matrix(f"{role}.q_a")), weights.vector(f"{role}.q_a_norm"), eps
    )
    q = matrices.linear(latent, weights.matrix(f"{role}.q_b")).view(len(x), spec.num_heads, spec.head_dim)
    q = operations.rms_norm(q, torch.ones(spec.head_dim, device=x.device), eps)
    q = ropes.rotate_last(q.transpose(0, 1), angles, interleaved)
    key = operations.rms_norm(matrices.linear(x, weights.matrix(f"{role}.kv")), weights.vector(f"{role}.kv_norm"), eps)
    key = ropes.rotate_last(key[None], angles, interleaved)
    cache.append(key, key)
    number, seen = 0, None
    if spec.compression is not None:
        assert cache.compressed is not None, "a layer with entries"
        _compress(x, weights, spec, spec.compression, layer, cache.compressed, start)
        number = stop // spec.compression.window_tokens
        seen = _seen_entries(x, latent, weights, spec.compression, layer, cache.compressed, number, angles, start)
    sinks = weights.vector(f"{role}.sinks")
    if cache.compressed is None or not cache.reads_blocks:
        entries = cache.compressed.keys(slice(0, number)) if cache.compressed else q.new_empty((0, spec.head_dim))
        mixed = _attend_entries(q, cache, spec, start, entries, seen, sinks)
    else:
        mixed = _attend_entry_blocks(q, cache, cache.compressed, spec, start, number, seen, sinks)
    mixed = ropes.rotate_last(mixed, (angles[0], -angles[1]), interleaved).transpose(0, 1).flatten(1)
    mixed = matrices.linear_by_group(mixed, weights.matrix(f"{role}.o_a"), spec.num_groups)
    return matrices.linear(mixed, weights.matrix(f"{role}.o_b"))


def _attend_entries(
    q: Tensor,
    cache: layer_cache.LayerCache,
    spec: parts.CompressedSpec,
    start: int,
    entries: Tensor,
    seen: Tensor | None,
    sinks: Tensor,
) -> Tensor:
    """Returns the attention of queries [heads, T, head_dim] from position `start` on, float32 [heads, T, head_dim].

    A token alone reads the entries that it sees and no others.
    Args:    entries: float32 [n, head_dim].   seen: bool [T, n], the entries that each query sees; None: all.
    """
    num_tokens, window = q.shape[1], spec.sliding_window
    first = max(0, start + 1 - window)
    keys = cache.between(first, start + num_tokens)[0][0]
    step = max(1, softmax.MAX_SCORE_BYTES // (4 * spec.num_heads * (len(keys) + len(entries))))
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
        mixed.append(softmax.attend_with_sinks(piece, values, values, mask, spec.scale, sinks))
    return softmax.joined(mixed, dim=1)


def _attend_entry_blocks(
    q: Tensor,
    cache: layer_cache.LayerCache,
    compressed: layer_cache.EntryCache,
    spec: parts.CompressedSpec,
    start: int,
    num_entries: int,
    seen: Tensor | None,
    sinks: Tensor,
) -> Tensor:
    """Returns the attention of queries [heads, T, head_dim] over a window and entries, dequantized block by block.

    A token alone reads the entries that it sees and no others.
    Args:    start: position of the first query.   seen: bool [T, num_entries], the entries that each query sees; None:
             all.   sinks: float32 [heads], logits without a value.
    Returns: float32 [heads, T, head_dim].
    """
    num_heads, num_tokens = q.shape[:2]
    first, stop = max(0, start + 1 - spec.sliding_window), start + num_tokens
    running = softmax.RunningSoftmax(num_heads, num_tokens, spec.head_dim, q.device, sinks)

    def add(keys: Tensor, mask: Tensor | None) -> None:
        step = max(1, softmax.MAX_DECODED_BYTES // (4 * num_heads * max(len(keys), 1)))
        for begin in range(0, num_tokens, step):
            rows = slice(begin, begin + step)
            scores = q[:, rows] @ keys.T * spec.scale
            if mask is not None:
                scores.masked_fill_(~mask[rows], -torch.inf)
            running.add(scores, keys[None], rows=rows)

    add(
        cache.between(first, stop)[0][0],
        softmax.seen_positions(spec.sliding_window, first, start, num_tokens, q.device),
    )
    if seen is not None and num_tokens == 1:
        chosen = seen[0].nonzero()[:, 0]
        for begin, end in compressed.blocks(len(chosen), softmax.MAX_DECODED_BYTES):
            add(compressed.keys(chosen[begin:end]), None)
    else:
        for begin, end in compressed.blocks(num_entries, softmax.MAX_DECODED_BYTES):
            add(compressed.keys(slice(begin, end)), None if seen is None else seen[:, begin:end])
    return running.result()


def _compress(
    x: Tensor,
    weights: Weights,
    spec: parts.CompressedSpec,
    compression: parts.CompressionSpec,
    layer: int,
    cache: layer_cache.EntryCache,
    start: int,
) -> None:
    """Writes to the cache what entries follow from, of tokens x from position `start` on, and entries that they end."""
    role, size = f"layers.{layer}.attention", compression.window_tokens
    names = [*zip(("entry", "index"), compression.dims(spec.head_dim), strict=False)]
    raw, places = list[Tensor](), torch.arange(start, start + len(x), device=x.device) % size
    for name, _ in names:
        positions = weights.matrix(f"{role}.{name}_positions").rows(0, size)[places]
        raw.append(matrices.linear(x, weights.matrix(f"{role}.{name}_kv")))
        raw.append(matrices.linear(x, weights.matrix(f"{role}.{name}_gate")) + positions)
    cache.append(start, torch.cat(raw, dim=1))
    first, last = start // size, (start + len(x)) // size
    if first == last:
        return
    before = min(first, int(compression.overlap))  # windows that the first new entry averages too
    rows = cache.between((first - before) * size, last * size).view(last - first + before, size, -1)
    positions, rope = torch.arange(first, last, device=x.device) * size, weights.spec.rope_of(layer)
    angles, begin, made = ropes.Rope(rope, x.device)(positions, last * size), 0, list[Tensor]()
    for name, dim in names:
        width = dim * (2 if compression.overlap else 1)
        values, logits = rows[..., begin : begin + width], rows[..., begin + width : begin + 2 * width]
        begin += 2 * width
        if compression.overlap:
            values, logits = _overlapped(values, before, 0.0), _overlapped(logits, before, -torch.inf)
        entry = (values * logits.softmax(dim=1)).sum(dim=1)
        entry = weights.operations.rms_norm(entry, weights.vector(f"{role}.{name}_norm"), weights.spec.norm.eps)
        made.append(ropes.rotate_last(entry[None], angles, shared.is_interleaved(weights.spec, layer))[0])
    cache.enter(first, torch.cat(made, dim=1))


def _overlapped(rows: Tensor, before: int, fill: float) -> Tensor:
    """Returns, of windows [n, size, 2 dim], the first half of the window before and the second half of each.

    Args:    before: 1 if the first window is only one before; 0 if there is none, and `fill` takes its place.
    Returns: [n - before, 2 size, dim].
    """
    earlier, own = rows.chunk(2, dim=-1)
    if not before:
        earlier = torch.nn.functional.pad(earlier, (0, 0, 0, 0, 1, 0), value=fill)
    return torch.cat((earlier[:-1], own[before:]), dim=1)


@torch.no_grad()
def _seen_entries(
    x: Tensor,
    latent: Tensor,
    weights: Weights,
    spec: parts.CompressionSpec,
    layer: int,
    cache: layer_cache.EntryCache,
    num_entries: int,
    angles: ropes.Angles,
    start: int,
) -> Tensor | None:
    """Returns which entries each token attends to: those that it sees, or the indexer's choice among them.

    Args:    x: float32 [T, d], from position `start` on.   latent: float32 [T, q_lora_rank], of queries.
             cache: of the indexer's keys of `num_entries` entries.
    Returns: bool [T, n]; among equal scores, the first entries. None if each token attends to all.
    """
    numbers, num_tokens = torch.arange(num_entries, device=x.device), len(x)
    ended = torch.arange(start + 1, start + num_tokens + 1, device=x.device)[:, None] // spec.window_tokens
    seen = None if num_tokens == 1 else numbers < ended
    indexer = spec.indexer
    if indexer is None or num_entries <= indexer.top_k:
        return seen
    seen = torch.ones((1, num_entries), dtype=torch.bool, device=x.device) if seen is None else seen
    role, scale = f"layers.{layer}.attention", (indexer.num_heads * indexer.head_dim) ** -0.5
    q = (
        matrices.linear(latent, weights.matrix(f"{role}.index_q"))
        .view(num_tokens, indexer.num_heads, -1)
        .transpose(0, 1)
    )
    q = ropes.rotate_last(q, angles, shared.is_interleaved(weights.spec, layer))
    head_weights = matrices.linear(x, weights.matrix(f"{role}.index_weights")) * scale

    def keys() -> Iterator[Tensor]:
        return cache.index_keys(num_entries, softmax.MAX_DECODED_BYTES)

    return shared.largest_scores(q, keys, head_weights, indexer.top_k, seen)
