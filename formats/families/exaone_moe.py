"""K-EXAONE-236B-A23B: a window on three of four layers, which alone rotate, sigmoid routing, shared expert.

Source: transformers, models/exaone_moe; LG AI Research (2026).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary
from moe_pack.formats.families.config import Config
from moe_pack.formats.parts import GroupedQuerySpec


def _read_config(config: Config) -> formats.ModelSpec:
    config.only(scoring_func="sigmoid", topk_method="noaux_tc")
    expert_size = config.whole("moe_intermediate_size")
    num_dense = config.count("first_k_dense_replace", 1)
    config.only(first_last_k_dense_replace=num_dense)
    moe_layers = readers.layers_by_kind(config, num_dense)
    config.only(is_moe_layer=[layer in moe_layers for layer in range(config.num_layers())])
    config.require("num_key_value_heads")  # missing, transformers takes 32
    attention = _read_attention(config)
    router = formats.RouterSpec(
        "sigmoid_topk",
        config.whole("num_experts"),
        config.whole("num_experts_per_tok", 8),
        config.flag("norm_topk_prob", True),
        bias=True,
        n_group=config.whole("n_group", 1),
        topk_group=config.whole("topk_group", 1),
        scaling_factor=config.number("routed_scaling_factor", 2.5),
    )
    return readers.read_decoder(
        config,
        attention,
        rotary.read_rope(config, attention.head_dim),
        router,
        expert_size,
        moe_layers=moe_layers,
        shared_expert=formats.SharedExpertSpec(expert_size * config.whole("num_shared_experts", 1), gated=False),
        norm=formats.NormSpec("rms", config.number("rms_norm_eps", 1e-5)),
    )


def _read_attention(config: Config) -> GroupedQuerySpec:
    """Reads attention whose layers with a window rotate, and whose other layers do not."""
    attention = readers.read_grouped_query(config, qk_norm="head")
    config.require("sliding_window")  # missing, transformers takes 4096; it cannot be null
    attention, windowed = replace(attention, sliding_window=config.whole("sliding_window")), _windowed_layers(config)
    if len(windowed) == config.num_layers():
        return attention
    return replace(attention, windowed_layers=windowed, rotated_layers=windowed)


def _windowed_layers(config: Config) -> tuple[int, ...]:
    """The layers with a window: as `layer_types` says, else all but every `sliding_window_pattern`-th."""
    kinds = readers.read_kinds(config, "layer_types", ("full_attention", "sliding_attention"))
    if kinds:
        config.ignore("sliding_window_pattern")
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    config.require("sliding_window_pattern")  # missing, transformers takes 4, with null it fails
    step = config.whole("sliding_window_pattern")
    return tuple(layer for layer in range(config.num_layers()) if (layer + 1) % step)


_MTP = "a multi-token-prediction layer, which plain decoding does not run"

EXAONE_MOE = family.Family(
    model_type="exaone_moe",
    short_names={"k-exaone-236b-a23b": "LGAI-EXAONE/K-EXAONE-236B-A23B"},
    published=(family.Published("k-exaone-236b-a23b", "236", "23"),),
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        "layers.{i}.router_bias": (
            "model.layers.{i}.mlp.e_score_correction_bias",
            "model.layers.{i}.mlp.gate.e_score_correction_bias",
        ),
    },
    unused=(family.LeftOut("mtp.*", _MTP),),
    ignored_keys=frozenset({"num_nextn_predict_layers"}),
)
