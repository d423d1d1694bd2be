"""LFM2-8B-A1B: short convolutions between gates, dense first layers, sigmoid routing with a bias.

Source: transformers, models/lfm2_moe; LFM2 (Liquid AI, 2025).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary
from moe_pack.formats.parts import ShortConvSpec


def _read_config(config: family.Config) -> formats.ModelSpec:
    attention = readers.read_grouped_query(config, qk_norm="head")
    layers = readers.layers_without_attention(config, {"conv": True, "full_attention": False})
    conv = ShortConvSpec(
        kind="short_conv",
        layers=layers,
        channels=config.whole("hidden_size"),
        conv_kernel=config.whole("conv_L_cache", 3),
        bias=config.flag("conv_bias", False),
    )
    normalize = config.flag("norm_topk_prob", True)
    router = formats.RouterSpec(
        "sigmoid_topk",
        config.whole("num_experts"),
        config.whole("num_experts_per_tok", 4),
        normalize,
        bias=config.flag("use_expert_bias", True),
        scaling_factor=config.number("routed_scaling_factor", 1),
        least_sum=1e-6 if normalize else 0.0,
    )
    spec = readers.read_decoder(
        config,
        attention,
        rotary.read_rope(config, attention.head_dim, default_theta=1e6),
        router,
        config.whole("moe_intermediate_size"),
        moe_layers=tuple(range(config.num_layers()))[config.count("num_dense_layers", 2) :],
        norm=formats.NormSpec("rms", config.number("norm_eps", 1e-5)),
    )
    is_tied = config.flag(config.either("tie_embedding", "tie_word_embeddings"), True)
    return replace(spec, tied_head=is_tied, mixer=conv if layers else None)


_MLP = "model.layers.{i}.feed_forward"
LFM2_MOE = family.Family(
    model_type="lfm2_moe",
    short_names={"lfm2-8b-a1b": "LiquidAI/LFM2-8B-A1B"},
    published=(family.Published("lfm2-8b-a1b", "8.3", "1.5"),),
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        ".attention_norm": "operator_norm.weight",
        ".attention.o": "self_attn.out_proj.weight",
        ".attention.q_norm": "self_attn.q_layernorm.weight",
        ".attention.k_norm": "self_attn.k_layernorm.weight",
        ".mixer.in": "conv.in_proj.weight",
        ".mixer.in_bias": "conv.in_proj.bias",
        ".mixer.conv": "conv.conv.weight",
        ".mixer.conv_bias": "conv.conv.bias",
        ".mixer.o": "conv.out_proj.weight",
        ".mixer.o_bias": "conv.out_proj.bias",
        ".mlp_norm": "ffn_norm.weight",
        ".mlp.gate": "feed_forward.w1.weight",
        ".mlp.up": "feed_forward.w3.weight",
        ".mlp.down": "feed_forward.w2.weight",
        ".router": "feed_forward.gate.weight",
        ".router_bias": "feed_forward.expert_bias",
        "norm": "model.embedding_norm.weight",
    },
    expert_names=(
        family.ExpertNames(family.matrices(f"{_MLP}.experts.{{e}}.*.weight", "w1", "w3", "w2")),
        family.ExpertNames(family.matrices(f"{_MLP}.experts.*", "gate_up_proj", "gate_up_proj", "down_proj")),
    ),
    ignored_keys=frozenset({"theta"}),
)
