"""The staged engine: experts have pages in the device's memory, and the host, which sees every layer's routes, decides.

The host waits for the device once a layer ("routes"); once more where only some rows of experts are copied ("neurons");
once for each group of these that is predicted ("predicted neurons"); and where it would overwrite memory that is still
being copied ("host memory is reused"). A policy that uses routers' scores adds a wait.

`StagedWeights` run the experts. `StagedDecoder` runs everything else of a token as CUDA graphs, one for each stretch
between two layers' experts: each graph ends with a router, after which the host learns the routes, and experts are
copied and run. `StagedEngine` puts store, weights and decoder together. Importing this needs Triton.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import DISK_BLOCK_BYTES, Pack, RunError, size_text
from moe_pack.formats.layout import DenseLayout
from moe_pack.formats.spec import first_moe_layers
from moe_pack.runtime.cpu import ExpertRows, Kernels, extent_rows
from moe_pack.runtime.gpu.decoder import TokenDecoder
from moe_pack.runtime.gpu.device import CHUNK_BYTES, ChunkRing, Device, HostArena
from moe_pack.runtime.gpu.kernels.rows import num_partials
from moe_pack.runtime.gpu.staged import (
    PREDICTED_ROW,
    CpuWorker,
    GpuLayerRun,
    TritonOps,
    allocate_workspace,
    workspace_size,
)
from moe_pack.runtime.gpu.staged_store import (
    DiskExperts,
    GpuExpertStore,
    HostExperts,
    arena_experts,
    disk_slot_bytes,
    most_pages,
    pages_of,
    staged_page_bytes,
    store_bytes,
)
from moe_pack.runtime.model import Matrix, PartialState
from moe_pack.runtime.offload import (
    EXACT,
    Approximations,
    CacheFacts,
    ExpertCache,
    ExpertJob,
    ExpertKey,
    FixedParts,
    MemoryNeeds,
    OffloadedWeights,
    PhaseCounts,
    Prefetcher,
    Preset,
    Reads,
    Recorder,
    divide,
)
from moe_pack.runtime.offload.experts import LayerRun
from moe_pack.runtime.offload.split import LoadOrCompute, balanced, fastest

NUM_PARTIALS = 32  # partial sums of a token's expert, computed at the same time


@dataclass(frozen=True, slots=True)
class CpuOffload:
    """Missing experts that the CPU computes while the link brings the others.

    `kernels`: the caller closes them.   `split`: chooses by the tokens of each missing expert; `balanced` or
    `fastest` of `runtime.offload.split`, with measured rates.
    """

    kernels: Kernels
    split: Callable[[Sequence[int]], LoadOrCompute]


@dataclass(frozen=True, slots=True)
class StagedMemoryPlan:
    """The use of the device's memory for experts: pages, and the bytes `fixed` of tables and workspace."""

    page_bytes: int
    num_pages: int
    fixed: int


