from support.cards import EXPERTS, YARN, Card, missing, only

CARDS = {
    "laguna": Card(
        EXPERTS | {
            "num_hidden_layers": 4, "head_dim": 32, "num_experts": 8, "shared_expert_intermediate_size": 40,
            "moe_routed_scaling_factor": 2.5, "sliding_window": 7,
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
            "num_attention_heads_per_layer": [4, 6, 6, 6],
            "rope_parameters": {
                "full_attention": YARN | {"attention_factor": 1.3, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            },
        },
        shapes={
            "a gate a value, own positions by default, bias, tied head": {
                "gating": "per-element", "rope_parameters": None, "attention_bias": True, "tie_word_embeddings": True,
                "num_attention_heads_per_layer": [2, 4, 2, 6],
            },
            "keys of the published config, dense last layer": {
                "gating": "per-head", "mlp_layer_types": [*["sparse"] * 3, "dense"], "mlp_only_layers": [3],
                "decoder_sparse_step": 1, "norm_topk_prob": True, "moe_router_logit_softcapping": 0.0,
            },
            "layers alike": {"num_attention_heads_per_layer": None, "layer_types": None, "mlp_layer_types": None},
        },
        close=[
            only("mlp_only_layers", [0, 1], [0]), only("decoder_sparse_step", 2, 1),
            only("norm_topk_prob", False, True), only("qkv_bias", True, False),
            only("moe_router_score_func", "softmax", "sigmoid"), only("moe_apply_router_weight_on_input", True, False),
            only("moe_router_logit_softcapping", 30.0, 0.0),
            ({"gating": False}, "gating is False; supported: True, 'per-head', 'per-element'"),
            ({"gating": "none"}, "gating is 'none', expected true or false"),
            ({"num_attention_heads_per_layer": [4, 4]},
             "num_attention_heads_per_layer lists 2 layers, but the model has 4"),
            ({"num_attention_heads_per_layer": [4, 6, 6, 5]}, "5 heads cannot share 2 keys and values"),
            missing("sliding_window", "a whole number"), missing("head_dim"),
        ],
        rope="by kind",
    ),
}  # fmt: skip
