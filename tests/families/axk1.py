from support.cards import LATENT, MSCALES, YARN, Card, missing, only

CARDS = {
    "axk1": Card(
        LATENT | {
            "moe_intermediate_size": 48, "intermediate_size": 80, "num_experts_per_tok": 3, "n_routed_experts": 8,
            "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
        },
        shapes={
            "yarn with an mscale, one group": {"n_group": 1, "topk_group": 1, "rope_parameters": YARN | MSCALES},
            "rotated in halves, not normalized": {"rope_interleave": False, "norm_topk_prob": False},
            "dense layers by kind, two shared experts": {
                "mlp_layer_types": ["sparse", "dense", "sparse"], "n_shared_experts": 2,
            },
        },
        close=[
            only("scoring_func", "softmax", "sigmoid"), only("topk_method", "greedy", "noaux_tc"),
            missing("q_lora_rank", "a whole number"), missing("n_group"),
        ],
        ),
}  # fmt: skip
