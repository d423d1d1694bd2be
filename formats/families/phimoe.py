"""Phi-3.5-MoE: sparsemixer routing, layer norms with bias, long rotary positions, biases everywhere.

Source: transformers, models/phimoe; sparsemixer: GRIN (2409.12136); long positions: 2402.13753.
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary
from moe_pack.formats.families.mixtral import MIXTRAL


def _read_config(config: family.Config) -> formats.ModelSpec:
    window = config.whole("sliding_window") if config.has("sliding_window") else None
    attention = readers.read_grouped_query(config, bias=readers.attention_bias(config), sliding_window=window)
    config.only(num_experts_per_tok=2)
    jitter = config.number("router_jitter_noise", 0.01)  # also at inference: it is the width of sparsemixer's band
    router = formats.RouterSpec("sparsemixer", config.whole("num_local_experts"), 2, normalize=False, jitter=jitter)
    spec = readers.read_decoder(
        config,
        attention,
        rotary.read_rope(config, attention.head_dim, default_theta=1e6, scalings=("mscales",)),
        router,
        config.whole("intermediate_size"),
        norm=formats.NormSpec("layer", config.number("rms_norm_eps", 1e-5)),
    )
    return replace(spec, head_bias=config.flag("lm_head_bias", False))


PHIMOE = family.Family(
    model_type="phimoe",
    short_names={"phi-3.5-moe": "microsoft/Phi-3.5-MoE-instruct"},
    published=(family.Published("phi-3.5-moe", "41.9", "6.6"),),
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        ".attention_norm_bias": "input_layernorm.bias",
        ".mlp_norm_bias": "post_attention_layernorm.bias",
        ".router": ("block_sparse_moe.gate.weight", "mlp.router.weight"),
        "norm_bias": "model.norm.bias",
        "head_bias": "lm_head.bias",
    },
    expert_names=MIXTRAL.expert_names,
    ignored_keys=frozenset({"hidden_dropout", "input_jitter_noise"}),
)
