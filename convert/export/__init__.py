"""Writes packs as checkpoints for other programs."""

from moe_pack.convert.export.checkpoints import (
    ExportResult,
    ExportWork,
    compare_export,
    export_compressed,
    export_plain,
)
from moe_pack.convert.export.compressed import CodeFormat
from moe_pack.convert.export.folder import SHARD_BYTES
from moe_pack.convert.export.gguf import GGUF_BYTES, GgufType, export_gguf
from moe_pack.convert.export.source import Dtype

__all__ = [
    "GGUF_BYTES",
    "SHARD_BYTES",
    "CodeFormat",
    "Dtype",
    "ExportResult",
    "ExportWork",
    "GgufType",
    "compare_export",
    "export_compressed",
    "export_gguf",
    "export_plain",
]
