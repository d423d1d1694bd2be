"""GGUF files, the format of llama.cpp: read as checkpoints of our families, and what a file to write has."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.formats.gguf.files import GgufFiles, find_gguf
    from moe_pack.formats.gguf.placing import AnyPlacement, ConstantPlacement, ExpertPlacement, Placement
    from moe_pack.formats.gguf.vocabulary import vocabulary_fields, vocabulary_notes
    from moe_pack.formats.gguf.writing import (
        block_values,
        encode_rows,
        gguf_model,
        lay_out_parts,
        tensor_bytes,
    )
else:
    __getattr__ = face(__name__)

__all__ = [
    "AnyPlacement",
    "ConstantPlacement",
    "ExpertPlacement",
    "GgufFiles",
    "Placement",
    "block_values",
    "encode_rows",
    "find_gguf",
    "gguf_model",
    "lay_out_parts",
    "tensor_bytes",
    "vocabulary_fields",
    "vocabulary_notes",
]
