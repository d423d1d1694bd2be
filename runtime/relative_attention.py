"""Attention by relative position: a bias a head and distance, no rotation; and attention to an encoder's output.

Plain torch between the projections, which are the weights' own. Positions are those of one stack.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from moe_pack.formats import RelativeSpec
from moe_pack.runtime.kv_cache import LayerCache
from moe_pack.runtime.matrix import linear
from moe_pack.runtime.operations import MAX_DECODED_BYTES
from moe_pack.runtime.weights import Weights


def distance_buckets(spec: RelativeSpec, num_distances: int, is_mutual: bool) -> Tensor:
    """The bucket of each distance from 0 up, of keys that do not come later, int64 [num_distances].

    Meaning: of n buckets (half as many where keys may come later: `is_mutual`) the first half are one distance each,
             the others grow by powers up to `max_distance`; what is farther is in the last.
    Source:  transformers, models/switch_transformers, _relative_position_bucket, in its order of float32 operations:
             a logarithm that is rounded otherwise would put a distance into another bucket.
    """
    num_buckets = spec.num_buckets // 2 if is_mutual else spec.num_buckets
    num_exact = num_buckets // 2
    distances = torch.arange(num_distances)
    grown = torch.log(distances.clamp(min=1).float() / num_exact) / math.log(spec.max_distance / num_exact)
    far = (num_exact + (grown * (num_buckets - num_exact)).to(torch.long)).clamp(max=num_buckets - 1)
    return torch.where(distances < num_exact, distances, far)


class PositionBias:
    """What a stack adds to scores, by distance: its table laid out over all distances of `context_tokens` positions.

    Args:    table: float32 [num_buckets, heads].   is_mutual: whether positions see those after them; else these get
             minus infinity.
    """

    def __init__(self, spec: RelativeSpec, table: Tensor, context_tokens: int, is_mutual: bool) -> None:
        buckets = distance_buckets(spec, context_tokens, is_mutual).to(table.device)
        before = table[buckets].T  # [heads, N], distance rising
        if is_mutual:
            after = table[buckets[1:] + spec.num_buckets // 2].T
        else:
            after = torch.full((table.shape[1], context_tokens - 1), -torch.inf, device=table.device)
        # Where key - query is -(N - 1) to N - 1: a query's biases are one run of it.
        self._line = torch.cat((before.flip(1), after), dim=1).contiguous()
        self._context_tokens = context_tokens
        self.num_bytes = self._line.nbytes

    def rows(self, start: int, stop: int, num_keys: int) -> Tensor:
        """The biases of queries at positions `start` to `stop` to the first `num_keys`: float32 [heads, T, keys]."""
        runs = self._line.unfold(1, num_keys, 1)  # [heads, first distance, num_keys], a view
        last = self._context_tokens - 1
        return runs[:, last - stop + 1 : last - start + 1].flip(1)


def enter_keys(x: Tensor, weights: Weights, spec: RelativeSpec, role: str, cache: LayerCache, start: int) -> None:
    """Writes keys and values of tokens x float32 [T, d] into a cache, the first at position `start`."""
    for name, held in (("k", cache.keys), ("v", cache.values)):
        projected = linear(x, weights.matrix(f"{role}.{name}")).view(len(x), spec.num_heads, spec.head_dim)
        held[:, start : start + len(x)] = projected.transpose(0, 1)  # [heads, T, head_dim]


def attend_keys(
    x: Tensor,
    weights: Weights,
    spec: RelativeSpec,
    role: str,
    cache: LayerCache,
    bias: PositionBias | None,
    start: int = 0,
) -> Tensor:
    """Attention of tokens x float32 [T, d], normed, to the `num_tokens` keys that the cache holds: float32 [T, d].

    Args:    role: of the projections (`layers.{i}.attention`, `layers.{i}.cross`).   bias: None: none, and all is seen.
             start: the position of the first token, where there is a bias.
    """
    q = linear(x, weights.matrix(f"{role}.q")).view(len(x), spec.num_heads, spec.head_dim).transpose(0, 1)
    keys, values = cache.keys[None, :, : cache.num_tokens], cache.values[None, :, : cache.num_tokens]
    mixed = []
    for first, last in _query_blocks(len(x), spec.num_heads * cache.num_tokens):
        mask = None if bias is None else bias.rows(start + first, start + last, cache.num_tokens)[None]
        block = torch.nn.functional.scaled_dot_product_attention(
            q[None, :, first:last], keys, values, attn_mask=mask, scale=spec.scale
        )  # [1, heads, block, head_dim]
        mixed.append(block[0].transpose(0, 1).flatten(1))
    return linear(mixed[0] if len(mixed) == 1 else torch.cat(mixed), weights.matrix(f"{role}.o"))


def _query_blocks(num_tokens: int, scores_each: int) -> Iterator[tuple[int, int]]:
    """(first, last) of queries whose scores and biases together stay within `MAX_DECODED_BYTES`."""
    step = max(1, MAX_DECODED_BYTES // (8 * scores_each))
    for first in range(0, num_tokens, step):
        yield first, min(first + step, num_tokens)
