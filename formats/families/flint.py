"""Flint: sigmoid routing without a bias, q and k norms a head, sinks, windows in most layers, which alone rotate,
shared expert, dense first layers.

Source: transformers, models/flint.
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import readers, rotary
from moe_pack.formats.families.config import Config
from moe_pack.formats.families.family import Family
from moe_pack.formats.parts import GroupedQuerySpec


def _read_config(config: Config) -> formats.ModelSpec:
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


def _read_attention(config: Config) -> GroupedQuerySpec:
    """Reads attention with sinks, whose layers with a window rotate, and whose other layers do not."""
    config.require("head_dim")  # missing, transformers takes 128
    attention = replace(
        readers.read_grouped_query(config, bias=readers.attention_bias(config), qk_norm="head"), sinks=True
    )
    windowed = _windowed_layers(config)
    if not windowed:
        config.ignore("sliding_window")
        return attention
    config.require("sliding_window")  # missing, transformers takes 513; it cannot be null
    attention = replace(attention, sliding_window=config.whole("sliding_window"))
    if len(windowed) == config.num_layers():
        return attention
    return replace(attention, windowed_layers=windowed, rotated_layers=windowed)


def _windowed_layers(config: Config) -> tuple[int, ...]:
    """The layers with a window: as `layer_types` says, else all but the first two, every fourth and the last."""
    num_layers, kinds = (
        config.num_layers(),
        readers.read_kinds(config, "layer_types", ("full_attention", "sliding_attention")),
    )
    if kinds:
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    return tuple(layer for layer in range(2, num_layers - 1) if layer % 4 != 1)


def _moe_layers(config: Config) -> tuple[int, ...]:
    """The MoE layers: by `decoder_sparse_step` and `mlp_only_layers`, which without the key are the first two."""
    layers = readers.layers_by_step(config)
    return layers if config.has("mlp_only_layers") else tuple(layer for layer in layers if layer > 1)


_SHARED = "model.layers.{i}.mlp.shared_expert."
FLINT = Family(
    model_type="flint",
    short_names={"flint": "RecursiveSI/flint"},
    unpublished="no public copy of the file of RecursiveSI/flint was found; transformers' defaults are its sizes",
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        "layers.{i}.attention.sinks": (
            "model.layers.{i}.self_attn.softmax_offset",
            "model.layers.{i}.self_attn.sinks",
        ),
        "layers.{i}.shared.gate": _SHARED + "gate_proj.weight",
        "layers.{i}.shared.up": _SHARED + "up_proj.weight",
        "layers.{i}.shared.down": _SHARED + "down_proj.weight",
    },
)
