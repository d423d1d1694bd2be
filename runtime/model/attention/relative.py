"""Attention with a bias a head and distance, of models with an encoder, whose output is attended to without a bias."""

import math

import torch
from torch import Tensor

from moe_pack.formats import parts
from moe_pack.runtime.model.caches import dtypes, layer_cache, storage
from moe_pack.runtime.model.compute import matrices, softmax
from moe_pack.runtime.model.compute.weights import Weights


def cache_shape(spec: parts.RelativeSpec, dtype: dtypes.KvDtype) -> layer_cache.CacheShape:
    """Returns the cache of a layer: keys and values of each head."""
    rows = storage.RowStorage(dtype, (spec.head_dim,))
    return layer_cache.CacheShape(spec.num_heads, rows, rows)


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


def spec_of(weights: Weights) -> parts.RelativeSpec:
    """Returns the attention of a model with an encoder."""
    spec = weights.spec.attention
    assert isinstance(spec, parts.RelativeSpec), "a checked spec: with an encoder attention is relative"
    return spec


def position_bias(weights: Weights, context_tokens: int, is_encoder: bool) -> PositionBias:
    """Returns the position biases of the encoder, or of the decoder."""
    table = weights.matrix("encoder_position_bias" if is_encoder else "position_bias")
    return PositionBias(spec_of(weights), table.rows(0, table.num_rows), context_tokens, is_mutual=is_encoder)


def enter_keys(
    x: Tensor, weights: Weights, spec: parts.RelativeSpec, role: str, cache: layer_cache.LayerCache, start: int
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
    cache: layer_cache.LayerCache,
    bias: PositionBias | None,
    start: int = 0,
) -> Tensor:
    """Returns the attention of tokens x float32 [T, d], normed, to the `num_tokens` keys of a cache: float32 [T, d].

    Args:    role: of the projections (`layers.{i}.attention`, `layers.{i}.cross`).   bias: None: every token sees all
             keys, without a bias.   start: the position of the first token, for the bias.
    """
    q = matrices.linear(x, weights.matrix(f"{role}.q")).view(len(x), spec.num_heads, spec.head_dim).transpose(0, 1)
    keys, values = cache.keys[None, :, : cache.num_tokens], cache.values[None, :, : cache.num_tokens]
    mixed = []
    for first, last in softmax.query_blocks(len(x), spec.num_heads * cache.num_tokens):
        mask = None if bias is None else bias.rows(start + first, start + last, cache.num_tokens)[None]
        block = torch.nn.functional.scaled_dot_product_attention(
            q[None, :, first:last], keys, values, attn_mask=mask, scale=spec.scale
        )  # [1, heads, block, head_dim]
        mixed.append(block[0].transpose(0, 1).flatten(1))
    return matrices.linear(softmax.joined(mixed), weights.matrix(f"{role}.o"))
