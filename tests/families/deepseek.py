"""DeepSeekMoE-16B (`model_type` deepseek) in plain torch.

Written from what modeling_deepseek.py and configuration_deepseek.py of deepseek-ai/deepseek-moe-16b-base do, read in
the copy that GitHub goingshr-debug/SMoE keeps (models/deepseekmoe/model_path).
"""

import torch
from support import plain
from support.cards import Card, Values, missing, only

NAMES = ("gate_proj", "up_proj", "down_proj")
DEFAULTS: Values = {
    "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008, "moe_intermediate_size": 1407,
    "num_hidden_layers": 30, "num_attention_heads": 32, "num_key_value_heads": 32, "n_shared_experts": None,
    "n_routed_experts": None, "num_experts_per_tok": None, "moe_layer_freq": 1, "first_k_dense_replace": 0,
    "norm_topk_prob": False, "scoring_func": "softmax", "hidden_act": "silu", "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0, "rope_scaling": None,
    "attention_bias": False,
}  # fmt: skip


def has_experts(values: Values, layer: int) -> bool:
    """Whether a layer is one of experts: from the first such on, every so-manieth counted from layer 0."""
    return bool(
        values["n_routed_experts"] is not None
        and layer >= values["first_k_dense_replace"]
        and layer % values["moe_layer_freq"] == 0
    )


def shapes(values: Values) -> plain.Shapes:
    """Every tensor."""
    d, made = values["hidden_size"], plain.decoder_shapes(values)
    for i in range(values["num_hidden_layers"]):
        mlp, size = f"model.layers.{i}.mlp", values["moe_intermediate_size"]
        if not has_experts(values, i):
            made |= plain.swiglu_shapes(mlp, values["intermediate_size"], d, NAMES)
            continue
        made[f"{mlp}.gate.weight"] = (values["n_routed_experts"], d)
        for e in range(values["n_routed_experts"]):
            made |= plain.swiglu_shapes(f"{mlp}.experts.{e}", size, d, NAMES)
        if values["n_shared_experts"] is not None:
            made |= plain.swiglu_shapes(f"{mlp}.shared_experts", size * values["n_shared_experts"], d, NAMES)
    return made


def experts_of_token(x: torch.Tensor, values: Values, weights: plain.Weights, mlp: str) -> torch.Tensor:
    """The routed experts weighted by their softmax over all, made to sum to 1 where asked and more than one; and the
    shared ones as they are."""
    scores = torch.softmax(plain.linear(x, weights, f"{mlp}.gate"), dim=0)
    chosen = plain.largest(scores.tolist(), values["num_experts_per_tok"])
    total = scores[chosen].sum() + 1e-20 if values["norm_topk_prob"] and len(chosen) > 1 else 1.0
    return plain.experts(x, weights, mlp, {e: scores[e] / total for e in chosen}, NAMES)


def logits(values: Values, weights: plain.Weights, ids: list[int]) -> torch.Tensor:
    def feed_forward(x: torch.Tensor, mlp: str) -> torch.Tensor:
        if f"{mlp}.gate.weight" not in weights:
            return plain.swiglu(x, weights, mlp, NAMES)
        return torch.stack([experts_of_token(token, values, weights, mlp) for token in x])

    return plain.decoder_logits(values, weights, ids, feed_forward)


CARDS = {
    "deepseek": Card(
        {
            "intermediate_size": 80, "moe_intermediate_size": 48, "n_routed_experts": 8, "num_experts_per_tok": 3,
            "n_shared_experts": 2, "first_k_dense_replace": 1, "norm_topk_prob": False,
        },
        shapes={
            "normalized": {"norm_topk_prob": True},
            "every second layer": {"moe_layer_freq": 2, "first_k_dense_replace": 0},
            "no shared experts, no dense layer": {"n_shared_experts": None, "first_k_dense_replace": 0},
            "one expert, not normalized for it": {"num_experts_per_tok": 1, "norm_topk_prob": True},
            "bias, tied head, keys of each head": {
                "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": None, "rope_theta": 77.0,
            },
        },
        close=[
            ({"n_routed_experts": None}, "'deepseek' is a dense model without experts; there is nothing to pack"),
            only("scoring_func", "sigmoid", "softmax"),
            ({"n_shared_experts": 0}, "n_shared_experts is 0, expected 1 to 2^31 - 1"),
            ({"moe_layer_freq": 0}, "moe_layer_freq is 0, expected 1 to 2^31 - 1"),
            missing("num_key_value_heads"),
        ],
        reference=plain.Reference("deepseek", "DeepseekForCausalLM", DEFAULTS, shapes, logits),
    ),
}  # fmt: skip
