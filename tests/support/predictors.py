"""Networks for tests: random ones of any shape, trained on nothing."""

import math

import torch
from torch import Tensor

from moe_pack.runtime.offload import Predictor


def random_arrays(
    num_layers: int, d: int = 8, num_experts: int = 6, num_previous: int = 2, hidden: int = 32, seed: int = 0
) -> dict[str, Tensor]:
    """The tensors of a network of one layer, or of two with `hidden` units between."""
    generator = torch.Generator().manual_seed(seed)
    h = num_experts if num_layers == 1 else hidden

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    first = {
        "x_weight": numbers(h, d).bfloat16(),
        "route_weight": numbers(h, num_previous, num_experts).bfloat16(),
        "bias": numbers(h),
    }
    if num_layers == 1:
        return first
    return first | {"out_weight": numbers(num_experts, h).bfloat16(), "out_bias": numbers(num_experts)}


def random_predictor(
    num_layers: int, d: int = 8, num_experts: int = 6, num_previous: int = 2, hidden: int = 32, seed: int = 0
) -> Predictor:
    """A network of these tensors."""
    return Predictor(**random_arrays(num_layers, d, num_experts, num_previous, hidden, seed))
