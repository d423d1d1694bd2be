"""gpt-oss-20b, 120b: attention sinks, a window on every second layer, a router with a bias, clamped and biased experts,
fused and interleaved in the source.

Source: transformers, models/gpt_oss; the model card (2508.10925).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families import family, readers, rotary


def _read_config(config: family.Config) -> formats.ModelSpec:
    attention, rope = _read_attention(config), _read_rope(config)
    config.only(swiglu_alpha=1.702, swiglu_limit=7.0)
    experts, chosen = config.whole("num_local_experts"), config.whole("num_experts_per_tok", 4)
    config.only(experts_per_token=chosen)  # the same by its first name; nobody reads it
    if (yarn := rope.scaling) is not None and yarn.kind == "yarn":
        config.only(initial_context_length=yarn.original_max_position_embeddings)  # likewise
    spec = readers.read_decoder(
        config,
        attention,
        rope,
        formats.RouterSpec("topk_softmax", experts, chosen, normalize=False, logit_bias=True),
        config.whole("intermediate_size"),
        norm=formats.NormSpec("rms", config.number("rms_norm_eps", 1e-5)),
        dense_size_key=None,
    )
    expert = formats.ExpertSpec(
        "clamped_swiglu",
        spec.expert.intermediate_size,
        formats.MATRICES,
        bias=formats.MATRICES,
        extra_floats=spec.hidden_size,
    )
    return replace(spec, expert=expert)


def _read_attention(config: family.Config) -> parts.GroupedQuerySpec:
    config.require("head_dim")  # without it transformers takes 64
    bias = parts.PROJECTIONS if config.flag("attention_bias", True) else ()
    kinds = readers.attention_kinds(config)
    windowed = readers.layers_of(kinds, "sliding_attention") if kinds else tuple(range(0, config.num_layers(), 2))
    attention = replace(readers.read_grouped_query(config, bias=bias), sinks=True)
    if not windowed:
        config.ignore("sliding_window")
        return attention
    config.require("sliding_window")  # without it transformers takes 128, with null it fails
    return replace(
        attention,
        sliding_window=config.whole("sliding_window"),
        windowed_layers=windowed if len(windowed) < config.num_layers() else None,
    )


def _read_rope(config: family.Config) -> parts.RopeSpec:
    if rotary.rope_group(config) is None:  # transformers takes a yarn of its own, whatever rope_theta says
        raise formats.CheckpointError(
            f"{config.place}: rope_parameters and rope_scaling are missing, expected one of them"
        )
    return rotary.read_rope(config, config.whole("head_dim"), default_theta=150000.0)


_EXPERTS = "model.layers.{i}.mlp.experts."
_BIASES = family.matrices(_EXPERTS + "*", "gate_up_proj_bias", "gate_up_proj_bias", "down_proj_bias")

# In files made of GGUF's, where each matrix of an expert is a tensor of its own.
_EACH = family.matrices(_EXPERTS + "{e}.*_proj", *formats.MATRICES)
_EACH_BIAS = {matrix: f"{name}.bias" for matrix, name in _EACH.items()}

GPT_OSS = family.Family(
    model_type="gpt_oss",
    short_names={"gpt-oss-20b": "openai/gpt-oss-20b", "gpt-oss-120b": "openai/gpt-oss-120b"},
    published=(
        family.Published("gpt-oss-20b", "20.91", "3.61", active_leaves_out=("embed",)),
        family.Published("gpt-oss-120b", "116.83", "5.13", active_leaves_out=("embed",)),
    ),
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        ".attention.sinks": "self_attn.sinks",
        ".router": "mlp.router.weight",
        ".router_logit_bias": "mlp.router.bias",
    },
    expert_names=(
        family.ExpertNames(
            family.matrices(_EXPERTS + "*", "gate_up_proj", "gate_up_proj", "down_proj"),
            biases=_BIASES,
            interleaved=True,
            transposed=True,
        ),
        family.ExpertNames(
            family.matrices(_EXPERTS + "*", "gate_up_proj_blocks", "gate_up_proj_blocks", "down_proj_blocks"),
            biases=_BIASES,
            interleaved=True,
            scales=family.matrices(_EXPERTS + "*", "gate_up_proj_scales", "gate_up_proj_scales", "down_proj_scales"),
        ),
        family.ExpertNames(
            {matrix: f"{name}.weight" for matrix, name in _EACH.items()}, biases=_EACH_BIAS, of_gguf=True
        ),
        family.ExpertNames(
            {matrix: f"{name}.blocks" for matrix, name in _EACH.items()},
            biases=_EACH_BIAS,
            scales={matrix: f"{name}.scales" for matrix, name in _EACH.items()},
            of_gguf=True,
        ),
    ),
)
