"""Each expert at 2 bits alone: the losses are those of plain decoders over weights so rounded; killed, the same."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from support.held_experts import RoundedExperts
from support.models import TinyMixtral

from moe_pack.calib.forward import LayerwiseWeights
from moe_pack.calib.sensitivity import ExactPass
from moe_pack.calib.sensitivity.errors import Rounding
from moe_pack.formats import ROW_GROUP
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.model import CheckpointWeights, Decoder

SHAPE = TinyMixtral(num_layers=2, num_experts=3)
IDS = torch.randint(SHAPE.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
ROUNDING = Rounding("absmax", ROW_GROUP)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SHAPE.write(tmp_path_factory.mktemp("source"))


def losses(
    source: Path, folder: Path, stops: bool = False
) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """The whole pass; if it `stops`, started again after every layer."""
    with closing(Checkpoint(source)) as checkpoint:
        stage = ExactPass(LayerwiseWeights(CheckpointWeights(checkpoint)), IDS, folder, torch.device("cpu"))
        for layer in range(2):
            stage.layer(layer)
            if stops:
                stage = ExactPass(LayerwiseWeights(CheckpointWeights(checkpoint)), IDS, folder, torch.device("cpu"))
                assert stage.states.next_layer == layer + 1
        return stage.losses()


def log_probabilities(weights: CheckpointWeights) -> torch.Tensor:
    return torch.cat([Decoder(weights, 16).logits(row.tolist()).double().log_softmax(1) for row in IDS])


def test_losses_are_divergences_of_models_rounded_so(source: Path, tmp_path: Path) -> None:
    found = losses(source, tmp_path / "pass")
    checkpoint = Checkpoint(source)
    original = log_probabilities(CheckpointWeights(checkpoint))

    def kl(low: tuple[int, int] | None) -> float:
        rounded = log_probabilities(RoundedExperts(checkpoint, lambda l, e, name: 2 if (l, e) == low else 4, ROUNDING))
        return float((original.exp() * (original - rounded)).sum(1).mean())

    # Sums of float32 products in another order; the divergences are of 0.01 and more.
    assert found["base"].tolist() == pytest.approx([kl(None)], rel=1e-3)
    expected = [[kl((l, e)) for e in range(3)] for l in range(2)]
    np.testing.assert_allclose(found["losses"], expected, rtol=1e-3)
    assert min(map(min, expected)) > 0.01
    checkpoint.close()


def test_begun_anew_after_every_layer_losses_are_the_same_bits(source: Path, tmp_path: Path) -> None:
    whole, stopped = losses(source, tmp_path / "whole"), losses(source, tmp_path / "stopped", stops=True)
    assert all((whole[name] == stopped[name]).all() for name in ("losses", "base"))
