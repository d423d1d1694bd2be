from support.cards import Card, missing, only

CARDS = {
    "ernie4_5_moe": Card(
        {
            "num_key_value_heads": 2, "moe_intermediate_size": 48, "intermediate_size": 80, "moe_num_experts": 8,
            "moe_k": 3,
        },
        shapes={
            "every second layer, no shared expert, own head": {
                "moe_layer_interval": 2, "moe_num_shared_experts": 0, "tie_word_embeddings": False,
            },
            "first layers alone": {"moe_layer_start_index": 0, "moe_layer_end_index": 1},
        },
        close=[
            only("use_bias", True, False), only("moe_gate", "top2", "topk"), only("moe_use_aux_free", False, True),
            only("moe_norm_min", 0.1, 1e-12),
            ({"moe_layer_end_index": -2}, "moe_layer_end_index is -2, expected -1 or a layer"),
            missing("moe_num_shared_experts"),
        ],
        ),
}  # fmt: skip
