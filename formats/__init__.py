"""Packs and checkpoints on disk: model specifications, the pack format, its readers and its writers."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.formats.base.commands import NO_PROGRESS, Progress, option, size_text
    from moe_pack.formats.base.errors import (
        CheckpointError,
        ConversionError,
        PackError,
        PlanError,
        RunError,
        UsageError,
    )
    from moe_pack.formats.base.json_files import canonical, dump, load, parse
    from moe_pack.formats.pack.layouts import DISK_BLOCK_BYTES, ExpertLayout, PackLayout, RowLayout
    from moe_pack.formats.pack.plans import (
        BF16,
        ROW_GROUP,
        ExpertFormat,
        PartFormat,
        Plan,
        Quantizer,
        part_format,
        trellis_format,
        uniform_plan,
    )
    from moe_pack.formats.pack.reader import Pack
    from moe_pack.formats.pack.safetensors import RangeReader
    from moe_pack.formats.parts.part import NormSpec
    from moe_pack.formats.parts.specs import (
        MATRICES,
        ExpertSpec,
        LimitedFunction,
        Matrix,
        ModelSpec,
        NeuronFunction,
        RouterSpec,
        Selector,
        SharedExpertSpec,
        dense_roles,
    )
else:
    __getattr__ = face(__name__)
