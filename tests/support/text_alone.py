"""Text models that transformers has only inside a multimodal model: their checkpoints, and how it runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file

from support.multimodal_parts import MULTIMODAL, OTHER_PARTS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# The multimodal model that has a text model.
TEXT_OF = {"step3p5": "step3p7"}


def text_config(family: str, values: dict[str, Any]) -> dict[str, Any]:
    """The config of such a text model inside a multimodal config; any other config as it is."""
    text: dict[str, Any] = values.get("text_config", values) if family in TEXT_OF else values
    return text


def leave_text(family: str, folder: Path) -> None:
    """Makes of a multimodal checkpoint, or of its config alone, that of such a text model."""
    if family not in TEXT_OF:
        return
    path = folder / "config.json"
    path.write_text(json.dumps(text_config(family, json.loads(path.read_text()))))
    path = folder / "model.safetensors"
    if path.exists():
        tensors = {
            name.replace("model.language_model.", "model."): tensor
            for name, tensor in load_file(path).items()
            if not name.startswith(OTHER_PARTS)
        }
        save_file(tensors, path, {"format": "pt"})


def whole_config(values: dict[str, Any]) -> PreTrainedConfig | None:
    """The multimodal config around the values of such a text model; None for any other model."""
    from transformers import AutoConfig

    whole = TEXT_OF.get(values["model_type"])
    if whole is None:
        return None
    config: PreTrainedConfig = AutoConfig.for_model(whole, **MULTIMODAL[whole].config(values))
    return config
