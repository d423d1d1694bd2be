"""Attention of one token on a device, in launches alone: one class a kind. Importing this needs triton."""

from typing import Protocol

import torch
from torch import Tensor

from moe_pack.formats import GroupedQuerySpec, LatentSpec
from moe_pack.runtime.device_matrix import DeviceMatrix
from moe_pack.runtime.kernels.attend import AttendRoom, attend
from moe_pack.runtime.kernels.enter import QkNorms, enter
from moe_pack.runtime.kernels.latent import HeldRows, enter_latent, leave_latent
from moe_pack.runtime.kernels.norm import rms_norm
from moe_pack.runtime.kv_cache import KVCache
from moe_pack.runtime.pack_weights import PackWeights
from moe_pack.runtime.rope import Angles


def on_device(weights: PackWeights, role: str) -> DeviceMatrix:
    """A dense matrix as it lies on a device."""
    held = weights.matrix(role)
    assert isinstance(held, DeviceMatrix), "weights of a card"
    return held


class TokenAttention(Protocol):
    """One token's attention, layer by layer."""

    def run(self, layer: int, normed: Tensor, x: Tensor, position: Tensor) -> None:
        """Adds a layer's attention for the normed state to the hidden state x, both float32 [d].

        Args:    position: int32 [1], the token's, at which its keys and values enter the cache.
        """
        ...


class GroupedAttention:
    """Grouped queries; see `attention`. Owns its buffers.

    Args:    angles: float32 [context, rotary_dim / 2] each, of every position.
    """

    def __init__(self, weights: PackWeights, cache: KVCache, angles: Angles) -> None:
        spec, device = weights.spec.attention, cache.device
        assert isinstance(spec, GroupedQuerySpec), "of this kind"
        self._weights, self._cache, self._angles, self._spec = weights, cache, angles, spec
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._q, self._k, self._v = (torch.zeros(width, device=device) for width in (queries, keys, keys))
        self._turned = torch.zeros((spec.num_heads, spec.head_dim), device=device)
        self._mixed = torch.zeros_like(self._turned)
        self._room = AttendRoom.room(spec.num_heads, spec.num_kv_heads, spec.head_dim, cache.context_tokens, device)

    def run(self, layer: int, normed: Tensor, x: Tensor, position: Tensor) -> None:
        """See `TokenAttention`."""
        spec, role = self._spec, f"layers.{layer}.attention"
        self._project(role, "q", normed, self._q)
        self._project(role, "k", normed, self._k)
        self._project(role, "v", normed, self._v)
        weights = self._weights
        norms = None
        if spec.qk_norm != "none":
            norms = QkNorms(weights.vector(f"{role}.q_norm"), weights.vector(f"{role}.k_norm"), weights.spec.norm.eps)
        cache = (self._cache.keys[layer], self._cache.values[layer])
        projected = (self._q, self._k, self._v)
        enter(projected, norms, self._angles, weights.spec.rotation.interleaved, position, spec, self._turned, cache)
        attend(self._turned, cache, position, spec.scale, spec.sliding_window, self._room, self._mixed)
        self._project(role, "o", self._mixed.view(-1), x, x)

    def _project(self, role: str, name: str, inputs: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        weights = self._weights
        bias = weights.vector(f"{role}.{name}_bias") if name in self._spec.bias else None
        scale = 1.0 if residual is None else weights.spec.residual_multiplier
        on_device(weights, f"{role}.{name}").times(inputs, out, bias, residual, scale)


class LatentAttention:
    """Multi-head latent attention, the absorbed way; see `latent_attention`. Owns its buffers.

    Args:    angles: float32 [context, rotary_dim / 2] each, of every position.
    """

    def __init__(self, weights: PackWeights, cache: KVCache, angles: Angles) -> None:
        spec, device = weights.spec.attention, cache.device
        assert isinstance(spec, LatentSpec), "of this kind"
        self._weights, self._cache, self._angles, self._spec = weights, cache, angles, spec
        heads, rank, rope = spec.num_heads, spec.kv_lora_rank, spec.qk_rope_head_dim
        self._q = torch.zeros(heads * (spec.qk_nope_head_dim + rope), device=device)
        self._low = torch.zeros(spec.q_lora_rank or 0, device=device)
        self._kv = torch.zeros(rank + rope, device=device)
        self._moved = torch.zeros((heads, rank + rope), device=device)
        self._mixed = torch.zeros((heads, rank), device=device)
        self._values = torch.zeros(heads * spec.v_head_dim, device=device)
        self._room = AttendRoom.room(heads, 1, rank, cache.context_tokens, device)

    def run(self, layer: int, normed: Tensor, x: Tensor, position: Tensor) -> None:
        """See `TokenAttention`."""
        weights, spec, role = self._weights, self._spec, f"layers.{layer}.attention"
        if spec.q_lora_rank is None:
            on_device(weights, f"{role}.q").times(normed, self._q)
        else:
            on_device(weights, f"{role}.q_a").times(normed, self._low)
            rms_norm(self._low, weights.vector(f"{role}.q_a_norm"), spec.lora_norm_eps, self._low)
            on_device(weights, f"{role}.q_b").times(self._low, self._q)
        on_device(weights, f"{role}.kv_a").times(normed, self._kv)
        kv_b = HeldRows(on_device(weights, f"{role}.kv_b").held, on_device(weights, f"{role}.kv_b").part)
        norm, interleaved = weights.vector(f"{role}.kv_a_norm"), weights.spec.rotation.interleaved
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        projected = (self._q, self._kv)
        enter_latent(projected, norm, self._angles, interleaved, position, spec, kv_b, self._moved, keys)
        attend(self._moved, (keys, values), position, spec.scale, None, self._room, self._mixed)
        leave_latent(self._mixed, spec, kv_b, self._values)
        scale = weights.spec.residual_multiplier
        on_device(weights, f"{role}.o").times(self._values, x, residual=x, scale=scale)


def token_attention(weights: PackWeights, cache: KVCache, angles: Angles) -> TokenAttention:
    """The attention of a model's kind; arguments as above."""
    kind = GroupedAttention if isinstance(weights.spec.attention, GroupedQuerySpec) else LatentAttention
    return kind(weights, cache, angles)
