"""The engine on a GPU for a pack: memory of experts, weights, the CPU's share and decoder, put together.

Importing this needs Triton.
"""

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moe_pack.formats import Pack
from moe_pack.runtime.cpu import Kernels
from moe_pack.runtime.gpu import cpu_share, decoder, devices, placements, token_step
from moe_pack.runtime.gpu.prefetch import PredictionPlan
from moe_pack.runtime.gpu.prefill import GpuWeights
from moe_pack.runtime.gpu.residency import Residency
from moe_pack.runtime.gpu.weights import ExpertMemory
from moe_pack.runtime.model import ExpertRunner
from moe_pack.runtime.model.caches import KvDtype
from moe_pack.runtime.offload import cache


@dataclass(frozen=True, slots=True)
class GpuInputs:
    """The parts of an engine that do not depend on its memory; all stay the caller's."""

    pack: Pack
    device: torch.device
    misses: placements.Misses  # who has missing records
    host: devices.HostArena | None  # experts in host memory; None if `tier` has them
    tier: ExpertRunner | None  # the CPU's own engine
    kernels: Kernels | None  # compute the CPU's share; None if everything is pulled or `tier` computes
    # By which the CPU computes some of the missing experts in passes of many tokens; None if it computes none.
    rates: cpu_share.Rates | None
    pulled_share: float  # of missing records of one token, that the link brings
    link_rate: float  # bytes a second that the link brings
    popularity: NDArray[Any]  # [L, E], how often experts are chosen, in any unit
    eviction: Callable[[cache.CacheFacts], cache.Eviction]  # returns the policy for a cache of experts
    dynamic_share: float = placements.DYNAMIC_SHARE  # of the memory, for records that come and go; 0: none do
    is_fast: bool = False  # whether prompts are computed in bfloat16
    needs_scores: bool = False  # whether the policy uses the routers' scores of all experts
    prediction: PredictionPlan | None = None  # of experts, whose records the link brings ahead; None: none
    # Resident experts replace missing ones with low scores, as in `runtime.offload.split.substitute`, which changes the
    # answer; None: no expert is replaced.
    alpha: float | None = None
    by_expert: bool = False  # as in `StepInputs`
    offset_bytes: int = 4  # from `placements.offset_bytes_for`

    @property
    def has_link(self) -> NDArray[np.bool_] | None:
        """The layers whose records may come to slots, bool [L]: those that a GPU reads in host memory; None: all."""
        num_layers = len(self.pack.layout.experts)
        if not self.dynamic_share:
            return np.zeros(num_layers, bool)
        if self.device.type != "cuda" or self.host is None:
            return None
        return np.array([self.host.is_layer_locked(layer_idx) for layer_idx in range(num_layers)])

    @property
    def num_predicted(self) -> int:
        """The experts of each layer for which records are pulled ahead."""
        return 0 if self.prediction is None else self.prediction.num_predicted

    @property
    def least_bytes(self) -> int:
        """The least memory for experts in which an engine runs."""
        sizes = (self.has_link, self.num_predicted, self.pulled_share > 0, self.offset_bytes)
        return placements.least_placement(self.pack.layout, self.misses, *sizes).num_bytes


class GpuEngine:
    """The engine for a pack. Owns its memory, not its inputs: `close` it.

    Args:    expert_bytes: the device's memory for experts.   chunk_tokens: of a forward pass, at most.
    Raises:  RunError if too little memory is left for experts.
    """

    def __init__(
        self, inputs: GpuInputs, expert_bytes: int, context_tokens: int, chunk_tokens: int, cache_dtype: KvDtype = "f32"
    ) -> None:
        pack, device = inputs.pack, inputs.device
        heat = placements.usual_heat(pack.layout, pack.thresholds)
        sizes = (inputs.dynamic_share, inputs.has_link, inputs.pulled_share > 0, inputs.num_predicted)
        placement = placements.place_experts(
            pack.layout, expert_bytes, inputs.misses, inputs.popularity, heat, *sizes, inputs.offset_bytes
        )
        queues = devices.Queues(device)
        with ExitStack() as opened:
            self.memory = opened.enter_context(closing(ExpertMemory(pack, placement, inputs.host, device)))
            exchange = cpu_share.Exchange.allocate(pack, placement, device.type == "cuda")
            share, prompt_share = _cpu_shares(inputs, placement, exchange, opened)
            self.weights = GpuWeights(
                pack, device, self.memory, inputs.host, queues, chunk_tokens, inputs.tier, prompt_share, inputs.is_fast
            )
            step = token_step.StepInputs(
                queues=queues,
                host=inputs.host,
                share=share,
                exchange=exchange,
                pulled_share=inputs.pulled_share,
                needs_scores=inputs.needs_scores,
                whole_records=placements.work_of_whole(pack.layout, heat),
                prediction=inputs.prediction,
                substitution=None
                if inputs.alpha is None
                else token_step.Substitution(inputs.alpha, placements.mostly_static(placement, heat)),
                by_expert=inputs.by_expert,
            )
            residency = _residency(inputs, self.memory, placement)
            sizes_of_passes = (context_tokens, device, chunk_tokens, cache_dtype)
            self.decoder = decoder.GpuDecoder(self.weights, step, residency, *sizes_of_passes, inputs.link_rate)
            opened.callback(self.decoder.close)
            self.expert_bytes, self.dynamic_bytes = self.memory.num_bytes, placement.dynamic_bytes
            self._opened = opened.pop_all()

    def prepare(self) -> None:
        """Captures a token's launches as graphs."""
        self.decoder.prepare()

    def tune(self) -> None:
        """Measures what only whole tokens show, and sets it. Without a GPU, times mean nothing."""
        if self.memory.device.type == "cuda":
            self.decoder.tune()

    def close(self) -> None:
        """Releases the device's memory, after the device has done what it was given."""
        if self.memory.device.type == "cuda":
            torch.cuda.synchronize(self.memory.device)
        self._opened.close()
        del self.decoder, self.weights, self.memory


def _cpu_shares(
    inputs: GpuInputs, placement: placements.GpuPlacement, exchange: cpu_share.Exchange, opened: ExitStack
) -> tuple[cpu_share.CpuShare | None, cpu_share.PromptShare | None]:
    """Returns the CPU's shares of one token and of many; `opened` closes them."""
    if placement.is_whole or inputs.misses == "pull":
        return None, None
    calls = devices.HostCalls() if inputs.device.type == "cuda" else None
    if inputs.tier is not None:
        return opened.enter_context(closing(cpu_share.TierShare(inputs.tier, exchange, calls))), None
    assert inputs.host is not None and inputs.kernels is not None, "they compute the CPU's share"
    given = (inputs.pack, inputs.host, inputs.kernels)
    share = opened.enter_context(closing(cpu_share.PoolShare(*given, exchange, calls)))
    if inputs.rates is None:
        return share, None
    return share, opened.enter_context(closing(cpu_share.PromptShare(*given, inputs.rates)))


def _residency(inputs: GpuInputs, memory: ExpertMemory, placement: placements.GpuPlacement) -> Residency | None:
    if placement.is_whole or not placement.num_slots.any():
        return None
    pages = memory.static_at.shape[2] - placement.first_dynamic
    k = inputs.pack.spec.router.num_experts_per_tok
    facts = cache.CacheFacts(pages, int(placement.num_slots.sum()), k, inputs.popularity)
    return Residency(placement, memory.static_at, memory.slots_at, inputs.eviction(facts))
