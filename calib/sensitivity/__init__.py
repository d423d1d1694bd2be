"""Sensitivity: how much the model's predictions change if weights are stored in fewer bits."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.calib.sensitivity.costs import Cost, Trial, expert_multiplications, half_multiplications, layers_cost
    from moe_pack.calib.sensitivity.effects import (
        DENSE_WIDTHS,
        MOST_COPIES,
        MOST_GROWTH,
        Effects,
        LayerLosses,
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
