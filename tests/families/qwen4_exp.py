from support.cards import LINEAR, QWEN_VISION, Card, Multimodal, Values, only

CONFIG: Values = LINEAR | {
    "num_hidden_layers": 5, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40, "hc_count": 3, "hc_lowrank": 20,
    "ple_layer_ids": [2, 3], "ple_embed_dim": 64, "ngram_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 4, "indexer_n_heads": 12, "indexer_kv_heads": 1,
    "indexer_head_dim": 16, "indexer_budget": 48, "indexer_compress_ratio": 4, "eos_token_id": 3,
    "output_gate_type": "sigmoid",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}  # fmt: skip
CARDS = {
    "qwen4_exp": Card(
        CONFIG | {"model_type": "qwen4_exp_text"},
        around=Multimodal({"vision_config": QWEN_VISION}),
        rope="part", not_run=("proportional",), refused_scalings=("dynamic", "longrope"),
    ),
    "qwen4_exp_text": Card(
        CONFIG,
        shapes={
            "no n-grams, silu, not normalized": {
                "ple_layer_ids": None, "output_gate_type": None, "norm_topk_prob": False,
            },
            "two streams, n-grams of two": {
                "hc_count": 2, "ngram_size": 2, "ple_layer_ids": [1], "ple_conv_kernel_size": 2,
            },
        },
        close=[
            only("attn_output_gate", False, True), only("indexer_kv_heads", 2, 1),
            ({"output_gate_type": "tanh"}, "output_gate_type is 'tanh', supported: silu, sigmoid"),
            ({"indexer_budget": 50}, "indexer_budget is 50, expected a multiple of indexer_compress_ratio, 4"),
            ({"ple_layer_ids": [0]}, "ple_layer_ids has layer 0, expected layers counted from 1"),
        ],
        rope="part", not_run=("proportional",), refused_scalings=("dynamic", "longrope"),
    ),
}  # fmt: skip
