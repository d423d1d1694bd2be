"""A pack's weights on a card: the dense part in one piece, experts in a `CardCache`. Importing this needs triton."""

import numpy as np
import torch
from torch import Tensor

from moe_pack.formats import DenseLayout, Pack
from moe_pack.runtime.card_cache import CardCache
from moe_pack.runtime.device_matrix import DeviceMatrix
from moe_pack.runtime.experts import ExpertRunner, PartialState
from moe_pack.runtime.kernels.expert_many import expert_many, workspace_floats
from moe_pack.runtime.matrix import Matrix
from moe_pack.runtime.pack_weights import PackWeights, tokens_by_expert


class CardWeights(PackWeights, ExpertRunner):
    """The weights of an open pack on a device; the cache of its experts stays the caller's.

    Many tokens are run here, one expert after the other, made whole first; one token by `TokenStep`, without the host.
    Args:    chunk_tokens: of a forward pass, at most.
    """

    def __init__(self, pack: Pack, device: torch.device, cache: CardCache, chunk_tokens: int) -> None:
        super().__init__(pack, device)
        self.cache = cache
        self._numbers = torch.arange(pack.spec.router.num_experts, dtype=torch.int32, device=device)
        floats = workspace_floats(chunk_tokens, pack.spec.expert.intermediate_size)
        self._workspace = torch.empty(floats, device=device)

    def _keep(self, held: Tensor) -> None:
        super()._keep(held.to(self._device))  # one allocation: what is there is what is counted

    def _matrix(self, dense: DenseLayout, raw: Tensor) -> Matrix:
        return DeviceMatrix(dense, raw)

    def run_experts(
        self,
        layer_idx: int,
        x: Tensor,
        experts: Tensor,
        router_weights: Tensor,
        partial_state: PartialState | None = None,
    ) -> Tensor:
        """The routed experts of a layer over tokens x float32 [T, d], weighted and added up.

        Args:    experts, router_weights: int64 and float32 [T, k].
        """
        layer, y = self.cache.layers[layer_idx], torch.zeros_like(x)
        # The host has to know which experts have tokens: one wait a layer.
        jobs = list(tokens_by_expert(experts.cpu(), router_weights.cpu()))
        tokens = torch.from_numpy(np.concatenate([job[1] for job in jobs]).astype(np.int32)).to(self._device)
        weights = torch.from_numpy(np.concatenate([job[2] for job in jobs])).to(self._device)
        first = 0
        for number, of_expert, _ in jobs:
            some = slice(first, first + len(of_expert))
            one = self._numbers[number : number + 1]
            layer.admit(one)
            layer.pull_selectors(one)
            layer.pull_records(one, None)
            kind = layer.kind_of[number]
            expert_many(x, tokens[some], weights[some], layer.tables, number, kind, y, self._workspace)
            self.bytes_read += self._pack.layout.experts[layer_idx][number].num_bytes
            first = some.stop
        return y
