"""Rows of families that have Kimi delta attention in some layers, in the form of `all_attention`."""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]

HYBRID_SHAPES: dict[str, Values] = {
    "bailing_hybrid": {
        "num_key_value_heads": 4,
        "intermediate_size": 80,
        "moe_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_expert_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "layer_group_size": 3,
        "head_dim": 16,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "rope_theta": 1e4,
    },
}
_LIMITS: Values = {
    "expert_swiglu_limit_list": [0, 0.25, 0.5],
    "share_expert_swiglu_limit_list": [0, 0, 0.75],
}
HYBRID_SWITCHED: dict[str, dict[str, Values]] = {
    "bailing_hybrid": {
        "limits of neurons": _LIMITS,
        "limits of shared experts alone": {"share_expert_swiglu_limit_list": [0, 0.25, 0.25]},
        "no bound, one group, not normalized, two shared experts": {
            "kda_safe_gate": False,
            "num_expert_group": 1,
            "topk_group": 1,
            "moe_renormalize": False,
            "num_shared_experts": 2,
        },
        "another bound, longer kernel, more dense layers": {
            "kda_lower_bound": -0.5,
            "short_conv_kernel_size": 6,
            "first_k_dense_replace": 2,
        },
        "attention first, yarn": {
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        "a base of its own next to the usual one": {
            "rope_theta": 6e6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
        "keys of the published config": {
            "partial_rotary_factor": 0.5,
            "rotary_dim": 8,
            "q_lora_rank": None,
            "no_kda_lora": True,
            "use_kda_lora": False,
            "linear_silu": True,
            "group_norm_size": 1,
            "router_dtype": "fp32",
            "moe_shared_expert_intermediate_size": 48,
            "gated_attention_proj_granularity_type": "head_wise",
            "expert_swiglu_limit_list": None,
        },
    },
}
