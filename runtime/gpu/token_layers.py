"""One token's layers on a GPU without the routed experts, as launches that a CUDA graph can capture.

The device itself reads the token and its position; the host decides, allocates and waits for nothing in between.
`token_step.TokenStep` adds the experts. Importing this needs Triton.
"""

import torch
from torch import Tensor

from moe_pack.formats import parts
from moe_pack.runtime.gpu.kernels import attention, matmul
from moe_pack.runtime.gpu.kernels.elementwise import Norm, norm
from moe_pack.runtime.gpu.kernels.router import ChangedChoice, Routed, Router, route
from moe_pack.runtime.gpu.weights import DeviceMatrix
from moe_pack.runtime.model import PackWeights, caches, kv_cache


def stored(weights: PackWeights, role: str) -> matmul.StoredRows:
    """Returns a dense matrix as it is stored on the device."""
    matrix = weights.matrix(role)
    assert isinstance(matrix, DeviceMatrix), "weights of a GPU"
    return matrix.stored


def norm_of(weights: PackWeights, role: str) -> Norm:
    """Returns a norm of the kind that the spec names."""
    bias = weights.vector(f"{role}_bias") if weights.spec.norm.kind == "layer" else None
    return Norm(weights.vector(role), bias, weights.spec.norm.eps)


class GroupedAttention:
    """Attention with grouped queries, as `kernels.attention` computes it. Owns its buffers.

    Args:    angles: float32 [context, rotary_dim / 2] each, of every position.
    """

    def __init__(self, weights: PackWeights, cache: kv_cache.KVCache, angles: caches.Angles) -> None:
        spec, device = weights.spec.attention, cache.device
        assert isinstance(spec, parts.GroupedQuerySpec), "the spec has this kind of attention"
        self._weights, self._cache, self._angles, self._spec = weights, cache, angles, spec
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._q, self._k, self._v = (torch.zeros(width, device=device) for width in (queries, keys, keys))
        self._rotated = torch.zeros((spec.num_heads, spec.head_dim), device=device)
        self._mixed = torch.zeros_like(self._rotated)
        self._rows = caches.RowStorage(cache.dtype, (spec.head_dim,))
        self._workspace = attention.AttentionWorkspace.allocate(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, cache.context_tokens, device
        )

    def run(self, layer: int, x: Tensor, position: Tensor) -> None:
        """Adds a layer's attention to x, float32 [d]; `position`: int32 [1], of the token's keys and values."""
        weights, spec, role = self._weights, self._spec, f"layers.{layer}.attention"
        projections: tuple[tuple[parts.Projection, Tensor], ...] = (("q", self._q), ("k", self._k), ("v", self._v))
        products = [
            matmul.Product(stored(weights, f"{role}.{name}"), out, self._bias(role, name)) for name, out in projections
        ]
        matmul.normed_gemv(x, norm_of(weights, f"{role}_norm"), products)
        norms = None
        if spec.qk_norm != "none":
            norms = attention.QkNorms(
                weights.vector(f"{role}.q_norm"), weights.vector(f"{role}.k_norm"), weights.spec.norm.eps
            )
        cache, is_norm_whole = (self._cache.keys[layer], self._cache.values[layer]), spec.qk_norm == "projection"
        entering = attention.Entering(
            self._q, self._k, self._v, norms, is_norm_whole, self._angles, weights.spec.rotation.interleaved
        )
        sinks = weights.vector(f"{role}.sinks") if spec.sinks else None
        window, workspace = spec.window(layer), self._workspace
        attention.attend(
            self._rotated, cache, position, spec.scale, window, workspace, self._mixed, sinks, entering, self._rows
        )
        bias, scale = self._bias(role, "o"), weights.spec.residual_multiplier
        matmul.gemv(self._mixed.view(-1), stored(weights, f"{role}.o"), x, bias=bias, residual=x, scale=scale)

    def _bias(self, role: str, name: parts.Projection) -> Tensor | None:
        return self._weights.vector(f"{role}.{name}_bias") if name in self._spec.bias else None


