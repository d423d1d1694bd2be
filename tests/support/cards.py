"""The form of a card, which says all that tests know of one family, and pieces that many cards share.

tests/families has a file for each module of formats/families, with the cards of its families in `CARDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from support.plain import Reference

Values = dict[str, Any]

EXPERTS: Values = {
    "num_key_value_heads": 2, "moe_intermediate_size": 48, "intermediate_size": 80, "num_experts_per_tok": 3,
}  # fmt: skip
LATENT: Values = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "q_lora_rank": 40,
}  # fmt: skip
LINEAR: Values = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
}  # fmt: skip
SCALES: Values = {
    "embedding_multiplier": 12.0, "attention_multiplier": 0.05, "residual_multiplier": 0.22, "logits_scaling": 6.0,
}  # fmt: skip
YARN: Values = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32,
    "beta_slow": 1,
}  # fmt: skip
MSCALES: Values = {"mscale": 1.0, "mscale_all_dim": 1.0}
SMALL_VISION: Values = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
QWEN_VISION: Values = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64,
    "num_position_embeddings": 16,
}  # fmt: skip
ALL_SCALINGS = ("linear", "dynamic", "yarn", "longrope", "llama3", "proportional")

# Changes of a config (None removes a key), and the end of the line that refuses it.
Close = tuple[Values, str]


def only(key: str, value: object, supported: object) -> Close:
    """A value of a key of which another one is supported."""
    return {key: value}, f"{key} is {value!r}; only {supported!r} is supported"


def missing(key: str, expected: str = "a value or null") -> Close:
    """A config without a key that it must have."""
    return {key: None}, f"key '{key}' is missing, expected {expected}"


def unknown(key: str, value: object) -> Close:
    """A key that the family does not have."""
    return {key: value}, f"key '{key}' ({value!r}) is unknown for this family and may change the arithmetic"


@dataclass(frozen=True)
class Multimodal:
    """The config around a text model: tiny other parts, and the keys that lead to the text model's object."""

    parts: Values
    text_keys: tuple[str, ...] = ("text_config",)
    around: Values = field(default_factory=dict)  # what is next to the text model's object, if that is deeper
    outer: tuple[str, ...] = ("tie_word_embeddings",)  # keys that are read outside
    # The beginnings of the names of other parts' tensors, in the model and in checkpoints.
    names: tuple[str, ...] = (
        "model.visual", "model.vision_tower", "model.vision_model", "model.multi_modal_projector",
    )  # fmt: skip

    def config(self, text: Values) -> Values:
        """The whole config, by the text model's values."""
        outside = self.around | {key: value for key, value in text.items() if key in self.outer}
        values = {key: value for key, value in text.items() if key not in self.outer}
        for key in reversed(self.text_keys):
            values = outside | {key: values}
            outside = {}
        return self.parts | values


@dataclass(frozen=True)
class Card:
    """All that tests know of a family. In a multimodal one `config` and `shapes` are those of the text model."""

    config: Values  # the smallest that uses everything, beyond SMALL
    # By name, each switch of the config that changes the arithmetic.
    shapes: Mapping[str, Values] = field(default_factory=dict)
    close: Sequence[Close] = ()  # configs near it that must be refused; rows of all families are added to them
    around: Multimodal | None = None
    reference: Reference | None = None  # of an architecture that transformers has no class for
    # The rotary positions: of whole heads, of a share of each, an object for each kind of layer or for each of two
    # labels; or layers need not have any, or there is no key for a neuron's function.
    rope: Literal["whole", "part", "by kind", "by label", "none"] = "whole"
    scalings: Sequence[str] = ALL_SCALINGS  # of rotary positions, as messages name them
    # Scalings that transformers does not run. Where layers have heads of their own, it has no longrope; where a share
    # of a head is rotated, most code takes no more frequencies than that share has; other code asks for more keys.
    not_run: Sequence[str] = ()
    refused_scalings: Sequence[str] = ()  # although transformers runs them
    # How published checkpoints have the experts of a layer: each apart, all in one tensor, or a matrix of all in one.
    experts: Literal["apart", "fused", "stacked"] = "apart"
    small: bool = True  # whether its sizes have the names of SMALL
    has_encoder: bool = False
    is_part: bool = False  # whether transformers makes it as it makes multimodal models, though it has no other parts
    text_of: str = ""  # the multimodal family whose text model this is, if transformers has no class of it alone
    built_as: str = ""  # the type under which transformers has it
    # The config as its authors write it, from that of transformers; and the values that the class takes, from that.
    written: Callable[[Values], Values] | None = None
    read: Callable[[Values], Values] | None = None
    # The config as transformers 4 wrote it, where `with_old_keys` is not all.
    old: Callable[[Values], Values] | None = None
    correct: Callable[[Any], None] | None = None  # makes of the model in transformers that of its authors


def with_old_keys(values: Values, keeps_kinds: bool = False) -> Values:
    """A config as version 4 of transformers spelled it."""
    gone = ("dtype", "rope_parameters", *(() if keeps_kinds else ("layer_types",)))
    four = {key: value for key, value in values.items() if key not in gone} | {"torch_dtype": values.get("dtype")}
    if "rope_parameters" not in values:
        return four
    rope = dict(values["rope_parameters"])
    four |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": None}
    if "partial_rotary_factor" in rope:
        four["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if rope.pop("rope_type") != "default" or rope:
        four["rope_scaling"] = {"type": values["rope_parameters"]["rope_type"], **rope}
        four.pop("original_max_position_embeddings", None)
    return four
