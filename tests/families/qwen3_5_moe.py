from support.cards import LINEAR, QWEN_VISION, Card, Multimodal, Values, missing, only

CONFIG: Values = LINEAR | {
    "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40,
}  # fmt: skip
CARDS = {
    "qwen3_5_moe": Card(
        CONFIG,
        around=Multimodal({"vision_config": QWEN_VISION}),
        rope="part",
    ),
    "qwen3_5_moe_text": Card(
        CONFIG,
        shapes={
            "sections of positions, tied head": {
                "rope_parameters": {
                    "rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5,
                    "mrope_section": [4, 2, 2],
                },
                "tie_word_embeddings": True, "attention_bias": True,
            },
        },
        close=[
            ({"layer_types": ["linear_attention", *["full_attention"] * 2, "odd"]},
             "layer_types has ['odd']; supported: full_attention, linear_attention"),
            missing("head_dim"),
            ({"linear_num_value_heads": 3}, "3 value heads cannot share 2 keys"),
            only("attn_output_gate", False, True), only("mamba_ssm_dtype", "bfloat16", "float32"),
        ],
        rope="part",
    ),
}  # fmt: skip
