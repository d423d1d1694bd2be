from support.cards import YARN, Card, Values, only

FULL_V2: Values = {"q_lora_rank": 40, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}
CARDS = {
    "deepseek_v2": Card(
        {
            "moe_intermediate_size": 48, "intermediate_size": 80, "n_routed_experts": 8, "num_experts_per_tok": 3,
            "n_shared_experts": 2, "first_k_dense_replace": 1, "kv_lora_rank": 24, "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8, "v_head_dim": 12, "q_lora_rank": None,
        },
        shapes={
            "groups, query latent, yarn": FULL_V2 | {
                "routed_scaling_factor": 16.0, "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
            },
            "yarn with two mscales": FULL_V2 | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
            "no dense layer": {"first_k_dense_replace": 0},
        },
        close=[
            only("norm_topk_prob", True, False), only("scoring_func", "sigmoid", "softmax"),
            ({"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc', supported: greedy, group_limited_greedy"),
            only("attention_bias", True, False), only("mlp_bias", True, False), only("moe_layer_freq", 2, 1),
        ],
        ),
}  # fmt: skip
