from support.cards import SMALL_VISION, YARN, Card, Multimodal, Values, only, with_old_keys


def with_frequencies(values: Values) -> Values:
    """Says in numbers which layers choose blocks."""
    sparse = [int(kind != "full_attention") for kind in values["layer_types"]]
    return with_old_keys(values) | {"sparse_attention_config": {"sparse_attention_freq": sparse}}


CARDS = {
    "minimax_m3_vl": Card(
        {
            "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 2,
            "intermediate_size": 48, "dense_intermediate_size": 80, "shared_intermediate_size": 40,
            "mlp_layer_types": ["dense", *["sparse"] * 2],
            "layer_types": ["full_attention", *["minimax_m3_sparse"] * 2], "index_n_heads": 2, "index_head_dim": 24,
            "index_block_size": 5, "index_topk_blocks": 3, "rotary_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
        shapes={
            "every layer chooses, one for all heads, tied head, whole heads rotated": {
                "layer_types": ["minimax_m3_sparse"] * 3, "mlp_layer_types": ["sparse"] * 3, "index_n_heads": 1,
                "index_head_dim": 32, "index_local_blocks": 2, "tie_word_embeddings": True, "rotary_dim": 32,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            "as published": {
                "layer_types": None, "mlp_layer_types": None, "moe_layer_freq": [0, 1, 1], "hidden_act": "swigluoai",
                "sparse_attention_config": {
                    "use_sparse_attention": True, "sparse_index_dim": 16, "sparse_num_index_heads": 1,
                    "sparse_topk_blocks": 2, "sparse_block_size": 8, "sparse_disable_index_value": [0, 0, 1],
                    "sparse_score_type": "max", "sparse_init_block": 0, "sparse_local_block": 0,
                    "sparse_attention_freq": [0, 0, 1],
                },
            },
            "no layer chooses, yarn": {
                "layer_types": ["full_attention"] * 3, "rope_parameters": YARN | {"partial_rotary_factor": 0.5},
            },
        },
        close=[
            only("scoring_func", "softmax", "sigmoid"), only("use_gemma_norm", False, True),
            only("attention_output_gate", True, False), only("n_shared_experts", 2, 1), only("swiglu_limit", 6.0, 7.0),
            only("swiglu_alpha", 1.0, 1.702), only("rotary_dim", 8, 16),
            ({"index_n_heads": 3}, "3 heads of an indexer cannot choose for 2 keys and values"),
            ({"index_head_dim": 8}, "an indexer of blocks has heads of 8, expected at least rotary_dim, 16"),
            ({"index_local_blocks": 4}, "indexer local_blocks is 4 with largest, expected 0 to 3"),
            ({"index_block_size": 0}, "index_block_size is 0, expected at least 1"),
            ({"layer_types": ["full_attention", "minimax_m3_sparse", "sliding_attention"]},
             "layer_types has ['full_attention', 'minimax_m3_sparse', 'sliding_attention']; only 'full_attention' "
             "and 'minimax_m3_sparse' are supported"),
            ({"sparse_attention_config": {"use_sparse_attention": False}},
             "sparse_attention_config: use_sparse_attention is False; only True is supported"),
            ({"sparse_attention_config": {"sparse_init_block": 1}},
             "sparse_attention_config: sparse_init_block is 1; only 0 is supported"),
            ({"sparse_attention_config": {"sparse_attention_freq": [0, 1]}},
             "sparse_attention_config: sparse_attention_freq is [0, 1], expected 0 or 1 for each of 3 layers"),
            ({"mlp_layer_types": None, "moe_layer_freq": [0, 1, 2]},
             "moe_layer_freq is [0, 1, 2], expected 0 or 1 for each of 3 layers"),
        ],
        around=Multimodal(
            {
                "vision_config": SMALL_VISION | {"hidden_size": 32, "patch_size": 4, "image_size": 16},
                "projector_hidden_size": 32, "image_token_index": 90, "video_token_index": 91,
            },
        ),
        rope="part", refused_scalings=("proportional",), old=with_frequencies,
    ),
}  # fmt: skip
