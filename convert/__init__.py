"""Turns checkpoints into packs: quantizes, writes, checks. `moe-pack` is its command."""

from moe_pack.convert.pipeline import Conversion, Progress, convert, layout_for

__all__ = ["Conversion", "Progress", "convert", "layout_for"]
