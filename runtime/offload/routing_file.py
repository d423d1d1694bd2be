"""`routing.safetensors`: the routing data of a profile, next to a pack, to place experts and to predict them.

It changes no answers, and belongs to the pack's content except the thresholds. docs/pack.md specifies it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from moe_pack import formats
from moe_pack.formats.pack.manifests import root_without_thresholds
from moe_pack.formats.pack.sidecar import TensorSidecar, open_tensor_sidecar, tensor_sidecar_bytes, write_tensor_sidecar
from moe_pack.formats.parts.specs import first_moe_layers
from moe_pack.runtime.offload import presets
from moe_pack.runtime.offload.paths import PathStatistics

Array = NDArray[Any]


class RoutingChecks:
    """A reader of a sidecar's arrays that checks each, for a model of L MoE layers of E experts, k a token.

    Args:    all_have_weights: no experts return their input; those that do take choices and are not among the E.
    Raises:  PackError, from every method, which names the array that is missing or cannot be right.
    """

    def __init__(
        self,
        sidecar: TensorSidecar,
        place: str,
        num_layers: int,
        num_experts: int,
        num_chosen: int,
        all_have_weights: bool = True,
    ) -> None:
        self._sidecar = sidecar
        self._all_have_weights = all_have_weights
        self._place = place
        self._L, self._E, self._k = num_layers, num_experts, num_chosen
        self._left = set(sidecar.entries)

    def popularity(self, name: str) -> Array:
        """Returns the tokens that chose each expert, u32 [L, E]: k choices a token, the same tokens in every layer.

        If experts without weights take choices, the others have fewer, and the number of tokens is not known.
        """
        counts = self._form(name, "U32", (self._L, self._E))
        choices = counts.sum(axis=1, dtype=np.int64)
        if not self._all_have_weights:
            if not choices.any():
                raise self._fault(name, "no counts", "experts that some tokens chose")
            return counts
        T = int(choices[0]) // self._k
        if T < 1 or (choices != T * self._k).any() or counts.max() > T:
            raise self._fault(name, "impossible counts", f"{self._k} experts of each token in every layer")
        return counts

    def mass(self, name: str) -> Array:
        """Returns sums of router weights, f32 [L, E]."""
        sums = self._form(name, "F32", (self._L, self._E))
        if not (np.isfinite(sums) & (sums >= 0)).all():
            raise self._fault(name, "a negative or infinite sum", "sums of weights")
        return sums

    def recalls(self, name: str, num_predictors: int) -> Array:
        """Returns the recalls of each predictor, f32 [L, predictors, 3]: shares, or all NaN for a layer without.

        In a layer with recalls, only the last predictor's may be NaN: it needs a partial hidden state.
        """
        shares = self._form(name, "F32", (self._L, num_predictors, 3))
        judged: Array = np.asarray(~np.isnan(shares).all(axis=(1, 2)))
        is_share = (shares >= 0) & (shares <= 1)
        are_shares: Array = np.asarray(is_share[:, :-1].all(axis=(1, 2)))
        are_shares &= is_share[:, -1].all(axis=1) | np.isnan(shares[:, -1]).all(axis=1)
        if judged[0] or (judged & ~are_shares).any():
            raise self._fault(name, "other values", "shares from 0 to 1, or all NaN, as in layer 0")
        return shares

    def best(self, name: str, recalls: Array, none: int) -> Array:
        """Returns the first predictor with the largest recall of each layer, u8 [L]; `none` if it has no recalls."""
        best = self._form(name, "U8", (self._L,))
        recall = np.where(np.isnan(recalls[:, :, 0]), -1, recalls[:, :, 0])
        expected = np.where(np.isnan(recalls[:, 0, 0]), none, recall.argmax(axis=1))
        if (best != expected).any():
            raise self._fault(name, f"{best.tolist()}", f"{expected.tolist()}, the largest recalls")
        return best

    def sequence_length(self, name: str, most: int) -> int:
        """Returns the tokens of a sequence, stored as u32 [1]."""
        length = int(self._form(name, "U32", (1,))[0])
        if not 0 < length <= most:
            raise self._fault(name, f"{length}", f"from 1 to {most} tokens")
        return length

    def routes(self, name: str, sequence_length: int, most: int) -> Array:
        """Returns routes u16 [T, L, k] of whole sequences; the k experts of a token in a layer are different."""
        shape = self._shape(name)
        T = shape[0] if shape else 0
        if most < T or T % sequence_length:
            raise self._fault(name, f"{T} tokens", f"whole sequences of {sequence_length}, at most {most}")
        routes = self._form(name, "U16", (T, self._L, self._k))
        ordered = np.sort(routes, axis=2)
        if T and (ordered.max() >= self._E or (ordered[..., 1:] == ordered[..., :-1]).any()):
            raise self._fault(name, "other values", f"{self._k} different experts below {self._E}")
        return routes

    def read(self, name: str) -> Array:
        """Returns an array that is checked elsewhere."""
        self._left.discard(name)
        return self._sidecar.read(name)

    def leave(self, prefix: str) -> None:
        """Leaves the arrays with this prefix for later; they are checked when they are read."""
        self._left = {name for name in self._left if not name.startswith(prefix)}

    def nothing_else(self) -> None:
        """Checks that every array of the file has been read or left for later."""
        if self._left:
            raise formats.PackError(f"{self._place}: unknown tensor {min(self._left)!r}; attach the profile again")

    def _shape(self, name: str) -> tuple[int, ...]:
        entry = self._sidecar.entries.get(name)
        return () if entry is None else entry.shape

    def _form(self, name: str, dtype: str, shape: tuple[int, ...]) -> Array:
        """Reads an array after a check of dtype and shape; nothing is allocated for another one."""
        entry = self._sidecar.entries.get(name)
        if entry is not None and (entry.dtype, entry.shape) != (dtype, shape):
            raise self._fault(name, f"{entry.dtype} {list(entry.shape)}", f"{dtype} {list(shape)}")
        return self.read(name)

    def _fault(self, name: str, found: str, expected: str) -> formats.PackError:
        return formats.PackError(
            f"{self._place}: tensor {name!r}: found {found}, expected {expected}; attach the profile again"
        )


MAX_PREVIOUS = 2  # FloE's trajectory: the two layers before the predicted one
_BLOCK_TOKENS = 1024  # bounds memory

# The axes of each stored tensor; `h` is E if there is one layer.
_AXES = {"x_weight": "hd", "route_weight": "hPE", "bias": "h", "out_weight": "Eh", "out_bias": "E"}
_ONE_LAYER = ("x_weight", "route_weight", "bias")


@dataclass(frozen=True, slots=True, eq=False)
class Predictor:
    """A network of one layer or two that predicts the experts of the next MoE layer.

    It takes the input of MoE layer l, after its norm, and the experts chosen at l - 1 and l (at l = 0 only those), and
    gives each expert of layer l + 1 a score. Its weights include the standardization of training. h is E for one layer,
    else the number of hidden units.
    Source:  FloE §3.3.1.
    """

    x_weight: Tensor  # bfloat16 [h, d]
    route_weight: Tensor  # bfloat16 [h, P, E], the layer further back first
    bias: Tensor  # float32 [h]
    out_weight: Tensor | None = None  # bfloat16 [E, h]; None if there is one layer
    out_bias: Tensor | None = None  # float32 [E]; likewise

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

    def scores(self, x: Tensor, previous: Tensor) -> Tensor:
        """Returns logits of the next layer's experts, float32 [T, E]; a likelier expert has a larger one.

        Args:    x: float32 [T, d], the input of the MoE layer, after its norm.   previous: int64 [T, P, k], the
                 experts chosen at the P layers before the predicted one, the layer further back first.
        """
        layers = [tensor.float() for tensor in self.arrays().values()]
        layers[1] = layers[1].flatten(1)  # [h, P, E] -> [h, P E]
        blocks = zip(torch.split(x, _BLOCK_TOKENS), torch.split(previous, _BLOCK_TOKENS), strict=True)
        with torch.no_grad():
            return torch.cat(
                [network_logits(layers, part, multi_hot(routes, self.num_experts)) for part, routes in blocks]
            )

    def arrays(self) -> dict[str, Tensor]:
        """Returns its tensors by name, as in a sidecar."""
        tensors = (self.x_weight, self.route_weight, self.bias, self.out_weight, self.out_bias)
        return {name: tensor for name, tensor in zip(_AXES, tensors, strict=True) if tensor is not None}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Tensor], place: str) -> "Predictor":
        """Returns the predictor with these tensors.

        Args:    place: the file and layer of the tensors, for errors.
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
        """Returns its tensors as stored: little-endian arrays, bfloat16 as the u16 of its bits."""
        return {name: _stored(tensor) for name, tensor in self.arrays().items()}

    @classmethod
    def from_stored(cls, arrays: Mapping[str, NDArray[Any]], place: str) -> "Predictor":
        """Returns the predictor with these arrays of `stored`; raises as `from_arrays` does."""
        return cls.from_arrays({name: _loaded(array) for name, array in arrays.items()}, place)


