"""MiMo-V2-Flash: values smaller than keys, and scaled; five layers of six have a window, twice as many keys, sinks and
a rotary base of their own; a third of each head rotated, sigmoid routing with a bias, dense first layer.

Source: transformers, models/mimo_v2_flash; Xiaomi (2025).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary
from moe_pack.formats.parts import RopeSpec

_THETAS = {"full_attention": 5e6, "sliding_attention": 1e4}
_ROTATED = 0.334  # of a head, if the config does not say


def _read_config(config: family.Config) -> formats.ModelSpec:
    num_layers, moe_layers = config.num_layers(), readers.layers_by_kind(config, num_dense=1)
    attention = _read_attention(config)
    config.only(
        moe_layer_freq=[int(layer in moe_layers) for layer in range(num_layers)],
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        n_shared_experts=None,
    )
    eps = config.number("rms_norm_eps", 1e-5)
    config.only(layernorm_epsilon=eps)
    return readers.read_decoder(
        config,
        attention.attention,
        attention.rope,
        readers.read_sigmoid_router(config, num_experts_per_tok=8, normalize=True),
        config.whole("moe_intermediate_size"),
        moe_layers=moe_layers,
        norm=formats.NormSpec("rms", eps),
        others=attention.others,
    )


def _read_attention(config: family.Config) -> readers.LayerAttention:
    # Missing, transformers takes 192 and 0.707; null is a scale of 1.
    config.require("head_dim", "attention_value_scale")
    value_dim = config.whole("v_head_dim")
    own = readers.read_grouped_query(config, bias=readers.attention_bias(config, ("q", "k", "v")))
    own = replace(
        own,
        value_head_dim=None if value_dim == own.head_dim else value_dim,
        value_scale=config.number("attention_value_scale", 1),
    )
    window = config.whole("sliding_window", 129)
    if config.has("sliding_window_size"):  # without the query's own position
        window = config.whole("sliding_window_size") + 1
    windowed = replace(own, num_kv_heads=2 * own.num_kv_heads, sinks=True, sliding_window=window)
    kinds = readers.attention_kinds(config) or tuple(
        "full_attention" if i == 0 or (i + 1) % 6 == 0 else "sliding_attention" for i in range(config.num_layers())
    )
    rotated = int(own.head_dim * _ROTATED)
    defaults = {kind: RopeSpec(_THETAS[kind], rotated, interleaved=False, scaling=None) for kind in kinds}
    ropes = rotary.read_rope_by_kind(config, own.head_dim, defaults, _ROTATED)
    _check_published_keys(config, kinds, ropes)
    return readers.LayerAttention.of((windowed if kind == "sliding_attention" else own, ropes[kind]) for kind in kinds)


def _check_published_keys(config: family.Config, kinds: tuple[str, ...], ropes: dict[str, RopeSpec]) -> None:
    """Refuses a config whose published keys, which transformers does not read, say something else than the others."""
    config.only(
        hybrid_layer_pattern=[int(kind == "sliding_attention") for kind in kinds],
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
    )
    times = {"num_attention_heads": 1, "num_key_value_heads": 2, "head_dim": 1, "v_head_dim": 1}
    for key, of_window in times.items():
        config.only(**{f"swa_{key}": of_window * config.whole(key)})
    for key, kind in (("rope_theta", "full_attention"), ("swa_rope_theta", "sliding_attention")):
        config.only(**{key: ropes[kind].theta if kind in ropes else None})
    config.only(partial_rotary_factor=_ROTATED)
    config.ignore("attention_chunk_size", "hybrid_block_size")


MIMO_V2_FLASH = family.Family(
    model_type="mimo_v2_flash",
    model_class="MiMoV2FlashForCausalLM",
    short_names={"mimo-v2-flash": "XiaomiMiMo/MiMo-V2-Flash"},
    published=(family.Published("mimo-v2-flash", "309", "15", cached="111.36"),),
    read_config=_read_config,
    dense_names={**readers.DENSE_NAMES, ".attention.sinks": ("self_attn.attention_sink_bias", "self_attn.sinks")},
    unused=(family.LeftOut("model.mtp.*", "a multi-token-prediction layer, which plain decoding does not run"),),
)
