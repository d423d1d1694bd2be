from support.cards import EXPERTS, QWEN_VISION, Card, Multimodal, only

from families.qwen3_moe import with_num_experts

CARDS = {
    "qwen3_vl_moe": Card(
        EXPERTS | {
            "head_dim": 32, "num_experts": 6, "num_experts_per_tok": 2, "mlp_only_layers": [1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [6, 5, 5]},
        },
        shapes={
            "bias, tied head": {"attention_bias": True, "tie_word_embeddings": True},
            "every second layer": {"decoder_sparse_step": 2, "mlp_only_layers": []},
        },
        close=[
            only("norm_topk_prob", False, True), only("use_sliding_window", True, False),
            only("sliding_window", 7, None),
        ],
        around=Multimodal({"vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0]}}),
        experts="fused", old=with_num_experts,
    ),
}  # fmt: skip
