"""One token through all of a model but its routed experts, on a device, in launches alone.

Everything has its place before: buffers here, weights and key-value cache elsewhere. Which token, and where it stands,
is read from the device; nothing is decided, allocated or waited for by the host. Importing this needs triton.
"""

import torch
from torch import Tensor

from moe_pack.runtime.device_matrix import DeviceMatrix
from moe_pack.runtime.kernels.activate import activate
from moe_pack.runtime.kernels.norm import norm
from moe_pack.runtime.kernels.route import route
from moe_pack.runtime.kv_cache import KVCache
from moe_pack.runtime.pack_weights import PackWeights
from moe_pack.runtime.rope import Angles
from moe_pack.runtime.token_attention import on_device, token_attention


class TokenLayers:
    """Room for one token's way through a model, and the launches of it.

    `control`: int32 [2], the token and its position, read by what is launched.   `x`, `normed`: float32 [d], the hidden
    state, and what experts see of it.   `routes`: int32 [L, k], and `router_weights`: float32 [k], of the last layer
    that was routed.   `logits`: float32 [vocabulary].
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
        self.x, self.normed, self._also = (floats(spec.hidden_size) for _ in range(3))
        self._scores, self._gated = floats(spec.router.num_experts), floats(1)
        shared = 0 if spec.shared_expert is None else spec.shared_expert.intermediate_size
        widest = max(spec.dense_intermediate_size or 0, shared)
        self._hidden, self._gate = floats(widest), floats(widest)
        self._attention = token_attention(weights, cache, angles)

    def start(self) -> None:
        """The token's embedding."""
        on_device(self._weights, "embed").gather(self.control[:1], self.x, self._weights.spec.embedding_multiplier)

    def run(self, layer: int) -> Tensor | None:
        """A layer up to its routed experts, which are then in `routes`; what is to be added to theirs, float32 [d].

        All of it, where it has one dense expert.
        """
        role, spec = f"layers.{layer}", self._weights.spec
        self._norm(f"{role}.attention_norm")
        self._attention.run(layer, self.normed, self.x, self.control[1:])
        self._norm(f"{role}.mlp_norm")
        if layer not in self._layer_idx:
            self._dense_expert(f"{role}.mlp", self.x, self.x, spec.residual_multiplier)
            return None
        self._matrix(f"{role}.router").times(self.normed, self._scores)
        bias = self._weights.vector(f"{role}.router_bias") if self._router.bias else None
        route(self._scores, self._router, bias, self.routes[self._layer_idx[layer]], self.router_weights)
        return self._shared_expert(role)

    def finish(self) -> None:
        """The logits."""
        weights, spec = self._weights, self._weights.spec
        self._norm("norm")
        bias = weights.vector("head_bias") if spec.head_bias else None
        head = self._matrix("embed" if spec.tied_head else "head")
        head.times(self.normed, self.logits, bias, scale=1 / spec.logits_scaling)

    def _matrix(self, role: str) -> DeviceMatrix:
        return on_device(self._weights, role)

    def _norm(self, role: str) -> None:
        weights = self._weights
        bias = weights.vector(f"{role}_bias") if weights.spec.norm.kind == "layer" else None
        norm(self.x, weights.vector(role), bias, weights.spec.norm, self.normed)

    def _shared_expert(self, role: str) -> Tensor | None:
        shared = self._weights.spec.shared_expert
        if shared is None:
            return None
        self._dense_expert(f"{role}.shared", self._also, None, 1.0)
        if shared.gated:
            self._matrix(f"{role}.shared_router").times(self.normed, self._gated)
            torch.sigmoid(self._gated, out=self._gated)
            torch.mul(self._also, self._gated, out=self._also)
        return self._also

    def _dense_expert(self, role: str, out: Tensor, residual: Tensor | None, scale: float) -> None:
        up = self._matrix(f"{role}.up")
        hidden, gate = self._hidden[: up.num_rows], None
        up.times(self.normed, hidden)
        if "gate" in self._weights.spec.expert.matrices:
            gate = self._gate[: up.num_rows]
            self._matrix(f"{role}.gate").times(self.normed, gate)
        activate(hidden, gate, hidden)
        self._matrix(f"{role}.down").times(hidden, out, residual=residual, scale=scale)
