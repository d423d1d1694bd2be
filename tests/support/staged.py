"""The staged engine of a device, put together over a recording one: what an engine does on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from native import kernels_limited_to
from recording_device import RecordingDevice
from torch_ops import TorchOps

from moe_pack.formats import Pack
from moe_pack.runtime.gpu.device import ChunkRing, HostArena
from moe_pack.runtime.gpu.staged import TritonOps
from moe_pack.runtime.gpu.staged_engine import CpuOffload, StagedWeights
from moe_pack.runtime.gpu.staged_store import (
    DiskExperts,
    GpuExpertStore,
    HostExperts,
    arena_experts,
    pages_of,
    staged_page_bytes,
)
from moe_pack.runtime.model import Decoder
from moe_pack.runtime.offload import (
    EXACT,
    PRESETS,
    Approximations,
    CacheFacts,
    Prefetcher,
    Recorder,
    Recording,
    open_reads,
    recorded_expert_cache_for,
)
from moe_pack.runtime.offload.prefetch import make_prediction
from moe_pack.runtime.offload.split import balanced


@dataclass(frozen=True, slots=True)
class Staged:
    """How experts are staged. `disk_slots`: number of slots if experts come from the disk."""

    policy: str = "lru"
    num_experts: int = 8
    chunk_tokens: int = 16
    rows_below: float | None = None
    prediction: str | None = None
    load_seconds: float | None = None  # of an expert, where a token of one takes the CPU a second
    disk_slots: int | None = None
    trust: Approximations = EXACT
    seed: int = 0
    ops: TritonOps = field(default_factory=TorchOps)
    make_device: Callable[[int], RecordingDevice] = RecordingDevice


@dataclass(frozen=True, slots=True)
class AtWork:
    """What `staged` has put together."""

    decoder: Decoder
    weights: StagedWeights
    device: RecordingDevice
    store: GpuExpertStore
    facts: CacheFacts
    recorder: Recorder

    def record(self) -> Recording:
        """The run so far."""
        return self.recorder.recording()


@contextmanager
def staged(folder: Path, options: Staged, context_tokens: int) -> Iterator[AtWork]:
    """A decoder whose experts are staged, with room for so many of the largest."""
    with ExitStack() as stack:
        pack = stack.enter_context(Pack(folder))
        device, preset, spec = options.make_device(options.seed), PRESETS[options.policy], pack.spec.router
        page_bytes = staged_page_bytes(pack.layout)
        pages = pages_of(pack, page_bytes)
        shares = np.full(pages.shape, 1 / pages.shape[1], np.float32)
        facts = CacheFacts(pages, int(pages.max()) * options.num_experts, spec.num_experts_per_tok, shares)
        recorder = Recorder(facts, pack.manifest.root, preset.name, 0, context_tokens, keeps_scores=True)
        arena = stack.enter_context(HostArena(pack, device.device))
        host: HostExperts = arena_experts(pack, arena)
        if options.disk_slots is not None:
            disk = DiskExperts(pack, device, lambda memory: open_reads(memory, False, 2), options.disk_slots, True)
            host = stack.enter_context(closing(disk))
        rows = [
            rows.row_bytes for layer in pack.layout.experts for e in layer for rows in (e.selector, e.records) if rows
        ]
        ring = stack.enter_context(closing(ChunkRing(device, 7 * max(rows), 3, 2)))
        rows_below = preset.rows_below if options.rows_below is None else options.rows_below
        store = GpuExpertStore(pack, host, device, facts.num_pages, page_bytes, rows_below, ring)
        cpu = None
        if options.load_seconds is not None:
            seconds = options.load_seconds
            cpu = CpuOffload(kernels_limited_to("portable"), lambda tokens: balanced(tokens, 1.0, seconds))
        weights = StagedWeights(
            pack,
            store,
            recorded_expert_cache_for(preset, facts, recorder),
            options.ops,
            options.chunk_tokens,
            cpu=cpu,
            num_partials=4,
            scores_matter=True,
            reuses_selector=preset.reuse_selector and options.prediction is not None,
            approximations=options.trust,
            recorder=recorder,
        )
        stack.enter_context(closing(weights))
        if options.prediction is not None:
            prediction = make_prediction(options.prediction, weights, None)  # type: ignore[arg-type]  # its name
            weights.prefetcher = Prefetcher(prediction, spec.num_experts, spec.num_experts_per_tok, 2)
        decoder = Decoder(weights, context_tokens, device.device, options.chunk_tokens)
        yield AtWork(decoder, weights, device, store, facts, recorder)
