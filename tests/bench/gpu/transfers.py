"""Parts `machine` and `transfer`: what the GPU, its memory and its link can do.

`transfer` brings a fifth of an expert's records from page-locked host memory to the GPU, as in FloE's Figure 7, in two
ways: the GPU pulls them, with so many programs; the host's threads gather them into chunks, which are copied. A copy of
as many contiguous bytes is the comparison. The GPU reads host memory by lines of 128 bytes: rows are pulled as they are
stored, and at distances that are multiples of 128. `share` is of the rate of a copy of 256 MiB. Experts are taken in
turn from more memory than the host's caches hold.
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
from numpy.typing import NDArray
from recording_device import RecordingDevice
from torch import Tensor

from gpu.checks import cudart
from gpu.engines import link_rate
from gpu.measuring import Clock, Results, copies_beyond, repeated
from moe_pack.convert.synthetic import WeightDistribution, even_values, random_rows, random_stream
from moe_pack.formats import (
    ExpertFormat,
    ExpertLayout,
    ExpertSpec,
    PartFormat,
    RowLayout,
    Selector,
    part_format,
    trellis_format,
)
from moe_pack.formats.layout import expert_layout
from moe_pack.formats.layout import row_layout as layout_of_rows
from moe_pack.formats.plan import E5M2, FP8, MXFP4, TRELLIS_WIDTHS
from moe_pack.runtime.gpu.device import CHUNK_BYTES, ChunkRing, CudaDevice, Device, RowRange
from moe_pack.runtime.gpu.kernels.cache import NUM_PROGRAMS, CacheState, Selection, gather_records_from_host, lru_update
from moe_pack.runtime.gpu.kernels.rows import RowPart, part_of, stored_part
from moe_pack.runtime.gpu.kernels.tables import SELECT_BLOCK, HostRows, LayerTables, kind_of

_GROUP = 64
Stored = int | str  # bits of codes in groups of 64; `t4`: a trellis of that width; or a codec that keeps a source
_NAMED: dict[str, PartFormat] = {part.codec: part for part in (FP8, E5M2, MXFP4)}
_NAMED |= {f"t{width}": trellis_format(width, _GROUP) for width in TRELLIS_WIDTHS}


@dataclass(frozen=True, slots=True)
class Model:
    """An expert's dimensions; `k`: how many a token takes at once."""

    name: str
    d: int
    f: int
    k: int


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """Copies of one random expert, each with its places in `tables`; a launch takes `k` of them.

    `selector_bytes`: of all its rows' parts.   `record_bytes`: of a record's.
    """

    tables: LayerTables
    layout: ExpertLayout
    batches: tuple[Tensor, ...]
    selector_bytes: int
    record_bytes: int


def expert_of(model: Model, selector: Selector, selector_bits: Stored, record_bits: Stored) -> ExpertLayout:
    """The layout of an expert of these widths, trellises or codecs."""
    chosen, stored = _format(selector_bits), _format(record_bits)
    gate, up = (chosen if selector in (name, "both") else stored for name in ("gate", "up"))
    spec = ExpertSpec("silu", model.f, ("gate", "up", "down"), (), 0)
    return expert_layout(ExpertFormat(gate, up, stored), selector, spec, model.d)


def _format(stored: Stored) -> PartFormat:
    return _NAMED[stored] if isinstance(stored, str) else part_format(stored, _GROUP)


def random_extent(layout: ExpertLayout) -> NDArray[np.uint8]:
    """An expert's selector and records: u8 [bytes]; activations of rms 1 for hidden states of rms 1."""
    d = layout.records.num_cols
    spreads = {name: WeightDistribution(0.0, d**-0.5) for name in ("gate", "up")} | {
        "down": WeightDistribution(0.0, layout.num_rows**-0.5)
    }
    stream = random_stream(1)
    halves = [random_rows(rows, layout.num_rows, spreads, stream) for rows in (layout.selector, layout.records) if rows]
    return np.concatenate([half.reshape(-1) for half in halves])


