"""FloE's learned predictor: the experts of the next MoE layer from this layer's hidden state and the last routes.

A network of one layer or two for each MoE layer. It sees the input of MoE layer l, after its norm, and the experts
chosen at l - 1 and l (at l = 0 only there), and gives each expert of layer l + 1 a score. Trained by calibration
(`moe_pack.calib.mlp_predictor`), kept with bfloat16 weights.

Source:  FloE §3.3.1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from moe_pack.formats import PackError

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
