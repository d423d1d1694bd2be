from support.cards import EXPERTS, Card, only

CARDS = {
    "hy_v3": Card(
        EXPERTS | {"head_dim": 32, "num_experts": 8},
        shapes={
            "two shared experts, bias, dense last layer": {
                "num_shared_experts": 2, "attention_bias": True, "mlp_layer_types": [*["sparse"] * 2, "dense"],
            },
        },
        close=[
            only("moe_router_use_sigmoid", False, True), only("moe_router_enable_expert_bias", False, True),
            only("qk_norm", False, True), only("route_norm", False, True), only("mlp_bias", True, False),
            only("expert_hidden_dim", 64, 48),
        ],
        ),
}  # fmt: skip
