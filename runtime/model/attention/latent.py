"""Multi-head latent attention, with indexers that choose positions.

The cache has one latent c for each position; a head's keys and values are `kv_b` times c. There are two ways to compute
it, with the same result, and each pass takes the one that multiplies less. Expanded: keys and values of all positions
are computed, as the model is written. Absorbed: since `q . (W_k c) = (W_k^T q) . c`, queries move into the latent's
space instead, all heads attend to the cached vectors, and `W_v` is applied to the weighted latents. Source: DeepSeek-V2
(2405.04434), section 2.1.2 and appendix C.

With an indexer (DeepSeek-V3.2), a query attends to the positions that score highest with keys of the indexer's own.
Layers without an indexer may share the choice of an earlier layer (GLM-5), which comes with their cache.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moe_pack.formats import parts
from moe_pack.runtime.model import matrices
from moe_pack.runtime.model.attention import shared, softmax
from moe_pack.runtime.model.caches import dtypes, layer_cache, ropes, storage
from moe_pack.runtime.model.weights import Weights

_LATENT, _INDEX = slice(0, 2), slice(2, 3)  # parts of a row of the cache: latent and rotated key; indexer's key


def cache_shape(spec: parts.LatentSpec, dtype: dtypes.KvDtype) -> layer_cache.CacheShape:
    """Returns what a layer caches: for one head the latent, the rotated key, and the key of an indexer of its own.

    The latent is the value, too.
    """
    widths, indexer = (spec.kv_lora_rank, spec.qk_rope_head_dim), spec.own_indexer
    keys = storage.RowStorage(dtype, widths if indexer is None else (*widths, indexer.head_dim))
    return layer_cache.CacheShape(1, keys, None, value_width=spec.kv_lora_rank)


def attend(
    x: Tensor,
    weights: Weights,
    spec: parts.LatentSpec,
    layer: int,
    cache: layer_cache.LayerCache | layer_cache.Batch[layer_cache.LayerCache],
    angles: ropes.Angles,
) -> Tensor:
    """Returns a layer's latent attention for new tokens; their latents and rotated keys are appended to the cache.

    Args:    x: float32 [T, d], normed.
    Returns: float32 [T, d].
    """
    role, sequences = f"layers.{layer}.attention", layer_cache.each_sequence(cache, len(x))
    rope_dim, interleaved = spec.qk_rope_head_dim, shared.is_interleaved(weights.spec, layer)
    q, q_latent, gates = _queries(x, weights, spec, role)
    q_nope, q_rope = torch.split(q, [spec.qk_nope_head_dim, rope_dim], dim=-1)
    q = torch.cat((q_nope, ropes.rotate(q_rope, angles, interleaved)), dim=-1)
    if spec.temperature is not None:
        q = q * shared.temperatures(spec.temperature, sequences, x.device)
    latent, key = torch.split(matrices.linear(x, weights.matrix(f"{role}.kv_a")), [spec.kv_lora_rank, rope_dim], dim=-1)
    latent = weights.operations.rms_norm(latent, weights.vector(f"{role}.kv_a_norm"), spec.lora_norm_eps)
    latent = latent if spec.kv_latent_scale == 1 else latent * spec.kv_latent_scale
    entered = torch.cat((latent, ropes.rotate(key[None], angles, interleaved)[0]), dim=-1)
    sinks = weights.vector(f"{role}.sinks") if spec.sinks else None
    outputs = []
    for each in sequences:
        rows, own = each.rows, each.cache
        own.enter_parts(entered[rows], _LATENT)
        own_latent = None if q_latent is None else q_latent[rows]
        mask = _latent_mask(x[rows], own_latent, weights, spec, role, own, each.angles(angles))
        outputs.append(_attend_latents(q[:, rows], weights, spec, role, own, mask, sinks))
    mixed = softmax.joined(outputs, dim=1)  # [heads, T, v]
    mixed = mixed if gates is None else mixed * gates.sigmoid()
    mixed = shared.gated(mixed.transpose(0, 1).flatten(1), x, weights, spec.gate, spec.v_head_dim, role)
    return matrices.linear(mixed, weights.matrix(f"{role}.o"))


def _latent_mask(
    x: Tensor,
    q_latent: Tensor | None,
    weights: Weights,
    spec: parts.LatentSpec,
    role: str,
    cache: layer_cache.LayerCache,
    angles: ropes.Angles,
) -> Tensor | None:
    """Returns which positions each of a sequence's new tokens sees, bool [T, S]; None: all.

    A layer with an indexer of its own writes their index keys to the cache, and its choice.
    """
    start, stop = cache.num_tokens, cache.num_tokens + len(x)
    mask = softmax.seen_positions(None, 0, start, len(x), x.device)
    if (indexer := spec.own_indexer) is not None and q_latent is not None:
        cache.enter_parts(_index_keys(x, weights, indexer, role, angles), _INDEX)
        cache.chosen.positions = None
        if stop > indexer.top_k:

            def index_keys() -> Iterator[Tensor]:
                blocks = cache.blocks(0, stop, softmax.MAX_DECODED_BYTES) if cache.reads_blocks else iter([(0, stop)])
                return (cache.read_parts(begin, end, _INDEX) for begin, end in blocks)

            cache.chosen.positions = _indexed(x, q_latent, weights, indexer, role, angles, index_keys, mask)
    if spec.indexer is not None and cache.chosen.positions is not None:
        return cache.chosen.positions
    return mask


def _attend_latents(
    q: Tensor,
    weights: Weights,
    spec: parts.LatentSpec,
    role: str,
    cache: layer_cache.LayerCache,
    mask: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """Returns what a sequence's queries [heads, T, nope + rope] read, float32 [heads, T, v]."""
    stop = cache.num_tokens + q.shape[1]
    if cache.reads_blocks:
        return _attend_latent_blocks(q, weights, spec, role, cache, mask, sinks)
    attend, cached = _absorbed if absorbs(q.shape[1], stop, spec) else _expanded, cache.read_parts(0, stop, _LATENT)
    return torch.cat(list(attend(q, weights, spec, role, cached, mask, sinks)))


