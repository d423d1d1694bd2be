from support.cards import YARN, Card, missing, only

CARDS = {
    "minimax_m2": Card(
        {
            "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 2,
            "intermediate_size": 48,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
        shapes={
            "yarn, whole heads": {"rope_parameters": YARN},
            "tied head": {"tie_word_embeddings": True},
        },
        close=[
            only("attn_type_list", [1, 0, 1], [1] * 3), only("qk_norm_type", "per_head", "per_layer"),
            only("use_qk_norm", False, True), only("scoring_func", "softmax", "sigmoid"),
            only("use_routing_bias", False, True), only("shared_intermediate_size", 8, 0),
            only("sliding_window", 7, None), only("layernorm_mlp_beta", 2.0, 1.0), missing("head_dim"),
        ],
        rope="part",
    ),
}  # fmt: skip
