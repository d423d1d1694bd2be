from support.cards import EXPERTS, YARN, Card, Multimodal, only

CARDS = {
    "qwen3_omni_moe": Card(
        EXPERTS | {
            "head_dim": 32, "num_experts": 6, "num_experts_per_tok": 2, "mlp_only_layers": [1],
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e5, "mrope_section": [6, 5, 5], "mrope_interleaved": True,
                "interleaved": True,
            },
        },
        shapes={
            "bias, tied head, not normalized": {
                "attention_bias": True, "tie_word_embeddings": True, "norm_topk_prob": False,
            },
            "every second layer, yarn": {"decoder_sparse_step": 2, "mlp_only_layers": [], "rope_parameters": YARN},
        },
        close=[
            only("sliding_window", 7, None), only("use_sliding_window", True, False), only("use_qk_norm", False, True),
            only("shared_expert_intermediate_size", 8, 0),
        ],
        around=Multimodal(
            {"enable_audio_output": False}, text_keys=("thinker_config", "text_config"),
            around={
                "vision_config": {
                    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64,
                    "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "image_size": 64,
                },
                "audio_config": {
                    "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16,
                    "output_dim": 64, "num_mel_bins": 16, "downsample_hidden_size": 8,
                },
            },
            names=("thinker.model.visual", "thinker.model.audio_tower", "talker", "code2wav"),
        ),
    ),
}  # fmt: skip
