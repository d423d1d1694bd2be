from support.cards import EXPERTS, SMALL_VISION, Card, Close, Multimodal, Values, only

CONFIG: Values = EXPERTS | {
    "head_dim": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_shared_expert_intermediate_size": 40,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "use_bias": True,
    "routed_scaling_factor": 2.5,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
}  # fmt: skip
CLOSE: list[Close] = [
    only("mlp_hidden_act", "silu", "relu2"), only("tie_word_embeddings", True, False),
]  # fmt: skip
AROUND = Multimodal(
    {
        "vision_config": SMALL_VISION | {
            "patch_size": 4, "image_size": 16, "max_img_size": 32, "video_temporal_patch_size": 2,
        },
        "vision_hidden_size": 16, "projector_hidden_size": 16,
    },
    names=("vision_model", "multi_modal_projector"),
)  # fmt: skip
CARDS = {
    "nemotron_h": Card(
        CONFIG,
        shapes={
            "attention first, two mixers in turn, no bias, groups": {
                "layers_block_type": [
                    "full_attention", "linear_attention", "moe", "linear_attention", "full_attention",
                ],
                "use_bias": False, "use_conv_bias": False, "n_groups": 4, "n_routed_experts": 8, "n_group": 4,
                "topk_group": 2, "norm_topk_prob": False, "time_step_min": 0.5,
            },
        },
        close=[
            *CLOSE, only("moe_latent_size", 32, None), only("n_shared_experts", 2, 1),
            only("mamba_hidden_act", "gelu", "silu"), only("num_hidden_layers", 5, 6),
            ({"layers_block_type": None, "hybrid_override_pattern": "MEX"}, "layers are ['X']; supported: *, -, E, M"),
        ],
        rope="none",
    ),
    "nemotron_h_omni": Card(CONFIG, close=CLOSE, around=AROUND, rope="none"),
    "NemotronH_Nano_Omni_Reasoning_V3": Card(
        CONFIG, close=CLOSE, around=AROUND, rope="none", built_as="nemotron_h_omni",
    ),
}  # fmt: skip
