"""Multi-head latent attention, with indexers that choose positions.

The cache has one latent c for each position; a head's keys and values are `kv_b` times c. Each pass takes one of two
ways with the same result, the one that multiplies less. Expanded: keys and values of all positions are computed, as the
model is written. Absorbed: since `q . (W_k c) = (W_k^T q) . c`, queries move into the latent's space instead, all heads
attend to the cached vectors, and `W_v` is applied to the weighted latents. Source: DeepSeek-V2 (2405.04434), section
2.1.2 and appendix C.

With an indexer (DeepSeek-V3.2), a query attends to the positions that score highest with the indexer's own keys. Layers
without an indexer may share the choice of an earlier layer (GLM-5), which comes with their cache.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_pack.formats import parts
from moe_pack.runtime.model.attention import shared
from moe_pack.runtime.model.caches import dtypes, layer_cache, ropes, storage
from moe_pack.runtime.model.compute import softmax
from moe_pack.runtime.model.compute.weights import Weights

LATENT, INDEX = slice(0, 2), slice(2, 3)  # parts of a row of the cache: latent and rotated key; indexer's key


def cache_shape(spec: parts.LatentSpec, dtype: dtypes.KvDtype) -> layer_cache.CacheShape:
    """Returns the cache of a layer, for one head: the latent, which is the value, the rotated key, an indexer's key."""
    widths, indexer = (spec.kv_lora_rank, spec.qk_rope_head_dim), spec.own_indexer
    keys = storage.RowStorage(dtype, widths if indexer is None else (*widths, indexer.head_dim))
    return layer_cache.CacheShape(1, keys, None, value_width=spec.kv_lora_rank)


def absorbs(num_new: int, num_seen: int, spec: parts.LatentSpec) -> bool:
    """Returns whether the absorbed way multiplies less, for `num_new` tokens that see up to `num_seen` positions."""
    rank, nope, rope, v = spec.kv_lora_rank, spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim
    absorbed = num_new * (nope + v) * rank + num_new * num_seen * (2 * rank + rope)
    expanded = num_seen * (nope + v) * rank + num_new * num_seen * (nope + rope + v)
    return absorbed <= expanded


