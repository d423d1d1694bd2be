"""Drafts: tokens that are proposed cheaply and verified together in one forward pass."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.runtime.drafts.drafter import Drafts
    from moe_pack.runtime.drafts.gate import MOST_DRAFTED, Gate
    from moe_pack.runtime.drafts.ngrams import NgramDrafter
    from moe_pack.runtime.drafts.prediction_layer import PredictionDrafter, prediction_bytes
    from moe_pack.runtime.drafts.prediction_weights import PredictionWeights
else:
    __getattr__ = face(__name__)

__all__ = [
    "MOST_DRAFTED",
    "Drafts",
    "Gate",
    "NgramDrafter",
    "PredictionDrafter",
    "PredictionWeights",
    "prediction_bytes",
]
