from support.cards import LATENT, MSCALES, YARN, Card, missing, only

CARDS = {
    "glm_moe_dsa": Card(
        LATENT | {
            "moe_intermediate_size": 48, "intermediate_size": 80, "num_experts_per_tok": 3, "num_hidden_layers": 4,
            "n_routed_experts": 8, "first_k_dense_replace": 1, "index_topk": 9, "index_head_dim": 16,
            "index_n_heads": 24, "indexer_types": ["full", *["shared"] * 2, "full"],
        },
        shapes={
            "yarn, every second layer chooses": {
                "indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 1,
                "rope_parameters": YARN | MSCALES,
            },
            "every layer chooses, more than the text, dense last layer": {
                "indexer_types": None, "index_topk": 200, "mlp_layer_types": [*["sparse"] * 3, "dense"],
            },
            "a letter for each layer, groups": {
                "indexer_types": None, "index_topk_pattern": "FFSS", "n_group": 4, "topk_group": 2,
            },
        },
        close=[
            only("scoring_func", "softmax", "sigmoid"), only("rope_interleave", False, True),
            only("indexer_rope_interleave", False, True), only("attention_bias", True, False), missing("index_topk"),
            missing("q_lora_rank", "a whole number"),
            ({"indexer_types": ["shared", *["full"] * 3]},
             "layer 0 shares an indexer's choice, but there is no layer before it"),
            ({"indexer_types": ["full", "none", *["full"] * 2]},
             "indexer_types has ['full', 'none']; only 'full' and 'shared' are supported"),
            ({"indexer_types": None, "index_topk_pattern": "FFS"},
             "index_topk_pattern is 'FFS', expected F or S for each of 4 layers"),
        ],
        ),
}  # fmt: skip
