"""Hy4 preview: as `glm_moe_dsa`, with sinks and a gate for each value of the heads, residual streams that do not mix,
and limits of the routed experts' neurons.

Source: transformers, models/hy_v4; Tencent (2026).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families import family, readers, rotary
from moe_pack.formats.families.config import Config
from moe_pack.formats.families.deepseek_v32 import DEEPSEEK_V32
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


def _read_config(config: Config) -> formats.ModelSpec:
    config.only(**_ONLY)
    readers.read_kinds(config, "layer_types", ("indexed_attention", "deepseek_sparse_attention"))
    # Missing, transformers takes those of a smaller Hy4.
    config.require("routed_scaling_factor", "index_topk")
    eps = config.number("rms_norm_eps", 1e-5)
    config.whole("q_lora_rank")  # the indexer's queries come from the latent
    indexer = parts.IndexerSpec(
        config.whole("index_n_heads"),
        config.whole("index_head_dim"),
        config.whole("index_topk"),
        rotates_last=True,
        norm_eps=eps,
    )
    attention = replace(
        readers.read_latent(config, reads_head_dim=False, reads_kv_heads=False),
        indexer=indexer,
        gate=parts.OutputGateSpec("value", "sigmoid"),
        sinks=True,
    )
    rope = rotary.read_rope(config, attention.qk_rope_head_dim)
    expert_size = config.whole("moe_intermediate_size")
    spec = readers.read_decoder(
        config,
        attention,
        rope,
        readers.read_sigmoid_router(config, num_experts_per_tok=8, normalize=True),
        expert_size,
        moe_layers=readers.layers_by_kind(config, num_dense=1),
        shared_expert=formats.SharedExpertSpec(expert_size * config.whole("n_shared_experts", 1), gated=False),
        norm=formats.NormSpec("rms", eps),
    )
    shared = _sharing_layers(config)
    sharing = replace(attention, indexer=replace(indexer, shared=True))
    limit = LimitSpec(None, config.number("swiglu_limit", 10.0), None)
    return replace(
        spec,
        expert=replace(spec.expert, function="clipped_silu", limits=(limit,)),
        others=(parts.OtherAttentionSpec(shared, sharing, rope),) if shared else (),
        residual=parts.MixedStreamsSpec(
            "mixed_streams",
            config.whole("hc_mult", 4),
            mixing=0,
            magnitude=config.number("hc_magnitude", 2.0),
            eps=config.number("hc_eps", 1e-6),
        ),
    )


def _sharing_layers(config: Config) -> tuple[int, ...]:
    """Reads the layers that share an indexer's choice; without a list, three of four after the second layer."""
    kinds = readers.read_kinds(config, "indexer_types", ("full", "shared"))
    if not kinds:
        return tuple(layer for layer in range(1, config.num_layers()) if (layer - 1) % 4)
    if kinds[0] == "shared":
        raise formats.CheckpointError(
            f"{config.place}: layer 0 shares an indexer's choice, but there is no layer before it"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "shared")


_LAYER = "model.layers.{i}."
_STREAMS = {"weights": "fn", "base": "base", "scale": "scale"}


def _gate_names(module: str, published: str, other: str) -> tuple[str, str]:
    """Returns the names of a module's gate: published, and what `save_pretrained` or transformers' memory has."""
    return f"{_LAYER}{module}.{published}.weight", f"{_LAYER}{module}.{other}.weight"


HY_V4 = family.Family(
    model_type="hy_v4",
    short_names={"hy4-preview": "tencent/Hy4-preview"},
    unpublished="public code quotes sizes of tencent/Hy4-preview, but no public copy of its file was found",
    read_config=_read_config,
    dense_names={
        **DEEPSEEK_V32.dense_names,
        "layers.{i}.attention.gate": _gate_names("self_attn", "linear_gate", "gate_proj"),
        "layers.{i}.attention.sinks": (_LAYER + "self_attn.learnable_sink_param", _LAYER + "self_attn.sinks"),
        "layers.{i}.mlp.gate": _gate_names("mlp", "gate_proj", "linear_gate"),
        "layers.{i}.shared.gate": _gate_names("mlp.shared_experts", "gate_proj", "linear_gate"),
        **{
            f"layers.{{i}}.{half}_streams.{role}": (
                f"{_LAYER}hc_{module}_layer.hc_pre.hc_{name}",
                f"{_LAYER}hc_pre.hc_{module}_layer.hc_{name}",
                f"{_LAYER}{own}_hc.{name}",
            )
            for half, module, own in (("attention", "attn", "attn"), ("mlp", "mlp", "ffn"))
            for role, name in _STREAMS.items()
        },
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
