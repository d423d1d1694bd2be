"""Grouped-query attention: norms and rotation of heads, windows, sinks, gates, and indexers that choose blocks.

The attention itself is an operation, because kernels compute it whole. While there are no more blocks than an indexer
chooses for each token, attention is the plain one.
"""

import torch
from torch import Tensor

from moe_pack.formats import parts
from moe_pack.runtime.model.attention import shared
from moe_pack.runtime.model.caches import dtypes, layer_cache, ropes, storage
from moe_pack.runtime.model.compute import matrices, operations, softmax
from moe_pack.runtime.model.compute.weights import Weights, unit


def cache_shape(spec: parts.GroupedQuerySpec, dtype: dtypes.KvDtype) -> layer_cache.CacheShape:
    """Returns the cache of a layer: keys and values of each head, and an indexer's keys."""
    keys, values = storage.RowStorage(dtype, (spec.head_dim,)), storage.RowStorage(dtype, (spec.value_dim,))
    index_width = 0 if spec.indexer is None else spec.indexer.head_dim
    return layer_cache.CacheShape(spec.num_kv_heads, keys, values, index_width=index_width)


class Grouped(shared.LayerAttention):
    """Grouped-query attention of a layer."""

    def __init__(self, weights: Weights, spec: parts.GroupedQuerySpec, layer: int) -> None:
        super().__init__(weights, layer)
        self._spec, self._eps = spec, weights.spec.norm.eps
        temperature, self._is_rotated = spec.temperature, spec.rotates(layer)
        self._temperature = None if temperature and temperature.is_unrotated and self._is_rotated else temperature

    def attend(self, x: Tensor, sequences: layer_cache.Batch[layer_cache.LayerCache], angles: ropes.Angles) -> Tensor:
        """Returns the attention of new tokens x float32 [T, d], normed: float32 [T, d]."""
        spec, gate = self._spec, None
        q, k = self._projected(x, "q"), self._projected(x, "k")
        v = self._clipped(k if spec.keys_as_values else self._projected(x, "v"))
        if spec.v_norm:
            v = unit(v.view(len(x), spec.num_kv_heads, spec.value_dim), self.weights).flatten(1)
        if spec.value_scale != 1.0:
            v = v * spec.value_scale
        if spec.gated:
            q, gate = (each.flatten(1) for each in q.view(len(x), spec.num_heads, 2, -1).unbind(2))
        q, k, norms = self._normed(q, k)
        if self._temperature is not None:
            q = q * shared.temperatures(self._temperature, self._positions(sequences, x.device))
        mixed = self._mixed(x, (q, k, v), norms, sequences, angles)
        if gate is not None:
            mixed = mixed * gate.sigmoid()
        return self._projected(self.gated(mixed, x, spec.gate, spec.value_dim), "o")

    # ---- steps that depend on where tokens stand, which a GPU's tokens do otherwise ----------------------------------

    def _positions(self, sequences: layer_cache.Batch[layer_cache.LayerCache], device: torch.device) -> Tensor:
        return shared.positions_of(sequences, device)

    def _mixed(
        self,
        x: Tensor,
        projected: tuple[Tensor, Tensor, Tensor],
        norms: operations.HeadNorms | None,
        sequences: layer_cache.Batch[layer_cache.LayerCache],
        angles: ropes.Angles,
    ) -> Tensor:
        """Returns each query head's output, float32 [T, num_heads * value_dim]; new keys and values enter the caches.

        Args:    x: float32 [T, d], for an indexer.   projected: q, k, v, float32 [T, heads * dim], not rotated.
        """
        spec, outputs = self._spec, []
        if not self._is_rotated:
            angles = torch.ones_like(angles[0]), torch.zeros_like(angles[1])
        sinks, window = self.vector("sinks") if spec.sinks else None, spec.window(self.layer)
        for own in sequences:
            q, k, v = (each[own.rows] for each in projected)
            turns, chosen = own.angles(angles), None
            if spec.indexer is not None:
                chosen = choose_blocks(x[own.rows], self.weights, spec.indexer, self.layer, own.cache, turns)
            view = softmax.View(own.cache, spec, window, sinks, chosen)
            outputs.append(self.weights.operations.attend((q, k, v), norms, turns, self.interleaved, view))
        return softmax.joined(outputs)

    # ---- projections ------------------------------------------------------------------------------------------------

    def _projected(self, x: Tensor, name: str) -> Tensor:
        return self.linear(x, name, name in self._spec.bias)

    def _clipped(self, x: Tensor) -> Tensor:
        return x if self._spec.clip is None else x.clamp(-self._spec.clip, self._spec.clip)

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, operations.HeadNorms | None]:
        """Returns queries and keys, clipped and perhaps normed, and the norms that the operation applies."""
        spec, eps, norms = self._spec, self._eps, None
        if spec.qk_norm == "unit":
            ones = torch.ones(spec.head_dim, device=q.device)
            norms = operations.HeadNorms(ones, ones, eps, True) if self._is_rotated else None
        elif spec.qk_norm == "projection":
            q, k = self.norm(q, "q_norm", eps), self.norm(k, "k_norm", eps)
        elif spec.qk_norm != "none":
            is_last = spec.qk_norm == "rotated_head"
            norms = operations.HeadNorms(self.vector("q_norm"), self.vector("k_norm"), eps, is_last)
        q, k = self._clipped(q), self._clipped(k)
        if spec.qk_norm == "head" and self._temperature is not None:  # norms in the operation would undo it
            q = self.norm(q.view(len(q), -1, spec.head_dim), "q_norm", eps).flatten(1)
            k = self.norm(k.view(len(k), -1, spec.head_dim), "k_norm", eps).flatten(1)
            norms = None
        return q, k, norms


