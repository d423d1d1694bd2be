"""Attention over a key-value cache: one function a kind. This file has grouped queries; latent_attention the other."""

import torch
from torch import Tensor

from moe_pack.formats import AttentionSpec, GroupedQuerySpec
from moe_pack.runtime.kv_cache import LayerCache
from moe_pack.runtime.latent_attention import attend_latent
from moe_pack.runtime.matrix import linear
from moe_pack.runtime.norm import rms_norm
from moe_pack.runtime.rope import Angles, rotate
from moe_pack.runtime.weights import Weights


def visible(spec: AttentionSpec, start: int, num_tokens: int, device: torch.device) -> Tensor:
    """Which positions each of `num_tokens` new ones, the first at `start`, may see: bool [T, start + T]."""
    window = spec.sliding_window if isinstance(spec, GroupedQuerySpec) else None
    query = torch.arange(start, start + num_tokens, device=device)[:, None]
    key = torch.arange(start + num_tokens, device=device)[None, :]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def is_plain(spec: AttentionSpec, num_tokens: int) -> bool:
    """Whether in a sequence of this length each position sees all before it."""
    window = spec.sliding_window if isinstance(spec, GroupedQuerySpec) else None
    return window is None or window >= num_tokens


def attend(x: Tensor, weights: Weights, layer: int, cache: LayerCache, angles: Angles, mask: Tensor | None) -> Tensor:
    """One layer's attention for new tokens; their keys and values enter the cache after those already there.

    Args:    x: float32 [T, d], normed.   angles: from `Rope`.   mask: from `visible`; None for a whole sequence, with
             nothing before it, that `is_plain`.
    Returns: float32 [T, d].
    """
    spec = weights.spec.attention
    assert mask is not None or cache.num_tokens == 0, "without a mask all that is seen is new"
    if isinstance(spec, GroupedQuerySpec):
        return _attend_grouped(x, weights, spec, layer, cache, angles, mask)
    seen = visible(spec, 0, len(x), x.device) if mask is None else mask
    return attend_latent(x, weights, spec, layer, cache, angles, seen)


def _attend_grouped(
    x: Tensor,
    weights: Weights,
    spec: GroupedQuerySpec,
    layer: int,
    cache: LayerCache,
    angles: Angles,
    mask: Tensor | None,
) -> Tensor:
    role, start, stop = f"layers.{layer}.attention", cache.num_tokens, cache.num_tokens + len(x)

    def project(name: str, inputs: Tensor) -> Tensor:
        bias = weights.vector(f"{role}.{name}_bias") if name in spec.bias else None
        return linear(inputs, weights.matrix(f"{role}.{name}"), bias)

    def heads(name: str, num_heads: int) -> Tensor:
        projected = project(name, x)
        normed = name != "v" and spec.qk_norm != "none"
        if normed and spec.qk_norm == "projection":
            projected = rms_norm(projected, weights.vector(f"{role}.{name}_norm"), weights.spec.norm.eps)
        split = projected.view(-1, num_heads, spec.head_dim).transpose(0, 1)  # [heads, T, head_dim]
        if normed and spec.qk_norm == "head":
            split = rms_norm(split, weights.vector(f"{role}.{name}_norm"), weights.spec.norm.eps)
        return split

    interleaved = weights.spec.rope.interleaved
    q = rotate(heads("q", spec.num_heads), angles, interleaved)
    cache.keys[:, start:stop] = rotate(heads("k", spec.num_kv_heads), angles, interleaved)
    cache.values[:, start:stop] = heads("v", spec.num_kv_heads)
    mixed = torch.nn.functional.scaled_dot_product_attention(
        q[None],
        cache.keys[None, :, :stop],
        cache.values[None, :, :stop],
        attn_mask=mask,
        is_causal=mask is None,
        scale=spec.scale,
        enable_gqa=True,
    )  # [1, heads, T, head_dim]
    return project("o", mixed[0].transpose(0, 1).flatten(1))
