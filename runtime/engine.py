"""Everything that runs a pack, put together for what was asked: kernels, budget, policy, weights, decoder.

Where the pack fits memory, no budget is set, and no trace or record is wished, experts are used where they lie in their
mapped files; else they stream through an arena. What was wished and could not be had is a *fallback*, with a name.
"""

import importlib.util
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from moe_pack.formats import NO_PROGRESS, Pack, Progress, RunError, option, size_text
from moe_pack.formats.commands import given
from moe_pack.formats.pack import audit
from moe_pack.formats.spec import read_size
from moe_pack.runtime.cpu import Kernels, is_available, num_cpus, open_kernels, why_unavailable
from moe_pack.runtime.gpu.device import GpuMemory, HostArena, host_bytes
from moe_pack.runtime.gpu.fit import BuiltEngine, GpuMemoryUse, GpuRequest, fit_to_gpu
from moe_pack.runtime.gpu.placement import least_placement
from moe_pack.runtime.machine import MachineFacts, available_bytes
from moe_pack.runtime.model import (
    PREFILL_TOKENS,
    TORCH,
    Decoder,
    EncoderDecoder,
    NativeOperations,
    Operations,
    PackWeights,
    open_weights,
)
from moe_pack.runtime.offload import (
    EXACT,
    PRESETS,
    Approximations,
    BudgetPlan,
    CacheFacts,
    ExpertCache,
    OffloadedWeights,
    Passes,
    PolicyName,
    Prefetcher,
    Preset,
    Reads,
    Recorder,
    Routing,
    auto_preset,
    divide_budget,
    expert_cache_for,
    expert_pages,
    open_reads,
    recorded_expert_cache_for,
    routing_bytes,
    whole_bytes,
)
from moe_pack.runtime.offload.disk import NUM_THREADS, reads_directly
from moe_pack.runtime.offload.expert_store import USUAL_GAP_BYTES, ExpertStore, Trace
from moe_pack.runtime.offload.prefetch import Prediction, make_prediction
from moe_pack.runtime.offload.record import check_place

