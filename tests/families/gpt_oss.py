from support.cards import YARN, Card, missing, only

CARDS = {
    "gpt_oss": Card(
        {
            "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 2,
            "intermediate_size": 48, "sliding_window": 7,
            "rope_parameters": YARN | {"rope_theta": 1.5e5, "truncate": False},
        },
        shapes={
            "window on two of three": {"layer_types": ["full_attention", *["sliding_attention"] * 2]},
            "window everywhere, three chosen": {"layer_types": ["sliding_attention"] * 3, "num_experts_per_tok": 3},
            "no window, tied head": {"layer_types": ["full_attention"] * 3, "tie_word_embeddings": True},
            "no bias in attention, heads of 16": {"attention_bias": False, "head_dim": 16},
            "plain positions": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        },
        close=[
            only("swiglu_limit", 10.0, 7.0), only("swiglu_alpha", 1.0, 1.702), only("experts_per_token", 4, 2),
            only("initial_context_length", 4096, 32), missing("head_dim"), missing("sliding_window"),
            ({"layer_types": ["full_attention"]}, "layer_types lists 1 layers, but the model has 3"),
            ({"layer_types": ["full_attention", "odd_attention", "full_attention"]},
             "layer_types has ['full_attention', 'odd_attention']; only 'full_attention' and 'sliding_attention' are "
             "supported"),
            ({"rope_parameters": None}, "rope_parameters and rope_scaling are missing, expected one of them"),
        ],
        experts="fused",
    ),
}  # fmt: skip
