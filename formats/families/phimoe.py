"""Phi-3.5-MoE: sparsemixer routing, layer norms with bias, long rotary positions, biases everywhere.

Source: transformers, models/phimoe; sparsemixer: GRIN (2409.12136); long positions: 2402.13753.
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary
from moe_pack.formats.families.config import Config


def _read_config(config: Config) -> formats.ModelSpec:
    window = config.whole("sliding_window") if config.has("sliding_window") else None
    attention = readers.read_grouped_query(config, bias=readers.attention_bias(config), sliding_window=window)
    config.only(num_experts_per_tok=2)
    jitter = config.number("router_jitter_noise", 0.01)  # also at inference: it is the width of sparsemixer's band
    return replace(
        readers.read_decoder(
            config,
            attention,
            rotary.read_rope(config, attention.head_dim, default_theta=1e6, scalings=("mscales",)),
            formats.RouterSpec("sparsemixer", config.whole("num_local_experts"), 2, normalize=False, jitter=jitter),
            config.whole("intermediate_size"),
            norm=formats.NormSpec("layer", config.number("rms_norm_eps", 1e-5)),
        ),
        head_bias=config.flag("lm_head_bias", False),
    )


PHIMOE = family.Family(
    model_type="phimoe",
    short_names={"phi-3.5-moe": "microsoft/Phi-3.5-MoE-instruct"},
    published=(family.Published("phi-3.5-moe", "41.9", "6.6"),),
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        "layers.{i}.attention_norm_bias": "model.layers.{i}.input_layernorm.bias",
        "layers.{i}.mlp_norm_bias": "model.layers.{i}.post_attention_layernorm.bias",
        "layers.{i}.router": ("model.layers.{i}.block_sparse_moe.gate.weight", "model.layers.{i}.mlp.router.weight"),
        "norm_bias": "model.norm.bias",
        "head_bias": "lm_head.bias",
    },
    expert_names=(
        family.ExpertNames(family.matrices("model.layers.{i}.block_sparse_moe.experts.{e}.*.weight", "w1", "w3", "w2")),
        family.FUSED_EXPERT_NAMES,
    ),
    ignored_keys=frozenset({"hidden_dropout", "input_jitter_noise"}),
)
