"""Models in transformers as their authors' own code has them, where the two differ."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def correct_minimax(model: Any) -> None:
    """Rotates `rotary_dim` values of each head, and computes decays again, which bfloat16 rounded in the checkpoint.

    Source: MiniMax-Text-01, modeling_minimax_text_01.py, apply_rotary_pos_emb.
    """
    from transformers.models.minimax import modeling_minimax

    for layer in model.model.layers:
        if hasattr(layer.self_attn, "get_slope_rate"):
            rate = layer.self_attn.get_slope_rate()
            found = (rate, *layer.self_attn.decay_factors(rate))
            for name, values in zip(("slope_rate", "query_decay", "key_decay", "diagonal_decay"), found, strict=True):
                getattr(layer.self_attn, name).copy_(values)
    rotary_dim = getattr(model.config, "rotary_dim", None)
    if rotary_dim is not None:
        modeling_minimax.apply_rotary_pos_emb = _rotated  # the same where all values rotate
        steps = torch.arange(0, rotary_dim, 2) / rotary_dim
        model.model.rotary_emb.inv_freq = model.config.rope_parameters["rope_theta"] ** -steps


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys [B, heads, T, head_dim], of which the first values are rotated, as many as cosines [B, T, n]."""

    def rotate(x: Tensor) -> Tensor:
        turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        first, second = turned.chunk(2, dim=-1)
        return torch.cat((turned * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None], kept), -1)

    return rotate(q), rotate(k)


def limit_neurons(model: Any) -> None:
    """Gives Ling's experts the limits of its config, which transformers 5.23 does not read, by Step-3.7's classes.

    These have the same weights, and the arithmetic of the functions with which Ling's authors serve it.
    """
    from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts, Step3p7MLP

    lists = [
        getattr(model.config, key, None) or [] for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
    ]
    for limits, part, kind in zip(lists, ("experts", "shared_experts"), (Step3p7Experts, Step3p7MLP), strict=True):
        for layer, limit in enumerate(limits):
            if limit:
                module = getattr(model.model.layers[layer].mlp, part)
                module.__class__, module.limit = kind, limit


def published_longrope(rope: dict[str, Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Rotary angles as Phi-3.5-MoE's own code and transformers 4 have them, in place of transformers 5's.

    Beyond the original context transformers 5.23 takes the long mscale but goes on with the short factors: its
    `forward` asks for frequencies without saying how long the sequence is. Up to there the two are the same, which
    test_families.py checks.
    """

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        length = int(position_ids.max()) + 1
        kind = "long" if length > rope["original_max_position_embeddings"] else "short"
        factors = torch.tensor(rope[f"{kind}_factor"])
        steps = torch.arange(len(factors)) / len(factors)
        angles = position_ids[..., None] / (factors * rope["rope_theta"] ** steps)
        both = torch.cat((angles, angles), dim=-1)
        return both.cos() * rope[f"{kind}_mscale"], both.sin() * rope[f"{kind}_mscale"]

    return forward
