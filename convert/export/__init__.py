"""Writes packs as checkpoints for other programs."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.convert.export.checkpoints import (
        ExportResult,
        ExportWork,
        compare_export,
        export_compressed,
        export_plain,
    )
    from moe_pack.convert.export.compressed import CodeFormat
    from moe_pack.convert.export.folder import SHARD_BYTES
    from moe_pack.convert.export.gguf import GGUF_BYTES, export_gguf
else:
    __getattr__ = face(__name__)

__all__ = [
    "GGUF_BYTES",
    "SHARD_BYTES",
    "CodeFormat",
    "ExportResult",
    "ExportWork",
    "compare_export",
    "export_compressed",
    "export_gguf",
    "export_plain",
]
