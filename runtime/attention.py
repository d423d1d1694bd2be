"""Grouped-query attention with rotary positions over a key-value cache that is allocated once."""

import torch
from torch import Tensor

from moe_pack.formats import AttentionSpec, ModelSpec, RopeSpec
from moe_pack.runtime.matrix import linear
from moe_pack.runtime.weights import Weights


class KVCache:
    """Keys and values of every layer, float32 [layers, kv heads, context, head_dim], allocated whole.

    Args:    context_tokens: the most positions it will ever hold.
    """

    def __init__(self, spec: ModelSpec, context_tokens: int, device: torch.device) -> None:
        shape = (spec.num_hidden_layers, spec.attention.num_kv_heads, context_tokens, spec.attention.head_dim)
        self.keys = torch.zeros(shape, device=device)
        self.values = torch.zeros(shape, device=device)
        self.context_tokens = context_tokens
        self.num_tokens = 0

    @property
    def num_bytes(self) -> int:
        """Bytes held, whatever part of them is in use."""
        return 2 * self.keys.numel() * self.keys.element_size()


class Rope:
    """Rotary angles for given positions: halves of a head are rotated against each other.

    Source: transformers, models/mixtral, MixtralRotaryEmbedding and apply_rotary_pos_emb.
    """

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        self._frequencies = 1.0 / spec.theta**exponents

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine, float32 [T, head_dim] each, for positions [T]."""
        angles = positions.to(torch.float32)[:, None] * self._frequencies
        both = torch.cat((angles, angles), dim=1)
        return both.cos(), both.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [heads, T, head_dim] turned by its positions' angles [T, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def visible(start: int, num_tokens: int, window: int | None, device: torch.device) -> Tensor:
    """Which positions each of `num_tokens` new ones, the first at `start`, may see: bool [T, start + T]."""
    query = torch.arange(start, start + num_tokens, device=device)[:, None]
    key = torch.arange(start + num_tokens, device=device)[None, :]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def attend(
    x: Tensor, weights: Weights, layer: int, cache: KVCache, angles: tuple[Tensor, Tensor], mask: Tensor
) -> Tensor:
    """One layer's attention for new tokens; their keys and values enter the cache after those already there.

    Args:    x: float32 [T, d], normed.   angles: from `Rope`.   mask: from `visible`.
    Returns: float32 [T, d].
    """
    spec: AttentionSpec = weights.spec.attention
    role, start, stop = f"layers.{layer}.attention", cache.num_tokens, cache.num_tokens + x.shape[0]

    def heads(name: str, num_heads: int) -> Tensor:
        projected = linear(x, weights.matrix(f"{role}.{name}"))
        return projected.view(-1, num_heads, spec.head_dim).transpose(0, 1)  # [heads, T, head_dim]

    q = rotate(heads("q", spec.num_heads), *angles)
    cache.keys[layer, :, start:stop] = rotate(heads("k", spec.num_kv_heads), *angles)
    cache.values[layer, :, start:stop] = heads("v", spec.num_kv_heads)
    mixed = torch.nn.functional.scaled_dot_product_attention(
        q[None], cache.keys[None, layer, :, :stop], cache.values[None, layer, :, :stop], attn_mask=mask, enable_gqa=True
    )  # [1, heads, T, head_dim]
    return linear(mixed[0].transpose(0, 1).flatten(1), weights.matrix(f"{role}.o"))
