"""The engine: it builds everything that runs a pack, as the options say, and owns it.

There are three ways to run a pack, and `Engine` has a method that builds each:

    mapped      CPU: kernels use experts in their mapped files; the system decides what stays in memory
    offloaded   CPU: experts are read from the disk into pages within a budget, by a policy
    GPU         a token is one CUDA graph: the GPU computes the rows that are in its memory, the CPU the others, from
                host memory, or as above from the disk

If something that the options ask for is not possible, the engine does something else and lists it as a fallback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Literal, cast

import torch

from moe_pack import formats
from moe_pack.formats import families
from moe_pack.formats.pack.reader import audit
from moe_pack.runtime import cpu, drafts, model, offload
from moe_pack.runtime.engine import machine, numerics
from moe_pack.runtime.engine.options import Device, EngineOptions
from moe_pack.runtime.offload import budgets

if TYPE_CHECKING:
    from moe_pack.runtime.drafts.drafter import Drafter
    from moe_pack.runtime.engine.choices import OffloadChoices
    from moe_pack.runtime.gpu import fit
    from moe_pack.runtime.gpu.devices import GpuMemory, HostArena
    from moe_pack.runtime.gpu.fit import GpuRequest
    from moe_pack.runtime.gpu.gpu_engine import GpuInputs
    from moe_pack.runtime.gpu.placements import Misses
    from moe_pack.runtime.gpu.prefetch import PredictionPlan
    from moe_pack.runtime.model.caches import KvDtype

_SHARE_OF_FREE_MEMORY = 0.75  # that a run takes if no option says how much


@dataclass(frozen=True, slots=True)
class _GpuRun:
    """What a GPU's engine is built for. `ram_bytes`: host memory for experts."""

    memory: GpuMemory
    request: GpuRequest
    ram_bytes: int


