"""Predictions: the experts of the next MoE layer foretold while this one runs, each paper's way behind one face.

A prediction changes no answer: what is foretold is read ahead, and the router decides. Asked once a layer and token, so
that everything that could be made beforehand is.

    popularity   always the experts chosen most often
    paths        path statistics: EdgeMoE §III-C
    router       the next layer's router on this layer's input: CORM §4.2
    mlp          a learned network on this layer's input and the last routes: FloE §3.3.1
    partial      the next layer's router on the hidden state as far as it is known: importance §5.2
    best         for each layer what recalled best in the profile; the next router without one

From predictions to what is read ahead: which experts of the next layer, for one token or for a whole chunk.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import RunError
from moe_pack.runtime.model import TORCH, Operations, StoredMatrix, Weights, linear, mlp_input, router_scores
from moe_pack.runtime.offload.cache import Array
from moe_pack.runtime.offload.paths import PathStatistics, ranked
from moe_pack.runtime.offload.routing_file import PREDICTORS, Predictor, Routing

PredictionName = Literal["none", "popularity", "paths", "router", "mlp", "partial", "best"]
PREDICTION_NAMES: tuple[PredictionName, ...] = get_args(PredictionName)

Scores = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class PredictionInput:
    """What is known of T tokens when the experts of a MoE layer are foretold; "before" counts MoE layers.

    x: float32 [T, d], the input of the layer before, after its norm.
    routes: int64 [T, p, k], what the p <= 2 layers just before chose, oldest first.
    partial: float32 [T, d], what the foretold layer's own norm would take, as far as it can be computed now: of the
        layer before only the shared experts and those in fast memory have been added, then the layers up to this one's
        attention, whose keys and values the true ones will replace. None where nobody has computed it.
    """

    x: Tensor
    routes: NDArray[np.int64]
    partial: Tensor | None = None


class Prediction(Protocol):
    """Foretells the experts of the next MoE layer from what tokens did up to this one."""

    @property
    def needs_partial(self) -> bool:
        """Whether `PredictionInput.partial` is looked at: it costs an attention."""
        ...

    @property
    def num_bytes(self) -> int:
        """What it holds in memory of its own, beside weights and routing."""
        ...

    def scores(self, layer_idx: int, observed: PredictionInput) -> Scores | None:
        """How likely each expert of MoE layer `layer_idx`, 1 or more, is: [T, E], the larger the likelier.

        Rank them with `ranked`. None where it has no say. May be a view of what is asked for again: not to be changed.
        """
        ...


class PopularityPrediction:
    """The experts that most calibration tokens chose, whatever the token."""

    needs_partial = False

    def __init__(self, paths: PathStatistics) -> None:
        self._counts = paths.popularity.astype(np.float32)
        self.num_bytes = self._counts.nbytes

    def scores(self, layer_idx: int, observed: PredictionInput) -> Scores:
        """Counts of tokens, the same for every token."""
        row = self._counts[layer_idx]
        return np.broadcast_to(row, (len(observed.routes), len(row)))


class PathPrediction:
    """Path statistics on the routes of the two layers before. Source: EdgeMoE §III-C1."""

    needs_partial = False
    num_bytes = 0

    def __init__(self, paths: PathStatistics) -> None:
        self._paths = paths

    def scores(self, layer_idx: int, observed: PredictionInput) -> Scores:
        """Probabilities."""
        return self._paths.predict(layer_idx, observed.routes)[0]


class NextRouterPrediction:
    """The next layer's own router, on the input of the layer before. Source: CORM §4.2."""

    needs_partial = False
    num_bytes = 0

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def scores(self, layer_idx: int, observed: PredictionInput) -> Scores:
        """The router's scores."""
        return _array(router_scores(observed.x, self._weights, self._weights.spec.moe_layers[layer_idx]))


