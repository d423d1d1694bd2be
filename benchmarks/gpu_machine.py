"""Part `machine`: what the GPU, its memory and its link can do; what launches cost."""

import mmap
import time
from dataclasses import dataclass

import numpy as np
import torch
from gpu_clock import Clock
from gpu_preflight import cudart
from gpu_results import Results
from torch import Tensor

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


def run(results: Results, clock: Clock) -> None:
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
