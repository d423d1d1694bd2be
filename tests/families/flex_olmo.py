from support.cards import Card

CARDS = {
    "flex_olmo": Card(
        {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48, "num_key_value_heads": 2},
        shapes={
            "own keys, bias, normalized": {"num_key_value_heads": 4, "attention_bias": True, "norm_topk_prob": True},
        },
        ),
}  # fmt: skip
