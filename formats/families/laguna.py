"""Laguna XS.2, XS 2.1: a window in three layers of four, which have more heads and rotate whole heads, the others half
of each; softplus gates of heads, q and k norms a head, sigmoid routing with a bias, shared expert, dense first layer.

Source: transformers, models/laguna; poolside (2026).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families import family, readers, rotary


def _read_config(config: family.Config) -> formats.ModelSpec:
    attention, moe_layers = _read_attention(config), readers.layers_by_kind(config, num_dense=1)
    config.only(
        mlp_only_layers=[layer for layer in range(config.num_layers()) if layer not in moe_layers],
        decoder_sparse_step=1,
        norm_topk_prob=True,
        qkv_bias=config.flag("attention_bias", False),
        moe_router_score_func="sigmoid",
        moe_apply_router_weight_on_input=False,
        moe_router_logit_softcapping=0.0,
    )
    router = formats.RouterSpec(
        "sigmoid_topk",
        config.whole("num_experts"),
        config.whole("num_experts_per_tok", 8),
        normalize=True,
        bias=True,
        scaling_factor=config.number("moe_routed_scaling_factor", 1),
    )
    return readers.read_decoder(
        config,
        attention.attention,
        attention.rope,
        router,
        config.whole("moe_intermediate_size"),
        moe_layers=moe_layers,
        shared_expert=formats.SharedExpertSpec(config.whole("shared_expert_intermediate_size"), gated=False),
        others=attention.others,
    )


def _read_attention(config: family.Config) -> readers.LayerAttention:
    num_layers = config.num_layers()
    config.require("head_dim")  # missing, transformers takes 128
    own = readers.read_grouped_query(config, bias=readers.attention_bias(config), qk_norm="head")
    own = replace(own, gate=_read_gate(config))
    kinds = readers.attention_kinds(config) or ("full_attention",) * num_layers
    heads = config.counts("num_attention_heads_per_layer") or (own.num_heads,) * num_layers
    readers.check_count(config, "num_attention_heads_per_layer", heads)
    config.ignore("sliding_window")  # without layers that have it
    window = config.whole("sliding_window") if "sliding_attention" in kinds else None
    usual = {
        "full_attention": parts.RopeSpec(5e5, int(own.head_dim * 0.5), interleaved=False, scaling=None),
        "sliding_attention": parts.RopeSpec(1e4, own.head_dim, interleaved=False, scaling=None),
    }
    ropes = rotary.read_rope_by_kind(
        config, own.head_dim, {kind: usual[kind] for kind in kinds}, partial_rotary_factor=1.0
    )
    return readers.LayerAttention.of(
        (replace(own, num_heads=count, sliding_window=window if kind == "sliding_attention" else None), ropes[kind])
        for kind, count in zip(kinds, heads, strict=True)
    )


def _read_gate(config: family.Config) -> parts.OutputGateSpec:
    if config.is_text("gating", "per-element"):
        return parts.OutputGateSpec("value", "softplus")
    if not config.is_text("gating", "per-head") and not config.flag("gating", True):
        raise formats.CheckpointError(f"{config.place}: gating is False; supported: True, 'per-head', 'per-element'")
    return parts.OutputGateSpec("head", "softplus")


LAGUNA = family.Family(
    model_type="laguna",
    short_names={"laguna-xs.2": "poolside/Laguna-XS.2", "laguna-xs-2.1": "poolside/Laguna-XS-2.1"},
    published=(family.Published("laguna-xs-2.1", "33", "3"),),
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        ".attention.gate": "self_attn.g_proj.weight",
        ".router_bias": ("mlp.experts.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
        ".shared.{gate,up,down}": ("mlp.shared_expert.{}_proj.weight", "mlp.shared_experts.{}_proj.weight"),
    },
)
