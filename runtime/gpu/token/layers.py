"""The layers of a pass of few tokens on a GPU without the routed experts, as launches that a CUDA graph can capture.

The device itself reads tokens, positions and slots; the host decides, allocates and waits for nothing in between.
`token_step.TokenStep` adds the experts. Parts that most models have run in kernels that do several steps at once
(`fused`); all others are the model's own operations in torch, between kernels that read rows and caches. Importing this
needs Triton.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moe_pack import formats
from moe_pack.runtime.gpu.kernels import matmul
from moe_pack.runtime.gpu.kernels.elementwise import norm
from moe_pack.runtime.gpu.kernels.router import ChangedChoice, Routed, Router, route
from moe_pack.runtime.gpu.token import attention, fused
from moe_pack.runtime.gpu.token.fused import norm_of
from moe_pack.runtime.gpu.token.rows import TokenCaches, TokenRows
from moe_pack.runtime.gpu.weights import stored
from moe_pack.runtime.model import PackWeights, caches, layers, residuals


class LayerBuffers(NamedTuple):
    """Memory for the rows of a pass, allocated once: float32 on the device where nothing else is said."""

    control: Tensor  # int32 [3, R]: tokens, positions and slots of rows
    x: Tensor  # [R, w], hidden states
    normed: Tensor  # [R, d], the input of a layer's second half
    expert_inputs: Tensor  # [R, d], likewise of its routed experts, where it is another
    shared: Tensor  # [R, d], the output of shared experts
    routed: Tensor  # [R, d], the sum of routed experts, where the residual is not the plain one
    hidden: Tensor  # [R, f], neurons of dense and shared experts
    routes: Tensor  # int32 [L, R, k], the experts of each layer
    router_logits: Tensor  # [L, R, E]
    router_weights: Tensor  # [R, k], of the last router
    output_weights: Tensor  # [R, k], of experts' outputs, where they are others
    routing: Routed  # of the kernel that routes
    logits: Tensor  # [R, vocabulary]
    heads: tuple[attention.HeadBuffers, ...]  # for each kind of attention

    def rows(self, num_rows: int) -> TokenRows:
        """Returns the first rows of a pass."""
        return TokenRows(*self.control[:, :num_rows])

    @classmethod
    def allocate(
        cls, spec: formats.ModelSpec, context_tokens: int, num_rows: int, device: torch.device
    ) -> "LayerBuffers":
        """Allocates for so many rows."""

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, device=device)

        d, k, num_layers = spec.hidden_size, spec.router.num_experts_per_tok, len(spec.moe_layers)
        shared = 0 if spec.shared_expert is None else spec.shared_expert.intermediate_size
        routing = Routed.allocate(d, spec.router, device, num_rows)
        return cls(
            control=torch.zeros((3, num_rows), dtype=torch.int32, device=device),
            x=floats(num_rows, spec.stream_width),
            normed=routing.normed,
            expert_inputs=floats(num_rows, d),
            shared=floats(num_rows, d),
            routed=floats(num_rows, d),
            hidden=floats(num_rows * max(spec.dense_intermediate_size or 0, shared)),
            routes=torch.zeros((num_layers, num_rows, k), dtype=torch.int32, device=device),
            router_logits=floats(num_layers, num_rows, spec.router.num_experts),
            router_weights=routing.weights,
            output_weights=floats(num_rows, k),
            routing=routing,
            logits=floats(num_rows, spec.vocab_size),
            heads=attention.buffers_of(spec, context_tokens, num_rows, device),
        )


class TokenLayers:
    """The launches of a pass of so many rows, up to the routed experts of each layer.

    Args:    angles: float32 [context, rotary_dim / 2] each, of every position as the last one, for each kind of
             attention.   buffers: with memory for as many rows or more.
    """

    def __init__(
        self,
        weights: PackWeights,
        token_caches: TokenCaches,
        angles: tuple[caches.Angles, ...],
        buffers: LayerBuffers,
        num_rows: int,
    ) -> None:
        spec = weights.spec
        self._weights, self._caches, self.buffers, self.num_rows = weights, token_caches, buffers, num_rows
        self._residual = residuals.residual_of(spec.residual)
        self._layer_idx = {layer: idx for idx, layer in enumerate(spec.moe_layers)}
        self.rows = buffers.rows(num_rows)
        self.x, self.normed, self.logits = (each[:num_rows] for each in (buffers.x, buffers.normed, buffers.logits))
        self.router_weights, self._shared = buffers.router_weights[:num_rows], buffers.shared[:num_rows]
        self.routes, self.router_logits = buffers.routes[:, :num_rows], buffers.router_logits[:, :num_rows]
        # The input of the last layer's routed experts, and the weights of their outputs.
        self.expert_inputs, self.output_weights = self.normed, self.router_weights
        self._attends = attention.RowAttention(weights, token_caches, self.rows, angles, buffers.heads)
        self._fused = fused.attention_of(weights, num_rows, self._attends)
        self.routed = buffers.routed[:num_rows]
        self.is_plain = fused.is_plain(spec)
        # Whether all launches are kernels that may start before the one before has ended.
        self.is_chained = (
            self.is_plain
            and fused.routes(spec)
            and all(fused.is_chained(spec, layer) for layer in range(spec.num_hidden_layers))
        )

    # ---- before the layers, and the first half of a layer ------------------------------------------------------------

    def start(self) -> None:
        """Launches the tokens' embeddings."""
        spec, embed = self._weights.spec, stored(self._weights, "embed")
        if spec.stream_width == spec.hidden_size:
            matmul.gather_row(embed, self.rows.tokens, self.x, scale=spec.embedding_multiplier)
        else:
            matmul.gather_row(embed, self.rows.tokens, self.normed, scale=spec.embedding_multiplier)
            self.x.copy_(self._residual.begin(self.normed))

    def run(self, layer: int, x: Tensor) -> None:
        """Launches a layer without its routed experts: its first half, and its dense expert if it has one.

        Args:    x: float32 [T, w], changed in place: the hidden states, or a prediction's part of them. The last call
                 for a layer leaves its keys and values in the caches; mixers' states take one call alone.
        """
        spec, weights = self._weights.spec, self._weights
        if spec.has_first(layer):
            if (by_kernels := self._fused(layer)) is not None:
                by_kernels.run(layer, x)
            elif self.is_plain and fused.has_mixer(weights, layer):
                self._run_mixer(layer, x)
            else:
                normed = self._residual.half_input(x, weights, layer, "attention")
                self._enter(x, self._mixed(normed, layer), layer)
        if layer in self._layer_idx or not spec.has_second(layer):
            return
        if self.is_plain and spec.expert.unrouted_function(layer) in fused.FUNCTIONS:
            role = f"layers.{layer}"
            hidden = self._neurons(layer, "mlp", x, with_norm=True)
            down, scale = stored(weights, f"{role}.mlp.down"), spec.residual_multiplier
            matmul.gemv(hidden, down, x, residual=x, scale=scale)
        else:
            inputs = layers.mlp_input(x, weights, layer)
            x.copy_(layers.enter_second(x, layers.run_unrouted(inputs, weights, layer), None, weights, layer))

    def _run_mixer(self, layer: int, x: Tensor) -> None:
        """Adds a layer's mixer to x, with the norm in its first products and the sum in its last one."""
        from moe_pack.runtime.model import mixers  # most models have none

        weights, spec, role = self._weights, self._weights.spec, f"layers.{layer}.mixer"
        mixer = spec.mixer_of(layer)
        assert mixer is not None, "a layer with a mixer"
        names, has_bias = mixers.projections_of(mixer)

        def bias(name: str) -> Tensor | None:
            return weights.vector(f"{role}.{name}_bias") if has_bias else None

        matrices = {name: stored(weights, f"{role}.{name}") for name in names}
        projected = {name: x.new_empty((self.num_rows, len(each.rows))) for name, each in matrices.items()}
        products = [matmul.Product(each, projected[name], bias(name)) for name, each in matrices.items()]
        matmul.normed_gemv(x, norm_of(weights, f"layers.{layer}.attention_norm"), products)
        y = mixers.mix_projected(projected, weights, layer, mixer, self._caches.states_of(layer, self.rows))
        scale = spec.residual_multiplier
        matmul.gemv(y.contiguous(), stored(weights, f"{role}.o"), x, bias=bias("o"), residual=x, scale=scale)

    def _mixed(self, normed: Tensor, layer: int) -> Tensor:
        mixer = self._weights.spec.mixer_of(layer)
        if mixer is None:
            return self._attends(normed, layer)
        from moe_pack.runtime.model import mixers  # most models have none

        return mixers.mix(normed, self._weights, layer, mixer, self._caches.states_of(layer, self.rows))

    def _enter(self, x: Tensor, y: Tensor, layer: int) -> None:
        spec = self._weights.spec
        if spec.residual is None:
            x.add_(y, alpha=spec.residual_multiplier)
        else:
            x.copy_(self._residual.enter(x, y, self._weights, layer, "attention"))

    # ---- the second half of a layer ----------------------------------------------------------------------------------

    def route(self, layer_idx: int, changed: ChangedChoice | None = None) -> Tensor | None:
        """Launches a MoE layer's router, and the shared experts; returns their output [T, d].

        `routes`, `normed`, `expert_inputs` and the weights are then those of this layer.
        """
        spec, layer = self._weights.spec, self._weights.spec.moe_layers[layer_idx]
        if fused.routes(spec):
            routing = Routed(*(each[: self.num_rows] for each in self.buffers.routing))
            routing = routing._replace(logits=self.router_logits[layer_idx])
            route(self.x, self.router(layer_idx), self.routes[layer_idx], routing, changed)
        else:
            self._route_by_torch(layer_idx, layer)
        if spec.shared_expert is None:
            return None
        if self.is_plain and spec.expert.unrouted_function(layer) in fused.FUNCTIONS:
            hidden = self._neurons(layer, "shared", self.normed, is_weighted=spec.shared_expert.gated)
            matmul.gemv(hidden, stored(self._weights, f"layers.{layer}.shared.down"), self._shared)
            return self._shared
        return layers.run_unrouted(self.normed, self._weights, layer)

    def _route_by_torch(self, layer_idx: int, layer: int) -> None:
        weights = self._weights
        self.normed.copy_(layers.mlp_input(self.x, weights, layer))
        experts, router_weights = layers.route_tokens(self.normed, weights, layer)
        self.routes[layer_idx].copy_(experts)
        self.router_weights.copy_(router_weights)
        inputs, output_weights = layers.expert_inputs(self.normed, self.router_weights, weights, layer_idx)
        if inputs is not self.normed:
            self.expert_inputs = self.buffers.expert_inputs[: self.num_rows].copy_(inputs)
        if output_weights is not self.router_weights:
            self.output_weights = self.buffers.output_weights[: self.num_rows].copy_(output_weights)

    def end_layer(self, layer_idx: int, routed: Tensor, unrouted: Tensor | None, out: Tensor) -> None:
        """Writes hidden states [T, w] after a MoE layer to `out`, from `x` after its first half and its outputs."""
        weights, layer = self._weights, self._weights.spec.moe_layers[layer_idx]
        routed_too = layers.with_returned(routed, self.normed, weights, layer)
        out.copy_(layers.enter_second(self.x, unrouted, routed_too, weights, layer))

    def router(self, layer_idx: int) -> Router:
        """Returns the router of a MoE layer, for the kernel that routes."""
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

    def _neurons(self, layer: int, name: str, x: Tensor, with_norm: bool = False, is_weighted: bool = False) -> Tensor:
        """Launches the neurons of a dense or a shared expert; returns them, float32 [T, f]."""
        weights, expert, role = self._weights, self._weights.spec.expert, f"layers.{layer}.{name}"
        up = stored(weights, f"{role}.up")
        gate = stored(weights, f"{role}.gate") if "gate" in expert.matrices else None
        hidden = self.buffers.hidden[: self.num_rows * len(up.rows)].view(self.num_rows, -1)
        norm_first = norm_of(weights, f"layers.{layer}.mlp_norm") if with_norm else None
        weight = self.buffers.routing.shared_weight[: self.num_rows] if is_weighted else None
        matmul.gated(x, gate, up, expert.unrouted_function(layer), hidden, norm=norm_first, weight=weight)
        return hidden

    # ---- after the layers --------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Launches the last norm and the head."""
        weights, spec = self._weights, self._weights.spec
        if not self.is_plain or spec.logits_softcap is not None:
            self.logits.copy_(layers.head(self.x, weights))
            return
        # Apart: the head has many programs, and each of them would read the norm's weights.
        norm(self.x, norm_of(weights, "norm"), self.normed)
        bias = weights.vector("head_bias") if spec.head_bias else None
        head = stored(weights, "embed" if spec.tied_head else "head")
        matmul.gemv(self.normed, head, self.logits, bias=bias, scale=1 / spec.logits_scaling)