class PartialPrediction:
    """The next layer's norm and router, on the hidden state without the experts that are still to come.

    Source:  importance §5.2 and Fig. 10: the more score the experts in fast memory carry, the closer to the truth.
    """

    needs_partial = True
    num_bytes = 0

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def scores(self, layer_idx: int, observed: PredictionInput) -> Scores | None:
        """The router's scores; None where no partial hidden state is given."""
        if observed.partial is None:
            return None
        layer = self._weights.spec.moe_layers[layer_idx]
        return _array(router_scores(mlp_input(observed.partial, self._weights, layer), self._weights, layer))


class LearnedPrediction:
    """A network for each layer that has one. Source: FloE §3.3.1."""

    needs_partial = False

    def __init__(self, networks: Mapping[int, Predictor], operations: Operations = TORCH) -> None:
        """`networks`: by the MoE layer that each foretells."""
        self._networks = {layer_idx: _LoadedNetwork(network, operations) for layer_idx, network in networks.items()}
        self.num_bytes = sum(held.num_bytes for held in self._networks.values())

    def scores(self, layer_idx: int, observed: PredictionInput) -> Scores | None:
        """The network's logits; None for a layer without one."""
        held = self._networks.get(layer_idx)
        return None if held is None else held.scores(observed)


class BestPrediction:
    """For each layer one of several predictions; `otherwise` for layers that `chosen` has not."""

    needs_partial = False

    def __init__(self, chosen: Mapping[int, Prediction], otherwise: Prediction) -> None:
        self._chosen = dict(chosen)
        self._otherwise = otherwise
        held = {id(each): each for each in (*self._chosen.values(), otherwise)}
        self.num_bytes = sum(each.num_bytes for each in held.values())

    def scores(self, layer_idx: int, observed: PredictionInput) -> Scores | None:
        """Those of the layer's own prediction."""
        return self._chosen.get(layer_idx, self._otherwise).scores(layer_idx, observed)


def make_prediction(name: PredictionName, weights: Weights, routing: Routing | None) -> Prediction | None:
    """The prediction of this name; None for `none`. Networks are read here, once for all.

    Args:    routing: what lies beside the pack, if anything does.
    Raises:  RunError if the prediction needs a profile and there is none, or one that judged no predictors; PackError
             if a network is damaged.
    """
    plain: dict[str, Callable[[], Prediction | None]] = {
        "none": lambda: None,
        "router": lambda: NextRouterPrediction(weights),
        "partial": lambda: PartialPrediction(weights),
    }
    if name in plain:
        return plain[name]()
    if name == "best":
        return _best(weights, routing)
    if routing is None:
        raise RunError(
            f"prediction {name!r}: found no profile's routing beside the pack, which it needs; "
            "run moe-pack attach PACK --profile DIR, or predict by router"
        )
    if name == "mlp":
        return _learned(routing.judged_layers, weights, routing)
    return PopularityPrediction(routing.paths) if name == "popularity" else PathPrediction(routing.paths)


def _learned(layers: tuple[int, ...], weights: Weights, routing: Routing) -> LearnedPrediction:
    if not layers:
        raise RunError(
            "prediction 'mlp': found no networks in the profile beside the pack: its text was too short to hold any "
            "out; profile longer text and attach that, or predict by paths"
        )
    return LearnedPrediction({layer_idx: routing.network(layer_idx) for layer_idx in layers}, weights.operations)


def _best(weights: Weights, routing: Routing | None) -> BestPrediction:
    router = NextRouterPrediction(weights)
    if routing is None:
        return BestPrediction({}, router)
    names = {layer_idx: PREDICTORS[routing.best[layer_idx]] for layer_idx in routing.judged_layers}
    learned = tuple(layer_idx for layer_idx, name in names.items() if name.startswith("MLP"))
    by_name: dict[str, Prediction] = {
        "popularity": PopularityPrediction(routing.paths),
        "paths": PathPrediction(routing.paths),
        "next router": router,
    }
    if learned:
        network = _learned(learned, weights, routing)
        by_name |= {name: network for name in PREDICTORS if name.startswith("MLP")}
    return BestPrediction({layer_idx: by_name[name] for layer_idx, name in names.items()}, router)


