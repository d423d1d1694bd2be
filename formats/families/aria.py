"""Aria, without its vision. Source: transformers, models/aria; Aria (2410.05993)."""

from moe_pack.formats import ModelSpec, RouterSpec, SharedExpertSpec
from moe_pack.formats.families.config import Config
from moe_pack.formats.families.family import ExpertNames, Family
from moe_pack.formats.families.multimodal import within
from moe_pack.formats.families.readers import (
    DENSE_NAMES,
    FUSED_EXPERT_NAMES,
    attention_bias,
    read_decoder,
    read_grouped_query,
    read_rope,
)


def _read_config(config: Config) -> ModelSpec:
    config.only("mlp_bias", False)
    experts, chosen = config.whole("moe_num_experts"), config.whole("moe_topk")
    config.only("num_experts_per_tok", chosen)  # in published configs; the class never reads it
    attention = read_grouped_query(config, bias=attention_bias(config), own_keys=True)
    expert_size = config.whole("intermediate_size")
    return read_decoder(
        config,
        "aria",
        attention,
        read_rope(config, attention.head_dim),
        RouterSpec("topk_softmax", experts, chosen, normalize=False),
        expert_size,
        dense_size_key=None,
        shared_expert=SharedExpertSpec(expert_size * config.whole("moe_num_shared_experts", 2), gated=False),
    )


_EXPERTS = "model.layers.{i}.mlp.experts."
_TEXT = Family(
    model_type="aria_text",
    short_names={},
    read_config=_read_config,
    dense_names={**DENSE_NAMES, "layers.{i}.router": "model.layers.{i}.mlp.router.weight"},
    expert_names=(
        ExpertNames(
            {"gate": _EXPERTS + "fc1.weight", "up": _EXPERTS + "fc1.weight", "down": _EXPERTS + "fc2.weight"},
            transposed=True,
        ),
        ExpertNames(FUSED_EXPERT_NAMES.matrices, transposed=True),
    ),
    ignored_keys=frozenset({"pretraining_tp"}),
)
ARIA = within(
    _TEXT,
    "aria",
    short_names={"aria": "rhymes-ai/Aria", "aria-chat": "rhymes-ai/Aria-Chat"},
    ignored_keys=frozenset(
        {
            "ignore_index",
            "max_value_projector_patch_to_query_dict",
            "projector_patch_to_query_dict",
            "vision_feature_layer",
        }
    ),
)
