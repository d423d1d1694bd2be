"""The engine on a GPU: a token is one CUDA graph. The GPU computes the rows that are in its memory, and the link brings
others, or the CPU computes them: from host memory, or from the disk as the engine does that offloads.

Importing this needs Triton.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

import numpy as np
import torch

from moe_pack import formats
from moe_pack.formats.base.limits import num_cores, num_cpus
from moe_pack.runtime import cpu, model, offload
from moe_pack.runtime.engine import built, machine, mapped, offloaded
from moe_pack.runtime.engine.drafting import DraftChoice
from moe_pack.runtime.gpu import ahead, cpu_share, devices, fit, placements
from moe_pack.runtime.gpu.token import decoder, fused
from moe_pack.runtime.gpu.token import engine as gpu_engine
from moe_pack.runtime.gpu.token.prefetch import PredictionPlan
from moe_pack.runtime.model.pack_weights import MappedPackWeights
from moe_pack.runtime.offload.prefetch import methods_by_layer

MOST_ROWS = 8  # tokens of a graph; there is one for each number


@dataclass(frozen=True, slots=True)
class GpuRun:
    """A GPU, and what is asked of it."""

    device: torch.device
    memory: devices.GpuMemory
    request: fit.GpuRequest
    ram_bytes: int  # host memory for experts


@dataclass(frozen=True, slots=True)
class Sharing:
    """Who has the rows that GPU memory lacks, by which kernels and rates the CPU and the link share them."""

    misses: placements.Misses
    host: devices.HostArena | None  # has the experts that GPU memory lacks
    kernels: cpu.Kernels | None  # of the CPU's share; None if it has none, or torch computes it
    rates: cpu_share.Rates | None  # for prompts; None if the CPU computes nothing of them
    pulled_share: float = 0.0  # of a token's missing records, that the link brings


def build_on_gpu(
    setup: built.Setup, choice: DraftChoice, device: torch.device, host: devices.HostArena | None
) -> built.Built:
    """Builds the engine.

    Args:    host: the pack's experts in page-locked memory, which the caller closes; None: they are read where they
             fit.
    Raises:  BudgetTooSmall; RunError if an option cannot be followed.
    """
    options = setup.options
    options.check_gpu(setup.pack.spec)
    draft_bytes = choice.memory_bytes(setup.context_tokens)
    setup = replace(setup, sequences=replace(setup.sequences, draft_bytes=draft_bytes))
    run = open_gpu(setup, device)
    with ExitStack() as stack:
        part = GpuPart(setup, run, host, choice.is_drafting(options), stack)

        def assemble() -> built.Built:
            facts = built.Facts("gpu", part.facts.use.budget, part.tier, part.facts)
            return built_of(setup, choice, part, facts)

        live = LiveGpus([part], assemble)
        stack.callback(live.release)
        return replace(live.take(), opened=stack.pop_all())


def built_of(setup: built.Setup, choice: DraftChoice, last: GpuPart, facts: built.Facts) -> built.Built:
    """Returns what runs, with new drafts; `last` has the last layers."""
    engine = last.facts.engine
    opened = choice.open(setup, engine.decoder, engine.weights, last.num_rows)
    computing = built.Computing(model.TORCH)
    return built.Built(setup, computing, engine.weights, engine.decoder, opened, choice.why_not, facts, ExitStack())


class GpuPart:
    """A GPU's engine, whose memory is taken for a budget, given back and taken again.

    Experts in host memory, kernels and the CPU's own engine stay. So do measurements: an engine with passes of the same
    length needs no new ones.
    Args:    host: as of `build_on_gpu`.   drafts: as of `choose_inputs`.   stack: closes what is in host memory.
    Raises:  RunError if an option cannot be followed.
    """

    def __init__(
        self, setup: built.Setup, run: GpuRun, host: devices.HostArena | None, drafts: bool, stack: ExitStack
    ) -> None:
        self._setup, self._run = setup, run
        self._sharing = _share(setup, run, _host_memory(setup, run, host, stack), stack)
        self._inputs, self._preset = choose_inputs(setup, run, self._sharing, drafts=drafts)
        self.num_rows = self._inputs.num_rows
        self.tier: built.OffloadFacts | None = None  # the CPU's own engine, if host memory lacks experts
        self._tier_stack, self._elsewhere = stack.enter_context(ExitStack()), np.zeros(0, bool)
        self._asked_bytes = run.request.budget_bytes  # None: all free memory
        self._first_bytes: int | None = None  # the budget of the first engine
        self.facts: built.GpuFacts  # since the first `take`
        self._known, self._tuned = gpu_engine.Measurements(), dict[int, decoder.LinkShares]()  # by budgets
        self._taken = ExitStack()

    def take(self, budget_bytes: int | None) -> None:
        """Builds the engine within a budget; None: that of the last one.

        Raises:  BudgetTooSmall; RunError if the GPU has too little free memory. Then none is taken.
        """
        asked_bytes = budget_bytes or self._asked_bytes
        with devices.on_device(self._run.device):
            try:
                engine, use = self._fit(self._allowed(asked_bytes))
            except torch.OutOfMemoryError as fault:
                fault.__traceback__ = None  # its frames refer to what was allocated
                gpu_engine.free_unused_memory()
                raise formats.RunError(f"budget: the GPU has too little free memory ({fault}); give less") from None
            self._taken.enter_context(closing(engine))
            share = engine.tune(self._tuned.get(use.budget))
        if share is not None:
            self._tuned[use.budget] = share
        setup, sharing, is_first = self._setup, self._sharing, self._first_bytes is None
        self._asked_bytes, self._first_bytes = asked_bytes, self._first_bytes or use.budget
        runs_predicted = self._preset.prediction != "none" and setup.options.approximations.runs_predicted
        if is_first and runs_predicted and not use.dynamic:
            setup.fall_back("--trust-experts changes nothing: all experts are in GPU memory")
        misses = ("auto" if sharing.pulled_share else "cpu") if sharing.misses == "split" else sharing.misses
        locked_bytes = 0 if sharing.host is None else sharing.host.locked_bytes
        preset = self._preset if engine.decoder.predicts else self._preset.without_prediction()
        self.facts = built.GpuFacts(engine, self._run.memory, use, preset, misses, locked_bytes)

    def release(self) -> None:
        """Closes the engine, if there is one."""
        with devices.on_device(self._run.device):
            self._taken.close()
            gpu_engine.free_unused_memory()

    def used_bytes(self) -> int:
        """Returns the GPU's memory that this process uses."""
        return self._run.memory.used_bytes()

    def _allowed(self, asked_bytes: int | None) -> int | None:
        """Returns the budget that is asked for, or as usual all free memory, now no more than at first.

        None: `_fit` finds it out, before the first engine.
        Raises:  RunError if others use too much of the memory.
        """
        if self._first_bytes is None:
            return asked_bytes
        most = self._run.memory.used_bytes() + self._run.memory.free_bytes()
        if asked_bytes is None:
            return max(1, min(self._first_bytes, fit.usual_budget(most)))
        if asked_bytes > most:
            raise formats.RunError(
                f"budget: {formats.size_text(asked_bytes)} is more than the {formats.size_text(most)} that this "
                "process can have of the GPU's memory now; give less, or wait until others need less"
            )
        return asked_bytes

    def _fit(self, budget_bytes: int | None) -> tuple[gpu_engine.GpuEngine, fit.GpuMemoryUse]:
        setup, run = self._setup, self._run
        most_bytes = budget_bytes or run.memory.free_bytes()
        offset_bytes = placements.offset_bytes_for(setup.pack.layout, most_bytes)
        if offset_bytes != self._inputs.offset_bytes:
            self._inputs, self._known = replace(self._inputs, offset_bytes=offset_bytes), gpu_engine.Measurements()
        inputs, request = self._inputs, replace(run.request, budget_bytes=budget_bytes)

        def build(expert_bytes: int, chunk_tokens: int) -> gpu_engine.GpuEngine:
            own = inputs
            if inputs.misses == "disk":
                is_measured = chunk_tokens not in self._known.by_chunk
                own = replace(inputs, tier=self._open_tier(expert_bytes, is_measured))
            return gpu_engine.GpuEngine(own, expert_bytes, setup.context_tokens, chunk_tokens, request.cache_dtype)

        def compile_kernels(launch_all: Callable[[], None]) -> None:
            with ahead.collected_launches() as jobs:
                launch_all()
            ahead.compile_ahead(list(jobs.values()), num_cpus(), setup.progress)

        return gpu_engine.fit_to_gpu(
            setup.pack, run.device, run.memory, request, inputs.least_bytes, build, compile_kernels, self._known
        )

    def _open_tier(self, expert_bytes: int, is_measured: bool) -> model.ExpertRunner:
        """Opens the CPU's own engine for the experts that GPU memory lacks, unless it is open for the same ones.

        Args:    is_measured: whether the GPU's engine is measured alone; then experts are used in their mapped files.
        """
        setup, kernels = self._setup, self._sharing.kernels
        operations = model.TORCH if kernels is None else model.NativeOperations(kernels)
        if is_measured and isinstance(operations, model.NativeOperations):
            return MappedPackWeights(setup.pack, operations)
        placement = gpu_engine.placement_of(self._inputs, expert_bytes)
        is_elsewhere = placement.has_selector & (placement.first_dynamic == placement.num_rows)
        before = self.tier
        if before is None or not np.array_equal(is_elsewhere, self._elsewhere):
            self.tier = None
            self._tier_stack.close()
            # The GPU chooses the experts, so nothing is approximated here.
            sizes = (self._run.ram_bytes, offload.EXACT, self._tier_stack, is_elsewhere)
            self.tier, self._elsewhere = offloaded.offload_experts(setup, operations, *sizes), is_elsewhere
            setup.fallbacks[:] = dict.fromkeys(setup.fallbacks)  # it may have noted the same before
            if before is not None:
                self.tier.weights.observer = before.weights.observer
        assert self.tier is not None, "it is open"
        return self.tier.weights


