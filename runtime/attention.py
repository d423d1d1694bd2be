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

# On a GPU torch has no fused attention for float32 with grouped heads: it makes all scores, and several copies of them.
# Queries go through it in pieces whose scores take so much: 512 queries of 32 heads would take 512 MiB at 8,192 tokens.
MAX_SCORE_BYTES = 64 << 20


def attend(x: Tensor, weights: Weights, layer: int, cache: LayerCache, angles: Angles) -> Tensor:
    """One layer's attention for new tokens; their keys and values enter the cache after those already there.

    Args:    x: float32 [T, d], normed.   angles: of the T positions, from `Rope`.
    Returns: float32 [T, d].
    """
    spec = weights.spec.attention
    if isinstance(spec, GroupedQuerySpec):
        return _attend_grouped(x, weights, spec, layer, cache, angles)
    assert isinstance(spec, LatentSpec), "with relative attention encoder_decoder runs"
    seen = _seen(None, 0, cache.num_tokens, len(x), x.device)
    return attend_latent(x, weights, spec, layer, cache, angles, seen)


def _seen(window: int | None, first: int, start: int, num_tokens: int, device: torch.device) -> Tensor | None:
    """Which of the positions from `first` on each of `num_tokens` new ones, the first at `start`, sees.

    Returns: bool [T, start + T - first]; None: all.
    """
    if num_tokens == 1 and (window is None or window > start - first):
        return None
    query = torch.arange(start, start + num_tokens, device=device)[:, None]
    key = torch.arange(first, start + num_tokens, device=device)[None, :]
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
    sinks = weights.vector(f"{role}.sinks") if spec.sinks else None
    interleaved = weights.spec.rotation.interleaved
    operation = attend_heads if kernels is None else kernels.attend
    return project("o", operation((q, k, v), norms, angles, interleaved, cache, spec, spec.window(layer), sinks))


def attend_heads(
    projected: tuple[Tensor, Tensor, Tensor],
    norms: HeadNorms | None,
    angles: Angles,
    interleaved: bool,
    cache: LayerCache,
    spec: GroupedQuerySpec,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """The attention of each query head, between the projections; keys and values of new tokens enter the cache.

    Args:    projected: queries, keys and values, float32 [T, heads * head_dim], neither normed by head nor rotated.
             window: how many positions one sees at most; None: all before it.   sinks: float32 [num_heads], logits
             that no value belongs to.
    Returns: float32 [T, num_heads * head_dim].
    """
    q, k, v = (each.view(len(each), -1, spec.head_dim).transpose(0, 1) for each in projected)  # [heads, T, head_dim]
    if norms is not None:
        q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
    start, num_tokens = cache.num_tokens, q.shape[1]
    first = _first_seen(window, start)
    cache.enter(rotate(k, angles, interleaved), v)
    q, (keys, values) = rotate(q, angles, interleaved), cache.held(first, start + num_tokens)
    step = max(1, MAX_SCORE_BYTES // (4 * spec.num_heads * max(keys.shape[1], 1)))
    mixed = []
    for begin in range(0, max(num_tokens, 1), step):
        piece, piece_start = q[:, begin : begin + step], start + begin
        piece_first = _first_seen(window, piece_start)
        seen = slice(piece_first - first, piece_start + piece.shape[1] - first)
        mixed.append(
            _attend_piece(piece, keys[:, seen], values[:, seen], piece_start, piece_first, spec.scale, window, sinks)
        )
    whole = mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=1)  # [heads, T, head_dim]
    return whole.transpose(0, 1).flatten(1)


def _first_seen(window: int | None, start: int) -> int:
    """The first position that a token at position `start` sees."""
    return 0 if window is None else max(0, start + 1 - window)


def _attend_piece(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    start: int,
    first: int,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """The attention of queries [heads, T, head_dim] at positions `start` and on, over keys of `first` to their last.

    Returns: float32 [heads, T, head_dim].
    """
    stop = start + q.shape[1]
    is_causal = start == 0 and (window is None or window >= stop)  # a whole sequence: torch needs no mask
    seen = None if is_causal and sinks is None else _seen(window, first, start, q.shape[1], q.device)
    if sinks is not None:
        least = torch.finfo(torch.float32).min  # minus infinity times a key's 0 would be no number
        q, keys, values = _with_sinks(q, keys, values, (sinks / scale).clamp(min=least))
        seen = None if seen is None else torch.nn.functional.pad(seen, (0, 1), value=True)
    mixed: Tensor = torch.nn.functional.scaled_dot_product_attention(
        q[None],
        keys[None],
        values[None],
        attn_mask=seen,
        is_causal=is_causal and sinks is None,
        scale=scale,
        enable_gqa=True,
    )
    return mixed[0]


def _with_sinks(q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [heads, positions, head_dim] with one more position, that all see: it scores `sinks`.

    Queries have one dimension more, which holds their head's sink, and in which only the new key, 1 there and 0
    elsewhere, is not 0. The new value is 0.
    """
    pad = torch.nn.functional.pad
    q = torch.cat((q, sinks[:, None, None].expand(*q.shape[:2], 1)), dim=-1)
    keys = pad(keys, (0, 1, 0, 1))  # [heads, S + 1, head_dim + 1]
    keys[:, -1, -1] = 1
    return q, keys, pad(values, (0, 0, 0, 1))
