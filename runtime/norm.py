"""Norms over the last dimension, float32: by the kernels where there are any, else plain torch."""

import torch
from torch import Tensor

from moe_pack.formats import NormSpec
from moe_pack.runtime.native_kernels import Kernels
from moe_pack.runtime.weights import Weights


def rms_norm(x: Tensor, weight: Tensor, eps: float, kernels: Kernels | None = None) -> Tensor:
    """`x / rms(x) * weight`."""
    if kernels is not None:
        return kernels.rms_norm(x, weight, eps)
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def norm(x: Tensor, weights: Weights, role: str) -> Tensor:
    """`x` [T, d] normed as the model does, with the weight (and bias) of this role."""
    spec: NormSpec = weights.spec.norm
    if spec.kind == "rms":
        return rms_norm(x, weights.vector(role), spec.eps, weights.kernels)
    return torch.nn.functional.layer_norm(
        x, x.shape[-1:], weights.vector(role), weights.vector(f"{role}_bias"), spec.eps
    )
