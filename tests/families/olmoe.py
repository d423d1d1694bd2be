from support.cards import YARN, Card

CARDS = {
    "olmoe": Card(
        {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48},
        shapes={
            "yarn": {"rope_parameters": YARN | {"rope_theta": 1e5}},
            "shared keys, bias, normalized": {"num_key_value_heads": 2, "attention_bias": True, "norm_topk_prob": True},
        },
        close=[({"clip_qkv": 0.0}, "attention clip is 0.0, expected between 0 and 1e6")],
        ),
}  # fmt: skip
