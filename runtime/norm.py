"""Norms over the last dimension, float32, as the model has them."""

import torch
from torch import Tensor

from moe_pack.formats import NormSpec
from moe_pack.runtime.weights import Weights


def norm(x: Tensor, weights: Weights, role: str) -> Tensor:
    """`x` [T, d] normed as the model does, with the weight (and bias) of this role."""
    spec: NormSpec = weights.spec.norm
    if spec.kind == "rms":
        return weights.operations.rms_norm(x, weights.vector(role), spec.eps)
    return torch.nn.functional.layer_norm(
        x, x.shape[-1:], weights.vector(role), weights.vector(f"{role}_bias"), spec.eps
    )
