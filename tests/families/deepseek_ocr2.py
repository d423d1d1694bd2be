from support.cards import EXPERTS, SMALL_VISION, YARN, Card, Multimodal, missing, only

CARDS = {
    "deepseek_ocr2": Card(
        EXPERTS | {"n_routed_experts": 8, "mlp_layer_types": ["dense", *["sparse"] * 2]},
        shapes={
            "groups, scaled, bias, tied head, yarn": {
                "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
                "n_shared_experts": 1, "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": YARN,
            },
        },
        close=[
            only("mlp_bias", True, False), only("head_dim", 32, 16),
            ({"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc', supported: greedy, group_limited_greedy"),
            missing("mlp_layer_types"),
        ],
        around=Multimodal(
            {
                "vision_config": {
                    "sam_config": {
                        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64,
                        "mlp_dim": 16, "output_channels": 8, "global_attn_indexes": [0],
                        "downsample_channels": [8, 16],
                    },
                    "encoder_config": SMALL_VISION | {"num_key_value_heads": 2},
                },
            },
            names=("model.vision_tower", "model.multi_modal_projector", "model.view_separator"),
        ),
    ),
}  # fmt: skip
