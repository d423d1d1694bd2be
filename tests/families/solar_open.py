from support.cards import EXPERTS, YARN, Card, missing, only

CARDS = {
    "solar_open": Card(
        EXPERTS | {"head_dim": 32, "n_routed_experts": 8},
        shapes={"groups, bias, yarn": {"n_group": 4, "topk_group": 2, "attention_bias": True, "rope_parameters": YARN}},
        close=[only("first_k_dense_replace", 1, 0), only("use_qk_norm", True, False), missing("head_dim")],
        ),
}  # fmt: skip
