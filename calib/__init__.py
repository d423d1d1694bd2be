"""Runs a model over text, layer by layer in bounded memory, and measures what planner and runtime need to know."""

from moe_pack.calib.assumed import assumed_figures, assumed_losses
from moe_pack.calib.attach import attach
from moe_pack.calib.costs import Cost, Watcher
from moe_pack.calib.heat import hottest_first
from moe_pack.calib.losses import Losses, losses_of
from moe_pack.calib.profile import Profile, Sensitivity
from moe_pack.calib.profiler import ProfileOptions, make_profile
from moe_pack.calib.quantize import RowQuantizer, UnholdableError, check_finite
from moe_pack.calib.report import report_html
from moe_pack.calib.text import Tokens, num_held_out, read_tokens
from moe_pack.calib.thresholds import (
    MeasuredThresholds,
    RealizedSparsity,
    ThresholdRule,
    measure_thresholds,
    realized_sparsity,
)

__all__ = [
    "Cost",
    "Losses",
    "MeasuredThresholds",
    "Profile",
    "ProfileOptions",
    "RealizedSparsity",
    "RowQuantizer",
    "Sensitivity",
    "ThresholdRule",
    "Tokens",
    "UnholdableError",
    "Watcher",
    "assumed_figures",
    "assumed_losses",
    "attach",
    "check_finite",
    "hottest_first",
    "losses_of",
    "make_profile",
    "measure_thresholds",
    "num_held_out",
    "read_tokens",
    "realized_sparsity",
    "report_html",
]
