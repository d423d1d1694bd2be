"""Step-3.5-Flash, Step-3.7-Flash (text): a window in three layers of four, which have more heads and rotate whole
heads, the others half of each; a gate for each head, q and k norms a head, zero-centered norms, SiLU capped in the last
layers, sigmoid routing with a bias, shared expert, dense first layers.

Source: transformers, models/step3p7; StepFun (2026).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families import family, multimodal, readers, rotary
from moe_pack.formats.parts.specs import LimitSpec

_T = TypeVar("_T")


def _read_config(config: family.Config) -> formats.ModelSpec:
    predicting = config.count(config.either("num_nextn_predict_layers", "num_mtp_layers"), 0)
    kinds = _of_layers(config, "layer_types", config.texts("layer_types"), predicting)
    kinds = kinds or ("full_attention",) * config.num_layers()
    if unknown := set(kinds) - set(rotary.ATTENTION_KINDS):
        known = ", ".join(rotary.ATTENTION_KINDS)
        raise formats.CheckpointError(f"{config.place}: layer_types has {sorted(unknown)}; supported: {known}")
    attention, moe_layers = _read_attention(config, kinds, predicting), _moe_layers(config, predicting)
    _check_published_keys(config)
    router = formats.RouterSpec(
        "sigmoid_topk",
        config.whole(config.either("n_routed_experts", "num_local_experts", "moe_num_experts")),
        config.whole(config.either("num_experts_per_tok", "moe_top_k"), 8),
        normalize=True,
        bias=True,
        scaling_factor=config.number("moe_router_scaling_factor", 1),
    )
    shared_size = config.whole(config.either("share_expert_dim", "share_expert_dims"))
    spec = readers.read_decoder(
        config,
        attention.attention,
        attention.rope,
        router,
        config.whole("moe_intermediate_size"),
        moe_layers=moe_layers,
        shared_expert=formats.SharedExpertSpec(shared_size, gated=False),
        norm=formats.NormSpec("rms", config.number("rms_norm_eps", 1e-5), zero_centered=True),
        others=attention.others,
    )
    limits = _read_limits(config, moe_layers, predicting)
    return replace(spec, expert=replace(spec.expert, function="capped_silu", limits=limits)) if limits else spec


def _of_layers(config: family.Config, key: str, values: Sequence[_T], predicting: int) -> tuple[_T, ...]:
    """Returns the values of decoder layers; published lists go on with those of layers that predict further tokens."""
    if values:
        readers.check_count(config, key, values, predicting)
    return tuple(values[: config.num_layers()])


def _moe_layers(config: family.Config, predicting: int) -> tuple[int, ...]:
    """Reads the layers with experts: as `mlp_layer_types` or `moe_layers_enum` says, else all but the first three."""
    kinds, num_layers = config.texts("mlp_layer_types"), config.num_layers()
    if kinds:
        config.ignore("moe_layers_enum")
        kinds = _of_layers(config, "mlp_layer_types", kinds, predicting)
        if unknown := set(kinds) - {"dense", "sparse"}:
            raise formats.CheckpointError(
                f"{config.place}: mlp_layer_types has {sorted(unknown)}; supported: dense, sparse"
            )
        return readers.layers_of(kinds, "sparse")
    if not config.has("moe_layers_enum"):
        return tuple(range(3, num_layers))
    listed = config.text("moe_layers_enum")
    try:
        layers = {int(layer) for layer in listed.split(",") if layer.strip()}
    except ValueError:
        raise formats.CheckpointError(
            f"{config.place}: moe_layers_enum is {listed!r}, expected numbers with commas between them"
        ) from None
    return tuple(layer for layer in range(num_layers) if layer in layers)


def _read_attention(config: family.Config, kinds: tuple[str, ...], predicting: int) -> readers.LayerAttention:
    config.require("head_dim")  # missing, transformers takes 128
    num_kv_heads = config.whole(config.either("num_key_value_heads", "num_attention_groups"))
    own = parts.GroupedQuerySpec(
        kind="grouped_query",
        num_heads=config.whole("num_attention_heads"),
        num_kv_heads=num_kv_heads,
        head_dim=config.whole("head_dim"),
        sliding_window=None,
        scale=config.whole("head_dim") ** -0.5,
        bias=readers.attention_bias(config),
        qk_norm="head",
        gate=parts.OutputGateSpec("head", "sigmoid"),
    )
    config.only(query_pre_attn_scalar=own.head_dim)
    config.ignore("sliding_window")  # without layers that have it
    window = config.whole("sliding_window") if "sliding_attention" in kinds else None
    windowed = replace(own, num_heads=_sliding_heads(config, own, kinds), sliding_window=window)
    ropes = _read_ropes(config, own.head_dim, kinds, predicting)
    return readers.LayerAttention.of((windowed if kind == "sliding_attention" else own, ropes[kind]) for kind in kinds)


def _sliding_heads(config: family.Config, own: parts.GroupedQuerySpec, kinds: tuple[str, ...]) -> int:
    """Reads the number of heads of layers with a window."""
    heads, other = own.num_heads, config.group("attention_other_setting")
    if other is not None:
        heads = other.whole("num_attention_heads", heads)
        other.only(
            attention_type="sliding_attention",
            num_attention_groups=own.num_kv_heads,
            head_dim=own.head_dim,
            true_head_dim=own.head_dim,
        )
        other.refuse_unread()
    heads = config.whole("num_sliding_attention_heads", heads)
    if config.has("per_layer_config"):  # transformers writes it, for layers that differ from the others
        found = {key.lstrip("0") or "0": value for key, value in config.raw("per_layer_config").items()}
        differing = [i for i, kind in enumerate(kinds) if kind == "sliding_attention" and heads != own.num_heads]
        if found != {str(layer): {"num_attention_heads": heads} for layer in differing}:
            raise formats.CheckpointError(
                f"{config.place}: per_layer_config must give layers with a window, and no others, {heads} heads"
            )
    return heads


def _read_ropes(
    config: family.Config, head_dim: int, kinds: tuple[str, ...], predicting: int
) -> dict[str, parts.RopeSpec]:
    """Reads the rotary positions of each kind: an object for each, or lists with a base and a share for each layer."""
    usual = {kind: parts.RopeSpec(1e4, head_dim, interleaved=False, scaling=None) for kind in kinds}
    if config.has("rope_parameters"):
        return rotary.read_rope_by_kind(config, head_dim, usual, partial_rotary_factor=1.0)
    objects: dict[str, dict[str, Any]] = {}
    thetas = _each(config, "rope_theta", 1e4, predicting)
    shares = _of_layers(config, "partial_rotary_factors", config.numbers("partial_rotary_factors"), predicting)
    shares = shares or (1.0,) * len(kinds)
    for kind in usual:
        values = {(thetas[layer], shares[layer]) for layer in range(len(kinds)) if kinds[layer] == kind}
        if len(values) > 1:
            raise formats.CheckpointError(
                f"{config.place}: layers of {kind} differ in rope_theta or partial_rotary_factors"
            )
        ((theta, share),) = values
        objects[kind] = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share}
    scaling = config.raw("rope_scaling")
    if "full_attention" in objects:  # layers with a window are never scaled
        objects["full_attention"] |= scaling
    written = {"max_position_embeddings": config.whole("max_position_embeddings"), "rope_parameters": objects}
    return rotary.read_rope_by_kind(family.Config(written, config.place), head_dim, usual, partial_rotary_factor=1.0)


def _each(config: family.Config, key: str, default: float, predicting: int) -> tuple[float, ...]:
    """Reads a number for each layer, which may also be one number for all."""
    if config.is_list(key):
        return _of_layers(config, key, config.numbers(key), predicting)
    return (config.number(key, default),) * config.num_layers()


def _read_limits(config: family.Config, moe_layers: tuple[int, ...], predicting: int) -> tuple[LimitSpec, ...]:
    """Reads the limits of neurons; a dense expert's are those of the shared expert of its layer."""
    num_layers = config.num_layers()
    routed, unrouted = (
        _of_layers(config, key, config.limits(key), predicting) or (None,) * num_layers
        for key in ("swiglu_limits", "swiglu_limits_shared")
    )
    pairs = [(routed[i] if i in moe_layers else None, unrouted[i]) for i in range(num_layers)]
    return readers.limits_of(pairs)


