from support.cards import ALL_SCALINGS, Card, only

CARDS = {
    "hunyuan_v1_moe": Card(
        {"num_key_value_heads": 2, "head_dim": 32, "num_experts": 6, "moe_topk": 2, "intermediate_size": 48},
        shapes={
            "fixed alpha, bias, tied head": {
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 100.0, "factor": 1.0},
                "attention_bias": True, "tie_word_embeddings": True,
            },
            "keys for every head": {"num_key_value_heads": 4},
        },
        close=[
            only("use_qk_norm", False, True), only("use_cla", True, False), only("moe_topk", [2, 1, 2], [2] * 3),
            only("num_shared_expert", [1, 2, 1], [1] * 3), only("moe_intermediate_size", 64, 48),
            only("moe_layer_num_skipped", 1, 0), only("attention_head_dim", 16, 32),
        ],
        scalings=(*ALL_SCALINGS, "dynamic with an alpha"),
    ),
}  # fmt: skip
