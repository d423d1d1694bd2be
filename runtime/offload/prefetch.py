"""Prediction of the experts of the next MoE layer while this one runs: the method of each paper behind one interface.

A prediction changes no answer: predicted experts are prefetched, and the router decides. It runs once for each layer
and token; therefore everything that can be prepared is.

    popularity   always the experts that calibration tokens chose most often
    paths        path statistics: EdgeMoE §III-C
    router       the next layer's router on this layer's input: CORM §4.2
    mlp          a learned network on this layer's input and the last routes: FloE §3.3.1
    partial      the next layer's router on the hidden state as far as it is known, "partial state": importance §5.2
    best         for each layer the prediction with the best recall in the profile; without a profile the next router

`Prefetcher` turns predictions into the experts to prefetch, for one token or for a whole pass. Nothing is predicted
where a table names the experts of each token: exactly these are prefetched (EdgeMoE §III-A).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack import formats
from moe_pack.formats.parts.specs import first_moe_layers
from moe_pack.runtime import model
from moe_pack.runtime.offload import presets
from moe_pack.runtime.offload.cache import Array

if TYPE_CHECKING:
    from moe_pack.runtime.offload import routing_file
    from moe_pack.runtime.offload.paths import PathStatistics

Scores = NDArray[np.float32]
MethodName = Literal["popularity", "paths", "router", "mlp", "partial"]
_METHODS: dict[str, MethodName] = {  # by the names of PREDICTORS
    "popularity": "popularity",
    "paths": "paths",
    "next router": "router",
    "MLP of one layer": "mlp",
    "MLP of two layers": "mlp",
    "partial state": "partial",
}


@dataclass(frozen=True, slots=True, eq=False)
class PredictionInput:
    """The inputs of a prediction for T tokens; "before" counts MoE layers."""

    x: Tensor  # float32 [T, d], the input of the layer before, after its norm
    routes: NDArray[np.int64]  # [T, p, k], of the p <= 2 layers just before, oldest first
    # float32 [T, d], the predicted layer's input before its norm, as far as it can be computed now; None if it was not.
    # The layer before has added only its shared experts and its resident ones; the layers in between and the predicted
    # layer's attention have run on that, and the true keys and values will replace theirs.
    partial: Tensor | None = None
    named: NDArray[np.int64] | None = None  # [T, k], the predicted layer's experts, where a table names them
    lacks_routes: bool = False  # whether a GPU has run some of the experts, which `routes` does not name


class Prediction:
    """A prediction of the experts of the next MoE layer from the input of this one."""

    def needs_partial(self, layer_idx: int) -> bool:
        """Returns whether it predicts MoE layer `layer_idx` by `PredictionInput.partial`, which costs an attention."""
        return False

    def needs_routes(self, layer_idx: int) -> bool:
        """Returns whether it predicts MoE layer `layer_idx` by all experts of `PredictionInput.routes`."""
        return False

    def scores(self, layer_idx: int, observed: PredictionInput) -> Scores | None:
        """Returns scores [T, E] of the experts of MoE layer `layer_idx`, 1 or more; a likelier expert has a larger one.

        Rank them with `ranked`. None if it cannot predict this layer. The array may be shared: do not change it.
        """
        raise NotImplementedError


class PopularityPrediction(Prediction):
    """Predicts the experts that most calibration tokens chose, the same for every token."""

    def __init__(self, paths: "PathStatistics") -> None:
        self._counts = paths.popularity.astype(np.float32)

    def scores(self, layer_idx: int, observed: PredictionInput) -> Scores:
        row = self._counts[layer_idx]
        return np.broadcast_to(row, (len(observed.routes), len(row)))


class PathPrediction(Prediction):
    """Predicts by path statistics from the routes of the two layers before. Source: EdgeMoE §III-C1."""

    def __init__(self, paths: "PathStatistics") -> None:
        self._paths = paths

    def needs_routes(self, layer_idx: int) -> bool:
        return True

    def scores(self, layer_idx: int, observed: PredictionInput) -> Scores:
        return self._paths.predict(layer_idx, observed.routes)[0]


class NextRouterPrediction(Prediction):
    """Predicts by the next layer's router on the input of the layer before. Source: CORM §4.2."""

    def __init__(self, weights: model.Weights) -> None:
        self._weights = weights

    def scores(self, layer_idx: int, observed: PredictionInput) -> Scores | None:
        layer = self._weights.spec.moe_layers[layer_idx]
        if layer in self._weights.spec.router.table_layers:
            return None
        return model.router_scores(observed.x, self._weights, layer).cpu().numpy()