class _LoadedNetwork:
    """A network ready for single tokens: matrices that multiply fast, a row of the first layer for each route.

    Sums are float32 as `Predictor.scores` has them, in another order.
    """

    def __init__(self, network: Predictor, operations: Operations) -> None:
        h, P, E = network.route_weight.shape
        x_weight, out_weight = (
            None if weight is None else operations.fastest_stored(weight)
            for weight in (network.x_weight, network.out_weight)
        )
        assert x_weight is not None, "every network takes hidden states"
        self._x_weight = StoredMatrix(x_weight, operations)
        self._by_route = network.route_weight.reshape(h, P * E).T.contiguous()  # [h, P, E] -> [P E, h]
        self._first_of = torch.arange(P)[:, None] * E  # [P, 1]: where a layer's rows begin
        self._bias = network.bias
        self._out_weight = None if out_weight is None else StoredMatrix(out_weight, operations)
        self._out_bias = network.out_bias
        held = (x_weight, self._by_route, self._bias, out_weight, self._out_bias)
        self.num_bytes = sum(tensor.nbytes for tensor in held if tensor is not None)

    def scores(self, observed: PredictionInput) -> Scores:
        places = (torch.from_numpy(observed.routes) + self._first_of).flatten(1)  # [T, P, k] -> [T, P k]
        routed = self._by_route[places].float().sum(dim=1)  # [T, P k, h] -> [T, h]
        first = linear(observed.x.cpu(), self._x_weight, self._bias) + routed
        if self._out_weight is None:
            return _array(first)
        return _array(linear(torch.relu(first), self._out_weight, self._out_bias))


def _array(scores: Tensor) -> Scores:
    array: Scores = scores.cpu().numpy()
    return array


_NEARLY_ALL = 0.9  # of a layer's experts: a chunk that is expected to need so many is not worth a prediction


class Prefetcher:
    """Says which experts of a layer to read ahead, likeliest first.

    Args:    prediction: None where only chunks that need nearly all experts are foretold.   num_ahead: experts for one
             token; of more tokens every one that any of them is foretold to choose, the most chosen first.
    """

    def __init__(self, prediction: Prediction | None, num_experts: int, num_active: int, num_ahead: int) -> None:
        self._prediction = prediction
        self._num_experts, self._num_active, self._num_ahead = num_experts, num_active, num_ahead

    @property
    def needs_partial(self) -> bool:
        """Whether `PredictionInput.partial` is looked at."""
        return self._prediction is not None and self._prediction.needs_partial

    def predict(self, layer_idx: int, observed: PredictionInput) -> Sequence[int]:
        """The experts of MoE layer `layer_idx` to read ahead."""
        num_tokens = len(observed.x)
        if self.expects_nearly_all(num_tokens):
            return range(self._num_experts)  # as they lie in their file
        scores = self._prediction.scores(layer_idx, observed) if self._prediction else None
        if scores is None:
            return ()
        if num_tokens == 1:
            likeliest: list[int] = ranked(scores, self._num_ahead)[0].tolist()
            return likeliest
        return _most_chosen(ranked(scores, self._num_active), self._num_experts)

    def expects_nearly_all(self, num_tokens: int) -> bool:
        """Whether so many tokens, were their choices independent and even, would choose nearly all experts."""
        return num_tokens > 1 and 1 - (1 - self._num_active / self._num_experts) ** num_tokens > _NEARLY_ALL


def _most_chosen(chosen: Array, num_experts: int) -> list[int]:
    """The experts of choices [T, k], those of most tokens first."""
    counts = np.bincount(chosen.ravel(), minlength=num_experts)
    order: list[int] = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)].tolist()
    return order
