"""The staged engine as it is built for a GPU, over plain memory: Triton's interpreter runs its kernels."""

from pathlib import Path

import pytest
from gpu_runs import CPU
from gpu_staged_runs import staged_logits
from models import TinyMixtral, pack

from moe_pack.formats import Pack
from moe_pack.runtime.model import Decoder, PackWeights
from moe_pack.runtime.offload import PolicyName

TOLERANCE = 1e-4  # the project's bound on logits, maximum absolute
IDS = [(37 * i + 5) % 96 for i in range(3)]
PROMPT = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of two layers, each with three experts."""
    shape = TinyMixtral(num_layers=2, num_experts=3, config={"num_experts_per_tok": 2})
    folder = tmp_path_factory.mktemp("staged") / "packed"
    pack(shape.write(folder.parent / "source"), folder)
    return folder


@pytest.mark.parametrize(
    ("policy", "has_memory", "measured"),
    [("fiddler", True, False), ("lru", False, False), pytest.param("lru", True, True, marks=pytest.mark.slow)],
)
def test_logits_are_the_references_wherever_experts_come_from(
    policy: PolicyName, has_memory: bool, measured: bool, folder: Path
) -> None:
    with Pack(folder) as opened:
        expected = Decoder(PackWeights(opened, CPU), 64).logits(IDS)
    found = staged_logits(folder, policy, has_memory, IDS, PROMPT, measured=measured)
    assert (found - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("policy", "has_memory"), [("fiddler", True), pytest.param("floe", False, marks=pytest.mark.slow)]
)
def test_rotated_layers_give_the_references_logits(policy: PolicyName, has_memory: bool, tmp_path: Path) -> None:
    shape = TinyMixtral(hidden_size=192, num_layers=2, num_experts=3, config={"num_experts_per_tok": 2})
    pack(shape.write(tmp_path / "source"), tmp_path / "packed", rotate="on")
    with Pack(tmp_path / "packed") as opened:
        expected = Decoder(PackWeights(opened, CPU), 64).logits(IDS)
    found = staged_logits(tmp_path / "packed", policy, has_memory, IDS, PROMPT, measured=False)
    assert (found - expected).abs().max() < TOLERANCE
