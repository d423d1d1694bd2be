from support.cards import SCALES, YARN, Card, Values, unknown

CONFIG: Values = SCALES | {
    "num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48,
}  # fmt: skip
CARDS = {
    "granitemoe": Card(
        CONFIG | {"tie_word_embeddings": True},
        shapes={
            "yarn": {"rope_parameters": YARN | {"rope_theta": 1e5}},
            "own head, bias": {"tie_word_embeddings": False, "attention_bias": True},
        },
        close=[unknown("shared_intermediate_size", 64)],
        experts="fused",
    ),
    "granitemoeshared": Card(
        CONFIG | {"shared_intermediate_size": 40},
        shapes={"no shared expert, bias": {"shared_intermediate_size": 0, "attention_bias": True}},
        close=[({"shared_intermediate_size": -1}, "shared_intermediate_size is -1, expected 0 to 2^31 - 1")],
        experts="fused",
    ),
}  # fmt: skip
