"""MiniMax in transformers as its own modeling file has it, where the two differ."""

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
