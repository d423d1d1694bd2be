"""Parts `machine` and `transfer`: what the GPU, its memory and its link can do, and how fast it reaches the CPU.

`transfer` brings a fifth of an expert's records from page-locked host memory to the GPU, as in FloE's Figure 7: a
token's kernel pulls them, or they are promoted by a list of the host's. The comparison is a copy of as many contiguous
bytes. `share` is of the rate of a copy of 256 MiB. Experts come in turn from more memory than the host's caches hold.
"""

import ctypes
import mmap
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu.checks import cudart
from gpu.engines import link_rate
from gpu.measuring import Clock, Results, copies_beyond, host_seconds, repeated
from moe_pack.convert.synthetic import WeightDistribution, even_values, random_rows, random_stream
from moe_pack.formats import (
    ExpertFormat,
    ExpertLayout,
    ExpertSpec,
    PartFormat,
    Selector,
    part_format,
    trellis_format,
)
from moe_pack.formats.pack.layouts import expert_layout
from moe_pack.formats.pack.layouts import row_layout as layout_of_rows
from moe_pack.formats.pack.plans import KEPT, TRELLIS_WIDTHS
from moe_pack.runtime.cpu import Kernels, extent_rows, open_kernels
from moe_pack.runtime.cpu.host_share import HostShare, HostShareBuffers
from moe_pack.runtime.gpu.devices import LINE_BYTES, HostCalls
from moe_pack.runtime.gpu.kernels.matmul import StoredRows
from moe_pack.runtime.gpu.kernels.pull import NUM_PROGRAMS, bring, pull_records
from moe_pack.runtime.gpu.kernels.rows import part_of, stored_part
from moe_pack.runtime.gpu.kernels.tables import HERE, HostRows, LayerTables, RunningNeurons, kind_of

_GROUP = 64
Stored = int | str  # bits of codes in groups of 64; `t4`: a trellis of that width; or a codec that keeps a source
_NAMED: dict[str, PartFormat] = {part.codec: part for part in KEPT}
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
    """Copies of one random expert; a launch takes `k` of them."""

    tables: LayerTables
    layout: ExpertLayout
    batches: tuple[Tensor, ...]
    selector_bytes: int  # of all its rows' parts
    record_bytes: int  # of a record's


def expert_of(model: Model, selector: Selector, selector_bits: Stored, record_bits: Stored) -> ExpertLayout:
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


def make_matrices(clock: Clock, num_rows: int, num_cols: int, bits: Stored) -> tuple[list[StoredRows], int]:
    """Returns so many copies of a random matrix that they exceed the L2 cache four times, and the bytes of one's parts.

    With 16 bits they are plain bf16 values.
    """
    spread = WeightDistribution(0.0, num_cols**-0.5)
    if bits == 16:
        drawn = np.random.default_rng(0).integers(0, 256, (num_rows, num_cols), np.uint8)
        rows = torch.from_numpy(even_values(spread)[drawn]).view(torch.bfloat16).to(clock.device)
        num_bytes, part = 2 * num_rows * num_cols, stored_part("BF16", num_cols)
    else:
        layout = layout_of_rows([("weight", _format(bits), False)], num_cols)
        rows = torch.from_numpy(random_rows(layout, num_rows, {"weight": spread}, random_stream(2))).to(clock.device)
        num_bytes, part = num_rows * layout.parts[0].num_bytes, part_of(layout, "weight")
    return [StoredRows(rows.clone(), part) for _ in range(copies_beyond(clock.l2_bytes, num_bytes))], num_bytes


_MIB = 1 << 20
_NODES = 1000


@dataclass(frozen=True, slots=True)
class CopyRate:
    """Bytes a second of copies; inside the device both those read and those written count."""

    what: str
    num_bytes: int
    gb_a_second: float


@dataclass(frozen=True, slots=True)
class LaunchCost:
    """Microseconds of the smallest kernel, or of a call of the CPU that has nothing to do."""

    what: str
    us: float


def machine(results: Results, clock: Clock) -> None:
    results.section("memory", lambda: _memory(results, clock))
    results.section("pinned", lambda: _pinned(results, clock))
    results.section("registered", lambda: _registered(results, clock))
    results.section("launches", lambda: _launches(results, clock))
    results.section("host calls", lambda: _host_calls(results, clock))


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
        if not clock.is_rehearsal:
            status = cudart().cudaHostRegister(host.data_ptr(), num_bytes, 0)
            assert int(status) == 0, f"cudaHostRegister: {status}"
        _link(results, clock, "registered mapping", host)
        if not clock.is_rehearsal:
            cudart().cudaHostUnregister(host.data_ptr())


def _link(results: Results, clock: Clock, what: str, host: Tensor) -> None:
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
    _submitted(results, clock, "graph of a kernel", launch)


