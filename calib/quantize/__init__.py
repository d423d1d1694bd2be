"""Quantizers: from weights to the codes of a pack."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.calib.quantize.experts import (
        BLOCK_NEURONS,
        MAX_OTHER_TOKENS,
        MAX_OWN_TOKENS,
        Calibration,
        DownRows,
        ExpertMoments,
        ExpertQuantizer,
        ExpertTokens,
        calibration_bytes,
        needs_inputs,
        repeats_between,
        usual_repeats,
    )
    from moe_pack.calib.quantize.guard import ExpertLoss, GuardedQuantizer
    from moe_pack.calib.quantize.options import Rotate, RotateChoice
    from moe_pack.calib.quantize.plain import RowQuantizer, check_finite
    from moe_pack.calib.quantize.rotation import UNROTATED, LayerRotation, measured_rotation, rotation_vectors
    from moe_pack.calib.quantize.trellis import UnrepresentableError
else:
    __getattr__ = face(__name__)
