"""FlexOlmo-7x7B: as `olmoe`, with norms after attention and after experts in place of those before.

Source: transformers, models/flex_olmo; Shi et al., "FlexOlmo" (2507.07024).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary
from moe_pack.formats.parts import NormedResidualSpec


def _read_config(config: family.Config) -> formats.ModelSpec:
    bias = readers.attention_bias(config)
    attention = readers.read_grouped_query(config, bias=bias, own_keys=True, qk_norm="projection")
    experts = config.whole(config.either("num_experts", "num_local_experts"), 7)
    chosen = config.whole("num_experts_per_tok", 5)
    spec = readers.read_decoder(
        config,
        attention,
        rotary.read_rope(config, attention.head_dim, default_theta=500000.0),
        formats.RouterSpec("softmax_topk", experts, chosen, config.flag("norm_topk_prob", False)),
        config.whole("intermediate_size"),
    )
    return replace(spec, residual=NormedResidualSpec("normed", False, ("attention", "mlp"), apart=False, scaled=False))


FLEX_OLMO = family.Family(
    model_type="flex_olmo",
    short_names={"flexolmo": "allenai/FlexOlmo-7x7B-1T", "flexolmo-7x7b": "allenai/FlexOlmo-7x7B-1T"},
    unpublished="no public copy of the file of allenai/FlexOlmo-7x7B-1T was found",
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        ".attention_post_norm": "post_attention_layernorm.weight",
        ".mlp_post_norm": "post_feedforward_layernorm.weight",
    },
)
