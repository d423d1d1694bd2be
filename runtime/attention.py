"""Attention over a key-value cache: one function a kind. This file has grouped queries; latent_attention the other."""

from torch import Tensor

from moe_pack.formats import GroupedQuerySpec, LatentSpec
from moe_pack.runtime.kv_cache import LayerCache
from moe_pack.runtime.latent_attention import attend_latent
from moe_pack.runtime.matrix import linear
from moe_pack.runtime.operations import HeadNorms, seen_positions
from moe_pack.runtime.rope import Angles
from moe_pack.runtime.weights import Weights


def attend(x: Tensor, weights: Weights, layer: int, cache: LayerCache, angles: Angles) -> Tensor:
    """One layer's attention for new tokens; their keys and values enter the cache after those already there.

    Args:    x: float32 [T, d], normed.   angles: of the T positions, from `Rope`.
    Returns: float32 [T, d].
    """
    spec = weights.spec.attention
    if isinstance(spec, GroupedQuerySpec):
        return _attend_grouped(x, weights, spec, layer, cache, angles)
    assert isinstance(spec, LatentSpec), "with relative attention encoder_decoder runs"
    seen = seen_positions(None, 0, cache.num_tokens, len(x), x.device)
    return attend_latent(x, weights, spec, layer, cache, angles, seen)


def _attend_grouped(
    x: Tensor, weights: Weights, spec: GroupedQuerySpec, layer: int, cache: LayerCache, angles: Angles
) -> Tensor:
    role, eps, operations = f"layers.{layer}.attention", weights.spec.norm.eps, weights.operations

    def project(name: str, inputs: Tensor) -> Tensor:
        bias = weights.vector(f"{role}.{name}_bias") if name in spec.bias else None
        return linear(inputs, weights.matrix(f"{role}.{name}"), bias)

    q, k, v = (project(name, x) for name in "qkv")
    norms = None
    if spec.qk_norm != "none":
        norms = HeadNorms(weights.vector(f"{role}.q_norm"), weights.vector(f"{role}.k_norm"), eps)
    if norms is not None and spec.qk_norm == "projection":
        q, k = (operations.rms_norm(each, norm, eps) for each, norm in ((q, norms.q), (k, norms.k)))
        norms = None
    sinks = weights.vector(f"{role}.sinks") if spec.sinks else None
    interleaved = weights.spec.rotation.interleaved
    mixed = operations.attend((q, k, v), norms, angles, interleaved, cache, spec, spec.window(layer), sinks)
    return project("o", mixed)
