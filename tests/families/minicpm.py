"""MiniCPM-MoE-8x2B (`model_type` minicpm, with experts) in plain torch.

Written from what modeling_minicpm.py of openbmb/MiniCPM-MoE-8x2B does, read in the copy that GitHub guqiqi/Samoyeds
keeps (MiniCPM/modeling_MiniCPM.py), and from the configuration class that GitHub wxthu/nas_tuner keeps.
"""

import math

import torch
from support import plain
from support.cards import Card, Values, only, unknown

NAMES = ("w1", "w3", "w2")
DEFAULTS: Values = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "hidden_act": "silu", "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 10000.0, "rope_scaling": None,
    "attention_bias": False, "scale_emb": 1, "dim_model_base": 1, "scale_depth": 1,
}  # fmt: skip


def shapes(values: Values) -> plain.Shapes:
    """Every tensor: all layers have experts."""
    d, made = values["hidden_size"], plain.decoder_shapes(values)
    for i in range(values["num_hidden_layers"]):
        mlp = f"model.layers.{i}.mlp"
        made[f"{mlp}.gate.weight"] = (values["num_experts"], d)
        for e in range(values["num_experts"]):
            made |= plain.swiglu_shapes(f"{mlp}.experts.{e}", values["intermediate_size"], d, NAMES)
    return made


def logits(values: Values, weights: plain.Weights, ids: list[int]) -> torch.Tensor:
    """The logits of a text: the embedding, each half layer's result, and what the head sees are scaled."""

    def experts_of_token(x: torch.Tensor, mlp: str) -> torch.Tensor:
        """The experts with the largest softmax, weighted by their share among each other."""
        scores = torch.softmax(plain.linear(x, weights, f"{mlp}.gate"), dim=0)
        chosen = plain.largest(scores.tolist(), values["num_experts_per_tok"])
        return plain.experts(x, weights, mlp, {e: scores[e] / scores[chosen].sum() for e in chosen}, NAMES)

    def feed_forward(x: torch.Tensor, mlp: str) -> torch.Tensor:
        return torch.stack([experts_of_token(token, mlp) for token in x])

    depth = values["scale_depth"] / math.sqrt(values["num_hidden_layers"])
    last = values["dim_model_base"] / values["hidden_size"]
    return plain.decoder_logits(values, weights, ids, feed_forward, (values["scale_emb"], depth, last))


CARDS = {
    "minicpm": Card(
        {
            "intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 2, "scale_emb": 12, "dim_model_base": 16,
            "scale_depth": 1.4,
        },
        shapes={
            "own head, bias": {"tie_word_embeddings": False, "attention_bias": True},
            "multipliers of 1": {"scale_emb": 1, "dim_model_base": 64, "scale_depth": 3**0.5, "num_experts_per_tok": 1},
            "keys of each head": {"num_key_value_heads": None, "rope_theta": 77.0},
        },
        close=[
            ({"num_experts": None}, "'minicpm' is a dense model without experts; there is nothing to pack"),
            only("pretraining_tp", 2, 1), unknown("sparse_config", {"topk": 64}),
        ],
        reference=plain.Reference("minicpm", "MiniCPMForCausalLM", DEFAULTS, shapes, logits),
    ),
}  # fmt: skip
