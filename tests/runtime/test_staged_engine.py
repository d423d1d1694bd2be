"""The staged engine as it is put together for a card, over plain memory: its kernels run by the interpreter."""

from pathlib import Path

import pytest
from cards import CPU
from models import TinyMixtral, pack
from staged_card import staged_logits

from moe_pack.formats import Pack
from moe_pack.runtime import Decoder, PackWeights
from moe_pack.runtime.policies import PolicyName

TOLERANCE = 1e-4  # the project's bound on logits, maximum absolute
IDS = [(37 * i + 5) % 96 for i in range(4)]
PROMPT = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of two layers, each with four experts."""
    shape = TinyMixtral(num_layers=2, num_experts=4, config={"num_experts_per_tok": 2})
    folder = tmp_path_factory.mktemp("staged") / "packed"
    pack(shape.write(folder.parent / "source"), folder)
    return folder


@pytest.mark.parametrize(("policy", "has_memory"), [("lru", True), ("fiddler", True), ("lru", False)])
def test_logits_are_the_references_wherever_experts_come_from(
    policy: PolicyName, has_memory: bool, folder: Path
) -> None:
    with Pack(folder) as held:
        expected = Decoder(PackWeights(held, CPU), 64).logits(IDS)
    assert (staged_logits(folder, policy, has_memory, IDS, PROMPT, measured=True) - expected).abs().max() < TOLERANCE
