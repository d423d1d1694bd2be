"""Parts of what a model computes, as data: attention, mixers, rotary positions, residuals, n-grams."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.formats.parts.added import is_added
    from moe_pack.formats.parts.attention import (
        PROJECTIONS,
        AttentionSpec,
        BlockIndexerSpec,
        CompressedSpec,
        CompressionSpec,
        EntryIndexerSpec,
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
        LightningSpec,
        Mamba2Spec,
        MambaSpec,
        MixerSpec,
        ShortConvSpec,
        StateShape,
        halves_fault,
        mixer_fault,
    )
    from moe_pack.formats.parts.ngrams import NgramSpec, ngrams_fault
    from moe_pack.formats.parts.positions import RopeSpec
    from moe_pack.formats.parts.residual import (
        FactorsSpec,
        GatedNormsSpec,
        GatedStreamsSpec,
        MixedStreamsSpec,
        NormedResidualSpec,
        NormedStateSpec,
        ParallelResidualSpec,
        ResidualSpec,
        ShortcutResidualSpec,
    )
    from moe_pack.formats.parts.roles import DenseRole
else:
    __getattr__ = face(__name__)

__all__ = [
    "PROJECTIONS",
    "AttentionSpec",
    "BlockIndexerSpec",
    "CompressedSpec",
    "CompressionSpec",
    "DenseRole",
    "EntryIndexerSpec",
    "FactorsSpec",
    "GatedDeltaSpec",
    "GatedNormsSpec",
    "GatedStreamsSpec",
    "GroupedQuerySpec",
    "HalvesSpec",
    "IndexerSpec",
    "KimiDeltaSpec",
    "LatentSpec",
    "LightningSpec",
    "Mamba2Spec",
    "MambaSpec",
    "MixedStreamsSpec",
    "MixerSpec",
    "NgramSpec",
    "NormedResidualSpec",
    "NormedStateSpec",
    "OtherAttentionSpec",
    "OutputGateSpec",
    "ParallelResidualSpec",
    "Projection",
    "RelativeSpec",
    "ResidualSpec",
    "RopeSpec",
    "ShortConvSpec",
    "ShortcutResidualSpec",
    "StateShape",
    "TemperatureSpec",
    "halves_fault",
    "is_added",
    "mixer_fault",
    "ngrams_fault",
]