class Engine:
    """A pack that is ready to run. It owns everything except the pack: `close` it, or use it in a `with`.

    `pack`: what it runs.   `decoder` runs it, with a context of `context_tokens`.   `plan`: how a budget of host memory
    is divided, `choices`: policy, cache and reads, `offloaded`: the weights; None unless experts are read from the disk
    within one.
    `numerics`: the mode in which inputs are rounded; `numerics_loss`: what was measured of all modes, None if nothing.
    `misses`: who has what is not in GPU memory.   `gpu_memory`, `gpu_use`, `gpu_preset`: a GPU's memory, its use and
    its policies; None on the CPU.
    `drafts`: with which `generate` may run several tokens in a pass; None: it runs each alone, `why_no_drafts` says why
    unless the options do.
    `options`: as given, with a device in place of `auto`.
    `fallbacks`: what the engine does because something else was not possible.
    Args:    host: the pack's experts in page-locked memory, for a GPU; the caller closes it. None: the engine reads
             them where they fit.   measure_disk: is called if experts are offloaded, only some of their neurons run and
             `options.machine` is None; None: the usual disk is assumed.   sequences: that run at once, each with a
             context of its own; a GPU runs one.
    Raises:  BudgetTooSmall; RunError if an option cannot be followed, or `is_strict` and there is a fallback;
             PackError if the pack is damaged.
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
        self.options, self.host, self.device = options, host, _device(options.device)
        self.fallbacks: list[str] = []
        self.numerics: numerics.NumericsMode = "exact"
        self.numerics_loss: numerics.NumericsLoss | None = None
        self.plan: offload.BudgetPlan | None = None
        self.choices: OffloadChoices | None = None
        self.offloaded: offload.OffloadedWeights | None = None
        self.misses: Literal["pull", "auto", "cpu", "disk"] | None = None
        self.gpu_memory: GpuMemory | None = None
        self.gpu_use: fit.GpuMemoryUse | None = None
        self.gpu_preset: offload.Preset | None = None
        self.drafts: drafts.Drafts | None = None
        self.why_no_drafts: str | None = None
        self._layer: families.PredictionLayer | None = None
        self.weights: model.PackWeights
        self.decoder: model.Decoder | model.EncoderDecoder
        self.pack, self._progress, self._context_tokens = pack, progress, context_tokens
        kv_dtype = options.kv_dtype if options.device == "cpu" else None  # a GPU's cache is no part of host memory
        self._sequences = replace(sequences, kv_dtype=kv_dtype or "f32")
        self._measure_disk = measure_disk
        if options.verify == "full":
            audit(pack, progress)
        with ExitStack() as stack:
            self._stack = stack
            self.operations = self._open_operations()
            self._choose_drafts()
            if options.device == "cuda":
                self._build_for_gpu()
            else:
                self._build_for_cpu()
            self._open_drafts()
            self._stack = stack.pop_all()

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
        try:
            self._stack.close()
        finally:
            if self.choices is not None:
                self.choices.write_record()

    # ---- operations and fallbacks -----------------------------------------------------------------------------------

    def _fall_back(self, what: str) -> None:
        """Notes a fallback; with `--strict` it is an error."""
        if self.options.is_strict:
            raise formats.RunError(f"--strict: {what}")
        self.fallbacks.append(what)

    def _open_operations(self) -> model.Operations:
        """Opens what computes on the CPU; with a GPU it is torch, which computes small things there."""
        threads = self.options.threads or cpu.num_cpus()
        if self.options.device != "cpu":
            torch.set_num_threads(1)  # others would spin after each small thing, on the CPUs that compute experts
            return model.TORCH
        if self.options.kernels == "torch":
            if self.options.numerics in ("fast", "fastest"):
                self._fall_back("--numerics is exact: torch does not round inputs")
            torch.set_num_threads(threads)
            return model.TORCH
        kernels = self._open_kernels(threads)
        if kernels is None:
            self._fall_back(f"torch computes: native kernels {cpu.why_unavailable()}")
            torch.set_num_threads(threads)
            return model.TORCH
        best = kernels.instruction_set
        if self.options.kernels not in ("auto", best):
            raise formats.RunError(
                f"--kernels {self.options.kernels}: this machine has {best} at most; use --kernels auto"
            )
        # Next to the kernels torch has little to compute: its own threads would only wait, and spin while they wait.
        torch.set_num_threads(1)
        self._choose_numerics(kernels)
        return model.NativeOperations(kernels)

    def _choose_numerics(self, kernels: cpu.Kernels) -> None:
        """Chooses the numeric mode of `--numerics`, and tells the kernels."""
        self.numerics_loss = numerics.read_numerics(self.pack)
        mode = numerics.chosen_mode(self.options.numerics, self.numerics_loss)
        if kernels.take_digits(numerics.DIGITS[mode]) == numerics.DIGITS[mode]:
            self.numerics = mode
        elif self.options.numerics != "auto":
            self._fall_back(f"--numerics is exact: {kernels.instruction_set} kernels do not round inputs")

    def _open_kernels(self, threads: int) -> cpu.Kernels | None:
        """Opens the kernels of `--kernels`, and closes them with the engine; None for `auto` where there are none."""
        name = self.options.kernels
        assert name != "torch", "torch is no kernel"
        kernels = cpu.open_kernels(threads) if name == "auto" else cpu.Kernels(threads, name)
        return None if kernels is None else self._stack.enter_context(closing(kernels))

    # ---- the engines on the CPU -------------------------------------------------------------------------------------

    def _build_for_cpu(self) -> None:
        self.options.check_cpu(self.pack.spec)
        budget_bytes = self._cpu_budget()
        if budget_bytes is None:
            self._build_mapped()
        else:
            self._build_offloaded(budget_bytes)

    def _cpu_budget(self) -> int | None:
        """Returns the budget of offloaded experts; None if experts are mapped."""
        options = self.options
        if options.read == "map":
            if options.budget_bytes is not None:
                self._fall_back("the system keeps mapped files in memory, whatever the budget")
            return None
        if options.budget_bytes is not None:
            return options.budget_bytes
        needs = (self.pack.layout, self._context_tokens, offload.routing_bytes(self.pack.folder), self._sequences)
        needed = offload.whole_bytes(*needs)
        free = machine.available_bytes()
        most = None if free is None else int(_SHARE_OF_FREE_MEMORY * free)
        if most is not None and needed > most:
            return most
        asks_for_offload = options.offload_only() or options.policy != "auto" or options.read != "auto"
        return needed if asks_for_offload else None

    def _build_mapped(self) -> None:
        self.weights = self._stack.enter_context(closing(model.open_weights(self.pack, self.device, self.operations)))
        self.decoder = self._cpu_decoder(model.PREFILL_TOKENS)

    def _build_offloaded(self, budget_bytes: int) -> None:
        self.weights = self._offloaded_weights(budget_bytes, self.operations, self.options.approximations)
        assert self.plan is not None, "it is made with the weights"
        self.decoder = self._cpu_decoder(self.plan.chunk_tokens)

    def _offloaded_weights(
        self, budget_bytes: int, operations: model.Operations, approximations: offload.Approximations
    ) -> offload.OffloadedWeights:
        """Builds what keeps experts within a budget of host memory and reads the others from the disk."""
        from moe_pack.runtime.engine.choices import OffloadChoices, cache_facts, popularity_shares

        pack, options = self.pack, self.options
        choices = self.choices = OffloadChoices(pack, options, self._fall_back, self._measure_disk)
        needs = (pack.layout, budget_bytes, self._context_tokens, offload.routing_bytes(pack.folder))
        sequences = self._sequences
        self.plan, heat, rows_below = offload.divide_budget(*needs, sequences=sequences), None, 0.0
        # Torch needs whole experts. Where all experts fit, all rows are needed sooner or later, and whole experts are
        # computed together.
        has_all = int(offload.expert_pages(pack.layout, self.plan.page_bytes).sum()) <= self.plan.num_pages
        if isinstance(operations, model.NativeOperations) and (not has_all or options.cutover is not None):
            rows_below = choices.cutover()
        if rows_below > 0:
            heat = budgets.selector_heat(popularity_shares(pack, choices.routing), pack.thresholds > 0)
            self.plan = offload.divide_budget(*needs, heat=heat, sequences=sequences)
        has_selector = budgets.resident_selectors(pack.layout, heat, self.plan.num_selectors)
        facts = cache_facts(pack, self.plan, choices.routing, has_selector)
        preset = choices.choose_preset(facts, rows_below)
        trace = self._stack.enter_context(offload.Trace(options.trace)) if options.trace else None
        cache = choices.open_cache(preset, facts, budget_bytes, self._context_tokens)
        store = offload.ExpertStore(
            pack,
            operations,
            self.plan,
            choices.open_reads,
            verify=options.verify == "lazy",
            rows_below=rows_below,
            gap_bytes=choices.gap_bytes(),
            has_selector=has_selector,
            trace=trace,
        )
        weights = offload.OffloadedWeights(
            pack,
            operations,
            self._stack.enter_context(closing(store)),
            cache,
            scores_matter=choices.needs_scores(preset),
            reuses_selector=preset.reuse_selector and options.prefetches and rows_below > 0,
            approximations=approximations,
            recorder=choices.recorder,
            trace=trace,
        )
        self._stack.enter_context(closing(weights))
        weights.prefetcher = choices.prefetcher(preset, weights)
        self.offloaded = weights
        return weights

    def _cpu_decoder(self, most_tokens: int) -> model.Decoder | model.EncoderDecoder:
        """Returns the decoder of the model, whose passes have at most `most_tokens`."""
        chunk_tokens = min(self.options.chunk_tokens or most_tokens, most_tokens)
        if self.pack.spec.encoder is not None:
            return model.EncoderDecoder(self.weights, self._context_tokens, self.device, chunk_tokens)
        number, checkpoints = self._sequences.number, self._sequences.checkpoints
        return model.Decoder(
            self.weights,
            self._context_tokens,
            self.device,
            max(chunk_tokens, number),
            self._sequences.kv_dtype,
            num_sequences=number,
            num_checkpoints=checkpoints,
        )

    # ---- drafts -----------------------------------------------------------------------------------------------------

    def _choose_drafts(self) -> None:
        """Finds the prediction layer that drafts, if it does, and counts its memory; or says why nothing drafts."""
        self.why_no_drafts = None if self.options.draft == "off" else self._why_no_drafts()
        if self.options.draft == "mtp" and self.why_no_drafts is None:
            self._layer = families.PredictionLayer.find(self.pack)
            if self._layer is None:
                self.why_no_drafts = "the pack has no prediction layer that runs; --draft ngram needs none"
            else:
                num_bytes = drafts.prediction_bytes(self._layer, self._context_tokens)
                self._sequences = replace(self._sequences, draft_bytes=num_bytes)
        if self.why_no_drafts is not None and self.options.draft != "auto":
            self._fall_back(f"nothing is drafted: {self.why_no_drafts}")

    @property
    def kv_dtype(self) -> KvDtype:
        """How keys and values are stored."""
        return self._sequences.kv_dtype if self.options.device == "cpu" else _gpu_cache_dtype(self.options)

    @property
    def prediction_bytes(self) -> int:
        """The bytes of the prediction layer that drafts, with its keys and values; 0 if none does."""
        return self._sequences.draft_bytes

    def _why_no_drafts(self) -> str | None:
        """Returns why this run cannot draft, whatever the pack has; None if it can."""
        options, approximations = self.options, self.options.approximations
        if options.device == "cuda":
            return "with a GPU each token runs alone"
        if self.pack.spec.encoder is not None:
            return "the model has an encoder"
        if approximations.substitute is not None or approximations.runs_predicted or approximations.is_predicted_enough:
            return "an option that CHANGES THE ANSWER makes it depend on which tokens run together"
        if options.draft == "auto" and not isinstance(self.operations, model.NativeOperations):
            return "in torch, tokens of one pass differ by rounding; --draft ngram drafts all the same"
        if options.draft == "mtp" and self._sequences.number > 1:
            return "a prediction layer follows one sequence, and several run; --draft ngram follows all"
        return None

    def _open_drafts(self) -> None:
        """Opens what drafts."""
        options, decoder = self.options, self.decoder
        if options.draft == "off" or self.why_no_drafts is not None:
            return
        assert isinstance(decoder, model.Decoder), "a model without an encoder"
        drafter: Drafter = drafts.NgramDrafter()
        if self._layer is not None:
            weights = drafts.PredictionWeights(self._layer, self.weights)
            drafter = drafts.PredictionDrafter(weights, self._context_tokens, decoder.chunk_tokens)
            decoder.sequences[0].follower = drafter
        most = 1 + drafts.MOST_DRAFTED
        if self.plan is not None:
            most = budgets.most_verified_tokens(decoder.spec, decoder.chunk_tokens, most)
        self.drafts = drafts.Drafts(drafter, drafts.Gate(), most)

    # ---- the engine on a GPU ----------------------------------------------------------------------------------------

    def _build_for_gpu(self) -> None:
        from moe_pack.runtime.gpu.devices import HostArena, host_bytes

        self.options.check_gpu(self.pack.spec)
        run = self._open_gpu()
        needed = host_bytes(self.pack)
        if self.host is None and needed <= run.ram_bytes:
            arena = HostArena(self.pack, self.device, self._progress, verify=self.options.verify == "lazy")
            self.host = self._stack.enter_context(arena)
        if self.host is not None and not self.host.is_locked:
            locked = formats.size_text(self.host.locked_bytes)
            self._fall_back(
                f"only {locked} of {formats.size_text(self.host.num_bytes)} of host memory are page-locked: the "
                "CPU computes "
                "experts in the rest, and prompts copy them more slowly"
            )
        if self.host is None and self.options.misses == "pull":
            raise formats.RunError(
                f"--misses pull needs {formats.size_text(needed)} of host memory for experts, --ram is "
                f"{formats.size_text(run.ram_bytes)}; give more, or use --misses cpu, which reads experts from the disk"
            )
        built, self.gpu_use = self._build_gpu(run)
        self._stack.enter_context(closing(built))
        self.decoder, self.weights = built.decoder, built.weights
        is_predicted = self.gpu_preset is not None and self.gpu_preset.prediction != "none"
        if is_predicted and self.options.approximations.runs_predicted and not self.gpu_use.dynamic:
            self._fall_back("--trust-experts changes nothing: all experts are in GPU memory")

    def _open_gpu(self) -> _GpuRun:
        """Opens the GPU, and returns what its engine is built for."""
        from moe_pack.runtime.gpu.devices import GpuMemory
        from moe_pack.runtime.gpu.fit import GpuRequest

        options = self.options
        self.gpu_memory = GpuMemory(self.device)  # before anything else uses the GPU
        cache_dtype = _gpu_cache_dtype(options)
        sizes = (options.budget_bytes, self._context_tokens, options.chunk_tokens)
        request = GpuRequest(*sizes, cache_dtype)
        return _GpuRun(self.gpu_memory, request, options.ram_bytes or _usual_ram_bytes())

    def _build_gpu(self, run: _GpuRun) -> tuple[fit.BuiltEngine, fit.GpuMemoryUse]:
        # Imported here, because they need triton, which comes with torch for GPUs only.
        from moe_pack.runtime.gpu.fit import fit_to_gpu
        from moe_pack.runtime.gpu.gpu_engine import GpuEngine
        from moe_pack.runtime.gpu.kernels.ahead import collected_launches, compile_ahead

        pack, device, request = self.pack, self.device, run.request
        inputs = self._gpu_inputs(run.ram_bytes, request.budget_bytes or run.memory.free_bytes())
        if inputs.misses == "split":
            self.misses = "auto" if inputs.pulled_share else "cpu"
        else:
            self.misses = inputs.misses

        def build(expert_bytes: int, chunk_tokens: int) -> GpuEngine:
            return GpuEngine(inputs, expert_bytes, request.context_tokens, chunk_tokens, request.cache_dtype)

        def compile_kernels(launch_all: Callable[[], None]) -> None:
            with collected_launches() as jobs:
                launch_all()
            compile_ahead(list(jobs.values()), cpu.num_cpus(), self._progress)

        return fit_to_gpu(pack, device, run.memory, request, inputs.least_bytes, build, compile_kernels)

    def _gpu_inputs(self, ram_bytes: int, most_bytes: int) -> GpuInputs:
        """Decides who has what is missing on the GPU, and by which policy records come and go there."""
        from moe_pack.runtime.engine.choices import popularity_shares
        from moe_pack.runtime.gpu.cpu_share import Rates, link_rate
        from moe_pack.runtime.gpu.gpu_engine import GpuInputs
        from moe_pack.runtime.gpu.placements import DYNAMIC_SHARE, offset_bytes_for
        from moe_pack.runtime.offload.eviction import eviction_of

        pack, options, host = self.pack, self.options, self.host
        kernels = None if options.misses == "pull" else self._helping_kernels()
        # `auto` predicts nothing: on an H200 predictions that were right gained nothing.
        preset = offload.PRESETS["lru" if options.policy == "auto" else options.policy]
        tier, prompt_rates, share, rate = None, cast(Rates | None, None), 0.0, 0.0
        misses: Misses = "pull" if kernels is None else "split"
        if host is None:
            tier, misses = self._cpu_tier(ram_bytes, kernels), "disk"
        elif kernels is None:
            if not host.is_locked:
                raise formats.RunError(
                    "--misses pull needs all host memory page-locked; raise the limit (ulimit -l), or use --misses cpu"
                )
            rate = link_rate(host, self.device)
        elif host.is_layer_locked(0):
            rates = Rates.measure(pack, host, kernels, self.device)
            rate = rates.link
            if options.misses == "auto":
                share = rates.pulled_share
                prompt_rates = None if preset.balances else rates
        routing = offload.Routing.open(pack)
        if not options.prefetches or not (share or misses == "pull"):  # nothing comes over the link
            preset = preset.without_prediction()
        self.gpu_preset, prediction = preset, self._gpu_prediction(preset, routing, misses)
        return GpuInputs(
            pack=pack,
            device=self.device,
            misses=misses,
            host=host,
            tier=tier,
            kernels=kernels,
            rates=prompt_rates,
            pulled_share=share,
            link_rate=rate,
            popularity=popularity_shares(pack, routing),
            eviction=lambda facts: eviction_of(preset, facts),
            dynamic_share=DYNAMIC_SHARE if preset.keeps else 0.0,
            is_fast=options.numerics == "fast",
            needs_scores=preset.needs_scores,
            prediction=prediction,
            alpha=options.approximations.substitute,
            by_expert=preset.balances and share > 0,
            offset_bytes=offset_bytes_for(pack.layout, most_bytes),
        )

    def _gpu_prediction(
        self, preset: offload.Preset, routing: offload.Routing | None, misses: Misses
    ) -> PredictionPlan | None:
        """Returns what is predicted on the GPU; None if nothing is."""
        from moe_pack.runtime.engine.choices import TOO_FEW_TO_TRUST, predicted_by
        from moe_pack.runtime.gpu.prefetch import PredictionPlan
        from moe_pack.runtime.offload.prefetch import methods_by_layer

        spec, trusts = self.pack.spec, self.options.approximations.runs_predicted
        number = min(preset.num_predicted(spec.router.num_experts_per_tok), spec.router.num_experts)
        if trusts and number < spec.router.num_experts_per_tok:
            self._fall_back(TOO_FEW_TO_TRUST)
        if preset.prediction == "none":
            return None
        methods = methods_by_layer(predicted_by(preset, routing, self._fall_back), spec, routing)
        if misses == "pull":  # nothing is missing in the hidden state, and the next layer's attention comes later
            methods = {l: "router" if method == "partial" else method for l, method in methods.items()}
        return PredictionPlan(methods, number, routing, trusts)

    def _helping_kernels(self) -> cpu.Kernels | None:
        """Opens kernels with which the CPU computes what the GPU lacks; None where there are none."""
        if self.options.kernels == "torch":
            if self.options.misses == "cpu":
                raise formats.RunError("--misses cpu needs native kernels; remove --kernels torch")
            return None
        # A CPU is left to the process itself: where all compute, each layer waits for the one that was interrupted.
        kernels = self._open_kernels(self.options.threads or max(1, cpu.num_cpus() - 1))
        if kernels is None:
            self._fall_back(f"missing rows are pulled over the link: native kernels {cpu.why_unavailable()}")
        return kernels

    def _cpu_tier(self, ram_bytes: int, kernels: cpu.Kernels | None) -> offload.OffloadedWeights:
        """Builds the CPU's own engine for experts that are not in GPU memory, within so much host memory."""
        operations = model.TORCH if kernels is None else model.NativeOperations(kernels)
        return self._offloaded_weights(ram_bytes, operations, offload.EXACT)  # the GPU chooses the experts


