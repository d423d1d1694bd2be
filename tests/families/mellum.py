from support.cards import EXPERTS, YARN, Card, missing, only

CARDS = {
    "mellum": Card(
        EXPERTS | {
            "num_hidden_layers": 4, "head_dim": 32, "num_experts": 8, "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2],
            "mlp_layer_types": ["dense", *["sparse"] * 3],
            "rope_parameters": {
                "full_attention": YARN | {"attention_factor": 1.3},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
        shapes={
            "own positions by default, most layers without a window, bias, tied head": {
                "rope_parameters": None,
                "layer_types": [*["full_attention"] * 2, "sliding_attention", "full_attention"],
                "attention_bias": True, "tie_word_embeddings": True, "norm_topk_prob": False,
            },
            "one kind of positions": {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 2e4},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
                },
                "mlp_layer_types": None,
            },
            "no windows": {"layer_types": None, "sliding_window": None},
        },
        close=[
            ({
                 "rope_parameters": {
                     "full_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
                     "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
                 },
             },
             "partial_rotary_factor is 0.5; only 1.0 is supported"),
            only("use_sliding_window", False, True), missing("sliding_window", "a whole number"), missing("head_dim"),
        ],
        rope="by kind",
    ),
}  # fmt: skip
