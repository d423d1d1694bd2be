"""Trinity Mini, Nano, Large: norms also after attention and after experts, a gate for each value of the heads, a window
in most layers, which alone rotate, sigmoid routing with a bias, dense first layers, shared experts, a scaled embedding.

Source: transformers, models/afmoe.
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families import family, readers, rotary


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.only(
        score_func="sigmoid", route_norm=True, n_group=1, topk_group=1, num_expert_groups=1, num_limited_groups=1
    )
    attention = _read_attention(config)
    rope = rotary.read_rope(config, attention.head_dim)
    expert_size = config.whole("moe_intermediate_size")
    spec = readers.read_decoder(
        config,
        attention,
        rope if attention.sliding_window is not None else None,
        formats.RouterSpec(
            "sigmoid_topk",
            config.whole("num_experts", 64),
            config.whole("num_experts_per_tok", 6),
            normalize=True,
            bias=True,
            scaling_factor=config.number("route_scale", 1.0),
        ),
        expert_size,
        moe_layers=tuple(range(config.num_layers()))[config.count("num_dense_layers", 1) :],
        shared_expert=formats.SharedExpertSpec(expert_size * config.whole("num_shared_experts", 2), gated=False),
        norm=formats.NormSpec("rms", config.number("rms_norm_eps", 1e-5)),
    )
    return replace(
        spec,
        embedding_multiplier=config.whole("hidden_size") ** 0.5 if config.flag("mup_enabled", False) else 1.0,
        residual=parts.NormedResidualSpec("normed", True, ("attention", "mlp"), apart=False, scaled=False),
    )


def _read_attention(config: family.Config) -> parts.GroupedQuerySpec:
    """Reads attention: layers with a window rotate, the others do not, and without a window no layer does."""
    config.require("head_dim")  # missing, transformers takes 128
    attention = readers.read_grouped_query(config, bias=readers.attention_bias(config), qk_norm="head", own_keys=True)
    attention = replace(attention, gate=parts.OutputGateSpec("value", "sigmoid"))
    period = config.whole("global_attn_every_n_layers", 4)
    kinds = readers.attention_kinds(config)
    windowed = tuple(
        i for i in range(config.num_layers()) if (kinds[i] == "sliding_attention" if kinds else (i + 1) % period)
    )
    return readers.with_window(config, attention, config.whole("sliding_window", 1024), windowed)


AFMOE = family.Family(
    model_type="afmoe",
    short_names={
        "trinity-mini": "arcee-ai/Trinity-Mini",
        "trinity-nano": "arcee-ai/Trinity-Nano-Preview",
        "trinity-large": "arcee-ai/Trinity-Large-Preview",
    },
    published=(family.Published("trinity-mini", "26", "3"),),
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        ".attention.gate": "self_attn.gate_proj.weight",
        ".attention_post_norm": "post_attention_layernorm.weight",
        ".mlp_norm": "pre_mlp_layernorm.weight",
        ".mlp_post_norm": "post_mlp_layernorm.weight",
        ".router": "mlp.router.gate.weight",
        ".router_bias": "mlp.expert_bias",
    },
    ignored_keys=frozenset({"load_balance_coeff", "use_grouped_mm"}),
)
