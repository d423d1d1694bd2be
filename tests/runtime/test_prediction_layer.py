"""Drafts of a prediction layer: its logits are those of the checkpoint's own layer, and it follows the sequence."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import case
from families import NUM_POSITIONS, token_ids
from models import pack
from prediction import PREDICTING, Predicting, Reference, write_predicting

from moe_pack.formats import Pack
from moe_pack.formats.families import PredictionLayer
from moe_pack.runtime.drafts.prediction_layer import PredictionDrafter, prediction_bytes
from moe_pack.runtime.drafts.prediction_weights import PredictionWeights
from moe_pack.runtime.model import Decoder, PackWeights

TOLERANCE = 1e-4  # the bound of tests/endtoend/test_families.py
CHUNK = 16


def drafter_of(opened: Pack, weights: PackWeights) -> PredictionDrafter:
    layer = PredictionLayer.find(opened)
    assert layer is not None
    return PredictionDrafter(PredictionWeights(layer, weights), NUM_POSITIONS, CHUNK)


def worst(row: Predicting, folder: Path) -> float:
    """The largest difference of logits: after a prompt of many passes, and in tokens after it, three at a time."""
    source = write_predicting(row, folder / "source")
    pack(source, folder / "packed", width=16)
    reference, ids, differences = Reference(row, source, folder / "spare"), token_ids()[:50], []
    with Pack(folder / "packed") as opened:
        weights = PackWeights(opened, torch.device("cpu"))
        decoder, drafter = Decoder(weights, NUM_POSITIONS, chunk_tokens=CHUNK), drafter_of(opened, weights)
        decoder.sequences[0].follower = drafter
        decoder.next_logits(ids[:40])
        for length in (41, 42, 45, 50):
            decoder.next_logits(ids[decoder.cache.num_tokens : length - 1]) if length > 41 else None
            found, expected = drafter.logits(ids[:length], None, 3), reference.logits(ids[:length], 3)
            assert found.shape == expected.shape
            differences.append(float((found - expected).abs().max()))
    return max(differences)


def test_logits_are_those_of_the_checkpoint_s_layer(new_folder: Callable[[], Path]) -> None:
    for row in PREDICTING:
        with case(str(row)):
            assert worst(row, new_folder()) < TOLERANCE
