from support.cards import LATENT, MSCALES, YARN, Card, missing, only

CARDS = {
    "glm4_moe_lite": Card(
        LATENT | {
            "moe_intermediate_size": 48, "intermediate_size": 80, "num_experts_per_tok": 3, "n_routed_experts": 8,
        },
        shapes={
            "groups, rotated in halves, dense last layer": {
                "n_group": 4, "topk_group": 2, "rope_interleave": False, "mlp_layer_types": [*["sparse"] * 2, "dense"],
            },
            "no query latent, not normalized, yarn": {
                "q_lora_rank": None, "norm_topk_prob": False, "rope_parameters": YARN | MSCALES,
            },
        },
        close=[
            only("scoring_func", "softmax", "sigmoid"), only("topk_method", "greedy", "noaux_tc"),
            only("moe_layer_freq", 2, 1),
            ({"mlp_layer_types": None, "first_k_dense_replace": 2}, "first_k_dense_replace is 2; only 1 is supported"),
            ({"mlp_layer_types": ["dense", "odd", "sparse"]},
             "mlp_layer_types has ['dense', 'odd', 'sparse']; only 'dense' and 'sparse' are supported"),
            ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types lists 1 layers, but the model has 3"),
            missing("num_key_value_heads"),
        ],
        ),
}  # fmt: skip
