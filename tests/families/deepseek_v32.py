from support.cards import LATENT, MSCALES, YARN, Card, missing, only

CARDS = {
    "deepseek_v32": Card(
        LATENT | {
            "moe_intermediate_size": 48, "intermediate_size": 80, "num_experts_per_tok": 3, "n_routed_experts": 8,
            "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "index_topk": 9, "index_head_dim": 16,
            "index_n_heads": 8,
        },
        shapes={
            "yarn, heads of the rotated size": {"index_head_dim": 8, "rope_parameters": YARN | MSCALES},
            "more than the text, not normalized, one group": {
                "index_topk": 200, "norm_topk_prob": False, "n_group": 1, "topk_group": 1,
            },
        },
        close=[
            only("scoring_func", "softmax", "sigmoid"), only("topk_method", "greedy", "noaux_tc"),
            only("moe_layer_freq", 2, 1), only("attention_bias", True, False), only("mlp_bias", True, False),
            only("rope_interleave", False, True), missing("index_topk"),
            ({"index_topk": 0}, "index_topk is 0, expected 1 to 2^31 - 1"),
            ({"index_head_dim": 4}, "an indexer needs q_lora_rank, and heads of at least qk_rope_head_dim values"),
            missing("q_lora_rank", "a whole number"),
            ({"layer_types": ["indexed_attention", "full_attention", "indexed_attention"]},
             "layer_types has ['full_attention', 'indexed_attention']; only 'indexed_attention' and "
             "'deepseek_sparse_attention' are supported"),
        ],
        ),
}  # fmt: skip
