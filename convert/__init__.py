"""Makes packs from checkpoints, measures what they lost, and checks them; makes synthetic packs."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.convert.autopack import loss_text
    from moe_pack.convert.fixed_costs import measure_fixed_costs
    from moe_pack.convert.hub import find_checkpoint
    from moe_pack.convert.pipeline import ConversionResult
    from moe_pack.convert.synthetic import (
        SyntheticTraits,
        link_memory_folder,
        profiled_popularity,
        skewed_popularity,
        synthesize,
        synthetic_layout,
    )
    from moe_pack.convert.verify import compare_logits, compare_weights, describe, format_runs, same_tensors
else:
    __getattr__ = face(__name__, call="making")
