"""The attention of a model's layers: one kind, or other kinds in some layers."""

from dataclasses import dataclass

from moe_pack.formats.parts import part, positions
from moe_pack.formats.parts.compressed import CompressedSpec
from moe_pack.formats.parts.grouped import GroupedQuerySpec
from moe_pack.formats.parts.latent import LatentSpec
from moe_pack.formats.parts.relative import RelativeSpec

AttentionSpec = GroupedQuerySpec | LatentSpec | RelativeSpec | CompressedSpec


@dataclass(frozen=True, slots=True)
class OtherAttentionSpec:
    """The attention of some `layers`, rising, that differs from that of all other layers, and its rotary positions."""

    layers: tuple[int, ...]
    attention: GroupedQuerySpec | LatentSpec | CompressedSpec
    rope: positions.RopeSpec | None


def attention_fault(attention: AttentionSpec, rope: positions.RopeSpec | None, num_layers: int) -> str | None:
    """Returns why attention with these rotary positions cannot run in a model of so many layers, or None."""
    fault = part.numbers_fault({"attention scale": attention.scale})
    return fault or attention.fault(rope, num_layers)


def rope_fault(rope: positions.RopeSpec | None, attention: AttentionSpec) -> str | None:
    """Returns why rotary positions do not go with this attention, or None."""
    return None if rope is None else attention.rope_fault(rope) or rope.fault()


def others_fault(
    others: tuple[OtherAttentionSpec, ...], attention: AttentionSpec, attending: list[int], num_layers: int
) -> str | None:
    """Returns why layers cannot have attention of their own, or None.

    Args:    attention: that of the other layers.   attending: the layers with attention, of `num_layers`.
    """
    listed = [layer for other in others for layer in other.layers]
    if len(set(listed)) < len(listed) or (listed and len(listed) >= len(attending)):
        return "others must list each layer once at most, and not all layers"
    if others and attention.kind == "relative":
        return f"{attention.kind} attention cannot have others"
    for other in others:
        if not other.layers or not part.are_layers(other.layers, num_layers) or set(other.layers) - set(attending):
            return "others must list decoder layers with attention, at least one each, in rising order"
        sizes = other.attention.sizes | ({"rotary_dim": other.rope.rotary_dim} if other.rope else {})
        for name, size in sizes.items():
            if not 0 < size < 2**31:
                return f"{name} of others is {size}, expected 1 to 2^31 - 1"
        fault = attention_fault(other.attention, other.rope, num_layers) or rope_fault(other.rope, other.attention)
        if fault is not None:
            return fault
    return None