def network_logits(layers: list[Tensor], x: Tensor, routes: Tensor) -> Tensor:
    """Returns logits float32 [T, E] for x [T, d] and the multi-hot routes [T, P E]."""
    first = functional.linear(x, layers[0], layers[2]) + functional.linear(routes, layers[1])
    return first if len(layers) == 3 else functional.linear(functional.relu(first), layers[3], layers[4])


def multi_hot(experts: Tensor, num_experts: int) -> Tensor:
    """Returns float32 [T, P E] for routes int64 [T, P, k]: 1 for each chosen expert."""
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
    """Refuses a tensor of another type or shape; `sizes` has the known axes and gets the new ones."""
    dtype = torch.bfloat16 if is_weight else torch.float32
    if tensor.dtype != dtype:
        raise _damaged(place, f"found {tensor.dtype}", f"{dtype}")
    shape = list(tensor.shape)
    fits = len(shape) == len(axes) and all(shape)
    if not fits or any(sizes.setdefault(axis, size) != size for axis, size in zip(axes, shape, strict=True)):
        known = ", ".join(f"{axis} = {sizes[axis]}" if axis in sizes else axis for axis in axes)
        raise _damaged(place, f"found shape {shape}", f"[{known}]")
    if not torch.isfinite(tensor).all():
        raise _damaged(place, "found NaN or infinity", "finite numbers")


