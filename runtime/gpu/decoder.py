"""A decoder on a GPU: many tokens layer by layer as everywhere, one token by launches that a CUDA graph can capture.

`GroupedAttention` and `LatentAttention` run one token's attention; `TokenLayers` runs one token through the model
without its routed experts; `TokenStep` adds the experts. They only launch: buffers are allocated here, weights and the
key-value cache elsewhere, and the device itself reads which token runs and at which position. The host decides,
allocates and waits for nothing in between. `TokenDecoder` is the base of the two engines' decoders. Importing this
needs Triton.
"""

from typing import Protocol

import torch
from torch import Tensor

from moe_pack.formats import GroupedQuerySpec
from moe_pack.formats.spec import LatentSpec
from moe_pack.runtime.gpu.kernels.attention import (
    AttentionWorkspace,
    QkNorms,
    StoredRows,
    attend,
    enter,
    enter_latent,
    leave_latent,
)
from moe_pack.runtime.gpu.kernels.elementwise import activate, norm, rms_norm
from moe_pack.runtime.gpu.kernels.experts import route
from moe_pack.runtime.gpu.weights import DeviceMatrix
from moe_pack.runtime.model import Angles, KVCache, PackWeights


def device_matrix(weights: PackWeights, role: str) -> DeviceMatrix:
    """Returns a dense matrix as it is stored on the device."""
    matrix = weights.matrix(role)
    assert isinstance(matrix, DeviceMatrix), "weights of a GPU"
    return matrix


class TokenAttention(Protocol):
    """One token's attention, layer by layer."""

    def run(self, layer: int, normed: Tensor, x: Tensor, position: Tensor) -> None:
        """Adds a layer's attention for the normed state to the hidden state x, both float32 [d].

        Args:    position: int32 [1], the token's; its keys and values enter the cache there.
        """
        ...


