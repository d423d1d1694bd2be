"""Decides what a pack stores: the formats and the sparsity of all experts, for a memory budget and a limit of loss.

How a budget is divided between dense part, key-value cache and experts is not decided here, but in
`runtime/offload/budgets.py` and `runtime/gpu`, for plans and for runs alike.
"""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.convert.plan.options import Target
    from moe_pack.convert.plan.papers import preset_decision
    from moe_pack.convert.plan.plan_file import Decision, plan_bytes, read_plan
    from moe_pack.convert.plan.planned import (
        EstimatedPlan,
        PlanningModel,
        PlanOption,
        compression_text,
        decision_lines,
        gap_text,
        model_text,
        option_json,
        option_lines,
        share_lines,
        speed_note,
    )
    from moe_pack.convert.plan.planner import Planner
    from moe_pack.convert.plan.target import (
        check_budget,
        choose_target_device,
        defaults_text,
        held_out_passes,
        kv_text,
        planner_for,
        with_kv_dtype,
    )
else:
    __getattr__ = face(__name__)