def _damaged(place: str, found: str, expected: str) -> formats.PackError:
    return formats.PackError(f"{place}: {found}, expected {expected}; the predictor is damaged, train it again")


MAX_ROUTED_TOKENS = 4096  # held-out tokens with stored routes, for the comparison of policies
NO_PREDICTOR = 255  # the `best` of a layer without recalls
_PATHS, _NETWORK = "paths.", "network."
_DTYPES = {np.dtype("<u1"): "U8", np.dtype("<u2"): "U16", np.dtype("<u4"): "U32", np.dtype("<f4"): "F32"}


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The routing data of a model with L MoE layers of E experts, k a token."""

    popularity: Array  # u32 [L, E], tokens that chose the expert
    mass: Array  # f32 [L, E], the sum of their router weights for it
    paths: PathStatistics  # counted on tokens that were not held out
    # f32 [L, 6, 3], on held-out tokens, for each of PREDICTORS: the recall of the k experts ranked first, and recall
    # and precision of the first 2k. NaN for a layer without, and for a predictor that cannot predict a layer.
    recalls: Array
    best: Array  # u8 [L], the predictor with the largest recall, or NO_PREDICTOR
    routes: Array  # u16 [T, L, k], of held-out tokens, best first, in whole sequences; T may be 0
    sequence_length: int
    network: Callable[[int], Predictor]  # returns the learned network of a layer that has recalls

    @classmethod
    def open(cls, pack: formats.Pack) -> "Routing | None":
        """Reads the routing file in a pack's folder; None if there is none, or if it belongs to other content.

        The checksum is that of the whole file; each network is read later, when it is needed.
        Raises:  PackError if the file is damaged, or its arrays cannot be of this model.
        """
        sidecar = open_tensor_sidecar(pack.folder, presets.ROUTING_FILE, root_without_thresholds(pack.manifest))
        if sidecar is None:
            return None
        with sidecar:
            return _read(sidecar, pack.folder, pack.spec)

    @property
    def judged_layers(self) -> tuple[int, ...]:
        """The MoE layers that have recalls of predictors, and a network."""
        return tuple(int(l) for l in np.flatnonzero(self.best != NO_PREDICTOR))

    @property
    def best_recall(self) -> float | None:
        """The mean recall of the best predictor of each layer with recalls; None without such layers."""
        layers = self.judged_layers
        return float(np.mean([self.recalls[l, self.best[l], 0] for l in layers])) if layers else None


def write_routing(pack: formats.Pack, routing: Routing) -> None:
    """Writes `routing.safetensors` into the folder of a pack of the same model; it replaces an older file.

    Raises:  ConversionError if another process writes in the folder, or the file cannot be written.
    """
    tensors = ((name, _dtype(name, values), values) for name, values in _arrays(routing))
    write_tensor_sidecar(pack.folder, presets.ROUTING_FILE, tensors, root_without_thresholds(pack.manifest))


def routing_file_bytes(routing: Routing) -> int:
    """Returns the exact size of the `routing.safetensors` that `write_routing` would write, in bytes."""
    return tensor_sidecar_bytes((name, _dtype(name, values), values.shape) for name, values in _arrays(routing))


def _arrays(routing: Routing) -> Iterator[tuple[str, Array]]:
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
    """Returns the dtype's name in safetensors; the weights of networks, u16 here, are bfloat16."""
    is_weight = name.startswith(_NETWORK) and name.endswith("_weight")
    return "BF16" if is_weight else _DTYPES[values.dtype]


