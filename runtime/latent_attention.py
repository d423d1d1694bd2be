"""Multi-head latent attention over a cache of latents: the same answer in two ways, whichever multiplies less.

A head's keys and values are `kv_b` times the latent. *Expanded*: they are computed for all positions, as the model is
written. *Absorbed*: `q . (W_k c) = (W_k^T q) . c`, so that queries move into the latent's space, all heads attend to
the one cached vector a position, and `W_v` is applied to the weighted latents; nothing of the past is expanded.
Source: DeepSeek-V2 (2405.04434), section 2.1.2 and appendix C.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_pack.formats import LatentSpec
from moe_pack.runtime.kv_cache import LayerCache
from moe_pack.runtime.matrix import linear
from moe_pack.runtime.operations import MAX_DECODED_BYTES
from moe_pack.runtime.rope import Angles, rotate
from moe_pack.runtime.weights import Weights


def attend_latent(
    x: Tensor, weights: Weights, spec: LatentSpec, layer: int, cache: LayerCache, angles: Angles, mask: Tensor | None
) -> Tensor:
    """One layer's attention for new tokens; latents and rotated keys enter the cache after those already there.

    Args:    x: float32 [T, d], normed.   mask: bool [T, S], what each new token sees of S positions; None: all.
    Returns: float32 [T, d].
    """
    role, start, stop = f"layers.{layer}.attention", cache.num_tokens, cache.num_tokens + len(x)
    rope_dim, interleaved = spec.qk_rope_head_dim, weights.spec.rotation.interleaved
    q = _queries(x, weights, spec, role)
    q_nope, q_rope = torch.split(q, [spec.qk_nope_head_dim, rope_dim], dim=-1)
    q = torch.cat((q_nope, rotate(q_rope, angles, interleaved)), dim=-1)
    latent, key = torch.split(linear(x, weights.matrix(f"{role}.kv_a")), [spec.kv_lora_rank, rope_dim], dim=-1)
    latent = weights.operations.rms_norm(latent, weights.vector(f"{role}.kv_a_norm"), spec.lora_norm_eps)
    cache.keys[0, start:stop] = torch.cat((latent, rotate(key[None], angles, interleaved)[0]), dim=-1)
    attend = _absorbed if absorbs(len(x), stop, spec) else _expanded
    mixed = torch.cat(list(attend(q, weights, spec, role, cache.keys[0, :stop].float(), mask)))  # [heads, T, v]
    return linear(mixed.transpose(0, 1).flatten(1), weights.matrix(f"{role}.o"))


def absorbs(num_new: int, num_seen: int, spec: LatentSpec) -> bool:
    """Whether the absorbed way takes fewer multiplications, for `num_new` tokens that see up to `num_seen`."""
    rank, nope, rope, v = spec.kv_lora_rank, spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim
    absorbed = num_new * (nope + v) * rank + num_new * num_seen * (2 * rank + rope)
    expanded = num_seen * (nope + v) * rank + num_new * num_seen * (nope + rope + v)
    return absorbed <= expanded


def _queries(x: Tensor, weights: Weights, spec: LatentSpec, role: str) -> Tensor:
    """[heads, T, nope + rope], not yet rotated."""
    if spec.q_lora_rank is None:
        q = linear(x, weights.matrix(f"{role}.q"))
    else:
        latent = linear(x, weights.matrix(f"{role}.q_a"))
        latent = weights.operations.rms_norm(latent, weights.vector(f"{role}.q_a_norm"), spec.lora_norm_eps)
        q = linear(latent, weights.matrix(f"{role}.q_b"))
    return q.view(len(x), spec.num_heads, -1).transpose(0, 1)


def _up_projections(
    weights: Weights, spec: LatentSpec, role: str, head_bytes: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Some heads at a time: which, W_k [heads, nope, rank] and W_v [heads, v, rank], float32.

    As many as keep `kv_b`'s rows and `head_bytes` of work a head within `MAX_DECODED_BYTES`; one at least.
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
    q: Tensor, weights: Weights, spec: LatentSpec, role: str, cached: Tensor, mask: Tensor | None
) -> Iterator[Tensor]:
    """Heads' outputs [heads, T, v]; `cached` [S, rank + rope]."""
    nope = spec.qk_nope_head_dim
    for heads, w_k, w_v in _up_projections(weights, spec, role, 4 * q.shape[1] * len(cached)):
        moved = torch.cat((q[heads, :, :nope] @ w_k, q[heads, :, nope:]), dim=-1)  # [heads, T, rank + rope]
        scores = moved @ cached.T * spec.scale
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        yield scores.softmax(dim=-1) @ cached[:, : spec.kv_lora_rank] @ w_v.transpose(1, 2)


def _expanded(
    q: Tensor, weights: Weights, spec: LatentSpec, role: str, cached: Tensor, mask: Tensor | None
) -> Iterator[Tensor]:
    """Heads' outputs [heads, T, v]; `cached` [S, rank + rope]."""
    latent, rope = torch.split(cached, [spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1)
    width = spec.qk_nope_head_dim + spec.qk_rope_head_dim + spec.v_head_dim
    for heads, w_k, w_v in _up_projections(weights, spec, role, 4 * len(cached) * width):
        nope = latent @ w_k.transpose(1, 2)  # [heads, S, nope]
        keys = torch.cat((nope, rope.expand(len(nope), -1, -1)), dim=-1)
        yield torch.nn.functional.scaled_dot_product_attention(
            q[heads], keys, latent @ w_v.transpose(1, 2), attn_mask=mask, scale=spec.scale
        )
