"""The table of families: the known `model_type`s, and the step from a `config.json` to a `ModelSpec`.

A family is data, one file a `model_type`. Code outside this folder knows specs and roles, but never families.
"""

from collections.abc import Mapping
from typing import Any

from moe_pack.formats import CheckpointError, ModelSpec
from moe_pack.formats.commands import did_you_mean
from moe_pack.formats.families.afmoe import AFMOE
from moe_pack.formats.families.aria import ARIA
from moe_pack.formats.families.axk1 import AXK1
from moe_pack.formats.families.axk2 import AXK2
from moe_pack.formats.families.bailing_hybrid import BAILING_HYBRID
from moe_pack.formats.families.beam import BEAM
from moe_pack.formats.families.cohere2_moe import COHERE2_MOE, COHERE2_VISION
from moe_pack.formats.families.config import Config
from moe_pack.formats.families.dbrx import DBRX
from moe_pack.formats.families.deepseek import DEEPSEEK
from moe_pack.formats.families.deepseek_ocr2 import DEEPSEEK_OCR2
from moe_pack.formats.families.deepseek_v2 import DEEPSEEK_V2
from moe_pack.formats.families.deepseek_v3 import DEEPSEEK_V3, KIMI_K2, KIMI_K25
from moe_pack.formats.families.deepseek_v4 import DEEPSEEK_V4
from moe_pack.formats.families.deepseek_v32 import DEEPSEEK_V32
from moe_pack.formats.families.dots1 import DOTS1
from moe_pack.formats.families.ernie4_5_moe import ERNIE4_5_MOE
from moe_pack.formats.families.ernie4_5_vl_moe import ERNIE4_5_MOE_VL, ERNIE4_5_VL_MOE
from moe_pack.formats.families.exaone_moe import EXAONE_MOE
from moe_pack.formats.families.family import Family, Quantization
from moe_pack.formats.families.flex_olmo import FLEX_OLMO
from moe_pack.formats.families.flint import FLINT
from moe_pack.formats.families.gemma4 import GEMMA4, GEMMA4_TEXT
from moe_pack.formats.families.glm4_moe import GLM4_MOE
from moe_pack.formats.families.glm4_moe_lite import GLM4_MOE_LITE
from moe_pack.formats.families.glm4v_moe import GLM4V_MOE
from moe_pack.formats.families.glm_moe_dsa import GLM_MOE_DSA
from moe_pack.formats.families.gpt_oss import GPT_OSS
from moe_pack.formats.families.granitemoe import GRANITEMOE, GRANITEMOESHARED
from moe_pack.formats.families.granitemoe_swa import GRANITEMOE_SWA
from moe_pack.formats.families.granitemoehybrid import GRANITEMOEHYBRID
from moe_pack.formats.families.hunyuan_v1_moe import HUNYUAN_V1_MOE
from moe_pack.formats.families.hy_v3 import HY_V3
from moe_pack.formats.families.hy_v4 import HY_V4
from moe_pack.formats.families.jamba import JAMBA
from moe_pack.formats.families.kimi_linear import KIMI_LINEAR
from moe_pack.formats.families.kolibri1 import KOLIBRI1
from moe_pack.formats.families.laguna import LAGUNA
from moe_pack.formats.families.lfm2_moe import LFM2_MOE
from moe_pack.formats.families.llama4 import LLAMA4, LLAMA4_TEXT
from moe_pack.formats.families.longcat_flash import LONGCAT_FLASH
from moe_pack.formats.families.mellum import MELLUM
from moe_pack.formats.families.mimo_v2_flash import MIMO_V2_FLASH
from moe_pack.formats.families.minicpm import MINICPM
from moe_pack.formats.families.minimax import MINIMAX
from moe_pack.formats.families.minimax_m2 import MINIMAX_M2
from moe_pack.formats.families.minimax_m3_vl import MINIMAX_M3_VL
from moe_pack.formats.families.mistral4 import MISTRAL3, MISTRAL4
from moe_pack.formats.families.mixtral import MIXTRAL
from moe_pack.formats.families.nemotron_h import NEMOTRON_H, NEMOTRON_H_NANO_OMNI, NEMOTRON_H_OMNI
from moe_pack.formats.families.olmoe import OLMOE
from moe_pack.formats.families.phimoe import PHIMOE
from moe_pack.formats.families.qwen2_moe import QWEN2_MOE
from moe_pack.formats.families.qwen3_5_moe import QWEN3_5_MOE, QWEN3_5_MOE_TEXT
from moe_pack.formats.families.qwen3_moe import QWEN3_MOE
from moe_pack.formats.families.qwen3_next import QWEN3_NEXT
from moe_pack.formats.families.qwen3_omni_moe import QWEN3_OMNI_MOE
from moe_pack.formats.families.qwen3_vl_moe import QWEN3_VL_MOE
from moe_pack.formats.families.qwen4_exp import QWEN4_EXP, QWEN4_EXP_TEXT
from moe_pack.formats.families.readers import dense_model, read_quantization
from moe_pack.formats.families.solar_open import SOLAR_OPEN
from moe_pack.formats.families.step3p5 import STEP3P5, STEP3P7
from moe_pack.formats.families.switch_transformers import SWITCH_TRANSFORMERS
from moe_pack.formats.families.xverse import XVERSE
from moe_pack.formats.spec import spec_fault

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        MIXTRAL,
        QWEN2_MOE,
        QWEN3_MOE,
        QWEN3_OMNI_MOE,
        MELLUM,
        MIMO_V2_FLASH,
        LAGUNA,
        STEP3P5,
        STEP3P7,
        ARIA,
        FLINT,
        DEEPSEEK_OCR2,
        QWEN3_VL_MOE,
        QWEN3_NEXT,
        QWEN4_EXP,
        QWEN4_EXP_TEXT,
        QWEN3_5_MOE,
        QWEN3_5_MOE_TEXT,
        DBRX,
        DEEPSEEK,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        KIMI_K2,
        KIMI_K25,
        AXK1,
        AXK2,
        KIMI_LINEAR,
        BAILING_HYBRID,
        DEEPSEEK_V32,
        DEEPSEEK_V4,
        PHIMOE,
        OLMOE,
        FLEX_OLMO,
        GEMMA4,
        GEMMA4_TEXT,
        AFMOE,
        LONGCAT_FLASH,
        GRANITEMOE,
        GRANITEMOEHYBRID,
        LFM2_MOE,
        JAMBA,
        NEMOTRON_H,
        NEMOTRON_H_OMNI,
        NEMOTRON_H_NANO_OMNI,
        GLM4_MOE,
        DOTS1,
        GPT_OSS,
        MINICPM,
        XVERSE,
        SWITCH_TRANSFORMERS,
        MINIMAX,
        MINIMAX_M2,
        MINIMAX_M3_VL,
        ERNIE4_5_MOE,
        ERNIE4_5_VL_MOE,
        ERNIE4_5_MOE_VL,
        GLM4_MOE_LITE,
        GLM4V_MOE,
        GLM_MOE_DSA,
        GRANITEMOESHARED,
        GRANITEMOE_SWA,
        SOLAR_OPEN,
        HY_V3,
        HY_V4,
        HUNYUAN_V1_MOE,
        EXAONE_MOE,
        KOLIBRI1,
        BEAM,
        COHERE2_MOE,
        COHERE2_VISION,
        MISTRAL3,
        MISTRAL4,
        LLAMA4,
        LLAMA4_TEXT,
    )
}
SHORT_NAMES: dict[str, str] = {
    short: hub_id for family in FAMILIES.values() for short, hub_id in family.short_names.items()
}

