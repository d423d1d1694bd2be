from support.cards import LATENT, MSCALES, SMALL_VISION, YARN, Card, Close, Multimodal, Values, only

CONFIG: Values = LATENT | {
    "moe_intermediate_size": 48, "intermediate_size": 80, "num_experts_per_tok": 3, "n_routed_experts": 8,
    "rope_parameters": YARN | MSCALES | {
        "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3, "partial_rotary_factor": 1 / 3,
    },
}  # fmt: skip
CLOSE: list[Close] = [
    only("n_group", 2, 1), only("mlp_bias", True, False), only("attention_bias", True, False),
    only("sliding_window", 7, None), only("head_dim", 8, 24),
    ({"rope_parameters": YARN | {"partial_rotary_factor": 1 / 3}},
     "key 'llama_4_scaling_beta' is missing, expected a number"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1 / 3}},
     "rope_type must be yarn, longrope or llama3"),
]  # fmt: skip
CARDS = {
    "mistral3": Card(
        CONFIG | {"model_type": "mistral4", "tie_word_embeddings": False},
        shapes={"tied head": {"tie_word_embeddings": True}},
        close=CLOSE,
        around=Multimodal(
            {
                "vision_config": SMALL_VISION | {
                    "model_type": "pixtral", "head_dim": 8, "image_size": 28, "patch_size": 14,
                },
            },
        ),
        rope="part", not_run=("linear", "dynamic", "proportional"), experts="fused",
    ),
    "mistral4": Card(
        CONFIG,
        shapes={
            "dense layer, no query latent, scaled": {
                "first_k_dense_replace": 1, "q_lora_rank": None, "routed_scaling_factor": 2.5,
            },
            "rotated in halves, not normalized": {"rope_interleave": False, "norm_topk_prob": False},
        },
        close=CLOSE,
        rope="part", not_run=("linear", "dynamic", "proportional"), experts="fused", is_part=True,
    ),
}  # fmt: skip
