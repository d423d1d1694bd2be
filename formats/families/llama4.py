"""Llama 4 Scout, Maverick (text): one expert a token, whose input the router's weight multiplies; layers that rotate
see a chunk, the others all of the text, sharpened by position.

Source: transformers, models/llama4; Meta (2025).
"""

from dataclasses import replace
from typing import Literal

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families import family, readers, rotary
from moe_pack.formats.families.multimodal import within

_MLP = "model.layers.{i}.feed_forward."


def _read_config(config: family.Config) -> formats.ModelSpec:
    # More experts would each get an input of its own.
    config.only(num_experts_per_tok=1, for_llm_compressor=False)
    size = config.whole("intermediate_size")
    attention = _read_attention(config)
    router = formats.RouterSpec("topk_sigmoid", config.whole("num_local_experts"), 1, normalize=False, on_input=True)
    return readers.read_decoder(
        config,
        attention,
        rotary.read_rope(config, attention.head_dim, default_theta=5e5, interleaved=True),
        router,
        size,
        moe_layers=_moe_layers(config),
        dense_size_key="intermediate_size_mlp",
        shared_expert=formats.SharedExpertSpec(size, gated=False),
        norm=formats.NormSpec("rms", config.number("rms_norm_eps", 1e-5)),
    )


def _moe_layers(config: family.Config) -> tuple[int, ...]:
    """Reads the MoE layers: as `moe_layers` lists them, else every `interleave_moe_layer_step`-th."""
    num_layers, step = config.num_layers(), config.whole("interleave_moe_layer_step", 1)
    if config.has("moe_layers"):
        listed = frozenset(config.counts("moe_layers"))
        return tuple(layer for layer in range(num_layers) if layer in listed)
    return tuple(range(step - 1, num_layers, step))


def _read_attention(config: family.Config) -> parts.GroupedQuerySpec:
    num_layers = config.num_layers()
    # Null: each head has its own keys; heads divide the hidden size. Missing, transformers takes 8 and 128.
    config.require("num_key_value_heads", "head_dim")
    qk_norm: Literal["unit", "none"] = "unit" if config.flag("use_qk_norm", True) else "none"
    bias = readers.attention_bias(config)
    attention = readers.read_grouped_query(config, bias=bias, qk_norm=qk_norm, own_keys=True)
    rotated = _rotated_layers(config)
    kinds = readers.read_kinds(config, "layer_types", ("full_attention", "chunked_attention"))
    chunked = readers.layers_of(kinds, "chunked_attention") if kinds else rotated
    if chunked:
        config.require("attention_chunk_size")  # missing, transformers takes 8192; with null it fails
        some = chunked if len(chunked) < num_layers else None
        size = config.whole("attention_chunk_size")
        attention = replace(attention, sliding_window=size, windowed_layers=some, chunked=True)
    config.ignore("attention_chunk_size")
    if len(rotated) == num_layers:
        config.ignore("attn_temperature_tuning", "floor_scale", "attn_scale")
        return attention
    tuned = config.truth("attn_temperature_tuning", True)
    temperature = parts.TemperatureSpec(
        config.number("attn_scale", 0.1), config.whole("floor_scale", 8192), is_from_one=True, is_unrotated=True
    )
    return replace(attention, rotated_layers=rotated, temperature=temperature if tuned else None)


def _rotated_layers(config: family.Config) -> tuple[int, ...]:
    """Reads which layers rotate: those with a 1 in `no_rope_layers`, else all but every `no_rope_layer_interval`-th."""
    num_layers, listed = config.num_layers(), config.counts("no_rope_layers")
    step = config.whole("no_rope_layer_interval", 4)
    if listed:
        return tuple(layer for layer in range(num_layers) if layer < len(listed) and listed[layer])
    return tuple(layer for layer in range(num_layers) if (layer + 1) % step)


LLAMA4_TEXT = family.Family(
    model_type="llama4_text",
    unpublished="its models are published inside multimodal checkpoints, llama4",
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        ".mlp.{gate,up,down}": "feed_forward.{}_proj.weight",
        ".router": "feed_forward.router.weight",
        ".shared.{gate,up,down}": "feed_forward.shared_expert.{}_proj.weight",
    },
    expert_names=(
        family.ExpertNames(
            family.matrices(_MLP + "experts.*", "gate_up_proj", "gate_up_proj", "down_proj"), transposed=True
        ),
        # What vLLM reads of checkpoints in codes; the reader of GGUF files takes it too.
        family.ExpertNames({matrix: f"{_MLP}experts.{{e}}.{matrix}_proj.weight" for matrix in formats.MATRICES}),
    ),
)
LLAMA4 = replace(
    within(LLAMA4_TEXT, "llama4"),
    short_names={
        "llama-4-scout": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        "llama-4-scout-17b-16e": "meta-llama/Llama-4-Scout-17B-16E",
        "llama-4-maverick": "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
        "llama-4-maverick-17b-128e": "meta-llama/Llama-4-Maverick-17B-128E",
    },
    published=(family.Published("llama-4-scout-17b-16e", "108", "17"),),
)
