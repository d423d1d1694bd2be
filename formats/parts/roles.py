"""The dense tensors of a part of a model: their names, shapes and whether they may be quantized."""

from dataclasses import dataclass
from itertools import pairwise

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DenseRole:
    """A dense tensor: its name in the pack, its shape (matrices `[out, in]`), and whether it may be quantized.

    The kernel of a convolution is a vector: the taps of its first channel, then those of the second, and so on. The
    last tap multiplies the newest input. `offset` is added to each stored value. `integers`: values are whole numbers
    below 2^24, stored as integers.
    """

    name: str
    shape: Shape
    quantizable: bool
    offset: float = 0.0
    integers: bool = False


FLOAT_DTYPES = ("BF16", "F16", "F32")
INTEGER_DTYPES = ("I32", "I64")


def plain_dtypes(role: DenseRole) -> tuple[str, ...]:
    """Returns the safetensors dtypes in which a dense tensor that is not quantized may be stored."""
    return INTEGER_DTYPES if role.integers else FLOAT_DTYPES


def are_layers(layers: tuple[int, ...], num_layers: int) -> bool:
    """Returns whether these are layers of a model of `num_layers`, in rising order."""
    return all(low < high for low, high in pairwise((-1, *layers, num_layers)))