class Latent(shared.LayerAttention):
    """Latent attention of a layer."""

    def __init__(self, weights: Weights, spec: parts.LatentSpec, layer: int) -> None:
        super().__init__(weights, layer)
        self._spec = spec
        self._sinks = self.vector("sinks") if spec.sinks else None  # float32 [num_heads], logits without a value

    def attend(self, x: Tensor, sequences: layer_cache.Batch[layer_cache.LayerCache], angles: ropes.Angles) -> Tensor:
        """Returns the attention of new tokens x float32 [T, d], normed: float32 [T, d]."""
        spec = self._spec
        q, q_latent, gates = self._queries(x)
        q_nope, q_rope = torch.split(q, [spec.qk_nope_head_dim, spec.qk_rope_head_dim], dim=-1)
        q = torch.cat((q_nope, ropes.rotate(q_rope, angles, self.interleaved)), dim=-1)
        if spec.temperature is not None:
            q = q * shared.temperatures(spec.temperature, shared.positions_of(sequences, x.device))
        latent, key = torch.split(self.linear(x, "kv_a"), [spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1)
        latent = self.norm(latent, "kv_a_norm", spec.lora_norm_eps)
        latent = latent if spec.kv_latent_scale == 1 else latent * spec.kv_latent_scale
        entered = torch.cat((latent, ropes.rotate(key[None], angles, self.interleaved)[0]), dim=-1)
        outputs = []
        for own in sequences:
            own.cache.enter_parts(entered[own.rows], LATENT)
            own_latent = None if q_latent is None else q_latent[own.rows]
            seen = self._seen(x[own.rows], own_latent, own.cache, own.angles(angles))
            outputs.append(self._read(q[:, own.rows], own.cache, seen))
        mixed = softmax.joined(outputs, dim=1)  # [heads, T, v]
        mixed = mixed if gates is None else mixed * gates.sigmoid()
        return self.linear(self.gated(mixed.transpose(0, 1).flatten(1), x, spec.gate, spec.v_head_dim), "o")

    def _queries(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        spec = self._spec
        if spec.q_lora_rank is None:
            latent, q = None, self.linear(x, "q")
        else:
            plain = self.linear(x, "q_a")
            latent = self.norm(plain, "q_a_norm", spec.lora_norm_eps)
            latent = latent if spec.q_latent_scale == 1 else latent * spec.q_latent_scale
            q = self.linear(torch.cat((latent, plain), dim=-1) if spec.gated else latent, "q_b")
        q = q.view(len(x), spec.num_heads, -1).transpose(0, 1)
        if not spec.gated:
            return q, latent, None
        q, gates = torch.split(q, [spec.qk_nope_head_dim + spec.qk_rope_head_dim, spec.v_head_dim], dim=-1)
        return q, latent, gates

    # ---- positions that an indexer chooses --------------------------------------------------------------------------

    def _seen(
        self, x: Tensor, q_latent: Tensor | None, cache: layer_cache.LayerCache, angles: ropes.Angles
    ) -> Tensor | None:
        """Returns the positions each new token sees, bool [T, S], or None; an own indexer caches keys and choice."""
        start, stop, indexer = cache.num_tokens, cache.num_tokens + len(x), self._spec.own_indexer
        seen = softmax.seen_positions(None, 0, start, len(x), x.device)
        if indexer is not None and q_latent is not None:
            norm = self.vector("index_k_norm"), self.vector("index_k_norm_bias")
            k = torch.nn.functional.layer_norm(self.linear(x, "index_k"), (indexer.head_dim,), *norm, indexer.norm_eps)
            cache.enter_parts(rotated(k[None], indexer, angles)[0], INDEX)
            cache.chosen.positions = None
            if stop > indexer.top_k:
                cache.chosen.positions = self._chosen(x, q_latent, indexer, cache, angles, seen)
        if self._spec.indexer is not None and cache.chosen.positions is not None:
            return cache.chosen.positions
        return seen

    def _chosen(
        self,
        x: Tensor,
        q_latent: Tensor,
        spec: parts.IndexerSpec,
        cache: layer_cache.LayerCache,
        angles: ropes.Angles,
        seen: Tensor | None,
    ) -> Tensor:
        """Returns the positions with the `top_k` largest scores among those that each token sees, bool [T, S]."""
        stop = cache.num_tokens + len(x)

        def keys() -> Iterator[Tensor]:
            blocks = cache.blocks(0, stop, softmax.MAX_DECODED_BYTES) if cache.reads_blocks else iter([(0, stop)])
            return (cache.read_parts(begin, end, INDEX) for begin, end in blocks)

        q = self.linear(q_latent, "index_q").view(len(x), spec.num_heads, -1).transpose(0, 1)
        head_weights = self.linear(x, "index_weights") * (spec.num_heads * spec.head_dim) ** -0.5
        return shared.largest_scores(rotated(q, spec, angles), keys, head_weights, spec.top_k, seen)

    # ---- queries read latents ---------------------------------------------------------------------------------------

    def _read(self, q: Tensor, cache: layer_cache.LayerCache, seen: Tensor | None) -> Tensor:
        """Returns what a sequence's queries [heads, T, nope + rope] read, float32 [heads, T, v]."""
        stop = cache.num_tokens + q.shape[1]
        if cache.reads_blocks:
            return self._read_blocks(q, cache, seen)
        read = self._absorbed if absorbs(q.shape[1], stop, self._spec) else self._expanded
        return torch.cat(list(read(q, cache.read_parts(0, stop, LATENT), seen)))

    def _read_blocks(self, q: Tensor, cache: layer_cache.LayerCache, seen: Tensor | None) -> Tensor:
        spec, (num_heads, num_tokens) = self._spec, q.shape[:2]
        rank, nope, stop = spec.kv_lora_rank, spec.qk_nope_head_dim, cache.num_tokens + num_tokens
        is_absorbed, width = absorbs(num_tokens, stop, spec), nope + spec.qk_rope_head_dim + spec.v_head_dim
        mixed_width = rank if is_absorbed else spec.v_head_dim
        running = softmax.RunningSoftmax(num_heads, num_tokens, mixed_width, q.device, self._sinks)
        for begin, end in cache.blocks(0, stop, softmax.MAX_DECODED_BYTES):
            cached = cache.read_parts(begin, end, LATENT)
            latent, rope = cached[:, :rank], cached[:, rank:]
            for heads, w_k, w_v in self._up_projections(4 * len(cached) * (width + num_tokens)):
                if is_absorbed:
                    moved = torch.cat((q[heads, :, :nope] @ w_k, q[heads, :, nope:]), dim=-1)
                    scores, values = moved @ cached.T, latent[None]
                else:
                    expanded = latent @ w_k.transpose(1, 2)
                    keys = torch.cat((expanded, rope.expand(len(expanded), -1, -1)), dim=-1)
                    scores, values = q[heads] @ keys.transpose(1, 2), latent @ w_v.transpose(1, 2)
                scores *= spec.scale
                if seen is not None:
                    scores.masked_fill_(~seen[:, begin:end], -torch.inf)
                running.add(scores, values, heads)
        mixed = running.result()
        if not is_absorbed:
            return mixed
        projections = self._up_projections(4 * num_tokens * spec.v_head_dim)
        return torch.cat([mixed[heads] @ w_v.transpose(1, 2) for heads, _, w_v in projections])

    def _up_projections(self, head_bytes: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yields heads in `MAX_DECODED_BYTES` with workspace: which, W_k [heads, nope, rank], W_v [heads, v, rank]."""
        spec, nope, rank = self._spec, self._spec.qk_nope_head_dim, self._spec.kv_lora_rank
        width, matrix = nope + spec.v_head_dim, self.matrix("kv_b")
        step = max(1, softmax.MAX_DECODED_BYTES // max(4 * width * rank, head_bytes))
        for first in range(0, spec.num_heads, step):
            last = min(first + step, spec.num_heads)
            rows = matrix.rows(first * width, last * width).view(last - first, width, rank)
            yield slice(first, last), rows[:, :nope], rows[:, nope:]

    def _absorbed(self, q: Tensor, cached: Tensor, seen: Tensor | None) -> Iterator[Tensor]:
        """Yields outputs of some heads, [heads, T, v], in the latent's space, from cached float32 [S, rank + rope]."""
        spec, nope = self._spec, self._spec.qk_nope_head_dim
        values = cached[:, : spec.kv_lora_rank]
        for heads, w_k, w_v in self._up_projections(4 * q.shape[1] * len(cached)):
            moved = torch.cat((q[heads, :, :nope] @ w_k, q[heads, :, nope:]), dim=-1)  # [heads, T, rank + rope]
            if self._sinks is not None:
                own = self._sinks[heads]
                mixed = softmax.attend_with_sinks(moved, cached[None], values[None], seen, spec.scale, own)
                yield mixed @ w_v.transpose(1, 2)
                continue
            scores = moved @ cached.T * spec.scale
            if seen is not None:
                scores = scores.masked_fill(~seen, -torch.inf)
            yield scores.softmax(dim=-1) @ values @ w_v.transpose(1, 2)

    def _expanded(self, q: Tensor, cached: Tensor, seen: Tensor | None) -> Iterator[Tensor]:
        """Yields the same with expanded keys and values."""
        spec = self._spec
        latent, rope = torch.split(cached, [spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1)
        width = spec.qk_nope_head_dim + spec.qk_rope_head_dim + spec.v_head_dim
        for heads, w_k, w_v in self._up_projections(4 * len(cached) * width):
            nope = latent @ w_k.transpose(1, 2)  # [heads, S, nope]
            keys = torch.cat((nope, rope.expand(len(nope), -1, -1)), dim=-1)
            values = latent @ w_v.transpose(1, 2)
            if self._sinks is not None:
                pieces = []
                for first, last in softmax.query_blocks(q.shape[1], len(keys) * len(cached)):
                    own, rows = None if seen is None else seen[first:last], q[heads, first:last]
                    pieces.append(softmax.attend_with_sinks(rows, keys, values, own, spec.scale, self._sinks[heads]))
                yield torch.cat(pieces, dim=1)
            elif q.device.type == "cpu":
                yield torch.nn.functional.scaled_dot_product_attention(
                    q[heads], keys, values, attn_mask=seen, scale=spec.scale
                )
            else:
                in_half = self.weights.operations.attends_in_half
                yield softmax.fused_attention(q[heads], keys, values, seen, False, spec.scale, in_half)


def rotated(x: Tensor, spec: parts.IndexerSpec, angles: ropes.Angles) -> Tensor:
    """Returns an indexer's queries or keys [heads, T, n], rotated as it says."""
    return (ropes.rotate_last if spec.rotates_last else ropes.rotate)(x, angles, spec.interleaved)
