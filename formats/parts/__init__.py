"""Parts of what a model computes, as data: attention, mixers, rotary positions, residuals, n-grams."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.formats.parts.attention import AttentionSpec, OtherAttentionSpec
    from moe_pack.formats.parts.compressed import CompressedSpec, CompressionSpec, EntryIndexerSpec
    from moe_pack.formats.parts.grouped import PROJECTIONS, BlockIndexerSpec, GroupedQuerySpec, Projection
    from moe_pack.formats.parts.heads import OutputGateSpec, TemperatureSpec
    from moe_pack.formats.parts.latent import IndexerSpec, LatentSpec
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
    )
    from moe_pack.formats.parts.ngrams import NgramSpec
    from moe_pack.formats.parts.part import DenseRole
    from moe_pack.formats.parts.positions import RopeSpec
    from moe_pack.formats.parts.relative import RelativeSpec
    from moe_pack.formats.parts.residual import (
        FactorsSpec,
        GatedNormsSpec,
        GatedStreamsSpec,
        MixedStreamsSpec,
        NormedResidualSpec,
        NormedStateSpec,
        ParallelResidualSpec,
        ShortcutResidualSpec,
    )
else:
    __getattr__ = face(__name__)
