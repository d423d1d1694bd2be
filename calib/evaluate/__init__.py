"""Measures finished packs: loss against the source, tasks, thresholds, and the prices of further savings."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.calib.evaluate.evaluation import check_source, evaluate
    from moe_pack.calib.evaluate.model_pass import RealizedSparsity
    from moe_pack.calib.evaluate.prices import NUM_CALIBRATION_TOKENS, measure_numerics, measure_prices
    from moe_pack.calib.evaluate.reference import REFERENCE_FILE, Reference, make_reference, read_reference
    from moe_pack.calib.evaluate.tasks import TaskScore, TaskTokens, check_continues, read_tasks, task_score
    from moe_pack.calib.evaluate.thresholds import MeasuredThresholds, ThresholdRule, measure_thresholds
else:
    __getattr__ = face(__name__)

__all__ = [
    "NUM_CALIBRATION_TOKENS",
    "REFERENCE_FILE",
    "MeasuredThresholds",
    "RealizedSparsity",
    "Reference",
    "TaskScore",
    "TaskTokens",
    "ThresholdRule",
    "check_continues",
    "check_source",
    "evaluate",
    "make_reference",
    "measure_numerics",
    "measure_prices",
    "measure_thresholds",
    "read_reference",
    "read_tasks",
    "task_score",
]
