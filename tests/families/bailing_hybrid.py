from typing import Any

from support.cards import MSCALES, YARN, Card, missing, only


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


CARDS = {
    "bailing_hybrid": Card(
        {
            "num_key_value_heads": 4, "intermediate_size": 80, "moe_intermediate_size": 48, "num_experts": 8,
            "num_experts_per_token": 3, "num_expert_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
            "layer_group_size": 3, "head_dim": 16, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
            "v_head_dim": 12, "rope_theta": 1e4,
        },
        shapes={
            "limits of neurons": {
                "expert_swiglu_limit_list": [0, 0.25, 0.5], "share_expert_swiglu_limit_list": [0, 0, 0.75],
            },
            "limits of shared experts alone": {"share_expert_swiglu_limit_list": [0, 0.25, 0.25]},
            "no bound, one group, not normalized, two shared experts": {
                "kda_safe_gate": False, "num_expert_group": 1, "topk_group": 1, "moe_renormalize": False,
                "num_shared_experts": 2,
            },
            "another bound, longer kernel, more dense layers": {
                "kda_lower_bound": -0.5, "short_conv_kernel_size": 6, "first_k_dense_replace": 2,
            },
            "attention first, yarn": {
                "layer_types": ["full_attention", "linear_attention", "full_attention"],
                "rope_parameters": YARN | MSCALES,
            },
            "a base of its own next to the usual one": {
                "rope_theta": 6e6, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            },
            "keys of the published config": {
                "partial_rotary_factor": 0.5, "rotary_dim": 8, "q_lora_rank": None, "no_kda_lora": True,
                "use_kda_lora": False, "linear_silu": True, "group_norm_size": 1, "router_dtype": "fp32",
                "moe_shared_expert_intermediate_size": 48, "gated_attention_proj_granularity_type": "head_wise",
                "expert_swiglu_limit_list": None,
            },
        },
        close=[
            only("no_kda_lora", False, True), only("use_mla_nope", True, False), only("q_lora_rank", 40, None),
            only("attention_bias", True, False), only("tie_word_embeddings", True, False),
            only("group_norm_size", 4, 1), missing("topk_group"),
            ({"kda_lower_bound": 0.5}, "mixer lower_bound is 0.5, expected above -1e6 and below 0"),
            ({"num_experts_per_tok": 2},
             "num_experts_per_token is 3, num_experts_per_tok is 2; these keys must be equal"),
            only("moe_shared_expert_intermediate_size", 40, 48),
            ({"partial_rotary_factor": 0.25},
             "partial_rotary_factor rotates 4 of 16 values, but qk_rope_head_dim is 8"),
            only("rotary_dim", 4, 8),
            ({"expert_swiglu_limit_list": [0, 4]}, "expert_swiglu_limit_list lists 2 layers, but the model has 3"),
            ({"share_expert_swiglu_limit_list": [5, 5, 0]},
             "share_expert_swiglu_limit_list limits layer 0, which has no experts"),
            ({"expert_swiglu_limit_list": [0, -4, 0]},
             "expert limits are -4.0 and None, expected one at least, between 0 and 1e6"),
            ({"layer_types": ["sliding_attention"] * 3},
             "layer_types has ['sliding_attention']; supported: full_attention, linear_attention"),
        ],
        rope="part", correct=limit_neurons,
    ),
}  # fmt: skip
