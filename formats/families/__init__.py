"""Model families, one file a `model_type`: how their config.json and tensor names are read; and checkpoints."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.formats.families.checkpoint import Checkpoint, model_spec
    from moe_pack.formats.families.family import SCALE_BLOCK, SourceMatrix
    from moe_pack.formats.families.prediction import PredictionLayer
    from moe_pack.formats.families.registry import short_names
    from moe_pack.formats.families.source_reader import SourceReader
    from moe_pack.formats.families.text_files import text_config
else:
    __getattr__ = face(__name__)

__all__ = [
    "SCALE_BLOCK",
    "Checkpoint",
    "PredictionLayer",
    "SourceMatrix",
    "SourceReader",
    "model_spec",
    "short_names",
    "text_config",
]
