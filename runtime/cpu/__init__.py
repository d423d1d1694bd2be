"""The native CPU kernels."""

from moe_pack.runtime.cpu.kernels import (
    MAX_ODD_FACTOR,
    ExpertRows,
    Kernels,
    MapCutError,
    PagedRows,
    SelectedNeurons,
    TrellisRows,
    expert_numbers,
    extent_rows,
    is_available,
    num_cpus,
    open_kernels,
    row_numbers,
    search_trellis,
    stored_numbers,
    why_unavailable,
)

__all__ = [
    "MAX_ODD_FACTOR",
    "ExpertRows",
    "Kernels",
    "MapCutError",
    "PagedRows",
    "SelectedNeurons",
    "TrellisRows",
    "expert_numbers",
    "extent_rows",
    "is_available",
    "num_cpus",
    "open_kernels",
    "row_numbers",
    "search_trellis",
    "stored_numbers",
    "why_unavailable",
]
