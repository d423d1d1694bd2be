"""Types that all ways to run a pack share: the setup that they are built for, the result, and a run's own facts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from moe_pack import formats
from moe_pack.runtime import drafts, model, offload
from moe_pack.runtime.engine import machine, numerics
from moe_pack.runtime.engine.options import EngineOptions

if TYPE_CHECKING:
    from moe_pack.runtime.gpu import devices, fit
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


class Facts:
    """The facts that only some ways to run a pack have. These are the ones of mapped experts."""

    mode: ClassVar[RunMode] = "mapped"

    @property
    def budget_bytes(self) -> int | None:
        """The memory that the run keeps to; None if the system decides."""
        return None

    @property
    def offload(self) -> OffloadFacts | None:
        """The offload to the disk by the host's decisions; None if there is none."""
        return None

    @property
    def gpu(self) -> GpuFacts | None:
        """The run on a GPU; None on the CPU."""
        return None


@dataclass(frozen=True, slots=True)
class OffloadFacts(Facts):
    """A run that offloads: its budget's division, its policies, and its weights, which count."""

    mode: ClassVar[RunMode] = "offloaded"
    plan: offload.BudgetPlan
    preset: offload.Preset
    weights: offload.OffloadedWeights
    is_direct: bool  # whether reads bypass the system's cache

    @property
    def budget_bytes(self) -> int:
        """The host memory that the run keeps to."""
        return self.plan.budget

    @property
    def offload(self) -> OffloadFacts:
        """These facts."""
        return self


@dataclass(frozen=True, slots=True)
class GpuFacts(Facts):
    """A run on a GPU: its memory and its use, the policies by which records come and go, and who has missing rows."""

    mode: ClassVar[RunMode] = "gpu"
    memory: devices.GpuMemory
    use: fit.GpuMemoryUse
    preset: offload.Preset
    misses: Literal["pull", "auto", "cpu", "disk"]
    locked_bytes: int  # page-locked host memory for experts
    tier: OffloadFacts | None  # the CPU's own engine; None if host memory has all experts

    @property
    def budget_bytes(self) -> int:
        """The GPU memory that the run keeps to."""
        return self.use.budget

    @property
    def offload(self) -> OffloadFacts | None:
        """The offload of the CPU's own engine."""
        return self.tier

    @property
    def gpu(self) -> GpuFacts:
        """These facts."""
        return self


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
