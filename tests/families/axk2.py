from support.cards import LATENT, MSCALES, YARN, Card, missing, only

CARDS = {
    "axk2": Card(
        LATENT | {
            "moe_intermediate_size": 48, "intermediate_size": 80, "num_experts_per_tok": 3, "n_routed_experts": 8,
            "index_topk": 9, "index_head_dim": 16, "index_n_heads": 24, "gated_norm_rank": 10,
        },
        shapes={
            "groups, yarn, two shared experts": {
                "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 2,
                "rope_parameters": YARN | MSCALES,
            },
            "dense layers by kind, more than the text, not normalized, tied head": {
                "mlp_layer_types": ["sparse", "dense", "sparse"], "index_topk": 200, "norm_topk_prob": False,
                "tie_word_embeddings": True,
            },
        },
        close=[
            only("attention_output_gate", False, True), only("attn_gate_fused", False, True),
            only("gated_norm", False, True), only("mlp_bias", True, False), only("rope_interleave", False, True),
            only("scoring_func", "softmax", "sigmoid"), only("topk_method", "greedy", "noaux_tc"),
            only("attention_bias", True, False), only("num_key_value_heads", 2, 4), missing("routed_scaling_factor"),
            missing("num_key_value_heads"), missing("index_topk"), missing("q_lora_rank", "a whole number"),
            ({"n_group": 2}, "n_group and topk_group must both be there, or neither"),
            ({"topk_group": 1}, "n_group and topk_group must both be there, or neither"),
            ({"n_group": 3, "topk_group": 1},
             "n_group is 3 and topk_group is 1; 8 experts must divide into n_group groups, and topk_group must not "
             "exceed n_group"),
            ({"gated_norm_rank": 0}, "gated_norm_rank is 0, expected 1 to 2^31 - 1"),
            ({"index_head_dim": 4}, "an indexer needs q_lora_rank, and heads of at least qk_rope_head_dim values"),
            ({"layer_types": ["full_attention"] * 3},
             "layer_types has ['full_attention']; only 'indexed_attention' and 'deepseek_sparse_attention' are "
             "supported"),
        ],
        ),
}  # fmt: skip
