"""Configs close to those of the families that must be refused, each with the line that refuses it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from families.phimoe import LONGROPE

from moe_pack.formats import CheckpointError
from moe_pack.formats.families import Checkpoint
from support import cards
from support.cards import Values, missing, only, unknown
from support.families import CARDS, ROTARY, Tiny, text_values, with_text, write_config

OUTSIDE = ("quantization_config",)  # keys of a multimodal config that are not the text model's
PLAIN: Values = {"rope_type": "default", "rope_theta": 1e5}
OTHER: Values = {"rope_type": "ntk", "factor": 2.0, "rope_theta": 1e4}
PROPORTIONAL: Values = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e4}


@dataclass(frozen=True)
class Close:
    """A config near one we know, with `changes` (None removes a key), and the end of the line that refuses it."""

    family: str
    changes: Values
    message: str

    def __str__(self) -> str:
        return f"{self.family}: {', '.join(self.changes)}"


def _rows(family: str) -> Iterator[cards.Close]:
    """The rows of a family that follow from its card."""
    card = CARDS[family]
    supported = "is not supported; supported: " + ", ".join(("default", *card.scalings))
    other = f"rope_type 'ntk' {supported}"
    if family in ROTARY:
        yield only("hidden_act", "gelu", "silu")
    if card.rope == "by kind":
        usual = PROPORTIONAL if family.startswith("gemma") else cards.YARN
        for rope, message in (
            (OTHER, other),
            ({"rope_type": "default"}, missing("rope_theta", "a number")[1]),
            (usual | {"short_factor": [1.0]}, unknown("short_factor", [1.0])[1]),
            (cards.YARN | {"truncate": False}, only("truncate", False, True)[1]),
            *(() if family == "beam" else ((None, missing("full_attention", "an object")[1]),)),
        ):
            yield {"rope_parameters": {"full_attention": rope, "sliding_attention": rope}}, message
        yield only("rope_scaling", {"type": "yarn"}, None)
        if family != "mimo_v2_flash":  # whose published config has it
            yield unknown("rope_theta", 1e4)
    elif family in ROTARY and card.rope != "by label":
        yield {"rope_parameters": OTHER}, other
        if "longrope" in card.scalings and "yarn" in card.scalings:
            yield {"rope_parameters": LONGROPE | {"rope_theta": 1e4}}, unknown("short_mscale", 1.1)[1]
        else:
            yield {"rope_parameters": cards.YARN}, f"rope_type 'yarn' {supported}"
        if card.rope == "whole":
            yield only("partial_rotary_factor", 0.5, 1.0)
    if card.reference is not None:
        for kind in ("linear", "dynamic", "yarn"):
            message = f"rope_type '{kind}' is not supported; supported: default"
            yield {"rope_scaling": {"type": kind, "factor": 2.0}}, message
        yield only("rope_parameters", PLAIN, None)
        yield only("head_dim", 32, 16)
    formats = "fp8, mxfp4, compressed-tensors; use the 16-bit original"
    yield (
        {"quantization_config": {"quant_method": "awq"}},
        f"quantization_config: quant_method is 'awq', supported: {formats}",
    )
    yield unknown("attn_logit_softcapping", 50.0)


CLOSE = tuple(
    Close(family, changes, message)
    for family, card in CARDS.items()
    for changes, message in (*_rows(family), *card.close)
)


def _changed(whole: Values, changes: Values) -> Values:
    """A config with changes; in a multimodal one the text model's, but for keys that the whole has."""
    outside = {key: value for key, value in changes.items() if key in OUTSIDE}
    values = with_text(whole, _with(text_values(whole), {k: v for k, v in changes.items() if k not in outside}))
    return _with(values, outside)


def _with(values: Values, changes: Values) -> Values:
    kept = {key: value for key, value in values.items() if key not in changes}
    return kept | {key: value for key, value in changes.items() if value is not None}


def refusal(close: Close, folder: Path) -> str | None:
    """The line that refuses a config near one we know, or None if only tensors are missing."""
    written = write_config(Tiny(close.family, "close"), folder)
    path = folder / "config.json"
    path.write_text(json.dumps(_changed(written, close.changes)))
    try:
        Checkpoint(folder).close()
    except CheckpointError as fault:
        return None if "found neither model.safetensors" in str(fault) else str(fault)
    return None