def _read(sidecar: TensorSidecar, folder: Path, spec: formats.ModelSpec) -> Routing:
    L, E, k = len(spec.moe_layers), spec.router.num_experts, spec.router.num_experts_per_tok
    checks = RoutingChecks(sidecar, presets.ROUTING_FILE, L, E, k, all_have_weights=not spec.router.num_identity)
    popularity = checks.popularity("popularity")
    mass, recalls = checks.mass("mass"), checks.recalls("recalls", len(presets.PREDICTORS))
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
        PathStatistics.from_arrays(paths, f"{presets.ROUTING_FILE}: {_PATHS}*", L, E, k),
        recalls,
        best,
        routes,
        sequence_length,
        partial(_network, folder, sidecar.sha256, spec),
    )


def _network(folder: Path, sha256: str, spec: formats.ModelSpec, layer_idx: int) -> Predictor:
    """Reads one network of a checked file: those of a large model are 100 MB and more."""
    prefix = f"{_NETWORK}{layer_idx}."
    with TensorSidecar(folder, presets.ROUTING_FILE, sha256) as sidecar:
        names = [name for name in sidecar.entries if name.startswith(prefix)]
        arrays = {name.removeprefix(prefix): sidecar.read(name) for name in names}
    place = f"{presets.ROUTING_FILE}: {prefix}*"
    network = Predictor.from_stored(arrays, place)
    sizes = (network.hidden_size, network.num_experts, network.num_previous)
    begin = max(first for first in first_moe_layers(spec) if first <= layer_idx)  # of its stack
    d, E, P = spec.hidden_size, spec.router.num_experts, min(layer_idx - begin, MAX_PREVIOUS)
    if sizes != (d, E, P):
        raise formats.PackError(
            f"{place}: found sizes {list(sizes)}, expected d = {d}, E = {E}, P = {P}; attach the profile again"
        )
    return network