class LiveGpus:
    """The GPUs of an engine, whose memory is given back and taken again.

    Args:    parts: one for each GPU.   assemble: returns what runs on them; its `opened` owns nothing.
    """

    def __init__(self, parts: Sequence[GpuPart], assemble: Callable[[], built.Built]) -> None:
        self._parts, self._assemble = tuple(parts), assemble

    def take(self, budget_bytes: int | None = None) -> built.Built:
        """Takes memory on all GPUs, within the budgets that they had.

        Args:    budget_bytes: another budget, if there is one GPU.
        Raises:  as `GpuPart.take`; then none is taken.
        """
        if budget_bytes is not None and len(self._parts) > 1:
            raise formats.RunError(
                "budget: it cannot be changed for several GPUs, whose layers it divides; start again"
            )
        with ExitStack() as undo:
            undo.callback(self.release)
            for part in self._parts:
                part.take(budget_bytes)
            found = replace(self._assemble(), live=self)
            undo.pop_all()
        return found

    def release(self) -> None:
        """Gives memory back, down to the drivers' contexts and the kernels that they have loaded."""
        for part in self._parts:
            part.release()

    def used_bytes(self) -> int:
        """Returns the memory of all GPUs that this process uses."""
        return sum(part.used_bytes() for part in self._parts)


