"""Attention over a key-value cache: one function a kind. This file has grouped queries; latent_attention the other.

Grouped queries' is the kernels' where there are any; beside them stands plain torch.
"""

import torch
from torch import Tensor

from moe_pack.formats import GroupedQuerySpec, LatentSpec
from moe_pack.runtime.kv_cache import LayerCache
from moe_pack.runtime.latent_attention import attend_latent
from moe_pack.runtime.matrix import linear
from moe_pack.runtime.native_kernels import HeadNorms
from moe_pack.runtime.norm import rms_norm
from moe_pack.runtime.rope import Angles, rotate
from moe_pack.runtime.weights import Weights


def attend(x: Tensor, weights: Weights, layer: int, cache: LayerCache, angles: Angles) -> Tensor:
    """One layer's attention for new tokens; their keys and values enter the cache after those already there.

    Args:    x: float32 [T, d], normed.   angles: of the T positions, from `Rope`.
    Returns: float32 [T, d].
    """
    spec = weights.spec.attention
    if isinstance(spec, GroupedQuerySpec):
        return _attend_grouped(x, weights, spec, layer, cache, angles)
    assert isinstance(spec, LatentSpec), "with relative attention encoder_decoder runs"
    seen = _seen(None, cache.num_tokens, len(x), x.device)
    return attend_latent(x, weights, spec, layer, cache, angles, seen)


def _seen(window: int | None, start: int, num_tokens: int, device: torch.device) -> Tensor | None:
    """Which positions each of `num_tokens` new ones, the first at `start`, sees: bool [T, start + T]; None: all."""
    if num_tokens == 1 and (window is None or window > start):
        return None
    query = torch.arange(start, start + num_tokens, device=device)[:, None]
    key = torch.arange(start + num_tokens, device=device)[None, :]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def _attend_grouped(
    x: Tensor, weights: Weights, spec: GroupedQuerySpec, layer: int, cache: LayerCache, angles: Angles
) -> Tensor:
    role, eps, kernels = f"layers.{layer}.attention", weights.spec.norm.eps, weights.kernels

    def project(name: str, inputs: Tensor) -> Tensor:
        bias = weights.vector(f"{role}.{name}_bias") if name in spec.bias else None
        return linear(inputs, weights.matrix(f"{role}.{name}"), bias)

    q, k, v = (project(name, x) for name in "qkv")
    norms = None
    if spec.qk_norm != "none":
        norms = HeadNorms(weights.vector(f"{role}.q_norm"), weights.vector(f"{role}.k_norm"), eps)
    if norms is not None and spec.qk_norm == "projection":
        q, k = (rms_norm(each, norm, eps, kernels) for each, norm in ((q, norms.q), (k, norms.k)))
        norms = None
    interleaved = weights.spec.rotation.interleaved
    operation = attend_heads if kernels is None else kernels.attend
    return project("o", operation((q, k, v), norms, angles, interleaved, cache, spec))


def attend_heads(
    projected: tuple[Tensor, Tensor, Tensor],
    norms: HeadNorms | None,
    angles: Angles,
    interleaved: bool,
    cache: LayerCache,
    spec: GroupedQuerySpec,
) -> Tensor:
    """The attention of each query head, between the projections; keys and values of new tokens enter the cache.

    Args:    projected: queries, keys and values, float32 [T, heads * head_dim], neither normed by head nor rotated.
    Returns: float32 [T, num_heads * head_dim].
    """
    q, k, v = (each.view(len(each), -1, spec.head_dim).transpose(0, 1) for each in projected)  # [heads, T, head_dim]
    if norms is not None:
        q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
    start, stop, window = cache.num_tokens, cache.num_tokens + q.shape[1], spec.sliding_window
    cache.keys[:, start:stop] = rotate(k, angles, interleaved)
    cache.values[:, start:stop] = v
    is_causal = start == 0 and (window is None or window >= stop)  # a whole sequence: torch needs no mask
    mixed = torch.nn.functional.scaled_dot_product_attention(
        rotate(q, angles, interleaved)[None],
        cache.keys[None, :, :stop].float(),  # itself where the cache is float32
        cache.values[None, :, :stop].float(),
        attn_mask=None if is_causal else _seen(window, start, q.shape[1], q.device),
        is_causal=is_causal,
        scale=spec.scale,
        enable_gqa=True,
    )  # [1, heads, T, head_dim]
    return mixed[0].transpose(0, 1).flatten(1)
