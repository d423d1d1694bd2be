"""Runs a model over text, layer by layer in bounded memory, and measures what planner and runtime need to know."""

from moe_pack.calib.assumed import assumed_figures, assumed_losses
from moe_pack.calib.attach import attach, most_routing_bytes, routing_of
from moe_pack.calib.costs import Cost, time_text
from moe_pack.calib.estimate import Estimate
from moe_pack.calib.evaluation import (
    QUALITY_FILE,
    BlockLosses,
    Quality,
    SourceLosses,
    SourceQuality,
    block_losses,
    check_source,
    evaluate,
    quality_of,
)
from moe_pack.calib.expert_error import ABSMAX_FORMATS
from moe_pack.calib.expert_pass import HOT_SPARSITIES, KINDS
from moe_pack.calib.expert_quantizer import (
    BLOCK_NEURONS,
    Calibration,
    ExpertQuantizer,
    calibration_bytes,
    needs_inputs,
)
from moe_pack.calib.heat import hottest_first
from moe_pack.calib.losses import Losses, losses_of
from moe_pack.calib.price_of_sparsity import SparsityPrice
from moe_pack.calib.price_of_substitution import Substitution, SubstitutionPrice
from moe_pack.calib.prices import NUM_CALIBRATION_TOKENS, Prices, measure_prices
from moe_pack.calib.profile import Profile, Sensitivity, check_same_source
from moe_pack.calib.profiler import ProfileOptions, make_profile
from moe_pack.calib.quantize import RowQuantizer, check_finite
from moe_pack.calib.realized import RealizedSparsity
from moe_pack.calib.reference import REFERENCE_FILE, Reference, ReferenceFacts, make_reference, read_reference
from moe_pack.calib.report import report_html
from moe_pack.calib.report_prices import MeasuredPack, measured_pack
from moe_pack.calib.tasks import TaskScore, TaskTokens, check_continues, read_tasks, task_score
from moe_pack.calib.text import Tokens, num_held_out, read_tokens, unseen_tokens
from moe_pack.calib.thresholds import (
    MeasuredThresholds,
    ThresholdRule,
    measure_thresholds,
    realized_sparsity,
)
from moe_pack.calib.unholdable import UnholdableError

__all__ = [
    "ABSMAX_FORMATS",
    "BLOCK_NEURONS",
    "HOT_SPARSITIES",
    "KINDS",
    "NUM_CALIBRATION_TOKENS",
    "QUALITY_FILE",
    "REFERENCE_FILE",
    "BlockLosses",
    "Calibration",
    "Cost",
    "Estimate",
    "ExpertQuantizer",
    "Losses",
    "MeasuredPack",
    "MeasuredThresholds",
    "Prices",
    "Profile",
    "ProfileOptions",
    "Quality",
    "RealizedSparsity",
    "Reference",
    "ReferenceFacts",
    "RowQuantizer",
    "Sensitivity",
    "SourceLosses",
    "SourceQuality",
    "SparsityPrice",
    "Substitution",
    "SubstitutionPrice",
    "TaskScore",
    "TaskTokens",
    "ThresholdRule",
    "Tokens",
    "UnholdableError",
    "assumed_figures",
    "assumed_losses",
    "attach",
    "block_losses",
    "calibration_bytes",
    "check_continues",
    "check_finite",
    "check_same_source",
    "check_source",
    "evaluate",
    "hottest_first",
    "losses_of",
    "make_profile",
    "make_reference",
    "measure_prices",
    "measure_thresholds",
    "measured_pack",
    "most_routing_bytes",
    "needs_inputs",
    "num_held_out",
    "quality_of",
    "read_reference",
    "read_tasks",
    "read_tokens",
    "realized_sparsity",
    "report_html",
    "routing_of",
    "task_score",
    "time_text",
    "unseen_tokens",
]