def open_gpu(setup: built.Setup, device: torch.device, memory: devices.GpuMemory | None = None) -> GpuRun:
    """Opens the GPU, before anything else uses it, unless its memory is given."""
    options = setup.options
    memory = memory or devices.GpuMemory(device)
    sizes = (options.whole_budget, setup.context_tokens, options.chunk_tokens)
    request = fit.GpuRequest(*sizes, setup.kv_dtype, setup.sequences)
    return GpuRun(device, memory, request, options.ram_bytes or machine.usual_bytes() or sys.maxsize)


def _host_memory(
    setup: built.Setup, run: GpuRun, host: devices.HostArena | None, stack: ExitStack
) -> devices.HostArena | None:
    """Returns the experts in host memory; None if they do not fit."""
    needed, options = devices.host_bytes(setup.pack), setup.options
    if host is None and needed <= run.ram_bytes:
        verifies = options.verify == "lazy"
        host = stack.enter_context(devices.HostArena(setup.pack, run.device, setup.progress, verify=verifies))
    if host is not None and not host.is_locked:
        setup.fall_back(
            f"only {formats.size_text(host.locked_bytes)} of {formats.size_text(host.num_bytes)} of host memory are "
            "page-locked: the CPU computes experts in the rest, and prompts copy them more slowly"
        )
    if host is None and options.misses == "pull":
        raise formats.RunError(
            f"--misses pull needs {formats.size_text(needed)} of host memory for experts, --ram is "
            f"{formats.size_text(run.ram_bytes)}; give more, or use --misses cpu, which reads experts from the disk"
        )
    return host


def _share(setup: built.Setup, run: GpuRun, host: devices.HostArena | None, stack: ExitStack) -> Sharing:
    """Divides missing rows between host memory, link and CPU; the stack closes the kernels."""
    options = setup.options
    kernels = None if options.misses == "pull" else _helping_kernels(setup, stack)
    if host is None:
        return Sharing("disk", None, kernels, None)
    if kernels is None:
        if not host.is_locked:
            raise formats.RunError(
                "--misses pull needs all host memory page-locked; raise the limit (ulimit -l), or use --misses cpu"
            )
        return Sharing("pull", host, None, None)
    if not host.is_layer_locked(0):
        return Sharing("split", host, kernels, None)
    rates = cpu_share.Rates.measure(setup.pack, host, kernels, run.device)
    if options.misses != "auto":
        return Sharing("split", host, kernels, None)
    return Sharing("split", host, kernels, rates, rates.pulled_share)


