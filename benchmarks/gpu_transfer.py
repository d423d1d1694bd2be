"""Part `transfer`: a fifth of an expert's records from page-locked host memory to the card, as FloE's Figure 7 has it.

Two ways: the card pulls them, with so many programs; the host's threads gather them into chunks of so many neurons,
which are copied. Beside them one copy of as many bytes that lie together, page-locked. `share` is of that copy's rate
at 256 MiB. Experts are taken in turn from more memory than the host's caches hold.
"""

import mmap
import time
from contextlib import closing
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from gpu_clock import Clock
from gpu_experts import Model, expert_of, random_extent
from gpu_machine import cudart
from gpu_results import Results
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import ExpertLayout
from moe_pack.runtime.chunk_ring import ChunkRing, Piece
from moe_pack.runtime.device import CudaDevice, Device
from moe_pack.runtime.kernels.admit import CacheState, admit
from moe_pack.runtime.kernels.pull import HostRows, pull_records
from moe_pack.runtime.kernels.tables import SELECT_BLOCK, LayerTables, Selection, kind_of
from moe_pack.runtime.recording_device import RecordingDevice

_MIXTRAL, _TINY = Model("Mixtral-8x7B", 4096, 14336, 1), Model("tiny", 128, 200, 1)
_SHARE = 0.2
_HELD_BYTES = 2 << 30  # of page-locked copies
_PAGE_BYTES = 256 << 10
_ROUNDS = 5
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Transfer:
    """Rows brought to the card. `size`: programs that pull, or neurons in a chunk; `threads`: that gather them."""

    way: str
    record_bits: int
    running: float
    size: int
    threads: int
    num_bytes: int
    us: float
    gb_a_second: float
    share: float


def run(results: Results, clock: Clock) -> None:
    """Runs every width apart."""
    rate = _copy_rate(clock, _MIB if clock.is_rehearsal else 256 * _MIB)
    for bits in (4,) if clock.is_rehearsal else (16, 4, 2):
        held = _HostExperts(clock, _TINY if clock.is_rehearsal else _MIXTRAL, bits)
        with closing(held):
            bench = _Bench(results, clock, held, bits, rate)
            results.section(f"contiguous, {bits} bit", bench.together)
            results.section(f"pull, {bits} bit", bench.pulls)
            results.section(f"staged, {bits} bit", bench.stages)


def _copy_rate(clock: Clock, num_bytes: int) -> float:
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=not clock.is_rehearsal)
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=clock.device)
    return num_bytes / clock.direct(lambda: there.copy_(host, non_blocking=True))


