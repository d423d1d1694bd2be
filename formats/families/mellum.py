"""Mellum 2. Source: transformers, models/mellum.

Layers with a window and layers without have rotary positions of their own.
"""

from dataclasses import replace

from moe_pack.formats import ModelSpec, RouterSpec
from moe_pack.formats.families.config import Config
from moe_pack.formats.families.family import Family, LeftOut
from moe_pack.formats.families.readers import (
    ATTENTION_KINDS,
    DENSE_NAMES,
    EXPERT_NAMES,
    FUSED_EXPERT_NAMES,
    LayerAttention,
    attention_bias,
    layers_by_kind,
    read_decoder,
    read_grouped_query,
    read_kinds,
    read_rope_by_kind,
)
from moe_pack.formats.parts import RopeSpec

_THETAS = {"full_attention": 5e5, "sliding_attention": 1e4}


def _read_config(config: Config) -> ModelSpec:
    experts = config.whole(config.either("num_experts", "num_local_experts"))
    attention = _read_attention(config)
    return read_decoder(
        config,
        "mellum",
        attention.attention,
        attention.rope,
        RouterSpec(
            "softmax_topk", experts, config.whole("num_experts_per_tok", 8), config.flag("norm_topk_prob", True)
        ),
        config.whole("moe_intermediate_size"),
        moe_layers=layers_by_kind(config, num_dense=0),
        others=attention.others,
    )


def _read_attention(config: Config) -> LayerAttention:
    config.require("head_dim")  # missing, transformers takes 128
    own = read_grouped_query(config, bias=attention_bias(config), qk_norm="head")
    kinds = read_kinds(config, "layer_types", ATTENTION_KINDS) or ("full_attention",) * config.num_layers()
    # Written in published configs, read by no code: `layer_types` says which layers have the window.
    config.only("use_sliding_window", True)
    config.ignore("max_window_layers")
    rope = RopeSpec(0.0, own.head_dim, interleaved=False, scaling=None)
    ropes = read_rope_by_kind(config, own.head_dim, {kind: replace(rope, theta=_THETAS[kind]) for kind in kinds})
    config.ignore("sliding_window")  # without layers that have it
    windowed = replace(own, sliding_window=config.whole("sliding_window")) if "sliding_attention" in kinds else own
    return LayerAttention.of((windowed if kind == "sliding_attention" else own, ropes[kind]) for kind in kinds)


MELLUM = Family(
    model_type="mellum",
    short_names={
        "mellum2-12b-a2.5b": "JetBrains/Mellum2-12B-A2.5B-Base",
        "mellum2-12b-a2.5b-thinking": "JetBrains/Mellum2-12B-A2.5B-Thinking",
    },
    read_config=_read_config,
    dense_names=DENSE_NAMES,
    expert_names=(EXPERT_NAMES, FUSED_EXPERT_NAMES),
    unused=(LeftOut("mtp.*", "a multi-token-prediction layer, which plain decoding does not run"),),
    ignored_keys=frozenset({"num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types"}),
)
