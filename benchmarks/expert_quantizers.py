"""The quantizers of whole experts that a plan may name: the one place where benchmarks get them from.

Quantizers that need no more than a matrix are not among them: `memory_weights.MatrixQuantizer` serves these.
"""

from memory_weights import ExpertQuantizer

from moe_pack.calib import Profile
from moe_pack.formats import Quantizer


def expert_quantizers(profile: Profile) -> dict[Quantizer, ExpertQuantizer]:
    """By the name that plans give them, those that quantize an expert by what `profile` saw it do."""
    return {}
