"""Prediction of a token's experts on a GPU, a layer ahead, and the records that are pulled for them meanwhile.

`ExpertPrediction` launches the methods of `runtime.offload.prefetch`. `RecordPrefetch` pulls records of the neurons
that the predicted experts' selectors choose for this layer's input (FloE §3.3.2, CORM §4.2) and the GPU lacks, a share
of each expert's, the hottest first, after what this layer itself pulls. They are in the next layer's table while that
is listed, and are forgotten afterwards: a wrong prediction costs time of the link, and changes no answer. Importing
this needs Triton.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from moe_pack.runtime import offload
from moe_pack.runtime.gpu import devices
from moe_pack.runtime.gpu.kernels import matmul, neurons, predict
from moe_pack.runtime.gpu.kernels.pull import pull_records
from moe_pack.runtime.gpu.kernels.rotation import device_matrix, rotate
from moe_pack.runtime.gpu.kernels.rows import stored_part
from moe_pack.runtime.gpu.kernels.tables import HostRows, KeptNeurons, Landing, LeftToCpu, RunningNeurons
from moe_pack.runtime.gpu.prefill import GpuWeights
from moe_pack.runtime.gpu.token.layers import TokenLayers
from moe_pack.runtime.offload import prefetch
from moe_pack.runtime.offload.paths import PATH_MEMORY

_UNIT_STEP = 8  # hidden units of a network are padded to so many: rows of bfloat16 are multiples of 16 bytes


@dataclass(frozen=True, slots=True, eq=False)
class PredictionPlan:
    """The experts to predict, and how."""

    methods: Mapping[int, prefetch.MethodName]  # by MoE layer; a layer without one is not predicted
    num_predicted: int  # experts of a layer
    routing: offload.Routing | None  # of the pack's folder, for the methods that need it
    runs_predicted: bool = False  # whether the predicted experts run in any case, which changes the answer
    is_tried: bool = False  # whether nothing is predicted if a measured token is not faster with it


class ExpertPrediction:
    """Predicts the experts of a token's MoE layers, one after the other. Owns its tensors."""

    def __init__(self, plan: PredictionPlan, weights: GpuWeights, layers: TokenLayers) -> None:
        device = layers.x.device
        self._layers, self._plan = layers, plan
        self.experts = torch.zeros(plan.num_predicted, dtype=torch.int32, device=device)
        self._scores = torch.zeros(weights.spec.router.num_experts, device=device)
        # The launches for each predicted layer, while the layer before runs; they get the hidden state before the
        # layer's norm, float32 [d], which only the method `partial` reads.
        self.launches = {layer_idx: self._launches(layer_idx, method) for layer_idx, method in plan.methods.items()}

    def needs_partial(self, layer_idx: int) -> bool:
        """Whether it predicts a layer by the partial hidden state."""
        return self._plan.methods.get(layer_idx) == "partial"

    def _launches(self, layer_idx: int, method: prefetch.MethodName) -> Callable[[Tensor], object]:
        layers, scores, experts = self._layers, self._scores, self.experts
        routing, device = self._plan.routing, experts.device
        if method in ("router", "partial"):
            router = layers.router(layer_idx)
            is_sigmoid = router.spec.kind == "sigmoid_topk"

            def by_router(partial: Tensor) -> None:
                if method == "router":
                    matmul.gemv(layers.normed, router.rows, scores, bias=router.logit_bias)
                else:
                    matmul.normed_gemv(partial, router.norm, [matmul.Product(router.rows, scores, router.logit_bias)])
                predict.rank(scores, experts, bias=router.bias, is_sigmoid=is_sigmoid)

            return by_router
        assert routing is not None, "the other methods need a profile's routing"
        if method == "popularity":
            popular = prefetch.ranked(routing.paths.popularity[layer_idx].astype(np.float32)[None], len(experts))
            fixed = torch.from_numpy(popular[0].astype(np.int32)).to(device)
            return lambda partial: experts.copy_(fixed)
        if method == "mlp":
            return self._network(layer_idx, routing.network(layer_idx))
        num_before = min(layer_idx, PATH_MEMORY)
        paths = predict.LayerPaths.of(routing.paths, layer_idx, num_before, device)
        routes = layers.routes[layer_idx - num_before : layer_idx, 0]

        def by_paths(partial: Tensor) -> None:
            predict.score_paths(routes, paths, scores)
            predict.rank(scores, experts)

        return by_paths

    def _network(self, layer_idx: int, network: offload.Predictor) -> Callable[[Tensor], object]:
        layers, scores, experts = self._layers, self._scores, self.experts
        is_deep, h = network.out_weight is not None, len(network.bias)
        padding = -h % _UNIT_STEP if is_deep else 0
        device, routes = experts.device, layers.routes[layer_idx - network.num_previous : layer_idx, 0]
        x_weight = functional.pad(network.x_weight, (0, 0, 0, padding)).to(device)
        rows = matmul.StoredRows(x_weight, stored_part("BF16", x_weight.shape[1]))
        by_route = functional.pad(network.route_weight.permute(1, 2, 0), (0, padding)).contiguous().to(device)
        bias = functional.pad(network.bias, (0, padding)).to(device)
        first = torch.zeros(h + padding, device=device) if is_deep else scores
        out = None
        if network.out_weight is not None and network.out_bias is not None:
            out_weight = functional.pad(network.out_weight, (0, padding)).contiguous().to(device)
            out = matmul.Product(
                matmul.StoredRows(out_weight, stored_part("BF16", h + padding)), scores, network.out_bias.to(device)
            )

        def by_network(partial: Tensor) -> None:
            matmul.gemv(layers.normed, rows, first, bias=bias)
            predict.add_routes(first, by_route, routes, is_rectified=is_deep)
            if out is not None:
                matmul.gemv(first, out.matrix, scores, bias=out.bias)
            predict.rank(scores, experts)

        return by_network


