"""Configs whose rotary positions are scaled in each way that transformers has for all its models."""

import json
from collections.abc import Mapping
from pathlib import Path

from moe_pack.formats import ModelSpec
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.parts import LatentSpec
from support.families import IN_TRANSFORMERS, NOT_ROTARY, WITH_ENCODER, Values, text_values, with_text

# Of the original context, and of the text: shorter and longer than that.
ORIGINAL, POSITIONS, LENGTHS = 32, 128, (20, 72)
KINDS = ("linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
_KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "llama_4_scaling_beta")
# What transformers does not run. Where layers have heads of their own, it has no longrope; where a share of a head is
# rotated, most code takes no more frequencies than that share has; other code asks for more keys.
NOT_RUN: Mapping[str, tuple[str, ...]] = {
    "phimoe": KINDS,
    "ernie4_5_vl_moe": KINDS,
    **dict.fromkeys(("mistral3", "mistral4"), ("linear", "dynamic", "proportional")),
    **dict.fromkeys(("gemma4", "gemma4_text", "step3p5", "step3p7"), ("longrope",)),
    **dict.fromkeys(("glm4v_moe", "deepseek_v4", "qwen4_exp", "qwen4_exp_text"), ("proportional",)),
}
# What we refuse: keys of pooled blocks and compressed entries do not follow the length of the sequence.
REFUSED: Mapping[str, tuple[str, ...]] = dict.fromkeys(
    ("deepseek_v4", "qwen4_exp", "qwen4_exp_text"), ("dynamic", "longrope")
) | {"minimax_m3_vl": ("proportional",)}  # whose indexer has smaller heads than the attention
SCALED = tuple(family for family in IN_TRANSFORMERS if family not in (*NOT_ROTARY, *WITH_ENCODER))


def scaling_of(kind: str, pairs: int) -> Values:
    """The keys of a scaling of heads with so many pairs that are rotated."""
    keys: dict[str, Values] = {
        "linear": {"factor": 4.0},
        "dynamic": {"factor": 4.0},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
        "longrope": {
            "short_factor": [1.0 + 0.2 * pair for pair in range(pairs)],
            "long_factor": [1.5 + 2.0 * pair for pair in range(pairs)],
            "original_max_position_embeddings": ORIGINAL,
        },
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
        "proportional": {"partial_rotary_factor": 0.5, "factor": 2.0},
    }
    return {"rope_type": kind} | keys[kind]


def rescale(folder: Path, values: Values, kind: str) -> None:
    """Writes the config.json of a checkpoint with scaled positions, in place of those of `values`, which it has."""
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    checkpoint = Checkpoint(folder)
    spec = checkpoint.spec
    checkpoint.close()
    text = dict(text_values(values))
    for key in {"max_position_embeddings", "max_seq_len", "model_max_length"} & set(text):
        text[key] = ORIGINAL if kind == "dynamic" else POSITIONS
    if "head_dim" in text and text["head_dim"] is None:  # with which transformers has no yarn
        text["head_dim"] = text["hidden_size"] // text["num_attention_heads"]
    text["rope_parameters"] = _scaled(text["rope_parameters"], kind, spec)
    path.write_text(json.dumps(with_text(values, text)))


def _scaled(parameters: Values, kind: str, spec: ModelSpec) -> Values:
    if "rope_theta" in parameters:
        return _unscaled(parameters) | scaling_of(kind, spec.rotation.rotary_dim // 2)
    sizes = {
        rope.theta: attention.head_dim
        for attention, rope in spec.attention_kinds
        if rope is not None and not isinstance(attention, LatentSpec)
    }
    scaled: Values = {}
    for key, inner in parameters.items():
        if not isinstance(inner, dict):  # of layers that do not rotate
            scaled[key] = inner
            continue
        kept = _unscaled(inner)
        size = int(sizes[kept["rope_theta"]] * kept.get("partial_rotary_factor", 1.0))
        scaled[key] = kept | scaling_of(kind, size // 2)
    return scaled


def _unscaled(parameters: Values) -> Values:
    if parameters["rope_type"] == "proportional":  # of heads that rotate as a whole
        return {"rope_theta": parameters["rope_theta"]}
    return {key: value for key, value in parameters.items() if key in _KEPT}
