"""Attention of one token on a device, in launches alone: one class a kind. Importing this needs triton."""

from typing import Protocol

import torch
from torch import Tensor

from moe_pack.formats import GroupedQuerySpec
from moe_pack.runtime.card_weights import CardWeights
from moe_pack.runtime.kernels.attend import AttendRoom, attend
from moe_pack.runtime.kernels.enter import QkNorms, enter
from moe_pack.runtime.kv_cache import KVCache
from moe_pack.runtime.rope import Angles


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

    def __init__(self, weights: CardWeights, cache: KVCache, angles: Angles) -> None:
        spec, device = weights.spec.attention, cache.keys.device
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
        enter(projected, norms, self._angles, weights.spec.rope.interleaved, position, spec, self._turned, cache)
        attend(self._turned, cache, position, spec.scale, spec.sliding_window, self._room, self._mixed)
        self._project(role, "o", self._mixed.view(-1), x, x)

    def _project(self, role: str, name: str, inputs: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        weights = self._weights
        bias = weights.vector(f"{role}.{name}_bias") if name in self._spec.bias else None
        scale = 1.0 if residual is None else weights.spec.residual_multiplier
        weights.dense(f"{role}.{name}").times(inputs, out, bias, residual, scale)
