"""ERNIE 4.5 VL 28B-A3B, 424B-A47B (text): as `ernie4_5_moe`, without the experts for images.

A layer has two sets of experts, each with its own router: one for tokens of text, one for those of images and videos. A
text uses the first alone, and is then ERNIE 4.5. A position has three numbers, which differ only in images. Baidu's
checkpoints have one flat config, of another type, in which pairs of numbers are for text and for images.
Source: transformers, models/ernie4_5_vl_moe; Baidu (2025).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import ernie4_5_moe, family, multimodal, readers


def _pair(config: family.Config, key: str) -> tuple[int, int]:
    """Reads a list of two whole numbers above 0: for text, and for images."""
    found = config.counts(key)
    if len(found) != 2 or 0 in found:
        raise formats.CheckpointError(f"{config.place}: {key} is {list(found)}, expected two whole numbers above 0")
    return found[0], found[1]


def _read_text(config: family.Config) -> formats.ModelSpec:
    return ernie4_5_moe.read_ernie(
        config,
        config.whole(config.either("moe_num_experts", "num_experts")),
        _pair(config, "moe_intermediate_size")[0],
        readers.layers_by_kind(config, num_dense=1),
        has_images=True,
    )


def _read_flat(config: family.Config) -> formats.ModelSpec:
    config.only(rope_3d=True, use_rmsnorm=True, moe_layer_interval=1)
    num_layers, (first, of_images) = config.num_layers(), _pair(config, "moe_layer_start_index")
    if first != of_images or min(_pair(config, "moe_layer_end_index")) < num_layers - 1:
        raise formats.CheckpointError(
            f"{config.place}: moe_layer_start_index and moe_layer_end_index give text and images experts in different "
            "layers, or leave out the last layer; that is not supported"
        )
    config.require("moe_k", "moe_num_shared_experts", "rms_norm_eps", "rope_theta", "tie_word_embeddings")
    experts, sizes = _pair(config, "moe_num_experts"), _pair(config, "moe_intermediate_size")
    return ernie4_5_moe.read_ernie(config, experts[0], sizes[0], tuple(range(first, num_layers)), has_images=True)


_OF_IMAGES = "experts for tokens of images, which a text model does not run"
_PARTS = {**multimodal.PARTS, "model.resampler_model.*": "what maps vision to the text model"}
_TEXT = family.Family(
    model_type="ernie4_5_vl_moe_text",
    read_config=_read_text,
    dense_names={
        **ernie4_5_moe.ERNIE4_5_MOE.dense_names,
        ".router": (family.Stored("mlp.gate.weight", transposed=True), "mlp.text_moe.gate.weight"),
        ".router_bias": (
            family.Stored("mlp.moe_statics.e_score_correction_bias", parts=2),
            "mlp.text_moe.gate.moe_statics.e_score_correction_bias",
        ),
    },
    expert_names=(
        family.EXPERT_NAMES,
        family.ExpertNames(
            family.matrices("model.layers.{i}.mlp.text_moe.experts.*", "gate_up_proj", "gate_up_proj", "down_proj")
        ),
    ),
    dropped=(
        family.LeftOut("model.layers.*.mlp.experts.{e}.*_proj.weight", _OF_IMAGES),
        family.LeftOut("model.layers.*.mlp.gate.weight_1", _OF_IMAGES),
        family.LeftOut("model.layers.*.mlp.vision_moe.*", _OF_IMAGES),
    ),
    ignored_keys=frozenset({"_attn_implementation"}),
)
ERNIE4_5_VL_MOE = replace(
    multimodal.within(
        _TEXT, "ernie4_5_vl_moe", parts=_PARTS, moves=({}, {"model.": "model.language_model."}), tied_head=True
    ),
    unpublished="its models are published with a flat config, ernie4_5_moe_vl",
)
ERNIE4_5_MOE_VL = replace(
    _TEXT,
    model_type="ernie4_5_moe_vl",
    short_names={
        "ernie-4.5-vl-28b-a3b": "baidu/ERNIE-4.5-VL-28B-A3B-PT",
        "ernie-4.5-vl-28b-a3b-base": "baidu/ERNIE-4.5-VL-28B-A3B-Base-PT",
        "ernie-4.5-vl-28b-a3b-thinking": "baidu/ERNIE-4.5-VL-28B-A3B-Thinking",
        "ernie-4.5-vl-424b-a47b": "baidu/ERNIE-4.5-VL-424B-A47B-PT",
    },
    published=(family.Published("ernie-4.5-vl-28b-a3b-base", "21", "3"),),
    read_config=_read_flat,
    dropped=(
        *_TEXT.dropped,
        *(family.LeftOut(pattern, f"{part}, which a text model does not run") for pattern, part in _PARTS.items()),
    ),
    ignored_keys=family.keys(
        """
        im_patch_id image_end_token_id image_start_token_id moe_capacity moe_multimodal_dispatch_use_allgather
        pixel_hidden_size spatial_conv_size temporal_conv_size video_end_token_id video_start_token_id vision_config
        """
    ),
)