class LatentAttention:
    """Multi-head latent attention with absorbed projections; arguments as for `GroupedAttention`. Owns its buffers."""

    def __init__(self, weights: PackWeights, cache: kv_cache.KVCache, angles: caches.Angles) -> None:
        spec, device = weights.spec.attention, cache.device
        assert isinstance(spec, parts.LatentSpec), "the spec has this kind of attention"
        self._weights, self._cache, self._angles, self._spec = weights, cache, angles, spec
        heads, rank, rope = spec.num_heads, spec.kv_lora_rank, spec.qk_rope_head_dim
        self._q = torch.zeros(heads * (spec.qk_nope_head_dim + rope), device=device)
        self._low = torch.zeros(spec.q_lora_rank or 0, device=device)
        self._kv = torch.zeros(rank + rope, device=device)
        self._moved = torch.zeros((heads, rank + rope), device=device)
        self._mixed = torch.zeros((heads, rank), device=device)
        self._values = torch.zeros(heads * spec.v_head_dim, device=device)
        self._workspace = attention.AttentionWorkspace.allocate(heads, 1, rank, cache.context_tokens, device)

    def run(self, layer: int, x: Tensor, position: Tensor) -> None:
        """Adds a layer's attention to x, as `GroupedAttention.run`."""
        weights, spec, role = self._weights, self._spec, f"layers.{layer}.attention"
        kv = matmul.Product(stored(weights, f"{role}.kv_a"), self._kv)
        if spec.q_lora_rank is None:
            matmul.normed_gemv(
                x, norm_of(weights, f"{role}_norm"), [matmul.Product(stored(weights, f"{role}.q"), self._q), kv]
            )
        else:
            low = matmul.Product(stored(weights, f"{role}.q_a"), self._low)
            matmul.normed_gemv(x, norm_of(weights, f"{role}_norm"), [low, kv])
            low_norm = Norm(weights.vector(f"{role}.q_a_norm"), None, spec.lora_norm_eps)
            matmul.normed_gemv(self._low, low_norm, [matmul.Product(stored(weights, f"{role}.q_b"), self._q)])
        kv_b = stored(weights, f"{role}.kv_b")
        norm, interleaved = weights.vector(f"{role}.kv_a_norm"), weights.spec.rotation.interleaved
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        projected = (self._q, self._kv)
        attention.enter_latent(projected, norm, self._angles, interleaved, position, spec, kv_b, self._moved, keys)
        attention.attend(self._moved, (keys, values), position, spec.scale, None, self._workspace, self._mixed)
        attention.leave_latent(self._mixed, spec, kv_b, self._values)
        scale = weights.spec.residual_multiplier
        matmul.gemv(self._values, stored(weights, f"{role}.o"), x, residual=x, scale=scale)


