"""Turns checkpoints into packs: quantizes, writes, checks. `moe-pack` is its command."""

from moe_pack.convert.compare import LogitsError, MatrixError, compare_logits, compare_weights, logits_error
from moe_pack.convert.hub import find_checkpoint
from moe_pack.convert.pipeline import Conversion, Progress, convert, layout_for

__all__ = [
    "Conversion",
    "LogitsError",
    "MatrixError",
    "Progress",
    "compare_logits",
    "compare_weights",
    "convert",
    "find_checkpoint",
    "layout_for",
    "logits_error",
]
