"""Qwen3-Next-80B-A3B, Qwen3-Coder-Next: Gated DeltaNet in three layers of four, attention with gates in the others, a
quarter of each head rotated, zero-centered norms, shared expert behind a sigmoid.

Source: transformers, models/qwen3_next; Gated Delta Networks (2412.06464).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families import family, readers, rotary


def read_gated_delta(
    config: family.Config, *, interleaved: bool, attending: tuple[str, ...] = ("full_attention",)
) -> parts.GatedDeltaSpec:
    """Reads Gated DeltaNet, in the layers of `layer_types`, else in all but every `full_attention_interval`-th.

    Args:    attending: the kinds of layers with attention.
    """
    interval = config.whole("full_attention_interval", 4)
    layers = tuple(i for i in range(config.num_layers()) if (i + 1) % interval)
    if config.has("layer_types"):
        kinds = {"linear_attention": True} | dict.fromkeys(attending, False)
        layers = readers.layers_without_attention(config, kinds)
    return parts.GatedDeltaSpec(
        kind="gated_delta_net",
        layers=layers,
        num_key_heads=config.whole("linear_num_key_heads", 16),
        num_value_heads=config.whole("linear_num_value_heads", 32),
        key_head_dim=config.whole("linear_key_head_dim", 128),
        value_head_dim=config.whole("linear_value_head_dim", 128),
        conv_kernel=config.whole("linear_conv_kernel_dim", 4),
        interleaved=interleaved,
    )


def read_gated(
    config: family.Config,
    router: formats.RouterSpec,
    *,
    moe_layers: tuple[int, ...] | None = None,
    dense_size_key: str | None = None,
    ignored: frozenset[str] = frozenset(),
    indexer: parts.BlockIndexerSpec | None = None,
) -> formats.ModelSpec:
    """Reads a decoder as of Qwen3-Next, but for its mixer: attention with gates, and a shared expert with one.

    Args:    ignored: keys of `rope_parameters` that change nothing.
    """
    config.require("head_dim")  # missing, transformers takes 256
    attention = readers.read_grouped_query(config, bias=readers.attention_bias(config), qk_norm="head", gated=True)
    attention = replace(attention, indexer=indexer)
    return readers.read_decoder(
        config,
        attention,
        rotary.read_rope(config, attention.head_dim, partial_rotary_factor=0.25, ignored=ignored),
        router,
        config.whole("moe_intermediate_size"),
        moe_layers=moe_layers,
        dense_size_key=dense_size_key,
        shared_expert=formats.SharedExpertSpec(config.whole("shared_expert_intermediate_size"), gated=True),
        norm=formats.NormSpec("rms", config.number("rms_norm_eps", 1e-6), zero_centered=True),
    )


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.only(use_sliding_window=False)  # in published configs; no code of transformers reads it
    experts = config.whole(config.either("num_experts", "num_local_experts"))
    chosen, normalize = config.whole("num_experts_per_tok"), config.flag("norm_topk_prob", True)
    router, moe_layers = formats.RouterSpec("softmax_topk", experts, chosen, normalize), readers.layers_by_step(config)
    spec = read_gated(config, router, moe_layers=moe_layers, dense_size_key="intermediate_size")
    return replace(spec, mixer=read_gated_delta(config, interleaved=True))


GATED_DELTA_NAMES = {
    ".mixer.conv": "linear_attn.conv1d.weight",
    ".mixer.a_log": "linear_attn.A_log",
    ".mixer.dt_bias": "linear_attn.dt_bias",
    ".mixer.out_norm": "linear_attn.norm.weight",
    ".mixer.o": "linear_attn.out_proj.weight",
    ".shared.{gate,up,down}": "mlp.shared_expert.{}_proj.weight",
    ".shared_router": "mlp.shared_expert_gate.weight",
}
MTP_LAYER = family.LeftOut("mtp.*", "a multi-token-prediction layer, which plain decoding does not run")
# A layer with attention, whatever the layer before it has; embedding and head are the model's own.
MTP_NAMES = family.PredictionNames(
    stack="model.layers.{i}.",
    layer="mtp.layers.0.",
    project="mtp.fc.weight",
    embed_norm="mtp.pre_fc_norm_embedding.weight",
    hidden_norm="mtp.pre_fc_norm_hidden.weight",
    norm="mtp.norm.weight",
)

QWEN3_NEXT = family.Family(
    model_type="qwen3_next",
    short_names={
        "qwen3-next-80b-a3b": "Qwen/Qwen3-Next-80B-A3B-Instruct",
        "qwen3-next-80b-a3b-instruct": "Qwen/Qwen3-Next-80B-A3B-Instruct",
        "qwen3-next-80b-a3b-thinking": "Qwen/Qwen3-Next-80B-A3B-Thinking",
        "qwen3-coder-next": "Qwen/Qwen3-Coder-Next",
    },
    published=(family.Published("qwen3-next-80b-a3b-instruct", "79.67", "3.87"),),
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        **GATED_DELTA_NAMES,
        ".mixer.qkvz": "linear_attn.in_proj_qkvz.weight",
        ".mixer.ba": "linear_attn.in_proj_ba.weight",
    },
    unused=(MTP_LAYER,),
    prediction=(MTP_NAMES,),
)
