"""MiniCPM-MoE-8x2B (`model_type` minicpm, with experts) in plain torch.

Written from what modeling_minicpm.py of openbmb/MiniCPM-MoE-8x2B does, read in the copy that GitHub guqiqi/Samoyeds
keeps (MiniCPM/modeling_MiniCPM.py), and from the configuration class that GitHub wxthu/nas_tuner keeps.
"""

import math

import torch

from support.references.plain import (
    Reference,
    Shapes,
    Values,
    Weights,
    attention,
    decoder_shapes,
    head_of,
    largest,
    linear,
    rms_norm,
    swiglu,
    swiglu_shapes,
)

NAMES = ("w1", "w3", "w2")
DEFAULTS: Values = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "scale_emb": 1,
    "dim_model_base": 1,
    "scale_depth": 1,
}


def shapes(values: Values) -> Shapes:
    """Every tensor: all layers have experts."""
    d, made = values["hidden_size"], decoder_shapes(values)
    for i in range(values["num_hidden_layers"]):
        mlp = f"model.layers.{i}.mlp"
        made[f"{mlp}.gate.weight"] = (values["num_experts"], d)
        for e in range(values["num_experts"]):
            made |= swiglu_shapes(f"{mlp}.experts.{e}", values["intermediate_size"], d, NAMES)
    return made


def experts_of_token(x: torch.Tensor, values: Values, weights: Weights, mlp: str) -> torch.Tensor:
    """The experts with the largest softmax, weighted by their share among each other."""
    scores = torch.softmax(linear(x, weights, f"{mlp}.gate"), dim=0)
    chosen = largest(scores.tolist(), values["num_experts_per_tok"])
    y = torch.zeros_like(x)
    for e in chosen:
        y = y + scores[e] / scores[chosen].sum() * swiglu(x, weights, f"{mlp}.experts.{e}", NAMES)
    return y


def logits(values: Values, weights: Weights, ids: list[int]) -> torch.Tensor:
    """The logits of a text: the embedding, each half layer's result, and what the head sees are scaled."""
    eps, depth = values["rms_norm_eps"], values["scale_depth"] / math.sqrt(values["num_hidden_layers"])
    x = weights["model.embed_tokens.weight"][ids] * values["scale_emb"]
    for i in range(values["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        normed = rms_norm(x, weights[f"{layer}.input_layernorm.weight"], eps)
        x = x + depth * attention(normed, values, weights, f"{layer}.self_attn")
        normed = rms_norm(x, weights[f"{layer}.post_attention_layernorm.weight"], eps)
        x = x + depth * torch.stack([experts_of_token(token, values, weights, f"{layer}.mlp") for token in normed])
    last = rms_norm(x, weights["model.norm.weight"], eps) / (values["hidden_size"] / values["dim_model_base"])
    predicted: torch.Tensor = last @ head_of(values, weights).T
    return predicted


MINICPM = Reference("minicpm", "MiniCPMForCausalLM", DEFAULTS, shapes, logits)