class RecordPrefetch:
    """Pulls records of the experts predicted for a layer while the layer before runs. Owns its buffers.

    `totals`: int32 [L, n, 3] on the device: of each layer the predicted experts, their pulled records, and how many of
    these ran; of layers that are not predicted 0 records.
    """

    def __init__(
        self,
        prediction: ExpertPrediction,
        weights: GpuWeights,
        layers: TokenLayers,
        queues: devices.Queues,
        host_rows: list[HostRows],
    ) -> None:
        memory, spec, device = weights.memory, weights.spec, layers.x.device
        self.prediction, self._weights, self._layers, self._queues = prediction, weights, layers, queues
        self._host_rows = host_rows
        n, f = len(prediction.experts), spec.expert.intermediate_size
        self.totals = torch.zeros((len(host_rows), n, 3), dtype=torch.int32, device=device)
        self._running = RunningNeurons.allocate(
            n, f, device, memory.record_at.dtype, neurons.select_programs(memory.layers[0].kinds)
        )
        self.share = torch.ones(1, device=device)  # float32 [1], of the records that a predicted expert lacks
        self._turned = torch.zeros(spec.hidden_size, device=device)
        self._matrix = device_matrix(spec.hidden_size, device)
        numbers = torch.zeros((2, n, f), dtype=torch.int32, device=device)
        self._counts = torch.zeros((2, n), dtype=torch.int32, device=device)
        self._pulled_neurons = numbers[1].view(-1)
        # Nobody computes what is left: those neurons are computed where their layer lists them.
        a = torch.zeros((n, f), device=device)
        self._left = LeftToCpu(self._counts[0], numbers[0], a)
        placement, half = memory.placement, memory.placement.ahead_bytes // 32
        begin = memory.dynamic_at + (placement.dynamic_bytes - placement.ahead_bytes) // 16
        sizes = zip(placement.num_ahead.tolist(), placement.slot_bytes.tolist(), strict=True)
        self._landing = [
            Landing(0, 0, slot_bytes // 16, begin + layer_idx % 2 * half, number)
            for layer_idx, (number, slot_bytes) in enumerate(sizes)
        ]

    def pulls(self, layer_idx: int) -> bool:
        """Whether records of a layer are pulled ahead."""
        return layer_idx in self.prediction.launches and self._landing[layer_idx].num_kept > 0

    def launch(self, layer_idx: int, partial: Tensor, after: devices.Mark) -> None:
        """Launches the prediction for a layer and the copies of its records, while the layer before runs.

        Args:    partial: float32 [d], as for the prediction.   after: the end of the running layer's own copies.
        """
        self.prediction.launches[layer_idx](partial)
        if not self.pulls(layer_idx):
            return
        tables, layers = self._weights.memory.layers[layer_idx], self._layers
        host, running, landing = self._host_rows[layer_idx], self._running, self._landing[layer_idx]
        rotation, inputs = self._weights.rotation(layer_idx), layers.normed
        if rotation is not None:
            inputs = self._turned
            rotate(layers.normed, rotation, self._matrix, inputs)
        experts, pulled = self.prediction.experts, self._pulled(landing)
        neurons.select(inputs, experts, tables, running)
        kept = KeptNeurons(pulled.neurons, pulled.counts)
        neurons.compact(experts, tables, running, landing, self.share, self._left, is_split=True, kept=kept)
        self._queues.wait_for(after)
        pull_records(experts, tables, running, host, is_split=True)
        predict.enter_pulled(pulled, tables.record_at, landing.kept_at, landing.slot_units)

    def forget(self, layer_idx: int, running: RunningNeurons) -> None:
        """Launches the removal of a layer's records from its table, after the layer is listed."""
        tables, experts = self._weights.memory.layers[layer_idx], self._layers.routes[layer_idx]
        pulled = self._pulled(self._landing[layer_idx])
        predict.forget_pulled(pulled, experts, tables, running, self.totals[layer_idx])

    def _pulled(self, landing: Landing) -> predict.PulledAhead:
        n, number = len(self.prediction.experts), landing.num_kept
        neurons = self._pulled_neurons[: n * number].view(n, number)
        return predict.PulledAhead(self.prediction.experts, neurons, self._counts[1])
