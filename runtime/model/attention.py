"""Attention, one function for each kind: grouped queries, multi-head latent attention, and relative positions.

Grouped queries are an operation, because kernels compute them whole. The other kinds are written here in torch, between
projections that the weights compute.

*Multi-head latent attention* caches one latent c for each position; a head's keys and values are `kv_b` times c. There
are two ways to compute it, with the same result, and each pass takes the one that multiplies less. Expanded: keys and
values of all positions are computed, as the model is written. Absorbed: since `q . (W_k c) = (W_k^T q) . c`, queries
move into the latent's space instead, all heads attend to the cached vectors, and `W_v` is applied to the weighted
latents. Source: DeepSeek-V2 (2405.04434), section 2.1.2 and appendix C.

With an *indexer* (DeepSeek-V3.2), a query attends to the positions that score highest with keys of the indexer's own.
Layers without an indexer may share the choice of an earlier layer (GLM-5), which comes with their cache. Grouped
queries may have an indexer too, which chooses blocks of positions; while there are no more blocks than it chooses,
attention is the plain one.

*Compressed attention* (DeepSeek-V4) sees a window of positions, and before it entries that stand for several positions
each. An entry is computed once, when its last position has come; until then its positions' projections wait in a ring.

*Relative positions* add a bias for each head and distance to the scores, in place of a rotation; so does an encoder.
A decoder also attends to the encoder's output, without a bias.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moe_pack.formats import ModelSpec, parts
from moe_pack.runtime.model import caches, matrices
from moe_pack.runtime.model.operations import (
    MAX_DECODED_BYTES,
    MAX_SCORE_BYTES,
    HeadNorms,
    attend_entry_blocks,
    attend_with_sinks,
    fused_attention,
    seen_positions,
)
from moe_pack.runtime.model.weights import Weights

_LATENT, _INDEX = slice(0, 2), slice(2, 3)  # parts of a row of latent attention: latent and rotated key; indexer's key


def attend(
    x: Tensor,
    weights: Weights,
    layer: int,
    cache: caches.LayerCache | caches.Batch[caches.LayerCache],
    angles: caches.Angles,
) -> Tensor:
    """Returns a layer's attention for new tokens; their keys and values are appended to the cache.

    Args:    x: float32 [T, d], normed.   cache: of one sequence, or of several with their tokens.   angles: of the T
             positions, from `Rope`.
    Returns: float32 [T, d].
    """
    spec, sequences = weights.spec.attention_of(layer), caches.each_sequence(cache, len(x))
    if isinstance(spec, parts.GroupedQuerySpec):
        return _attend_grouped(x, weights, spec, layer, sequences, angles)
    if isinstance(spec, parts.CompressedSpec):
        return torch.cat(
            [
                _attend_compressed(x[rows], weights, spec, layer, own, _angles_of(angles, rows))
                for rows, own in _rows_and_caches(sequences)
            ]
        )
    assert isinstance(spec, parts.LatentSpec), "models with relative positions are run by encoder_decoder"
    return attend_latent(x, weights, spec, layer, sequences, angles)


def _angles_of(angles: caches.Angles, rows: slice) -> caches.Angles:
    return angles[0][rows], angles[1][rows]


def _rows_and_caches(sequences: caches.Batch[caches.LayerCache]) -> Iterator[tuple[slice, caches.LayerCache]]:
    return ((each.rows, each.cache) for each in sequences)


def _attend_grouped(
    x: Tensor,
    weights: Weights,
    spec: parts.GroupedQuerySpec,
    layer: int,
    sequences: caches.Batch[caches.LayerCache],
    angles: caches.Angles,
) -> Tensor:
    role, eps, operations = f"layers.{layer}.attention", weights.spec.norm.eps, weights.operations
    is_rotated = spec.rotates(layer)

    def project(name: str, inputs: Tensor) -> Tensor:
        bias = weights.vector(f"{role}.{name}_bias") if name in spec.bias else None
        return matrices.linear(inputs, weights.matrix(f"{role}.{name}"), bias)

    q, k = project("q", x), project("k", x)
    v = _clipped(k if spec.keys_as_values else project("v", x), spec)
    if spec.v_norm:
        heads = v.view(len(x), spec.num_kv_heads, spec.value_dim)
        v = operations.rms_norm(heads, torch.ones(spec.value_dim, device=x.device), eps).flatten(1)
    if spec.value_scale != 1.0:
        v = v * spec.value_scale
    gate = None
    if spec.gated:
        q, gate = (each.flatten(1) for each in q.view(len(x), spec.num_heads, 2, -1).unbind(2))
    norms = None
    if spec.qk_norm == "unit":
        ones = torch.ones(spec.head_dim, device=x.device)
        norms = HeadNorms(ones, ones, eps, True) if is_rotated else None
    elif spec.qk_norm != "none":
        is_last = spec.qk_norm == "rotated_head"
        norms = HeadNorms(weights.vector(f"{role}.q_norm"), weights.vector(f"{role}.k_norm"), eps, is_last)
    if norms is not None and spec.qk_norm == "projection":
        q, k = (operations.rms_norm(each, norm, eps) for each, norm in ((q, norms.q), (k, norms.k)))
        norms = None
    q, k = _clipped(q, spec), _clipped(k, spec)
    if spec.temperature is not None and not (is_rotated and spec.temperature.is_unrotated):
        if norms is not None and spec.qk_norm == "head":  # which would undo a temperature before them
            q, k = (
                operations.rms_norm(each.view(len(x), -1, spec.head_dim), norm, eps).flatten(1)
                for each, norm in ((q, norms.q), (k, norms.k))
            )
            norms = None
        q = q * _temperatures(spec.temperature, sequences, x.device)
    if not is_rotated:
        angles = torch.ones_like(angles[0]), torch.zeros_like(angles[1])
    sinks = weights.vector(f"{role}.sinks") if spec.sinks else None
    interleaved, outputs = is_interleaved(weights.spec, layer), list[Tensor]()
    for rows, cache in _rows_and_caches(sequences):
        own, turns, chosen = (q[rows], k[rows], v[rows]), _angles_of(angles, rows), None
        if spec.indexer is not None:
            chosen = choose_blocks(x[rows], weights, spec.indexer, layer, cache, turns)
        outputs.append(
            operations.attend(own, norms, turns, interleaved, cache, spec, spec.window(layer), sinks, chosen)
        )
    mixed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if gate is not None:
        mixed = mixed * gate.sigmoid()
    return project("o", _gated(mixed, x, weights, spec.gate, spec.value_dim, role))


def _clipped(x: Tensor, spec: parts.GroupedQuerySpec) -> Tensor:
    return x if spec.clip is None else x.clamp(-spec.clip, spec.clip)


def _gated(
    mixed: Tensor, x: Tensor, weights: Weights, spec: parts.OutputGateSpec | None, head_dim: int, role: str
) -> Tensor:
    """Returns what heads give, float32 [T, heads * head_dim], behind its gates, from the layer's input x [T, d]."""
    if spec is None:
        return mixed
    gates = matrices.linear(x, weights.matrix(f"{role}.gate"))
    if spec.bias:
        bias = weights.vector(f"{role}.gate_bias")
        gates = gates + (bias if spec.each == "head" else bias.repeat_interleave(head_dim))
    gates = gates.sigmoid() if spec.function == "sigmoid" else torch.nn.functional.softplus(gates)
    return mixed * (gates.repeat_interleave(head_dim, dim=1) if spec.each == "head" else gates)


