from support.cards import EXPERTS, Card, only

CARDS = {
    "kimi_linear": Card(
        EXPERTS | {
            "num_key_value_heads": 4, "num_local_experts": 8, "kv_lora_rank": 24, "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8, "v_head_dim": 12, "linear_head_dim": 16, "linear_num_heads": 3,
            "layer_types": [*["linear_attention"] * 2, "full_attention"],
        },
        shapes={
            "query latent, groups, two dense layers, longer kernel": {
                "q_lora_rank": 40, "num_expert_group": 4, "topk_group": 2, "first_k_dense_replace": 2,
                "linear_conv_kernel_dim": 5, "moe_renormalize": False,
            },
        },
        close=[
            only("mla_use_nope", False, True), only("moe_router_activation_func", "softmax", "sigmoid"),
            only("moe_layer_freq", 2, 1), only("use_grouped_topk", False, True), only("hidden_act", "gelu", "silu"),
            only("rope_scaling", {"type": "yarn"}, None),
            ({"layer_types": None, "linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2, 3]}},
             "linear_attn_config: kda_layers and full_attn_layers must list each of the layers 1 to 3 once"),
            ({"linear_attn_config": {"gate_lower_bound": -5.0}},
             "linear_attn_config: key 'gate_lower_bound' (-5.0) is unknown for this family and may change the "
             "arithmetic"),
            ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types must list 3 layers, each dense or sparse"),
            only("tie_word_embeddings", True, False),
        ],
        rope="none",
    ),
}  # fmt: skip
