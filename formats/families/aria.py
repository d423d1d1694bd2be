"""Aria (text): softmax over the chosen experts, two shared experts, experts fused and transposed in the source.

Source: transformers, models/aria; Aria (2410.05993).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary
from moe_pack.formats.families.multimodal import within


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.only(mlp_bias=False)
    experts, chosen = config.whole("moe_num_experts"), config.whole("moe_topk")
    config.only(num_experts_per_tok=chosen)  # in published configs; the class never reads it
    attention = readers.read_grouped_query(config, bias=readers.attention_bias(config), own_keys=True)
    expert_size = config.whole("intermediate_size")
    return readers.read_decoder(
        config,
        attention,
        rotary.read_rope(config, attention.head_dim),
        formats.RouterSpec("topk_softmax", experts, chosen, normalize=False),
        expert_size,
        dense_size_key=None,
        shared_expert=formats.SharedExpertSpec(expert_size * config.whole("moe_num_shared_experts", 2), gated=False),
    )


_TEXT = family.Family(
    model_type="aria_text",
    read_config=_read_config,
    dense_names={**readers.DENSE_NAMES, ".router": "mlp.router.weight"},
    expert_names=(
        family.ExpertNames(
            family.matrices("model.layers.{i}.mlp.experts.*.weight", "fc1", "fc1", "fc2"), transposed=True
        ),
        family.ExpertNames(family.FUSED_EXPERT_NAMES.matrices, transposed=True),
    ),
    ignored_keys=frozenset({"pretraining_tp"}),
)
ARIA = replace(
    within(
        _TEXT,
        "aria",
        ignored_keys=family.keys(
            "ignore_index max_value_projector_patch_to_query_dict projector_patch_to_query_dict vision_feature_layer"
        ),
    ),
    short_names={"aria": "rhymes-ai/Aria", "aria-chat": "rhymes-ai/Aria-Chat"},
    published=(family.Published("aria", "24.9", "3.5", active_leaves_out=("embed", "head", "router")),),
)
