from support.cards import EXPERTS, YARN, Card, missing, only

CARDS = {
    "kolibri1": Card(
        EXPERTS | {
            "head_dim": 16, "num_experts": 6, "num_hidden_layers": 5, "shared_expert_intermediate_size": 24,
            "sliding_window": 7,
        },
        shapes={
            "two layers without a window, yarn": {
                "rope_parameters": YARN,
                "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
            },
            "windows everywhere, normalized": {"layer_types": ["sliding_attention"] * 5, "norm_topk_prob": True},
            "no layer rotates": {"layer_types": ["full_attention"] * 5},
            "tied head": {"tie_word_embeddings": True},
        },
        close=[
            only("attention_bias", True, False), only("use_sliding_window", False, True),
            ({"sliding_window": 0}, "sliding_window is 0, expected 1 to 2^31 - 1"),
            missing("head_dim"), missing("num_key_value_heads"), missing("sliding_window", "a whole number"),
        ],
        ),
}  # fmt: skip