# The keys for the number of experts in all known checkpoints. A config without any of them is that of a dense model.
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")


def text_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the object of a `config.json` that describes the text model: a part of it in a multimodal checkpoint."""
    family = FAMILIES.get(str(values.get("model_type")))
    for key in () if family is None else family.text_keys:
        inner = values.get(key)
        if not isinstance(inner, dict):
            break
        values = inner
    return values


def read_spec(config: Config) -> tuple[Family, ModelSpec, Quantization]:
    """Returns the family of a `config.json`, the model that it describes, and the encoding of quantized tensors.

    Raises:  CheckpointError for a dense model, an unknown architecture, or a key whose effect we do not implement.
    """
    model_type = config.text("model_type")
    family = FAMILIES.get(model_type)
    if family is None:
        text = config.group("text_config") if config.has("text_config") else None
        if not any(each.has(key) for each in (config, text) if each is not None for key in _EXPERT_COUNTS):
            raise dense_model(config)
        similar = did_you_mean(model_type, FAMILIES, "docs/families.md lists the supported ones")
        raise CheckpointError(f"{config.place}: architecture {model_type!r} is not supported{similar}")
    config = config.renamed(family.old_keys)
    quantization = read_quantization(config, family.text_keys)
    spec = family.read_config(config)
    config.refuse_unread(family.ignored_keys)
    fault = spec_fault(spec)
    if fault:
        raise CheckpointError(f"{config.place}: {fault}")
    return family, spec, quantization