class PartialPrediction(Prediction):
    """Predicts by the next layer's norm and router on the hidden state without the missing experts.

    Source:  importance §5.2 and Fig. 10: the larger the scores of the resident experts, the better the prediction.
    """

    def __init__(self, weights: model.Weights) -> None:
        self._weights = weights

    def needs_partial(self, layer_idx: int) -> bool:
        return self._weights.spec.moe_layers[layer_idx] not in self._weights.spec.router.table_layers

    def scores(self, layer_idx: int, observed: PredictionInput) -> Scores | None:
        layer = self._weights.spec.moe_layers[layer_idx]
        if observed.partial is None or layer in self._weights.spec.router.table_layers:
            return None
        x = model.mlp_input(observed.partial, self._weights, layer)
        return model.router_scores(x, self._weights, layer).cpu().numpy()


class LearnedPrediction(Prediction):
    """Predicts by a network for each layer that has one, by its number. Source: FloE §3.3.1."""

    def __init__(
        self, networks: "Mapping[int, routing_file.Predictor]", operations: model.Operations = model.TORCH
    ) -> None:
        self._networks = {layer_idx: _LoadedNetwork(network, operations) for layer_idx, network in networks.items()}

    def needs_routes(self, layer_idx: int) -> bool:
        return layer_idx in self._networks

    def scores(self, layer_idx: int, observed: PredictionInput) -> Scores | None:
        network = self._networks.get(layer_idx)
        return None if network is None else network.scores(observed)


class BestPrediction(Prediction):
    """Predicts each layer by its entry in `chosen`, and layers without one by `otherwise`."""

    def __init__(self, chosen: Mapping[int, Prediction], otherwise: Prediction) -> None:
        self._chosen = dict(chosen)
        self._otherwise = otherwise

    def needs_partial(self, layer_idx: int) -> bool:
        return self._chosen.get(layer_idx, self._otherwise).needs_partial(layer_idx)

    def needs_routes(self, layer_idx: int) -> bool:
        return self._chosen.get(layer_idx, self._otherwise).needs_routes(layer_idx)

    def scores(self, layer_idx: int, observed: PredictionInput) -> Scores | None:
        return self._chosen.get(layer_idx, self._otherwise).scores(layer_idx, observed)


def methods_by_layer(
    name: presets.PredictionName, spec: formats.ModelSpec, routing: "routing_file.Routing | None"
) -> dict[int, MethodName]:
    """Returns the method that predicts each MoE layer; the first layer of a stack, and others without one, are missing.

    Raises:  RunError if the prediction needs a profile's routing and there is none, or one without networks.
    """
    first = first_moe_layers(spec)
    layers = [layer_idx for layer_idx in range(len(spec.moe_layers)) if layer_idx not in first]
    if name == "none":
        return {}
    if name == "best":
        judged = () if routing is None else routing.judged_layers
        chosen = {} if routing is None else {l: _METHODS[presets.PREDICTORS[routing.best[l]]] for l in judged}
        return {layer_idx: chosen.get(layer_idx, "router") for layer_idx in layers}
    if name in ("router", "partial"):
        return dict.fromkeys(layers, name)
    if routing is None:
        raise formats.RunError(
            f"prediction {name!r}: the pack has no routing of a profile, which it needs; "
            "run moe-pack attach PACK --profile DIR, or predict by router"
        )
    if name == "mlp" and not routing.judged_layers:
        raise formats.RunError(
            "prediction 'mlp': the pack's profile has no networks, because its text was too short to hold any out; "
            "profile longer text and attach that, or predict by paths"
        )
    return dict.fromkeys(routing.judged_layers if name == "mlp" else layers, name)


def make_prediction(
    name: presets.PredictionName, weights: model.Weights, routing: "routing_file.Routing | None"
) -> Prediction | None:
    """Returns the prediction of this name; None for `none`. Reads the networks that it needs.

    Raises:  as `methods_by_layer`; PackError if a network is damaged.
    """
    by_layer = methods_by_layer(name, weights.spec, routing)
    learned = [layer_idx for layer_idx, method in by_layer.items() if method == "mlp"]
    made: dict[MethodName, Prediction] = {
        "router": NextRouterPrediction(weights),
        "partial": PartialPrediction(weights),
    }
    if routing is not None:
        made |= {"popularity": PopularityPrediction(routing.paths), "paths": PathPrediction(routing.paths)}
        if learned:
            networks = {layer_idx: routing.network(layer_idx) for layer_idx in learned}
            made["mlp"] = LearnedPrediction(networks, weights.operations)
    if name == "none":
        return None
    if name == "best":
        return BestPrediction({l: made[method] for l, method in by_layer.items()}, made["router"])
    return made[name]


