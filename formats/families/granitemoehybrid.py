"""Granite 4.0 H Tiny, Small: Mamba-2, attention in every tenth layer without positions, shared expert fused in the
source, multipliers.

Source: transformers, models/granitemoehybrid; Granite 4.0 (IBM, 2025).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, granitemoe, readers, rotary
from moe_pack.formats.parts import Mamba2Spec

MAMBA_LAYERS = {"linear_attention": True, "mamba": True, "full_attention": False, "attention": False}


def _read_mixer(config: family.Config) -> Mamba2Spec | None:
    layers = readers.layers_without_attention(config, MAMBA_LAYERS)
    width, num_heads = config.whole("mamba_expand", 2) * config.whole("hidden_size"), config.whole("mamba_n_heads", 128)
    head_dim = width // num_heads
    if not config.is_text("mamba_d_head", "auto"):
        head_dim = config.whole("mamba_d_head", head_dim)
    if head_dim * num_heads != width:
        raise formats.CheckpointError(
            f"{config.place}: {num_heads} heads of {head_dim} values are not mamba_expand times hidden_size, {width}"
        )
    mixer = Mamba2Spec(
        kind="mamba2",
        layers=layers,
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=config.whole("mamba_d_state", 256),
        num_groups=config.whole("mamba_n_groups", 1),
        conv_kernel=config.whole("mamba_d_conv", 4),
        conv_bias=config.flag("mamba_conv_bias", True),
        proj_bias=config.flag("mamba_proj_bias", False),
        time_step_min=0.0,
    )
    return mixer if layers else None


def _read_config(config: family.Config) -> formats.ModelSpec:
    if config.has("num_local_experts") and not config.count("num_local_experts"):
        raise readers.dense_model(config)
    attention = granitemoe.read_granite_attention(config)
    is_rotary = config.choice("position_embedding_type", ("nope", "rope")) == "rope"
    rope = rotary.read_rope(config, attention.head_dim)
    limits = config.unbounded("time_step_limit")
    if limits not in ((), (0.0, float("inf"))):
        raise formats.CheckpointError(
            f"{config.place}: time_step_limit is {list(limits)}; only [0.0, Infinity] is supported"
        )
    shared_expert = formats.SharedExpertSpec(config.whole("shared_intermediate_size"), gated=False)
    layers = readers.LayerAttention(attention, rope if is_rotary else None)
    return replace(granitemoe.read_granite(config, layers, shared_expert), mixer=_read_mixer(config))


MAMBA2_NAMES = {
    "in": "in_proj.weight",
    "in_bias": "in_proj.bias",
    "conv": "conv1d.weight",
    "conv_bias": "conv1d.bias",
    "a_log": "A_log",
    "dt_bias": "dt_bias",
    "skip": "D",
    "out_norm": "norm.weight",
    "o": "out_proj.weight",
    "o_bias": "out_proj.bias",
}
GRANITEMOEHYBRID = family.Family(
    model_type="granitemoehybrid",
    model_class="GraniteMoeHybridForCausalLM",
    short_names={
        "granite-4.0-h-tiny": "ibm-granite/granite-4.0-h-tiny",
        "granite-4.0-h-tiny-base": "ibm-granite/granite-4.0-h-tiny-base",
        "granite-4.0-h-small": "ibm-granite/granite-4.0-h-small",
        "granite-4.0-h-small-base": "ibm-granite/granite-4.0-h-small-base",
    },
    published=(family.Published("granite-4.0-h-tiny", "7", "1"),),
    read_config=_read_config,
    dense_names={
        **granitemoe.GRANITEMOE.dense_names,
        **{f".mixer.{role}": f"mamba.{name}" for role, name in MAMBA2_NAMES.items()},
        **granitemoe.SHARED_NAMES,
    },
    expert_names=granitemoe.GRANITEMOE.expert_names,
    ignored_keys=frozenset({"mamba_chunk_size", "rope_scaling"}),
)
