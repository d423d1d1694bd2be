from support.cards import LATENT, MSCALES, SMALL_VISION, YARN, Card, Multimodal, Values, missing, only

CONFIG: Values = LATENT | {
    "moe_intermediate_size": 48, "intermediate_size": 80, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}  # fmt: skip
CARDS = {
    "deepseek_v3": Card(
        CONFIG | {"n_group": 4, "topk_group": 2},
        shapes={
            "yarn with an mscale": {"rope_parameters": YARN | MSCALES},
            "yarn with one bound, one group": {
                "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
                "rope_parameters": MSCALES | {
                    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 1.0,
                    "beta_slow": 1, "rope_theta": 5e4,
                },
            },
            "no query latent, rotated in halves, not normalized": {
                "q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "n_shared_experts": 2,
            },
            "no dense layer, tied head": {"first_k_dense_replace": 0, "tie_word_embeddings": True},
        },
        close=[
            only("scoring_func", "softmax", "sigmoid"), only("topk_method", "greedy", "noaux_tc"),
            only("attention_bias", True, False), only("moe_layer_freq", 2, 1), only("num_key_value_heads", 2, 4),
            ({"n_group": 3, "topk_group": 1},
             "n_group is 3 and topk_group is 1; 8 experts must divide into n_group groups, and topk_group must not "
             "exceed n_group"),
            missing("n_group"),
        ],
        ),
    "kimi_k2": Card(
        CONFIG | {"n_group": 1, "topk_group": 1},
        built_as="deepseek_v3",
    ),
    "kimi_k25": Card(
        CONFIG | {"model_type": "deepseek_v3", "tie_word_embeddings": False, "n_group": 1, "topk_group": 1},
        shapes={
            "groups, yarn, tied head": {
                "n_group": 4, "topk_group": 2, "rope_parameters": YARN | MSCALES, "tie_word_embeddings": True,
            },
        },
        around=Multimodal(
            {"vision_config": SMALL_VISION | {"pos_emb_height": 4, "pos_emb_width": 4}, "projection_hidden_size": 16},
            names=("model.vision_tower", "model.mm_projector"),
        ),
    ),
}  # fmt: skip
