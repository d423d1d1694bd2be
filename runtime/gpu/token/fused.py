"""Parts of models that run in fewer launches than their operations in torch: kernels do several steps at once.

A part that has a way here has it beside the general one of `attention` and `layers`, which is its twin: what a part
needs for a way here is said by a function of its spec. Importing this needs Triton.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.runtime.gpu.kernels import matmul
from moe_pack.runtime.gpu.kernels.attention import QkNorms
from moe_pack.runtime.gpu.kernels.elementwise import FUNCTIONS, Norm
from moe_pack.runtime.gpu.kernels.router import KINDS
from moe_pack.runtime.gpu.token.attention import RowAttention, RowGrouped, RowLatent
from moe_pack.runtime.gpu.weights import stored
from moe_pack.runtime.model import PackWeights

__all__ = ["FUNCTIONS", "attention_of", "is_plain", "norm_of", "routes", "stored"]


ENABLED = True  # False: every part runs in the general way, which gives the same within rounding


def norm_of(weights: PackWeights, role: str) -> Norm:
    """Returns a norm of the kind that the spec names."""
    bias = weights.vector(f"{role}_bias") if weights.spec.norm.kind == "layer" else None
    return Norm(weights.vector(role), bias, weights.spec.norm.eps)


def is_plain(spec: formats.ModelSpec) -> bool:
    """Whether halves of layers get the normed hidden states, and add to them, as kernels do first and last."""
    return ENABLED and spec.residual is None and not spec.norm.unbiased


def routes(spec: formats.ModelSpec) -> bool:
    """Whether a kernel routes, the norm before it included."""
    router = spec.router
    is_other = router.on_input or router.input_scale or router.expert_scale or router.zero_outside
    return is_plain(spec) and router.kind in KINDS and not (is_other or router.num_identity or router.table_layers)


def is_fused(spec: formats.ModelSpec, layer: int) -> bool:
    """Whether a layer's attention runs from the hidden states to the hidden states in kernels."""
    own = spec.attention_of(layer)
    if not is_plain(spec) or spec.mixer_of(layer) is not None or spec.rope_of(layer) is None:
        return False
    if isinstance(own, parts.LatentSpec):
        is_other = own.gated or own.gate is not None or own.sinks or own.indexer is not None
        return not is_other and own.temperature is None and (own.q_latent_scale, own.kv_latent_scale) == (1, 1)
    if not isinstance(own, parts.GroupedQuerySpec):
        return False
    is_other = own.gate is not None or own.temperature is not None or own.indexer is not None
    has_other_values = own.keys_as_values or own.v_norm or own.value_head_dim is not None or own.value_scale != 1.0
    is_usual = own.rotated_layers is None and not own.chunked and own.qk_norm not in ("rotated_head", "unit")
    return is_usual and not is_other and not has_other_values and own.clip is None


def is_chained(spec: formats.ModelSpec, layer: int) -> bool:
    """Whether a layer's attention runs in kernels alone, which may start before the one before has ended."""
    own = spec.attention_of(layer)
    return is_fused(spec, layer) and not (isinstance(own, parts.GroupedQuerySpec) and own.gated)


def has_mixer(weights: PackWeights, layer: int) -> bool:
    """Whether a layer has a mixer, whose first and last products kernels load."""
    mixer = weights.spec.mixer_of(layer)
    if mixer is None:
        return False
    from moe_pack.runtime.model import mixers  # most models have none

    rows = [stored(weights, f"layers.{layer}.mixer.{name}").raw for name in (*mixers.projections_of(mixer).names, "o")]
    return all(each.shape[1] * each.element_size() % 16 == 0 for each in rows)


class LayerAttention(Protocol):
    """The attention of the layers of one kind."""

    def run(self, layer: int, x: Tensor) -> None:
        """Adds a layer's attention to x, float32 [T, d]."""


