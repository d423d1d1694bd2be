"""Attention of one token on a device, in launches alone: one class a kind. Importing this needs triton.

One token through all of a model but its routed experts, on a device, in launches alone.

Everything has its place before: buffers here, weights and key-value cache elsewhere. Which token, and where it stands,
is read from the device; nothing is decided, allocated or waited for by the host. Importing this needs triton.

A decoder on a card: several tokens layer by layer as everywhere, one token by launches made ready before.

Importing this needs triton.

One token through the model on a device, experts too, in launches alone: what a CUDA graph is made of.

Importing this needs triton.
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
from moe_pack.runtime.gpu.kernels.rows import num_partials
from moe_pack.runtime.gpu.weights import DeviceMatrix, GpuWeights
from moe_pack.runtime.model import Angles, Decoder, KVCache, PackWeights


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
        self._rotated = torch.zeros((spec.num_heads, spec.head_dim), device=device)
        self._mixed = torch.zeros_like(self._rotated)
        self._room = AttentionWorkspace.allocate(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, cache.context_tokens, device
        )

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
        interleaved = weights.spec.rotation.interleaved
        enter(projected, norms, self._angles, interleaved, position, spec, self._rotated, cache)
        sinks = weights.vector(f"{role}.sinks") if spec.sinks else None
        attend(self._rotated, cache, position, spec.scale, spec.window(layer), self._room, self._mixed, sinks)
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
        self._room = AttentionWorkspace.allocate(heads, 1, rank, cache.context_tokens, device)

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
        kv_b = StoredRows(on_device(weights, f"{role}.kv_b").held, on_device(weights, f"{role}.kv_b").part)
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
        logit_bias = self._weights.vector(f"{role}.router_logit_bias") if self._router.logit_bias else None
        self._matrix(f"{role}.router").times(self.normed, self._scores, logit_bias)
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
        activate(hidden, gate, hidden, self._weights.spec.expert.function)
        self._matrix(f"{role}.down").times(hidden, out, residual=residual, scale=scale)


_INTERPRETED_SMS = 1  # programs run one after the other


class TokenDecoder(Decoder):
    """A model at work on a card; see `Decoder`. Logits come back in host memory.

    Until it is prepared, and on a CPU, where the interpreter runs the kernels, the same launches run without graphs.
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
        self._control, self._logits = self._on_host(self._layers.control), self._on_host(self._layers.logits)
        # An event: torch can be told to forbid waits for streams, and a test has no others here.
        self._done = torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]  # untyped in torch

    def logits(self, ids: list[int]) -> Tensor:
        """See `Decoder.logits`; in host memory."""
        return self._one(ids[0])[None].clone() if self._is_alone(ids) else super().logits(ids).cpu()

    def next_logits(self, ids: list[int]) -> Tensor:
        """See `Decoder.next_logits`; in host memory, until the next call."""
        return self._one(ids[0]) if self._is_alone(ids) else super().next_logits(ids).cpu()

    @abstractmethod
    def prepare(self) -> None:
        """Captures what is launched for a token in CUDA graphs; runs it once before, so that all kernels are loaded."""

    @abstractmethod
    def _run_token(self) -> None:
        """Runs the token in `_control`, and asks for its logits to come to `_logits`."""

    def _is_alone(self, ids: list[int]) -> bool:
        """Whether these are one token, for which nothing before has to be computed anew."""
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
            self._done.synchronize()  # the one wait of a token: its logits are wanted
        self._ids[before:] = [token]
        self.cache.num_tokens += 1
        return self._logits

    def _take_angles(self, is_long: bool) -> None:
        """Where a long sequence turns by other angles, puts those in their place."""
        if is_long == self._tables_are_long:
            return
        context = self.cache.context_tokens
        angles = self._rope(torch.arange(context, device=self.device), context if is_long else 1)
        for table, new in zip(self._tables, angles, strict=True):
            table.copy_(new)
        self._tables_are_long = is_long

    def _on_host(self, like: Tensor) -> Tensor:
        """Page-locked memory of a tensor's shape."""
        return torch.zeros(like.shape, dtype=like.dtype, pin_memory=self._is_cuda)

    def _num_sms(self) -> int:
        if not self._is_cuda:
            return _INTERPRETED_SMS
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    @torch.inference_mode()
    def _captured(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Launches as one graph. They run once before, so that all kernels are compiled and loaded."""
        if not self._is_cuda:
            return launch
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # untyped in torch
        stream.wait_stream(torch.cuda.current_stream())  # what is launched here uses what was filled there
        with torch.cuda.stream(stream):
            launch()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                launch()
        return graph.replay


class TokenStep:
    """The launches of one token, and room for its experts' work.

    Args:    num_sms: multiprocessors of the card, which say how work is divided.
    """

    def __init__(self, weights: GpuWeights, layers: TokenLayers, num_sms: int) -> None:
        spec, device = weights.spec, layers.x.device
        self._weights, self._layers = weights, layers
        f, k = spec.expert.intermediate_size, spec.router.num_experts_per_tok
        self._selection = Selection.allocate(k, f, device)
        self._partials = torch.zeros((k, num_partials(k, f, num_sms), spec.hidden_size), device=device)

    def run(self) -> None:
        """Launches everything, from the token in `control` to `logits`."""
        layers, spec = self._layers, self._weights.spec
        layers.start()
        layer_idx = 0
        for layer in range(spec.num_hidden_layers):
            shared = layers.run(layer)
            if layer in spec.moe_layers:
                self._experts(layer_idx)
                reduce(
                    self._partials, layers.router_weights, layers.x,
                    residual=layers.x, shared=shared, scale=spec.residual_multiplier,
                )  # fmt: skip
                layer_idx += 1
        layers.finish()

    def _experts(self, layer_idx: int) -> None:
        """The partial sums of the experts that the token goes to, of which what is not there is pulled."""
        layers, held = self._layers, self._weights.cache.layers[layer_idx]
        experts = layers.routes[layer_idx]
        held.lru_update(experts)
        held.gather_selectors_from_host(experts)
        select(layers.normed, experts, held.tables, self._selection)
        held.gather_records_from_host(experts, self._selection)
        neurons(layers.normed, experts, held.tables, self._selection, self._partials)
