"""Part `transfer`: a fifth of an expert's records from page-locked host memory to the GPU, as FloE's Figure 7 has it.

Two ways: the GPU pulls them, with so many programs; the host's threads gather them into chunks, which are copied.
Beside them one copy of as many bytes that lie together. The GPU reads host memory by lines of 128 bytes: rows are
pulled as they are stored, and at distances that are multiples of 128. `share` is of the rate of a copy of 256 MiB.
Experts are taken in turn from more memory than the host's caches hold.
"""

import mmap
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import numpy as np
import torch
from gpu_clock import Clock
from gpu_engine import link_rate
from gpu_experts import Model, expert_of, random_extent
from gpu_preflight import cudart
from gpu_results import Results
from numpy.typing import NDArray
from recording_device import RecordingDevice
from torch import Tensor

from moe_pack.runtime.chunk_ring import CHUNK_BYTES, ChunkRing, Piece
from moe_pack.runtime.device import CudaDevice, Device
from moe_pack.runtime.kernels.admit import CacheState, admit
from moe_pack.runtime.kernels.pull import NUM_PROGRAMS, HostRows, pull_records
from moe_pack.runtime.kernels.tables import SELECT_BLOCK, LayerTables, Selection, kind_of

_MIXTRAL, _TINY = Model("Mixtral-8x7B", 4096, 14336, 1), Model("tiny", 128, 200, 1)
_SHARE = 0.2
_HOST_BYTES = 2 << 30  # of page-locked copies
_PAGE_BYTES = 256 << 10
_LINE_BYTES = 128
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Transfer:
    """Rows brought to the GPU. `row_bytes`: of one, which is the distance of two too.

    `size`: programs that pull, or rows in a chunk; `threads`: that gather them.
    """

    way: str
    record_bits: int
    row_bytes: int
    running: float
    size: int
    threads: int
    num_bytes: int
    us: float
    gb_a_second: float
    share: float


def run(results: Results, clock: Clock) -> None:
    """Runs every width apart."""
    model, rate = _TINY if clock.is_rehearsal else _MIXTRAL, link_rate(clock)
    for bits in (4,) if clock.is_rehearsal else (4, 2):
        stored = expert_of(model, "up", 2, bits).records.row_bytes
        aligned = stored // _LINE_BYTES * _LINE_BYTES
        for row_bytes in (stored, aligned, aligned + _LINE_BYTES):
            with closing(_HostExperts(clock, model, bits, row_bytes)) as host:
                bench = _Bench(results, clock, host, bits, rate)
                results.section(f"pull, {bits} bit, {row_bytes}", partial(bench.pulls, row_bytes == stored))
                if row_bytes == stored:
                    results.section(f"contiguous, {bits} bit", bench.together)
                    results.section(f"staged, {bits} bit", bench.stages)


