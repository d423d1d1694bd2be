"""The staged engine as it is put together for a card, over plain memory: its kernels run by the interpreter."""

from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
import torch
from cards import CPU
from models import TinyMixtral, pack
from native import kernels_limited_to

from moe_pack.formats import Pack
from moe_pack.runtime import Decoder, PackWeights
from moe_pack.runtime.host_arena import HostArena
from moe_pack.runtime.policies import PRESETS, PolicyName, residency_for
from moe_pack.runtime.reads import open_reads
from moe_pack.runtime.recording_device import RecordingDevice
from moe_pack.runtime.staged_engine import Decided, StagedAsked, StagedAtWork, least_staged_bytes
from moe_pack.runtime.staged_triton import TritonOps
from moe_pack.runtime.streaming import NO_TRUST

TOLERANCE = 1e-4  # the project's bound on logits, maximum absolute
IDS = [(37 * i + 5) % 96 for i in range(4)]
PROMPT, CHUNK = 2, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of two layers, each with four experts."""
    shape = TinyMixtral(num_layers=2, num_experts=4, config={"num_experts_per_tok": 2})
    folder = tmp_path_factory.mktemp("staged") / "packed"
    pack(shape.write(folder.parent / "source"), folder)
    return folder


def staged_logits(folder: Path, policy: PolicyName, has_memory: bool) -> torch.Tensor:
    """Logits of a prompt, then of one token after the other, with room for one expert alone."""
    with Pack(folder) as held, ExitStack() as stack:
        preset, ops, device = PRESETS[policy], TritonOps(), RecordingDevice()
        asked = StagedAsked(
            held,
            device,
            ops,
            stack.enter_context(HostArena(held, CPU)) if has_memory else None,
            1 << 20,
            lambda memory: open_reads(memory, False, 2),
            lambda facts: Decided(preset, residency_for(preset, facts), None, preset.rows_below),
            lambda preset, weights: None,
            kernels_limited_to("portable"),
            NO_TRUST,
            True,
            np.full((2, 4), 0.25, np.float32),
            1,
        )
        room = least_staged_bytes(asked, CHUNK)
        with closing(StagedAtWork(asked, room, 64, CHUNK, torch.float32)) as built:
            decoder = built.decoder
            return torch.cat([decoder.logits(IDS[:PROMPT]), *(decoder.logits([token]) for token in IDS[PROMPT:])])


@pytest.mark.parametrize(("policy", "has_memory"), [("lru", True), ("fiddler", True), ("lru", False)])
def test_logits_are_the_references_wherever_experts_come_from(
    policy: PolicyName, has_memory: bool, folder: Path
) -> None:
    with Pack(folder) as held:
        expected = Decoder(PackWeights(held, CPU), 64).logits(IDS)
    assert (staged_logits(folder, policy, has_memory) - expected).abs().max() < TOLERANCE
