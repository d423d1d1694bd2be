from support.cards import EXPERTS, Card, Multimodal, missing, only

CARDS = {
    "glm4v_moe": Card(
        EXPERTS | {
            "head_dim": 32, "n_routed_experts": 8, "routed_scaling_factor": 2.5,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2],
            },
        },
        shapes={"no bias, tied head": {"attention_bias": False, "tie_word_embeddings": True}},
        close=[
            only("use_qk_norm", True, False), missing("attention_bias"),
            ({"n_group": 3, "topk_group": 1},
             "n_group is 3 and topk_group is 1; 8 experts must divide into n_group groups, and topk_group must not "
             "exceed n_group"),
        ],
        around=Multimodal(
            {
                "vision_config": {
                    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64,
                    "image_size": 28,
                },
            },
        ),
        rope="part", not_run=("proportional",),
    ),
}  # fmt: skip
