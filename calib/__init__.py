"""Runs a model over text, layer by layer in bounded memory, and measures what planner and runtime need to know."""

from moe_pack.calib.costs import Cost
from moe_pack.calib.profile import Profile, Sensitivity
from moe_pack.calib.profiler import ProfileOptions, Watcher, make_profile
from moe_pack.calib.quantize import RowQuantizer, UnholdableError, check_finite
from moe_pack.calib.text import Tokens, num_held_out, read_tokens

__all__ = [
    "Cost",
    "Profile",
    "ProfileOptions",
    "RowQuantizer",
    "Sensitivity",
    "Tokens",
    "UnholdableError",
    "Watcher",
    "check_finite",
    "make_profile",
    "num_held_out",
    "read_tokens",
]
