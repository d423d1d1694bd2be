from support.cards import EXPERTS, YARN, Card, missing

CARDS = {
    "flint": Card(
        EXPERTS | {
            "num_hidden_layers": 5, "head_dim": 32, "num_experts": 6, "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [0], "sliding_window": 7,
        },
        shapes={
            "bias, tied head, not normalized, windows everywhere, yarn": {
                "attention_bias": True, "tie_word_embeddings": True, "norm_topk_prob": False,
                "layer_types": ["sliding_attention"] * 5, "rope_parameters": YARN,
            },
            "no windows, every second layer": {
                "layer_types": ["full_attention"] * 5, "decoder_sparse_step": 2, "mlp_only_layers": [],
            },
            "dense layers by default, two windows": {
                "mlp_only_layers": None,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention", *["full_attention"] * 2],
            },
        },
        close=[
            ({"layer_types": ["full_attention", "chunked_attention"]},
             "layer_types has ['chunked_attention', 'full_attention']; only 'full_attention' and 'sliding_attention' "
             "are supported"),
            missing("head_dim"), missing("sliding_window"), missing("shared_expert_intermediate_size"),
        ],
        ),
}  # fmt: skip
