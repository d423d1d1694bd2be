from support.cards import EXPERTS, YARN, Card, only

CARDS = {
    "qwen2_moe": Card(
        EXPERTS | {"num_experts": 6, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 40},
        shapes={
            "yarn": {"rope_parameters": YARN | {"rope_theta": 1e5}},
            "every second layer": {"decoder_sparse_step": 2},
            "dense-only layers": {"mlp_only_layers": [0, 2]},
            "no bias, normalized": {"qkv_bias": False, "norm_topk_prob": True},
        },
        close=[
            only("use_sliding_window", True, False),
            ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
             "layer_types has ['full_attention', 'sliding_attention']; only 'full_attention' is supported"),
            ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0, expected 1 to 2^31 - 1"),
        ],
        ),
}  # fmt: skip