class TokenLayers:
    """Buffers for one token's forward pass, and its launches up to the routed experts of each layer.

    Args:    angles: float32 [context, rotary_dim / 2] each, of every position as the last one.
    """

    def __init__(self, weights: PackWeights, cache: kv_cache.KVCache, angles: caches.Angles) -> None:
        spec, device = weights.spec, cache.device
        self._weights = weights
        self._layer_idx = {layer: idx for idx, layer in enumerate(spec.moe_layers)}

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, device=device)

        num_layers, k = len(spec.moe_layers), spec.router.num_experts_per_tok
        self.control = torch.zeros(2, dtype=torch.int32, device=device)  # the token and its position, for kernels
        self.routes = torch.zeros((num_layers, k), dtype=torch.int32, device=device)  # [L, k]
        # The hidden state, and the shared experts' output, float32 [d]; logits of the vocabulary.
        self.x, self._shared, self.logits = floats(spec.hidden_size), floats(spec.hidden_size), floats(spec.vocab_size)
        # The norm of the hidden state that experts get, float32 [d], and weights float32 [k] of the last router.
        routed = Routed.allocate(spec.hidden_size, spec.router, device)
        self.normed, self.router_weights, self._shared_weight = routed.normed, routed.weights, routed.shared_weight
        self.router_logits = floats(num_layers, spec.router.num_experts)  # float32 [L, E]
        self._routed = [routed._replace(logits=logits) for logits in self.router_logits]
        shared = 0 if spec.shared_expert is None else spec.shared_expert.intermediate_size
        self._hidden = floats(max(spec.dense_intermediate_size or 0, shared))
        kind = GroupedAttention if isinstance(spec.attention, parts.GroupedQuerySpec) else LatentAttention
        self._attention = kind(weights, cache, angles)

    def start(self) -> None:
        """Launches the token's embedding."""
        embed, scale = stored(self._weights, "embed"), self._weights.spec.embedding_multiplier
        matmul.gather_row(embed, self.control[:1], self.x, scale=scale)

    def run(self, layer: int, x: Tensor) -> None:
        """Launches a layer without its routed experts: its attention, and its dense expert if it has one.

        Args:    x: float32 [d], changed in place: the hidden state, or a prediction's part of it. The last call for a
                 layer leaves its keys and values in the cache.
        """
        self._attention.run(layer, x, self.control[1:])
        if layer not in self._layer_idx:
            role, weights = f"layers.{layer}", self._weights
            hidden = self._neurons(f"{role}.mlp", x, norm_of(weights, f"{role}.mlp_norm"), None)
            matmul.gemv(
                hidden, stored(weights, f"{role}.mlp.down"), x, residual=x, scale=weights.spec.residual_multiplier
            )

    def route(self, layer_idx: int, changed: ChangedChoice | None = None) -> Tensor | None:
        """Launches a MoE layer's router, which writes to `routes`, and the shared experts; returns their output [d]."""
        role, shared = f"layers.{self._weights.spec.moe_layers[layer_idx]}", self._weights.spec.shared_expert
        route(self.x, self.router(layer_idx), self.routes[layer_idx], self._routed[layer_idx], changed)
        if shared is None:
            return None
        weight = self._shared_weight if shared.gated else None
        hidden = self._neurons(f"{role}.shared", self.normed, None, weight)
        matmul.gemv(hidden, stored(self._weights, f"{role}.shared.down"), self._shared)
        return self._shared

    def finish(self) -> None:
        """Launches the last norm and the head."""
        weights, spec = self._weights, self._weights.spec
        # Apart: the head has many programs, and each of them would read the norm's weights.
        norm(self.x, norm_of(weights, "norm"), self.normed)
        bias = weights.vector("head_bias") if spec.head_bias else None
        head = stored(weights, "embed" if spec.tied_head else "head")
        matmul.gemv(self.normed, head, self.logits, bias=bias, scale=1 / spec.logits_scaling)

    def router(self, layer_idx: int) -> Router:
        """Returns the router of a MoE layer."""
        weights, spec = self._weights, self._weights.spec
        role = f"layers.{spec.moe_layers[layer_idx]}"
        is_gated = spec.shared_expert is not None and spec.shared_expert.gated
        return Router(
            spec=spec.router,
            norm=norm_of(weights, f"{role}.mlp_norm"),
            rows=stored(weights, f"{role}.router"),
            logit_bias=weights.vector(f"{role}.router_logit_bias") if spec.router.logit_bias else None,
            bias=weights.vector(f"{role}.router_bias") if spec.router.bias else None,
            shared=stored(weights, f"{role}.shared_router") if is_gated else None,
        )

    def _neurons(self, role: str, x: Tensor, norm: Norm | None, weight: Tensor | None) -> Tensor:
        weights, expert = self._weights, self._weights.spec.expert
        up = stored(weights, f"{role}.up")
        gate = stored(weights, f"{role}.gate") if "gate" in expert.matrices else None
        hidden = self._hidden[: len(up.rows)]
        matmul.gated(x, gate, up, expert.function, hidden, norm=norm, weight=weight)
        return hidden
