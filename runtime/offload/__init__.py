"""Experts that stream from the disk: cache, eviction, prefetch, budget, record and replay."""

from moe_pack.runtime.offload.budget import (
    CARD_PAGE_BYTES,
    BudgetPlan,
    CardPlan,
    FixedParts,
    MemoryNeeds,
    best_page_bytes,
    divide,
    divide_budget,
    expert_pages,
    least_budget,
    routing_bytes,
    whole_bytes,
)
from moe_pack.runtime.offload.cache import CacheFacts, Key, Residency
from moe_pack.runtime.offload.disk import Reads, open_reads
from moe_pack.runtime.offload.experts import NO_TRUST, Job, PhaseCounts, StreamingWeights, Trust
from moe_pack.runtime.offload.paths import PathStatistics
from moe_pack.runtime.offload.prefetch import Foreteller
from moe_pack.runtime.offload.presets import PRESETS, PolicyName, Preset, residency_for
from moe_pack.runtime.offload.record import Passes, Record, Recorder, read_record, recorded_residency_for
from moe_pack.runtime.offload.replay import auto_preset, replay
from moe_pack.runtime.offload.routing_file import MAX_PREVIOUS, PREDICTORS, ROUTING_FILE, Predictor, Routing

__all__ = [
    "CARD_PAGE_BYTES",
    "MAX_PREVIOUS",
    "NO_TRUST",
    "PREDICTORS",
    "PRESETS",
    "ROUTING_FILE",
    "BudgetPlan",
    "CacheFacts",
    "CardPlan",
    "FixedParts",
    "Foreteller",
    "Job",
    "Key",
    "MemoryNeeds",
    "Passes",
    "PathStatistics",
    "PhaseCounts",
    "PolicyName",
    "Predictor",
    "Preset",
    "Reads",
    "Record",
    "Recorder",
    "Residency",
    "Routing",
    "StreamingWeights",
    "Trust",
    "auto_preset",
    "best_page_bytes",
    "divide",
    "divide_budget",
    "expert_pages",
    "least_budget",
    "open_reads",
    "read_record",
    "recorded_residency_for",
    "replay",
    "residency_for",
    "routing_bytes",
    "whole_bytes",
]
