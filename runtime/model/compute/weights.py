"""The weights of a model, from a pack or a checkpoint, and the steps of a forward pass that have parameters alone."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from moe_pack import formats
from moe_pack.runtime.model.compute.expert import Expert
from moe_pack.runtime.model.compute.matrices import Matrix, linear, linear_each
from moe_pack.runtime.model.compute.operations import Operations
from moe_pack.runtime.model.compute.rotation import Rotation

if TYPE_CHECKING:
    from moe_pack.runtime.model.compute import ngrams


class Weights(Protocol):
    """All weights of a model, with the operations that compute with them."""

    spec: formats.ModelSpec
    selector: formats.Selector

    @property
    def operations(self) -> Operations: ...

    def vector(self, role: str) -> Tensor:
        """Returns a norm's weight or a bias, float32 [n]."""

    def matrix(self, role: str) -> Matrix:
        """Returns a dense matrix by its role (`moe_pack.formats.dense_roles`)."""

    def expert(self, layer_idx: int, expert: int) -> Expert:
        """Returns an expert of the `layer_idx`-th MoE layer."""

    def threshold(self, layer_idx: int, expert: int) -> float:
        """Returns the expert's threshold on `abs(a)`."""

    def rotation(self, layer_idx: int) -> Rotation | None:
        """Returns the rotated coordinates of the `layer_idx`-th MoE layer's experts; None without any."""

    def ngram_table(self, layer: int) -> "ngrams.RowTable":
        """Returns the n-gram table of a decoder layer."""


class RoleWeights:
    """The weights of a part of a layer, by the ends of their roles: `q` of `layers.{i}.attention.q`."""

    def __init__(self, weights: Weights, role: str) -> None:
        self.weights, self.role = weights, role

    def matrix(self, name: str) -> Matrix:
        return self.weights.matrix(f"{self.role}.{name}")

    def vector(self, name: str) -> Tensor:
        return self.weights.vector(f"{self.role}.{name}")

    def linear(self, x: Tensor, name: str, has_bias: bool = False) -> Tensor:
        """Returns `x @ matrix.T`, float32 [T, out], plus the vector `{name}_bias` if there is one."""
        return linear(x, self.matrix(name), self.vector(f"{name}_bias") if has_bias else None)

    def linear_each(self, x: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """Returns the products of x with each of some matrices, by name."""
        return dict(zip(names, linear_each(x, [self.matrix(name) for name in names]), strict=True))

    def norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        """Returns the rms norm of x float32 [..., n] with a vector, and the model's eps if none is given."""
        eps = self.weights.spec.norm.eps if eps is None else eps
        return self.weights.operations.rms_norm(x, self.vector(name), eps)


def unit(x: Tensor, weights: Weights) -> Tensor:
    """Returns `x / rms(x)` over the last dimension of x float32 [..., n], with the model's eps."""
    return weights.operations.rms_norm(x, torch.ones(x.shape[-1], device=x.device), weights.spec.norm.eps)


def to_experts(x: Tensor, weights: Weights, layer_idx: int) -> Tensor:
    """Returns the input of a MoE layer's experts, float32 [T, d], for the layer's input x: x itself, or rotated."""
    rotation = weights.rotation(layer_idx)
    return x if rotation is None else weights.operations.rotate(x, rotation)


def from_experts(y: Tensor, weights: Weights, layer_idx: int) -> Tensor:
    """Rotates the sum y of a MoE layer's experts back, float32 [T, d]; y itself if the layer is not rotated."""
    rotation = weights.rotation(layer_idx)
    return y if rotation is None else weights.operations.rotate_back(y, rotation)


def norm(x: Tensor, weights: Weights, role: str) -> Tensor:
    """Returns x float32 [T, d] after the model's norm, with the weight (and bias) of a role."""
    spec: formats.NormSpec = weights.spec.norm
    if spec.kind == "rms":
        return weights.operations.rms_norm(x, weights.vector(role), spec.eps)
    bias = weights.vector(f"{role}_bias") if spec.has_bias else None
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weights.vector(role), bias, spec.eps)