@torch.no_grad()
def choose_blocks(
    x: Tensor,
    weights: Weights,
    spec: parts.BlockIndexerSpec,
    layer: int,
    cache: layer_cache.LayerCache,
    angles: ropes.Angles,
) -> Tensor | None:
    """Returns the blocks that each new token attends to; the tokens' index keys enter the cache.

    A block is seen up to the token's own position. The block that the token is in the middle of counts as chosen.
    Args:    x: float32 [T, d], normed.   angles: of the T positions, as the layer rotates them.
    Returns: bool [m, T, blocks up to the last token's], for each of m shares of the heads: 1, or those of the indexer;
             among blocks of equal scores, the first. None if all are chosen.
    """
    assert cache.index is not None, "a layer with an indexer of blocks"
    role, start, size = f"layers.{layer}.attention", cache.num_tokens, spec.block_tokens
    stop = start + len(x)
    interleaved, eps = shared.is_interleaved(weights.spec, layer), weights.spec.norm.eps
    k = matrices.linear(x, weights.matrix(f"{role}.index_k"))
    if spec.kind == "largest":
        k = weights.operations.rms_norm(k, weights.vector(f"{role}.index_k_norm"), eps)
        k = ropes.rotate(k[None], angles, interleaved)[0]
    cache.index[start:stop] = k
    if spec.kind == "pooled":
        _pool_blocks(weights, layer, cache.index, range(start // size, stop // size), size)
    num_blocks = -(-stop // size)
    if (stop // size if spec.kind == "pooled" else num_blocks) <= spec.num_blocks:
        return None
    q = matrices.linear(x, weights.matrix(f"{role}.index_q")).view(len(x), spec.num_heads, -1)
    q = weights.operations.rms_norm(q, weights.vector(f"{role}.index_q_norm"), eps).transpose(0, 1)
    q = ropes.rotate(q, angles, interleaved)  # [heads, T, head_dim]
    chosen, step = [], max(1, softmax.MAX_DECODED_BYTES // (4 * spec.num_heads * stop))
    score = _score_pooled if spec.kind == "pooled" else _score_largest
    for first in range(0, len(x), step):
        positions = torch.arange(start + first, start + min(first + step, len(x)), device=x.device)
        chosen.append(score(q[:, first : first + step], cache.index[:stop].float(), positions, spec))
    return torch.cat(chosen, dim=1)


def _pool_blocks(weights: Weights, layer: int, index: Tensor, blocks: range, size: int) -> None:
    """Writes the keys of these complete blocks to their last positions in the cache of an indexer."""
    if not blocks:
        return
    attention = weights.spec.attention_of(layer)
    assert isinstance(attention, parts.GroupedQuerySpec), "of a layer with an indexer of blocks"
    rows = index[blocks.start * size : blocks.stop * size].view(len(blocks), size, -1)
    norm = weights.vector(f"layers.{layer}.attention.index_k_norm")
    pooled = weights.operations.rms_norm(rows.float().mean(dim=1), norm, weights.spec.norm.eps)
    if attention.rotates(layer):
        positions = torch.arange(blocks.start, blocks.stop, device=index.device) * size
        angles = ropes.Rope(weights.spec.rope_of(layer), index.device)(positions, blocks.stop * size)
        pooled = ropes.rotate(pooled[None], angles, shared.is_interleaved(weights.spec, layer))[0]
    rows[:, -1] = pooled


def _score_pooled(q: Tensor, index: Tensor, positions: Tensor, spec: parts.BlockIndexerSpec) -> Tensor:
    """Returns the blocks chosen by their keys at their last positions, and tokens' own, bool [1, T, blocks]."""
    size = spec.block_tokens
    scores = torch.relu(q @ index[size - 1 :: size].T).sum(dim=0)
    complete = (positions + 1)[:, None] // size
    numbers = torch.arange(-(-len(index) // size), device=q.device)
    chosen = shared.largest(scores, spec.num_blocks, numbers[: scores.shape[1]] < complete)
    chosen = torch.nn.functional.pad(chosen, (0, len(numbers) - scores.shape[1]))
    return (chosen | ((numbers == complete) & (numbers == positions[:, None] // size)))[None]


def _score_largest(q: Tensor, index: Tensor, positions: Tensor, spec: parts.BlockIndexerSpec) -> Tensor:
    """Returns the blocks chosen by the best of their positions, and the last ones, bool [heads, T, blocks]."""
    size, length = spec.block_tokens, len(index)
    seen = torch.arange(length, device=q.device) <= positions[:, None]
    scores = (q @ index.T).masked_fill(~seen, -torch.inf)
    scores = torch.nn.functional.pad(scores, (0, -length % size), value=-torch.inf)
    scores = scores.view(*scores.shape[:2], -1, size).amax(dim=-1)
    own, numbers = positions[:, None] // size, torch.arange(scores.shape[-1], device=q.device)
    is_local = (numbers <= own) & (numbers > own - spec.local_blocks)
    return shared.largest(scores.masked_fill(is_local, torch.inf), spec.num_blocks, numbers <= own)