class GroupedAttention:
    """Attention with grouped queries, as `kernels.attention` computes it. Owns its buffers.

    Args:    angles: float32 [context, rotary_dim / 2] each, of every position.
    """

    def __init__(self, weights: PackWeights, cache: KVCache, angles: Angles) -> None:
        spec, device = weights.spec.attention, cache.device
        assert isinstance(spec, GroupedQuerySpec), "the spec has this kind of attention"
        self._weights, self._cache, self._angles, self._spec = weights, cache, angles, spec
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._q, self._k, self._v = (torch.zeros(width, device=device) for width in (queries, keys, keys))
        self._rotated = torch.zeros((spec.num_heads, spec.head_dim), device=device)
        self._mixed = torch.zeros_like(self._rotated)
        self._workspace = AttentionWorkspace.allocate(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, cache.context_tokens, device
        )

    def run(self, layer: int, normed: Tensor, x: Tensor, position: Tensor) -> None:
        """Adds a layer's attention to x; arguments as for `TokenAttention`."""
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
        interleaved = weights.spec.rotation.interleaved
        enter(projected, norms, self._angles, interleaved, position, spec, self._rotated, cache)
        sinks = weights.vector(f"{role}.sinks") if spec.sinks else None
        attend(self._rotated, cache, position, spec.scale, spec.window(layer), self._workspace, self._mixed, sinks)
        self._project(role, "o", self._mixed.view(-1), x, x)

    def _project(self, role: str, name: str, inputs: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        weights = self._weights
        bias = weights.vector(f"{role}.{name}_bias") if name in self._spec.bias else None
        scale = 1.0 if residual is None else weights.spec.residual_multiplier
        device_matrix(weights, f"{role}.{name}").times(inputs, out, bias, residual, scale)


class LatentAttention:
    """Multi-head latent attention, with absorbed projections, as `kernels.attention` computes it. Owns its buffers.

    Args:    angles: float32 [context, rotary_dim / 2] each, of every position.
    """

    def __init__(self, weights: PackWeights, cache: KVCache, angles: Angles) -> None:
        spec, device = weights.spec.attention, cache.device
        assert isinstance(spec, LatentSpec), "the spec has this kind of attention"
        self._weights, self._cache, self._angles, self._spec = weights, cache, angles, spec
        heads, rank, rope = spec.num_heads, spec.kv_lora_rank, spec.qk_rope_head_dim
        self._q = torch.zeros(heads * (spec.qk_nope_head_dim + rope), device=device)
        self._low = torch.zeros(spec.q_lora_rank or 0, device=device)
        self._kv = torch.zeros(rank + rope, device=device)
        self._moved = torch.zeros((heads, rank + rope), device=device)
        self._mixed = torch.zeros((heads, rank), device=device)
        self._values = torch.zeros(heads * spec.v_head_dim, device=device)
        self._workspace = AttentionWorkspace.allocate(heads, 1, rank, cache.context_tokens, device)

    def run(self, layer: int, normed: Tensor, x: Tensor, position: Tensor) -> None:
        """Adds a layer's attention to x; arguments as for `TokenAttention`."""
        weights, spec, role = self._weights, self._spec, f"layers.{layer}.attention"
        if spec.q_lora_rank is None:
            device_matrix(weights, f"{role}.q").times(normed, self._q)
        else:
            device_matrix(weights, f"{role}.q_a").times(normed, self._low)
            rms_norm(self._low, weights.vector(f"{role}.q_a_norm"), spec.lora_norm_eps, self._low)
            device_matrix(weights, f"{role}.q_b").times(self._low, self._q)
        device_matrix(weights, f"{role}.kv_a").times(normed, self._kv)
        kv_b = StoredRows(device_matrix(weights, f"{role}.kv_b").stored, device_matrix(weights, f"{role}.kv_b").part)
        norm, interleaved = weights.vector(f"{role}.kv_a_norm"), weights.spec.rotation.interleaved
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        projected = (self._q, self._kv)
        enter_latent(projected, norm, self._angles, interleaved, position, spec, kv_b, self._moved, keys)
        attend(self._moved, (keys, values), position, spec.scale, None, self._workspace, self._mixed)
        leave_latent(self._mixed, spec, kv_b, self._values)
        scale = weights.spec.residual_multiplier
        device_matrix(weights, f"{role}.o").times(self._values, x, residual=x, scale=scale)


def token_attention(weights: PackWeights, cache: KVCache, angles: Angles) -> TokenAttention:
    """Returns attention of the model's kind; arguments as above."""
    kind = GroupedAttention if isinstance(weights.spec.attention, GroupedQuerySpec) else LatentAttention
    return kind(weights, cache, angles)


class TokenLayers:
    """Buffers for one token's forward pass, and its launches up to the routed experts of each layer.

    `control`: int32 [2], the token and its position, which the kernels read.   `x`, `normed`: float32 [d], the hidden
    state, and its norm that experts get.   `routes`: int32 [L, k].   `router_weights`: float32 [k], of the last layer
    with a router.   `logits`: float32 [vocabulary].
    Args:    angles: float32 [context, rotary_dim / 2] each, of every position; may be overwritten between tokens.
    """

    def __init__(self, weights: PackWeights, cache: KVCache, angles: Angles) -> None:
        spec, device = weights.spec, cache.device
        self._weights, self._router = weights, spec.router
        self._layer_idx = {layer: idx for idx, layer in enumerate(spec.moe_layers)}

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, device=device)

        k = spec.router.num_experts_per_tok
        self.control = torch.zeros(2, dtype=torch.int32, device=device)
        self.routes = torch.zeros((len(spec.moe_layers), k), dtype=torch.int32, device=device)
        self.router_weights, self.logits = floats(k), floats(spec.vocab_size)
        self.x, self.normed, self._shared = (floats(spec.hidden_size) for _ in range(3))
        self._scores, self._gated = floats(spec.router.num_experts), floats(1)
        shared = 0 if spec.shared_expert is None else spec.shared_expert.intermediate_size
        widest = max(spec.dense_intermediate_size or 0, shared)
        self._hidden, self._gate = floats(widest), floats(widest)
        self._attention = token_attention(weights, cache, angles)

    def start(self) -> None:
        """Launches the token's embedding."""
        device_matrix(self._weights, "embed").gather(self.control[:1], self.x, self._weights.spec.embedding_multiplier)

    def run(self, layer: int) -> Tensor | None:
        """Launches a layer up to its routed experts, whose numbers it writes to `routes`.

        Returns the shared experts' output, float32 [d], if there is one. A layer with a dense expert is run whole.
        """
        role, spec = f"layers.{layer}", self._weights.spec
        self._norm(f"{role}.attention_norm")
        self._attention.run(layer, self.normed, self.x, self.control[1:])
        self._norm(f"{role}.mlp_norm")
        if layer not in self._layer_idx:
            self._dense_expert(f"{role}.mlp", self.x, self.x, spec.residual_multiplier)
            return None
        logit_bias = self._weights.vector(f"{role}.router_logit_bias") if self._router.logit_bias else None
        self._matrix(f"{role}.router").times(self.normed, self._scores, logit_bias)
        bias = self._weights.vector(f"{role}.router_bias") if self._router.bias else None
        route(self._scores, self._router, bias, self.routes[self._layer_idx[layer]], self.router_weights)
        return self._shared_expert(role)

    def finish(self) -> None:
        """Launches the last norm and the head."""
        weights, spec = self._weights, self._weights.spec
        self._norm("norm")
        bias = weights.vector("head_bias") if spec.head_bias else None
        head = self._matrix("embed" if spec.tied_head else "head")
        head.times(self.normed, self.logits, bias, scale=1 / spec.logits_scaling)

    def _matrix(self, role: str) -> DeviceMatrix:
        return device_matrix(self._weights, role)

    def _norm(self, role: str) -> None:
        weights = self._weights
        bias = weights.vector(f"{role}_bias") if weights.spec.norm.kind == "layer" else None
        norm(self.x, weights.vector(role), bias, weights.spec.norm, self.normed)

    def _shared_expert(self, role: str) -> Tensor | None:
        shared = self._weights.spec.shared_expert
        if shared is None:
            return None
        self._dense_expert(f"{role}.shared", self._shared, None, 1.0)
        if shared.gated:
            self._matrix(f"{role}.shared_router").times(self.normed, self._gated)
            torch.sigmoid(self._gated, out=self._gated)
            torch.mul(self._shared, self._gated, out=self._shared)
        return self._shared

    def _dense_expert(self, role: str, out: Tensor, residual: Tensor | None, scale: float) -> None:
        up = self._matrix(f"{role}.up")
        hidden, gate = self._hidden[: up.num_rows], None
        up.times(self.normed, hidden)
        if "gate" in self._weights.spec.expert.matrices:
            gate = self._gate[: up.num_rows]
            self._matrix(f"{role}.gate").times(self.normed, gate)
        activate(hidden, gate, hidden, self._weights.spec.expert.function)
        self._matrix(f"{role}.down").times(hidden, out, residual=residual, scale=scale)