def choose_device(
    pack: formats.Pack, options: EngineOptions, context_tokens: int, needs_cpu: str | None = None
) -> tuple[EngineOptions, str | None]:
    """Returns the options with a device in place of `auto`, and a line for people that says which one and why.

    The GPU is chosen if there is one that can run the pack with these options, in this budget.
    Args:    needs_cpu: an option of the command, as `--sessions`, that has no meaning on a GPU.
    Returns: options that name a device as they are, and None.
    Raises:  RunError if an option has a meaning on a GPU only, and the CPU is chosen.
    """
    if options.device != "auto":
        return options, None
    gpu = machine.gpu_here()
    why_cpu = why_no_gpu(gpu)
    if gpu is not None and why_cpu is None:
        refusal = options.gpu_refusal(pack.spec)
        if needs_cpu is not None:
            why_cpu = f"{needs_cpu} needs it"
        else:
            why_cpu = _why_too_small(pack, options, context_tokens, gpu) if refusal is None else refusal.why
    if gpu is not None and why_cpu is None:
        return replace(options, device="cuda"), f"device: cuda ({gpu.name})"
    if names := options.gpu_only():
        raise formats.RunError(f"{names[0]} needs a GPU, and --device auto is the CPU here ({why_cpu}); remove it")
    return replace(options, device="cpu"), f"device: cpu ({why_cpu})"


