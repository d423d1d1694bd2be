"""Qwen3-VL-30B-A3B, 235B-A22B (text): as `qwen3_moe`; experts fused and transposed in the source.

A position has three numbers, which differ only in images and videos: a text is rotated as in Qwen3-MoE.
Source: transformers, models/qwen3_vl_moe; 2511.21631.
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary
from moe_pack.formats.families.multimodal import within
from moe_pack.formats.families.qwen3_moe import QWEN3_MOE


def _read_config(config: family.Config) -> formats.ModelSpec:
    # Neither is read by the class: all layers see everything, and weights are normalized.
    config.only(sliding_window=None, use_sliding_window=False, norm_topk_prob=True)
    config.ignore("max_window_layers")
    attention = readers.read_grouped_query(config, bias=readers.attention_bias(config), qk_norm="head")
    experts = config.whole(config.either("num_experts", "num_local_experts"))
    return readers.read_decoder(
        config,
        attention,
        rotary.read_rope(config, attention.head_dim, default_theta=5e5, ignored=rotary.MROPE_KEYS),
        formats.RouterSpec("softmax_topk", experts, config.whole("num_experts_per_tok"), normalize=True),
        config.whole("moe_intermediate_size"),
        moe_layers=readers.layers_by_step(config),
    )


_TEXT = replace(
    QWEN3_MOE,
    model_type="qwen3_vl_moe_text",
    read_config=_read_config,
    # Published checkpoints fuse and transpose; what save_pretrained(..., save_original_format=False) writes does not.
    expert_names=(replace(family.FUSED_EXPERT_NAMES, transposed=True), family.FUSED_EXPERT_NAMES, family.EXPERT_NAMES),
)
QWEN3_VL_MOE = replace(
    within(_TEXT, "qwen3_vl_moe"),
    model_class="Qwen3VLMoeForConditionalGeneration",
    short_names={
        "qwen3-vl-30b-a3b": "Qwen/Qwen3-VL-30B-A3B-Instruct",
        "qwen3-vl-30b-a3b-instruct": "Qwen/Qwen3-VL-30B-A3B-Instruct",
        "qwen3-vl-235b-a22b-instruct": "Qwen/Qwen3-VL-235B-A22B-Instruct",
    },
    published=(family.Published("qwen3-vl-30b-a3b-instruct", "30", "3"),),
)