ReadMode = Literal["auto", "direct", "pread", "map"]
Verify = Literal["lazy", "full", "off"]
KernelsName = Literal["auto", "avx512vbmi", "avx512", "avx2", "portable", "torch"]
EngineName = Literal["auto", "graph", "staged"]
KvDtype = Literal["f32", "bf16"]
DEVICE_OPTION = option("--device", help="Where to compute.")
LEAST_CAPABILITY = (8, 0)
_SHARE_OF_MEMORY = 0.75  # of what is available, where no budget is set and the pack does not fit


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a pack is to be run; the options' help says what the fields mean.

    `policy`: a preset, or the one that replay finds best.   `foretells`: whether experts are read ahead at all.
    `trust`: what may change answers.   `trace`, `record`: experts stream then.   `chunk_tokens`: of a forward pass at
    most; None: as the budget allows.   `machine`: what was measured of it.
    """

    device: Literal["cpu", "cuda"] = field(default="cpu", metadata=DEVICE_OPTION)
    budget_bytes: int | None = field(
        default=None,
        metadata=option(
            "--budget",
            parse=read_size,
            metavar="SIZE",
            help="Memory for weights, key-value cache and what computing needs, as 11G or 800M: of the card with "
            "--device cuda, all that the driver charges included; experts that do not fit stream.  [default: as much "
            "as is free]",
        ),
    )
    engine: EngineName = field(
        default="auto",
        metadata=option(
            "--engine",
            help="With --device cuda: graph runs a token as one CUDA graph, which pulls what the card lacks from host "
            "memory; staged brings experts layer by layer, by any policy, from the drive too; auto: graph where it "
            "can.",
        ),
    )
    ram_bytes: int | None = field(
        default=None,
        metadata=option(
            "--ram",
            parse=read_size,
            metavar="SIZE",
            mark="card",
            help="With --device cuda: host memory for experts; those of a larger pack come from the drive.  "
            "[default: three quarters of what is free]",
        ),
    )
    kv_dtype: KvDtype | None = field(
        default=None,
        metadata=option(
            "--kv-dtype",
            help="Keys and values in 32 or 16 bit.  [default: f32 on the CPU, which has no other, bf16 on a card]",
        ),
    )
    policy: Literal["auto"] | PolicyName = field(
        default="auto",
        metadata=option(
            "--policy",
            help="Which experts stay in memory and which are read ahead; auto keeps as the policy does that hits most "
            "on the profile's routes, where the pack has them, and foretells by what the profile found best.",
        ),
    )
    foretells: bool = field(
        default=True, metadata=option("--no-prefetch", help="Read no expert before its router has chosen it.")
    )
    cutover: float | None = field(
        default=None,
        metadata=option(
            "--cutover",
            least=0,
            most=1,
            metavar="SHARE",
            mark="streaming",
            help="Read single rows of an expert where less than this share of its neurons runs.  [default: where it "
            "pays, once moe-pack doctor has measured the drive; else the policy's]",
        ),
    )
    read: ReadMode = field(
        default="auto",
        metadata=option(
            "--read",
            help="direct: past the system's cache; pread: through it; map: use mapped files, which keeps to no budget.",
        ),
    )
    verify: Verify = field(
        default="lazy",
        metadata=option(
            "--verify", help="Check experts when they are first read, all files before the first token, or not at all."
        ),
    )
    trust: Approximations = EXACT
    threads: int | None = field(
        default=None,
        metadata=option(
            "--threads", "-t", least=1, most=1024, help="CPU threads at work; all that may be used if not given."
        ),
    )
    kernels: KernelsName = field(
        default="auto",
        metadata=option(
            "--kernels",
            help="What computes on the CPU: the best native kernels for this machine, certain ones, or plain torch.",
        ),
    )
    is_strict: bool = field(
        default=False,
        metadata=option("--strict", help="End with an error where something would fall back on another way."),
    )
    trace: Path | None = field(
        default=None,
        metadata=option(
            "--trace",
            path="file",
            metavar="FILE",
            mark="streaming",
            help="Write what happened when, to be opened in ui.perfetto.dev.",
        ),
    )
    record: Path | None = field(
        default=None,
        metadata=option(
            "--record",
            path="file",
            metavar="FILE",
            mark="streaming",
            help="Write what the routers chose, for moe-pack replay.",
        ),
    )
    chunk_tokens: int | None = None
    machine: MachineFacts | None = None

    def of_card_alone(self) -> list[str]:
        """Lists those that were given and have a meaning on a card alone."""
        wanted = {"--engine graph": self.engine == "graph", "--kv-dtype bf16": self.kv_dtype == "bf16"}
        return given(self, mark="card") + [name for name, is_wanted in wanted.items() if is_wanted]

    def of_streams_alone(self) -> list[str]:
        """Lists the options that were given and have a meaning for experts that stream alone."""
        return given(self, mark="streaming")

    def of_staged_alone(self) -> list[str]:
        """Lists those that were given and, on a card, the staged engine alone can do."""
        names = given(replace(self, trace=None), mark="streaming")
        return names + ([f"--policy {self.policy}"] if self.policy not in ("auto", "lru") else [])


class Engine:
    """A pack at work. Owns all but the pack: `close` it, or use it in a `with`.

    `decoder` runs it, with room for `context_tokens`.   `plan`: what the budget is spent on, None where experts are
    mapped, or on a card.   `use`: on a card, what its memory is spent on, by `engine`.   `preset`: the policies of
    experts that stream by the host's decisions.   `is_direct`: whether reads go past the system's
    cache.   `fallbacks`: what was wished and could not be had.
    Args:    host: the pack's experts in page-locked memory, for a card; stays the caller's. None: they are read where
             they fit.
    Raises:  RunError if the budget is too small, something asked for is not to be had, or a fallback would be needed
             and `is_strict`; PackError if the pack is damaged.
    """

    def __init__(
        self,
        pack: Pack,
        options: EngineOptions,
        context_tokens: int,
        progress: Progress = NO_PROGRESS,
        host: HostArena | None = None,
    ) -> None:
        self._progress = progress
        self.options, self.fallbacks = options, list[str]()
        self.plan: BudgetPlan | None = None
        self.preset: Preset | None = None
        self.store: ExpertStore | None = None
        self.reads: Reads | None = None
        self.is_direct = False
        self.engine: Literal["graph", "staged"] = "staged"
        self.use: GpuMemoryUse | None = None
        self.card_memory: GpuMemory | None = None
        self.host = host
        self._recorder: Recorder | None = None
        self._pack, self._stack = pack, ExitStack()
        self.device = _device(options.device)
        if options.verify == "full":
            audit(pack, progress)
        try:
            self.operations = self._open_operations()
            self.weights: PackWeights
            self.decoder: Decoder | EncoderDecoder
            if self.device.type == "cuda":
                self._open_card(context_tokens)
            else:
                self._open_cpu(context_tokens)
        except BaseException:
            self._stack.close()
            raise

    def _open_cpu(self, context_tokens: int) -> None:
        options, has_encoder = self.options, self._pack.spec.encoder is not None
        if has_encoder and options.record is not None:
            raise RunError("--record: a pass of a model with an encoder is of one stack, records have whole ones")
        if names := options.of_card_alone():
            raise RunError(f"{names[0]}: is of --device cuda; leave it out, or add that")
        budget = self._budget(context_tokens)
        self.weights = self._mapped() if budget is None else self._streaming(budget, context_tokens)
        most = self.plan.chunk_tokens if self.plan else PREFILL_TOKENS
        chunk = min(options.chunk_tokens or most, most)
        runner = EncoderDecoder if has_encoder else Decoder
        self.decoder = runner(self.weights, context_tokens, self.device, chunk)

    def _open_card(self, context_tokens: int) -> None:
        """The engine on a card that was asked for, or that can do what was."""
        options, pack = self.options, self._pack
        if pack.spec.encoder is not None:
            raise RunError("--device cuda: models with an encoder are not run on cards; take --device cpu")
        for name, is_given in {"--read map": options.read == "map", "--trace": options.trace is not None}.items():
            if is_given:
                raise RunError(f"{name}: is of --device cpu; leave it out")
        _check_triton()
        memory = self.card_memory = GpuMemory(self.device)  # before anything else uses the card
        facts = torch.cuda.get_device_properties(self.device)
        check_capability(facts.name, (facts.major, facts.minor))
        ram = options.ram_bytes or _usual_ram()
        engine = self._card_engine(ram)
        cache_dtype = torch.float32 if options.kv_dtype == "f32" else torch.bfloat16
        asked = GpuRequest(options.budget_bytes, context_tokens, options.chunk_tokens, cache_dtype)
        if self.host is None and host_bytes(pack) <= ram:
            self.host = self._stack.enter_context(
                HostArena(pack, self.device, self._progress, verify=options.verify == "lazy")
            )
        host = self.host
        if host is not None and not host.is_locked:
            self._fall_back(
                f"{size_text(host.locked_bytes)} of {size_text(host.num_bytes)} of host memory could be "
                "page-locked; copies from the rest are slower, and the graph engine cannot read it"
            )
            engine = "staged" if options.engine == "auto" else engine
        if engine == "graph":
            assert host is not None, "it was chosen because there is room"
            built, self.use = self._fit_graph(memory, asked, host)
        else:
            built, self.use = self._fit_staged(memory, asked, host, ram)
        self.engine, self.decoder, self.weights = engine, built.decoder, built.weights
        self._stack.enter_context(closing(built))

    def _card_engine(self, ram: int) -> Literal["graph", "staged"]:
        """The engine that was asked for, or graph where it can do what was.

        Raises:  RunError if that is graph, and it cannot.
        """
        options, needed = self.options, host_bytes(self._pack)
        if options.engine == "staged":
            return "staged"
        alone = options.of_staged_alone()
        if not alone and (self.host is not None or needed <= ram):
            return "graph"
        if options.engine == "auto":
            return "staged"
        if alone:
            raise RunError(f"{alone[0]}: is beyond --engine graph, where the GPU decides; take --engine staged")
        raise RunError(
            f"--engine graph: experts are {size_text(needed)}, --ram has {size_text(ram)} for them; give more, or take "
            "--engine staged, which streams from the drive"
        )

    def _fit_graph(self, memory: GpuMemory, asked: GpuRequest, host: HostArena) -> tuple[BuiltEngine, GpuMemoryUse]:
        # Here, as they need triton.
        from moe_pack.runtime.gpu.graph_engine import GraphEngine
        from moe_pack.runtime.gpu.kernels.ahead import collected_launches, compile_ahead

        pack, device, context = self._pack, self.device, asked.context_tokens
        least = least_placement(pack.layout).num_bytes

        def ahead(run: Callable[[], None]) -> None:
            with collected_launches() as jobs:
                run()
            compile_ahead(list(jobs.values()), num_cpus(), self._progress)

        return fit_to_gpu(
            pack, device, memory, asked, least,
            lambda room, chunk: GraphEngine(pack, host, device, room, context, chunk, asked.cache_dtype),
            ahead,
        )  # fmt: skip

    def _fit_staged(
        self, memory: GpuMemory, asked: GpuRequest, host: HostArena | None, ram: int
    ) -> tuple[BuiltEngine, GpuMemoryUse]:
        # Here, as they need triton, which comes with torch for GPUs alone.
        from moe_pack.runtime.gpu.device import CudaDevice
        from moe_pack.runtime.gpu.staged import TritonOps
        from moe_pack.runtime.gpu.staged_engine import CachePolicy, StagedEngine, StagedInputs, least_staged_bytes

        pack, options, ops = self._pack, self.options, TritonOps()
        routing, context, dtype = Routing.open(pack), asked.context_tokens, asked.cache_dtype

        def decide(facts: CacheFacts) -> CachePolicy:
            self.preset = preset = self._preset(facts, routing)
            residency = self._residency(preset, facts, asked.budget_bytes or 0, context)
            # What doctor measured is the drive's cutover; over a link it is the policy's.
            rows_below = preset.rows_below if options.cutover is None else options.cutover
            return CachePolicy(preset, residency, self._recorder, rows_below)

        def foretell(preset: Preset, weights: OffloadedWeights) -> Prefetcher | None:
            return self._foreteller(preset, weights, routing)

        given = StagedInputs(
            pack, CudaDevice(self.device.index or 0), ops, host, ram, self._open_reads, decide, foretell,
            self._kernels_beside_card(), options.trust, options.verify == "lazy", _shares(pack, routing),
            torch.cuda.get_device_properties(self.device).multi_processor_count,
        )  # fmt: skip
        least = least_staged_bytes(given, asked.chunk_tokens or PREFILL_TOKENS)
        return fit_to_gpu(
            pack,
            self.device,
            memory,
            asked,
            least,
            lambda room, chunk: StagedEngine(given, room, context, chunk, dtype),
        )

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except RunError as later:
            if fault is None:
                raise
            fault.add_note(str(later))  # what ended the run is what is to be told

    def close(self) -> None:
        """Ends reads and threads, gives all memory back, writes what is to be written.

        Raises:  RunError if a trace or a record cannot be written.
        """
        recorder, self._recorder = self._recorder, None
        try:
            self._stack.close()
        finally:
            if recorder is not None and self.options.record is not None:
                recorder.write(self.options.record)

    def _fall_back(self, what: str) -> None:
        if self.options.is_strict:
            raise RunError(f"--strict: {what}")
        self.fallbacks.append(what)

    def _open_operations(self) -> Operations:
        """What computes on the CPU as asked for, else torch, which also computes small things on a GPU."""
        options, threads = self.options, self.options.threads or num_cpus()
        wanted = options.kernels
        if wanted == "torch" or options.device != "cpu":
            torch.set_num_threads(threads)
            return TORCH
        kernels = open_kernels(threads) if wanted == "auto" else Kernels(threads, wanted)
        if kernels is None:
            self._fall_back(f"torch computes: native kernels {why_unavailable()}")
            torch.set_num_threads(threads)
            return TORCH
        self._stack.enter_context(closing(kernels))
        if wanted not in ("auto", kernels.instruction_set):
            raise RunError(f"--kernels {wanted}: this machine has {kernels.instruction_set} at most")
        # Beside the kernels torch has small things to do: threads of its own would only wait, and wait spinning.
        torch.set_num_threads(1)
        return NativeOperations(kernels)

    def _kernels_beside_card(self) -> Kernels | None:
        """The CPU's kernels, for what it shares in; None where there are none."""
        threads, wanted = self.options.threads or num_cpus(), self.options.kernels
        if wanted == "torch":
            return None
        kernels = open_kernels(threads) if wanted == "auto" else Kernels(threads, wanted)
        return None if kernels is None else self._stack.enter_context(closing(kernels))

    def _budget(self, context_tokens: int) -> int | None:
        """The budget to keep to; None where experts are mapped."""
        options = self.options
        wishes = options.of_streams_alone()
        if wishes and options.read == "map":
            raise RunError(f"{wishes[0]}: is of experts that stream; leave --read map out")
        if options.read == "map":
            if options.budget_bytes is not None:
                self._fall_back("mapped files are kept in memory by the system, whatever the budget")
            return None
        if options.budget_bytes is not None:
            return options.budget_bytes
        predictors = routing_bytes(self._pack.folder)
        free, needed = available_bytes(), whole_bytes(self._pack.layout, context_tokens, predictors)
        most = None if free is None else int(_SHARE_OF_MEMORY * free)
        if most is None or needed <= most:
            return needed if wishes or options.policy != "auto" or options.read != "auto" else None
        return most

    def _mapped(self) -> PackWeights:
        return open_weights(self._pack, self.device, self.operations)

    def _streaming(self, budget: int, context_tokens: int) -> OffloadedWeights:
        pack, options = self._pack, self.options
        routing = Routing.open(pack)
        self.plan = divide_budget(pack.layout, budget, context_tokens, routing_bytes(pack.folder))
        facts = cache_facts(pack, self.plan, routing)
        self.preset = preset = self._preset(facts, routing)
        scores_matter = preset.eviction == "importance" or options.record is not None
        trace = self._stack.enter_context(Trace(options.trace)) if options.trace else None
        residency = self._residency(preset, facts, budget, context_tokens)
        store = ExpertStore(
            pack,
            self.operations,
            self.plan,
            self._open_reads,
            verify=options.verify == "lazy",
            rows_below=self._cutover(preset),
            gap_bytes=USUAL_GAP_BYTES if options.machine is None else options.machine.drive.gap_bytes(),
            trace=trace,
        )
        self.store = self._stack.enter_context(closing(store))
        weights = OffloadedWeights(
            pack,
            self.operations,
            store,
            residency,
            scores_matter=scores_matter,
            reuses_selector=preset.reuse_selector and options.foretells,
            trust=options.trust,
            recorder=self._recorder,
            trace=trace,
        )
        weights.foreteller = self._foreteller(preset, weights, routing)
        return weights

    def _residency(self, preset: Preset, facts: CacheFacts, budget: int, context_tokens: int) -> ExpertCache:
        """Fast memory as the preset keeps it, recorded where that is asked for."""
        path = self.options.record
        if path is None:
            return expert_cache_for(preset, facts)
        check_place(path)
        root = self._pack.manifest.root
        self._recorder = Recorder(facts, root, preset.name, budget, context_tokens, keeps_scores=True)
        return recorded_expert_cache_for(preset, facts, self._recorder)

    def _foreteller(self, preset: Preset, weights: OffloadedWeights, routing: Routing | None) -> Prefetcher | None:
        if not self.options.foretells:
            return None
        prediction = self._prediction(preset, weights, routing)
        router = self._pack.spec.router
        num_ahead = preset.num_foretold(router.num_experts_per_tok)
        return Prefetcher(prediction, router.num_experts, router.num_experts_per_tok, num_ahead)

    def _cutover(self, preset: Preset) -> float:
        """The share of running neurons below which their rows alone are read."""
        options, layout = self.options, self._pack.layout
        if options.cutover is not None or options.machine is None:
            return preset.rows_below if options.cutover is None else options.cutover
        kinds = {(e.records.row_bytes, e.num_rows, e.records_bytes) for layer in layout.experts for e in layer}
        return min(options.machine.drive.cutover(*kind) for kind in kinds)

    def _preset(self, facts: CacheFacts, routing: Routing | None) -> Preset:
        """The policies asked for; of `auto` those that suit the profile's routes, where the pack has them."""
        if self.options.policy != "auto":
            return PRESETS[self.options.policy]
        passes = None
        if routing is not None and len(routing.routes):
            chunks = np.ones(len(routing.routes), np.uint32)
            passes = Passes(routing.routes, chunks, None, facts.popularity)
        return auto_preset(passes, facts, self._pack.index.size)

    def _prediction(self, preset: Preset, weights: OffloadedWeights, routing: Routing | None) -> Prediction | None:
        needs_profile = preset.prediction in ("popularity", "paths", "mlp")
        if needs_profile and routing is None:
            self._fall_back(
                f"next router instead of {preset.prediction}: no profile's routing lies beside the pack "
                "(moe-pack attach)"
            )
            return make_prediction("router", weights, None)
        return make_prediction(preset.prediction, weights, routing)

    def _open_reads(self, memory: NDArray[np.uint8]) -> Reads:
        self.is_direct = self._reads_directly()
        machine = self.options.machine
        num_threads = NUM_THREADS if machine is None else machine.drive.threads
        self.reads = open_reads(memory, self.is_direct, num_threads)
        if not is_available():
            self._fall_back("reads wait for one another: native reads were not built")
        return self.reads

    def _reads_directly(self) -> bool:
        mode = self.options.read
        machine = self.options.machine
        if mode == "pread" or (mode == "auto" and machine is not None and machine.drive.mode == "pread"):
            return False
        if reads_directly(self._pack.folder / self._pack.manifest.expert_files[0].name):
            return True
        if mode == "direct":
            raise RunError("--read direct: the pack's file system has no direct reads; use --read pread or auto")
        self._fall_back("reads go through the system's cache: the file system has no direct reads")
        return False