class _HostExperts:
    """Copies of an expert in memory of our own, page-locked. `layout`: of one; `stride`: bytes from one to the next."""

    def __init__(self, clock: Clock, model: Model, record_bits: int) -> None:
        self.layout: ExpertLayout = expert_of(model, "up", 2, record_bits)
        extent = random_extent(self.layout)
        self.stride = -(-extent.nbytes // 128) * 128
        self.num_experts = 2 if clock.is_rehearsal else _HELD_BYTES // self.stride
        self._map = mmap.mmap(-1, self.stride * self.num_experts)
        self.array: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        for number in range(self.num_experts):
            self.array[number * self.stride :][: extent.nbytes] = extent
        self.rows, self._is_locked = torch.from_numpy(self.array), not clock.is_rehearsal
        if self._is_locked:
            status = cudart().cudaHostRegister(self.rows.data_ptr(), len(self._map), 0)
            assert int(status) == 0, f"cudaHostRegister: {status}"

    def close(self) -> None:
        """Unlocks the memory; it goes when nothing views it."""
        if self._is_locked:
            cudart().cudaHostUnregister(self.rows.data_ptr())

    def records(self, number: int) -> NDArray[np.uint8]:
        """A copy's records: u8 [f, row bytes]."""
        begin = number * self.stride + self.layout.selector_bytes
        return self.array[begin : begin + self.layout.records_bytes].reshape(self.layout.num_rows, -1)


class _Bench:
    """All ways for one width."""

    def __init__(self, results: Results, clock: Clock, held: _HostExperts, bits: int, rate: float) -> None:
        self._results, self._clock, self._held, self._bits, self._rate = results, clock, held, bits, rate
        f = held.layout.num_rows
        # Rows are ordered by heat: those that run lie denser at the beginning. Evenly spread is the harder case.
        self._neurons = np.sort(np.random.default_rng(0).permutation(f)[: round(_SHARE * f)]).astype(np.int32)
        self._row_bytes = held.layout.records.row_bytes

    def together(self) -> None:
        """As many bytes side by side, in one copy."""
        num_bytes = len(self._neurons) * self._row_bytes
        there = torch.zeros(num_bytes, dtype=torch.uint8, device=self._clock.device)
        rows = torch.from_numpy(self._held.records(0).reshape(-1)[:num_bytes])
        self._add("one copy", 1.0, 0, 0, num_bytes, self._clock.direct(lambda: there.copy_(rows, non_blocking=True)))

    def pulls(self) -> None:
        """By the card: all copies one after the other in a graph; then their rows are gone again."""
        f = self._held.layout.num_rows
        for neurons, programs in (
            *((self._neurons, num) for num in ((4,) if self._clock.is_rehearsal else (66, 132, 264, 528, 1056))),
            (np.arange(f, dtype=np.int32), 4 if self._clock.is_rehearsal else 528),
        ):
            pulls = _Pulls(self._clock, self._held, neurons)
            seconds = pulls.seconds(programs)
            share = len(neurons) / f
            self._add("pull", share, programs, 0, len(neurons) * self._row_bytes, seconds)
            pulls.check()

    def stages(self) -> None:
        """By the host: gathered into chunks, each copied when it is full; until the last is there."""
        tiny, num_bytes = self._clock.is_rehearsal, len(self._neurons) * self._row_bytes
        target = torch.zeros(num_bytes, dtype=torch.uint8, device=self._clock.device)
        for threads in (2,) if tiny else (1, 4, 8):
            for size in (10,) if tiny else (10, 25, 50, 100, 200, 400):
                device: Device = RecordingDevice() if tiny else CudaDevice()
                with closing(ChunkRing(device, size * self._row_bytes, 16, threads)) as ring:
                    seconds = self._stage(device, ring, target)
                self._add("staged", _SHARE, size, threads, num_bytes, seconds)
        expected = self._held.records(0)[self._neurons].reshape(-1)
        assert np.array_equal(target.cpu().numpy(), expected), "what was staged is not what was asked for"

    def _stage(self, device: Device, ring: ChunkRing, target: Tensor) -> float:
        """Seconds for one expert's rows, the median over the copies."""
        size, count, row = ring.rows_per_chunk(self._row_bytes), len(self._neurons), self._row_bytes
        firsts = range(0, count, size)
        stops = [min(first + size, count) for first in firsts]
        pieces = [Piece(a, b, target[a * row : b * row]) for a, b in zip(firsts, stops, strict=True)]
        times = []
        for number in range(self._held.num_experts):
            start = time.perf_counter()
            ring.send(self._held.records(number), self._neurons, pieces)
            device.synchronize(device.record("copy"), "neurons")
            times.append(time.perf_counter() - start)
        return median(times)

    def _add(self, way: str, running: float, size: int, threads: int, num_bytes: int, seconds: float) -> None:
        rate = num_bytes / seconds
        self._results.add(
            Transfer(way, self._bits, running, size, threads, num_bytes, 1e6 * seconds, rate / 1e9, rate / self._rate)
        )


class _Pulls:
    """A layer of these experts that has all their selectors and pages for all their records, and none of those yet."""

    def __init__(self, clock: Clock, held: _HostExperts, neurons: NDArray[np.int32]) -> None:
        self._clock, self._held, self._neurons = clock, held, neurons
        kind, E, device = kind_of(held.layout, "up", "silu"), held.num_experts, clock.device
        f, page_bytes = kind.num_rows, max(_PAGE_BYTES, 16 * kind.record_units)
        pages = -(-f // (page_bytes // (16 * kind.record_units)))
        self._tables = LayerTables(
            arena=torch.zeros(E * pages * page_bytes, dtype=torch.uint8, device=device),
            selector_at=torch.zeros((E, f), dtype=torch.int32, device=device),
            record_at=torch.full((E, f), -1, dtype=torch.int32, device=device),
            kind=torch.zeros(E, dtype=torch.int32, device=device),
            thresholds=torch.zeros(E, device=device),
            kinds=(kind,),
        )
        none = torch.zeros(E, dtype=torch.int32)
        counters = torch.zeros(4, dtype=torch.int64, device=device)
        state = CacheState.empty(none + pages, none, none, E * pages, 0, page_bytes // 16, 1)
        self._state = state.put(lambda host: host.to(device), counters)
        self._host = HostRows(held.rows, torch.arange(E, device=device) * (held.stride // 16))
        self._experts = [torch.full((1,), e, dtype=torch.int32, device=device) for e in range(E)]
        self._selection = _selection(neurons, f, device)

    def seconds(self, num_programs: int) -> float:
        """Seconds of an expert's pull."""

        def pull_all() -> None:
            for expert in self._experts:
                pull_records(expert, self._selection, self._tables, self._state, self._host, num_programs)

        for expert in self._experts:
            admit(expert, self._state, self._tables)
        replay = self._clock.captured(pull_all, self._forget)
        times = []
        for _ in range(_ROUNDS):
            self._forget()
            times.append(self._clock.once(replay))
        return median(times) / len(self._experts)

    def check(self) -> None:
        """Compares what was pulled last with the host's."""
        expected = self._held.records(0)[self._neurons]
        at = self._tables.record_at[0, torch.from_numpy(self._neurons).long().to(self._clock.device)]
        rows = self._tables.arena.view(-1, 16)[
            at.long()[:, None] + torch.arange(expected.shape[1] // 16, device=at.device)
        ]
        assert np.array_equal(rows.view(len(expected), -1).cpu().numpy(), expected), "what was pulled is something else"

    def _forget(self) -> None:
        self._tables.record_at.fill_(-1)
        self._clock.synchronize()


def _selection(neurons: NDArray[np.int32], f: int, device: torch.device) -> Selection:
    """What `select` would have listed."""
    listed = Selection.room(1, f, torch.device("cpu"))
    for block in range(listed.counts.shape[1]):
        ours = neurons[(neurons // SELECT_BLOCK) == block]
        listed.neurons[0, block * SELECT_BLOCK :][: len(ours)] = torch.from_numpy(ours)
        listed.counts[0, block] = len(ours)
    return Selection(listed.a.to(device), listed.neurons.to(device), listed.counts.to(device))
