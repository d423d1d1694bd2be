"""What a layer may have in place of attention: mixers of tokens that keep a state of fixed size, as data."""

from moe_pack.formats.mixers.kinds import GatedDeltaSpec, KimiDeltaSpec, Mamba2Spec, MixerSpec, ShortConvSpec

__all__ = ["GatedDeltaSpec", "KimiDeltaSpec", "Mamba2Spec", "MixerSpec", "ShortConvSpec"]
