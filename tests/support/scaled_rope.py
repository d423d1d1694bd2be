"""Configs whose rotary positions are scaled in each way that transformers has for all its models."""

import json
from pathlib import Path

from moe_pack.formats import ModelSpec
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.parts import LatentSpec
from support.cards import Values
from support.families import text_values, with_text

# Of the original context, and of the text: shorter and longer than that.
ORIGINAL, POSITIONS, LENGTHS = 32, 128, (20, 72)
_KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "llama_4_scaling_beta")


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