class _LoadedNetwork:
    """A network that is fast for single tokens: it adds a row of the first layer for each route.

    Sums are float32 as in `Predictor.scores`, in another order.
    """

    def __init__(self, network: "routing_file.Predictor", operations: model.Operations) -> None:
        h, P, E = network.route_weight.shape
        x_weight = operations.fastest_stored(network.x_weight)
        out_weight = None if network.out_weight is None else operations.fastest_stored(network.out_weight)
        self._x_weight = model.StoredMatrix(x_weight, operations)
        self._by_route = network.route_weight.reshape(h, P * E).T.contiguous()  # [h, P, E] -> [P E, h]
        self._first_of = torch.arange(P)[:, None] * E  # [P, 1]: the first row of a layer
        self._bias = network.bias
        self._out_weight = None if out_weight is None else model.StoredMatrix(out_weight, operations)
        self._out_bias = network.out_bias

    def scores(self, observed: PredictionInput) -> Scores:
        places = (torch.from_numpy(observed.routes) + self._first_of).flatten(1)  # [T, P, k] -> [T, P k]
        routed = self._by_route[places].float().sum(dim=1)  # [T, P k, h] -> [T, h]
        first = model.linear(observed.x.cpu(), self._x_weight, self._bias) + routed
        if self._out_weight is None:
            return first.cpu().numpy()
        return model.linear(torch.relu(first), self._out_weight, self._out_bias).cpu().numpy()


def ranked(probabilities: NDArray[np.float32], num_predicted: int) -> NDArray[np.int64]:
    """Returns the likeliest experts of each row, best first, equals by index: [N, num_predicted] for [N, E]."""
    return np.argsort(-probabilities, axis=1, kind="stable")[:, :num_predicted].astype(np.int64, copy=False)


_NEARLY_ALL = 0.9  # if a pass probably needs this share of a layer's experts, all of them are prefetched


class Prefetcher:
    """Chooses the experts of a layer to prefetch, likeliest first.

    Args:    prediction: None if there are prefetches only for passes that need nearly all experts.   num_predicted:
             experts for one token. For several tokens, all experts predicted for any of them, the most chosen first.
    """

    def __init__(self, prediction: Prediction | None, num_experts: int, num_active: int, num_predicted: int) -> None:
        self._prediction = prediction
        self._num_experts, self._num_active, self._num_predicted = num_experts, num_active, num_predicted

    def needs_partial(self, layer_idx: int, num_tokens: int) -> bool:
        """Returns whether it uses `PredictionInput.partial` to predict a layer for so many tokens."""
        if self._prediction is None or self.expects_nearly_all(num_tokens):
            return False
        return self._prediction.needs_partial(layer_idx)

    def predict(self, layer_idx: int, observed: PredictionInput) -> Sequence[int]:
        """Returns the experts of MoE layer `layer_idx` to prefetch."""
        num_tokens = len(observed.x)
        if observed.named is not None:
            return most_chosen(observed.named, self._num_experts)
        if self.expects_nearly_all(num_tokens):
            return range(self._num_experts)  # in the order of the file
        if self._prediction is None or (observed.lacks_routes and self._prediction.needs_routes(layer_idx)):
            return ()
        scores = self._prediction.scores(layer_idx, observed)
        if scores is None:
            return ()
        if num_tokens == 1:
            likeliest: list[int] = ranked(scores, self._num_predicted)[0].tolist()
            return likeliest
        return most_chosen(ranked(scores, self._num_active), self._num_experts)

    def expects_nearly_all(self, num_tokens: int) -> bool:
        """Returns whether so many tokens would choose nearly all experts if choices were independent and uniform."""
        return num_tokens > 1 and 1 - (1 - self._num_active / self._num_experts) ** num_tokens > _NEARLY_ALL


def most_chosen(chosen: Array, num_experts: int) -> list[int]:
    """Returns the experts in the choices [T, k], those of most tokens first."""
    counts = np.bincount(chosen.ravel(), minlength=num_experts)
    order: list[int] = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)].tolist()
    return order
