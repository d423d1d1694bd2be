from support.cards import Card, missing, only

CARDS = {
    "switch_transformers": Card(
        {
            "d_model": 64, "d_kv": 16, "d_ff": 48, "num_heads": 4, "num_layers": 4, "num_decoder_layers": 3,
            "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 1, "num_experts": 6, "vocab_size": 96,
            "pad_token_id": 0, "decoder_start_token_id": 0, "relative_attention_max_distance": 40,
        },
        shapes={
            "capacity exceeded": {"expert_capacity": 5},
            "own head": {"tie_word_embeddings": False},
            "experts in all layers, fewer buckets, wider heads": {
                "num_sparse_encoder_layers": 4, "num_sparse_decoder_layers": 3, "num_experts": 8,
                "relative_attention_num_buckets": 16, "d_kv": 24,
            },
            "experts in the encoder alone, more buckets": {
                "num_decoder_layers": 1, "num_sparse_decoder_layers": 2, "relative_attention_num_buckets": 48,
            },
        },
        close=[
            ({"dense_act_fn": "gelu"}, "dense_act_fn is 'gelu', supported: relu"),
            only("feed_forward_proj", "gated-gelu", "relu"), only("is_gated_act", True, False),
            only("router_bias", True, False), only("router_dtype", "bfloat16", "float32"),
            only("num_selected_experts", 2, 1), only("is_encoder_decoder", False, True),
            only("is_decoder", True, False), only("encoder_sparse_step", 1, 2),
            missing("decoder_start_token_id", "a whole number"),
            ({
                 "num_sparse_encoder_layers": 5, "encoder_sparse_step": 0, "num_sparse_decoder_layers": 4,
                 "decoder_sparse_step": 0,
             },
             "moe_layers must list decoder layers, at least one, in rising order"),
            ({"relative_attention_num_buckets": 30}, "num_buckets is 30, expected a multiple of 4 up to 65536"),
        ],
        has_encoder=True, small=False,
    ),
}  # fmt: skip
