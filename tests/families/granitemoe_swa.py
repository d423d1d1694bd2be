from support.cards import SCALES, YARN, Card, missing

CARDS = {
    "granitemoe_swa": Card(
        SCALES | {
            "num_hidden_layers": 5, "num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 2,
            "intermediate_size": 48, "shared_intermediate_size": 40, "sliding_window": 7,
            "layer_rope_theta": [1e4, 0, 5e5, 5e5, 1e4], "tie_word_embeddings": True,
        },
        shapes={
            "one base, yarn, heads of 32": {"layer_rope_theta": None, "head_dim": 32, "rope_parameters": YARN},
            "yarn with bases, window on one layer, bias, own head": {
                "layer_rope_theta": [1e4, 1e4, 0, 2e5, 1e4], "rope_parameters": YARN,
                "layer_types": [*["full_attention"] * 3, "sliding_attention", "full_attention"],
                "attention_bias": True, "tie_word_embeddings": False,
            },
            "no positions, no shared expert, no windows": {
                "layer_rope_theta": [0] * 5, "shared_intermediate_size": 0, "layer_types": ["full_attention"] * 5,
            },
        },
        close=[
            ({"layer_rope_theta": [1e4, 0.0]}, "layer_rope_theta lists 2 layers, but the model has 5"),
            ({"layer_rope_theta": [1e4, -1.0, 0.0, 0.0, 0.0]}, "rope theta is -1.0, expected between 1 and 1e12"),
            missing("sliding_window", "a whole number"),
        ],
        experts="fused",
    ),
}  # fmt: skip
