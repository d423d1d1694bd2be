"""Rows of families whose attention differs by layer, in the form of `all_attention`, and configs close to theirs."""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]
_ONLY = "only {} is supported".format
_EXPERTS: Values = {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 48,
    "intermediate_size": 80,
    "num_experts_per_tok": 3,
}
_YARN: Values = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
}
_KINDS = ("full_attention", "sliding_attention")
_STEP: Values = _EXPERTS | {
    "num_hidden_layers": 5,
    "num_sliding_attention_heads": 6,
    "pad_token_id": 1,
    "head_dim": 32,
    "n_routed_experts": 8,
    "share_expert_dim": 40,
    "moe_router_scaling_factor": 3.0,
    "sliding_window": 7,
    "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
    "mlp_layer_types": ["dense", *["sparse"] * 4],
    "swiglu_limits": [None, 0, 0.4, 0.3, 0.3],
    "swiglu_limits_shared": [0.5, 0.5, None, 0.3, 0],
    "rope_parameters": {
        "full_attention": {
            "rope_type": "llama3",
            "rope_theta": 5e4,
            "partial_rotary_factor": 0.5,
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 32.0,
            "original_max_position_embeddings": 32,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
}
LAYERED_SHAPES: dict[str, Values] = {
    "granitemoe_swa": {
        "num_hidden_layers": 5,
        "num_key_value_heads": 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "shared_intermediate_size": 40,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.05,
        "residual_multiplier": 0.22,
        "logits_scaling": 6.0,
        "sliding_window": 7,
        "layer_rope_theta": [1e4, 0, 5e5, 5e5, 1e4],
        "tie_word_embeddings": True,
    },
    "mellum": _EXPERTS
    | {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "num_experts": 8,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "rope_parameters": {
            "full_attention": _YARN | {"attention_factor": 1.3},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
    },
    "step3p5": _STEP,
    "step3p7": _STEP | {"model_type": "step3p5", "tie_word_embeddings": False},
    "laguna": _EXPERTS
    | {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "num_experts": 8,
        "shared_expert_intermediate_size": 40,
        "moe_routed_scaling_factor": 2.5,
        "sliding_window": 7,
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
        "num_attention_heads_per_layer": [4, 6, 6, 6],
        "rope_parameters": {
            "full_attention": _YARN | {"attention_factor": 1.3, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    },
    "mimo_v2_flash": _EXPERTS
    | {
        "num_hidden_layers": 6,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "v_head_dim": 24,
        "n_routed_experts": 8,
        "sliding_window": 7,
    },
}
LAYERED_SWITCHED: dict[str, dict[str, Values]] = {
    "granitemoe_swa": {
        "one base, yarn, heads of 32": {"layer_rope_theta": None, "head_dim": 32, "rope_parameters": _YARN},
        "yarn with bases, window on one layer, bias, own head": {
            "layer_rope_theta": [1e4, 1e4, 0, 2e5, 1e4],
            "rope_parameters": _YARN,
            "layer_types": [*["full_attention"] * 3, "sliding_attention", "full_attention"],
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        "no positions, no shared expert, no windows": {
            "layer_rope_theta": [0] * 5,
            "shared_intermediate_size": 0,
            "layer_types": ["full_attention"] * 5,
        },
    },
    "mellum": {
        "own positions by default, most layers without a window, bias, tied head": {
            "rope_parameters": None,
            "layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"],
            "attention_bias": True,
            "tie_word_embeddings": True,
            "norm_topk_prob": False,
        },
        "one kind of positions": {
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 2e4} for kind in ("full_attention", "sliding_attention")
            },
            "mlp_layer_types": None,
        },
        "no windows": {"layer_types": None, "sliding_window": None},
    },
    "step3p5": {
        "no limits, whole heads by default, three dense layers, bias": {
            "swiglu_limits": None,
            "swiglu_limits_shared": None,
            "rope_parameters": None,
            "mlp_layer_types": None,
            "attention_bias": True,
            "num_sliding_attention_heads": None,
        },
        "no windows, yarn": {
            "layer_types": None,
            "rope_parameters": {"full_attention": _YARN},
        },
    },
    "step3p7": {"tied head": {"tie_word_embeddings": True}},
    "laguna": {
        "a gate a value, own positions by default, bias, tied head": {
            "gating": "per-element",
            "rope_parameters": None,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_attention_heads_per_layer": [2, 4, 2, 6],
        },
        "keys of the published config, dense last layer": {
            "gating": "per-head",
            "mlp_layer_types": ["sparse", "sparse", "sparse", "dense"],
            "mlp_only_layers": [3],
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "moe_router_logit_softcapping": 0.0,
        },
        "layers alike": {
            "num_attention_heads_per_layer": None,
            "layer_types": None,
            "mlp_layer_types": None,
        },
    },
    "mimo_v2_flash": {
        "keys of the published config": {
            "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0],
            "moe_layer_freq": [0, 1, 1, 1, 1, 1],
            "sliding_window_size": 7,
            "rope_theta": 5000000,
            "swa_rope_theta": 10000,
            "partial_rotary_factor": 0.334,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 32,
            "swa_v_head_dim": 24,
            "layernorm_epsilon": 1e-5,
            "routed_scaling_factor": None,
        },
        "larger values, not scaled, groups, bias, yarn": {
            "layer_types": [*["sliding_attention"] * 2, *["full_attention"] * 4],
            "mlp_layer_types": [*["sparse"] * 5, "dense"],
            "v_head_dim": 40,
            "attention_value_scale": None,
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.5,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": _YARN | {"partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 1.0},
            },
        },
        "values as large as keys, no windows": {
            "v_head_dim": 32,
            "layer_types": ["full_attention"] * 6,
            "attention_value_scale": 0.5,
        },
    },
}
# A family, changes of its config, and the line that refuses them.
LAYERED_CLOSE: tuple[tuple[str, Values, str], ...] = (
    (
        "mellum",
        {"rope_parameters": {kind: {"rope_theta": 1e4, "partial_rotary_factor": 0.5} for kind in _KINDS}},
        "partial_rotary_factor is 0.5; " + _ONLY("1.0"),
    ),
    ("mellum", {"use_sliding_window": False}, "use_sliding_window is False; " + _ONLY("True")),
    ("mellum", {"sliding_window": None}, "key 'sliding_window' is missing, expected a whole number"),
    ("mellum", {"head_dim": None}, "key 'head_dim' is missing, expected a value or null"),
    *(
        ("mimo_v2_flash", {key: value}, f"{key} is {value!r}; " + _ONLY(supported))
        for key, value, supported in (
            ("rope_theta", 1e4, "5000000.0"),
            ("swa_rope_theta", 5e6, "10000.0"),
            ("partial_rotary_factor", 0.5, "0.334"),
            ("hybrid_layer_pattern", [0, 1, 1, 1, 0, 0], "[0, 1, 1, 1, 1, 0]"),
            ("moe_layer_freq", [1] * 6, "[0, 1, 1, 1, 1, 1]"),
            ("swa_num_key_value_heads", 4, "2"),
            ("swa_num_attention_heads", 8, "4"),
            ("swa_head_dim", 64, "32"),
            ("swa_v_head_dim", 32, "24"),
            ("add_swa_attention_sink_bias", False, "True"),
            ("add_full_attention_sink_bias", True, "False"),
            ("layernorm_epsilon", 1e-6, "1e-05"),
            ("scoring_func", "softmax", "'sigmoid'"),
            ("topk_method", "greedy", "'noaux_tc'"),
            ("n_shared_experts", 1, "None"),
        )
    ),
    *(
        ("mimo_v2_flash", {key: None}, f"key '{key}' is missing, expected a value or null")
        for key in ("head_dim", "attention_value_scale")
    ),
    *(
        ("step3p5", {key: value}, f"{key} is {value!r}; " + _ONLY(supported))
        for key, value, supported in (
            ("query_pre_attn_scalar", 64, "32"),
            ("mlp_bias", True, "False"),
            ("gating", "per-element", "True"),
            ("use_bidirectional_attention", True, "False"),
            ("use_moe", False, "True"),
            ("moe_layer_offset", 1, "0"),
            ("moe_every_n_layer", 2, "1"),
            ("norm_expert_weight", False, "True"),
            ("moe_router_activation", "softmax", "'sigmoid'"),
            ("use_moe_router_bias", False, "True"),
            ("use_head_wise_attn_gate", False, "True"),
            ("use_qk_norm", False, "True"),
            ("att_impl_type", "MFA", "'GQA'"),
            ("zero_centered", False, "True"),
            ("sink", True, "False"),
            ("use_rope_layers", [1], "[]"),
        )
    ),
    *(
        ("step3p5", changes, message)
        for changes, message in (
            ({"head_dim": None}, "key 'head_dim' is missing, expected a value or null"),
            ({"sliding_window": None}, "key 'sliding_window' is missing, expected a whole number"),
            ({"layer_types": ["full_attention"] * 4}, "layer_types lists 4 layers, but the model has 5"),
            (
                {"layer_types": [*["full_attention"] * 4, "odd"]},
                "layer_types has ['odd']; supported: full_attention, sliding_attention",
            ),
            (
                {"mlp_layer_types": [*["sparse"] * 4, "odd"]},
                "mlp_layer_types has ['odd']; supported: dense, sparse",
            ),
            (
                {"mlp_layer_types": None, "moe_layers_enum": "3,x"},
                "moe_layers_enum is '3,x', expected numbers with commas between them",
            ),
            (
                {"per_layer_config": {"1": {"num_attention_heads": 4}}},
                "per_layer_config must give layers with a window, and no others, 6 heads",
            ),
            ({"swiglu_limits": [7.0]}, "swiglu_limits lists 1 layers, but the model has 5"),
            (
                {"swiglu_limits": [0, 0, 0, -1, 0]},
                "expert limits are -1.0 and 0.3, expected one at least, between 0 and 1e6",
            ),
            (
                {"rope_parameters": None, "rope_theta": [1e4, 1e4, 1e4, 2e4, 1e4]},
                "layers of sliding_attention differ in rope_theta or partial_rotary_factors",
            ),
            (
                {"rope_parameters": None, "rope_scaling": _YARN, "yarn_only_types": []},
                "yarn_only_types is []; " + _ONLY("['full_attention']"),
            ),
            (
                {"attention_other_setting": {"num_attention_groups": 4}},
                "attention_other_setting: num_attention_groups is 4; " + _ONLY("2"),
            ),
        )
    ),
    (
        "step3p7",
        {"vision_model_type": "clip"},
        "key 'vision_model_type' ('clip') is unknown for this family and may change the arithmetic",
    ),
    *(
        ("laguna", {key: value}, f"{key} is {value!r}; " + _ONLY(supported))
        for key, value, supported in (
            ("mlp_only_layers", [0, 1], "[0]"),
            ("decoder_sparse_step", 2, "1"),
            ("norm_topk_prob", False, "True"),
            ("qkv_bias", True, "False"),
            ("moe_router_score_func", "softmax", "'sigmoid'"),
            ("moe_apply_router_weight_on_input", True, "False"),
            ("moe_router_logit_softcapping", 30.0, "0.0"),
        )
    ),
    ("laguna", {"gating": False}, "gating is False; supported: True, 'per-head', 'per-element'"),
    ("laguna", {"gating": "none"}, "gating is 'none', expected true or false"),
    (
        "laguna",
        {"num_attention_heads_per_layer": [4, 4]},
        "num_attention_heads_per_layer lists 2 layers, but the model has 4",
    ),
    ("laguna", {"num_attention_heads_per_layer": [4, 6, 6, 5]}, "5 heads cannot share 2 keys and values"),
    ("laguna", {"sliding_window": None}, "key 'sliding_window' is missing, expected a whole number"),
    ("laguna", {"head_dim": None}, "key 'head_dim' is missing, expected a value or null"),
    ("mimo_v2_flash", {"v_head_dim": None}, "key 'v_head_dim' is missing, expected a whole number"),
    (
        "granitemoe_swa",
        {"layer_rope_theta": [1e4, 0.0]},
        "layer_rope_theta lists 2 layers, but the model has 5",
    ),
    (
        "granitemoe_swa",
        {"layer_rope_theta": [1e4, -1.0, 0.0, 0.0, 0.0]},
        "rope theta is -1.0, expected between 1 and 1e12",
    ),
    ("granitemoe_swa", {"sliding_window": None}, "key 'sliding_window' is missing, expected a whole number"),
)