def plan_staged(
    pack: Pack, expert_bytes: int, chunk_tokens: int, ops: TritonOps, num_partials: int = NUM_PARTIALS
) -> StagedMemoryPlan:
    """Divides the device's memory for experts, which dense weights, key-value cache and the driver leave.

    All of it is pages; the host decides which experts have them, as on the CPU.
    Raises:  RunError if the largest expert does not fit.
    """
    page_bytes = staged_page_bytes(pack.layout)
    needs = staged_needs(pack, page_bytes, chunk_tokens, ops, num_partials)
    division = divide(expert_bytes, needs)
    if division.experts < needs.least_experts:
        raise RunError(
            f"--budget: leaves {size_text(max(expert_bytes, 0))} for experts, which need at least "
            f"{size_text(needs.least_budget)}; give more, or a shorter context with --max-tokens"
        )
    num_pages = min(min(division.experts, needs.all_experts) // page_bytes, most_pages(page_bytes))
    return StagedMemoryPlan(page_bytes, num_pages, division.fixed.num_bytes)


def staged_needs(
    pack: Pack, page_bytes: int, chunk_tokens: int, ops: TritonOps, num_partials: int = NUM_PARTIALS
) -> MemoryNeeds:
    """Returns what the staged engine needs of the device's memory that is left for experts."""
    pages = pages_of(pack, page_bytes) * page_bytes
    workspace = workspace_size(pack.spec, ops, chunk_tokens, num_partials)
    fixed = FixedParts(tables=store_bytes(pack, 0, page_bytes), workspace=workspace)
    return MemoryNeeds(lambda _: fixed, chunk_tokens, chunk_tokens, int(pages.max()), int(pages.sum()), usual_share=1)


class StagedWeights(OffloadedWeights):
    """A pack's weights, dense ones on the device, experts in the pages of `store`. Owns threads: `close` it.

    Pack, store and recorder stay the caller's.
    Args:    chunk_tokens: of a forward pass, at most.   cpu: None if the device computes all experts; otherwise
             `store.host` has all experts. Experts that the CPU computes get pages as all others; these stay empty and
             are returned when the layer has run, so that a replay of the run's recording equals the run.
    """

    def __init__(
        self,
        pack: Pack,
        store: GpuExpertStore,
        expert_cache: ExpertCache,
        ops: TritonOps,
        chunk_tokens: int,
        *,
        cpu: CpuOffload | None = None,
        num_partials: int = NUM_PARTIALS,
        scores_matter: bool = False,
        reuses_selector: bool = False,
        approximations: Approximations = EXACT,
        recorder: Recorder | None = None,
    ) -> None:
        assert cpu is None or store.host.holds_all, "the CPU computes from memory"
        self._device_store, self._ops, self._cpu = store, ops, cpu
        super().__init__(
            pack,
            ops.operations,
            store,
            expert_cache,
            device=store.device.device,
            scores_matter=scores_matter,
            reuses_selector=reuses_selector,
            approximations=approximations,
            recorder=recorder,
        )
        self._workspace = allocate_workspace(self.spec, store.device, ops, chunk_tokens, num_partials, cpu is not None)
        k = self.spec.router.num_experts_per_tok
        self._host_experts = store.device.allocate_host(8 * chunk_tokens * k).view(torch.int64).view(chunk_tokens, k)
        self._host_weights = store.device.allocate_host(4 * chunk_tokens * k).view(torch.float32).view(chunk_tokens, k)
        self._thread = None if cpu is None else ThreadPoolExecutor(1, "experts")

    def close(self) -> None:
        """Ends the thread."""
        if self._thread is not None:
            self._thread.shutdown()

    def _keep(self, held: Tensor) -> None:
        super()._keep(held.to(self._device))  # one allocation, whose size is counted

    def _matrix(self, dense: DenseLayout, raw: Tensor) -> Matrix:
        return self._ops.matrix(dense, raw)

    def _on_host(self, x: Tensor, experts: Tensor, router_weights: Tensor) -> tuple[Tensor, Tensor]:
        device, T = self._device_store.device, len(x)
        device.copy(self._host_experts[:T], experts.contiguous(), "compute")
        device.copy(self._host_weights[:T], router_weights.contiguous(), "compute")
        if self._cpu is not None:
            device.copy(self._workspace.host_x[:T], x, "compute")
        # The policy and the copies depend on the routes; after this wait all of the layer before is done, too.
        device.synchronize(device.record("compute"), "routes")
        return self._host_experts[:T], self._host_weights[:T]

    def _new_run(self, layer_idx: int, x: Tensor, jobs: dict[int, ExpertJob], counts: PhaseCounts) -> LayerRun:
        run = GpuLayerRun(
            self._device_store,
            self._ops,
            self._workspace,
            layer_idx,
            x,
            jobs,
            counts,
            self.predicted,
            self.approximations,
        )
        if self._cpu is not None and self._thread is not None:
            rows = self._rows_for_cpu(self._cpu, jobs)
            if rows:
                run.compute_on_cpu(CpuWorker(self._cpu.kernels, self._thread), rows)
        return run

    def _run_schedule(
        self,
        layer_idx: int,
        x: Tensor,
        experts: Tensor,
        scores: NDArray[np.float32] | None,
        jobs: dict[int, ExpertJob],
        run: LayerRun,
        counts: PhaseCounts,
        partial_state: PartialState | None,
    ) -> None:
        super()._run_schedule(layer_idx, x, experts, scores, jobs, run, counts, partial_state)
        assert isinstance(run, GpuLayerRun), "`_new_run` made it"
        for key in run.keys_on_cpu:
            if self._expert_cache.is_resident[key]:  # it has pages, but nothing was copied
                self._expert_cache.abandon(key)

    def _rows_for_cpu(self, cpu: CpuOffload, jobs: dict[int, ExpertJob]) -> dict[ExpertKey, ExpertRows]:
        """Returns the missing experts that the CPU computes, by their rows in host memory."""
        missing = [job for job in jobs.values() if not self._expert_cache.is_resident[job.key]]
        chosen = cpu.split([len(job.tokens) for job in missing]).computed
        return {missing[number].key: self._host_rows(missing[number].key) for number in sorted(chosen)}

    def _host_rows(self, key: ExpertKey) -> ExpertRows:
        layout = self._pack.layout.experts[key.layer_idx][key.expert]
        extent = self._device_store.host.extent(key).numpy()
        return extent_rows(layout, self.selector, self.spec.expert.function, self.threshold(*key), extent)

    def _predict_neurons(self, x: Tensor, keys: Sequence[ExpertKey]) -> list[tuple[ExpertKey, NDArray[np.int32]]]:
        store, workspace = self._device_store, self._workspace
        partial = [key for key in keys if not store.arrive(key).is_whole][: len(workspace.host_neurons)]
        if not partial:
            return []
        n = len(partial)
        # The layer's own experts are launched already, or not listed yet: the workspace is free between launches.
        experts = workspace.send_numbers(store.device, PREDICTED_ROW, [key.expert for key in partial])
        selection = workspace.selection
        first = type(selection)(selection.a[:n], selection.neurons[:n], selection.counts[:n])
        self._ops.select(x[0], experts, store.tables[partial[0].layer_idx], first)
        store.device.synchronize(workspace.copy_selection_to_host(store.device, 0, n), "predicted neurons")
        return [(key, workspace.selected_neurons(place).copy()) for place, key in enumerate(partial)]


class StagedDecoder(TokenDecoder):
    """The staged engine's decoder; arguments as for `TokenDecoder`."""

    def __init__(
        self,
        weights: StagedWeights,
        context_tokens: int,
        device: torch.device,
        chunk_tokens: int,
        cache_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(weights, context_tokens, device, chunk_tokens, cache_dtype)
        self._staged = weights
        layers = self._layers
        self._y = torch.zeros_like(layers.x)
        self._chosen = torch.zeros(layers.routes.shape, dtype=torch.int64, device=device)
        self._segments = self._launches()

    def prepare(self) -> None:
        """Captures a graph for each stretch between two layers' experts."""
        self._segments = [self._captured(launch) for launch in self._launches()]

    def _is_alone(self, ids: list[int]) -> bool:
        if not super()._is_alone(ids):
            return False
        # A prefetcher that predicts from some of the experts uses the next layer's router, which is in a graph here.
        prefetcher, layers = self._staged.prefetcher, range(1, len(self.spec.moe_layers))
        return prefetcher is None or not any(prefetcher.needs_partial(layer_idx, len(ids)) for layer_idx in layers)

    def _run_token(self) -> None:
        layers, weights = self._layers, self._staged
        for layer_idx, segment in enumerate(self._segments[:-1]):
            segment()
            chosen = self._chosen[layer_idx : layer_idx + 1]
            y = weights.run_experts(layer_idx, layers.normed[None], chosen, layers.router_weights[None])
            self._y.copy_(y[0])
        self._segments[-1]()

    def _launches(self) -> list[Callable[[], None]]:
        """Returns the launches before each layer's experts, and those after the last experts."""
        moe_layers, last = self.spec.moe_layers, self.spec.num_hidden_layers
        begins = [0, *(layer + 1 for layer in moe_layers)]
        ends = [*(layer + 1 for layer in moe_layers), last]
        return [self._between(number, begin, end) for number, (begin, end) in enumerate(zip(begins, ends, strict=True))]

    def _between(self, number: int, begin: int, end: int) -> Callable[[], None]:
        """Returns the launches of decoder layers `begin` to `end`, without the routed experts of the last.

        Args:    number: of the MoE layer whose experts follow; past the last one, the logits follow.
        """
        layers, scale = self._layers, self.spec.residual_multiplier

        def launch() -> None:
            if number == 0:
                layers.control.copy_(self._control, non_blocking=True)
                layers.start()
            else:
                layers.x.add_(self._y, alpha=scale)
            shared: Tensor | None = None
            for layer in range(begin, end):
                shared = layers.run(layer)
            if number == len(self._chosen):
                layers.finish()
                self._logits.copy_(layers.logits, non_blocking=True)
                return
            self._chosen[number].copy_(layers.routes[number])
            if shared is not None:
                layers.x.add_(shared, alpha=scale)

        return launch


_MEASURED_TIMES = 5  # of which the median counts
_LEAST_SLOTS = 2  # one expert is read while another is copied


@dataclass(frozen=True, slots=True)
class CachePolicy:
    """The decisions on experts: the preset, the cache with its eviction policy, and the recorder.

    `rows_below`: the share of running neurons below which only their rows are copied.
    """

    preset: Preset
    expert_cache: ExpertCache
    recorder: Recorder | None
    rows_below: float


@dataclass(frozen=True, slots=True)
class StagedInputs:
    """What the staged engine is made of, whatever memory it gets.

    `host`: all experts in page-locked memory; None if they come from disk, by `open_reads` through `ram_bytes` of host
    memory.   `decide`: returns the policy for a cache of experts.   `prefetcher_for`: returns the prefetcher for these
    weights, or None.   `kernels`: the CPU's, if it may compute.   `verify`: whether experts from disk are checked.
    `shares`: float32 [L, E], how popular experts are.   `num_sms`: multiprocessors, by which work is divided.
    """

    pack: Pack
    device: Device
    ops: TritonOps
    host: HostArena | None
    ram_bytes: int
    open_reads: Callable[[NDArray[np.uint8]], Reads]
    decide: Callable[[CacheFacts], CachePolicy]
    prefetcher_for: Callable[[Preset, OffloadedWeights], Prefetcher | None]
    kernels: Kernels | None
    approximations: Approximations
    verify: bool
    shares: NDArray[np.float32]
    num_sms: int


class StagedEngine:
    """The staged engine for a pack: store, weights and decoder. Owns these, not its inputs: `close` it.

    `policy`: the decisions on experts.
    Args:    expert_bytes: the device's memory for experts.   chunk_tokens: of a forward pass, at most.
    Raises:  RunError if the largest expert does not fit.
    """

    def __init__(
        self, inputs: StagedInputs, expert_bytes: int, context_tokens: int, chunk_tokens: int, cache_dtype: torch.dtype
    ) -> None:
        pack, device = inputs.pack, inputs.device
        partials = _num_partials(inputs)
        plan = plan_staged(pack, expert_bytes, chunk_tokens, inputs.ops, partials)
        num_pages_of = pages_of(pack, plan.page_bytes)
        k, num_encoder_layers = pack.spec.router.num_experts_per_tok, first_moe_layers(pack.spec)[-1]
        facts = CacheFacts(num_pages_of, plan.num_pages, k, inputs.shares, num_encoder_layers)
        self.policy = policy = inputs.decide(facts)
        with ExitStack() as opened:
            host = _host(inputs, opened)
            ring = opened.enter_context(closing(ChunkRing(device, max(CHUNK_BYTES, _most_row_bytes(pack)))))
            store = GpuExpertStore(pack, host, device, plan.num_pages, plan.page_bytes, policy.rows_below, ring)
            self.weights = StagedWeights(
                pack,
                store,
                policy.expert_cache,
                inputs.ops,
                chunk_tokens,
                cpu=_cpu_share(inputs, policy.preset),
                num_partials=partials,
                scores_matter=policy.preset.needs_scores or policy.recorder is not None,
                reuses_selector=policy.preset.reuse_selector,
                approximations=inputs.approximations,
                recorder=policy.recorder,
            )
            opened.enter_context(closing(self.weights))
            self.weights.prefetcher = inputs.prefetcher_for(policy.preset, self.weights)
            self.decoder = StagedDecoder(self.weights, context_tokens, device.device, chunk_tokens, cache_dtype)
            self.expert_bytes = self.pages_bytes = plan.num_pages * plan.page_bytes
            self.store = store
            self._opened = opened.pop_all()

    def prepare(self) -> None:
        """Captures a token's launches as graphs."""
        self.decoder.prepare()

    def close(self) -> None:
        """Ends threads and reads, and releases the device's memory."""
        self._opened.close()
        del self.decoder, self.weights, self.store


def least_staged_bytes(inputs: StagedInputs, chunk_tokens: int) -> int:
    """Returns the least memory for experts that the engine runs in: the largest expert, tables and workspace."""
    pack = inputs.pack
    page_bytes = staged_page_bytes(pack.layout)
    return staged_needs(pack, page_bytes, chunk_tokens, inputs.ops, _num_partials(inputs)).least_budget


def _num_partials(inputs: StagedInputs) -> int:
    spec = inputs.pack.spec
    return num_partials(spec.router.num_experts_per_tok, spec.expert.intermediate_size, inputs.num_sms)


def _host(inputs: StagedInputs, opened: ExitStack) -> HostExperts:
    if inputs.host is not None:
        return arena_experts(inputs.pack, inputs.host)
    # PyTorch's allocator takes the next power of two of page-locked memory, so this stays below one.
    num_bytes = (1 << inputs.ram_bytes.bit_length() - 1) - DISK_BLOCK_BYTES
    slots = min(max(_LEAST_SLOTS, num_bytes // disk_slot_bytes(inputs.pack)), inputs.pack.index.size.size)
    experts = DiskExperts(inputs.pack, inputs.device, inputs.open_reads, slots, inputs.verify)
    return opened.enter_context(closing(experts))


def _most_row_bytes(pack: Pack) -> int:
    rows = chain.from_iterable((e.selector, e.records) for layer in pack.layout.experts for e in layer)
    return max(row.row_bytes for row in rows if row is not None)


def _cpu_share(inputs: StagedInputs, preset: Preset) -> CpuOffload | None:
    """Returns the CPU's share of missing experts, split as the policy's paper says, by rates measured now."""
    if inputs.kernels is None or inputs.host is None or preset.name not in ("fiddler", "importance"):
        return None
    split = fastest if preset.name == "fiddler" else balanced
    load_s, token_s = _load_seconds(inputs), _token_seconds(inputs, inputs.kernels)
    return CpuOffload(inputs.kernels, lambda tokens: split(tokens, token_s, load_s))


def _load_seconds(inputs: StagedInputs) -> float:
    """Returns the seconds that copying an expert over the link takes."""
    assert inputs.host is not None, "the link copies from host memory"
    source = inputs.host.rows(0)[: inputs.pack.layout.experts[0][0].num_bytes]
    target = torch.empty_like(source, device=inputs.device.device)

    def bring() -> None:
        inputs.device.copy(target, source, "copy")
        inputs.device.synchronize(inputs.device.record("copy"), "measuring")

    return _median_seconds(bring)


def _token_seconds(inputs: StagedInputs, kernels: Kernels) -> float:
    """Returns the seconds that the CPU takes to compute an expert for one token."""
    assert inputs.host is not None, "the CPU computes from host memory"
    pack, layout = inputs.pack, inputs.pack.layout.experts[0][0]
    function, threshold = pack.spec.expert.function, float(pack.thresholds[0, 0])
    rows = extent_rows(layout, pack.manifest.selector, function, threshold, inputs.host.rows(0).numpy())
    x = torch.randn(1, pack.spec.hidden_size, generator=torch.Generator().manual_seed(0))
    work = (rows, np.zeros(1, np.int64), np.ones(1, np.float32))
    return _median_seconds(lambda: kernels.experts(x, [work]))


def _median_seconds(action: Callable[[], object]) -> float:
    action()  # the first run also loads memory and kernels
    taken = []
    for _ in range(_MEASURED_TIMES):
        started = time.perf_counter()
        action()
        taken.append(time.perf_counter() - started)
    return sorted(taken)[_MEASURED_TIMES // 2]
