"""The checks of the arrays of `routing.safetensors`: one of another form, or that nothing could have given, is refused.

Path statistics have checks of their own (`path_checks`), and networks (`mlp_predictor`).

FloE's learned predictor: the experts of the next MoE layer from this layer's hidden state and the last routes.

A network of one layer or two for each MoE layer. It sees the input of MoE layer l, after its norm, and the experts
chosen at l - 1 and l (at l = 0 only there), and gives each expert of layer l + 1 a score. Trained by calibration
(`moe_pack.calib.mlp_predictor`), kept with bfloat16 weights.

Source:  FloE §3.3.1.

`routing.safetensors`: what a profile found of a model's routes, beside the pack, to place experts and foretell them.

Nothing of it decides what a model answers. Written from a profile by `moe-pack convert` and `moe-pack attach`; it
belongs to the pack's content but for the thresholds, which may change without it. Specified in docs/format.md.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from moe_pack.formats import ModelSpec, Pack, PackError
from moe_pack.formats.manifest import root_without_thresholds
from moe_pack.formats.sidecar import TensorSidecar, open_tensor_sidecar, tensor_sidecar_bytes, write_tensor_sidecar
from moe_pack.formats.spec import first_moe_layers
from moe_pack.runtime.offload.paths import PathStatistics

Array = NDArray[Any]


class RoutingChecks:
    """Reads the arrays of a sidecar for a model of L MoE layers of E experts, k a token, each checked.

    Raises:  PackError, from every method, naming the array that is missing or cannot be.
    """

    def __init__(self, sidecar: TensorSidecar, place: str, num_layers: int, num_experts: int, num_chosen: int) -> None:
        self._sidecar = sidecar
        self._place = place
        self._L, self._E, self._k = num_layers, num_experts, num_chosen
        self._left = set(sidecar.entries)

    def popularity(self, name: str) -> Array:
        """Tokens that chose each expert, u32 [L, E]: k choices of each token, equally many tokens at every layer."""
        counts = self._form(name, "U32", (self._L, self._E))
        choices = counts.sum(axis=1, dtype=np.int64)
        T = int(choices[0]) // self._k
        if T < 1 or (choices != T * self._k).any() or counts.max() > T:
            raise self._fault(name, "counts that no tokens give", f"{self._k} experts of each token at every layer")
        return counts

    def mass(self, name: str) -> Array:
        """Sums of router weights, f32 [L, E]."""
        sums = self._form(name, "F32", (self._L, self._E))
        if not (np.isfinite(sums) & (sums >= 0)).all():
            raise self._fault(name, "a negative sum or no number", "sums of weights")
        return sums

    def recalls(self, name: str, num_predictors: int) -> Array:
        """What was judged of each predictor, f32 [L, predictors, 3]: shares, or all NaN for a layer without."""
        shares = self._form(name, "F32", (self._L, num_predictors, 3))
        judged: Array = np.asarray(~np.isnan(shares).all(axis=(1, 2)))
        are_shares: Array = np.asarray(((shares >= 0) & (shares <= 1)).all(axis=(1, 2)))
        if judged[0] or (judged & ~are_shares).any():
            raise self._fault(name, "no shares", "shares from 0 to 1, or all NaN, as in layer 0")
        return shares

    def best(self, name: str, recalls: Array, none: int) -> Array:
        """The first predictor of largest recall in each layer, u8 [L]; `none` where none was judged."""
        best = self._form(name, "U8", (self._L,))
        recall = np.where(np.isnan(recalls[:, :, 0]), -1, recalls[:, :, 0])
        expected = np.where(np.isnan(recalls[:, 0, 0]), none, recall.argmax(axis=1))
        if (best != expected).any():
            raise self._fault(name, f"{best.tolist()}", f"{expected.tolist()}, the largest recalls")
        return best

    def sequence_length(self, name: str, most: int) -> int:
        """Tokens of a sequence, u32 [1]."""
        length = int(self._form(name, "U32", (1,))[0])
        if not 0 < length <= most:
            raise self._fault(name, f"{length}", f"from 1 to {most} tokens")
        return length

    def routes(self, name: str, sequence_length: int, most: int) -> Array:
        """The experts of tokens, u16 [T, L, k]: T whole sequences, a token's experts different ones of a layer's."""
        shape = self._shape(name)
        T = shape[0] if shape else 0
        if most < T or T % sequence_length:
            raise self._fault(name, f"{T} tokens", f"whole sequences of {sequence_length}, at most {most}")
        routes = self._form(name, "U16", (T, self._L, self._k))
        ordered = np.sort(routes, axis=2)
        if T and (ordered.max() >= self._E or (ordered[..., 1:] == ordered[..., :-1]).any()):
            raise self._fault(name, "no routes", f"{self._k} different experts below {self._E}")
        return routes

    def read(self, name: str) -> Array:
        """An array that is checked elsewhere."""
        self._left.discard(name)
        return self._sidecar.read(name)

    def leave(self, prefix: str) -> None:
        """Arrays of these names are checked when they are read."""
        self._left = {name for name in self._left if not name.startswith(prefix)}

    def nothing_else(self) -> None:
        """All arrays of the file have been read, or left for later."""
        if self._left:
            raise PackError(f"{self._place}: unknown tensor {min(self._left)!r}; attach the profile again")

    def _shape(self, name: str) -> tuple[int, ...]:
        entry = self._sidecar.entries.get(name)
        return () if entry is None else entry.shape

    def _form(self, name: str, dtype: str, shape: tuple[int, ...]) -> Array:
        """Size before anything is read: of another form nothing is allocated."""
        entry = self._sidecar.entries.get(name)
        if entry is not None and (entry.dtype, entry.shape) != (dtype, shape):
            raise self._fault(name, f"{entry.dtype} {list(entry.shape)}", f"{dtype} {list(shape)}")
        return self.read(name)

    def _fault(self, name: str, found: str, expected: str) -> PackError:
        return PackError(
            f"{self._place}: tensor {name!r}: found {found}, expected {expected}; attach the profile again"
        )


MAX_PREVIOUS = 2  # FloE's trajectory: the two layers before the predicted one
_BLOCK_TOKENS = 1024  # bounds memory

# The axes of each tensor kept; `h` is E where there is one layer.
_AXES = {"x_weight": "hd", "route_weight": "hPE", "bias": "h", "out_weight": "Eh", "out_bias": "E"}
_ONE_LAYER = ("x_weight", "route_weight", "bias")


@dataclass(frozen=True, slots=True, eq=False)
class Predictor:
    """A trained predictor; it takes hidden states as they are: the standardising of its training lies in its weights.

    Below, h is E where there is one layer, else the number of hidden units.

    x_weight: bfloat16 [h, d].   route_weight: bfloat16 [h, P, E], the layer further back first.   bias: float32 [h].
    out_weight: bfloat16 [E, h].   out_bias: float32 [E].   Both None where there is one layer.
    """

    x_weight: Tensor
    route_weight: Tensor
    bias: Tensor
    out_weight: Tensor | None = None
    out_bias: Tensor | None = None

    @property
    def hidden_size(self) -> int:
        """d, the size of the hidden states it takes."""
        return self.x_weight.shape[1]

    @property
    def num_previous(self) -> int:
        """P, how many layers' routes it takes."""
        return self.route_weight.shape[1]

    @property
    def num_experts(self) -> int:
        """E, of the layer it predicts and of those before."""
        return self.route_weight.shape[2]

    @property
    def num_parameters(self) -> int:
        """Weights and biases."""
        return sum(tensor.numel() for tensor in self.arrays().values())

    def scores(self, x: Tensor, previous: Tensor) -> Tensor:
        """How likely each expert of the next layer is: logits, the larger the likelier.

        Args:    x: float32 [T, d], the input of the MoE layer, after its norm.   previous: int64 [T, P, k], the
                 experts chosen at the P layers before the predicted one, the layer further back first.
        Returns: float32 [T, E].
        """
        layers = [tensor.float() for tensor in self.arrays().values()]
        layers[1] = layers[1].flatten(1)  # [h, P, E] -> [h, P E]
        blocks = zip(torch.split(x, _BLOCK_TOKENS), torch.split(previous, _BLOCK_TOKENS), strict=True)
        with torch.no_grad():
            return torch.cat(
                [network_logits(layers, part, multi_hot(routes, self.num_experts)) for part, routes in blocks]
            )

    def arrays(self) -> dict[str, Tensor]:
        """Its tensors by name, as a sidecar keeps them."""
        tensors = (self.x_weight, self.route_weight, self.bias, self.out_weight, self.out_bias)
        return {name: tensor for name, tensor in zip(_AXES, tensors, strict=True) if tensor is not None}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Tensor], place: str) -> "Predictor":
        """The predictor that these tensors are.

        Args:    place: the file and layer they come from, for errors.
        Raises:  PackError if a tensor is missing, unknown, of another type or shape, or not all numbers.
        """
        names = set(_ONE_LAYER if "out_weight" not in arrays else _AXES)
        if arrays.keys() != names:
            raise _damaged(place, f"found tensors {sorted(arrays)}", f"{sorted(names)}")
        sizes: dict[str, int] = {}
        for name in sorted(names):
            axes = _AXES[name] if "out_weight" in names else _AXES[name].replace("h", "E")
            _check_array(f"{place}: {name}", arrays[name], name.endswith("weight"), axes, sizes)
        if sizes["P"] > MAX_PREVIOUS:
            raise _damaged(place, f"found routes of {sizes['P']} layers", f"at most {MAX_PREVIOUS}")
        return cls(**arrays)

    def stored(self) -> dict[str, NDArray[Any]]:
        """Its tensors as files keep them: little-endian arrays, bfloat16 as the u16 of its bits."""
        return {name: _stored(tensor) for name, tensor in self.arrays().items()}

    @classmethod
    def from_stored(cls, arrays: Mapping[str, NDArray[Any]], place: str) -> "Predictor":
        """The predictor whose `stored()` these arrays are; raises as `from_arrays` does."""
        return cls.from_arrays({name: _loaded(array) for name, array in arrays.items()}, place)


