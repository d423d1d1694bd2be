"""Formats by a short name: the bits of codes in groups of 64, a trellis, or a codec that has one format."""

from moe_pack.formats import (
    MATRICES,
    ExpertFormat,
    ExpertLayout,
    ExpertSpec,
    PartFormat,
    Selector,
    part_format,
    trellis_format,
)
from moe_pack.formats.pack.layouts import expert_layout
from moe_pack.formats.pack.plans import E5M2, KEPT, MXFP4, TRELLIS_WIDTHS

Name = int | str
CODECS: dict[str, PartFormat] = {part.codec: part for part in KEPT}
TRELLISES = tuple(f"t{width}" for width in TRELLIS_WIDTHS)


def named_format(name: Name, group: int = 64) -> PartFormat:
    """A part's format: 1 to 8 and 16 bits, `t4` to `t8` for a trellis of that width, or `fp8`, `mxfp4`, `e5m2`."""
    if isinstance(name, int):
        return part_format(name, group)
    return trellis_format(int(name[1:]), group) if name in TRELLISES else CODECS[name]


def named_expert(name: Name, group: int = 64) -> ExpertFormat:
    """An expert's: all matrices alike, but with `mxfp4` down is `e5m2`, as it comes from such a checkpoint."""
    part = named_format(name, group)
    return ExpertFormat(part, part, E5M2 if part == MXFP4 else part)


def gpt_oss_layout(selector: Selector) -> ExpertLayout:
    """An expert of the published models, whose parts begin at whatever byte."""
    return expert_layout(
        named_expert("mxfp4"), selector, ExpertSpec("clamped_swiglu", 2880, MATRICES, MATRICES, 2880), 2880
    )


def label(name: Name) -> str:
    """How calls and tests say it: `w4`, `t4`, `fp8`."""
    return name if isinstance(name, str) else f"w{name}"
