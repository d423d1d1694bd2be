"""The engine: it builds everything that runs a pack, as the options say, and owns it.

There are three ways to run a pack, each with a module that builds it:

    mapped      CPU: kernels use experts in their mapped files; the system decides what stays in memory
    offloaded   CPU: experts are read from the disk into pages within a budget, by a policy
    gpu         a token is one CUDA graph: the GPU computes the rows that are in its memory, the CPU the others, from
                host memory, or as above from the disk

If something that the options ask for is not possible, the engine does something else and lists it as a fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from moe_pack import formats
from moe_pack.formats.base import commands
from moe_pack.formats.pack.reader import audit
from moe_pack.runtime import model, offload
from moe_pack.runtime.engine import machine, mapped
from moe_pack.runtime.engine.built import Built, Computing, Setup
from moe_pack.runtime.engine.drafting import choose_drafts
from moe_pack.runtime.engine.options import EngineOptions

if TYPE_CHECKING:
    from moe_pack.runtime.drafts import Drafts
    from moe_pack.runtime.gpu.devices import HostArena


class Engine:
    """A pack that is ready to run. It owns everything except the pack: `close` it, or use it in a `with`.

    Args:    host: the pack's experts in page-locked memory, for a GPU; the caller closes it. None: the engine reads
             them where they fit.   measure_disk: is called if experts are offloaded, only some of their neurons run and
             `options.machine` is None; None: the usual disk is assumed.   sequences: that run at once, each with a
             context of its own; a GPU runs one.
    Raises:  BudgetTooSmall; RunError if an option cannot be followed, or `is_strict` and there is a fallback; PackError
             if the pack is damaged.
    """

    def __init__(
        self,
        pack: formats.Pack,
        options: EngineOptions,
        context_tokens: int,
        progress: formats.Progress = formats.NO_PROGRESS,
        host: HostArena | None = None,
        measure_disk: Callable[[], machine.MachineFacts] | None = None,
        sequences: offload.Sequences = offload.ONE_SEQUENCE,
    ) -> None:
        options, _ = choose_device(pack, options, context_tokens)
        self.device, *other_gpus = _devices(options)
        kv_dtype = options.kv_dtype if options.device == "cpu" else None  # a GPU's cache is no part of host memory
        sequences = replace(sequences, kv_dtype=kv_dtype or "f32")
        setup = Setup(pack, options, context_tokens, sequences, progress, measure_disk)
        if options.verify == "full":
            audit(pack, progress)
        with ExitStack() as stack:
            built = _build(setup, [self.device, *other_gpus], host, stack)
            stack.push(built.opened)
            self._stack = stack.pop_all()
        self.pack, self.options = pack, options  # with a device in place of `auto`
        self._built: Built | None = built  # None while its memory is given back
        self._reading = Lock()  # of what runs, by another thread
        self._live, self.facts, self.fallbacks = built.live, built.facts, setup.fallbacks
        self.operations, self.kv_dtype = built.computing.operations, built.setup.kv_dtype
        self.numerics, self.why_no_drafts = built.computing.numerics, built.why_no_drafts

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except formats.RunError as later:
            if fault is None:
                raise
            fault.add_note(str(later))  # the first error is the cause, so it stays the message

    def close(self) -> None:
        """Ends reads and threads, frees all memory, and writes the trace and the recording.

        Raises:  RunError if one of them cannot be written.
        """
        self._stack.close()

    @property
    def built(self) -> Built:
        """The parts that run."""
        assert self._built is not None, "its memory was not given back"
        return self._built

    @property
    def decoder(self) -> model.Decoder | model.EncoderDecoder:
        """The model that runs."""
        return self.built.decoder

    @property
    def weights(self) -> model.PackWeights:
        """The weights of the decoder."""
        return self.built.weights

    @property
    def drafts(self) -> Drafts | None:
        """The drafts; None if there are none."""
        return self.built.drafts

    @property
    def plan(self) -> offload.BudgetPlan | None:
        """The division of the budget of host memory; None unless experts are read from the disk within one."""
        return None if self.facts.offload is None else self.facts.offload.plan

    @property
    def offloaded(self) -> offload.OffloadedWeights | None:
        """The weights that are offloaded to the disk; None if none are."""
        return None if self.facts.offload is None else self.facts.offload.weights

    def bytes_read(self) -> int:
        """Returns the bytes of experts that have run, since the memory was taken; any thread may call it."""
        with self._reading:
            return 0 if self._built is None else self._built.weights.bytes_read

    # ---- memory that is given back ----------------------------------------------------------------------------------

    @property
    def is_live(self) -> bool:
        """Whether memory can be given back and taken again: that of GPUs."""
        return self._live is not None

    @property
    def is_released(self) -> bool:
        """Whether the memory is given back; then there are no decoder, weights and drafts."""
        return self._built is None

    def release(self) -> None:
        """Gives the GPUs' memory back, down to the drivers' contexts and loaded kernels; host memory stays.

        Nothing else may refer to the decoder, the weights or the drafts.
        """
        assert self._live is not None, "it is live"
        with self._reading:
            self._built = None
        self._live.release()

    def take(self, budget_bytes: int | None = None) -> None:
        """Takes the memory again; prompts that were computed are forgotten.

        Args:    budget_bytes: of the GPU; None: as before.
        Raises:  BudgetTooSmall; RunError if there is too little free memory. Then the memory stays given back.
        """
        assert self._live is not None and self._built is None, "it is live, and was given back"
        built = self._live.take(budget_bytes)
        self._built, self.facts = built, built.facts

    def used_bytes(self) -> int:
        """Returns the memory of the GPUs that this process uses."""
        assert self._live is not None, "it is live"
        return self._live.used_bytes()


def _build(setup: Setup, devices: Sequence[torch.device], host: HostArena | None, stack: ExitStack) -> Built:
    """Builds the engine for a setup; the caller closes the stack."""
    is_on_gpu = setup.options.device == "cuda"
    if is_on_gpu:
        torch.set_num_threads(1)  # others would spin after each small thing, on the CPUs that compute experts
    computing = Computing(model.TORCH) if is_on_gpu else mapped.open_operations(setup, stack)
    choice = choose_drafts(setup, computing.operations)
    if is_on_gpu:
        from moe_pack.runtime.engine import gpu, stages  # which need triton

        if len(devices) > 1:
            return stages.build_on_gpus(setup, choice, devices)
        return gpu.build_on_gpu(setup, choice, devices[0], host)
    draft_bytes = choice.memory_bytes(setup.context_tokens)
    setup = replace(setup, sequences=replace(setup.sequences, draft_bytes=draft_bytes))
    setup.options.check_cpu(setup.pack.spec)
    budget_bytes = _cpu_budget(setup)
    if budget_bytes is None:
        return mapped.build_mapped(setup, computing, choice)
    from moe_pack.runtime.engine.offloaded import build_offloaded

    return build_offloaded(setup, computing, choice, budget_bytes)


def _cpu_budget(setup: Setup) -> int | None:
    options, layout = setup.options, setup.pack.layout
    if options.read == "map":
        if options.whole_budget is not None:
            setup.fall_back("the system keeps mapped files in memory, whatever the budget")
        return None
    if options.whole_budget is not None:
        return options.whole_budget
    predictor_bytes = offload.routing_bytes(setup.pack.folder)
    needed = offload.whole_bytes(layout, setup.context_tokens, predictor_bytes, setup.sequences)
    usual, mapped = machine.usual_bytes(), machine.mapped_bytes()
    if options.offload_only() or options.policy != "auto" or options.read != "auto":
        return needed if usual is None else min(needed, usual)
    return None if mapped is None or needed <= mapped else usual


def choose_device(
    pack: formats.Pack, options: EngineOptions, context_tokens: int, needs_cpu: str | None = None
) -> tuple[EngineOptions, str | None]:
    """Returns the options with a device in place of `auto`, and a line for people that says which one and why.

    The GPU is chosen if there is one that can run the pack with these options, in this budget.
    Args:    needs_cpu: an option of the command, as `--sessions`, that has no meaning on a GPU.
    Raises:  RunError if an option has a meaning on a GPU only, and the CPU is chosen.
    """
    if options.device != "auto":
        return options, None
    gpu = machine.gpu_here()
    why_cpu = "no GPU found" if gpu is None else gpu.fault
    if gpu is not None and why_cpu is None:
        refusal = options.gpu_refusal(pack.spec)
        if needs_cpu is not None:
            why_cpu = f"{needs_cpu} needs it"
        else:
            why_cpu = _why_too_small(pack, options, context_tokens, gpu) if refusal is None else refusal[0]
    if gpu is not None and why_cpu is None:
        return replace(options, device="cuda"), f"device: cuda ({gpu.name})"
    names = [*commands.given(options, mark="gpu"), *(["--budget with several sizes"] if options.gpu_budgets else [])]
    if names:
        raise formats.RunError(f"{names[0]} needs a GPU, and --device auto is the CPU here ({why_cpu}); remove it")
    return replace(options, device="cpu"), f"device: cpu ({why_cpu})"


def _why_too_small(pack: formats.Pack, options: EngineOptions, context_tokens: int, gpu: machine.GpuHere) -> str | None:
    """Returns why a pack does not run in the budget, or in the GPU's memory, in words; None if it should."""
    from moe_pack.runtime.gpu.fit import GpuCosts, gpu_needs, usual_budget

    if options.gpu_budgets:
        return _why_too_few(options, gpu)
    budget, memory = options.whole_budget, formats.size_text(gpu.memory_bytes)
    if budget is not None and budget > gpu.memory_bytes:
        return f"--budget is {formats.size_text(budget)}, {gpu.name} has {memory}"
    least = gpu_needs(pack.layout, context_tokens, GpuCosts(options.kv_dtype or "bf16")).least_budget
    if least <= (usual_budget(gpu.memory_bytes) if budget is None else budget):
        return None
    here = f"{gpu.name} has {memory}" if budget is None else f"--budget is {formats.size_text(budget)}"
    return f"a GPU needs {formats.size_text(least)} for this pack, {here}"


