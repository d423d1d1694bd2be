from support.cards import ALL_SCALINGS, Card, Close, Multimodal, Values, missing, only


def flat(values: Values) -> Values:
    """The config as Baidu publishes it: one object, and pairs for text and for images."""
    text = values["text_config"]
    num_layers, kinds, rope = text["num_hidden_layers"], text["mlp_layer_types"], text["rope_parameters"]
    kept = {key: value for key, value in text.items() if key not in ("mlp_layer_types", "rope_parameters")}
    return kept | {
        "moe_num_experts": [text["moe_num_experts"]] * 2,
        "moe_layer_start_index": [kinds.index("sparse")] * 2,
        "moe_layer_end_index": [num_layers + 1, num_layers],
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "default", "mrope_section": rope["mrope_section"]},
        "rope_3d": True,
        "tie_word_embeddings": values["tie_word_embeddings"],
        "vision_config": values["vision_config"],
    }


def not_flat(values: Values) -> Values:
    """The values of transformers' config, from those of the published one."""
    first = values["moe_layer_start_index"][0]
    text = values | {
        "moe_num_experts": values["moe_num_experts"][0],
        "mlp_layer_types": ["dense"] * first + ["sparse"] * (values["num_hidden_layers"] - first),
        "rope_parameters": values["rope_scaling"] | {"rope_type": "default", "rope_theta": values["rope_theta"]},
    }
    vision = text.pop("vision_config")
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": values["tie_word_embeddings"]}


CONFIG: Values = {
    "num_key_value_heads": 2, "moe_intermediate_size": [48, 32], "intermediate_size": 80, "moe_num_experts": 8,
    "moe_k": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]},
    "tie_word_embeddings": False,
}  # fmt: skip
CLOSE: list[Close] = [
    only("use_bias", True, False), only("moe_gate", "top2", "topk"), only("moe_norm_min", 0.1, 1e-12),
    ({"moe_intermediate_size": [48]}, "moe_intermediate_size is [48], expected two whole numbers above 0"),
]  # fmt: skip
CARDS = {
    "ernie4_5_vl_moe": Card(
        CONFIG,
        shapes={
            "tied head, no shared expert": {"tie_word_embeddings": True, "moe_num_shared_experts": 0},
            "two dense layers": {"mlp_layer_types": [*["dense"] * 2, "sparse"]},
            "dense last layer": {"mlp_layer_types": [*["sparse"] * 2, "dense"]},
        },
        close=[
            *CLOSE,
            ({"mlp_layer_types": ["dense", "odd", "sparse"]},
             "mlp_layer_types has ['dense', 'odd', 'sparse']; only 'dense' and 'sparse' are supported"),
        ],
        around=Multimodal(
            {"vision_config": {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 16}},
            names=("model.vision_tower", "model.resampler_model"),
        ),
        scalings=(), not_run=ALL_SCALINGS,
    ),
    "ernie4_5_moe_vl": Card(
        CONFIG,
        shapes={
            "tied head, no shared expert": {"tie_word_embeddings": True, "moe_num_shared_experts": 0},
            "two dense layers": {"mlp_layer_types": [*["dense"] * 2, "sparse"]},
        },
        close=[
            *CLOSE, only("rope_3d", False, True), only("use_rmsnorm", False, True), only("moe_layer_interval", 2, 1),
            ({"moe_layer_start_index": [1, 2]},
             "moe_layer_start_index and moe_layer_end_index give text and images experts in different layers, or "
             "leave out the last layer; that is not supported"),
            ({"moe_layer_end_index": [4, 1]},
             "moe_layer_start_index and moe_layer_end_index give text and images experts in different layers, or "
             "leave out the last layer; that is not supported"),
            missing("moe_k"), missing("moe_num_shared_experts"), missing("rms_norm_eps"), missing("rope_theta"),
            missing("tie_word_embeddings"),
        ],
        around=Multimodal(
            {"vision_config": {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 16}},
            names=("model.vision_tower", "model.resampler_model"),
        ),
        built_as="ernie4_5_vl_moe", written=flat, read=not_flat,
    ),
}  # fmt: skip
