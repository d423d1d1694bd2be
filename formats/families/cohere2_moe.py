"""North Mini Code, Command A+ (text): attention and experts in parallel from one norm, layer norms without bias or rms
norms, softmax or sigmoids of the largest logits, the average of shared and routed experts, a window on three of four
layers, which alone rotate.

Dense layers before those with experts may rotate too.
Source: transformers, models/cohere2_moe and models/cohere2_vision.
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families import family, readers, rotary
from moe_pack.formats.families.multimodal import within


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.only(
        use_parallel_block=True,
        use_gated_activation=True,
        use_qk_norm=False,
        position_embedding_type="rope_gptj",
        rotary_pct=1.0,
    )
    config.require("head_dim")  # missing, transformers takes 128
    num_dense = config.count("first_k_dense_replace", 0)
    moe_layers = readers.layers_by_kind(config, num_dense)
    attention = _read_attention(config, num_dense, moe_layers)
    rope: parts.RopeSpec | None = rotary.read_rope(config, attention.head_dim, interleaved=True)
    if attention.rotated_layers == ():
        attention, rope = replace(attention, rotated_layers=None), None
    expert_size, num_shared = config.whole("intermediate_size"), config.count("num_shared_experts", 0)
    dense_size, combination = "prefix_dense_intermediate_size", "shared_expert_combination_strategy"
    spec = readers.read_decoder(
        config,
        attention,
        rope,
        _read_router(config),
        expert_size,
        moe_layers=moe_layers,
        dense_size_key=dense_size if config.has(dense_size) else "intermediate_size",
        shared_expert=formats.SharedExpertSpec(expert_size * num_shared, gated=False) if num_shared else None,
        norm=_read_norm(config),
    )
    is_averaged = config.choice(combination, ("average", "sum")) == "average" and num_shared > 0
    return replace(
        spec,
        tied_head=config.flag("tie_word_embeddings", True),
        logits_scaling=1 / _logit_scale(config),
        residual=parts.ParallelResidualSpec("parallel", averaged=is_averaged),
    )


def _logit_scale(config: family.Config) -> float:
    config.require("logit_scale")  # missing, transformers takes 0.0625
    scale = config.number("logit_scale")
    if not 1e-6 < scale < 1e6:
        raise formats.CheckpointError(f"{config.place}: logit_scale is {scale}, expected between 1e-6 and 1e6")
    return scale


def _read_norm(config: family.Config) -> formats.NormSpec:
    """Reads norms: rms if there is an eps of these, else layer norms without a bias."""
    eps = config.number("layer_norm_eps", 1e-5)
    if config.has("rms_norm_eps"):
        return formats.NormSpec("rms", config.number("rms_norm_eps"))
    config.ignore("rms_norm_eps")
    return formats.NormSpec("layer", eps, unbiased=True)


def _read_router(config: family.Config) -> formats.RouterSpec:
    """Reads a router that chooses the largest logits, and takes a softmax over these or their sigmoids."""
    is_softmax = config.choice("expert_selection_fn", ("softmax", "sigmoid")) == "softmax"
    normalize = config.flag("norm_topk_prob", True)  # a softmax is normal already
    return formats.RouterSpec(
        "topk_softmax" if is_softmax else "topk_sigmoid",
        config.whole(config.either("num_experts", "num_local_experts")),
        config.whole("num_experts_per_tok", 2),
        normalize=normalize and not is_softmax,
    )


def _read_attention(config: family.Config, num_dense: int, moe_layers: tuple[int, ...]) -> parts.GroupedQuerySpec:
    """Reads attention; if no layer rotates, `rotated_layers` is empty."""
    attention = readers.read_grouped_query(config, bias=readers.attention_bias(config), own_keys=True)
    num_layers, windowed = config.num_layers(), _windowed_layers(config, num_dense)
    window = config.whole("sliding_window")  # missing, transformers takes 4096, with null it fails
    dense_rotate = config.whole("prefix_dense_sliding_window_pattern", 1) == 1
    rotated = tuple(i for i in range(num_layers) if i in windowed or (dense_rotate and i not in moe_layers))
    return replace(
        attention,
        sliding_window=window if windowed else None,
        windowed_layers=windowed if 0 < len(windowed) < num_layers else None,
        rotated_layers=rotated if len(rotated) < num_layers else None,
    )


def _windowed_layers(config: family.Config, num_dense: int) -> tuple[int, ...]:
    """Reads the layers with a window: as `layer_types` says, else by steps, among the dense layers and after them."""
    kinds = readers.attention_kinds(config)
    if kinds:
        config.ignore("sliding_window_pattern")
        return readers.layers_of(kinds, "sliding_attention")
    before = config.whole("prefix_dense_sliding_window_pattern", 1)
    after = config.whole("sliding_window_pattern", 4)
    return tuple(
        layer
        for layer in range(config.num_layers())
        if ((layer + 1) % before if layer < num_dense else (layer - num_dense + 1) % after)
    )


COHERE2_MOE = family.Family(
    model_type="cohere2_moe",
    short_names={"north-mini-code-1.0": "CohereLabs/North-Mini-Code-1.0"},
    unpublished="public code quotes sizes of CohereLabs/North-Mini-Code-1.0, but no public copy has the whole file",
    read_config=_read_config,
    dense_names=readers.DENSE_NAMES,
)


def _read_text_config(config: family.Config) -> formats.ModelSpec:
    """Reads the text model inside a multimodal config, whose class in transformers does not scale logits."""
    config.only(logit_scale=1.0)
    return _read_config(config)


COHERE2_VISION = replace(
    within(
        replace(COHERE2_MOE, read_config=_read_text_config),
        "cohere2_vision",
        tied_head=True,
        ignored_keys=frozenset({"alignment_intermediate_size", "downsample_factor"}),
    ),
    short_names={"command-a-plus": "CohereLabs/command-a-plus-05-2026-bf16"},
    unpublished="no public copy of the file of CohereLabs/command-a-plus-05-2026-bf16 was found",
)
