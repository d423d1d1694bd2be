"""A GPU's memory, played on recorded tokens without computing anything."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import Pack
from moe_pack.runtime.gpu.placements import GpuPlacement
from moe_pack.runtime.model import Decoder, NativeOperations
from moe_pack.runtime.model.compute.weights import to_experts
from moe_pack.runtime.model.pack_weights import MappedPackWeights
from moe_pack.runtime.offload.prefetch import PredictionInput, make_prediction, ranked


@dataclass(frozen=True, slots=True, eq=False)
class PlayedToken:
    experts: NDArray[np.int64]  # [L, k]
    neurons: list[list[NDArray[np.int32]]]  # of each layer and expert, that run, rising
    # Of each layer the predicted experts, likeliest first, and the neurons that their selectors would run on the input
    # of the layer before, rising; none of the first layer.
    predicted: list[list[tuple[int, NDArray[np.int32]]]]


class _Recording(MappedPackWeights):
    """Weights that note experts and running neurons, and those that the next layer's router predicts."""

    def __init__(self, pack: Pack, operations: NativeOperations) -> None:
        super().__init__(pack, operations)
        self.seen: list[tuple[NDArray[np.int64], list[NDArray[np.int32]]]] = []
        self.ahead: list[list[tuple[int, NDArray[np.int32]]]] = []
        self._prediction = make_prediction("router", self, None)

    def run_experts(self, layer_idx: int, x: Tensor, experts: Tensor, router_weights: Tensor, *rest: Any) -> Tensor:
        self.seen.append((experts[0].numpy(), self._running(layer_idx, x, experts[0].tolist())))
        self.ahead.append([])
        next_idx = layer_idx + 1
        if next_idx < len(self.spec.moe_layers) and self._prediction is not None:
            scores = self._prediction.scores(next_idx, PredictionInput(x, self.seen[-1][0][None, None]))
            assert scores is not None, "routers predict every layer"
            likeliest = ranked(scores, experts.shape[1])[0].tolist()
            self.ahead[-1] = list(zip(likeliest, self._running(next_idx, x, likeliest), strict=True))
        return super().run_experts(layer_idx, x, experts, router_weights, *rest)

    def _running(self, layer_idx: int, x: Tensor, experts: list[int]) -> list[NDArray[np.int32]]:
        """The neurons that experts of a layer would run on x, float32 [1, d]."""
        works = [(self._mapped_expert(layer_idx, expert).rows, np.zeros(1, np.int64)) for expert in experts]
        found = self.operations.kernels.select_each(to_experts(x, self, layer_idx), works)
        return [each.neurons.numpy().copy() for each in found]


def recorded_tokens(pack: Pack, operations: NativeOperations, ids: Sequence[int]) -> list[PlayedToken]:
    """Runs tokens one by one, and returns what they needed, and what is predicted."""
    weights, num_layers = _Recording(pack, operations), len(pack.layout.experts)
    decoder = Decoder(weights, len(ids))
    for token in ids:
        decoder.next_logits([token])
    tokens = []
    for place in range(0, len(weights.seen), num_layers):
        step, ahead = weights.seen[place : place + num_layers], weights.ahead[place : place + num_layers]
        experts = np.stack([experts for experts, _ in step])
        tokens.append(PlayedToken(experts, [neurons for _, neurons in step], [[], *ahead[:-1]]))
    return tokens


def static_table(placement: GpuPlacement, num_rows: int) -> NDArray[np.int32]:
    """The table of records, int32 [L, E, f]: static records lie at 0."""
    is_static = np.arange(num_rows) < placement.first_dynamic[:, :, None]
    return np.where(is_static, 0, -1).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Played:
    """Running neurons whose records were resident, and others.

    `whole`: of the others, those of experts without a resident selector, which the CPU selects itself.
    `ahead`: records that were pulled because their experts were predicted; `ahead_ran`: of these, those that ran, which
    count as resident.
    """

    resident: int
    left: int
    whole: int
    ahead: int
    ahead_ran: int


def played(placement: GpuPlacement, tokens: Sequence[PlayedToken], most_ahead: int) -> Played:
    """Plays tokens whose missing records the CPU computes.

    Args:    most_ahead: records that are pulled ahead for each predicted expert, at most.
    """
    f = 1 + max(int(neurons.max(initial=0)) for token in tokens for layer in token.neurons for neurons in layer)
    at, resident, left, whole = static_table(placement, max(f, int(placement.first_dynamic.max()))), 0, 0, 0
    ahead = ahead_ran = 0
    for token in tokens:
        for l, layer in enumerate(token.neurons):
            pulled = dict[int, NDArray[np.int32]]()
            for expert, neurons in token.predicted[l]:
                if placement.has_selector[l, expert]:
                    pulled[expert] = neurons[at[l, expert, neurons] < 0][:most_ahead]
            ahead += sum(map(len, pulled.values()))
            for place, neurons in enumerate(layer):
                expert = int(token.experts[l, place])
                has_selector = placement.has_selector[l, expert]
                is_here = (at[l, expert, neurons] >= 0) & has_selector
                came = np.isin(neurons, pulled.get(expert, neurons[:0]))
                ahead_ran += int(came.sum())
                is_here |= came
                resident += int(is_here.sum())
                left += int((~is_here).sum())
                whole += 0 if has_selector else len(neurons)
    return Played(resident, left, whole, ahead, ahead_ran)
