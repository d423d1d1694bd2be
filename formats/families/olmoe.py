"""OLMoE-1B-7B. Source: transformers, models/olmoe; Muennighoff et al., "OLMoE" (2409.02060)."""

from dataclasses import replace

from moe_pack.formats import ModelSpec, NormSpec, RouterSpec
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


def _read_config(config: Config) -> ModelSpec:
    attention = read_grouped_query(config, bias=attention_bias(config), own_keys=True, qk_norm="projection")
    attention = replace(attention, clip=config.number("clip_qkv") if config.has("clip_qkv") else None)
    experts, chosen = config.whole("num_experts"), config.whole("num_experts_per_tok", 8)
    return read_decoder(
        config,
        "olmoe",
        attention,
        read_rope(config, attention.head_dim),
        RouterSpec("softmax_topk", experts, chosen, config.flag("norm_topk_prob", False)),
        config.whole("intermediate_size"),
        norm=NormSpec("rms", config.number("rms_norm_eps", 1e-5)),
    )


OLMOE = Family(
    model_type="olmoe",
    short_names={
        "olmoe": "allenai/OLMoE-1B-7B-0924",
        "olmoe-1b-7b": "allenai/OLMoE-1B-7B-0924",
        "olmoe-1b-7b-instruct": "allenai/OLMoE-1B-7B-0924-Instruct",
    },
    read_config=_read_config,
    dense_names=DENSE_NAMES,
    expert_names=(EXPERT_NAMES, FUSED_EXPERT_NAMES),
)