def _submitted(results: Results, clock: Clock, what: str, launch: Callable[[], object]) -> None:
    """Times a graph of one launch on the host: from its submission until it is done."""
    replay = clock.captured(launch)

    def run() -> None:
        replay()
        clock.synchronize()

    results.add(LaunchCost(f"{what}, submitted until done", 1e6 * host_seconds(run, 1 if clock.is_rehearsal else 99)))


def _host_calls(results: Results, clock: Clock) -> None:
    """Times calls of the CPU in a graph: of a function without effect, and of a share that has nothing to compute."""
    value = torch.zeros(1, device=clock.device)
    num_nodes = 10 if clock.is_rehearsal else _NODES
    add_kernel = partial(value.add_, 1)
    add_kernel()  # loads it
    kernel_s = clock.graphed([add_kernel] * num_nodes)
    with closing(_EmptyShare(clock)) as share:
        for what, (function, argument) in (("empty call", _no_effect()), ("call of an empty share", share.function())):
            add = _caller(clock, function, argument)
            pair_s = clock.graphed([add_kernel, add] * num_nodes)
            results.add(LaunchCost(f"{what}, node of a graph", 1e6 * clock.graphed([add] * num_nodes)))
            # Of two launches in turn `graphed` tells the mean.
            results.add(LaunchCost(f"{what}, between two kernels", 1e6 * (2 * pair_s - kernel_s)))
            _submitted(results, clock, f"graph of an {what}" if what.startswith("empty") else f"graph of a {what}", add)


def _caller(clock: Clock, function: int, argument: int) -> Callable[[], object]:
    """Returns what adds a call to the stream, or without a GPU calls at once."""
    if clock.is_rehearsal:
        return partial(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function), argument)
    return partial(HostCalls().add, function, argument)


def _no_effect() -> tuple[int, int]:
    """Returns a C function `void f(void*)` and an argument with which it does nothing: `free` and a null pointer."""
    address = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p).value
    assert address is not None, "functions have addresses"
    return address, 0


class _EmptyShare:
    """The host's share of a layer of which the GPU leaves nothing to the CPU. `close` it."""

    def __init__(self, clock: Clock) -> None:
        layout, k = expert_of(_TINY, "up", 2, 4), _TINY.k
        rows = extent_rows(layout, "up", "silu", 0.0, random_extent(layout))

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=not clock.is_rehearsal)

        x, y, weights, a = (
            zeros(*shape, dtype=torch.float32) for shape in ((_TINY.d,), (_TINY.d,), (k,), (k, _TINY.f))
        )
        buffers = HostShareBuffers(x, weights, zeros(k), zeros(1, k), zeros(1, k, _TINY.f), a, y)
        kernels = open_kernels()
        assert kernels is not None, "native kernels are built"
        self._kernels: Kernels = kernels
        self._share = HostShare(kernels, [[rows]], buffers)

    def function(self) -> tuple[int, int]:
        return self._share.function(0)

    def close(self) -> None:
        self._share.close()
        self._kernels.close()


_MIXTRAL, _TINY = Model("Mixtral-8x7B", 4096, 14336, 1), Model("tiny", 128, 200, 1)
_SHARE = 0.2
_HOST_BYTES = 2 << 30  # of page-locked copies
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Transfer:
    """Rows brought to the GPU by so many programs; 0 for a copy. `row_bytes`: of one row."""

    way: str
    record_bits: int
    row_bytes: int
    running: float
    programs: int
    num_bytes: int
    us: float
    gb_a_second: float
    share: float


def transfer(results: Results, clock: Clock) -> None:
    model, rate = _TINY if clock.is_rehearsal else _MIXTRAL, link_rate(clock)
    for bits in (4,) if clock.is_rehearsal else (4, 2):
        results.section(f"rows, {bits} bit", partial(_transfer, results, clock, model, bits, rate))


def _transfer(results: Results, clock: Clock, model: Model, bits: int, rate: float) -> None:
    with closing(_HostExperts(clock, model, bits, _HOST_BYTES)) as host:
        f, row_bytes = host.num_rows, host.row_bytes

        def add(way: str, num_rows: int, programs: int, seconds: float) -> None:
            num_bytes = num_rows * row_bytes
            found = num_bytes / seconds
            figures = (num_bytes, 1e6 * seconds, found / 1e9, found / rate)
            results.add(Transfer(way, bits, row_bytes, num_rows / f, programs, *figures))

        for neurons in (_running(f), np.arange(f, dtype=np.int32)):
            num_bytes = len(neurons) * row_bytes
            there = torch.zeros(num_bytes, dtype=torch.uint8, device=clock.device)
            rows = torch.from_numpy(host.records(0).reshape(-1)[:num_bytes])
            add("one copy", len(neurons), 0, clock.direct(lambda: there.copy_(rows, non_blocking=True)))  # run at once
            pulls = _Pulls(clock, host, neurons)
            for way, launch in (("pull_records", pulls.pull), ("bring", pulls.bring)):
                add(way, len(neurons), NUM_PROGRAMS, pulls.seconds(launch))
                pulls.check()


