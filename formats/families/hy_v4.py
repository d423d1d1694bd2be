"""Hy4 preview: as `glm_moe_dsa`, with sinks and a gate for each value of the heads, residual streams that do not mix,
and limits of the routed experts' neurons.

Source: transformers, models/hy_v4; Tencent (2026).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families import deepseek_v32, family, readers
from moe_pack.formats.families.deepseek_v3 import read_latent_decoder
from moe_pack.formats.families.glm_moe_dsa import with_shared_choices
from moe_pack.formats.parts.specs import LimitSpec

# Written by the authors' own classes, read by no code of transformers: other values would be another model.
_ONLY = {
    "enable_ihc": True,
    "first_k_dense_replace": 1,
    "gated_mla": True,
    "gating_type": "elementwise",
    "learnable_sink": True,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.only(**_ONLY)
    readers.read_kinds(config, "layer_types", ("indexed_attention", "deepseek_sparse_attention"))
    # Missing, transformers takes those of a smaller Hy4.
    config.require("routed_scaling_factor", "index_topk")
    eps = config.number("rms_norm_eps", 1e-5)
    indexer = replace(deepseek_v32.read_indexer(config), rotates_last=True, norm_eps=eps)
    attention = replace(
        readers.read_latent(config, reads_head_dim=False, reads_kv_heads=False),
        indexer=indexer,
        gate=parts.OutputGateSpec("value", "sigmoid"),
        sinks=True,
    )
    moe_layers = readers.layers_by_kind(config, num_dense=1)
    spec = read_latent_decoder(config, attention, moe_layers, interleaved=False, default_eps=1e-5)
    limit = LimitSpec(None, config.number("swiglu_limit", 10.0), None)
    return replace(
        with_shared_choices(config, spec, attention, _sharing_layers(config)),
        expert=replace(spec.expert, function="clipped_silu", limits=(limit,)),
        residual=parts.MixedStreamsSpec(
            "mixed_streams",
            config.whole("hc_mult", 4),
            mixing=0,
            magnitude=config.number("hc_magnitude", 2.0),
            eps=config.number("hc_eps", 1e-6),
        ),
    )


def _sharing_layers(config: family.Config) -> tuple[int, ...]:
    """Reads the layers that share an indexer's choice; without a list, three of four after the second layer."""
    kinds = readers.read_kinds(config, "indexer_types", ("full", "shared"))
    if kinds:
        return readers.layers_of(kinds, "shared")
    return tuple(layer for layer in range(1, config.num_layers()) if (layer - 1) % 4)


_STREAMS = {"weights": "fn", "base": "base", "scale": "scale"}


HY_V4 = family.Family(
    model_type="hy_v4",
    short_names={"hy4-preview": "tencent/Hy4-preview"},
    unpublished="public code quotes sizes of tencent/Hy4-preview, but no public copy of its file was found",
    read_config=_read_config,
    dense_names={
        **deepseek_v32.DEEPSEEK_V32.dense_names,
        ".attention.gate": ("self_attn.linear_gate.weight", "self_attn.gate_proj.weight"),
        ".attention.sinks": ("self_attn.learnable_sink_param", "self_attn.sinks"),
        ".mlp.gate": ("mlp.gate_proj.weight", "mlp.linear_gate.weight"),
        ".shared.gate": ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.linear_gate.weight"),
        ".attention_streams.weights": ("hc_attn_layer.hc_pre.hc_fn", "hc_pre.hc_attn_layer.hc_fn", "attn_hc.fn"),
        ".attention_streams.base": ("hc_attn_layer.hc_pre.hc_base", "hc_pre.hc_attn_layer.hc_base", "attn_hc.base"),
        ".attention_streams.scale": ("hc_attn_layer.hc_pre.hc_scale", "hc_pre.hc_attn_layer.hc_scale", "attn_hc.scale"),
        ".mlp_streams.weights": ("hc_mlp_layer.hc_pre.hc_fn", "hc_pre.hc_mlp_layer.hc_fn", "ffn_hc.fn"),
        ".mlp_streams.base": ("hc_mlp_layer.hc_pre.hc_base", "hc_pre.hc_mlp_layer.hc_base", "ffn_hc.base"),
        ".mlp_streams.scale": ("hc_mlp_layer.hc_pre.hc_scale", "hc_pre.hc_mlp_layer.hc_scale", "ffn_hc.scale"),
        **{
            f"streams.{role}": (
                f"model.hc_head.hc_head_{name}",
                f"model.hc_pre.hc_head.hc_head_{name}",
                f"model.hc_head.hc_{name}",
            )
            for role, name in _STREAMS.items()
        },
    },
    expert_names=(family.FUSED_EXPERT_NAMES, family.EXPERT_NAMES),
    unused=(family.LeftOut("model.mtp_layers.*", "a multi-token-prediction layer, which plain decoding does not run"),),
    # What sinks begin with, the loss of a layer that is not run, and the precision of a product, float32 here.
    ignored_keys=frozenset(
        {"enable_lm_head_fp32", "learnable_sink_init", "mtp_loss_factor", "num_nextn_predict_layers"}
    ),
)
