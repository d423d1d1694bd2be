"""Model families, one file a `model_type`: how their config.json and tensor names are read; and checkpoints."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.formats.families.checkpoint import Checkpoint, model_spec
    from moe_pack.formats.families.claiming import SourceMatrix
    from moe_pack.formats.families.encodings import SCALE_BLOCK
    from moe_pack.formats.families.prediction import PredictionLayer
    from moe_pack.formats.families.registry import short_names
    from moe_pack.formats.families.source_reader import SourceReader
else:
    __getattr__ = face(__name__)
