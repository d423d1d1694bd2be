from support.cards import EXPERTS, LINEAR, YARN, Card, missing, only

CARDS = {
    "qwen3_next": Card(
        LINEAR | EXPERTS | {
            "num_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 4, "head_dim": 32,
            "shared_expert_intermediate_size": 40,
        },
        shapes={
            "three kinds of layers, yarn": {
                "layer_types": ["linear_attention", *["full_attention"] * 2, "linear_attention"],
                "mlp_only_layers": [1], "rope_parameters": YARN | {"partial_rotary_factor": 0.5},
            },
            "a value a key, longer kernel, bias, not normalized": {
                "linear_num_value_heads": 2, "linear_conv_kernel_dim": 6, "attention_bias": True,
                "norm_topk_prob": False, "tie_word_embeddings": True,
            },
        },
        close=[
            ({"layer_types": ["linear_attention", *["full_attention"] * 2, "odd"]},
             "layer_types has ['odd']; supported: full_attention, linear_attention"),
            missing("head_dim"),
            ({"linear_num_value_heads": 3}, "3 value heads cannot share 2 keys"),
            only("use_sliding_window", True, False),
            ({"layer_types": ["linear_attention"]}, "layer_types lists 1 layers, but the model has 4"),
        ],
        rope="part",
    ),
}  # fmt: skip
