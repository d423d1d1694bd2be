"""Writes packs as checkpoints for other programs."""

from moe_pack.convert.export.checkpoints import (
    ExportResult,
    ExportWork,
    compare_export,
    export_compressed,
    export_plain,
)
from moe_pack.convert.export.compressed import CodeFormat
from moe_pack.convert.export.source import Dtype

__all__ = [
    "CodeFormat",
    "Dtype",
    "ExportResult",
    "ExportWork",
    "compare_export",
    "export_compressed",
    "export_plain",
]
