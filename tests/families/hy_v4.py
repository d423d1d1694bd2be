from support.cards import LATENT, MSCALES, YARN, Card, missing, only

CARDS = {
    "hy_v4": Card(
        LATENT | {
            "moe_intermediate_size": 48, "intermediate_size": 80, "num_experts_per_tok": 3, "num_hidden_layers": 4,
            "n_routed_experts": 8, "index_topk": 9, "index_head_dim": 20, "index_n_heads": 24,
            "indexer_types": ["full", "shared", "full", "shared"], "hc_mult": 3, "hc_magnitude": 1.5,
            "swiglu_limit": 0.25,
        },
        shapes={
            "every layer chooses, heads of the rotated size, yarn, groups, tied head": {
                "indexer_types": ["full"] * 4, "index_head_dim": 8, "rope_parameters": YARN | MSCALES, "n_group": 4,
                "topk_group": 2, "tie_word_embeddings": True,
            },
            "choices by default, more than the text, two streams, not normalized, dense last layer": {
                "indexer_types": None, "index_topk": 200, "hc_mult": 2, "hc_eps": 0.001, "norm_topk_prob": False,
                "n_shared_experts": 2, "mlp_layer_types": [*["sparse"] * 3, "dense"],
            },
        },
        close=[
            only("enable_ihc", False, True), only("first_k_dense_replace", 3, 1), only("gated_mla", False, True),
            only("gating_type", "headwise", "elementwise"), only("learnable_sink", False, True),
            only("moe_layer_freq", 2, 1), only("scoring_func", "softmax", "sigmoid"),
            only("topk_method", "greedy", "noaux_tc"), only("attention_bias", True, False),
            only("hidden_act", "gelu", "silu"), missing("routed_scaling_factor"), missing("index_topk"),
            missing("q_lora_rank", "a whole number"), missing("index_n_heads", "a whole number"),
            missing("index_head_dim", "a whole number"),
            ({"swiglu_limit": 0.0}, "expert limits are 0.0 and None, expected one at least, between 0 and 1e6"),
            ({"hc_mult": 1}, "residual streams is 1, expected 2 to 64"),
            ({"hc_magnitude": 0.0}, "residual mixing 0, magnitude 0.0 or eps 1e-06 is out of range"),
            ({"index_head_dim": 4}, "an indexer needs q_lora_rank, and heads of at least qk_rope_head_dim values"),
            ({"indexer_types": ["shared", *["full"] * 3]},
             "layer 0 shares an indexer's choice, but there is no layer before it"),
            ({"indexer_types": ["full", "none", *["full"] * 2]},
             "indexer_types has ['full', 'none']; only 'full' and 'shared' are supported"),
            ({"layer_types": ["full_attention"] * 4},
             "layer_types has ['full_attention']; only 'indexed_attention' and 'deepseek_sparse_attention' are "
             "supported"),
        ],
        experts="fused",
    ),
}  # fmt: skip
