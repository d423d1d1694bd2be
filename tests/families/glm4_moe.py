from support.cards import EXPERTS, YARN, Card

CARDS = {
    "glm4_moe": Card(
        EXPERTS | {
            "head_dim": 32, "n_routed_experts": 8, "first_k_dense_replace": 1, "attention_bias": True,
            "use_qk_norm": True, "routed_scaling_factor": 2.5,
        },
        shapes={
            "yarn": {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}},
            "no norms, no bias, not normalized": {
                "use_qk_norm": False, "attention_bias": False, "norm_topk_prob": False, "n_shared_experts": 2,
            },
            "groups, a quarter rotated": {
                "n_group": 4, "topk_group": 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
            },
        },
        close=[
            ({"n_group": 3, "topk_group": 1},
             "n_group is 3 and topk_group is 1; 8 experts must divide into n_group groups, and topk_group must not "
             "exceed n_group"),
        ],
        rope="part",
    ),
}  # fmt: skip