class GroupedAttention:
    """Attention with grouped queries, in four launches, or three; with gates in three more. Owns its buffers."""

    def __init__(
        self, weights: PackWeights, spec: parts.GroupedQuerySpec, num_rows: int, attends: RowAttention
    ) -> None:
        self._weights, self._spec, self._attends = weights, spec, attends
        queries, keys, values = (
            heads * width
            for heads, width in (
                (spec.num_heads * (2 if spec.gated else 1), spec.head_dim),  # a head's gates follow its queries
                (spec.num_kv_heads, spec.head_dim),
                (spec.num_kv_heads, spec.value_dim),
            )
        )
        device = attends.device
        self._q, self._k, self._v = (torch.zeros((num_rows, each), device=device) for each in (queries, keys, values))

    def run(self, layer: int, x: Tensor) -> None:
        weights, spec, role = self._weights, self._spec, f"layers.{layer}.attention"
        projections: tuple[tuple[parts.Projection, Tensor], ...] = (("q", self._q), ("k", self._k), ("v", self._v))
        products = [
            matmul.Product(stored(weights, f"{role}.{name}"), out, self._bias(role, name)) for name, out in projections
        ]
        matmul.normed_gemv(x, norm_of(weights, f"{role}_norm"), products)
        norms, own = None, self._attends.of(layer)
        assert isinstance(own, RowGrouped), "a layer of this kind"
        if spec.qk_norm != "none":
            norms = QkNorms(weights.vector(f"{role}.q_norm"), weights.vector(f"{role}.k_norm"), weights.spec.norm.eps)
        q, gates = self._q, None
        if spec.gated:
            q, gates = self._q.view(len(self._q), spec.num_heads, 2, -1).unbind(2)
        mixed = own.mixed((q.flatten(1), self._k, self._v), norms, spec.qk_norm == "projection")
        if gates is not None:
            mixed.view_as(gates).mul_(gates.sigmoid())
        bias, scale = self._bias(role, "o"), weights.spec.residual_multiplier
        matmul.gemv(mixed, stored(weights, f"{role}.o"), x, bias=bias, residual=x, scale=scale)

    def _bias(self, role: str, name: parts.Projection) -> Tensor | None:
        return self._weights.vector(f"{role}.{name}_bias") if name in self._spec.bias else None


class LatentAttention:
    """Multi-head latent attention with absorbed projections. Owns its buffers."""

    def __init__(self, weights: PackWeights, spec: parts.LatentSpec, num_rows: int, attends: RowAttention) -> None:
        self._weights, self._spec, self._attends = weights, spec, attends
        heads, rank, rope = spec.num_heads, spec.kv_lora_rank, spec.qk_rope_head_dim

        def zeros(width: int) -> Tensor:
            return torch.zeros((num_rows, width), device=attends.device)

        self._q, self._low = zeros(heads * (spec.qk_nope_head_dim + rope)), zeros(spec.q_lora_rank or 0)
        self._kv = zeros(rank + rope)

    def run(self, layer: int, x: Tensor) -> None:
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
        own = self._attends.of(layer)
        assert isinstance(own, RowLatent), "a layer of this kind"
        mixed, scale = own.mixed((self._q, self._kv)), weights.spec.residual_multiplier
        matmul.gemv(mixed, stored(weights, f"{role}.o"), x, residual=x, scale=scale)


def attention_of(weights: PackWeights, num_rows: int, attends: RowAttention) -> Callable[[int], LayerAttention | None]:
    """Returns the attention of a layer whose way is here, by layer; None for other layers."""
    spec, kinds = weights.spec, dict[int, LayerAttention]()
    for layer in range(spec.num_hidden_layers):
        kind, own = spec.attention_kind(layer), spec.attention_of(layer)
        if kind not in kinds and is_fused(spec, layer):
            if isinstance(own, parts.LatentSpec):
                kinds[kind] = LatentAttention(weights, own, num_rows, attends)
            elif isinstance(own, parts.GroupedQuerySpec):
                kinds[kind] = GroupedAttention(weights, own, num_rows, attends)
    return lambda layer: kinds[spec.attention_kind(layer)] if is_fused(spec, layer) else None