def _why_too_few(options: EngineOptions, gpu: machine.GpuHere) -> str | None:
    """Returns why the GPUs here do not have several budgets, in words; None if they do."""
    budgets = options.gpu_budgets
    gpus = [gpu, *(machine.gpu_here(number) for number in range(1, min(len(budgets), machine.num_gpus())))]
    if len(gpus) < len(budgets):
        return f"--budget has {len(budgets)} sizes, and the number of GPUs found is {len(gpus)}"
    for budget, each in zip(budgets, gpus, strict=True):
        if each is None or each.fault is not None:
            return "no GPU found" if each is None else each.fault
        if budget > each.memory_bytes:
            size, memory = formats.size_text(budget), formats.size_text(each.memory_bytes)
            return f"--budget is {size}, {each.name} has {memory}"
    return None


def _devices(options: EngineOptions) -> list[torch.device]:
    """Returns the device of the options; of several GPUs all, in torch's order."""
    first, number = _device(options.device), len(options.gpu_budgets)
    if options.device == "cpu" or not number:
        return [first]
    gpu = machine.gpu_here()
    if gpu is not None and (why := _why_too_few(options, gpu)) is not None:
        raise formats.RunError(f"{why}; give a budget for each GPU that is to run, at most its memory")
    return [torch.device(first.type, idx) for idx in range(number)]


def _device(name: str) -> torch.device:
    gpu = machine.gpu_here() if name == "cuda" else None
    if name == "cuda" and (gpu is None or gpu.fault is not None):
        raise formats.RunError(f"--device cuda: {'no GPU found' if gpu is None else gpu.fault}; use --device cpu")
    return torch.device(name)
