from support.cards import SMALL_VISION, YARN, Card, Multimodal, Values, missing, only

CONFIG: Values = {
    "num_hidden_layers": 5, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48,
    "prefix_dense_intermediate_size": 80, "num_experts": 6, "num_experts_per_tok": 3, "num_shared_experts": 2,
    "mlp_layer_types": ["dense", *["sparse"] * 4], "sliding_window": 7,
}  # fmt: skip
CARDS = {
    "cohere2_moe": Card(
        CONFIG | {"logit_scale": 0.25},
        shapes={
            "rms norms, sigmoids, shared experts added, bias, yarn": {
                "rms_norm_eps": 1e-6, "expert_selection_fn": "sigmoid", "shared_expert_combination_strategy": "sum",
                "attention_bias": True, "rope_parameters": YARN,
            },
            "sigmoids as they are, no shared expert, own head": {
                "expert_selection_fn": "sigmoid", "norm_topk_prob": False, "num_shared_experts": 0,
                "tie_word_embeddings": False,
            },
            "layers by steps, a dense layer that does not rotate": {
                "first_k_dense_replace": 2, "mlp_layer_types": None, "layer_types": None,
                "prefix_dense_sliding_window_pattern": 2, "sliding_window_pattern": 2,
                "prefix_dense_intermediate_size": None,
            },
            "layers by steps, dense layers without a window rotate": {
                "first_k_dense_replace": 2, "mlp_layer_types": None, "layer_types": None, "sliding_window_pattern": 3,
            },
            "windows everywhere": {"layer_types": ["sliding_attention"] * 5},
            "no layer rotates": {"mlp_layer_types": ["sparse"] * 5, "layer_types": ["full_attention"] * 5},
        },
        close=[
            only("use_parallel_block", False, True), only("use_gated_activation", False, True),
            only("use_qk_norm", True, False), only("rotary_pct", 0.5, 1.0),
            only("position_embedding_type", "rope_neox", "rope_gptj"),
            ({"expert_selection_fn": "relu"}, "expert_selection_fn is 'relu', supported: softmax, sigmoid"),
            ({"shared_expert_combination_strategy": "concat"},
             "shared_expert_combination_strategy is 'concat', supported: average, sum"),
            ({"logit_scale": 0.0}, "logit_scale is 0.0, expected between 1e-6 and 1e6"),
            missing("sliding_window", "a whole number"), missing("head_dim"), missing("logit_scale"),
        ],
        ),
    "cohere2_vision": Card(
        CONFIG | {"model_type": "cohere2_moe", "logit_scale": 1.0},
        shapes={"own head": {"tie_word_embeddings": False}},
        close=[only("logit_scale", 0.25, 1.0)],
        around=Multimodal(
            {
                "vision_config": SMALL_VISION | {
                    "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14,
                },
                "alignment_intermediate_size": 32,
            },
        ),
    ),
}  # fmt: skip
