"""Where the decoder's weights come from: one face, two sources (a pack; a checkpoint, for comparison)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moe_pack.formats import ModelSpec, Selector
from moe_pack.runtime.matrix import Matrix
from moe_pack.runtime.native_kernels import Kernels


@dataclass(frozen=True, slots=True)
class NeuronBlock:
    """Some neurons of an expert, dequantized: float32 [n, d] each, gate None in families without one.

    Biases are float32 [n], where the family has them.
    """

    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None


class Expert(Protocol):
    """An expert whose neurons come in blocks of bounded size."""

    def blocks(self) -> Iterator[NeuronBlock]:
        """All neurons once, in stored order."""
        ...

    def down_bias(self) -> Tensor | None:
        """What is added to the output of a token that comes here, float32 [d]; None where the family has none."""
        ...


class Weights(Protocol):
    """All weights of a model. `selector` and `threshold` decide which neurons run."""

    spec: ModelSpec
    selector: Selector

    @property
    def kernels(self) -> Kernels | None:
        """What computes with these weights on the CPU; None where torch does."""
        ...

    def vector(self, role: str) -> Tensor:
        """A norm's weight or a bias, float32 [n]."""
        ...

    def matrix(self, role: str) -> Matrix:
        """A dense matrix by its role (`moe_pack.formats.dense_roles`)."""
        ...

    def expert(self, layer_idx: int, expert: int) -> Expert:
        """An expert of the `layer_idx`-th MoE layer."""
        ...

    def threshold(self, layer_idx: int, expert: int) -> float:
        """The expert's threshold on `abs(a)`."""
        ...
