"""`--device cuda` without a GPU: the whole engine, as commands build it, over plain memory under the interpreter."""

import pytest
import torch

import moe_pack.runtime.engine.engine as engine_module
import moe_pack.runtime.engine.gpu as builder
import moe_pack.runtime.gpu.token.engine as gpu_engine
from moe_pack.runtime import offload
from moe_pack.runtime.engine.built import Setup
from moe_pack.runtime.gpu.devices import HostArena
from moe_pack.runtime.gpu.fit import GpuRequest
from moe_pack.runtime.gpu.token.engine import GpuInputs
from support.gpu_runs import CPU, expert_bytes_for

BUDGET = 100 << 20


class PlainMemory:
    """A double of the driver: everything but experts takes just what leaves these so many bytes of the budget."""

    expert_bytes = least_bytes = num_asked = 0

    def used_bytes(self) -> int:
        self.num_asked += 1
        kept = gpu_engine._ROUNDING_BYTES + gpu_engine._SHARED_PIECE_BYTES
        return BUDGET - kept - self.expert_bytes + self.least_bytes if self.num_asked > 1 else 0

    def free_bytes(self) -> int:
        return BUDGET


class PlainMemoryOfAGpu:
    """Replaces the builder's view of the GPU: plain memory, with space for a share of the experts."""

    share = 0.6
    budget_bytes: int | None = BUDGET  # None: all free memory, which is as much
    ram_bytes = 1 << 30
    inputs: GpuInputs  # of the last engine

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._memory, self._choose = PlainMemory(), builder.choose_inputs
        monkeypatch.setattr(builder, "open_gpu", self._open)
        monkeypatch.setattr(builder, "choose_inputs", self._chosen)

    def _open(self, setup: Setup, device: torch.device) -> builder.GpuRun:
        self._memory = PlainMemory()
        request = GpuRequest(self.budget_bytes, setup.context_tokens, 4, "f32", setup.sequences)
        return builder.GpuRun(CPU, self._memory, request, self.ram_bytes)  # type: ignore[arg-type]  # a double

    def _chosen(
        self, setup: Setup, run: builder.GpuRun, sharing: builder.Sharing, drafts: bool = False
    ) -> tuple[GpuInputs, offload.Preset]:
        self.inputs, preset = self._choose(setup, run, sharing, drafts)
        self._memory.least_bytes = self.inputs.least_bytes
        self._memory.expert_bytes = expert_bytes_for(setup.pack, self.share, self.inputs.misses)
        return self.inputs, preset


def plain_gpu(monkeypatch: pytest.MonkeyPatch) -> PlainMemoryOfAGpu:
    """Lets `--device cuda` build its engine over plain memory, for the rest of a test."""
    monkeypatch.setattr(engine_module, "_device", lambda name: CPU)
    monkeypatch.setattr(HostArena, "is_layer_locked", lambda self, layer_idx: True)
    monkeypatch.setattr(HostArena, "is_locked", True)
    return PlainMemoryOfAGpu(monkeypatch)
