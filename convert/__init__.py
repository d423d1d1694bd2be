"""Turns checkpoints into packs: quantizes, writes, checks. `moe-pack` is its command."""

from moe_pack.convert.compare import LogitsError, MatrixError, compare_logits, compare_weights, logits_error
from moe_pack.convert.edgemoe_widths import EDGEMOE_WIDTHS, edgemoe_plan, widths_for_bytes, widths_for_loss
from moe_pack.convert.hub import find_checkpoint
from moe_pack.convert.pipeline import Conversion, convert, layout_for

__all__ = [
    "EDGEMOE_WIDTHS",
    "Conversion",
    "LogitsError",
    "MatrixError",
    "compare_logits",
    "compare_weights",
    "convert",
    "edgemoe_plan",
    "find_checkpoint",
    "layout_for",
    "logits_error",
    "widths_for_bytes",
    "widths_for_loss",
]
