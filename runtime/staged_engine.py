"""The staged engine of a card put together: store, weights and decoder. Importing this needs triton."""

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from moe_pack.formats import DISK_BLOCK_BYTES, Pack
from moe_pack.runtime.chunk_ring import CHUNK_BYTES, ChunkRing
from moe_pack.runtime.device import Device
from moe_pack.runtime.foretelling import Foreteller
from moe_pack.runtime.host_arena import HostArena
from moe_pack.runtime.kernels.tiles import num_partials
from moe_pack.runtime.native_kernels import Kernels, extent_rows
from moe_pack.runtime.policies import Preset, balanced, fastest
from moe_pack.runtime.reads import Reads
from moe_pack.runtime.recording import Recorder
from moe_pack.runtime.residency import CacheFacts, Residency
from moe_pack.runtime.staged_decoder import StagedDecoder
from moe_pack.runtime.staged_host import DriveExperts, HostExperts, arena_experts, drive_slot_bytes
from moe_pack.runtime.staged_ops import TritonOps
from moe_pack.runtime.staged_pages import staged_page_bytes
from moe_pack.runtime.staged_store import DeviceStore, pages_of
from moe_pack.runtime.staged_weights import CpuShare, StagedWeights, plan_staged, staged_needs
from moe_pack.runtime.streaming import StreamingWeights, Trust

_MEASURED_TIMES = 5  # of which the median counts
_LEAST_SLOTS = 2  # one expert is read while another is copied


@dataclass(frozen=True, slots=True)
class Decided:
    """What decides on experts: policies, who has which pages, and what is written down of it.

    `rows_below`: the share of running neurons below which their rows alone are brought.
    """

    preset: Preset
    residency: Residency
    recorder: Recorder | None
    rows_below: float


@dataclass(frozen=True, slots=True)
class StagedAsked:
    """What the staged engine is given beside room.

    `host`: all experts in page-locked memory; None: they come from the drive, through `ram_bytes` of it, by
    `open_reads`.   `decide`: for a cache of experts.   `foretell`: what foretells for these weights, None for nothing.
    `kernels`: the CPU's, where it may compute.   `verify`: whether experts from the drive are checked.   `shares`:
    float32 [L, E], how popular experts are.   `num_sms`: multiprocessors, which say how work is divided.
    """

    pack: Pack
    device: Device
    ops: TritonOps
    host: HostArena | None
    ram_bytes: int
    open_reads: Callable[[NDArray[np.uint8]], Reads]
    decide: Callable[[CacheFacts], Decided]
    foretell: Callable[[Preset, StreamingWeights], Foreteller | None]
    kernels: Kernels | None
    trust: Trust
    verify: bool
    shares: NDArray[np.float32]
    num_sms: int


class StagedAtWork:
    """A pack at work by the staged engine; see `AtWork`. Owns all but what it was given: `close` it.

    `decided`: the policies at work.
    Args:    room_bytes: of the device, for experts.   chunk_tokens: of a forward pass, at most.
    Raises:  RunError if the largest expert has no room.
    """

    def __init__(
        self, asked: StagedAsked, room_bytes: int, context_tokens: int, chunk_tokens: int, cache_dtype: torch.dtype
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
            store = DeviceStore(pack, host, device, plan.num_pages, plan.page_bytes, decided.rows_below, ring)
            self.weights = StagedWeights(
                pack,
                store,
                decided.residency,
                asked.ops,
                chunk_tokens,
                cpu=_cpu_share(asked, decided.preset),
                num_partials=partials,
                scores_matter=decided.preset.eviction == "importance" or decided.recorder is not None,
                reuses_selector=decided.preset.reuse_selector,
                trust=asked.trust,
                recorder=decided.recorder,
            )
            opened.enter_context(closing(self.weights))
            self.weights.foreteller = asked.foretell(decided.preset, self.weights)
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


def least_staged_bytes(asked: StagedAsked, chunk_tokens: int) -> int:
    """The least room for experts that the engine runs in: the largest one, tables, and room to work in."""
    pack = asked.pack
    page_bytes = staged_page_bytes(pack.layout)
    return staged_needs(pack, page_bytes, chunk_tokens, asked.ops, _num_partials(asked)).least_budget


def _num_partials(asked: StagedAsked) -> int:
    spec = asked.pack.spec
    return num_partials(spec.router.num_experts_per_tok, spec.expert.intermediate_size, asked.num_sms)


def _host(asked: StagedAsked, opened: ExitStack) -> HostExperts:
    if asked.host is not None:
        return arena_experts(asked.pack, asked.host)
    # PyTorch's allocator takes the next power of two of page-locked memory: what is asked for stays below one.
    room = (1 << asked.ram_bytes.bit_length() - 1) - DISK_BLOCK_BYTES
    slots = min(max(_LEAST_SLOTS, room // drive_slot_bytes(asked.pack)), asked.pack.index.size.size)
    drive = DriveExperts(asked.pack, asked.device, asked.open_reads, slots, asked.verify)
    return opened.enter_context(closing(drive))


def _most_row_bytes(pack: Pack) -> int:
    rows = chain.from_iterable((e.selector, e.records) for layer in pack.layout.experts for e in layer)
    return max(row.row_bytes for row in rows if row is not None)


def _cpu_share(asked: StagedAsked, preset: Preset) -> CpuShare | None:
    """Whose misses the CPU shares in, as the paper of the policy splits them, by rates measured here and now."""
    if asked.kernels is None or asked.host is None or preset.name not in ("fiddler", "importance"):
        return None
    split = fastest if preset.name == "fiddler" else balanced
    load_s, token_s = _load_seconds(asked), _token_seconds(asked, asked.kernels)
    return CpuShare(asked.kernels, lambda tokens: split(tokens, token_s, load_s))


def _load_seconds(asked: StagedAsked) -> float:
    """What bringing an expert over the link takes."""
    assert asked.host is not None, "the link is from host memory"
    source = asked.host.rows(0)[: asked.pack.layout.experts[0][0].num_bytes]
    target = torch.empty_like(source, device=asked.device.device)

    def bring() -> None:
        asked.device.copy(target, source, "copy")
        asked.device.synchronize(asked.device.record("copy"), "measuring")

    return _median_seconds(bring)


def _token_seconds(asked: StagedAsked, kernels: Kernels) -> float:
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