def why_no_gpu(gpu: machine.GpuHere | None) -> str | None:
    """Returns why no pack runs on a GPU of this machine, in words; None if one can."""
    return "no GPU found" if gpu is None else gpu.fault


def _why_too_small(pack: formats.Pack, options: EngineOptions, context_tokens: int, gpu: machine.GpuHere) -> str | None:
    """Returns why a pack does not run in the budget, or in the GPU's memory, in words; None if it should."""
    from moe_pack.runtime.gpu.fit import GpuCosts, gpu_needs, usual_budget

    budget = options.budget_bytes
    if budget is not None and budget > gpu.memory_bytes:
        return f"--budget is {formats.size_text(budget)}, {gpu.name} has {formats.size_text(gpu.memory_bytes)}"
    least = gpu_needs(pack.layout, context_tokens, GpuCosts(_gpu_cache_dtype(options))).least_budget
    if least <= (usual_budget(gpu.memory_bytes) if budget is None else budget):
        return None
    here = (
        f"{gpu.name} has {formats.size_text(gpu.memory_bytes)}"
        if budget is None
        else f"--budget is {formats.size_text(budget)}"
    )
    return f"a GPU needs {formats.size_text(least)} for this pack, {here}"


def _gpu_cache_dtype(options: EngineOptions) -> KvDtype:
    """Returns how keys and values are stored on a GPU."""
    return options.kv_dtype or "bf16"


def _device(name: Device) -> torch.device:
    """Returns torch's name of a device.

    Raises:  RunError if it is a GPU, and there is none on which the kernels run.
    """
    if name == "cuda" and (fault := why_no_gpu(machine.gpu_here())) is not None:
        raise formats.RunError(f"--device cuda: {fault}; use --device cpu")
    return torch.device(name)


def _usual_ram_bytes() -> int:
    """Returns the host memory for experts if `--ram` does not say how much."""
    free = machine.available_bytes()
    return sys.maxsize if free is None else int(_SHARE_OF_FREE_MEMORY * free)
