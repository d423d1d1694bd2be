"""Dispatches by the kind of attention. A kind's module is loaded when a layer has it."""

from torch import Tensor

from moe_pack.formats import parts
from moe_pack.runtime.model.caches import dtypes, layer_cache, ropes
from moe_pack.runtime.model.compute.weights import Weights


def attend(
    x: Tensor,
    weights: Weights,
    layer: int,
    cache: layer_cache.LayerCache | layer_cache.Batch[layer_cache.LayerCache],
    angles: ropes.Angles,
) -> Tensor:
    """Returns a layer's attention for new tokens x float32 [T, d], normed, of one sequence or of several."""
    spec, sequences = weights.spec.attention_of(layer), layer_cache.each_sequence(cache, len(x))
    if isinstance(spec, parts.GroupedQuerySpec):
        from moe_pack.runtime.model.attention import grouped

        return grouped.Grouped(weights, spec, layer).attend(x, sequences, angles)
    if isinstance(spec, parts.CompressedSpec):
        from moe_pack.runtime.model.attention import compressed

        return compressed.Compressed(weights, spec, layer).attend(x, sequences, angles)
    assert isinstance(spec, parts.LatentSpec), "models with relative positions are run by encoder_decoder"
    from moe_pack.runtime.model.attention import latent

    return latent.Latent(weights, spec, layer).attend(x, sequences, angles)


def cache_shape(spec: parts.AttentionSpec, dtype: dtypes.KvDtype) -> layer_cache.CacheShape:
    """Returns the cache of a layer with this attention."""
    if isinstance(spec, parts.GroupedQuerySpec):
        from moe_pack.runtime.model.attention import grouped

        return grouped.cache_shape(spec, dtype)
    if isinstance(spec, parts.LatentSpec):
        from moe_pack.runtime.model.attention import latent

        return latent.cache_shape(spec, dtype)
    if isinstance(spec, parts.CompressedSpec):
        from moe_pack.runtime.model.attention import compressed

        return compressed.cache_shape(spec, dtype)
    from moe_pack.runtime.model.attention import relative

    return relative.cache_shape(spec, dtype)
