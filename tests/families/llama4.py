from support.cards import SMALL_VISION, Card, Close, Multimodal, Values, missing, only

CONFIG: Values = {
    "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 6, "intermediate_size": 48,
    "intermediate_size_mlp": 80, "interleave_moe_layer_step": 2, "num_hidden_layers": 4, "no_rope_layer_interval": 3,
    "attention_chunk_size": 7, "floor_scale": 9, "attn_scale": 0.4,
}  # fmt: skip
CLOSE: list[Close] = [
    only("num_experts_per_tok", 2, 1), only("for_llm_compressor", True, False), missing("attention_chunk_size"),
    missing("head_dim"),
    ({"layer_types": ["sliding_attention"] * 4},
     "layer_types has ['sliding_attention']; only 'full_attention' and 'chunked_attention' are supported"),
    ({"no_rope_layers": [0] * 4}, "rotated_layers must list some decoder layers, but not all, in rising order"),
]  # fmt: skip
CARDS = {
    "llama4": Card(
        CONFIG | {"model_type": "llama4_text"},
        close=CLOSE,
        around=Multimodal(
            {
                "vision_config": SMALL_VISION | {
                    "intermediate_size": 64, "image_size": 28, "patch_size": 14, "vision_output_dim": 16,
                    "projector_input_dim": 16, "projector_output_dim": 16,
                },
            },
            names=("vision_model", "multi_modal_projector"),
        ),
        experts="fused",
    ),
    "llama4_text": Card(
        CONFIG,
        shapes={
            "llama3's positions, experts everywhere": {
                "interleave_moe_layer_step": 1,
                "rope_parameters": {
                    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
                },
            },
            "bias, no norms, no temperature, tied head": {
                "attention_bias": True, "use_qk_norm": False, "attn_temperature_tuning": False,
                "tie_word_embeddings": True,
            },
            "all layers rotate, in chunks": {"no_rope_layers": [1] * 4, "moe_layers": [0, 3, 9]},
            "layers by name": {
                "no_rope_layers": [1, 0, 0, 1],
                "layer_types": ["full_attention", "chunked_attention", "full_attention", "chunked_attention"],
            },
        },
        close=CLOSE,
        experts="fused",
    ),
}  # fmt: skip
