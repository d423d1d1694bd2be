from support.cards import EXPERTS, Card, only

CARDS = {
    "lfm2_moe": Card(
        EXPERTS | {
            "num_experts": 6, "num_experts_per_tok": 2, "num_dense_layers": 1, "conv_bias": True,
            "layer_types": ["conv", "full_attention", "conv"],
        },
        shapes={
            "no bias, not normalized, own head": {
                "conv_bias": False, "norm_topk_prob": False, "tie_word_embeddings": False, "use_expert_bias": False,
                "conv_L_cache": 5, "routed_scaling_factor": 2.5,
            },
        },
        close=[
            ({"layer_types": ["conv", "full_attention", "sliding_attention"]},
             "layer_types has ['sliding_attention']; supported: conv, full_attention"),
            only("hidden_act", "gelu", "silu"),
        ],
        rope="none",
    ),
}  # fmt: skip
