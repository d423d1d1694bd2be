"""Runs a model over text, layer by layer in bounded memory, and measures what planner and runtime need to know."""

from moe_pack.calib.quantize import RowQuantizer, UnholdableError, check_finite

__all__ = ["RowQuantizer", "UnholdableError", "check_finite"]
