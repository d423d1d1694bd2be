"""DeepSeek-OCR 2 as transformers has it, in deepseek-community (text): as `deepseek`, with scaled weights and groups
where the config has them.

Source: transformers, models/deepseek_ocr2.
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, multimodal, readers, rotary
from moe_pack.formats.families.deepseek_v2 import read_router


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.only(mlp_bias=False)
    config.require("mlp_layer_types")  # the class has no default that works
    kinds = readers.read_kinds(config, "mlp_layer_types", ("dense", "sparse"))
    expert_size = config.whole("moe_intermediate_size")
    attention = readers.read_llama_attention(config, readers.attention_bias(config))
    return readers.read_decoder(
        config,
        attention,
        rotary.read_rope(config, attention.head_dim),
        read_router(config),
        expert_size,
        moe_layers=readers.layers_of(kinds, "sparse"),
        shared_expert=formats.SharedExpertSpec(expert_size * config.whole("n_shared_experts", 2), gated=False),
    )


_TEXT = family.Family(
    model_type="deepseek_ocr2_text",
    read_config=_read_config,
    dense_names=readers.DENSE_NAMES,
    ignored_keys=frozenset({"pretraining_tp"}),
)
DEEPSEEK_OCR2 = replace(
    multimodal.within(
        _TEXT,
        "deepseek_ocr2",
        moves=({}, {"model.": "model.language_model."}),
        parts={
            **multimodal.PARTS,
            **dict.fromkeys(("model.sam_model.*", "model.qwen2_model.*"), "the vision part"),
            "model.projector.*": "what maps vision to the text model",
            "model.view_sep*rator": "what separates views of a page",
        },
    ),
    short_names={"deepseek-ocr-2": "deepseek-community/DeepSeek-OCR-2"},
    unpublished="tests quote sizes of deepseek-community/DeepSeek-OCR-2, but no public copy has the whole file",
)
