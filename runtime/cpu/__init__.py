"""The native CPU kernels."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.runtime.cpu.kernels import (
        CACHE_KINDS,
        MAX_ODD_FACTOR,
        MOST_PRODUCTS,
        PANEL_ROWS,
        Bytes,
        CachedRows,
        ExpertRows,
        ExpertWork,
        Kernels,
        MapCutError,
        PagedRows,
        SelectedNeurons,
        TrellisRows,
        TrellisTables,
        expert_numbers,
        extent_rows,
        is_available,
        open_kernels,
        panel_expert,
        panel_numbers,
        row_numbers,
        search_trellis,
        stored_numbers,
        why_unavailable,
    )
    from moe_pack.runtime.cpu.layers import (
        FloatAngles,
        Floats,
        LayerCutError,
        LayerFacts,
        LayerMatrices,
        LayerMatrix,
        LayerPass,
        LayerVectors,
        NativeLayers,
        SequenceCaches,
    )
else:
    __getattr__ = face(__name__)
