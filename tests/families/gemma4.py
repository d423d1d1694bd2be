from support.cards import SMALL_VISION, Card, Multimodal, Values, only

CONFIG: Values = {
    "num_key_value_heads": 2, "num_global_key_value_heads": 1, "head_dim": 16, "global_head_dim": 32,
    "intermediate_size": 80, "moe_intermediate_size": 48, "num_experts": 6, "top_k_experts": 2,
    "enable_moe_block": True, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", *["full_attention"] * 2], "sliding_window": 7, "final_logit_softcapping": 3.0,
    "pad_token_id": 0,
}  # fmt: skip
CARDS = {
    "gemma4": Card(
        CONFIG | {"model_type": "gemma4_text"},
        around=Multimodal(
            {
                "vision_config": SMALL_VISION | {
                    "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8, "position_embedding_size": 16,
                },
                "audio_config": None,
            },
            names=("model.vision_tower", "model.embed_vision"),
        ),
        rope="by kind", not_run=("longrope",), experts="fused",
    ),
    "gemma4_text": Card(
        CONFIG,
        shapes={
            "values of their own, no cap": {"attention_k_eq_v": False, "final_logit_softcapping": None},
            "bias, window in no layer, rotated as a whole": {
                "attention_bias": True, "layer_types": ["full_attention"] * 3,
                "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
            },
        },
        close=[
            ({"enable_moe_block": False}, "'gemma4_text' is a dense model without experts; there is nothing to pack"),
            only("hidden_activation", "silu", "gelu_pytorch_tanh"), only("hidden_size_per_layer_input", 8, 0),
            only("num_kv_shared_layers", 1, 0), only("use_bidirectional_attention", "all", "vision"),
            ({
                 "rope_parameters": {
                     "full_attention": {"rope_type": "default", "partial_rotary_factor": 0.25, "rope_theta": 1e4},
                     "sliding_attention": {"rope_type": "default", "partial_rotary_factor": 0.25, "rope_theta": 1e4},
                 },
             },
             "partial_rotary_factor needs rope_type 'proportional'"),
        ],
        rope="by kind", not_run=("longrope",), experts="fused",
    ),
}  # fmt: skip
