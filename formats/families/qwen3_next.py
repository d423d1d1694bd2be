"""Qwen3-Next-80B-A3B, Qwen3-Coder-Next: Gated DeltaNet in three layers of four, attention with gates in the others, a
quarter of each head rotated, zero-centered norms, shared expert behind a sigmoid.

Source: transformers, models/qwen3_next; Gated Delta Networks (2412.06464).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary
from moe_pack.formats.families.config import Config
from moe_pack.formats.parts import GatedDeltaSpec


def linear_layers(config: Config) -> tuple[int, ...]:
    """Reads the layers without attention: `layer_types`, or all but every `full_attention_interval`-th."""
    interval = config.whole("full_attention_interval", 4)
    if config.has("layer_types"):
        return readers.layers_without_attention(config, {"linear_attention": True, "full_attention": False})
    return tuple(i for i in range(config.num_layers()) if (i + 1) % interval)


def read_gated_delta(config: Config, *, interleaved: bool) -> GatedDeltaSpec:
    """Reads Gated DeltaNet, and in which layers it is."""
    return GatedDeltaSpec(
        kind="gated_delta_net",
        layers=linear_layers(config),
        num_key_heads=config.whole("linear_num_key_heads", 16),
        num_value_heads=config.whole("linear_num_value_heads", 32),
        key_head_dim=config.whole("linear_key_head_dim", 128),
        value_head_dim=config.whole("linear_value_head_dim", 128),
        conv_kernel=config.whole("linear_conv_kernel_dim", 4),
        interleaved=interleaved,
    )


def _read_config(config: Config) -> formats.ModelSpec:
    config.only(use_sliding_window=False)  # in published configs; no code of transformers reads it
    config.require("head_dim")  # missing, transformers takes 256
    attention = readers.read_grouped_query(config, bias=readers.attention_bias(config), qk_norm="head", gated=True)
    return replace(
        readers.read_decoder(
            config,
            attention,
            rotary.read_rope(config, attention.head_dim, partial_rotary_factor=0.25),
            formats.RouterSpec(
                "softmax_topk",
                config.whole(config.either("num_experts", "num_local_experts")),
                config.whole("num_experts_per_tok"),
                config.flag("norm_topk_prob", True),
            ),
            config.whole("moe_intermediate_size"),
            moe_layers=readers.layers_by_step(config),
            shared_expert=formats.SharedExpertSpec(config.whole("shared_expert_intermediate_size"), gated=True),
            norm=formats.NormSpec("rms", config.number("rms_norm_eps", 1e-6), zero_centered=True),
        ),
        mixer=read_gated_delta(config, interleaved=True),
    )


GATED_DELTA_NAMES = {
    "layers.{i}.mixer.conv": "model.layers.{i}.linear_attn.conv1d.weight",
    "layers.{i}.mixer.a_log": "model.layers.{i}.linear_attn.A_log",
    "layers.{i}.mixer.dt_bias": "model.layers.{i}.linear_attn.dt_bias",
    "layers.{i}.mixer.out_norm": "model.layers.{i}.linear_attn.norm.weight",
    "layers.{i}.mixer.o": "model.layers.{i}.linear_attn.out_proj.weight",
    "layers.{i}.shared.gate": "model.layers.{i}.mlp.shared_expert.gate_proj.weight",
    "layers.{i}.shared.up": "model.layers.{i}.mlp.shared_expert.up_proj.weight",
    "layers.{i}.shared.down": "model.layers.{i}.mlp.shared_expert.down_proj.weight",
    "layers.{i}.shared_router": "model.layers.{i}.mlp.shared_expert_gate.weight",
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
        "layers.{i}.mixer.qkvz": "model.layers.{i}.linear_attn.in_proj_qkvz.weight",
        "layers.{i}.mixer.ba": "model.layers.{i}.linear_attn.in_proj_ba.weight",
    },
    unused=(MTP_LAYER,),
    prediction=(MTP_NAMES,),
)