def network_logits(layers: list[Tensor], x: Tensor, routes: Tensor) -> Tensor:
    """Logits, float32 [T, E], of x [T, d] and the multi-hot routes [T, P E]."""
    first = functional.linear(x, layers[0], layers[2]) + functional.linear(routes, layers[1])
    return first if len(layers) == 3 else functional.linear(functional.relu(first), layers[3], layers[4])


def multi_hot(experts: Tensor, num_experts: int) -> Tensor:
    """From int64 [T, P, k] to float32 [T, P E]: 1 where an expert was chosen."""
    places = torch.zeros(*experts.shape[:2], num_experts)
    return places.scatter_(2, experts, 1.0).flatten(1)


def _stored(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = (
        tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    )
    return array


def _loaded(array: NDArray[Any]) -> Tensor:
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def _check_array(place: str, tensor: Tensor, is_weight: bool, axes: str, sizes: dict[str, int]) -> None:
    """Refuses a tensor of another type or shape; `sizes` holds the axes known so far and takes in new ones."""
    dtype = torch.bfloat16 if is_weight else torch.float32
    if tensor.dtype != dtype:
        raise _damaged(place, f"found {tensor.dtype}", f"{dtype}")
    shape = list(tensor.shape)
    fits = len(shape) == len(axes) and all(shape)
    if not fits or any(sizes.setdefault(axis, size) != size for axis, size in zip(axes, shape, strict=True)):
        known = ", ".join(f"{axis} = {sizes[axis]}" if axis in sizes else axis for axis in axes)
        raise _damaged(place, f"found shape {shape}", f"[{known}]")
    if not torch.isfinite(tensor).all():
        raise _damaged(place, "found NaN or infinity", "numbers")


def _damaged(place: str, found: str, expected: str) -> PackError:
    return PackError(f"{place}: {found}, expected {expected}; the predictor is damaged, train it again")


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
