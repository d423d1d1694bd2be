"""Mellum2-12B-A2.5B: as `qwen3_moe`, with a window in three layers of four, which have rotary positions of their own.

Source: transformers, models/mellum.
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary
from moe_pack.formats.parts import RopeSpec

_THETAS = {"full_attention": 5e5, "sliding_attention": 1e4}


def _read_config(config: family.Config) -> formats.ModelSpec:
    experts = config.whole(config.either("num_experts", "num_local_experts"))
    attention = _read_attention(config)
    return readers.read_decoder(
        config,
        attention.attention,
        attention.rope,
        formats.RouterSpec(
            "softmax_topk", experts, config.whole("num_experts_per_tok", 8), config.flag("norm_topk_prob", True)
        ),
        config.whole("moe_intermediate_size"),
        moe_layers=readers.layers_by_kind(config, num_dense=0),
        others=attention.others,
    )


def _read_attention(config: family.Config) -> readers.LayerAttention:
    config.require("head_dim")  # missing, transformers takes 128
    own = readers.read_grouped_query(config, bias=readers.attention_bias(config), qk_norm="head")
    kinds = readers.attention_kinds(config) or ("full_attention",) * config.num_layers()
    # Written in published configs, read by no code: `layer_types` says which layers have the window.
    config.only(use_sliding_window=True)
    config.ignore("max_window_layers")
    defaults = {kind: RopeSpec(_THETAS[kind], own.head_dim, interleaved=False, scaling=None) for kind in kinds}
    ropes = rotary.read_rope_by_kind(config, own.head_dim, defaults)
    config.ignore("sliding_window")  # without layers that have it
    windowed = replace(own, sliding_window=config.whole("sliding_window")) if "sliding_attention" in kinds else own
    return readers.LayerAttention.of((windowed if kind == "sliding_attention" else own, ropes[kind]) for kind in kinds)


MELLUM = family.Family(
    model_type="mellum",
    short_names={
        "mellum2-12b-a2.5b": "JetBrains/Mellum2-12B-A2.5B-Base",
        "mellum2-12b-a2.5b-thinking": "JetBrains/Mellum2-12B-A2.5B-Thinking",
    },
    published=(family.Published("mellum2-12b-a2.5b", "12", "2.5"),),
    read_config=_read_config,
    dense_names=readers.DENSE_NAMES,
    unused=(family.LeftOut("mtp.*", "a multi-token-prediction layer, which plain decoding does not run"),),
    ignored_keys=frozenset({"num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types"}),
)
