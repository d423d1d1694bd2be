"""The graph engine's launches under the interpreter, over plain memory, against the decoder in plain torch."""

from pathlib import Path

import pytest
import torch
from cards import CPU, graph_decoder
from families import TINY, Tiny, write
from models import TinyMixtral, pack

from moe_pack.formats import Pack, Selector
from moe_pack.runtime import Decoder, PackWeights

# The project's bound on logits, maximum absolute; sums in another order differ by some 1e-6.
TOLERANCE = 1e-4
PROMPT, NUM_ALONE = 3, 4
IDS = [(37 * i + 5) % 96 for i in range(PROMPT + NUM_ALONE)]


def reference(folder: Path, ids: list[int]) -> torch.Tensor:
    with Pack(folder) as held:
        return Decoder(PackWeights(held, CPU), 64).logits(ids)


def found(folder: Path, share: float, ids: list[int], num_prompt: int = PROMPT) -> torch.Tensor:
    """Logits of a prompt, then of one token after the other."""
    with graph_decoder(folder, share) as decoder:
        pieces = [decoder.logits(ids[:num_prompt])] if num_prompt else []
        return torch.cat([*pieces, *(decoder.logits([token]) for token in ids[num_prompt:])])


@pytest.mark.parametrize(
    ("selector", "share"), [("up", 0.0), ("up", 0.4), ("up", 1.0), ("gate", 0.4), ("both", 0.4), ("none", 0.4)]
)
def test_logits_are_the_references_whatever_has_room(selector: Selector, share: float, tmp_path: Path) -> None:
    source = TinyMixtral(num_layers=2, num_experts=4, config={"num_experts_per_tok": 2}).write(tmp_path / "source")
    folder = tmp_path / "packed"
    pack(source, folder, selector=selector)
    expected = reference(folder, IDS)
    assert (found(folder, share, IDS) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("tiny", [tiny for tiny in TINY if not tiny.fused and not tiny.four], ids=str)
def test_every_family_runs_as_in_plain_torch(tiny: Tiny, tmp_path: Path) -> None:
    source = write(tiny, tmp_path / "source")
    folder = tmp_path / "packed"
    pack(source, folder, dense_width=8)
    expected = reference(folder, IDS)
    assert (found(folder, 0.3, IDS) - expected).abs().max() < TOLERANCE
