"""The staged engine as it is put together for a card, over plain memory: its kernels run by the interpreter."""

from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import torch
from cards import CPU
from native import kernels_limited_to
from recording_device import RecordingDevice

from moe_pack.formats import Pack
from moe_pack.runtime.gpu.device import HostArena
from moe_pack.runtime.gpu.fit import run_everything
from moe_pack.runtime.gpu.staged import TritonOps
from moe_pack.runtime.gpu.staged_engine import CachePolicy, StagedEngine, StagedInputs, least_staged_bytes
from moe_pack.runtime.offload import EXACT, PRESETS, PolicyName, expert_cache_for, open_reads


def staged_logits(
    folder: Path,
    policy: PolicyName,
    has_memory: bool,
    ids: list[int],
    num_prompt: int,
    chunk_tokens: int = 16,
    measured: bool = False,
) -> torch.Tensor:
    """Logits of a prompt, then of one token after the other, with room for one expert alone.

    Args:    measured: everything is run once before, as on a card, where its memory is measured.
    """
    with Pack(folder) as held, ExitStack() as stack:
        preset, ops, device = PRESETS[policy], TritonOps(), RecordingDevice()
        shares = np.full(held.index.size.shape, 1 / held.index.size.shape[1], np.float32)
        asked = StagedInputs(
            held,
            device,
            ops,
            stack.enter_context(HostArena(held, CPU)) if has_memory else None,
            1 << 20,
            lambda memory: open_reads(memory, False, 2),
            lambda facts: CachePolicy(preset, expert_cache_for(preset, facts), None, preset.rows_below),
            lambda preset, weights: None,
            kernels_limited_to("portable"),
            EXACT,
            True,
            shares,
            1,
        )
        room = least_staged_bytes(asked, chunk_tokens)
        with closing(StagedEngine(asked, room, 64, chunk_tokens, torch.float32)) as built:
            if measured:
                run_everything(held, built, chunk_tokens)
            built.prepare()
            decoder = built.decoder
            return torch.cat(
                [decoder.logits(ids[:num_prompt]), *(decoder.logits([token]) for token in ids[num_prompt:])]
            )