def _helping_kernels(setup: built.Setup, stack: ExitStack) -> cpu.Kernels | None:
    """Opens kernels with which the CPU computes what the GPU lacks; None where there are none."""
    options = setup.options
    if options.kernels == "torch":
        if options.misses == "cpu":
            raise formats.RunError("--misses cpu needs native kernels; remove --kernels torch")
        return None
    # A CPU is left to the process itself: where all compute, each layer waits for the one that was interrupted.
    kernels = mapped.open_kernels(setup, options.threads or max(1, min(num_cores(), num_cpus() - 1)), stack)
    if kernels is None:
        setup.fall_back(f"missing rows are pulled over the link: native kernels {cpu.why_unavailable()}")
    return kernels


def choose_inputs(
    setup: built.Setup, run: GpuRun, sharing: Sharing, drafts: bool = False
) -> tuple[gpu_engine.GpuInputs, offload.Preset]:
    """Decides what is predicted on the GPU; returns the engine's inputs, and the policy.

    Args:    drafts: whether several tokens of a sequence are verified together.
    """
    pack, options, share = setup.pack, setup.options, sharing.pulled_share
    preset = _preset(setup, run.device)
    routing = offload.Routing.open(pack.whole)
    popularity = offloaded.popularity_shares(pack.whole, routing)[pack.moe_slice]
    _check_changes(setup)
    if not options.prefetches or not (share or sharing.misses == "pull"):  # nothing comes over the link
        preset = preset.without_prediction()
    if preset.prediction in ("popularity", "paths", "mlp") and pack.whole is not pack:
        setup.fall_back("no expert is predicted: profiles predict on one GPU alone; --policy corm needs none")
        preset = preset.without_prediction()
    if pack.whole is not pack:
        routing = None  # it is of all layers
    if preset.prediction != "none" and not fused.routes(pack.spec):
        if options.policy != "auto":
            setup.fall_back("no expert is predicted: on a GPU this model's routers run in torch")
        preset = preset.without_prediction()
    inputs = gpu_engine.GpuInputs(
        pack=pack,
        device=run.device,
        misses=sharing.misses,
        host=sharing.host,
        tier=None,
        kernels=sharing.kernels,
        rates=None if preset.balances else sharing.rates,
        pulled_share=share,
        popularity=popularity,
        is_fast=options.numerics == "fast",
        prediction=_prediction(setup, preset, routing, sharing.misses),
        alpha=options.approximations.substitute,
        by_expert=preset.balances and share > 0,
        sequences=setup.sequences,
        num_rows=min(MOST_ROWS, MOST_ROWS if drafts else setup.sequences.number),
        offset_bytes=placements.offset_bytes_for(pack.layout, run.request.budget_bytes or run.memory.free_bytes()),
    )
    return inputs, preset


def _preset(setup: built.Setup, device: torch.device) -> offload.Preset:
    """Returns the policies of `--policy`; `auto` tries a prediction, and keeps it where a token is faster with it."""
    policy = setup.options.policy
    if policy != "auto":
        return offload.PRESETS[policy]
    # Without a GPU, where the interpreter runs the kernels, nothing can be tried.
    return replace(offload.PRESETS["lru"], prediction="best" if device.type == "cuda" else "none")


def _check_changes(setup: built.Setup) -> None:
    """Refuses options that change the choice of experts where the kernel does not choose."""
    approximations, spec = setup.options.approximations, setup.pack.spec
    changes = {"--substitute": approximations.substitute is not None, "--trust-experts": approximations.runs_predicted}
    for name in (name for name, is_given in changes.items() if is_given):
        if not fused.routes(spec):
            raise formats.RunError(f"{name}: on a GPU this model's routers run in torch; remove it or use --device cpu")


def _prediction(
    setup: built.Setup, preset: offload.Preset, routing: offload.Routing | None, misses: placements.Misses
) -> PredictionPlan | None:
    spec, trusts = setup.pack.spec, setup.options.approximations.runs_predicted
    number = min(preset.num_predicted(spec.router.num_experts_per_tok), spec.router.num_experts)
    if trusts and number < spec.router.num_experts_per_tok:
        setup.fall_back(offloaded.TOO_FEW_TO_TRUST)
    if preset.prediction == "none":
        return None
    methods = methods_by_layer(offloaded.predicted_by(preset, routing, setup.fall_back), spec, routing)
    # With "pull" nothing is missing in the hidden state, and the next layer's attention comes later. States of mixers
    # take no trial.
    if misses == "pull" or setup.pack.spec.mixer is not None:
        methods = {l: "router" if method == "partial" else method for l, method in methods.items()}
    return PredictionPlan(methods, number, routing, trusts, setup.options.policy == "auto" and not trusts)
