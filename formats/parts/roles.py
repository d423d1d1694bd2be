"""The dense tensors of a part of a model: their names, shapes and whether they may be quantized."""

from dataclasses import dataclass
from itertools import pairwise

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DenseRole:
    """A dense tensor: its name in the pack, its shape (matrices `[out, in]`), and whether it may be quantized.

    The kernel of a convolution is a vector: the taps of its first channel, then those of the second, and so on. The
    last tap multiplies the newest input. `offset` is added to each stored value.
    """

    name: str
    shape: Shape
    quantizable: bool
    offset: float = 0.0


def are_layers(layers: tuple[int, ...], num_layers: int) -> bool:
    """Returns whether these are layers of a model of `num_layers`, in rising order."""
    return all(low < high for low, high in pairwise((-1, *layers, num_layers)))
