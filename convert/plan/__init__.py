"""Decides what to store: formats, sparsity and placement for a memory budget."""

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
    offer_json,
    offer_lines,
    share_lines,
)
from moe_pack.convert.plan.planner import Planner
from moe_pack.convert.plan.target import LossLimit, Target, check_room, defaults_text, held_out_passes, planner_for

__all__ = [
    "Decision",
    "EstimatedPlan",
    "LossLimit",
    "PlanOption",
    "Planner",
    "PlanningModel",
    "Target",
    "check_room",
    "compression_text",
    "decision_lines",
    "defaults_text",
    "gap_text",
    "held_out_passes",
    "model_text",
    "offer_json",
    "offer_lines",
    "plan_bytes",
    "planner_for",
    "preset_decision",
    "read_plan",
    "share_lines",
]