class _HostExperts:
    """Copies of an expert's bytes in memory of our own, page-locked. `stride`: bytes from one copy to the next."""

    def __init__(self, clock: Clock, model: Model, record_bits: int, host_bytes: int) -> None:
        layout = expert_of(model, "up", 2, record_bits)
        extent, self.kind = random_extent(layout), kind_of(layout, "up", "silu")
        self.num_rows, self.row_bytes, self.records_begin = (
            layout.num_rows,
            layout.records.row_bytes,
            layout.selector_bytes,
        )
        self.stride = -(-extent.nbytes // LINE_BYTES) * LINE_BYTES
        self.num_experts = 2 if clock.is_rehearsal else max(2, host_bytes // self.stride)
        self._map = mmap.mmap(-1, self.stride * self.num_experts)
        self._copies: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8).reshape(self.num_experts, -1)
        self._copies[:] = np.resize(extent, self.stride)
        self.rows, self._is_locked = torch.from_numpy(self._copies.reshape(-1)), not clock.is_rehearsal
        if self._is_locked:
            status = cudart().cudaHostRegister(self.rows.data_ptr(), len(self._map), 0)
            assert int(status) == 0, f"cudaHostRegister: {status}"

    def close(self) -> None:
        """Unlocks the memory; it goes when nothing views it."""
        if self._is_locked:
            torch.cuda.synchronize()
            cudart().cudaHostUnregister(self.rows.data_ptr())

    def records(self, number: int) -> NDArray[np.uint8]:
        records = self._copies[number, self.records_begin : self.records_begin + self.num_rows * self.row_bytes]
        return records.reshape(self.num_rows, -1)


class _Pulls:
    """Experts without a record on the GPU, and memory there for those of one, which the next one overwrites."""

    def __init__(self, clock: Clock, host: _HostExperts, neurons: NDArray[np.int32]) -> None:
        E, device, f, units = host.num_experts, clock.device, host.num_rows, host.row_bytes // 16
        self._clock, self._source, self._neurons, self._units = clock, host, neurons, units
        self._tables = LayerTables(
            arena=torch.zeros(len(neurons) * host.row_bytes, dtype=torch.uint8, device=device),
            selector_at=None,
            record_at=torch.full((E, f), -1, dtype=torch.int32, device=device),
            kind=torch.zeros(E, dtype=torch.int32, device=device),
            thresholds=torch.zeros(E, device=device),
            kinds=(host.kind,),
        )
        extent_at = torch.arange(E) * (host.stride // 16)
        self._host = HostRows(host.rows, extent_at.to(device))
        self._experts = [torch.full((1,), e, dtype=torch.int32, device=device) for e in range(E)]
        targets = torch.arange(len(neurons), dtype=torch.int32) * units
        self._running = RunningNeurons.allocate(1, f, device)
        self._running.neurons[0, : len(neurons)] = torch.from_numpy(neurons).to(device)
        self._running.units[0, : len(neurons)] = targets.to(device)
        self._running.totals[0, HERE] = len(neurons)
        rows = host.records_begin // 16 + torch.from_numpy(neurons).long() * units
        self._sources, self._targets = (extent_at[:, None] + rows).to(device), targets.to(device)

    def seconds(self, launch: Callable[[int], None]) -> float:
        """Seconds of a launch for an expert, which gets its number."""
        self._tables.arena.zero_()
        launches = [partial(launch, number) for number in range(len(self._experts))]
        return self._clock.graphed(launches, _ROUNDS)

    def pull(self, number: int) -> None:
        pull_records(self._experts[number], self._tables, self._running, self._host, False)

    def bring(self, number: int) -> None:
        bring(self._sources[number], self._targets, self._units, self._host.rows, self._tables.arena)

    def check(self) -> None:
        """Compares what came last with the host's."""
        expected = self._source.records(self._source.num_experts - 1)[self._neurons].reshape(-1)
        assert np.array_equal(self._tables.arena.cpu().numpy(), expected), "what was brought is something else"


def one_pull(clock: Clock, model: Model, record_bits: int) -> Callable[[], None]:
    """Returns what pulls a fifth of an expert's records."""
    host = _HostExperts(clock, model, record_bits, host_bytes=1)
    return partial(_Pulls(clock, host, _running(host.num_rows)).pull, 0)


def _running(f: int) -> NDArray[np.int32]:
    """A fifth of the neurons, rising; evenly spread, which is the harder case: packs have the hottest rows first."""
    return np.sort(np.random.default_rng(0).permutation(f)[: round(_SHARE * f)]).astype(np.int32)
