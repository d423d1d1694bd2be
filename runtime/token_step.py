"""One token through the model on a device, in launches alone: what a CUDA graph is made of.

Everything has its place before: buffers here, weights, cache and tables elsewhere. Which token, and where it stands,
is read from the device; nothing is decided, allocated or waited for by the host. Importing this needs triton.
"""

import torch
from torch import Tensor

from moe_pack.runtime.card_weights import CardWeights
from moe_pack.runtime.kernels.activate import activate
from moe_pack.runtime.kernels.neurons import neurons
from moe_pack.runtime.kernels.norm import norm
from moe_pack.runtime.kernels.reduce import reduce
from moe_pack.runtime.kernels.route import route
from moe_pack.runtime.kernels.select import select
from moe_pack.runtime.kernels.tables import Selection
from moe_pack.runtime.kernels.tiles import num_partials
from moe_pack.runtime.kv_cache import KVCache
from moe_pack.runtime.rope import Angles
from moe_pack.runtime.token_attention import token_attention


class TokenStep:
    """Room for one token's way through a model, and the launches of it.

    `control`: int32 [2], the token and its position, written before each `run`.   `logits`: float32 [vocabulary], what
    `run` leaves.   `routes`: int32 [L, k], the experts that it went to.
    Args:    angles: float32 [context, rotary_dim / 2] each, of every position; may be overwritten between runs.
             num_sms: multiprocessors of the card, which say how work is divided.
    """

    def __init__(self, weights: CardWeights, cache: KVCache, angles: Angles, num_sms: int) -> None:
        spec = weights.spec
        device, router = cache.keys.device, spec.router
        self._weights = weights
        self._layer_idx = {layer: idx for idx, layer in enumerate(spec.moe_layers)}

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, device=device)

        self.control = torch.zeros(2, dtype=torch.int32, device=device)
        self.logits = floats(spec.vocab_size)
        self.routes = torch.zeros((len(spec.moe_layers), router.num_experts_per_tok), dtype=torch.int32, device=device)
        self._x, self._normed, self._also = (floats(spec.hidden_size) for _ in range(3))
        self._scores = floats(router.num_experts)
        self._router_weights = floats(router.num_experts_per_tok)
        self._gated = floats(1)
        widths = [width for width in (spec.dense_intermediate_size, _shared_width(weights)) if width]
        self._hidden, self._gate = floats(max(widths, default=1)), floats(max(widths, default=1))
        f, k = spec.expert.intermediate_size, router.num_experts_per_tok
        self._selection = Selection.room(k, f, device)
        self._partials = floats(k, num_partials(k, f, num_sms), spec.hidden_size)
        self._attention = token_attention(weights, cache, angles)

    def run(self) -> None:
        """Launches everything, from the token in `control` to `logits`."""
        weights, spec = self._weights, self._weights.spec
        token, position = self.control[:1], self.control[1:]
        weights.dense("embed").gather(token, self._x, spec.embedding_multiplier)
        for layer in range(spec.num_hidden_layers):
            self._norm(f"layers.{layer}.attention_norm")
            self._attention.run(layer, self._normed, self._x, position)
            self._norm(f"layers.{layer}.mlp_norm")
            if layer in self._layer_idx:
                self._experts(layer)
            else:
                self._dense_expert(f"layers.{layer}.mlp", self._x, self._x, spec.residual_multiplier)
        self._norm("norm")
        head = weights.dense("embed" if spec.tied_head else "head")
        bias = weights.vector("head_bias") if spec.head_bias else None
        head.times(self._normed, self.logits, bias, scale=1 / spec.logits_scaling)

    def _norm(self, role: str) -> None:
        weights = self._weights
        bias = weights.vector(f"{role}_bias") if weights.spec.norm.kind == "layer" else None
        norm(self._x, weights.vector(role), bias, weights.spec.norm, self._normed)

    def _experts(self, layer: int) -> None:
        """Adds a layer's experts for the normed state, the shared one too, to the hidden state."""
        weights, spec, role = self._weights, self._weights.spec, f"layers.{layer}"
        experts = self.routes[self._layer_idx[layer]]
        weights.dense(f"{role}.router").times(self._normed, self._scores)
        bias = weights.vector(f"{role}.router_bias") if spec.router.bias else None
        route(self._scores, spec.router, bias, experts, self._router_weights)
        held = weights.cache.layers[self._layer_idx[layer]]
        held.admit(experts)
        held.pull_selectors(experts)
        select(self._normed, experts, held.tables, self._selection)
        held.pull_records(experts, self._selection)
        neurons(self._normed, experts, held.tables, self._selection, self._partials)
        also = self._shared_expert(role)
        reduce(
            self._partials, self._router_weights, self._x, residual=self._x, also=also, scale=spec.residual_multiplier
        )

    def _shared_expert(self, role: str) -> Tensor | None:
        weights, shared = self._weights, self._weights.spec.shared_expert
        if shared is None:
            return None
        self._dense_expert(f"{role}.shared", self._also, None, 1.0)
        if shared.gated:
            weights.dense(f"{role}.shared_router").times(self._normed, self._gated)
            torch.sigmoid(self._gated, out=self._gated)
            torch.mul(self._also, self._gated, out=self._also)
        return self._also

    def _dense_expert(self, role: str, out: Tensor, residual: Tensor | None, scale: float) -> None:
        weights = self._weights
        up = weights.dense(f"{role}.up")
        hidden, gate = self._hidden[: up.num_rows], None
        up.times(self._normed, hidden)
        if "gate" in weights.spec.expert.matrices:
            gate = self._gate[: up.num_rows]
            weights.dense(f"{role}.gate").times(self._normed, gate)
        activate(hidden, gate, hidden)
        weights.dense(f"{role}.down").times(hidden, out, residual=residual, scale=scale)


def _shared_width(weights: CardWeights) -> int | None:
    shared = weights.spec.shared_expert
    return None if shared is None else shared.intermediate_size
