"""A decoder on a GPU: many tokens layer by layer as everywhere, one token by launches that a CUDA graph can capture.

`GroupedAttention` and `LatentAttention` run one token's attention; `TokenLayers` runs one token through the model
without its routed experts; `TokenStep` adds the experts. They only launch: buffers are allocated here, weights and the
key-value cache elsewhere, and the device itself reads which token runs and at which position. The host decides,
allocates and waits for nothing in between. `TokenDecoder` is the base of the two engines' decoders. Importing this
needs Triton.
"""

from abc import abstractmethod
from collections.abc import Callable
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
from moe_pack.runtime.gpu.kernels.cache import Selection
from moe_pack.runtime.gpu.kernels.elementwise import activate, norm, reduce, rms_norm
from moe_pack.runtime.gpu.kernels.experts import neurons, route, select
from moe_pack.runtime.gpu.kernels.rotation import device_matrix as rotation_matrix
from moe_pack.runtime.gpu.kernels.rotation import rotate, rotate_back
from moe_pack.runtime.gpu.kernels.rows import num_partials
from moe_pack.runtime.gpu.weights import DeviceMatrix, GpuWeights
from moe_pack.runtime.model import Angles, Decoder, KVCache, PackWeights


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


_INTERPRETED_SMS = 1  # programs run one after the other


class TokenDecoder(Decoder):
    """A decoder on a GPU; see `Decoder`. Logits are returned in host memory.

    Before `prepare`, and on a CPU, where the interpreter runs the kernels, the same launches run without graphs.
    Args:    chunk_tokens: of a forward pass of several tokens.   cache_dtype: float32 or bfloat16.
    """

    def __init__(
        self,
        weights: PackWeights,
        context_tokens: int,
        device: torch.device,
        chunk_tokens: int,
        cache_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(weights, context_tokens, device, chunk_tokens, cache_dtype)
        self._is_cuda = device.type == "cuda"
        self._tables_are_long = False
        self._tables = self._rope(torch.arange(context_tokens, device=device), 1)
        self._layers = TokenLayers(weights, self.cache, self._tables)
        self._control, self._logits = (
            self._page_locked_like(self._layers.control),
            self._page_locked_like(self._layers.logits),
        )
        # An event and not a stream: a test makes torch forbid waits for streams.
        self._done = torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]  # untyped in torch

    def logits(self, ids: list[int]) -> Tensor:
        """Returns logits in host memory; see `Decoder.logits`."""
        return self._one(ids[0])[None].clone() if self._is_alone(ids) else super().logits(ids).cpu()

    def next_logits(self, ids: list[int]) -> Tensor:
        """Returns the last logits in host memory, valid until the next call; see `Decoder.next_logits`."""
        return self._one(ids[0]) if self._is_alone(ids) else super().next_logits(ids).cpu()

    @abstractmethod
    def prepare(self) -> None:
        """Captures a token's launches in CUDA graphs, after running them once so that all kernels are loaded."""

    @abstractmethod
    def _run_token(self) -> None:
        """Runs the token in `_control`, and begins the copy of its logits to `_logits`."""

    def _is_alone(self, ids: list[int]) -> bool:
        """Whether these are one token, and no earlier position has to be computed again."""
        before = self.cache.num_tokens
        return len(ids) == 1 and (before == 0 or self._rope.is_long(before + 1) == self._rope.is_long(before))

    @torch.inference_mode()
    def _one(self, token: int) -> Tensor:
        self._check_ids([token])
        before = self.cache.num_tokens
        self._take_angles(self._rope.is_long(before + 1))
        self._control[0], self._control[1] = token, before
        self._run_token()
        if self._done is not None:
            self._done.record()
            self._done.synchronize()  # the only wait for a token: its logits are returned
        self._ids[before:] = [token]
        self.cache.num_tokens += 1
        return self._logits

    def _take_angles(self, is_long: bool) -> None:
        """Replaces the angles in the tables, if a long sequence uses others."""
        if is_long == self._tables_are_long:
            return
        context = self.cache.context_tokens
        angles = self._rope(torch.arange(context, device=self.device), context if is_long else 1)
        for table, values in zip(self._tables, angles, strict=True):
            table.copy_(values)
        self._tables_are_long = is_long

    def _page_locked_like(self, tensor: Tensor) -> Tensor:
        """Returns page-locked memory of a tensor's shape and dtype."""
        return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=self._is_cuda)

    def _num_sms(self) -> int:
        if not self._is_cuda:
            return _INTERPRETED_SMS
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    @torch.inference_mode()
    def _captured(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Returns launches as one graph; runs them once before, so that all kernels are compiled and loaded."""
        if not self._is_cuda:
            return launch
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # untyped in torch
        stream.wait_stream(torch.cuda.current_stream())  # these launches use buffers that the current stream fills
        with torch.cuda.stream(stream):
            launch()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                launch()
        return graph.replay


class TokenStep:
    """The launches of one token, experts included, and buffers for its experts.

    Args:    num_sms: multiprocessors of the GPU, by which work is divided.
    """

    def __init__(self, weights: GpuWeights, layers: TokenLayers, num_sms: int) -> None:
        spec, device = weights.spec, layers.x.device
        self._weights, self._layers = weights, layers
        f, k = spec.expert.intermediate_size, spec.router.num_experts_per_tok
        self._selection = Selection.allocate(k, f, device)
        self._partials = torch.zeros((k, num_partials(k, f, num_sms), spec.hidden_size), device=device)
        is_rotated = any(weights.rotation(layer_idx) is not None for layer_idx in range(len(spec.moe_layers)))
        # Of rotated layers: the input of experts, and the sum of their outputs.
        self._turned, self._sum = (torch.zeros(spec.hidden_size * is_rotated, device=device) for _ in range(2))
        self._matrix = rotation_matrix(spec.hidden_size, device)

    def run(self) -> None:
        """Launches the whole forward pass, from the token in `control` to `logits`."""
        layers, spec = self._layers, self._weights.spec
        layers.start()
        layer_idx = 0
        for layer in range(spec.num_hidden_layers):
            shared = layers.run(layer)
            if layer in spec.moe_layers:
                self._add_experts(layer_idx, shared)
                layer_idx += 1
        layers.finish()

    def _add_experts(self, layer_idx: int, shared: Tensor | None) -> None:
        """Launches a layer's experts; adds them and the shared experts' output to the hidden state."""
        layers, rotation = self._layers, self._weights.rotation(layer_idx)
        x, scale = layers.x, self._weights.spec.residual_multiplier
        if rotation is None:
            self._experts(layer_idx, layers.normed)
            reduce(self._partials, layers.router_weights, x, residual=x, shared=shared, scale=scale)
            return
        rotate(layers.normed, rotation, self._matrix, self._turned)
        self._experts(layer_idx, self._turned)
        reduce(self._partials, layers.router_weights, self._sum)
        rotate_back(self._sum, rotation, self._matrix, x, residual=x, shared=shared, scale=scale)

    def _experts(self, layer_idx: int, inputs: Tensor) -> None:
        """Launches the token's experts up to their partial sums, and the copies of rows that they lack.

        Args:    inputs: float32 [d], as the experts' stored rows get it.
        """
        layers, cache = self._layers, self._weights.cache.layers[layer_idx]
        experts = layers.routes[layer_idx]
        cache.lru_update(experts)
        cache.gather_selectors_from_host(experts)
        select(inputs, experts, cache.tables, self._selection)
        cache.gather_records_from_host(experts, self._selection)
        neurons(inputs, experts, cache.tables, self._selection, self._partials)
