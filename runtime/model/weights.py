"""Where the decoder's weights come from: one face, two sources (a pack; a checkpoint, for comparison).

Norms over the last dimension, float32, as the model has them.
"""

from typing import Protocol

import torch
from torch import Tensor

from moe_pack.formats import ModelSpec, NormSpec, Selector
from moe_pack.runtime.model.expert import Expert
from moe_pack.runtime.model.matrix import Matrix
from moe_pack.runtime.model.operations import Operations


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


def norm(x: Tensor, weights: Weights, role: str) -> Tensor:
    """`x` [T, d] normed as the model does, with the weight (and bias) of this role."""
    spec: NormSpec = weights.spec.norm
    if spec.kind == "rms":
        return weights.operations.rms_norm(x, weights.vector(role), spec.eps)
    return torch.nn.functional.layer_norm(
        x, x.shape[-1:], weights.vector(role), weights.vector(f"{role}_bias"), spec.eps
    )
