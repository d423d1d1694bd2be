from support.cards import EXPERTS, YARN, Card, missing

CARDS = {
    "beam": Card(
        EXPERTS | {
            "num_hidden_layers": 4, "head_dim": 16, "num_experts": 8, "n_group": 4, "topk_group": 2,
            "sliding_window": 7, "mlp_layer_types": ["dense", *["sparse"] * 3], "final_logit_softcapping": 3.0,
        },
        shapes={
            "bias, one group, not normalized, no softcap, tied head": {
                "attention_bias": True, "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
                "final_logit_softcapping": None, "tie_word_embeddings": True,
                "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            },
            "all layers rotate, in ways of their own": {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 5e4}, "full_attention": YARN,
                },
            },
            "no layer rotates, three dense layers": {
                "layer_types": ["full_attention"] * 4, "rope_parameters": {"full_attention": None},
                "mlp_layer_types": None,
            },
            "windows everywhere": {"layer_types": ["sliding_attention"] * 4},
        },
        close=[
            ({"rope_parameters": {"sliding_attention": None}},
             "key 'full_attention' is missing, expected a value or null"),
            missing("head_dim"), missing("num_key_value_heads"), missing("n_group"), missing("topk_group"),
            missing("final_logit_softcapping"),
        ],
        rope="by kind",
    ),
}  # fmt: skip
