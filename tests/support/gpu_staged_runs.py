"""The staged engine as it is built for a GPU, over plain memory: Triton's interpreter runs its kernels."""

from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import torch
from gpu_runs import CPU
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
    """Logits of a prompt, then of one token after the other, with memory for one expert only.

    Args:    measured: whether everything runs once before, as on a GPU, where memory is measured.
    """
    with Pack(folder) as pack, ExitStack() as stack:
        preset, ops, device = PRESETS[policy], TritonOps(), RecordingDevice()
        shares = np.full(pack.index.size.shape, 1 / pack.index.size.shape[1], np.float32)
        inputs = StagedInputs(
            pack=pack,
            device=device,
            ops=ops,
            host=stack.enter_context(HostArena(pack, CPU)) if has_memory else None,
            ram_bytes=1 << 20,
            open_reads=lambda memory: open_reads(memory, False, 2),
            decide=lambda facts: CachePolicy(preset, expert_cache_for(preset, facts), None, preset.rows_below),
            prefetcher_for=lambda preset, weights: None,
            kernels=kernels_limited_to("portable"),
            approximations=EXACT,
            verify=True,
            shares=shares,
            num_sms=1,
        )
        expert_bytes = least_staged_bytes(inputs, chunk_tokens)
        with closing(StagedEngine(inputs, expert_bytes, 64, chunk_tokens, torch.float32)) as built:
            if measured:
                run_everything(pack, built, chunk_tokens)
            built.prepare()
            decoder = built.decoder
            return torch.cat(
                [decoder.logits(ids[:num_prompt]), *(decoder.logits([token]) for token in ids[num_prompt:])]
            )
