from support.cards import EXPERTS, YARN, Card, missing, only

CARDS = {
    "exaone_moe": Card(
        EXPERTS | {"head_dim": 32, "num_experts": 8, "sliding_window": 7, "sliding_window_pattern": 2},
        shapes={
            "window everywhere, groups": {"layer_types": ["sliding_attention"] * 3, "n_group": 4, "topk_group": 2},
            "window on one layer, yarn, not normalized": {
                "layer_types": ["full_attention", "sliding_attention", "full_attention"], "norm_topk_prob": False,
                "rope_parameters": YARN,
            },
            "dense last layer": {"mlp_layer_types": [*["sparse"] * 2, "dense"]},
        },
        close=[
            only("scoring_func", "softmax", "sigmoid"), only("topk_method", "greedy", "noaux_tc"),
            only("is_moe_layer", [True] * 3, [False, True, True]), missing("sliding_window"),
            ({"layer_types": None, "sliding_window_pattern": "LLG"},
             "sliding_window_pattern is 'LLG', expected a whole number"),
            ({"layer_types": ["full_attention"] * 3},
             "windowed_layers must list some decoder layers, but not all, in rising order"),
        ],
        ),
}  # fmt: skip
