"""Flint: sigmoid routing without a bias, q and k norms a head, sinks, windows in most layers, which alone rotate,
shared expert, dense first layers.

Source: transformers, models/flint.
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary
from moe_pack.formats.parts import GroupedQuerySpec


def _read_config(config: family.Config) -> formats.ModelSpec:
    attention = _read_attention(config)
    rope = rotary.read_rope(config, attention.head_dim)
    router = formats.RouterSpec(
        "sigmoid_topk",
        config.whole("num_experts"),
        config.whole("num_experts_per_tok", 6),
        config.flag("norm_topk_prob", True),
    )
    config.require("shared_expert_intermediate_size")  # missing, transformers takes 1024
    return readers.read_decoder(
        config,
        attention,
        None if attention.sliding_window is None else rope,
        router,
        config.whole("moe_intermediate_size"),
        moe_layers=_moe_layers(config),
        shared_expert=formats.SharedExpertSpec(config.whole("shared_expert_intermediate_size"), gated=False),
    )


def _read_attention(config: family.Config) -> GroupedQuerySpec:
    """Reads attention with sinks; without a list, the first two layers, every fourth and the last see all."""
    config.require("head_dim")  # missing, transformers takes 128
    attention = readers.read_grouped_query(config, bias=readers.attention_bias(config), qk_norm="head")
    attention = replace(attention, sinks=True)
    kinds = readers.attention_kinds(config)
    windowed = tuple(
        i
        for i in range(config.num_layers())
        if (kinds[i] == "sliding_attention" if kinds else 1 < i < config.num_layers() - 1 and i % 4 != 1)
    )
    if not windowed:
        config.ignore("sliding_window")
        return attention
    config.require("sliding_window")  # missing, transformers takes 513; it cannot be null
    return readers.with_window(config, attention, config.whole("sliding_window"), windowed)


def _moe_layers(config: family.Config) -> tuple[int, ...]:
    """Reads the MoE layers: by `decoder_sparse_step` and `mlp_only_layers`, which without the key are the first two."""
    layers = readers.layers_by_step(config)
    return layers if config.has("mlp_only_layers") else tuple(layer for layer in layers if layer > 1)


FLINT = family.Family(
    model_type="flint",
    short_names={"flint": "RecursiveSI/flint"},
    unpublished="no public copy of the file of RecursiveSI/flint was found; transformers' defaults are its sizes",
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        ".attention.sinks": ("self_attn.softmax_offset", "self_attn.sinks"),
        ".shared.{gate,up,down}": "mlp.shared_expert.{}_proj.weight",
    },
)
