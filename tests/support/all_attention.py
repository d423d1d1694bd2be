"""Rows of families whose every layer attends; the table of all families, and what is done with rows, is `families`.

`SHAPES` is a family's smallest config, `SWITCHED` what else its config can switch. In a multimodal checkpoint both are
the text model's; `MULTIMODAL` has the other parts, as small as their classes allow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Values = dict[str, Any]


@dataclass(frozen=True)
class Multimodal:
    """The config around a text model: other parts, and the keys that lead to the text model's object."""

    parts: Values
    text_keys: tuple[str, ...] = ("text_config",)
    outer: tuple[str, ...] = field(default=("tie_word_embeddings",))  # keys that are read outside

    def config(self, text: Values) -> Values:
        """The whole config, by the text model's values."""
        outside = {key: value for key, value in text.items() if key in self.outer}
        values = {key: value for key, value in text.items() if key not in self.outer}
        for key in reversed(self.text_keys[1:]):
            values = {key: values}
        return self.parts | outside | {self.text_keys[0]: values}


SHAPES: dict[str, Values] = {
    "qwen3_vl_moe": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "intermediate_size": 80,
        "mlp_only_layers": [1],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [6, 5, 5]},
    },
}
SWITCHED: dict[str, dict[str, Values]] = {
    "qwen3_vl_moe": {
        "bias, tied head": {"attention_bias": True, "tie_word_embeddings": True},
        "every second layer": {"decoder_sparse_step": 2, "mlp_only_layers": []},
    },
}
_QWEN_VISION: Values = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
MULTIMODAL: dict[str, Multimodal] = {
    "qwen3_vl_moe": Multimodal({"vision_config": _QWEN_VISION}),
}
# The beginnings of the names of other parts' tensors in transformers' multimodal models.
OTHER_PARTS = ("model.visual",)
