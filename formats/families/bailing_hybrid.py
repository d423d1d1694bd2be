"""Ling-3.0-Flash: Kimi delta attention with bounded decays and gates of full rank, latent attention with a gate for
each head, sigmoid routing with a bias and groups, dense first layers, shared expert, neurons with limits in the last
layers.

Source: transformers, models/bailing_hybrid. The limits of its last layers' neurons are in the published config; its
authors' servers apply them (vLLM and sglang, bailing_moe_v3.py), transformers 5.23 does not read them.
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families import family, readers, rotary
from moe_pack.formats.parts.specs import LimitSpec

_BASE = 6e6  # of rotary positions
# Written in published configs, read by no code of transformers: other values would be another model.
_ONLY = {
    "embedding_dropout": 0.0,
    "gated_attention_proj_granularity_type": "head_wise",
    "group_norm_size": 1,
    "linear_silu": True,
    "moe_router_enable_expert_bias": True,
    "no_kda_lora": True,
    "num_kv_heads_for_linear_attn": 0,
    "output_dropout": 0.0,
    "rope_interleave": True,
    "router_dtype": "fp32",
    "scale_router_input": False,
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "up_proj_norm": False,
    "use_bias": False,
    "use_kda_lora": False,
    "use_mla_nope": False,
    "use_nGPT": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "value_norm": False,
}


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.derive("max_position_embeddings", config.whole(config.either("model_max_length", "max_position_embeddings")))
    config.only(**_ONLY)
    # The class ties nothing, whatever the key says, and has no latent of queries, unlike Ling-3.0-Tiny.
    config.only(tie_word_embeddings=False, q_lora_rank=None)
    names = {
        usual: config.either(own, usual)
        for own, usual in (
            ("num_experts", "num_local_experts"),
            ("num_experts_per_token", "num_experts_per_tok"),
            ("moe_renormalize", "norm_topk_prob"),
            ("num_expert_group", "n_group"),
            ("num_shared_experts", "n_shared_experts"),
        )
    }
    # Missing, transformers takes those of Ling-3.0-Flash.
    config.require(names["n_group"], "topk_group", "routed_scaling_factor", "num_key_value_heads")
    router = formats.RouterSpec(
        "sigmoid_topk",
        config.whole(names["num_local_experts"]),
        config.whole(names["num_experts_per_tok"]),
        config.flag(names["norm_topk_prob"], True),
        bias=True,
        n_group=config.whole(names["n_group"]),
        topk_group=config.whole("topk_group"),
        scaling_factor=config.number("routed_scaling_factor"),
    )
    expert_size = config.whole("moe_intermediate_size")
    config.only(moe_shared_expert_intermediate_size=expert_size)
    attention = readers.read_latent(config, reads_head_dim=False, may_lack_rank=True)
    mixer = _read_mixer(config)
    spec = readers.read_decoder(
        config,
        replace(attention, gate=parts.OutputGateSpec("head", "sigmoid")),
        _read_rope(config, mixer.head_dim),
        router,
        expert_size,
        moe_layers=readers.layers_by_kind(config, num_dense=config.count("first_k_dense_replace", 2)),
        shared_expert=formats.SharedExpertSpec(expert_size * config.whole(names["n_shared_experts"], 1), gated=False),
    )
    spec = replace(spec, mixer=mixer)
    limits = _read_limits(config, spec.moe_layers)
    return replace(spec, expert=replace(spec.expert, function="capped_silu", limits=limits)) if limits else spec


def _read_mixer(config: family.Config) -> parts.KimiDeltaSpec:
    """Reads Kimi delta attention, whose sizes transformers writes under keys of their own, where they win."""
    num_layers, period = config.num_layers(), config.whole("layer_group_size", 6)
    if config.has("layer_types"):
        layers = readers.layers_without_attention(config, {"linear_attention": True, "full_attention": False})
    else:
        layers = tuple(layer for layer in range(num_layers) if (layer + 1) % period)
    head_dim, kernel = config.whole("head_dim", 128), config.whole("short_conv_kernel_size", 4)
    bound = config.number("kda_lower_bound", -5.0)
    return parts.KimiDeltaSpec(
        "kimi_delta_attention",
        layers,
        num_heads=config.whole("linear_num_heads", config.whole("num_attention_heads")),
        head_dim=config.whole("linear_head_dim", head_dim),
        conv_kernel=config.whole("linear_conv_kernel_dim", kernel),
        full_rank=True,
        lower_bound=bound if config.flag("kda_safe_gate", True) else None,
    )


def _read_rope(config: family.Config, head_dim: int) -> parts.RopeSpec:
    """Reads the rotary positions of latent attention; a rotated share is one of the other layers' heads."""
    size, group = config.whole("qk_rope_head_dim"), rotary.rope_group(config)
    config.only(rotary_dim=size)
    if group is not None and group.has("rope_theta"):
        config.respell("rope_theta", _BASE, group.number("rope_theta"))  # transformers always writes its default too
    is_proportional = group is not None and group.is_text("rope_type", "proportional")
    has_share = any(place is not None and place.has("partial_rotary_factor") for place in (config, group))
    if not has_share or is_proportional:  # which has a share of the rotated part
        return rotary.read_rope(config, size, _BASE, interleaved=True)
    # Where positions are scaled, transformers rotates this share of the rotated part, which cannot run.
    rope = rotary.read_rope(config, head_dim, _BASE, interleaved=True, partial_rotary_factor=1.0, scalings=())
    if rope.rotary_dim != size:
        raise formats.CheckpointError(
            f"{config.place}: partial_rotary_factor rotates {rope.rotary_dim} of {head_dim} values, but "
            f"qk_rope_head_dim is {size}"
        )
    return rope


