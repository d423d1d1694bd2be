"""Where the decoder's weights come from: one face, two sources (a pack; a checkpoint, for comparison)."""

from typing import Protocol

from torch import Tensor

from moe_pack.formats import ModelSpec, Selector
from moe_pack.runtime.expert import Expert
from moe_pack.runtime.matrix import Matrix
from moe_pack.runtime.operations import Operations


class Weights(Protocol):
    """All weights of a model. `selector` and `threshold` decide which neurons run."""

    spec: ModelSpec
    selector: Selector

    @property
    def operations(self) -> Operations:
        """What computes with these weights."""
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
