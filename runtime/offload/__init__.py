"""Experts that stream from the disk: cache, eviction, prefetch, budget, record and replay."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.runtime.offload.budgets import (
        ONE_SEQUENCE,
        BudgetPlan,
        Sequences,
        divide_budget,
        expert_pages,
        least_budget,
        routing_bytes,
        whole_bytes,
    )
    from moe_pack.runtime.offload.cache import CacheFacts, ExpertCache, ExpertKey
    from moe_pack.runtime.offload.eviction import expert_cache_for
    from moe_pack.runtime.offload.expert_store import ExpertStore, Trace
    from moe_pack.runtime.offload.experts import OffloadedWeights, PhaseCounts
    from moe_pack.runtime.offload.paths import PathStatistics
    from moe_pack.runtime.offload.prefetch import Prefetcher
    from moe_pack.runtime.offload.presets import (
        EXACT,
        PREDICTORS,
        PRESETS,
        ROUTING_FILE,
        Approximations,
        PolicyName,
        Preset,
    )
    from moe_pack.runtime.offload.record import (
        Passes,
        Recorder,
        Recording,
        check_writable,
        read_recording,
        recorded_expert_cache_for,
    )
    from moe_pack.runtime.offload.replay import auto_policy
    from moe_pack.runtime.offload.routing_file import MAX_PREVIOUS, Predictor, Routing
else:
    __getattr__ = face(__name__)
