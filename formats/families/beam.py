"""Beam 1.0: norms before and after both halves of a layer, sums in which all outputs weigh the same, gates of attention
with biases, a window in five of six layers, which alone rotate, the others sharpened by a power of the position,
sigmoid routing with a bias and groups, capped logits.

Source: transformers, models/beam.
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families import family, readers, rotary

_SHARPER = parts.TemperatureSpec(0.1, 2048, is_from_one=True, is_unrotated=False, is_power=True)


def _read_config(config: family.Config) -> formats.ModelSpec:
    # Missing, transformers takes those of Beam 1.0; null is no number of groups, but no softcap.
    config.require("head_dim", "num_key_value_heads", "n_group", "topk_group", "final_logit_softcapping")
    for key in ("n_group", "topk_group"):
        if not config.has(key):
            raise formats.CheckpointError(f"{config.place}: {key} is null, expected a whole number")
    layers = _read_attention(config)
    spec = readers.read_decoder(
        config,
        layers.attention,
        layers.rope,
        readers.read_sigmoid_router(config, 8, normalize=True, experts=("num_experts",), scaling_factor=2.5),
        config.whole("moe_intermediate_size"),
        moe_layers=readers.layers_by_kind(config, num_dense=3),
        others=layers.others,
    )
    return replace(
        spec,
        logits_softcap=config.number("final_logit_softcapping") if config.has("final_logit_softcapping") else None,
        residual=parts.NormedResidualSpec(
            "normed", True, ("attention", "mlp"), apart=False, scaled=False, by_depth=True
        ),
    )


def _read_attention(config: family.Config) -> readers.LayerAttention:
    """Reads attention and rotary positions of each layer; a kind of layer whose positions are null does not rotate."""
    own = readers.read_grouped_query(config, bias=readers.attention_bias(config), qk_norm="head")
    own = replace(own, gate=parts.OutputGateSpec("value", "sigmoid", bias=True))
    kinds = _kinds(config)
    rotating, group = {"sliding_attention"}, config.group("rope_parameters")
    if group is not None:
        for kind in sorted(set(kinds)):
            group.require(kind)
        rotating = set(filter(group.has, kinds))
    plain = parts.RopeSpec(1e4, own.head_dim, interleaved=False, scaling=None)
    ropes = rotary.read_rope_by_kind(config, own.head_dim, dict.fromkeys(rotating & set(kinds), plain))
    config.ignore("sliding_window")  # without layers that have it
    window = config.whole("sliding_window") if "sliding_attention" in kinds else None

    def of(kind: str) -> tuple[parts.GroupedQuerySpec, parts.RopeSpec | None]:
        attention = replace(own, sliding_window=window) if kind == "sliding_attention" else own
        return (attention, ropes[kind]) if kind in ropes else (replace(attention, temperature=_SHARPER), None)

    return readers.LayerAttention.of(of(kind) for kind in kinds)


def _kinds(config: family.Config) -> tuple[str, ...]:
    """Reads the kind of each layer: of `layer_types`, else every sixth and the last without a window."""
    num_layers = config.num_layers()
    return readers.attention_kinds(config) or tuple(
        "sliding_attention" if (i + 1) % 6 and i + 1 < num_layers else "full_attention" for i in range(num_layers)
    )


BEAM = family.Family(
    model_type="beam",
    short_names={"beam-1.0": "reflection/Beam-1.0-501B-A23B"},
    unpublished="no public copy of the file of reflection/Beam-1.0-501B-A23B was found",
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        ".attention.gate": "self_attn.gate_proj.weight",
        ".attention.gate_bias": "self_attn.gate_bias",
        ".attention_post_norm": "post_attention_layernorm.weight",
        ".mlp_norm": "pre_feedforward_layernorm.weight",
        ".mlp_post_norm": "post_feedforward_layernorm.weight",
    },
)
