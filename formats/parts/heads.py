"""The questions that each kind of attention answers; temperature, and gates of heads."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from moe_pack.formats.base.json_files import added
from moe_pack.formats.parts import part, positions

MASKS = 4  # of a byte for each token and position, while positions are chosen and attended to


class PieceBytes(NamedTuple):
    """The most bytes that torch computes at once."""

    scores: int  # of scores of queries and keys
    decoded: int  # of keys and values that are dequantized, and of scores that come with them


class Attention(part.Part, ABC):
    """A kind of attention. Methods return here the answer of attention that needs nothing special."""

    __slots__ = ()

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that must be positive, by name."""
        return part.sizes_of(self)

    @abstractmethod
    def fault(self, rope: positions.RopeSpec | None, num_layers: int) -> str | None:
        """Returns why it cannot run with these rotary positions in a model of so many layers, or None."""

    @abstractmethod
    def rope_fault(self, rope: positions.RopeSpec) -> str | None:
        """Returns why its heads cannot rotate so, or None."""

    @abstractmethod
    def roles(self, d: int, offset: float) -> Iterator[part.DenseRole]:
        """Yields the dense tensors of a layer, for a hidden size d; `offset` is that of norms."""

    def stack_roles(self) -> Iterator[part.DenseRole]:
        """Yields the dense tensors that all layers of a stack share."""
        yield from ()

    @abstractmethod
    def is_unknown_to(self, runner: part.Runner) -> bool:
        """Returns whether a runner lacks this kind of attention as a whole, whatever its fields."""

    # ---- cache ----

    @property
    @abstractmethod
    def cached_width(self) -> int:
        """The values that a token adds to the cache of a layer."""

    def window(self, layer: int) -> int | None:
        """Returns how many positions a decoder layer sees at most, the current one included; None for all."""
        return None

    def cache_values(self, places: int, context_tokens: int, chunk_tokens: int) -> int:
        """Returns the values of a layer's cache, with places for so many keys."""
        return places * self.cached_width

    def checkpoint_values(self, context_tokens: int, chunk_tokens: int) -> int:
        """Returns the values of a layer in a checkpoint, besides the window of keys and values."""
        return 0

    # ---- workspace ----

    @property
    @abstractmethod
    def width(self) -> int:
        """The most floats of one token while a layer attends."""

    @property
    @abstractmethod
    def mixed_width(self) -> int:
        """The values of a head's weighted sum."""

    @property
    def kernels_attend(self) -> bool:
        """Whether native kernels compute every pass; torch computes what they lack."""
        return False

    def score_bytes(self, num_tokens: int, num_positions: int, pieces: PieceBytes) -> int:
        """Returns the most bytes of scores that are stored, and of a mask of them."""
        return 0

    def position_bytes(self, num_tokens: int, num_positions: int, pieces: PieceBytes) -> int:
        """Returns the most other bytes of a pass in which each token has something of each position."""
        return 0

    def gguf_values(self, rope: positions.RopeSpec | None) -> dict[str, Any]:
        """Returns its keys in the metadata of GGUF files; those of heads are of a layer that attends."""
        return {}


@dataclass(frozen=True, slots=True)
class TemperatureSpec:
    """Queries at position p are multiplied by `1 + slope * ln(1 + floor(p / length))`.

    Source: 2501.19399; transformers, models/llama4 (from one), models/mistral4 and models/beam (a power).
    """

    slope: float
    length: int
    is_from_one: bool  # with p + 1 in place of p
    is_unrotated: bool  # only in layers that do not rotate
    is_power: bool = added(False)  # by `(1 + p / length) ** slope` instead

    def fault(self) -> str | None:
        """Returns why queries cannot be multiplied so, or None."""
        if not 0 < self.slope < 1e6 or not 0 < self.length < 2**31:
            return f"temperature slope {self.slope} or length {self.length} is out of range"
        return None


@dataclass(frozen=True, slots=True)
class OutputGateSpec:
    """Gates of what heads give, from a matrix of their own: `function` of it times the layer's input.

    Source: transformers, models/afmoe (values, sigmoid), models/laguna (softplus), models/step3p7 (heads), models/beam
    (bias).
    """

    each: Literal["head", "value"]  # whether each head has one gate, or each value of it
    function: Literal["sigmoid", "softplus"]
    bias: bool = added(False)  # a number for each head is added to its gates before the function

    def roles(self, num_heads: int, head_dim: int, d: int) -> Iterator[part.DenseRole]:
        """Yields the tensors of gates for heads that give `head_dim` values."""
        of_values = self.each == "value"
        yield part.DenseRole("gate", (num_heads * (head_dim if of_values else 1), d), of_values)
        if self.bias:
            yield part.DenseRole("gate_bias", (num_heads,), False)