def _attend_latent_blocks(
    q: Tensor,
    weights: Weights,
    spec: parts.LatentSpec,
    role: str,
    cache: layer_cache.LayerCache,
    mask: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """Returns the same, of latents that are dequantized block by block of positions; either way, as `absorbs` says."""
    rank, nope, num_heads, num_tokens = spec.kv_lora_rank, spec.qk_nope_head_dim, *q.shape[:2]
    stop, width = cache.num_tokens + num_tokens, spec.qk_nope_head_dim + spec.qk_rope_head_dim + spec.v_head_dim
    is_absorbed = absorbs(num_tokens, stop, spec)
    running = softmax.RunningSoftmax(num_heads, num_tokens, rank if is_absorbed else spec.v_head_dim, q.device, sinks)
    for begin, end in cache.blocks(0, stop, softmax.MAX_DECODED_BYTES):
        cached = cache.read_parts(begin, end, _LATENT)
        latent, rope = cached[:, :rank], cached[:, rank:]
        for heads, w_k, w_v in _up_projections(weights, spec, role, 4 * len(cached) * (width + num_tokens)):
            if is_absorbed:
                moved = torch.cat((q[heads, :, :nope] @ w_k, q[heads, :, nope:]), dim=-1)
                scores, values = moved @ cached.T, latent[None]
            else:
                expanded = latent @ w_k.transpose(1, 2)
                keys = torch.cat((expanded, rope.expand(len(expanded), -1, -1)), dim=-1)
                scores, values = q[heads] @ keys.transpose(1, 2), latent @ w_v.transpose(1, 2)
            scores *= spec.scale
            if mask is not None:
                scores.masked_fill_(~mask[:, begin:end], -torch.inf)
            running.add(scores, values, heads)
    mixed = running.result()
    if not is_absorbed:
        return mixed
    projections = _up_projections(weights, spec, role, 4 * num_tokens * spec.v_head_dim)
    return torch.cat([mixed[heads] @ w_v.transpose(1, 2) for heads, _, w_v in projections])


def absorbs(num_new: int, num_seen: int, spec: parts.LatentSpec) -> bool:
    """Whether the absorbed way multiplies less, for `num_new` tokens that see up to `num_seen` positions."""
    rank, nope, rope, v = spec.kv_lora_rank, spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim
    absorbed = num_new * (nope + v) * rank + num_new * num_seen * (2 * rank + rope)
    expanded = num_seen * (nope + v) * rank + num_new * num_seen * (nope + rope + v)
    return absorbed <= expanded


def _queries(
    x: Tensor, weights: Weights, spec: parts.LatentSpec, role: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the queries of tokens x, [heads, T, nope + rope], not rotated, their latents [T, q_lora_rank], and gates.

    Latents are normed; None if queries have none. Gates: [heads, T, v]; None unless queries come with them.
    """
    if spec.q_lora_rank is None:
        latent, q = None, matrices.linear(x, weights.matrix(f"{role}.q"))
    else:
        plain = matrices.linear(x, weights.matrix(f"{role}.q_a"))
        latent = weights.operations.rms_norm(plain, weights.vector(f"{role}.q_a_norm"), spec.lora_norm_eps)
        latent = latent if spec.q_latent_scale == 1 else latent * spec.q_latent_scale
        read = torch.cat((latent, plain), dim=-1) if spec.gated else latent
        q = matrices.linear(read, weights.matrix(f"{role}.q_b"))
    q = q.view(len(x), spec.num_heads, -1).transpose(0, 1)
    if not spec.gated:
        return q, latent, None
    q, gates = torch.split(q, [spec.qk_nope_head_dim + spec.qk_rope_head_dim, spec.v_head_dim], dim=-1)
    return q, latent, gates


def _index_keys(x: Tensor, weights: Weights, spec: parts.IndexerSpec, role: str, angles: ropes.Angles) -> Tensor:
    """Returns the indexer's keys of tokens x, float32 [T, head_dim]."""
    norm = weights.vector(f"{role}.index_k_norm"), weights.vector(f"{role}.index_k_norm_bias")
    k = matrices.linear(x, weights.matrix(f"{role}.index_k"))
    k = torch.nn.functional.layer_norm(k, (spec.head_dim,), *norm, spec.norm_eps)
    return _rotated_index(k[None], spec, angles)[0]


def _rotated_index(x: Tensor, spec: parts.IndexerSpec, angles: ropes.Angles) -> Tensor:
    """Returns an indexer's queries or keys x [heads, T, head_dim], rotated."""
    return (ropes.rotate_last if spec.rotates_last else ropes.rotate)(x, angles, spec.interleaved)


def _indexed(
    x: Tensor,
    q_latent: Tensor,
    weights: Weights,
    spec: parts.IndexerSpec,
    role: str,
    angles: ropes.Angles,
    keys: Callable[[], Iterator[Tensor]],
    mask: Tensor | None,
) -> Tensor:
    """Returns which positions each token attends to: those with the `top_k` largest scores among those it sees.

    Args:    keys: of `shared.largest_scores`, the indexer's.   mask: bool [T, S], which positions are seen; None: all.
    Returns: bool [T, S]; among equal scores, the first positions.
    """
    q = matrices.linear(q_latent, weights.matrix(f"{role}.index_q")).view(len(x), spec.num_heads, -1).transpose(0, 1)
    q = _rotated_index(q, spec, angles)
    head_weights = (
        matrices.linear(x, weights.matrix(f"{role}.index_weights")) * (spec.num_heads * spec.head_dim) ** -0.5
    )
    return shared.largest_scores(q, keys, head_weights, spec.top_k, mask)


def _up_projections(
    weights: Weights, spec: parts.LatentSpec, role: str, head_bytes: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields some heads at a time: which heads, W_k [heads, nope, rank] and W_v [heads, v, rank], float32.

    The rows of `kv_b` of these heads, and `head_bytes` of workspace for each, stay within `MAX_DECODED_BYTES`; there
    is one head at least.
    """
    nope, rank = spec.qk_nope_head_dim, spec.kv_lora_rank
    width = nope + spec.v_head_dim
    step = max(1, softmax.MAX_DECODED_BYTES // max(4 * width * rank, head_bytes))
    matrix = weights.matrix(f"{role}.kv_b")
    for first in range(0, spec.num_heads, step):
        last = min(first + step, spec.num_heads)
        rows = matrix.rows(first * width, last * width).view(last - first, width, rank)
        yield slice(first, last), rows[:, :nope], rows[:, nope:]


def _absorbed(
    q: Tensor,
    weights: Weights,
    spec: parts.LatentSpec,
    role: str,
    cached: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
) -> Iterator[Tensor]:
    """Yields outputs of some heads, [heads, T, v], in the latent's space.

    Args:    cached: float32 [S, rank + rope].   mask: bool [T, S]; None: all are seen.   sinks: float32 [num_heads],
             logits without a value; None: none.
    """
    nope = spec.qk_nope_head_dim
    for heads, w_k, w_v in _up_projections(weights, spec, role, 4 * q.shape[1] * len(cached)):
        moved = torch.cat((q[heads, :, :nope] @ w_k, q[heads, :, nope:]), dim=-1)  # [heads, T, rank + rope]
        if sinks is not None:
            keys, values = cached[None], cached[None, :, : spec.kv_lora_rank]
            yield softmax.attend_with_sinks(moved, keys, values, mask, spec.scale, sinks[heads]) @ w_v.transpose(1, 2)
            continue
        scores = moved @ cached.T * spec.scale
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        yield scores.softmax(dim=-1) @ cached[:, : spec.kv_lora_rank] @ w_v.transpose(1, 2)


def _expanded(
    q: Tensor,
    weights: Weights,
    spec: parts.LatentSpec,
    role: str,
    cached: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
) -> Iterator[Tensor]:
    """Yields the same with expanded keys and values."""
    latent, rope = torch.split(cached, [spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1)
    width = spec.qk_nope_head_dim + spec.qk_rope_head_dim + spec.v_head_dim
    for heads, w_k, w_v in _up_projections(weights, spec, role, 4 * len(cached) * width):
        nope = latent @ w_k.transpose(1, 2)  # [heads, S, nope]
        keys = torch.cat((nope, rope.expand(len(nope), -1, -1)), dim=-1)
        values = latent @ w_v.transpose(1, 2)
        if sinks is not None:
            pieces = []
            for first, last in softmax.query_blocks(q.shape[1], len(keys) * len(cached)):
                seen = None if mask is None else mask[first:last]
                rows = q[heads, first:last]
                pieces.append(softmax.attend_with_sinks(rows, keys, values, seen, spec.scale, sinks[heads]))
            yield torch.cat(pieces, dim=1)
        elif q.device.type == "cpu":
            yield torch.nn.functional.scaled_dot_product_attention(
                q[heads], keys, values, attn_mask=mask, scale=spec.scale
            )
        else:
            yield softmax.fused_attention(q[heads], keys, values, mask, False, spec.scale)
