"""The slots of a GPU's memory, played on recorded tokens without computing anything."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import Pack
from moe_pack.runtime.gpu.placement import GpuPlacement
from moe_pack.runtime.gpu.residency import MOST_KEPT, Promotion, Residency, TokenRoutes
from moe_pack.runtime.model import Decoder, NativeOperations, PartialState
from moe_pack.runtime.model.pack_weights import MappedPackWeights
from moe_pack.runtime.model.weights import to_experts
from moe_pack.runtime.offload import CacheFacts, Preset
from moe_pack.runtime.offload.presets import eviction_of


@dataclass(frozen=True, slots=True, eq=False)
class PlayedToken:
    """A token's experts, int64 [L, k], and the running neurons of each, rising."""

    experts: NDArray[np.int64]
    neurons: list[list[NDArray[np.int32]]]


class _Recording(MappedPackWeights):
    """Weights that take note of experts and running neurons."""

    def __init__(self, pack: Pack, operations: NativeOperations) -> None:
        super().__init__(pack, operations)
        self.seen: list[tuple[NDArray[np.int64], list[NDArray[np.int32]]]] = []

    def run_experts(
        self,
        layer_idx: int,
        x: Tensor,
        experts: Tensor,
        router_weights: Tensor,
        partial_state: PartialState | None = None,
    ) -> Tensor:
        inputs = to_experts(x, self, layer_idx)
        rows = [self._mapped_expert(layer_idx, expert).rows for expert in experts[0].tolist()]
        works = [(each, np.zeros(1, np.int64)) for each in rows]
        found = self.operations.kernels.select_each(inputs, works)
        self.seen.append((experts[0].numpy(), [each.neurons.numpy().copy() for each in found]))
        return super().run_experts(layer_idx, x, experts, router_weights, partial_state)


def recorded_tokens(
    pack: Pack, operations: NativeOperations, ids: Sequence[int], context_tokens: int
) -> list[PlayedToken]:
    """Runs tokens one by one, in windows of `context_tokens`, and returns what they needed."""
    weights, num_layers = _Recording(pack, operations), len(pack.layout.experts)
    decoder = Decoder(weights, context_tokens)
    for start in range(0, len(ids), context_tokens):
        decoder.reset()
        for token in ids[start : start + context_tokens]:
            decoder.next_logits([token])
    steps = [weights.seen[place : place + num_layers] for place in range(0, len(weights.seen), num_layers)]
    return [PlayedToken(np.stack([experts for experts, _ in step]), [neurons for _, neurons in step]) for step in steps]


@dataclass(frozen=True, slots=True)
class PlayedSlots:
    """Running neurons whose records were resident, and others; records that were promoted.

    `whole`: of the others, those of experts without a resident selector, `whole_experts`, which the CPU selects itself.
    """

    resident: int
    left: int
    whole: int
    whole_experts: int
    promoted: int


def played(
    placement: GpuPlacement,
    preset: Preset,
    popularity: NDArray[np.float64],
    tokens: Sequence[PlayedToken],
    most_rows: int = MOST_KEPT,
) -> PlayedSlots:
    """Plays tokens whose missing records the CPU computes; promoted records arrive before the next token but one."""
    f = 1 + max(int(neurons.max(initial=0)) for token in tokens for layer in token.neurons for neurons in layer)
    f = max(f, int(placement.first_dynamic.max()))
    is_static = np.arange(f) < placement.first_dynamic[:, :, None]
    static_at = np.where(is_static, 0, -1).astype(np.int32)
    ends = np.cumsum(placement.num_slots * placement.slot_bytes // 16)
    slots_at = 1 + ends - placement.num_slots * placement.slot_bytes // 16
    facts = CacheFacts(f - placement.first_dynamic, int(placement.num_slots.sum()), placement.num_active, popularity)
    residency = Residency(placement, static_at, slots_at, eviction_of(preset, facts)) if preset.keeps else None
    at, resident, left, whole, whole_experts = static_at.copy(), 0, 0, 0, 0
    coming: list[Promotion] = []
    last: TokenRoutes | None = None
    for token in tokens:
        missing = dict[tuple[int, int], NDArray[np.int32]]()
        for l, layer in enumerate(token.neurons):
            for place, neurons in enumerate(layer):
                has_selector = placement.has_selector[l, token.experts[l, place]]
                is_here = (at[l, token.experts[l, place], neurons] >= 0) & has_selector
                resident += int(is_here.sum())
                left += int((~is_here).sum())
                whole += 0 if has_selector else len(neurons)
                whole_experts += not has_selector
                missing[l, place] = neurons[~is_here] if has_selector else neurons[:0]
        if residency is None:
            continue
        residency.arrived(coming)
        coming = [] if last is None else residency.decide(last, most_rows)
        changes = residency.changes()
        at.reshape(-1)[changes.places] = changes.values
        counts = np.zeros(token.experts.shape, np.int64)
        for key, neurons in missing.items():
            counts[key] = len(neurons)
        last = TokenRoutes(token.experts, counts, lambda l, place, missing=missing: missing[l, place], None)  # type: ignore[misc]  # bound now
    return PlayedSlots(resident, left, whole, whole_experts, 0 if residency is None else residency.promoted_rows)


def popularity_of(tokens: Sequence[PlayedToken], num_experts: int) -> NDArray[np.float64]:
    """Returns how often each expert was chosen, plus one: float64 [L, E]."""
    experts = torch.from_numpy(np.stack([token.experts for token in tokens]))  # [T, L, k]
    counts = torch.nn.functional.one_hot(experts, num_experts).sum(dim=(0, 2))
    return 1 + counts.numpy().astype(np.float64)
