"""Routing for tests: made up at random, as a profile of any shape would give it."""

import numpy as np

from moe_pack.calib.statistics import learn_paths
from moe_pack.runtime.offload import PREDICTORS, Predictor, Routing
from moe_pack.runtime.offload.routing_file import NO_PREDICTOR
from support.predictors import random_predictor


def random_routes(
    num_tokens: int, num_layers: int, num_experts: int, k: int, seed: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    """[T, L, k], best first; lower experts are chosen more often."""
    scores = np.random.default_rng(seed).gumbel(size=(num_tokens, num_layers, num_experts)) - 0.3 * np.arange(
        num_experts
    )
    return np.argsort(-scores, axis=2)[:, :, :k].astype("<u2")


def random_routing(num_layers: int, num_experts: int, k: int, d: int, best: tuple[int, ...], seed: int = 0) -> Routing:
    """Routes of 12 tokens held out in sequences of 6, learned from 60 others.

    Args:    best: of PREDICTORS, from layer 1 on; NO_PREDICTOR for one that was not judged.
    """
    generator = np.random.default_rng(seed)
    routes = random_routes(72, num_layers, num_experts, k, seed)
    counts = [np.bincount(routes[:, l].ravel(), minlength=num_experts) for l in range(num_layers)]
    recalls = generator.uniform(0, 0.5, (num_layers, len(PREDICTORS), 3)).astype("<f4")
    for l, predictor in enumerate((NO_PREDICTOR, *best)):
        if predictor == NO_PREDICTOR:
            recalls[l] = np.nan
        else:
            recalls[l, predictor, 0] = 0.75

    def network(layer_idx: int) -> Predictor:
        num_layers = 1 if best[layer_idx - 1] == 3 else 2
        return random_predictor(num_layers, d, num_experts, min(layer_idx, 2), 8, layer_idx)

    return Routing(
        popularity=np.stack(counts).astype("<u4"),
        mass=(np.stack(counts) * 0.4).astype("<f4"),
        paths=learn_paths(routes[:60], num_experts, 1 << 20),
        recalls=recalls,
        best=np.asarray((NO_PREDICTOR, *best), "<u1"),
        routes=routes[60:],
        sequence_length=6,
        network=network,
    )
