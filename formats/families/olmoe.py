"""OLMoE-1B-7B: q and k norms over all heads at once, and a bound of queries, keys and values, where the config has one.

Source: transformers, models/olmoe; Muennighoff et al., "OLMoE" (2409.02060).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary


def _read_config(config: family.Config) -> formats.ModelSpec:
    bias = readers.attention_bias(config)
    attention = readers.read_grouped_query(config, bias=bias, own_keys=True, qk_norm="projection")
    attention = replace(attention, clip=config.number("clip_qkv") if config.has("clip_qkv") else None)
    experts, chosen = config.whole("num_experts"), config.whole("num_experts_per_tok", 8)
    return readers.read_decoder(
        config,
        attention,
        rotary.read_rope(config, attention.head_dim),
        formats.RouterSpec("softmax_topk", experts, chosen, config.flag("norm_topk_prob", False)),
        config.whole("intermediate_size"),
        norm=formats.NormSpec("rms", config.number("rms_norm_eps", 1e-5)),
    )


OLMOE = family.Family(
    model_type="olmoe",
    short_names={
        "olmoe": "allenai/OLMoE-1B-7B-0924",
        "olmoe-1b-7b": "allenai/OLMoE-1B-7B-0924",
        "olmoe-1b-7b-instruct": "allenai/OLMoE-1B-7B-0924-Instruct",
    },
    published=(family.Published("olmoe-1b-7b", "6.9", "1.3"),),
    read_config=_read_config,
    dense_names=readers.DENSE_NAMES,
)