def make_experts(clock: Clock, model: Model, selector: Selector, selector_bits: Stored, record_bits: Stored) -> Experts:
    """So many copies that what each operation reads of them exceeds the L2 cache four times."""
    layout, f = expert_of(model, selector, selector_bits, record_bits), model.f
    records_bytes = sum(part.num_bytes for part in layout.records.parts)
    selected = 0 if layout.selector is None else f * sum(part.num_bytes for part in layout.selector.parts)
    least = min(selected or f * records_bytes, f * records_bytes // 10)
    num_batches = -(-copies_beyond(clock.l2_bytes, least) // model.k)
    num_experts = num_batches * model.k
    extent = torch.from_numpy(random_extent(layout))
    arena = repeated(extent, num_experts, clock.device)
    device, stride = clock.device, arena.numel() // num_experts // 16
    first = torch.arange(num_experts, dtype=torch.int32, device=device)[:, None] * stride
    row = torch.arange(f, dtype=torch.int32, device=device)[None, :]
    kind = kind_of(layout, selector, "silu")
    tables = LayerTables(
        arena=arena,
        selector_at=None if layout.selector is None else first + row * kind.selector_units,
        record_at=first + layout.selector_bytes // 16 + row * kind.record_units,
        kind=torch.zeros(num_experts, dtype=torch.int32, device=device),
        thresholds=torch.zeros(num_experts, device=device),
        kinds=(kind,),
    )
    batches = torch.arange(num_experts, dtype=torch.int32, device=device).view(num_batches, model.k)
    return Experts(tables, layout, tuple(batch.clone() for batch in batches), selected, records_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Matrices:
    """Copies of a random dense matrix. `rows`: u8 [n, row bytes], or bf16 [n, d].   `num_bytes`: of one's parts."""

    rows: tuple[Tensor, ...]
    part: RowPart
    layout: RowLayout | None
    row_units: int
    num_bytes: int


def make_matrices(clock: Clock, num_rows: int, num_cols: int, bits: Stored) -> Matrices:
    """So many copies that they exceed the L2 cache four times; of 16 bits they are plain bf16 values."""
    spread = WeightDistribution(0.0, num_cols**-0.5)
    if bits == 16:
        drawn = np.random.default_rng(0).integers(0, 256, (num_rows, num_cols), np.uint8)
        values = torch.from_numpy(even_values(spread)[drawn]).view(torch.bfloat16).to(clock.device)
        num_bytes = 2 * num_rows * num_cols
        copies = tuple(values.clone() for _ in range(copies_beyond(clock.l2_bytes, num_bytes)))
        return Matrices(copies, stored_part("BF16", num_cols), None, num_cols // 8, num_bytes)
    layout = layout_of_rows([("weight", _format(bits), False)], num_cols)
    rows = torch.from_numpy(random_rows(layout, num_rows, {"weight": spread}, random_stream(2))).to(clock.device)
    num_bytes = num_rows * layout.parts[0].num_bytes
    copies = tuple(rows.clone() for _ in range(copies_beyond(clock.l2_bytes, num_bytes)))
    return Matrices(copies, part_of(layout, "weight"), layout, layout.row_bytes // 16, num_bytes)


_MIB = 1 << 20
_NODES = 1000


@dataclass(frozen=True, slots=True)
class CopyRate:
    """Bytes a second of copies; inside the device both those read and those written count."""

    what: str
    num_bytes: int
    gb_a_second: float


@dataclass(frozen=True, slots=True)
class PageLock:
    """How long it took to page-lock memory of our own."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LaunchCost:
    """Microseconds of the smallest kernel: as the host launches it, and as one of many nodes of a graph."""

    what: str
    us: float


def machine(results: Results, clock: Clock) -> None:
    """Measures all of it."""
    results.section("memory", lambda: _memory(results, clock))
    results.section("pinned", lambda: _pinned(results, clock))
    results.section("registered", lambda: _registered(results, clock))
    results.section("launches", lambda: _launches(results, clock))


def _memory(results: Results, clock: Clock) -> None:
    for num_mib in (1,) if clock.is_rehearsal else (1024, 4096):
        source, target = (torch.zeros(num_mib * _MIB, dtype=torch.uint8, device=clock.device) for _ in range(2))
        seconds = clock.direct(lambda s=source, t=target: t.copy_(s), 20)  # type: ignore[misc] # mypy and defaults
        results.add(CopyRate("device to device", num_mib * _MIB, 2 * num_mib * _MIB / seconds / 1e9))
    values = source.view(torch.float32)
    results.add(CopyRate("device, read alone", num_mib * _MIB, num_mib * _MIB / clock.direct(values.sum, 20) / 1e9))


def _pinned(results: Results, clock: Clock) -> None:
    for num_mib in (1,) if clock.is_rehearsal else (256, 1024):
        host = torch.zeros(num_mib * _MIB, dtype=torch.uint8, pin_memory=not clock.is_rehearsal)
        _link(results, clock, "torch's pinned memory", host)
    pageable = torch.zeros(num_mib * _MIB, dtype=torch.uint8)
    _link(results, clock, "pageable memory", pageable)


def _registered(results: Results, clock: Clock) -> None:
    """Our own mapping, page-locked as the host arena is."""
    for num_mib in (1,) if clock.is_rehearsal else (256, 1024):
        num_bytes = num_mib * _MIB
        mapping = mmap.mmap(-1, num_bytes)
        host = torch.from_numpy(np.frombuffer(mapping, np.uint8))
        host.zero_()  # its pages are there, as the arena's are when it is locked
        start = time.perf_counter()
        if not clock.is_rehearsal:
            status = cudart().cudaHostRegister(host.data_ptr(), num_bytes, 0)
            assert int(status) == 0, f"cudaHostRegister: {status}"
        results.add(PageLock(num_bytes, time.perf_counter() - start))
        _link(results, clock, "registered mapping", host)
        if not clock.is_rehearsal:
            cudart().cudaHostUnregister(host.data_ptr())


def _link(results: Results, clock: Clock, what: str, host: Tensor) -> None:
    """Copies each way."""
    num_bytes = host.numel()
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=clock.device)
    seconds = clock.direct(lambda: there.copy_(host, non_blocking=True))
    results.add(CopyRate(f"{what} to device", num_bytes, num_bytes / seconds / 1e9))
    seconds = clock.direct(lambda: host.copy_(there, non_blocking=True))
    results.add(CopyRate(f"device to {what}", num_bytes, num_bytes / seconds / 1e9))


def _launches(results: Results, clock: Clock) -> None:
    value = torch.zeros(1, device=clock.device)
    num_nodes = 10 if clock.is_rehearsal else _NODES

    def launch() -> None:
        value.add_(1)

    launch()
    clock.synchronize()
    start = time.perf_counter()
    for _ in range(num_nodes):
        launch()
    clock.synchronize()
    results.add(LaunchCost("launched by the host", 1e6 * (time.perf_counter() - start) / num_nodes))
    results.add(LaunchCost("node of a graph", 1e6 * clock.graphed([launch] * num_nodes)))


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


def transfer(results: Results, clock: Clock) -> None:
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
            RowRange(first, min(first + size, count), target[first * row : min(first + size, count) * row])
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
        self._state = state.put(lambda tensor: tensor.to(device), counters)
        self._host = HostRows(host.rows, torch.arange(E, device=device) * (host.stride // 16))
        self._experts = [torch.full((1,), e, dtype=torch.int32, device=device) for e in range(E)]
        self._selection = _selection(neurons, f, device)
        for expert in self._experts:
            lru_update(expert, self._state, self._tables)

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
        gather_records_from_host(
            self._experts[number], self._selection, self._tables, self._state, self._host, num_programs
        )

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
    listed = Selection.allocate(1, f, torch.device("cpu"))
    for block in range(listed.counts.shape[1]):
        ours = neurons[(neurons // SELECT_BLOCK) == block]
        listed.neurons[0, block * SELECT_BLOCK :][: len(ours)] = torch.from_numpy(ours)
        listed.counts[0, block] = len(ours)
    return Selection(listed.a.to(device), listed.neurons.to(device), listed.counts.to(device))
