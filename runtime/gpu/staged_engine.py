"""The staged engine on a device: experts' pages in its memory, decisions on the host, which sees every layer's routes.

The host waits for the device once a layer ("routes"), once more where rows of some experts come alone ("neurons"), once
for each predicted group of these ("predicted neurons"), and where memory that it would fill anew is still being copied
("host memory is reused"). Routers' scores, where a policy wants them, are one more wait.

The staged engine's decoder on a card: of a token, what lies between two layers' experts is one CUDA graph.

Each ends with a router; then the host is told what it chose, and experts are brought and run. Importing this needs
triton.

The staged engine of a card put together: store, weights and decoder. Importing this needs triton.
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
from moe_pack.runtime.cpu import ExpertRows, Kernels, extent_rows
from moe_pack.runtime.gpu.decoder import TokenDecoder
from moe_pack.runtime.gpu.device import CHUNK_BYTES, ChunkRing, Device, HostArena
from moe_pack.runtime.gpu.kernels.rows import num_partials
from moe_pack.runtime.gpu.staged import (
    CpuWorker,
    GpuLayerRun,
    TritonOps,
    allocate_workspace,
    listed_neurons,
    seen_neurons,
)
from moe_pack.runtime.gpu.staged import workspace_size as room_bytes_of
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
from moe_pack.runtime.model import TORCH, Matrix, PartialState
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

NUM_PARTIALS = 32  # sums that a token's expert is computed in, side by side


@dataclass(frozen=True, slots=True)
class CpuOffload:
    """Misses that the CPU computes while the link brings the others.

    `kernels`: the caller's to close.   `split`: from the tokens of each missing expert, which; `balanced` or `fastest`
    (policies/split.py) with measured rates.
    """

    kernels: Kernels
    split: Callable[[Sequence[int]], LoadOrCompute]


@dataclass(frozen=True, slots=True)
class StagedMemoryPlan:
    """What the device's memory for experts is spent on, in bytes, but for `num_pages`; `fixed`: tables, workspace."""

    page_bytes: int
    num_pages: int
    fixed: int


