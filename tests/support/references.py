"""The logits of one short text by the plain references of the cards, in every shape, kept in tests/data/references.

    PYTHONPATH=tests python -m support.references

writes them. To be run where a reference is meant to say something else, and at no other time.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from support.cards import Values
from support.families import CARDS, REFERENCES, Tiny, reference_config
from support.models import TESTS

FIXTURES = TESTS / "data" / "references"
TEXT = [3, 19, 57, 0, 95, 41, 8, 77]


def shapes_of(model_type: str) -> Iterator[tuple[str, Values]]:
    """Each shape's name and config."""
    for name, shape in {"as it comes": {}, **CARDS[model_type].shapes}.items():
        yield name, reference_config(Tiny(model_type, name, shape))


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


if __name__ == "__main__":
    write_fixtures()
