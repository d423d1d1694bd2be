"""Presets: each paper's system as a combination of policies, by name. What each policy is, its own page says.

A preset is what its paper sets, read for one fast tier over one slow one: RAM over the drive, or VRAM over RAM.
Where that reading is ours, it stands at the preset; docs/papers.md has what it changes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from moe_pack.runtime.offload.cache import CacheFacts, Eviction, ExpertCache, ExpertKey
from moe_pack.runtime.offload.eviction import LFU, LRU, EdgeMoE, Importance, LayerLRU, NoEviction, placed_by_popularity
from moe_pack.runtime.offload.prefetch import PredictionName

PolicyName = Literal["lru", "floe", "corm", "fiddler", "edgemoe", "importance"]
EvictionName = Literal["lru", "layer_lru", "lfu", "edgemoe", "importance", "none"]


@dataclass(frozen=True, slots=True)
class Preset:
    """A system's policies.

    `placed_share`: of the pages, for the most popular experts, from the start and for good.   `keeps`: whether others
    stay once they were needed.   `num_ahead`: experts foretold a layer; None: as many as are chosen.   `rows_below`:
    a miss brings the running rows alone where a smaller share of them runs; 0: always the whole expert.
    `reuse_selector`: neurons are foretold by the next layer's selector on this hidden state (FloE §3.3.2, CORM §4.2).
    """

    name: PolicyName
    eviction: EvictionName
    placed_share: float = 0.0
    keeps: bool = True
    prediction: PredictionName = "none"
    num_ahead: int | None = None
    rows_below: float = 0.0
    reuse_selector: bool = False

    def alone(self) -> "Preset":
        """The same without foretelling."""
        return replace(self, prediction="none", reuse_selector=False)

    def num_foretold(self, num_active: int) -> int:
        """How many experts a layer are foretold, where a token has `num_active`."""
        if self.prediction == "none":
            return 0
        return num_active if self.num_ahead is None else self.num_ahead


_LRU = Preset("lru", "lru")
# FloE moves running rows only, foretold by its networks and the next layer's selector (§3.3, §3.4). Of what stays in
# fast memory it says that more memory holds "more MoE layers" (Fig. 8). Our reading: the last used of all layers.
_FLOE = Preset("floe", "lru", prediction="mlp", rows_below=1.0, reuse_selector=True)
# CORM §4.2, §4.3; whole experts above 75% of running neurons: Fig. 9.
_CORM = Preset("corm", "layer_lru", prediction="router", rows_below=0.75, reuse_selector=True)
# Fiddler computes a missing expert where it lies (§3.2, decode). Our reading with a drive below: it is read, used once
# and not kept.
_FIDDLER = Preset("fiddler", "none", placed_share=1.0, keeps=False)
# EdgeMoE §III-C: "can preload 1-3 experts in each layer"; likeliest first, until the router has spoken.
_EDGEMOE = Preset("edgemoe", "edgemoe", prediction="paths", num_ahead=3)
# Importance §5.2 (the best k by foretold score), §5.3. Substitution (§5.1) changes answers and is asked for apart.
_IMPORTANCE = Preset("importance", "importance", prediction="partial")

PRESETS: dict[str, Preset] = {preset.name: preset for preset in (_LRU, _FLOE, _CORM, _FIDDLER, _EDGEMOE, _IMPORTANCE)}

_EVICTIONS: dict[EvictionName, Callable[[CacheFacts], Eviction]] = {
    "lru": LRU,
    "layer_lru": LayerLRU,
    "lfu": LFU,
    "edgemoe": EdgeMoE,
    "importance": Importance,
    "none": NoEviction,
}


def placed_by(preset: Preset, facts: CacheFacts) -> list[ExpertKey]:
    """The experts that the preset places."""
    return placed_by_popularity(facts, int(preset.placed_share * facts.num_pages))


def eviction_of(preset: Preset, facts: CacheFacts) -> Eviction:
    """The preset's eviction, new."""
    return _EVICTIONS[preset.eviction](facts)


def expert_cache_for(preset: Preset, facts: CacheFacts) -> ExpertCache:
    """Fast memory as the preset keeps it, with what it places already in."""
    return ExpertCache(facts, eviction_of(preset, facts), placed_by(preset, facts), preset.keeps)
