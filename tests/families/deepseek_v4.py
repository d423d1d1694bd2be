from support.cards import YARN, Card, Values, missing, only


def as_published(values: Values) -> Values:
    """The config as its authors write it, from that of transformers 5."""
    new = ("dtype", "rope_parameters", "layer_types", "mlp_layer_types", "compress_rates", "partial_rotary_factor")
    ratios = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    return {key: value for key, value in values.items() if key not in new} | {
        "torch_dtype": values.get("dtype"),
        "compress_ratios": [*(ratios[kind] for kind in values["layer_types"]), 0],  # the last: of a prediction layer
        "compress_rate_csa": values["compress_rates"]["compressed_sparse_attention"],
        "compress_rate_hca": values["compress_rates"]["heavily_compressed_attention"],
        "num_hash_layers": values["mlp_layer_types"].count("hash_moe"),
        "rope_scaling": None,
    }


CARDS = {
    "deepseek_v4": Card(
        {
            "num_hidden_layers": 5, "num_attention_heads": 6, "head_dim": 16, "q_lora_rank": 40, "qk_rope_head_dim": 8,
            "moe_intermediate_size": 48, "n_routed_experts": 8, "num_experts_per_tok": 3, "hc_mult": 3,
            "hc_sinkhorn_iters": 4,
            "layer_types": [
                "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                "compressed_sparse_attention", "heavily_compressed_attention",
            ],
            "mlp_layer_types": [*["hash_moe"] * 2, *["moe"] * 3],
            "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 8},
            "sliding_window": 7, "swiglu_limit": 0.5, "o_groups": 3, "o_lora_rank": 20, "index_n_heads": 12,
            "index_head_dim": 12, "index_topk": 5,
        },
        shapes={
            "yarn, tied head": {"rope_parameters": YARN, "tie_word_embeddings": True},
            "yarn with a factor of its own": {
                "rope_parameters": {
                    "main": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
                    "compress": YARN | {"rope_theta": 1.6e5, "partial_rotary_factor": 0.5, "attention_factor": 1.2},
                },
            },
            "a window alone": {"layer_types": ["sliding_attention"] * 5},
            "as published: tables first, windows first": {
                "layer_types": [
                    *["sliding_attention"] * 2, "compressed_sparse_attention", "heavily_compressed_attention",
                    "compressed_sparse_attention",
                ],
                "mlp_layer_types": None,
            },
            "no table, entries of one position and of nearly all": {
                "mlp_layer_types": ["moe"] * 5,
                "compress_rates": {"compressed_sparse_attention": 1, "heavily_compressed_attention": 90},
                "index_topk": 40,
            },
        },
        close=[
            only("scoring_func", "sigmoid", "sqrtsoftplus"), only("topk_method", "greedy", "noaux_tc"),
            only("norm_topk_prob", False, True), only("attention_bias", True, False), only("mlp_bias", True, False),
            only("num_key_value_heads", 2, 1), only("n_shared_experts", 2, 1),
            ({"intermediate_size": 80},
             "moe_intermediate_size is 48, intermediate_size is 80; these keys must be equal"),
            ({"layer_types": ["sliding_attention"] * 4}, "layer_types lists 4 layers, but the model has 5"),
            ({"layer_types": [*["sliding_attention"] * 4, "full_attention"]},
             "layer_types has ['full_attention', 'sliding_attention']; only 'sliding_attention' and "
             "'compressed_sparse_attention' and 'heavily_compressed_attention' are supported"),
            ({"mlp_layer_types": ["dense", *["moe"] * 4]},
             "mlp_layer_types has ['dense', 'moe']; only 'hash_moe' and 'moe' are supported"),
            ({"layer_types": None, "compress_ratios": [0, 4, 8, 4, 128]},
             "compress_ratios is [0, 4, 8, 4, 128], expected 0, 4 or 128 for each of 5 layers"),
            ({"layer_types": None, "compress_ratios": [0, 4, 128, 4]},
             "compress_ratios is [0, 4, 128, 4], expected 0, 4 or 128 for each of 5 layers"),
            ({"compress_rates": {"compressed_sparse_attention": 3}},
             "compress_rates: key 'heavily_compressed_attention' is missing, expected a whole number"),
            ({"compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 8, "other": 1}},
             "compress_rates: key 'other' (1) is unknown for this family and may change the arithmetic"),
            ({"compress_rate_csa": 0}, "compress_rate_csa is 0, expected 1 to 2^31 - 1"),
            missing("sliding_window", "a whole number"), missing("swiglu_limit", "a number"),
            ({"swiglu_limit": 0.0}, "expert limits are 0.0 and 0.0, expected one at least, between 0 and 1e6"),
            ({"hc_mult": 1}, "residual streams is 1, expected 2 to 64"),
            ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters is 0, expected 1 to 2^31 - 1"),
            ({"o_groups": 4}, "6 heads do not divide into num_groups, 4"),
            ({"index_head_dim": 6}, "an indexer of entries has heads of 6, expected at least rotary_dim, 8"),
            ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
             "compressed attention needs rotary positions, and neither longrope nor dynamic scaling"),
            ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
             "partial_rotary_factor is 0.5; only 0.25 is supported"),
            ({"rope_parameters": None, "qk_rope_head_dim": 4}, "qk_rope_head_dim is 4; only 8 is supported"),
            ({"rope_parameters": {"main": {"rope_type": "default", "rope_theta": 1e4}, "compress": {}}},
             "compress: key 'rope_theta' is missing, expected a number"),
        ],
        rope="by label", not_run=("proportional",), refused_scalings=("dynamic", "longrope"), old=as_published,
    ),
}  # fmt: skip
