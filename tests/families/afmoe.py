from support.cards import EXPERTS, Card, only

CARDS = {
    "afmoe": Card(
        EXPERTS | {
            "head_dim": 16, "num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 2, "num_shared_experts": 2,
            "route_scale": 1.7, "sliding_window": 7, "mup_enabled": True, "global_attn_every_n_layers": 2,
        },
        shapes={
            "window everywhere, bias": {"layer_types": ["sliding_attention"] * 3, "attention_bias": True},
            "no window, plain embedding": {"layer_types": ["full_attention"] * 3, "mup_enabled": False},
        },
        close=[
            only("score_func", "softmax", "sigmoid"), only("route_norm", False, True), only("n_group", 2, 1),
            only("topk_group", 2, 1), only("num_expert_groups", 2, 1), only("num_limited_groups", 2, 1),
        ],
        ),
}  # fmt: skip
