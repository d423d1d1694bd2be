"""Configs that no class of transformers reads as they are published: the class, and the values that it is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Values = dict[str, Any]
NEMOTRON = ("nemotron_h", "nemotron_h_omni", "NemotronH_Nano_Omni_Reasoning_V3")
# Families that transformers has under another name: it is given a config that says so.
BUILT_AS = {
    "kimi_k2": "deepseek_v3",
    "NemotronH_Nano_Omni_Reasoning_V3": "nemotron_h_omni",
    "ernie4_5_moe_vl": "ernie4_5_vl_moe",
}
# Multimodal ones whose config is flat and so not transformers' either; see `flat`.
FLAT = ("ernie4_5_moe_vl",)
_KINDS = ("num_hidden_layers", "mlp_layer_types")


def flat(values: Values) -> Values:
    """transformers' config of ERNIE 4.5 VL as Baidu publishes it: one object, and pairs for text and for images."""
    text, (num_layers, kinds) = values["text_config"], (values["text_config"][key] for key in _KINDS)
    rope = text["rope_parameters"]
    kept = {key: value for key, value in text.items() if key not in ("mlp_layer_types", "rope_parameters")}
    return kept | {
        "moe_num_experts": [text["moe_num_experts"]] * 2,
        "moe_layer_start_index": [kinds.index("sparse")] * 2,
        "moe_layer_end_index": [num_layers + 1, num_layers],
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "default", "mrope_section": rope["mrope_section"]},
        "rope_3d": True,
        "tie_word_embeddings": values["tie_word_embeddings"],
        "vision_config": values["vision_config"],
    }


def built(values: Values) -> tuple[str, Values]:
    """The type and the values with which transformers makes the config of a checkpoint whose config.json has these."""
    family: str = values["model_type"]
    values = {key: value for key, value in values.items() if key != "model_type"}
    if family in FLAT:
        first = values["moe_layer_start_index"][0]
        text = values | {
            "moe_num_experts": values["moe_num_experts"][0],
            "mlp_layer_types": ["dense"] * first + ["sparse"] * (values["num_hidden_layers"] - first),
            "rope_parameters": values["rope_scaling"] | {"rope_type": "default", "rope_theta": values["rope_theta"]},
        }
        vision = text.pop("vision_config")
        values = {"text_config": text, "vision_config": vision, "tie_word_embeddings": values["tie_word_embeddings"]}
    if family == "dbrx":  # the class of transformers 5.23 takes no whole number here
        ffn = values["ffn_config"]
        whole = ffn.get("moe_normalize_expert_weights")
        values |= {"ffn_config": ffn | {"moe_normalize_expert_weights": None if whole is None else float(whole)}}
    return BUILT_AS.get(family, family), values


def config_for_class(folder: Path) -> PreTrainedConfig | None:
    """The config with which the class loads the checkpoint in a folder, or None if it reads config.json itself."""
    from transformers import CONFIG_MAPPING

    values = json.loads((folder / "config.json").read_text())
    if values["model_type"] not in BUILT_AS:
        return None
    model_type, of_class = built(values)
    config: PreTrainedConfig
    if values["model_type"] in FLAT:
        config = CONFIG_MAPPING[model_type](**of_class)
    else:
        config = CONFIG_MAPPING[model_type].from_pretrained(folder)
        setattr(config, "model_type", model_type)  # noqa: B010  # to transformers' types it is the class's alone
    return config
