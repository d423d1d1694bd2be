from support.cards import Card, only

CARDS = {
    "jamba": Card(
        {
            "num_hidden_layers": 4, "num_key_value_heads": 2, "num_experts": 6, "intermediate_size": 48,
            "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
            "mamba_d_state": 8, "mamba_dt_rank": 6, "mamba_proj_bias": True,
        },
        shapes={
            "no bias, three Mamba layers of four, experts in front, tied head": {
                "mamba_proj_bias": False, "mamba_conv_bias": False, "attn_layer_period": 4, "attn_layer_offset": 2,
                "expert_layer_offset": 0, "mamba_dt_rank": "auto", "mamba_d_conv": 3, "tie_word_embeddings": True,
            },
        },
        close=[
            only("hidden_act", "gelu", "silu"),
            ({"attn_layer_offset": 2}, "attn_layer_offset is 2, expected less than the period, 2"),
            only("sliding_window", 64, None),
            ({"num_experts": 1}, "'jamba' is a dense model without experts; there is nothing to pack"),
        ],
        rope="none",
    ),
}  # fmt: skip
