from support.cards import SMALL_VISION, YARN, Card, Multimodal, only

CARDS = {
    "aria": Card(
        {"num_key_value_heads": 2, "intermediate_size": 48, "moe_num_experts": 6, "moe_topk": 3},
        shapes={
            "bias, tied head, three shared experts, yarn": {
                "attention_bias": True, "tie_word_embeddings": True, "moe_num_shared_experts": 3, "head_dim": 32,
                "rope_parameters": YARN,
            },
        },
        close=[only("mlp_bias", True, False), only("num_experts_per_tok", 2, 3)],
        around=Multimodal({"vision_config": SMALL_VISION | {"image_size": 28, "patch_size": 14}}),
        experts="fused",
    ),
}  # fmt: skip