class _HostExperts:
    """Copies of an expert's bytes in memory of our own, page-locked; its records as rows of `row_bytes`.

    `stride`: bytes from one copy to the next.   `records_begin`: where its records begin.
    """

    def __init__(
        self, clock: Clock, model: Model, record_bits: int, row_bytes: int, host_bytes: int = _HOST_BYTES
    ) -> None:
        layout = expert_of(model, "up", 2, record_bits)
        self.kind = replace(kind_of(layout, "up", "silu"), record_units=row_bytes // 16)
        extent = random_extent(layout)
        self.num_rows, self.row_bytes, self.records_begin = layout.num_rows, row_bytes, layout.selector_bytes
        needed = self.records_begin + layout.num_rows * row_bytes
        self.stride = -(-max(extent.nbytes, needed) // _LINE_BYTES) * _LINE_BYTES
        self.num_experts = 2 if clock.is_rehearsal else max(2, host_bytes // self.stride)
        self._map = mmap.mmap(-1, self.stride * self.num_experts)
        self.array: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        for number in range(self.num_experts):
            copy = self.array[number * self.stride :][: self.stride]
            copy[:] = np.resize(extent, self.stride)
        self.rows, self._is_locked = torch.from_numpy(self.array), not clock.is_rehearsal
        if self._is_locked:
            status = cudart().cudaHostRegister(self.rows.data_ptr(), len(self._map), 0)
            assert int(status) == 0, f"cudaHostRegister: {status}"

    def close(self) -> None:
        """Unlocks the memory; it goes when nothing views it."""
        if self._is_locked:
            torch.cuda.synchronize()
            cudart().cudaHostUnregister(self.rows.data_ptr())

    def records(self, number: int) -> NDArray[np.uint8]:
        """A copy's records: u8 [f, row bytes]."""
        begin = number * self.stride + self.records_begin
        return self.array[begin : begin + self.num_rows * self.row_bytes].reshape(self.num_rows, -1)


class _Bench:
    """All ways for one width."""

    def __init__(self, results: Results, clock: Clock, host: _HostExperts, bits: int, rate: float) -> None:
        self._results, self._clock, self._host, self._bits, self._rate = results, clock, host, bits, rate
        self._neurons = _running(host.num_rows)

    def together(self) -> None:
        """As many bytes side by side, in one copy."""
        num_bytes = len(self._neurons) * self._host.row_bytes
        there = torch.zeros(num_bytes, dtype=torch.uint8, device=self._clock.device)
        rows = torch.from_numpy(self._host.records(0).reshape(-1)[:num_bytes])
        self._add("one copy", 1.0, 0, 0, num_bytes, self._clock.direct(lambda: there.copy_(rows, non_blocking=True)))

    def pulls(self, with_all_sizes: bool) -> None:
        """By the GPU: all copies one after the other in a graph; then their rows are gone again."""
        f, tiny = self._host.num_rows, self._clock.is_rehearsal
        sizes = (4,) if tiny else (132, 264, 528, 1056) if with_all_sizes else (528,)
        everything = np.arange(f, dtype=np.int32)
        for neurons, programs in (*((self._neurons, size) for size in sizes), (everything, sizes[-1])):
            pulls = _Pulls(self._clock, self._host, neurons)
            num_bytes = len(neurons) * self._host.row_bytes
            self._add("pull", len(neurons) / f, programs, 0, num_bytes, pulls.seconds(programs))
            pulls.check()

    def stages(self) -> None:
        """By the host: gathered into chunks, each copied when it is full; until the last is there."""
        tiny, row_bytes = self._clock.is_rehearsal, self._host.row_bytes
        target = torch.zeros(len(self._neurons) * row_bytes, dtype=torch.uint8, device=self._clock.device)
        for threads in (2,) if tiny else (4, 8):
            for chunk_bytes in (10 * row_bytes,) if tiny else (CHUNK_BYTES // 4, CHUNK_BYTES, 4 * CHUNK_BYTES):
                device: Device = RecordingDevice() if tiny else CudaDevice()
                with closing(ChunkRing(device, chunk_bytes, 16, threads)) as ring:
                    seconds = self._stage(device, ring, target)
                    size = ring.rows_per_chunk(row_bytes)
                self._add("staged", _SHARE, size, threads, target.numel(), seconds)
        expected = self._host.records(self._host.num_experts - 1)[self._neurons].reshape(-1)
        assert np.array_equal(target.cpu().numpy(), expected), "what was staged is not what was asked for"

    def _stage(self, device: Device, ring: ChunkRing, target: Tensor) -> float:
        """Seconds for one expert's rows, the median over the copies."""
        row, count = self._host.row_bytes, len(self._neurons)
        size = ring.rows_per_chunk(row)
        pieces = [
            Piece(first, min(first + size, count), target[first * row : min(first + size, count) * row])
            for first in range(0, count, size)
        ]
        times = []
        for number in range(self._host.num_experts):
            start = time.perf_counter()
            ring.send(self._host.records(number), self._neurons, pieces)
            device.synchronize(device.record("copy"), "neurons")
            times.append(time.perf_counter() - start)
        return median(times)

    def _add(self, way: str, running: float, size: int, threads: int, num_bytes: int, seconds: float) -> None:
        rate, row_bytes = num_bytes / seconds, self._host.row_bytes
        us, share = 1e6 * seconds, rate / self._rate
        self._results.add(
            Transfer(way, self._bits, row_bytes, running, size, threads, num_bytes, us, rate / 1e9, share)
        )


class _Pulls:
    """A layer of these experts that has all their selectors and pages for all their records, and none of those yet."""

    def __init__(self, clock: Clock, host: _HostExperts, neurons: NDArray[np.int32]) -> None:
        self._clock, self._held, self._neurons = clock, host, neurons
        E, device, f = host.num_experts, clock.device, host.num_rows
        page_bytes = max(_PAGE_BYTES, host.row_bytes)
        pages = -(-f // (page_bytes // host.row_bytes))
        self._tables = LayerTables(
            arena=torch.zeros(E * pages * page_bytes, dtype=torch.uint8, device=device),
            selector_at=torch.zeros((E, f), dtype=torch.int32, device=device),
            record_at=torch.full((E, f), -1, dtype=torch.int32, device=device),
            kind=torch.zeros(E, dtype=torch.int32, device=device),
            thresholds=torch.zeros(E, device=device),
            kinds=(host.kind,),
        )
        none = torch.zeros(E, dtype=torch.int32)
        counters = torch.zeros(4, dtype=torch.int64, device=device)
        state = CacheState.empty(none + pages, none, none, E * pages, 0, page_bytes // 16, 1)
        self._state = state.put(lambda held: held.to(device), counters)
        self._host = HostRows(host.rows, torch.arange(E, device=device) * (host.stride // 16))
        self._experts = [torch.full((1,), e, dtype=torch.int32, device=device) for e in range(E)]
        self._selection = _selection(neurons, f, device)
        for expert in self._experts:
            admit(expert, self._state, self._tables)

    def seconds(self, num_programs: int) -> float:
        """Seconds of an expert's pull."""

        def pull_all() -> None:
            for number in range(len(self._experts)):
                self.pull(number, num_programs)

        replay = self._clock.captured(pull_all, self.forget)
        times = []
        for _ in range(_ROUNDS):
            self.forget()
            times.append(self._clock.once(replay))
        return median(times) / len(self._experts)

    def pull(self, number: int, num_programs: int = NUM_PROGRAMS) -> None:
        """Pulls an expert's rows that are not there."""
        pull_records(self._experts[number], self._selection, self._tables, self._state, self._host, num_programs)

    def forget(self) -> None:
        """Makes all rows missing again."""
        self._tables.record_at.fill_(-1)
        self._clock.synchronize()

    def check(self) -> None:
        """Compares what was pulled last with the host's."""
        expected = self._held.records(0)[self._neurons]
        at = self._tables.record_at[0, torch.from_numpy(self._neurons).long().to(self._clock.device)]
        units = torch.arange(expected.shape[1] // 16, device=at.device)
        rows = self._tables.arena.view(-1, 16)[at.long()[:, None] + units]
        assert np.array_equal(rows.view(len(expected), -1).cpu().numpy(), expected), "what was pulled is something else"


def one_pull(clock: Clock, model: Model, record_bits: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """What pulls a fifth of an expert's records, and what makes them missing again."""
    row_bytes = expert_of(model, "up", 2, record_bits).records.row_bytes
    host = _HostExperts(clock, model, record_bits, row_bytes, host_bytes=1)
    pulls = _Pulls(clock, host, _running(host.num_rows))
    return partial(pulls.pull, 0), pulls.forget


def _running(f: int) -> NDArray[np.int32]:
    """A fifth of the neurons, rising; evenly spread, which is the harder case: packs have the hottest rows first."""
    return np.sort(np.random.default_rng(0).permutation(f)[: round(_SHARE * f)]).astype(np.int32)


def _selection(neurons: NDArray[np.int32], f: int, device: torch.device) -> Selection:
    """What `select` would have listed."""
    listed = Selection.room(1, f, torch.device("cpu"))
    for block in range(listed.counts.shape[1]):
        ours = neurons[(neurons // SELECT_BLOCK) == block]
        listed.neurons[0, block * SELECT_BLOCK :][: len(ours)] = torch.from_numpy(ours)
        listed.counts[0, block] = len(ours)
    return Selection(listed.a.to(device), listed.neurons.to(device), listed.counts.to(device))
