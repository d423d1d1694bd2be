from support.cards import EXPERTS, YARN, Card, missing, only

CARDS = {
    "mimo_v2_flash": Card(
        EXPERTS | {
            "num_key_value_heads": 1, "num_hidden_layers": 6, "head_dim": 32, "v_head_dim": 24, "n_routed_experts": 8,
            "sliding_window": 7,
        },
        shapes={
            "keys of the published config": {
                "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1, 1, 1],
                "sliding_window_size": 7, "rope_theta": 5000000, "swa_rope_theta": 10000,
                "partial_rotary_factor": 0.334, "swa_num_key_value_heads": 2, "swa_head_dim": 32, "swa_v_head_dim": 24,
                "layernorm_epsilon": 1e-5, "routed_scaling_factor": None,
            },
            "larger values, not scaled, groups, bias, yarn": {
                "layer_types": [*["sliding_attention"] * 2, *["full_attention"] * 4],
                "mlp_layer_types": [*["sparse"] * 5, "dense"], "v_head_dim": 40, "attention_value_scale": None,
                "n_group": 4, "topk_group": 2, "attention_bias": True, "norm_topk_prob": False,
                "routed_scaling_factor": 2.5, "tie_word_embeddings": True,
                "rope_parameters": {
                    "full_attention": YARN | {"partial_rotary_factor": 0.5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 1.0},
                },
            },
            "values as large as keys, no windows": {
                "v_head_dim": 32, "layer_types": ["full_attention"] * 6, "attention_value_scale": 0.5,
            },
        },
        close=[
            only("rope_theta", 1e4, 5e6), only("swa_rope_theta", 5e6, 1e4), only("partial_rotary_factor", 0.5, 0.334),
            only("hybrid_layer_pattern", [0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0]),
            only("moe_layer_freq", [1] * 6, [0, 1, 1, 1, 1, 1]), only("swa_num_key_value_heads", 4, 2),
            only("swa_num_attention_heads", 8, 4), only("swa_head_dim", 64, 32), only("swa_v_head_dim", 32, 24),
            only("add_swa_attention_sink_bias", False, True), only("add_full_attention_sink_bias", True, False),
            only("layernorm_epsilon", 1e-6, 1e-5), only("scoring_func", "softmax", "sigmoid"),
            only("topk_method", "greedy", "noaux_tc"), only("n_shared_experts", 1, None), missing("head_dim"),
            missing("attention_value_scale"), missing("v_head_dim", "a whole number"),
        ],
        rope="by kind",
    ),
}  # fmt: skip
