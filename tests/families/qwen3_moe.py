from support.cards import EXPERTS, YARN, Card, Values, with_old_keys


def with_num_experts(values: Values) -> Values:
    """Gives the number of experts the name that transformers 4 has for it."""
    four = with_old_keys(values)
    return four | {"num_experts": four.pop("num_local_experts")}


CARDS = {
    "qwen3_moe": Card(
        EXPERTS | {"num_experts": 6, "num_experts_per_tok": 2, "head_dim": 32, "norm_topk_prob": True},
        shapes={
            "yarn": {"rope_parameters": YARN | {"rope_theta": 1e5}},
            "window of 7, dense layer": {"use_sliding_window": True, "sliding_window": 7, "mlp_only_layers": [1]},
            "bias, not normalized": {"attention_bias": True, "norm_topk_prob": False},
        },
        old=with_num_experts,
    ),
}  # fmt: skip
