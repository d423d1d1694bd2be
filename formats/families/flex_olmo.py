"""FlexOlmo-7x7B. Source: transformers, models/flex_olmo; Shi et al., "FlexOlmo" (2507.07024)."""

from dataclasses import replace

from moe_pack.formats import ModelSpec, RouterSpec
from moe_pack.formats.families.config import Config
from moe_pack.formats.families.family import Family
from moe_pack.formats.families.readers import (
    DENSE_NAMES,
    EXPERT_NAMES,
    FUSED_EXPERT_NAMES,
    attention_bias,
    read_decoder,
    read_grouped_query,
    read_rope,
)
from moe_pack.formats.parts import NormedResidualSpec


def _read_config(config: Config) -> ModelSpec:
    attention = read_grouped_query(config, bias=attention_bias(config), own_keys=True, qk_norm="projection")
    experts, chosen = (
        config.whole(config.either("num_experts", "num_local_experts"), 7),
        config.whole("num_experts_per_tok", 5),
    )
    spec = read_decoder(
        config,
        "flex_olmo",
        attention,
        read_rope(config, attention.head_dim, default_theta=500000.0),
        RouterSpec("softmax_topk", experts, chosen, config.flag("norm_topk_prob", False)),
        config.whole("intermediate_size"),
    )
    return replace(spec, residual=NormedResidualSpec("normed", False, ("attention", "mlp"), apart=False, scaled=False))


FLEX_OLMO = Family(
    model_type="flex_olmo",
    short_names={"flexolmo": "allenai/FlexOlmo-7x7B-1T", "flexolmo-7x7b": "allenai/FlexOlmo-7x7B-1T"},
    read_config=_read_config,
    dense_names={
        **DENSE_NAMES,
        "layers.{i}.attention_post_norm": "model.layers.{i}.post_attention_layernorm.weight",
        "layers.{i}.mlp_post_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
    },
    expert_names=(EXPERT_NAMES, FUSED_EXPERT_NAMES),
)