def is_interleaved(spec: ModelSpec, layer: int) -> bool:
    """Returns whether a layer rotates neighbours, and not halves."""
    rope = spec.rope_of(layer)
    return rope is not None and rope.interleaved


def _temperatures(
    spec: parts.TemperatureSpec, sequences: caches.Batch[caches.LayerCache], device: torch.device
) -> Tensor:
    """Returns the factor of each token's queries, float32 [T, 1]."""
    each = [
        _temperature(spec, cache.num_tokens, rows.stop - rows.start, device)
        for rows, cache in _rows_and_caches(sequences)
    ]
    return each[0] if len(each) == 1 else torch.cat(each)


def _temperature(spec: parts.TemperatureSpec, start: int, num_tokens: int, device: torch.device) -> Tensor:
    """Returns the factor of each token's queries, float32 [T, 1], for tokens from position `start` on."""
    positions = torch.arange(start, start + num_tokens, device=device)[:, None]
    if spec.is_power:
        return torch.exp(spec.slope * torch.log1p((positions + int(spec.is_from_one)).float() / spec.length))
    return 1 + spec.slope * torch.log1p(torch.floor((positions + int(spec.is_from_one)) / spec.length))


@torch.no_grad()
def choose_blocks(
    x: Tensor,
    weights: Weights,
    spec: parts.BlockIndexerSpec,
    layer: int,
    cache: caches.LayerCache,
    angles: caches.Angles,
) -> Tensor | None:
    """Returns the blocks that each new token attends to; the indexer's keys of the tokens are written to the cache.

    A block is seen up to the token's own position. The block that the token is in the middle of counts as chosen.
    Args:    x: float32 [T, d], normed.   angles: of the T positions, as the layer rotates them.
    Returns: bool [m, T, blocks up to the last token's], for each of m shares of the heads: 1, or those of the indexer;
             among blocks of equal scores, the first. None if all are chosen.
    """
    assert cache.index is not None, "a layer with an indexer of blocks"
    role, start, size = f"layers.{layer}.attention", cache.num_tokens, spec.block_tokens
    stop = start + len(x)
    interleaved, eps = is_interleaved(weights.spec, layer), weights.spec.norm.eps
    k = matrices.linear(x, weights.matrix(f"{role}.index_k"))
    if spec.kind == "largest":
        k = weights.operations.rms_norm(k, weights.vector(f"{role}.index_k_norm"), eps)
        k = caches.rotate(k[None], angles, interleaved)[0]
    cache.index[start:stop] = k
    if spec.kind == "pooled":
        _pool_blocks(weights, layer, cache.index, range(start // size, stop // size), size)
    num_blocks = -(-stop // size)
    if (stop // size if spec.kind == "pooled" else num_blocks) <= spec.num_blocks:
        return None
    q = matrices.linear(x, weights.matrix(f"{role}.index_q")).view(len(x), spec.num_heads, -1)
    q = weights.operations.rms_norm(q, weights.vector(f"{role}.index_q_norm"), eps).transpose(0, 1)
    q = caches.rotate(q, angles, interleaved)  # [heads, T, head_dim]
    chosen, step = [], max(1, MAX_DECODED_BYTES // (4 * spec.num_heads * stop))
    score = _score_pooled if spec.kind == "pooled" else _score_largest
    for first in range(0, len(x), step):
        positions = torch.arange(start + first, start + min(first + step, len(x)), device=x.device)
        chosen.append(score(q[:, first : first + step], cache.index[:stop].float(), positions, spec))
    return torch.cat(chosen, dim=1)


def _pool_blocks(weights: Weights, layer: int, index: Tensor, blocks: range, size: int) -> None:
    """Writes the key of each of these blocks, which are complete, to its last position in the cache of an indexer."""
    if not blocks:
        return
    attention = weights.spec.attention_of(layer)
    assert isinstance(attention, parts.GroupedQuerySpec), "of a layer with an indexer of blocks"
    rows = index[blocks.start * size : blocks.stop * size].view(len(blocks), size, -1)
    norm = weights.vector(f"layers.{layer}.attention.index_k_norm")
    pooled = weights.operations.rms_norm(rows.float().mean(dim=1), norm, weights.spec.norm.eps)
    if attention.rotates(layer):
        positions = torch.arange(blocks.start, blocks.stop, device=index.device) * size
        angles = caches.Rope(weights.spec.rope_of(layer), index.device)(positions, blocks.stop * size)
        pooled = caches.rotate(pooled[None], angles, is_interleaved(weights.spec, layer))[0]
    rows[:, -1] = pooled


def _score_pooled(q: Tensor, index: Tensor, positions: Tensor, spec: parts.BlockIndexerSpec) -> Tensor:
    """Returns the blocks that are chosen by their own keys, and those that tokens are in the middle of.

    Args:    q: float32 [heads, T, head_dim].   index: float32 [S, head_dim], a complete block's key at its last
             position.   positions: int64 [T].
    Returns: bool [1, T, blocks].
    """
    size = spec.block_tokens
    scores = torch.relu(q @ index[size - 1 :: size].T).sum(dim=0)
    complete = (positions + 1)[:, None] // size
    numbers = torch.arange(-(-len(index) // size), device=q.device)
    chosen = largest(scores, spec.num_blocks, numbers[: scores.shape[1]] < complete)
    chosen = torch.nn.functional.pad(chosen, (0, len(numbers) - scores.shape[1]))
    return (chosen | ((numbers == complete) & (numbers == positions[:, None] // size)))[None]


def _score_largest(q: Tensor, index: Tensor, positions: Tensor, spec: parts.BlockIndexerSpec) -> Tensor:
    """Returns the blocks that are chosen by the best of their positions, and the last ones.

    Args:    q: float32 [heads, T, head_dim].   index: float32 [S, head_dim].   positions: int64 [T].
    Returns: bool [heads, T, blocks].
    """
    size, length = spec.block_tokens, len(index)
    seen = torch.arange(length, device=q.device) <= positions[:, None]
    scores = (q @ index.T).masked_fill(~seen, -torch.inf)
    scores = torch.nn.functional.pad(scores, (0, -length % size), value=-torch.inf)
    scores = scores.view(*scores.shape[:2], -1, size).amax(dim=-1)
    own, numbers = positions[:, None] // size, torch.arange(scores.shape[-1], device=q.device)
    is_local = (numbers <= own) & (numbers > own - spec.local_blocks)
    return largest(scores.masked_fill(is_local, torch.inf), spec.num_blocks, numbers <= own)


def largest(scores: Tensor, number: int, allowed: Tensor) -> Tensor:
    """Returns which of the allowed scores are the `number` largest of their row; among equal ones, the first.

    Args:    scores: float32 [..., n].   allowed: bool, of a shape that becomes theirs.
    Returns: bool [..., n]; all that are allowed, if they are fewer.
    """
    scores = scores.masked_fill(~allowed, -torch.inf)
    least = scores.topk(min(number, scores.shape[-1]), dim=-1).values[..., -1:]
    above, equal = scores > least, scores == least
    missing = number - above.sum(dim=-1, keepdim=True)
    return (above | (equal & (equal.cumsum(dim=-1) <= missing))) & allowed


def attend_latent(
    x: Tensor,
    weights: Weights,
    spec: parts.LatentSpec,
    layer: int,
    cache: caches.LayerCache | caches.Batch[caches.LayerCache],
    angles: caches.Angles,
) -> Tensor:
    """Returns a layer's latent attention for new tokens; their latents and rotated keys are appended to the cache.

    Args:    x: float32 [T, d], normed.
    Returns: float32 [T, d].
    """
    role, sequences = f"layers.{layer}.attention", caches.each_sequence(cache, len(x))
    rope_dim, interleaved = spec.qk_rope_head_dim, is_interleaved(weights.spec, layer)
    q, q_latent, gates = _queries(x, weights, spec, role)
    q_nope, q_rope = torch.split(q, [spec.qk_nope_head_dim, rope_dim], dim=-1)
    q = torch.cat((q_nope, caches.rotate(q_rope, angles, interleaved)), dim=-1)
    if spec.temperature is not None:
        q = q * _temperatures(spec.temperature, sequences, x.device)
    latent, key = torch.split(matrices.linear(x, weights.matrix(f"{role}.kv_a")), [spec.kv_lora_rank, rope_dim], dim=-1)
    latent = weights.operations.rms_norm(latent, weights.vector(f"{role}.kv_a_norm"), spec.lora_norm_eps)
    latent = latent if spec.kv_latent_scale == 1 else latent * spec.kv_latent_scale
    entered = torch.cat((latent, caches.rotate(key[None], angles, interleaved)[0]), dim=-1)
    sinks = weights.vector(f"{role}.sinks") if spec.sinks else None
    outputs = []
    for rows, own in _rows_and_caches(sequences):
        own.enter_parts(entered[rows], _LATENT)
        own_latent = None if q_latent is None else q_latent[rows]
        mask = _latent_mask(x[rows], own_latent, weights, spec, role, own, _angles_of(angles, rows))
        outputs.append(_attend_latents(q[:, rows], weights, spec, role, own, mask, sinks))
    mixed = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)  # [heads, T, v]
    mixed = mixed if gates is None else mixed * gates.sigmoid()
    mixed = _gated(mixed.transpose(0, 1).flatten(1), x, weights, spec.gate, spec.v_head_dim, role)
    return matrices.linear(mixed, weights.matrix(f"{role}.o"))


def _latent_mask(
    x: Tensor,
    q_latent: Tensor | None,
    weights: Weights,
    spec: parts.LatentSpec,
    role: str,
    cache: caches.LayerCache,
    angles: caches.Angles,
) -> Tensor | None:
    """Returns which positions each of a sequence's new tokens sees, bool [T, S]; None: all.

    A layer with an indexer of its own writes their index keys to the cache, and its choice.
    """
    start, stop = cache.num_tokens, cache.num_tokens + len(x)
    mask = seen_positions(None, 0, start, len(x), x.device)
    if (indexer := spec.own_indexer) is not None and q_latent is not None:
        cache.enter_parts(_index_keys(x, weights, indexer, role, angles), _INDEX)
        cache.chosen.positions = None
        if stop > indexer.top_k:

            def index_keys() -> Iterator[Tensor]:
                blocks = cache.blocks(0, stop, MAX_DECODED_BYTES) if cache.reads_blocks else iter([(0, stop)])
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
    cache: caches.LayerCache,
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
    cache: caches.LayerCache,
    mask: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """Returns the same, of latents that are dequantized block by block of positions; either way, as `absorbs` says."""
    rank, nope, num_heads, num_tokens = spec.kv_lora_rank, spec.qk_nope_head_dim, *q.shape[:2]
    stop, width = cache.num_tokens + num_tokens, spec.qk_nope_head_dim + spec.qk_rope_head_dim + spec.v_head_dim
    is_absorbed = absorbs(num_tokens, stop, spec)
    softmax = caches.RunningSoftmax(num_heads, num_tokens, rank if is_absorbed else spec.v_head_dim, q.device, sinks)
    for begin, end in cache.blocks(0, stop, MAX_DECODED_BYTES):
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
            softmax.add(scores, values, heads)
    mixed = softmax.result()
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


def _index_keys(x: Tensor, weights: Weights, spec: parts.IndexerSpec, role: str, angles: caches.Angles) -> Tensor:
    """Returns the indexer's keys of tokens x, float32 [T, head_dim]."""
    norm = weights.vector(f"{role}.index_k_norm"), weights.vector(f"{role}.index_k_norm_bias")
    k = matrices.linear(x, weights.matrix(f"{role}.index_k"))
    k = torch.nn.functional.layer_norm(k, (spec.head_dim,), *norm, spec.norm_eps)
    return _rotated_index(k[None], spec, angles)[0]


def _rotated_index(x: Tensor, spec: parts.IndexerSpec, angles: caches.Angles) -> Tensor:
    """Returns an indexer's queries or keys x [heads, T, head_dim], rotated."""
    return (_rotate_last if spec.rotates_last else caches.rotate)(x, angles, spec.interleaved)


def _indexed(
    x: Tensor,
    q_latent: Tensor,
    weights: Weights,
    spec: parts.IndexerSpec,
    role: str,
    angles: caches.Angles,
    keys: Callable[[], Iterator[Tensor]],
    mask: Tensor | None,
) -> Tensor:
    """Returns which positions each token attends to: those with the `top_k` largest scores among those it sees.

    Args:    keys: of `_largest_scores`, the indexer's.   mask: bool [T, S], which positions are seen; None: all.
    Returns: bool [T, S]; among equal scores, the first positions.
    """
    q = matrices.linear(q_latent, weights.matrix(f"{role}.index_q")).view(len(x), spec.num_heads, -1).transpose(0, 1)
    q = _rotated_index(q, spec, angles)
    head_weights = (
        matrices.linear(x, weights.matrix(f"{role}.index_weights")) * (spec.num_heads * spec.head_dim) ** -0.5
    )
    return _largest_scores(q, keys, head_weights, spec.top_k, mask)


def _up_projections(
    weights: Weights, spec: parts.LatentSpec, role: str, head_bytes: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields some heads at a time: which heads, W_k [heads, nope, rank] and W_v [heads, v, rank], float32.

    The rows of `kv_b` of these heads, and `head_bytes` of workspace for each, stay within `MAX_DECODED_BYTES`; there is
    one head at least.
    """
    nope, rank = spec.qk_nope_head_dim, spec.kv_lora_rank
    width = nope + spec.v_head_dim
    step = max(1, MAX_DECODED_BYTES // max(4 * width * rank, head_bytes))
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
            yield attend_with_sinks(moved, keys, values, mask, spec.scale, sinks[heads]) @ w_v.transpose(1, 2)
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
            for first, last in _query_blocks(q.shape[1], len(keys) * len(cached)):
                seen = None if mask is None else mask[first:last]
                rows = q[heads, first:last]
                pieces.append(attend_with_sinks(rows, keys, values, seen, spec.scale, sinks[heads]))
            yield torch.cat(pieces, dim=1)
        elif q.device.type == "cpu":
            yield torch.nn.functional.scaled_dot_product_attention(
                q[heads], keys, values, attn_mask=mask, scale=spec.scale
            )
        else:
            yield fused_attention(q[heads], keys, values, mask, False, spec.scale)


def _attend_compressed(
    x: Tensor, weights: Weights, spec: parts.CompressedSpec, layer: int, cache: caches.LayerCache, angles: caches.Angles
) -> Tensor:
    """Returns a layer's compressed attention; keys of new tokens, and entries that they complete, enter the cache."""
    role, eps, operations = f"layers.{layer}.attention", weights.spec.norm.eps, weights.operations
    start, stop, interleaved = cache.num_tokens, cache.num_tokens + len(x), is_interleaved(weights.spec, layer)
    latent = operations.rms_norm(
        matrices.linear(x, weights.matrix(f"{role}.q_a")), weights.vector(f"{role}.q_a_norm"), eps
    )
    q = matrices.linear(latent, weights.matrix(f"{role}.q_b")).view(len(x), spec.num_heads, spec.head_dim)
    q = operations.rms_norm(q, torch.ones(spec.head_dim, device=x.device), eps)
    q = _rotate_last(q.transpose(0, 1), angles, interleaved)
    key = operations.rms_norm(matrices.linear(x, weights.matrix(f"{role}.kv")), weights.vector(f"{role}.kv_norm"), eps)
    key = _rotate_last(key[None], angles, interleaved)
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
        mixed = attend_entry_blocks(q, cache, cache.compressed, spec, start, number, seen, sinks)
    mixed = _rotate_last(mixed, (angles[0], -angles[1]), interleaved).transpose(0, 1).flatten(1)
    mixed = matrices.linear_by_group(mixed, weights.matrix(f"{role}.o_a"), spec.num_groups)
    return matrices.linear(mixed, weights.matrix(f"{role}.o_b"))


def _rotate_last(x: Tensor, angles: caches.Angles, interleaved: bool) -> Tensor:
    """Returns x [heads, T, n] with its last `rotary_dim` values turned by the angles of its positions."""
    first = x.shape[-1] - 2 * angles[0].shape[1]
    return torch.cat((x[..., :first], caches.rotate(x[..., first:], angles, interleaved)), dim=-1)


def _attend_entries(
    q: Tensor,
    cache: caches.LayerCache,
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
    step = max(1, MAX_SCORE_BYTES // (4 * spec.num_heads * (len(keys) + len(entries))))
    mixed = []
    for begin in range(0, num_tokens, step):
        piece, at = q[:, begin : begin + step], start + begin
        low, high = max(0, at + 1 - window), at + piece.shape[1]
        own = seen_positions(window, low, at, piece.shape[1], q.device)
        some, chosen = entries, None if seen is None else seen[begin : begin + step]
        if chosen is not None and len(chosen) == 1:
            some, chosen = entries[chosen[0]], None
        mask = None
        if own is not None or chosen is not None:
            near = own if own is not None else torch.ones((piece.shape[1], high - low), dtype=torch.bool)
            far = chosen if chosen is not None else torch.ones((piece.shape[1], len(some)), dtype=torch.bool)
            mask = torch.cat((near.to(q.device), far.to(q.device)), dim=1)
        values = torch.cat((keys[low - first : high - first], some))[None]
        mixed.append(attend_with_sinks(piece, values, values, mask, spec.scale, sinks))
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=1)


def _compress(
    x: Tensor,
    weights: Weights,
    spec: parts.CompressedSpec,
    compression: parts.CompressionSpec,
    layer: int,
    cache: caches.EntryCache,
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
    angles, begin, made = caches.Rope(rope, x.device)(positions, last * size), 0, list[Tensor]()
    for name, dim in names:
        width = dim * (2 if compression.overlap else 1)
        values, logits = rows[..., begin : begin + width], rows[..., begin + width : begin + 2 * width]
        begin += 2 * width
        if compression.overlap:
            values, logits = _overlapped(values, before, 0.0), _overlapped(logits, before, -torch.inf)
        entry = (values * logits.softmax(dim=1)).sum(dim=1)
        entry = weights.operations.rms_norm(entry, weights.vector(f"{role}.{name}_norm"), weights.spec.norm.eps)
        made.append(_rotate_last(entry[None], angles, is_interleaved(weights.spec, layer))[0])
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
    cache: caches.EntryCache,
    num_entries: int,
    angles: caches.Angles,
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
    q = _rotate_last(q, angles, is_interleaved(weights.spec, layer))
    head_weights = matrices.linear(x, weights.matrix(f"{role}.index_weights")) * scale

    def keys() -> Iterator[Tensor]:
        return cache.index_keys(num_entries, MAX_DECODED_BYTES)

    return _largest_scores(q, keys, head_weights, indexer.top_k, seen)


def _largest_scores(
    q: Tensor, keys: Callable[[], Iterator[Tensor]], head_weights: Tensor, top_k: int, seen: Tensor | None
) -> Tensor:
    """Returns the `top_k` of the keys that each query sees whose products, not below 0, have the largest weighted sums.

    Args:    q: float32 [heads, T, head_dim].   keys: yields float32 [n, head_dim] in blocks.   head_weights: float32
             [T, heads].   seen: bool [T, n]; None: all.
    Returns: bool [T, n]; among equal scores, the first.
    """
    chosen, first, num_keys = list[Tensor](), 0, sum(map(len, keys()))
    step = max(1, MAX_DECODED_BYTES // (4 * len(q) * num_keys))
    while first < q.shape[1]:
        rows = slice(first, first + step)
        blocks = [torch.einsum("hts,th->ts", torch.relu(q[:, rows] @ each.T), head_weights[rows]) for each in keys()]
        scores = torch.cat(blocks, dim=1)
        allowed = torch.ones_like(scores, dtype=torch.bool) if seen is None else seen[rows]
        chosen.append(largest(scores, top_k, allowed))
        first += step
    return torch.cat(chosen)


def distance_buckets(spec: parts.RelativeSpec, num_distances: int, is_mutual: bool) -> Tensor:
    """Returns the bucket of each distance from 0 up to a key that does not come later, int64 [num_distances].

    The first half of the buckets have one distance each, the others grow by powers up to `max_distance`, and the last
    has everything beyond. If keys may come later (`is_mutual`), half of the buckets are for those.
    Source:  transformers, models/switch_transformers, _relative_position_bucket, in its order of float32 operations:
             another rounding of the logarithm would put a distance into another bucket.
    """
    num_buckets = spec.num_buckets // 2 if is_mutual else spec.num_buckets
    num_exact = num_buckets // 2
    distances = torch.arange(num_distances)
    growth = torch.log(distances.clamp(min=1).float() / num_exact) / math.log(spec.max_distance / num_exact)
    far = (num_exact + (growth * (num_buckets - num_exact)).to(torch.long)).clamp(max=num_buckets - 1)
    return torch.where(distances < num_exact, distances, far)


class PositionBias:
    """The bias that a stack adds to scores by distance, laid out for all distances within `context_tokens` positions.

    Args:    table: float32 [num_buckets, heads].   is_mutual: whether a position sees later positions; if not, their
             bias is minus infinity.
    """

    def __init__(self, spec: parts.RelativeSpec, table: Tensor, context_tokens: int, is_mutual: bool) -> None:
        buckets = distance_buckets(spec, context_tokens, is_mutual).to(table.device)
        before = table[buckets].T  # [heads, N], in rising order of distances
        if is_mutual:
            after = table[buckets[1:] + spec.num_buckets // 2].T
        else:
            after = torch.full((table.shape[1], context_tokens - 1), -torch.inf, device=table.device)
        # By key - query, from -(N - 1) to N - 1: the biases of a query are consecutive.
        self._line = torch.cat((before.flip(1), after), dim=1).contiguous()
        self._context_tokens = context_tokens
        self.num_bytes = self._line.nbytes

    def rows(self, start: int, stop: int, num_keys: int) -> Tensor:
        """Returns the biases of queries `start` to `stop` for the first `num_keys` keys, float32 [heads, T, keys]."""
        windows = self._line.unfold(1, num_keys, 1)  # [heads, first distance, num_keys], a view
        last = self._context_tokens - 1
        return windows[:, last - stop + 1 : last - start + 1].flip(1)


def enter_keys(
    x: Tensor, weights: Weights, spec: parts.RelativeSpec, role: str, cache: caches.LayerCache, start: int
) -> None:
    """Writes keys and values of tokens x float32 [T, d] into a cache, the first at position `start`."""
    for name, cached in (("k", cache.keys), ("v", cache.values)):
        projected = matrices.linear(x, weights.matrix(f"{role}.{name}")).view(len(x), spec.num_heads, spec.head_dim)
        cached[:, start : start + len(x)] = projected.transpose(0, 1)  # [heads, T, head_dim]


def attend_keys(
    x: Tensor,
    weights: Weights,
    spec: parts.RelativeSpec,
    role: str,
    cache: caches.LayerCache,
    bias: PositionBias | None,
    start: int = 0,
) -> Tensor:
    """Returns the attention of tokens x float32 [T, d], normed, to the `num_tokens` keys of a cache: float32 [T, d].

    Args:    role: of the projections (`layers.{i}.attention`, `layers.{i}.cross`).   bias: None: every token sees all
             keys, without a bias.   start: the position of the first token; only the bias uses it.
    """
    q = matrices.linear(x, weights.matrix(f"{role}.q")).view(len(x), spec.num_heads, spec.head_dim).transpose(0, 1)
    keys, values = cache.keys[None, :, : cache.num_tokens], cache.values[None, :, : cache.num_tokens]
    mixed = []
    for first, last in _query_blocks(len(x), spec.num_heads * cache.num_tokens):
        mask = None if bias is None else bias.rows(start + first, start + last, cache.num_tokens)[None]
        block = torch.nn.functional.scaled_dot_product_attention(
            q[None, :, first:last], keys, values, attn_mask=mask, scale=spec.scale
        )  # [1, heads, block, head_dim]
        mixed.append(block[0].transpose(0, 1).flatten(1))
    return matrices.linear(mixed[0] if len(mixed) == 1 else torch.cat(mixed), weights.matrix(f"{role}.o"))


def _query_blocks(num_tokens: int, scores_each: int) -> Iterator[tuple[int, int]]:
    """Yields (first, last) of queries whose scores and biases stay within `MAX_DECODED_BYTES` together."""
    step = max(1, MAX_DECODED_BYTES // (8 * scores_each))
    for first in range(0, num_tokens, step):
        yield first, min(first + step, num_tokens)
