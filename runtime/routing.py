"""`routing.safetensors`: what a profile found of a model's routes, beside the pack, to place experts and foretell them.

Nothing of it decides what a model answers. Written from a profile by `moe-pack convert` and `moe-pack attach`; it
belongs to the pack's content but for the thresholds, which may change without it. Specified in docs/format.md.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import (
    ModelSpec,
    Pack,
    PackError,
    TensorSidecar,
    first_moe_layers,
    open_tensor_sidecar,
    root_without_thresholds,
    tensor_sidecar_bytes,
    write_tensor_sidecar,
)
from moe_pack.runtime.mlp_predictor import MAX_PREVIOUS, Predictor
from moe_pack.runtime.path_statistics import PathStatistics
from moe_pack.runtime.routing_checks import RoutingChecks

Array = NDArray[Any]

ROUTING_FILE = "routing.safetensors"
MAX_ROUTED_TOKENS = 4096  # held-out tokens whose routes are kept: policies are compared on them
PREDICTORS = ("popularity", "paths", "next router", "MLP of one layer", "MLP of two layers")
NO_PREDICTOR = 255  # the `best` of a layer for which none was judged
_PATHS, _NETWORK = "paths.", "network."
_DTYPES = {np.dtype("<u1"): "U8", np.dtype("<u2"): "U16", np.dtype("<u4"): "U32", np.dtype("<f4"): "F32"}


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """What is known of the routes of a model with L MoE layers of E experts, k a token.

    `popularity` u32 [L, E]: tokens that chose the expert; `mass` f32 [L, E]: the sum of their router weights for it.
    `paths`: learned from tokens that were not held out.   `recalls` f32 [L, 5, 3]: on held-out tokens, for each of
    PREDICTORS, the recall of the k experts ranked first, and recall and precision of the first 2k; NaN where none was
    judged.   `best` u8 [L]: the predictor of largest recall, or NO_PREDICTOR.   `routes` u16 [T, L, k]: of held-out
    tokens, best first, in sequences of `sequence_length`; T may be 0.   `network`: the learned network that foretells
    a layer for which predictors were judged.
    """

    popularity: Array
    mass: Array
    paths: PathStatistics
    recalls: Array
    best: Array
    routes: Array
    sequence_length: int
    network: Callable[[int], Predictor]

    @classmethod
    def open(cls, pack: Pack) -> "Routing | None":
        """What lies beside a pack; None where nothing does, or what does belongs to other content.

        Networks are read when they are asked for, from the file that was found whole here.
        Raises:  PackError if the file is damaged, or what it holds cannot be of this model.
        """
        sidecar = open_tensor_sidecar(pack.folder, ROUTING_FILE, root_without_thresholds(pack.manifest))
        if sidecar is None:
            return None
        with sidecar:
            return _read(sidecar, pack.folder, pack.spec)

    @property
    def judged_layers(self) -> tuple[int, ...]:
        """The MoE layers for which predictors were judged, and a network was kept."""
        return tuple(int(l) for l in np.flatnonzero(self.best != NO_PREDICTOR))

    @property
    def best_recall(self) -> float | None:
        """The recall of each judged layer's best predictor, on the mean; None where none was judged."""
        layers = self.judged_layers
        return float(np.mean([self.recalls[l, self.best[l], 0] for l in layers])) if layers else None


def write_routing(pack: Pack, routing: Routing) -> None:
    """Writes `routing.safetensors` beside a pack of the same model, in the place of one that is there.

    Raises:  ConversionError if somebody is writing in the folder, or its drive refuses.
    """
    tensors = ((name, _dtype(name, values), values) for name, values in _arrays(routing))
    write_tensor_sidecar(pack.folder, ROUTING_FILE, tensors, root_without_thresholds(pack.manifest))


def routing_file_bytes(routing: Routing) -> int:
    """How long `routing.safetensors` will be, to the byte."""
    return tensor_sidecar_bytes((name, _dtype(name, values), values.shape) for name, values in _arrays(routing))


def _arrays(routing: Routing) -> Iterator[tuple[str, Array]]:
    """All arrays by their names in the file, in its order."""
    yield "popularity", routing.popularity
    yield "mass", routing.mass
    yield "recalls", routing.recalls
    yield "best", routing.best
    yield "routes", routing.routes
    yield "sequence_length", np.asarray([routing.sequence_length], "<u4")
    for name, values in routing.paths.arrays().items():
        yield _PATHS + name, values
    for layer_idx in routing.judged_layers:
        for name, values in routing.network(layer_idx).stored().items():
            yield f"{_NETWORK}{layer_idx}.{name}", values


def _dtype(name: str, values: Array) -> str:
    """The dtype's name in safetensors; the weights of networks, u16 here, are bfloat16."""
    is_weight = name.startswith(_NETWORK) and name.endswith("_weight")
    return "BF16" if is_weight else _DTYPES[values.dtype]


def _read(sidecar: TensorSidecar, folder: Path, spec: ModelSpec) -> Routing:
    L, E, k = len(spec.moe_layers), spec.router.num_experts, spec.router.num_experts_per_tok
    checks = RoutingChecks(sidecar, ROUTING_FILE, L, E, k)
    popularity = checks.popularity("popularity")
    mass, recalls = checks.mass("mass"), checks.recalls("recalls", len(PREDICTORS))
    best = checks.best("best", recalls, NO_PREDICTOR)
    sequence_length = checks.sequence_length("sequence_length", MAX_ROUTED_TOKENS)
    routes = checks.routes("routes", sequence_length, MAX_ROUTED_TOKENS)
    names = [field.name for field in fields(PathStatistics)]
    paths = {name: checks.read(_PATHS + name) for name in names}
    for layer_idx in np.flatnonzero(best != NO_PREDICTOR).tolist():
        checks.leave(f"{_NETWORK}{layer_idx}.")
    checks.nothing_else()
    return Routing(
        popularity,
        mass,
        PathStatistics.from_arrays(paths, f"{ROUTING_FILE}: {_PATHS}*", L, E, k),
        recalls,
        best,
        routes,
        sequence_length,
        _Networks(folder, sidecar.sha256, spec).read,
    )


@dataclass(frozen=True, slots=True)
class _Networks:
    """The networks in a file that was found whole, each read when asked for: a large model's are 100 MB and more."""

    folder: Path
    sha256: str
    spec: ModelSpec

    def read(self, layer_idx: int) -> Predictor:
        """The network that foretells the `layer_idx`-th MoE layer."""
        prefix = f"{_NETWORK}{layer_idx}."
        with TensorSidecar(self.folder, ROUTING_FILE, self.sha256) as sidecar:
            names = [name for name in sidecar.entries if name.startswith(prefix)]
            arrays = {name.removeprefix(prefix): sidecar.read(name) for name in names}
        place = f"{ROUTING_FILE}: {prefix}*"
        network = Predictor.from_stored(arrays, place)
        sizes = (network.hidden_size, network.num_experts, network.num_previous)
        begin = max(first for first in first_moe_layers(self.spec) if first <= layer_idx)  # of its stack
        expected = (self.spec.hidden_size, self.spec.router.num_experts, min(layer_idx - begin, MAX_PREVIOUS))
        if sizes != expected:
            d, E, P = expected
            raise PackError(
                f"{place}: found sizes {list(sizes)}, expected d = {d}, E = {E}, P = {P}; attach the profile again"
            )
        return network