def _check_published_keys(config: family.Config) -> None:
    """Refuses other values of keys that published configs have and transformers does not read."""
    config.only(
        mlp_bias=False,
        gating=True,
        use_bidirectional_attention=False,
        use_moe=True,
        moe_layer_offset=0,
        moe_every_n_layer=1,
        norm_expert_weight=True,
        moe_router_activation="sigmoid",
        use_moe_router_bias=True,
        use_head_wise_attn_gate=True,
        use_qk_norm=True,
        att_impl_type="GQA",
        zero_centered=True,
        sink=False,
        use_rope_layers=[],
        yarn_only_types=["full_attention"],
    )
    config.ignore("max_seq_len", "need_fp32_gate")


_LAYER = "model.layers.{i}."
STEP3P5 = family.Family(
    model_type="step3p5",
    short_names={"step-3.5-flash": "stepfun-ai/Step-3.5-Flash"},
    unpublished="no public copy of the file of stepfun-ai/Step-3.5-Flash was found; step3p7 has its text model's sizes",
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        ".attention.gate": "self_attn.g_proj.weight",
        ".router": ("moe.gate.weight", "mlp.gate.weight"),
        ".router_bias": ("moe.router_bias", "mlp.gate.e_score_correction_bias"),
        ".shared.{gate,up,down}": ("share_expert.{}_proj.weight", "mlp.shared_experts.{}_proj.weight"),
    },
    expert_names=(
        family.ExpertNames(family.matrices(_LAYER + "moe.*.weight", "gate_proj", "up_proj", "down_proj")),
        family.FUSED_EXPERT_NAMES,
    ),
    unused=tuple(replace(readers.PREDICTION_LAYER, after=after) for after in range(3)),
    ignored_keys=frozenset({"mtp_layer_types", "mtp_mlp_layer_types"}),
)
# Published checkpoints have the names of the text model alone.
STEP3P7 = replace(
    multimodal.within(
        STEP3P5,
        "step3p7",
        parts={**multimodal.PARTS, "vit_large_projector.*": "what maps vision to the text model"},
        moves=({}, {"model.": "model.language_model."}),
        ignored_keys=frozenset({"projector_bias", "understand_projector_stride"}),
    ),
    short_names={"step-3.7-flash": "stepfun-ai/Step-3.7-Flash"},
    published=(family.Published("step-3.7-flash", "196", "11", cached="92.16", leaves_out=("embed", "head")),),
)
