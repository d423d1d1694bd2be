"""Parts of what a model computes, as data: rotary positions, and mixers in place of attention."""

from moe_pack.formats.parts.mixers import (
    GatedDeltaSpec,
    HalvesSpec,
    KimiDeltaSpec,
    Mamba2Spec,
    MambaSpec,
    MixerSpec,
    ShortConvSpec,
)
from moe_pack.formats.parts.rope import Llama3Spec, LongRopeSpec, RopeSpec, YarnSpec

__all__ = [
    "GatedDeltaSpec",
    "HalvesSpec",
    "KimiDeltaSpec",
    "Llama3Spec",
    "LongRopeSpec",
    "Mamba2Spec",
    "MambaSpec",
    "MixerSpec",
    "RopeSpec",
    "ShortConvSpec",
    "YarnSpec",
]
