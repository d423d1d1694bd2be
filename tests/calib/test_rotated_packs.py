"""Passes over rotated packs, layer by layer: what they measure is what the same pack measures unrotated."""

from pathlib import Path

import numpy as np
import pytest
from support.models import TinyMixtral, pack
from support.native import operations_limited_to
from support.profiles import Recorder, random_tokens

from moe_pack.calib.evaluate import ThresholdRule, evaluate
from moe_pack.calib.evaluate.thresholds import measure_thresholds
from moe_pack.calib.quantize import Rotate
from moe_pack.formats import Pack
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.model import TORCH, Operations
from moe_pack.runtime.quality import Quality

SHAPE = TinyMixtral(hidden_size=192, num_layers=2, num_experts=4)
TOKENS = random_tokens(10, 16, SHAPE.vocab_size)


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[Rotate, Path]:
    """A model in 16 bit, and the same in rotated coordinates."""
    folder = tmp_path_factory.mktemp("rotated")
    source = SHAPE.write(folder / "source")
    names: tuple[Rotate, ...] = ("off", "on")
    for rotate in names:
        pack(source, folder / rotate, width=16, rotate=rotate)
    return {rotate: folder / rotate for rotate in names}


def test_thresholds_are_those_of_the_pack_that_is_not_rotated(packs: dict[Rotate, Path]) -> None:
    found = []
    for folder in packs.values():
        with Pack(folder) as opened:
            measured = measure_thresholds(opened, TOKENS, ThresholdRule(sparsity=0.7), Recorder())
        with Pack(folder) as opened:
            found.append((opened.thresholds, measured.held_out.overall))
    (plain, plain_sparsity), (rotated, rotated_sparsity) = found
    assert plain.min() > 0
    # Activations differ by the rounding of weights, some 2^-9: the quantile of a few thousand moves as little.
    np.testing.assert_allclose(rotated, plain, rtol=0.02)
    assert abs(rotated_sparsity - plain_sparsity) < 0.01


def quality(folder: Path, operations: Operations = TORCH) -> Quality:
    source = Checkpoint(folder.parent / "source")
    with Pack(folder) as opened:
        found = evaluate(opened, TOKENS, reference=source, operations=operations)
    source.close()
    return found


def test_the_loss_of_16_bits_is_that_of_their_rounding(packs: dict[Rotate, Path]) -> None:
    whole = packs["on"].parent / "whole"  # whatever thresholds the others have by now
    pack(packs["on"].parent / "source", whole, width=16, rotate="on")
    found = quality(whole)
    assert found.against is not None and 0 <= found.against.kl.value < 1e-4
    native = quality(whole, operations_limited_to("portable"))
    assert native.against is not None and native.against.kl.value < 1e-4
    assert abs(native.perplexity.value / found.perplexity.value - 1) < 1e-4
