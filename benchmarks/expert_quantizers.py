"""Which quantizers benchmarks compare: the one place where joint ones, and their steps, come from.

Quantizers that need no more than a matrix are not made here: `memory_weights.MatrixQuantizer` serves these.
"""

from memory_weights import JointQuantizer

from moe_pack.calib import Profile
from moe_pack.formats import Quantizer

# Of what the project does beyond HQQ, in the order in which `quantizer_steps.py` adds them.
STEPS = ("scales", "knapsack")


def joint_quantizers(profile: Profile) -> dict[Quantizer, JointQuantizer]:
    """By the name that plans give them, those that quantize an expert by what `profile` saw it do."""
    return {}


def quantizer_with(profile: Profile, steps: frozenset[str]) -> tuple[Quantizer, JointQuantizer | None]:
    """The quantizer that takes these of `STEPS`: its name in plans, and itself; None if a matrix is all it needs."""
    return "hqq", None
