"""K-EXAONE-236B-A23B: a window on three of four layers, which alone rotate, sigmoid routing, shared expert.

Source: transformers, models/exaone_moe; LG AI Research (2026).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary
from moe_pack.formats.parts import GroupedQuerySpec


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.only(scoring_func="sigmoid", topk_method="noaux_tc")
    expert_size = config.whole("moe_intermediate_size")
    num_dense = config.count("first_k_dense_replace", 1)
    config.only(first_last_k_dense_replace=num_dense)
    moe_layers = readers.layers_by_kind(config, num_dense)
    config.only(is_moe_layer=[layer in moe_layers for layer in range(config.num_layers())])
    config.require("num_key_value_heads")  # missing, transformers takes 32
    attention = _read_attention(config)
    router = readers.read_sigmoid_router(config, 8, normalize=True, experts=("num_experts",), scaling_factor=2.5)
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


def _read_attention(config: family.Config) -> GroupedQuerySpec:
    """Reads attention whose layers with a window rotate: all but every `sliding_window_pattern`-th without a list."""
    attention, kinds = readers.read_grouped_query(config, qk_norm="head"), readers.attention_kinds(config)
    config.require("sliding_window")  # missing, transformers takes 4096; it cannot be null
    if not kinds:
        config.require("sliding_window_pattern")  # missing, transformers takes 4, with null it fails
        step = config.whole("sliding_window_pattern")
        kinds = tuple("sliding_attention" if (i + 1) % step else "" for i in range(config.num_layers()))
    config.ignore("sliding_window_pattern")
    windowed, window = readers.layers_of(kinds, "sliding_attention"), config.whole("sliding_window")
    if not windowed:  # no layer rotates, which a spec cannot say: refused
        return replace(attention, sliding_window=window, windowed_layers=(), rotated_layers=())
    return readers.with_window(config, attention, window, windowed)


EXAONE_MOE = family.Family(
    model_type="exaone_moe",
    short_names={"k-exaone-236b-a23b": "LGAI-EXAONE/K-EXAONE-236B-A23B"},
    published=(family.Published("k-exaone-236b-a23b", "236", "23"),),
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        ".router_bias": ("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
    },
    unused=(family.LeftOut("mtp.*", "a multi-token-prediction layer, which plain decoding does not run"),),
    ignored_keys=frozenset({"num_nextn_predict_layers"}),
)
