"""A part of a model, as data: its dense tensors, and the runners that lack it.

All that follows from a kind of attention, a mixer, a residual or a router stands in its module, next to its fields.
Others ask the part, and do not look at its class.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any, Literal, Self, TypeVar

from moe_pack.formats.base.json_files import added

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DenseRole:
    """A dense tensor. Parts name theirs, `q`; a model's spec names them in the pack, `layers.0.attention.q`.

    The kernel of a convolution is a vector: the taps of its first channel, then those of the second, and so on. The
    last tap multiplies the newest input.
    """

    name: str
    shape: Shape  # of matrices `[out, in]`
    quantizable: bool
    offset: float = 0.0  # added to each stored value
    integers: bool = False  # values are whole numbers below 2^24, stored as integers


def matrices(**shapes: Shape) -> Iterator[DenseRole]:
    """Yields dense tensors that may be quantized."""
    return (DenseRole(name, shape, True) for name, shape in shapes.items())


def vectors(**shapes: Shape | int) -> Iterator[DenseRole]:
    """Yields dense tensors that stay as they are: vectors, and small matrices."""
    return (DenseRole(name, (shape,) if isinstance(shape, int) else shape, False) for name, shape in shapes.items())


FLOAT_DTYPES = ("BF16", "F16", "F32")
INTEGER_DTYPES = ("I32", "I64")


def are_layers(layers: tuple[int, ...], num_layers: int) -> bool:
    """Returns whether these are layers of a model of `num_layers`, in rising order."""
    return all(low < high for low, high in pairwise((-1, *layers, num_layers)))


def sizes_of(record: Any) -> dict[str, int]:
    """Returns the fields of a dataclass that are whole numbers, by name."""
    values = ((field.name, getattr(record, field.name)) for field in fields(record))
    return {name: value for name, value in values if type(value) is int}


def sizes_fault(sizes: Mapping[str, int | None], owner: str = "") -> str | None:
    """Returns which of these sizes of an owner is not 1 to 2^31 - 1, or None."""
    for name, size in sizes.items():
        if size is not None and not 0 < size < 2**31:
            return f"{owner}{name} is {size}, expected 1 to 2^31 - 1"
    return None


def numbers_fault(numbers: Mapping[str, float | None], most: Literal["1", "1e6"] = "1e6") -> str | None:
    """Returns which of these numbers is not above 0 and below `most`, or None."""
    for name, number in numbers.items():
        if number is not None and not 0 < number < float(most):
            return f"{name} is {number}, expected between 0 and {most}"
    return None


# The engine of a GPU, several GPUs with some layers each, and llama.cpp where metadata of a GGUF file can say the part.
Runner = Literal["gpu", "gpus", "gguf"]


class Part:
    """A part of a model: attention, a mixer, rotary positions, a residual, a router."""

    __slots__ = ()

    def lacks(self, runner: Runner) -> Iterator[str]:
        """Yields, in words, all of this part that a runner cannot compute."""
        yield from ()

    def of_layers(self, first: int, last: int) -> Self:
        """Returns the part in a model of the layers `first` to `last`, without `last`, which count from 0."""
        return of_layers(self, first, last)


Record = TypeVar("Record")


def of_layers(record: Record, first: int, last: int) -> Record:
    """Does the same as `Part.of_layers` for any dataclass: its fields named `layers`, or `..._layers`, list layers."""
    changed: dict[str, Any] = {}
    for field in fields(record):  # type: ignore[arg-type]  # a dataclass
        value = getattr(record, field.name)
        if isinstance(value, Part):
            changed[field.name] = value.of_layers(first, last)
        elif isinstance(value, tuple) and field.name.endswith("layers"):
            changed[field.name] = shifted(value, first, last)
        elif isinstance(value, tuple) and value and is_dataclass(value[0]):
            changed[field.name] = tuple(of_layers(each, first, last) for each in value)
    return replace(record, **changed)  # type: ignore[type-var]  # likewise


def shifted(layers: tuple[int, ...], first: int, last: int) -> tuple[int, ...]:
    """Returns those of the layers from `first` on and before `last`, counted from `first`."""
    return tuple(layer - first for layer in layers if first <= layer < last)


@dataclass(frozen=True, slots=True)
class NormSpec(Part):
    """Norms of the hidden state. `rms`: `x / rms(x) * weight`. `layer`: `(x - mean) / deviation * weight + bias`."""

    kind: Literal["rms", "layer"]
    eps: float  # added to the mean square
    zero_centered: bool = added(False)  # weights are stored less 1, also those of the norms of queries and keys
    unbiased: bool = added(False)  # a `layer` norm without a bias

    @property
    def has_bias(self) -> bool:
        """Whether each norm has a bias."""
        return self.kind == "layer" and not self.unbiased

    @property
    def offset(self) -> float:
        """The number that is added to each stored weight."""
        return 1.0 if self.zero_centered else 0.0

    def roles(self, name: str, d: int) -> Iterator[DenseRole]:
        """Yields the tensors of a norm of this name, for a hidden size d."""
        yield DenseRole(name, (d,), False, self.offset)
        if self.has_bias:
            yield DenseRole(f"{name}_bias", (d,), False)
