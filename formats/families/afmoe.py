"""Trinity Mini, Nano, Large: norms also after attention and after experts, a gate for each value of the heads, a window
in most layers, which alone rotate, sigmoid routing with a bias, dense first layers, shared experts, a scaled embedding.

Source: transformers, models/afmoe.
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families import family, readers, rotary
from moe_pack.formats.families.config import Config


def _read_config(config: Config) -> formats.ModelSpec:
    config.only(score_func="sigmoid", route_norm=True)
    config.only(n_group=1, topk_group=1, num_expert_groups=1, num_limited_groups=1)
    attention = _read_attention(config)
    rope = rotary.read_rope(config, attention.head_dim)
    expert_size, num_layers = config.whole("moe_intermediate_size"), config.num_layers()
    hidden_size = config.whole("hidden_size")
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
        moe_layers=tuple(range(num_layers))[config.count("num_dense_layers", 1) :],
        shared_expert=formats.SharedExpertSpec(expert_size * config.whole("num_shared_experts", 2), gated=False),
        norm=formats.NormSpec("rms", config.number("rms_norm_eps", 1e-5)),
    )
    return replace(
        spec,
        embedding_multiplier=hidden_size**0.5 if config.flag("mup_enabled", False) else 1.0,
        residual=parts.NormedResidualSpec("normed", True, ("attention", "mlp"), apart=False, scaled=False),
    )


def _read_attention(config: Config) -> parts.GroupedQuerySpec:
    """Reads attention: layers with a window rotate, the others do not, and without a window no layer does."""
    config.require("head_dim")  # missing, transformers takes 128
    attention = readers.read_grouped_query(config, bias=readers.attention_bias(config), qk_norm="head", own_keys=True)
    attention = replace(attention, gate=parts.OutputGateSpec("value", "sigmoid"))
    num_layers, period = config.num_layers(), config.whole("global_attn_every_n_layers", 4)
    kinds = readers.read_kinds(config, "layer_types", ("full_attention", "sliding_attention"))
    if kinds:
        windowed = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    else:
        windowed = tuple(i for i in range(num_layers) if (i + 1) % period)
    window = config.whole("sliding_window", 1024)
    if not windowed:
        return attention
    among = None if len(windowed) == num_layers else windowed
    return replace(attention, sliding_window=window, windowed_layers=among, rotated_layers=among)


_LAYER = "model.layers.{i}."
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
        "layers.{i}.attention.gate": _LAYER + "self_attn.gate_proj.weight",
        "layers.{i}.attention_post_norm": _LAYER + "post_attention_layernorm.weight",
        "layers.{i}.mlp_norm": _LAYER + "pre_mlp_layernorm.weight",
        "layers.{i}.mlp_post_norm": _LAYER + "post_mlp_layernorm.weight",
        "layers.{i}.router": _LAYER + "mlp.router.gate.weight",
        "layers.{i}.router_bias": _LAYER + "mlp.expert_bias",
    },
    ignored_keys=frozenset({"load_balance_coeff", "use_grouped_mm"}),
)
