"""The references' logits of one short text in every shape, kept in tests/data/references."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from support.references import REFERENCES, SIZES, SMALLEST, SWITCHES
from support.references.plain import Values

FIXTURES = Path(__file__).parents[2] / "data" / "references"
TEXT = [3, 19, 57, 0, 95, 41, 8, 77]


def shapes_of(model_type: str) -> Iterator[tuple[str, Values]]:
    """Each shape's name and config."""
    smallest = SIZES | SMALLEST[model_type]
    yield "as it comes", smallest
    for name, switch in SWITCHES[model_type].items():
        yield name, smallest | switch


def logits_of_shapes(model_type: str) -> dict[str, torch.Tensor]:
    """By shape, float32 [8, 96]."""
    made = {}
    for name, values in shapes_of(model_type):
        with tempfile.TemporaryDirectory() as folder:
            source = REFERENCES[model_type].write(values, Path(folder))
            made[name] = REFERENCES[model_type].logits_of(source, TEXT)
    return made


def write_fixtures() -> None:
    """Computes and writes them."""
    FIXTURES.mkdir(parents=True, exist_ok=True)
    for model_type in REFERENCES:
        save_file(logits_of_shapes(model_type), FIXTURES / f"{model_type}.safetensors")
