"""The predictors stage: how well a MoE layer's experts and neurons can be told from what its token did before.

From the inputs of two successive MoE layers on some tokens, learned from and held out, and all tokens' routes:
popularity, path statistics (EdgeMoE), the next router on this layer's input (CORM), a learned network (FloE), and for
neurons the next layer's selector on this layer's input (FloE, CORM). Every figure is on held-out tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_pack.calib.arrays import Array, check_arrays
from moe_pack.calib.expert_pass import HOT_SPARSITIES, KINDS, sample_places
from moe_pack.calib.mlp_predictor import shapes_for, train
from moe_pack.calib.recall import MaskCounts, mask_counts, recall_precision
from moe_pack.formats import NeuronFunction, PackError
from moe_pack.runtime import PREDICTORS, Expert, PathStatistics, Predictor, Weights, activations, router_scores

MAX_LEARNED_TOKENS = 8192  # twice as many raised recall by less than a point on the small models
MAX_JUDGED_TOKENS = 4096
_NEURON_TOKENS = 256  # of an expert
_SEED = 0


@dataclass(frozen=True, slots=True, eq=False)
class LayerPredictors:
    """How the experts and neurons of one MoE layer can be foretold, on held-out tokens.

    `experts` f32 [5, 3]: for each of `PREDICTORS`, the recall of as many predicted experts as are chosen (its precision
    too), and recall and precision of twice as many.   `neurons` f32 [3, 4, 2]: recall and precision of the neurons that
    run, by selector kind (up, gate, both) and sparsity; NaN where no held-out token came.   `best` u8 [1]: of
    PREDICTORS.   The better network's weights (`Predictor.arrays`) stand beside.
    """

    experts: Array
    neurons: Array
    best: Array
    network: Predictor

    def arrays(self) -> dict[str, Array]:
        """All by name, as stored."""
        held = {"experts": self.experts, "neurons": self.neurons, "best": self.best}
        return held | self.network.stored()

    @classmethod
    def from_arrays(cls, arrays: dict[str, Array], place: str) -> "LayerPredictors":
        """The predictors in a layer's file.

        Raises:  PackError if an array is missing, unknown, or of another dtype or shape; if the network is none.
        """
        wanted: dict[str, tuple[str, tuple[int, ...]]] = {
            "experts": ("F32", (len(PREDICTORS), 3)),
            "neurons": ("F32", (len(KINDS), len(HOT_SPARSITIES), 2)),
            "best": ("U8", (1,)),
        }
        network = {name: array for name, array in arrays.items() if name.endswith(("weight", "bias"))}
        check_arrays({name: array for name, array in arrays.items() if name not in network}, wanted, place)
        if arrays["best"][0] >= len(PREDICTORS):
            raise PackError(f"{place}: best is predictor {arrays['best'][0]}, expected less than {len(PREDICTORS)}")
        held = {name: arrays[name] for name in wanted}
        return cls(**held, network=Predictor.from_stored(network, place))


@dataclass(frozen=True, slots=True, eq=False)
class LayerInputs:
    """A MoE layer's inputs float32 [T, d] and routes int64 [T, k], of tokens learned from and of held-out ones."""

    learned: Tensor
    judged: Tensor
    learned_routes: Tensor
    judged_routes: Tensor


def predict_layer(
    weights: Weights,
    layer_idx: int,
    history: list[LayerInputs],
    paths: PathStatistics,
    thresholds: Array,
    device: torch.device,
) -> LayerPredictors:
    """Judges every predictor of the `layer_idx`-th MoE layer (1 or more), and trains the network.

    Args:    history: the layers before it, at most two, and itself, in order.   paths: learned from no held-out token.
             thresholds: float32 [E, kinds, sparsities], on abs(a).
    """
    before, own = history[:-1], history[-1]
    found: list[tuple[float, float, float]] = []
    k = own.judged_routes.shape[1]
    shares = np.tile(paths.popularity[layer_idx].astype(np.float32), (len(own.judged_routes), 1))
    told, _ = paths.predict(layer_idx, np.stack([held.judged_routes.numpy() for held in before], axis=1))
    networks = _train(before, own, weights.spec.router.num_experts)
    previous = torch.stack([held.judged_routes for held in before], dim=1)
    scores = [
        torch.from_numpy(shares),
        torch.from_numpy(told),
        router_scores(before[-1].judged.to(device), weights, weights.spec.moe_layers[layer_idx]).cpu(),
        *(network.scores(before[-1].judged, previous) for network in networks),
    ]
    for held in scores:
        recall, _ = recall_precision(held, own.judged_routes, k)
        found.append((recall, *recall_precision(held, own.judged_routes, 2 * k)))
    experts = np.asarray(found, np.float32)
    best_network = networks[int(experts[-2:, 0].argmax())]
    return LayerPredictors(
        experts=experts,
        neurons=_judge_neurons(weights, layer_idx, before[-1], own, thresholds, device),
        best=np.asarray([experts[:, 0].argmax()], np.uint8),
        network=best_network,
    )


def _train(before: list[LayerInputs], own: LayerInputs, num_experts: int) -> list[Predictor]:
    x = before[-1].learned
    previous = torch.stack([held.learned_routes for held in before], dim=1)  # [T, P, k]
    shapes = shapes_for(x.shape[1], num_experts)
    return [train(x, previous, own.learned_routes, num_experts, shape, _SEED) for shape in shapes]


@torch.inference_mode()
def _judge_neurons(
    weights: Weights, layer_idx: int, before: LayerInputs, own: LayerInputs, thresholds: Array, device: torch.device
) -> Array:
    counts = [[MaskCounts() for _ in HOT_SPARSITIES] for _ in KINDS]
    for expert in range(weights.spec.router.num_experts):
        token_idx = (own.judged_routes == expert).any(dim=1).nonzero().flatten()
        token_idx = token_idx[sample_places(len(token_idx), _NEURON_TOKENS)]
        if len(token_idx):
            inputs = [held.judged[token_idx].to(device) for held in (before, own)]
            _count(weights.expert(layer_idx, expert), weights.spec.expert.function, inputs, thresholds[expert], counts)
    return np.asarray(
        [[(c.recall, c.precision) if c.num_actual else (np.nan, np.nan) for c in row] for row in counts], np.float32
    )


def _count(
    expert: Expert, function: NeuronFunction, inputs: list[Tensor], thresholds: Array, counts: list[list[MaskCounts]]
) -> None:
    """Adds the masks of one expert: its selector on the layer before's inputs, and on its own."""
    for block in expert.blocks():
        told, own = (activations(x, block, function) for x in inputs)
        for kind, selector in enumerate(KINDS):
            predicted, actual = told.of(selector).abs(), own.of(selector).abs()
            for level, threshold in enumerate(thresholds[kind].tolist()):
                counts[kind][level] += mask_counts(predicted >= threshold, actual >= threshold)
