"""Policies: what is placed, foretold, kept, and done on a miss; each paper's on a page, named as a preset."""

from moe_pack.runtime.policies.belady import Belady
from moe_pack.runtime.policies.edgemoe import EdgeMoE
from moe_pack.runtime.policies.importance import Importance
from moe_pack.runtime.policies.lfu import LFU
from moe_pack.runtime.policies.lru import LRU, LayerLRU
from moe_pack.runtime.policies.placement import Static, placed_by_popularity
from moe_pack.runtime.policies.preset import (
    PRESETS,
    EvictionName,
    PolicyName,
    Preset,
    eviction_of,
    placed_by,
    residency_for,
)
from moe_pack.runtime.policies.split import Split, balanced, fastest
from moe_pack.runtime.policies.substitution import substitute

__all__ = [
    "LFU",
    "LRU",
    "PRESETS",
    "Belady",
    "EdgeMoE",
    "EvictionName",
    "Importance",
    "LayerLRU",
    "PolicyName",
    "Preset",
    "Split",
    "Static",
    "balanced",
    "eviction_of",
    "fastest",
    "placed_by",
    "placed_by_popularity",
    "residency_for",
    "substitute",
]
