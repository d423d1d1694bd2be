"""Types that all ways to run a pack share: the setup that they are built for, the result, and a run's own facts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from moe_pack import formats
from moe_pack.runtime import drafts, model, offload
from moe_pack.runtime.engine import machine, numerics
from moe_pack.runtime.engine.options import EngineOptions

if TYPE_CHECKING:
    from moe_pack.runtime.gpu import devices, fit
    from moe_pack.runtime.gpu.token.engine import GpuEngine
    from moe_pack.runtime.model.caches import KvDtype

RunMode = Literal["mapped", "offloaded", "gpu"]


@dataclass(frozen=True, slots=True)
class Setup:
    """A pack and how to run it; `fallbacks` grows while the engine is built."""

    pack: formats.Pack
    options: EngineOptions  # with a device in place of `auto`
    context_tokens: int  # of each sequence
    sequences: offload.Sequences = offload.ONE_SEQUENCE
    progress: formats.Progress = formats.NO_PROGRESS
    measure_disk: Callable[[], machine.MachineFacts] | None = None  # None: the usual disk is assumed
    fallbacks: list[str] = field(default_factory=list)

    def fall_back(self, what: str) -> None:
        """Notes what the engine does because something else is not possible; with `--strict` it is an error."""
        if self.options.is_strict:
            raise formats.RunError(f"--strict: {what}")
        self.fallbacks.append(what)

    @property
    def kv_dtype(self) -> KvDtype:
        """How keys and values are stored."""
        return self.options.kv_dtype or ("f32" if self.options.device == "cpu" else "bf16")


@dataclass(frozen=True, slots=True)
class Computing:
    """The operations of a run on the CPU, or of small things on a GPU, and how they round inputs."""

    operations: model.Operations
    numerics: numerics.NumericsMode = "exact"
    numerics_kl: float | None = None  # of the mode, in nats a token; None: nothing is lost, or it was not measured


@dataclass(frozen=True, slots=True)
class OffloadFacts:
    """A run that offloads: its budget's division, its policies, and its weights, which count."""

    plan: offload.BudgetPlan
    preset: offload.Preset
    weights: offload.OffloadedWeights
    is_direct: bool  # whether reads bypass the system's cache


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """A run on a GPU: its memory and its use, the policies by which records come and go, and who has missing rows."""

    engine: GpuEngine
    memory: devices.GpuMemory
    use: fit.GpuMemoryUse
    preset: offload.Preset
    misses: Literal["pull", "auto", "cpu", "disk"]
    locked_bytes: int  # page-locked host memory for experts


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that only some ways to run a pack have."""

    mode: RunMode = "mapped"
    budget_bytes: int | None = None  # the memory that the run keeps to; None if the system decides
    offload: OffloadFacts | None = None  # to the disk, by the host's decisions
    gpu: GpuFacts | None = None  # None on the CPU; of several GPUs the first, which has the last layers
    other_gpus: tuple[GpuFacts, ...] = ()  # in torch's order


class LiveMemory(Protocol):
    """Memory of an engine that is given back and taken again."""

    def take(self, budget_bytes: int | None = None) -> Built:
        """Takes memory within the budget that it had, or within another one; returns what runs in it."""

    def release(self) -> None:
        """Gives the memory back; nothing else may refer to what runs in it."""

    def used_bytes(self) -> int:
        """Returns the bytes that this process uses now."""


@dataclass(frozen=True, slots=True)
class Built:
    """An engine that is ready to run. It owns everything but the setup's pack."""

    setup: Setup
    computing: Computing
    weights: model.PackWeights
    decoder: model.Decoder | model.EncoderDecoder
    drafts: drafts.Drafts | None  # with which several tokens may run in a pass; None: each runs alone
    why_no_drafts: str | None  # None also if the options say it
    facts: Facts
    opened: ExitStack
    live: LiveMemory | None = None  # of GPUs; None on the CPU