def cache_facts(pack: Pack, plan: BudgetPlan, routing: Routing | None) -> CacheFacts:
    """What a policy knows of a pack inside a budget."""
    pages = expert_pages(pack.layout, plan.page_bytes)
    return CacheFacts(pages, plan.num_pages, pack.spec.router.num_experts_per_tok, _shares(pack, routing))


def _shares(pack: Pack, routing: Routing | None) -> NDArray[np.float32]:
    """How popular a layer's experts are: float32 [L, E], shares of a layer."""
    counts = np.ones(pack.index.size.shape) if routing is None else routing.popularity
    shares: NDArray[np.float32] = (counts / counts.sum(axis=1, keepdims=True)).astype(np.float32)
    return shares


def _usual_ram() -> int:
    """Host memory for experts, where nobody has said how much."""
    free = available_bytes()
    return sys.maxsize if free is None else int(_SHARE_OF_MEMORY * free)


def _check_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise RunError("--device cuda: needs triton, which comes with torch for GPUs; pip install triton")


def check_capability(name: str, capability: tuple[int, int]) -> None:
    """Refuses a card that the kernels are not made for.

    Raises:  RunError if it has no tensor cores for bfloat16 and tf32.
    """
    if capability < LEAST_CAPABILITY:
        have, need = (".".join(map(str, found)) for found in (capability, LEAST_CAPABILITY))
        raise RunError(
            f"--device cuda: {name} has compute capability {have}; the kernels need {need} or later "
            "(A100, RTX 30 series and newer); use --device cpu"
        )


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise RunError("--device cuda: torch finds no CUDA device here; use --device cpu")
    return torch.device(name)
