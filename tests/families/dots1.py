from support.cards import EXPERTS, YARN, Card, only

CARDS = {
    "dots1": Card(
        EXPERTS | {
            "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        shapes={
            "yarn": {"rope_parameters": YARN | {"rope_theta": 1e5}},
            "groups, bias": {"n_group": 4, "topk_group": 2, "attention_bias": True},
            "not normalized, own head size": {"norm_topk_prob": False, "head_dim": 32},
            "no dense layer, tied head": {"first_k_dense_replace": 0, "tie_word_embeddings": True},
        },
        close=[
            only("scoring_func", "softmax", "sigmoid"), only("topk_method", "greedy", "noaux_tc"),
            only("moe_layer_freq", 2, 1),
            ({"n_shared_experts": 0}, "n_shared_experts is 0, expected 1 to 2^31 - 1"),
            only("use_sliding_window", True, False),
            ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
             "layer_types has ['full_attention', 'sliding_attention']; only 'full_attention' is supported"),
            ({"layer_types": None, "max_window_layers": 1}, "sliding_window is 4096; only None is supported"),
        ],
        ),
}  # fmt: skip
