"""The table of families: the known `model_type`s, and the step from a `config.json` to a `ModelSpec`.

A family is data, one file a `model_type`. Code outside this folder knows specs and roles, but never families. The
module of a family is imported when a `config.json` names it: a pack has its spec in the manifest, and runs without.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from moe_pack.formats import CheckpointError, ModelSpec
from moe_pack.formats.base.commands import did_you_mean

if TYPE_CHECKING:
    from moe_pack.formats.families.config import Config
    from moe_pack.formats.families.family import Family, Quantization

# The module of each `model_type`, in this folder.
FAMILIES: dict[str, str] = {
    "mixtral": "mixtral",
    "qwen2_moe": "qwen2_moe",
    "qwen3_moe": "qwen3_moe",
    "qwen3_omni_moe": "qwen3_omni_moe",
    "mellum": "mellum",
    "mimo_v2_flash": "mimo_v2_flash",
    "laguna": "laguna",
    "step3p5": "step3p5",
    "step3p7": "step3p5",
    "aria": "aria",
    "flint": "flint",
    "deepseek_ocr2": "deepseek_ocr2",
    "qwen3_vl_moe": "qwen3_vl_moe",
    "qwen3_next": "qwen3_next",
    "qwen4_exp": "qwen4_exp",
    "qwen4_exp_text": "qwen4_exp",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "dbrx": "dbrx",
    "deepseek": "deepseek",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "axk1": "axk1",
    "axk2": "axk2",
    "kimi_linear": "kimi_linear",
    "bailing_hybrid": "bailing_hybrid",
    "deepseek_v32": "deepseek_v32",
    "deepseek_v4": "deepseek_v4",
    "phimoe": "phimoe",
    "olmoe": "olmoe",
    "flex_olmo": "flex_olmo",
    "gemma4": "gemma4",
    "gemma4_text": "gemma4",
    "afmoe": "afmoe",
    "longcat_flash": "longcat_flash",
    "granitemoe": "granitemoe",
    "granitemoehybrid": "granitemoehybrid",
    "lfm2_moe": "lfm2_moe",
    "jamba": "jamba",
    "nemotron_h": "nemotron_h",
    "nemotron_h_omni": "nemotron_h",
    "NemotronH_Nano_Omni_Reasoning_V3": "nemotron_h",
    "glm4_moe": "glm4_moe",
    "dots1": "dots1",
    "gpt_oss": "gpt_oss",
    "minicpm": "minicpm",
    "xverse": "xverse",
    "switch_transformers": "switch_transformers",
    "minimax": "minimax",
    "minimax_m2": "minimax_m2",
    "minimax_m3_vl": "minimax_m3_vl",
    "ernie4_5_moe": "ernie4_5_moe",
    "ernie4_5_vl_moe": "ernie4_5_vl_moe",
    "ernie4_5_moe_vl": "ernie4_5_vl_moe",
    "glm4_moe_lite": "glm4_moe_lite",
    "glm4v_moe": "glm4v_moe",
    "glm_moe_dsa": "glm_moe_dsa",
    "granitemoeshared": "granitemoe",
    "granitemoe_swa": "granitemoe_swa",
    "solar_open": "solar_open",
    "hy_v3": "hy_v3",
    "hy_v4": "hy_v4",
    "hunyuan_v1_moe": "hunyuan_v1_moe",
    "exaone_moe": "exaone_moe",
    "kolibri1": "kolibri1",
    "beam": "beam",
    "cohere2_moe": "cohere2_moe",
    "cohere2_vision": "cohere2_moe",
    "mistral3": "mistral4",
    "mistral4": "mistral4",
    "llama4": "llama4",
    "llama4_text": "llama4",
}
LOADED: dict[str, Family] = {}  # those that have been used

# The keys for the number of experts in all known checkpoints. A config without any of them is that of a dense model.
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")


def family_of(model_type: str) -> Family | None:
    """Returns the family of a `model_type`, whose module it imports; None if it is unknown."""
    if model_type not in LOADED and model_type in FAMILIES:
        from moe_pack.formats.families.family import Family

        module = import_module(f"{__package__}.{FAMILIES[model_type]}")
        found = (each for each in vars(module).values() if isinstance(each, Family) and each.model_type == model_type)
        LOADED[model_type] = next(found)
    return LOADED.get(model_type)


def all_families() -> list[Family]:
    """Returns every family; it imports all of their modules."""
    return [family for family in map(family_of, FAMILIES) if family is not None]


@cache
def short_names() -> dict[str, str]:
    """Returns the name on the hub of each model by its short names; it imports all families."""
    return {short: hub_id for family in all_families() for short, hub_id in family.short_names.items()}


def read_spec(config: Config) -> tuple[Family, ModelSpec, Quantization]:
    """Returns the family of a `config.json`, the model that it describes, and the encoding of quantized tensors.

    Raises:  CheckpointError for a dense model, an unknown architecture, or a key whose effect we do not implement.
    """
    from moe_pack.formats.families.readers import dense_model, read_quantization
    from moe_pack.formats.parts.specs import spec_fault

    model_type = config.text("model_type")
    family = family_of(model_type)
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
