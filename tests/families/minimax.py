from typing import Any

import torch
from support.cards import YARN, Card, missing, only
from torch import Tensor


def rotate_a_part(model: Any) -> None:
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


CARDS = {
    "minimax": Card(
        {
            "num_hidden_layers": 4, "num_key_value_heads": 2, "intermediate_size": 48, "num_local_experts": 6,
            "num_experts_per_tok": 3, "block_size": 8, "full_attn_alpha_factor": 1.5, "linear_attn_alpha_factor": 0.75,
            "linear_attn_beta_factor": 1.25, "mlp_alpha_factor": 2, "mlp_beta_factor": 0.5,
        },
        shapes={
            "the published shares of states, part of each head rotated": {
                "head_dim": 32, "rotary_dim": 8, "full_attn_alpha_factor": 3.5565588200778455,
                "linear_attn_alpha_factor": 3.5565588200778455, "linear_attn_beta_factor": 1.0,
                "mlp_alpha_factor": 3.5565588200778455, "mlp_beta_factor": 1.0,
                "layer_types": [*["linear_attention"] * 3, "full_attention"],
            },
            "no lightning, window of 7, yarn, tied head": {
                "layer_types": ["full_attention"] * 4, "head_dim": 16, "sliding_window": 7, "rope_parameters": YARN,
                "tie_word_embeddings": True,
            },
            "lightning alone": {"layer_types": ["linear_attention"] * 4},
        },
        close=[
            only("postnorm", False, True), only("shared_intermediate_size", 64, 0),
            ({"rotary_dim": 7}, "rotary_dim is 7, expected an even number up to 16"),
            ({"mlp_beta_factor": 0},
             "residual factors are [1.5, 1.0, 0.75, 1.25, 2.0, 0.0], expected between 0 and 1e6"),
            ({"rotary_dim": 8, "rope_parameters": YARN}, "rope_type 'yarn' is not supported; supported: default"),
            missing("num_key_value_heads"),
        ],
        correct=rotate_a_part,
    ),
}  # fmt: skip
