"""The routed experts of a layer: by the kernels where the weights have any, else one by one as `expert` says."""

import torch
from torch import Tensor

from moe_pack.runtime.expert import run_expert
from moe_pack.runtime.pack_weights import PackWeights
from moe_pack.runtime.weights import Weights


def run_experts(x: Tensor, experts: Tensor, router_weights: Tensor, weights: Weights, layer_idx: int) -> Tensor:
    """The outputs of a layer's routed experts, weighted and added up; each expert is brought once.

    Args:    x: float32 [T, d].   experts, router_weights: int64 and float32 [T, k].   layer_idx: counts MoE layers.
    Returns: float32 [T, d].
    """
    y = weights.run_experts(layer_idx, x, experts, router_weights) if isinstance(weights, PackWeights) else None
    if y is not None:
        return y
    y = torch.zeros_like(x)
    for expert in torch.unique(experts).tolist():  # rising, so that sums are made in one order
        token_idx, place = torch.where((experts == expert) & (router_weights != 0))  # zero: beyond its capacity
        held, threshold = weights.expert(layer_idx, expert), weights.threshold(layer_idx, expert)
        output = run_expert(x[token_idx], held, weights.spec.expert.function, weights.selector, threshold)
        y[token_idx] += router_weights[token_idx, place, None] * output
    return y