def _read_limits(config: family.Config, moe_layers: tuple[int, ...]) -> tuple[LimitSpec, ...]:
    """Reads the limits of the neurons of routed and of shared experts: a list each, in which 0 stands for none."""
    num_layers, lists = config.num_layers(), list[tuple[float | None, ...]]()
    for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        limits = config.limits(key) or (None,) * num_layers
        readers.check_count(config, key, limits)
        if dense := [layer for layer, limit in enumerate(limits) if limit is not None and layer not in moe_layers]:
            raise formats.CheckpointError(f"{config.place}: {key} limits layer {dense[0]}, which has no experts")
        lists.append(limits)
    return readers.limits_of(list(zip(*lists, strict=True)))


_CONVS = tuple(f".mixer.{name}_conv" for name in "qkv")
BAILING_HYBRID = family.Family(
    model_type="bailing_hybrid",
    short_names={"ling-3.0-flash": "inclusionAI/Ling-3.0-flash"},
    published=(family.Published("ling-3.0-flash", "124", "5.1", active_leaves_out=("embed",)),),
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        "embed": ("model.word_embeddings.weight", "model.embed_tokens.weight"),
        ".attention.q": ("attention.q_proj.weight", "self_attn.q_proj.weight"),
        ".attention.kv_a": ("attention.kv_a_proj_with_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight"),
        ".attention.kv_a_norm": ("attention.kv_a_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
        ".attention.kv_b": ("attention.kv_b_proj.weight", "self_attn.kv_b_proj.weight"),
        ".attention.gate": ("attention.g_proj.weight", "self_attn.g_proj.weight"),
        ".attention.o": ("attention.dense.weight", "self_attn.o_proj.weight"),
        ".mixer.{q,k,v}": ("attention.{}_proj.weight", "self_attn.{}_proj.weight"),
        ".mixer.b": ("attention.b_proj.weight", "self_attn.b_proj.weight"),
        **{
            role: (f"attention.{name}_conv1d.weight", family.Stored("self_attn.conv1d.weight", roles=_CONVS))
            for role, name in zip(_CONVS, "qkv", strict=True)
        },
        ".mixer.decay": ("attention.f_proj.weight", "self_attn.forget_gate.f_proj.weight"),
        ".mixer.a_log": ("attention.A_log", "self_attn.forget_gate.A_log"),
        ".mixer.dt_bias": ("attention.dt_bias", "self_attn.forget_gate.dt_bias"),
        ".mixer.gate": ("attention.g_proj.weight", "self_attn.g_proj.weight"),
        ".mixer.out_norm": ("attention.o_norm.weight", "self_attn.o_norm.weight"),
        ".mixer.o": ("attention.o_proj.weight", "attention.dense.weight", "self_attn.o_proj.weight"),
        ".router_bias": ("mlp.gate.expert_bias", "mlp.gate.e_score_correction_bias"),
    },
    unused=(readers.PREDICTION_LAYER,),
    ignored_keys=family.keys(
        """
        max_window_layers mtp_loss_scaling_factor mtp_use_kda num_mtp_layers num_nextn_predict_layers pretraining_tp
        seq_aux
        """
    ),
)
