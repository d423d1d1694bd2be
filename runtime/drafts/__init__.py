"""Drafts: tokens that are proposed cheaply and verified together in one forward pass."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.runtime.drafts.drafter import MOST_DRAFTED, Drafts, Gate, NgramDrafter
    from moe_pack.runtime.drafts.prediction_layer import PredictionDrafter, PredictionWeights, prediction_bytes
else:
    __getattr__ = face(__name__)