def plan_staged(
    pack: Pack, room_bytes: int, chunk_tokens: int, ops: TritonOps, num_partials: int = NUM_PARTIALS
) -> StagedMemoryPlan:
    """Divides the device's memory that is left for experts, besides dense weights, cache and the driver's own.

    All of it is pages: which experts have them is the host's decision, as on the CPU.
    Raises:  RunError if the largest expert would have no room.
    """
    page_bytes = staged_page_bytes(pack.layout)
    needs = staged_needs(pack, page_bytes, chunk_tokens, ops, num_partials)
    division = divide(room_bytes, needs)
    if division.experts < needs.least_experts:
        raise RunError(
            f"--budget: {size_text(max(room_bytes, 0))} left for experts, needed are at least "
            f"{size_text(needs.least_budget)}; give more, or a shorter context with --max-tokens"
        )
    num_pages = min(min(division.experts, needs.all_experts) // page_bytes, most_pages(page_bytes))
    return StagedMemoryPlan(page_bytes, num_pages, division.fixed.num_bytes)


def staged_needs(
    pack: Pack, page_bytes: int, chunk_tokens: int, ops: TritonOps, num_partials: int = NUM_PARTIALS
) -> MemoryNeeds:
    """Returns what the staged engine needs of the device's memory that is left for experts."""
    pages = pages_of(pack, page_bytes) * page_bytes
    workspace = room_bytes_of(pack.spec, ops, chunk_tokens, num_partials)
    fixed = FixedParts(tables=store_bytes(pack, 0, page_bytes), workspace=workspace)
    return MemoryNeeds(lambda _: fixed, chunk_tokens, chunk_tokens, int(pages.max()), int(pages.sum()), usual_share=1)


class StagedWeights(OffloadedWeights):
    """A pack's weights, dense ones on the device, experts in the pages of `store`. Owns threads: `close` it.

    Pack, store, trace and recorder stay the caller's.
    Args:    chunk_tokens: of a forward pass at most.   cpu: None where the device computes all. Experts that the CPU
             computes get pages as all others, which stay empty and are given back once the layer has all it needs:
             a record of the run plays as the run did.   `store.host` then holds all experts.
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
            TORCH,
            store,
            expert_cache,
            device=store.device.device,
            scores_matter=scores_matter,
            reuses_selector=reuses_selector,
            approximations=approximations,
            recorder=recorder,
        )
        self._room = allocate_workspace(self.spec, store.device, ops, chunk_tokens, num_partials, cpu is not None)
        k = self.spec.router.num_experts_per_tok
        self._host_experts = store.device.on_host(8 * chunk_tokens * k).view(torch.int64).view(chunk_tokens, k)
        self._host_weights = store.device.on_host(4 * chunk_tokens * k).view(torch.float32).view(chunk_tokens, k)
        self._thread = None if cpu is None else ThreadPoolExecutor(1, "experts")

    def close(self) -> None:
        """Ends the thread."""
        if self._thread is not None:
            self._thread.shutdown()

    def _keep(self, held: Tensor) -> None:
        super()._keep(held.to(self._device))  # one allocation: what is there is what is counted

    def _matrix(self, dense: DenseLayout, raw: Tensor) -> Matrix:
        return self._ops.matrix(dense, raw)

    def _on_host(self, x: Tensor, experts: Tensor, router_weights: Tensor) -> tuple[Tensor, Tensor]:
        device, T = self._device_store.device, len(x)
        device.copy(self._host_experts[:T], experts.contiguous(), "compute")
        device.copy(self._host_weights[:T], router_weights.contiguous(), "compute")
        if self._cpu is not None:
            device.copy(self._room.host_x[:T], x, "compute")
        # The policy, and what is copied, hang on the routes; after this all of the layer before is done, too.
        device.synchronize(device.record("compute"), "routes")
        return self._host_experts[:T], self._host_weights[:T]

    def _new_run(self, layer_idx: int, x: Tensor, jobs: dict[int, ExpertJob], counts: PhaseCounts) -> LayerRun:
        run = GpuLayerRun(
            self._device_store, self._ops, self._room, layer_idx, x, jobs, counts, self.predicted, self.approximations
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
        assert isinstance(run, GpuLayerRun), "its own"
        for key in run.keys_on_cpu:
            if self._expert_cache.is_resident[key]:  # in name only
                self._expert_cache.abandon(key)

    def _rows_for_cpu(self, cpu: CpuOffload, jobs: dict[int, ExpertJob]) -> dict[ExpertKey, ExpertRows]:
        """The misses that the CPU computes, where they lie in host memory."""
        missing = [job for job in jobs.values() if not self._expert_cache.is_resident[job.key]]
        chosen = cpu.split([len(job.tokens) for job in missing]).computed
        return {missing[number].key: self._host_rows(missing[number].key) for number in sorted(chosen)}

    def _host_rows(self, key: ExpertKey) -> ExpertRows:
        layout = self._pack.layout.experts[key.layer_idx][key.expert]
        held = self._device_store.host.extent(key).numpy()
        return extent_rows(layout, self.selector, self.spec.expert.function, self.threshold(*key), held)

    def _predict_neurons(self, x: Tensor, keys: Sequence[ExpertKey]) -> list[tuple[ExpertKey, NDArray[np.int32]]]:
        store, room = self._device_store, self._room
        wanted = [key for key in keys if not store.arrive(key).is_whole][: len(room.host_neurons)]
        if not wanted:
            return []
        n = len(wanted)
        # What the layer's own experts need has been launched or is not listed yet: the room is free between launches.
        numbers = room.host_numbers[2, :n]
        numbers[:] = torch.tensor([key.expert for key in wanted], dtype=torch.int32)
        store.device.copy(room.numbers[2, :n], numbers, "compute")
        selection = room.selection
        first = type(selection)(selection.a[:n], selection.neurons[:n], selection.counts[:n])
        self._ops.select(x[0], room.numbers[2, :n], store.tables[wanted[0].layer_idx], first)
        store.device.synchronize(seen_neurons(store.device, room, 0, n), "predicted neurons")
        return [(key, listed_neurons(room, place).copy()) for place, key in enumerate(wanted)]


class StagedDecoder(TokenDecoder):
    """A model at work by the staged engine; arguments as of `TokenDecoder`."""

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
        prefetcher = self._staged.prefetcher
        # A prediction from a part of the experts looks into the next layer, which is launched whole here.
        return super()._is_alone(ids) and (prefetcher is None or not prefetcher.needs_partial)

    def _run_token(self) -> None:
        layers, weights = self._layers, self._staged
        for layer_idx, segment in enumerate(self._segments[:-1]):
            segment()
            chosen = self._chosen[layer_idx : layer_idx + 1]
            y = weights.run_experts(layer_idx, layers.normed[None], chosen, layers.router_weights[None])
            self._y.copy_(y[0])
        self._segments[-1]()

    def _launches(self) -> list[Callable[[], None]]:
        """What is launched before each layer's experts, and after the last's."""
        moe_layers, last = self.spec.moe_layers, self.spec.num_hidden_layers
        begins = [0, *(layer + 1 for layer in moe_layers)]
        ends = [*(layer + 1 for layer in moe_layers), last]
        return [self._between(number, begin, end) for number, (begin, end) in enumerate(zip(begins, ends, strict=True))]

    def _between(self, number: int, begin: int, end: int) -> Callable[[], None]:
        """The launches of decoder layers `begin` to `end`, the experts of the last but not its own, and what they add.

        `number`: of the layer of experts that comes after them; past the last, logits come.
        """
        layers, scale = self._layers, self.spec.residual_multiplier

        def launch() -> None:
            if number == 0:
                layers.control.copy_(self._control, non_blocking=True)
                layers.start()
            else:
                layers.x.add_(self._y, alpha=scale)
            also: Tensor | None = None
            for layer in range(begin, end):
                also = layers.run(layer)
            if number == len(self._chosen):
                layers.finish()
                self._logits.copy_(layers.logits, non_blocking=True)
                return
            self._chosen[number].copy_(layers.routes[number])
            if also is not None:
                layers.x.add_(also, alpha=scale)

        return launch


_MEASURED_TIMES = 5  # of which the median counts
_LEAST_SLOTS = 2  # one expert is read while another is copied


@dataclass(frozen=True, slots=True)
class CachePolicy:
    """What decides on experts: policies, who has which pages, and what is written down of it.

    `rows_below`: the share of running neurons below which their rows alone are brought.
    """

    preset: Preset
    expert_cache: ExpertCache
    recorder: Recorder | None
    rows_below: float


@dataclass(frozen=True, slots=True)
class StagedInputs:
    """What the staged engine is given beside room.

    `host`: all experts in page-locked memory; None: they come from the drive, through `ram_bytes` of it, by
    `open_reads`.   `decide`: for a cache of experts.   `prefetcher_for`: the prefetcher of these weights, or None.
    `kernels`: the CPU's, where it may compute.   `verify`: whether experts from the drive are checked.   `shares`:
    float32 [L, E], how popular experts are.   `num_sms`: multiprocessors, which say how work is divided.
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
    """A pack at work by the staged engine; see `AtWork`. Owns all but what it was given: `close` it.

    `decided`: the policies at work.
    Args:    room_bytes: of the device, for experts.   chunk_tokens: of a forward pass, at most.
    Raises:  RunError if the largest expert has no room.
    """

    def __init__(
        self, asked: StagedInputs, room_bytes: int, context_tokens: int, chunk_tokens: int, cache_dtype: torch.dtype
    ) -> None:
        pack, device = asked.pack, asked.device
        partials = _num_partials(asked)
        plan = plan_staged(pack, room_bytes, chunk_tokens, asked.ops, partials)
        pages = pages_of(pack, plan.page_bytes)
        facts = CacheFacts(pages, plan.num_pages, pack.spec.router.num_experts_per_tok, asked.shares)
        self.decided = decided = asked.decide(facts)
        with ExitStack() as opened:
            host = _host(asked, opened)
            ring = opened.enter_context(closing(ChunkRing(device, max(CHUNK_BYTES, _most_row_bytes(pack)))))
            store = GpuExpertStore(pack, host, device, plan.num_pages, plan.page_bytes, decided.rows_below, ring)
            self.weights = StagedWeights(
                pack,
                store,
                decided.expert_cache,
                asked.ops,
                chunk_tokens,
                cpu=_cpu_share(asked, decided.preset),
                num_partials=partials,
                scores_matter=decided.preset.eviction == "importance" or decided.recorder is not None,
                reuses_selector=decided.preset.reuse_selector,
                approximations=asked.approximations,
                recorder=decided.recorder,
            )
            opened.enter_context(closing(self.weights))
            self.weights.prefetcher = asked.prefetcher_for(decided.preset, self.weights)
            self.decoder = StagedDecoder(self.weights, context_tokens, device.device, chunk_tokens, cache_dtype)
            self.expert_bytes = self.pages_bytes = plan.num_pages * plan.page_bytes
            self.store = store
            self._opened = opened.pop_all()

    def prepare(self) -> None:
        """Captures a token's graphs."""
        self.decoder.prepare()

    def close(self) -> None:
        """Ends threads and reads, lets go of the device's memory."""
        self._opened.close()
        del self.decoder, self.weights, self.store


def least_staged_bytes(asked: StagedInputs, chunk_tokens: int) -> int:
    """The least room for experts that the engine runs in: the largest one, tables, and room to work in."""
    pack = asked.pack
    page_bytes = staged_page_bytes(pack.layout)
    return staged_needs(pack, page_bytes, chunk_tokens, asked.ops, _num_partials(asked)).least_budget


def _num_partials(asked: StagedInputs) -> int:
    spec = asked.pack.spec
    return num_partials(spec.router.num_experts_per_tok, spec.expert.intermediate_size, asked.num_sms)


def _host(asked: StagedInputs, opened: ExitStack) -> HostExperts:
    if asked.host is not None:
        return arena_experts(asked.pack, asked.host)
    # PyTorch's allocator takes the next power of two of page-locked memory: what is asked for stays below one.
    room = (1 << asked.ram_bytes.bit_length() - 1) - DISK_BLOCK_BYTES
    slots = min(max(_LEAST_SLOTS, room // disk_slot_bytes(asked.pack)), asked.pack.index.size.size)
    drive = DiskExperts(asked.pack, asked.device, asked.open_reads, slots, asked.verify)
    return opened.enter_context(closing(drive))


def _most_row_bytes(pack: Pack) -> int:
    rows = chain.from_iterable((e.selector, e.records) for layer in pack.layout.experts for e in layer)
    return max(row.row_bytes for row in rows if row is not None)


def _cpu_share(asked: StagedInputs, preset: Preset) -> CpuOffload | None:
    """Whose misses the CPU shares in, as the paper of the policy splits them, by rates measured here and now."""
    if asked.kernels is None or asked.host is None or preset.name not in ("fiddler", "importance"):
        return None
    split = fastest if preset.name == "fiddler" else balanced
    load_s, token_s = _load_seconds(asked), _token_seconds(asked, asked.kernels)
    return CpuOffload(asked.kernels, lambda tokens: split(tokens, token_s, load_s))


def _load_seconds(asked: StagedInputs) -> float:
    """What bringing an expert over the link takes."""
    assert asked.host is not None, "the link is from host memory"
    source = asked.host.rows(0)[: asked.pack.layout.experts[0][0].num_bytes]
    target = torch.empty_like(source, device=asked.device.device)

    def bring() -> None:
        asked.device.copy(target, source, "copy")
        asked.device.synchronize(asked.device.record("copy"), "measuring")

    return _median_seconds(bring)


def _token_seconds(asked: StagedInputs, kernels: Kernels) -> float:
    """What an expert takes the CPU for one token."""
    assert asked.host is not None, "the CPU computes from host memory"
    pack, layout = asked.pack, asked.pack.layout.experts[0][0]
    function, threshold = pack.spec.expert.function, float(pack.thresholds[0, 0])
    rows = extent_rows(layout, pack.manifest.selector, function, threshold, asked.host.rows(0).numpy())
    x = torch.randn(1, pack.spec.hidden_size, generator=torch.Generator().manual_seed(0))
    work = (rows, np.zeros(1, np.int64), np.ones(1, np.float32))
    return _median_seconds(lambda: kernels.experts(x, [work]))


def _median_seconds(action: Callable[[], object]) -> float:
    action()  # touches what it will use
    taken = []
    for _ in range(_MEASURED_TIMES):
        started = time.perf_counter()
        action()
        taken.append(time.perf_counter() - started)
    return sorted(taken)[_MEASURED_TIMES // 2]
