"""Sensitivity: how much the model's predictions change if weights are stored in fewer bits."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.calib.sensitivity.costs import (
        Cost,
        Trial,
        expert_multiplications,
        half_multiplications,
        kind_of,
        kinds_of_layers,
        prediction_cost,
        stage_of_phases,
    )
    from moe_pack.calib.sensitivity.effects import (
        DENSE_WIDTHS,
        MOST_COPIES,
        MOST_GROWTH,
        Effects,
        LayerLosses,
        Level,
        copies_of,
        effects_of,
        head_pieces,
        log_probabilities,
    )
    from moe_pack.calib.sensitivity.errors import (
        ABSMAX_FORMATS,
        GROUP,
        SPARSITIES,
        WIDTHS,
        base_width,
        calibrated_formats,
        compared_formats,
        quantized_formats,
        roundable_roles,
    )
    from moe_pack.calib.sensitivity.exact import ExactPass
    from moe_pack.calib.sensitivity.rotated import is_rotated_better
    from moe_pack.calib.sensitivity.stage import SensitivityPass
else:
    __getattr__ = face(__name__)

__all__ = [
    "ABSMAX_FORMATS",
    "DENSE_WIDTHS",
    "GROUP",
    "MOST_COPIES",
    "MOST_GROWTH",
    "SPARSITIES",
    "WIDTHS",
    "Cost",
    "Effects",
    "ExactPass",
    "LayerLosses",
    "Level",
    "SensitivityPass",
    "Trial",
    "base_width",
    "calibrated_formats",
    "compared_formats",
    "copies_of",
    "effects_of",
    "expert_multiplications",
    "half_multiplications",
    "head_pieces",
    "is_rotated_better",
    "kind_of",
    "kinds_of_layers",
    "log_probabilities",
    "prediction_cost",
    "quantized_formats",
    "roundable_roles",
    "stage_of_phases",
]
