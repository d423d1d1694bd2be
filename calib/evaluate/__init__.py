"""Measures finished packs: loss against the source, tasks, thresholds, and the prices of further savings."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.calib.evaluate.evaluation import check_source, evaluate
    from moe_pack.calib.evaluate.model_pass import RealizedSparsity
    from moe_pack.calib.evaluate.prices import NUM_CALIBRATION_TOKENS, measure_numerics, measure_prices
    from moe_pack.calib.evaluate.reference import REFERENCE_FILE, Reference, make_reference, read_reference
    from moe_pack.calib.evaluate.tasks import TaskScore, TaskTokens, check_continues, read_tasks, task_score
    from moe_pack.calib.evaluate.thresholds import ThresholdRule
else:
    __getattr__ = face(__name__)
