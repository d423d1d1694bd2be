"""XVERSE-MoE-A4.2B (`model_type` xverse, with experts) in plain torch.

Written from what modeling_xverse.py and configuration_xverse.py of xverse/XVERSE-MoE-A4.2B do, read in the copy that
GitHub goingshr-debug/SMoE keeps (models/xversemoe/model_path).
"""

import torch
from support import plain
from support.cards import Card, Values, missing

NAMES = ("gate_proj", "up_proj", "down_proj")
DEFAULTS: Values = {
    "vocab_size": 100278, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
    "num_attention_heads": 40, "num_key_value_heads": None, "hidden_act": "silu", "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0, "rope_scaling": None,
    "attention_bias": False, "moe_top_k": 6, "num_experts": 64, "num_shared_experts": 2,
}  # fmt: skip


def shapes(values: Values) -> plain.Shapes:
    """Every tensor: all layers have experts, of `intermediate_size`; the shared ones lie side by side as one."""
    d, f, made = values["hidden_size"], values["intermediate_size"], plain.decoder_shapes(values)
    for i in range(values["num_hidden_layers"]):
        mlp = f"model.layers.{i}.mlp"
        made[f"{mlp}.router.weight"] = (values["num_experts"], d)
        for e in range(values["num_experts"]):
            made |= plain.swiglu_shapes(f"{mlp}.experts.{e}", f, d, NAMES)
        if values["num_shared_experts"] is not None:
            made |= plain.swiglu_shapes(f"{mlp}.shared_experts", f * values["num_shared_experts"], d, NAMES)
    return made


def logits(values: Values, weights: plain.Weights, ids: list[int]) -> torch.Tensor:
    def experts_of_token(x: torch.Tensor, mlp: str) -> torch.Tensor:
        """The routed experts weighted by their softmax over the sum of those chosen and a millionth; and the shared
        ones as they are."""
        scores = torch.softmax(plain.linear(x, weights, f"{mlp}.router"), dim=0)
        chosen = plain.largest(scores.tolist(), values["moe_top_k"])
        shares = {e: scores[e] / (scores[chosen].sum() + 1e-6) for e in chosen}
        return plain.experts(x, weights, mlp, shares, NAMES)

    def feed_forward(x: torch.Tensor, mlp: str) -> torch.Tensor:
        return torch.stack([experts_of_token(token, mlp) for token in x])

    return plain.decoder_logits(values, weights, ids, feed_forward)


CARDS = {
    "xverse": Card(
        {"intermediate_size": 48, "num_experts": 8, "moe_top_k": 3, "num_shared_experts": 2, "rope_theta": 500000},
        shapes={
            "no shared experts": {"num_shared_experts": None},
            "bias, tied head, keys of each head": {
                "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": None,
            },
            "one expert": {"moe_top_k": 1, "num_shared_experts": 1},
        },
        close=[
            ({"num_experts": None}, "'xverse' is a dense model without experts; there is nothing to pack"),
            missing("num_shared_experts"),
            ({"num_shared_experts": 0}, "num_shared_experts is 0, expected 1 to 2^31 - 1"),
        ],
        reference=plain.Reference("xverse", "XverseForCausalLM", DEFAULTS, shapes, logits),
    ),
}  # fmt: skip
