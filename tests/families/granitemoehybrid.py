from support.cards import SCALES, Card, only

CARDS = {
    "granitemoehybrid": Card(
        SCALES | {
            "num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48,
            "shared_intermediate_size": 40, "tie_word_embeddings": True, "mamba_n_heads": 8, "mamba_n_groups": 2,
            "mamba_d_state": 16, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
        shapes={
            "rotary, one group, biases, own head": {
                "position_embedding_type": "rope", "mamba_n_groups": 1, "mamba_proj_bias": True,
                "mamba_conv_bias": False, "attention_bias": True, "tie_word_embeddings": False, "mamba_d_conv": 3,
            },
        },
        close=[
            only("hidden_act", "gelu", "silu"),
            ({"time_step_limit": [0.001, 0.1]}, "time_step_limit is [0.001, 0.1]; only [0.0, Infinity] is supported"),
            ({"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi', supported: nope, rope"),
            ({"num_local_experts": 0}, "'granitemoehybrid' is a dense model without experts; there is nothing to pack"),
            ({"mamba_d_head": 8}, "8 heads of 8 values are not mamba_expand times hidden_size, 128"),
            ({"mamba_n_groups": 3}, "8 heads cannot share 3 groups"),
            ({"layer_types": None}, "layer_types lists 0 layers, but the model has 3"),
        ],
        rope="none", experts="fused",
    ),
}  # fmt: skip
