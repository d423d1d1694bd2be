from support.cards import EXPERTS, YARN, Card, Multimodal, Values, missing, only, unknown

CONFIG: Values = EXPERTS | {
    "num_hidden_layers": 5, "num_sliding_attention_heads": 6, "pad_token_id": 1, "head_dim": 32, "n_routed_experts": 8,
    "share_expert_dim": 40, "moe_router_scaling_factor": 3.0, "sliding_window": 7,
    "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
    "mlp_layer_types": ["dense", *["sparse"] * 4], "swiglu_limits": [None, 0, 0.4, 0.3, 0.3],
    "swiglu_limits_shared": [0.5, 0.5, None, 0.3, 0],
    "rope_parameters": {
        "full_attention": {
            "rope_type": "llama3", "rope_theta": 5e4, "partial_rotary_factor": 0.5, "factor": 2.0,
            "low_freq_factor": 1.0, "high_freq_factor": 32.0, "original_max_position_embeddings": 32,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip
CARDS = {
    "step3p5": Card(
        CONFIG,
        shapes={
            "no limits, whole heads by default, three dense layers, bias": {
                "swiglu_limits": None, "swiglu_limits_shared": None, "rope_parameters": None, "mlp_layer_types": None,
                "attention_bias": True, "num_sliding_attention_heads": None,
            },
            "no windows, yarn": {"layer_types": None, "rope_parameters": {"full_attention": YARN}},
        },
        close=[
            only("query_pre_attn_scalar", 64, 32), only("mlp_bias", True, False), only("gating", "per-element", True),
            only("use_bidirectional_attention", True, False), only("use_moe", False, True),
            only("moe_layer_offset", 1, 0), only("moe_every_n_layer", 2, 1), only("norm_expert_weight", False, True),
            only("moe_router_activation", "softmax", "sigmoid"), only("use_moe_router_bias", False, True),
            only("use_head_wise_attn_gate", False, True), only("use_qk_norm", False, True),
            only("att_impl_type", "MFA", "GQA"), only("zero_centered", False, True), only("sink", True, False),
            only("use_rope_layers", [1], []), missing("head_dim"), missing("sliding_window", "a whole number"),
            ({"layer_types": ["full_attention"] * 4}, "layer_types lists 4 layers, but the model has 5"),
            ({"layer_types": [*["full_attention"] * 4, "odd"]},
             "layer_types has ['odd']; supported: full_attention, sliding_attention"),
            ({"mlp_layer_types": [*["sparse"] * 4, "odd"]}, "mlp_layer_types has ['odd']; supported: dense, sparse"),
            ({"mlp_layer_types": None, "moe_layers_enum": "3,x"},
             "moe_layers_enum is '3,x', expected numbers with commas between them"),
            ({"per_layer_config": {"1": {"num_attention_heads": 4}}},
             "per_layer_config must give layers with a window, and no others, 6 heads"),
            ({"swiglu_limits": [7.0]}, "swiglu_limits lists 1 layers, but the model has 5"),
            ({"swiglu_limits": [0, 0, 0, -1, 0]},
             "expert limits are -1.0 and 0.3, expected one at least, between 0 and 1e6"),
            ({"rope_parameters": None, "rope_theta": [1e4, 1e4, 1e4, 2e4, 1e4]},
             "layers of sliding_attention differ in rope_theta or partial_rotary_factors"),
            ({"rope_parameters": None, "rope_scaling": YARN, "yarn_only_types": []},
             "yarn_only_types is []; only ['full_attention'] is supported"),
            ({"attention_other_setting": {"num_attention_groups": 4}},
             "attention_other_setting: num_attention_groups is 4; only 2 is supported"),
        ],
        rope="by kind", not_run=("longrope",), experts="stacked", text_of="step3p7",
    ),
    "step3p7": Card(
        CONFIG | {"model_type": "step3p5", "tie_word_embeddings": False},
        shapes={"tied head": {"tie_word_embeddings": True}},
        close=[unknown("vision_model_type", "clip")],
        around=Multimodal(
            {
                "vision_config": {
                    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56,
                    "patch_size": 14, "mlp_ratio": 1.0, "max_position_embeddings": 16,
                },
            },
            names=("vision_model", "vit_large_projector", "model.vision_model", "model.multi_modal_projector"),
        ),
        rope="by kind", not_run=("longrope",), experts="stacked",
    ),
}  # fmt: skip
