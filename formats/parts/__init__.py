"""Parts of what a model computes, as data: attention, mixers, rotary positions, residuals, n-grams."""

from moe_pack.formats.parts.added import added, is_added
from moe_pack.formats.parts.attention import (
    PROJECTIONS,
    AttentionSpec,
    BlockIndexerSpec,
    GroupedQuerySpec,
    IndexerSpec,
    LatentSpec,
    OtherAttentionSpec,
    OutputGateSpec,
    Projection,
    RelativeSpec,
    TemperatureSpec,
)
from moe_pack.formats.parts.mixers import (
    GatedDeltaSpec,
    HalvesSpec,
    KimiDeltaSpec,
    Mamba2Spec,
    MambaSpec,
    MixerSpec,
    ShortConvSpec,
)
from moe_pack.formats.parts.ngrams import NgramSpec
from moe_pack.formats.parts.residual import (
    GatedStreamsSpec,
    MixedStreamsSpec,
    NormedResidualSpec,
    ParallelResidualSpec,
    ResidualSpec,
    ShortcutResidualSpec,
)
from moe_pack.formats.parts.roles import DenseRole
from moe_pack.formats.parts.rope import Llama3Spec, LongRopeSpec, ProportionalSpec, RopeSpec, YarnSpec

__all__ = [
    "PROJECTIONS",
    "AttentionSpec",
    "BlockIndexerSpec",
    "DenseRole",
    "GatedDeltaSpec",
    "GatedStreamsSpec",
    "GroupedQuerySpec",
    "HalvesSpec",
    "IndexerSpec",
    "KimiDeltaSpec",
    "LatentSpec",
    "Llama3Spec",
    "LongRopeSpec",
    "Mamba2Spec",
    "MambaSpec",
    "MixedStreamsSpec",
    "MixerSpec",
    "NgramSpec",
    "NormedResidualSpec",
    "OtherAttentionSpec",
    "OutputGateSpec",
    "ParallelResidualSpec",
    "Projection",
    "ProportionalSpec",
    "RelativeSpec",
    "ResidualSpec",
    "RopeSpec",
    "ShortConvSpec",
    "ShortcutResidualSpec",
    "TemperatureSpec",
    "YarnSpec",
    "added",
    "is_added",
]
