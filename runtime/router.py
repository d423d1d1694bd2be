"""Routers: which experts a token goes to, and with what weight. One function a kind, ties to the lowest index."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_pack.formats import RouterSpec


def _softmax_topk(logits: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """Softmax over all experts, the largest kept. Source: transformers, models/mixtral, MixtralTopKRouter."""
    scores = torch.softmax(logits, dim=-1)
    # A stable sort keeps the lower index first among equals; topk promises no order.
    ranked, experts = torch.sort(scores, dim=-1, descending=True, stable=True)
    weights = ranked[:, : spec.num_experts_per_tok]
    if spec.normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return experts[:, : spec.num_experts_per_tok], weights


_ROUTERS: dict[str, Callable[[Tensor, RouterSpec], tuple[Tensor, Tensor]]] = {"softmax_topk": _softmax_topk}


def route(logits: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights.

    Args:    logits: float32 [T, E].
    Returns: int64 [T, k], best first, and float32 [T, k].
    """
    return _ROUTERS[spec.kind](logits, spec)
