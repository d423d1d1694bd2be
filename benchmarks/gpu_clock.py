"""How launches on a GPU are timed: many in a CUDA graph, which is replayed, by the device's own events.

Operations that read much are compared with the rate at which the GPU copies its own memory. In a rehearsal everything
runs once on the CPU, by Triton's interpreter, and the times mean nothing.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

Launch = Callable[[], object]
_MIB = 1 << 20
_LAUNCHES = 48  # in a graph, at least: starting one takes as long as a small kernel


@dataclass(frozen=True, slots=True)
class Clock:
    """Times what runs on `device`. `is_rehearsal`: run once, on the CPU."""

    device: torch.device
    is_rehearsal: bool

    @property
    def num_sms(self) -> int:
        """Multiprocessors of the device."""
        return 2 if self.is_rehearsal else torch.cuda.get_device_properties(self.device).multi_processor_count

    @property
    def l2_bytes(self) -> int:
        """What must be exceeded for every launch to read from memory."""
        return 0 if self.is_rehearsal else int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    def synchronize(self) -> None:
        """Waits for the device."""
        if not self.is_rehearsal:
            torch.cuda.synchronize(self.device)

    def direct(self, launch: Launch, rounds: int = 10) -> float:
        """Seconds of a launch as the host gives it, the median."""
        return median(self.each(launch, rounds))

    def each(self, launch: Launch, rounds: int) -> list[float]:
        """Seconds of each of so many rounds, after one that warms up."""
        if self.is_rehearsal:
            return [self.once(launch)]
        launch()
        return [self.once(launch) for _ in range(rounds)]

    def once(self, launch: Launch) -> float:
        """Seconds of a launch, now."""
        if self.is_rehearsal:
            start = time.perf_counter()
            launch()
            return time.perf_counter() - start
        begin, end = _event(), _event()
        begin.record()
        launch()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def captured(self, launch: Launch, before: Launch = lambda: None) -> Launch:
        """What replays a graph of all that `launch` launches; it is run twice before, each time after `before`."""
        if self.is_rehearsal:
            return launch
        before()
        launch()  # compiles
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        before()
        graph.replay()
        return graph.replay

    def graphed(self, launches: Sequence[Launch], rounds: int = 10) -> float:
        """Seconds of one of these launches, which follow one another in a graph that is replayed; the median."""
        replay = self.captured(lambda: [launch() for launch in launches])
        return self.direct(replay, rounds) / len(launches)

    def copy_rate(self) -> float:
        """Bytes read and written a second by a copy inside the device's memory, 1 GiB each way."""
        num_bytes = _MIB if self.is_rehearsal else 1024 * _MIB
        source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=self.device) for _ in range(2))
        return 2 * num_bytes / self.direct(lambda: target.copy_(source), 20)


def host_seconds(action: Launch, rounds: int) -> float:
    """Seconds that something takes the host, the median, after one round that warms up."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return median(times[1:])


def copies_beyond(l2_bytes: int, num_bytes: int, least: int = 2) -> int:
    """How many copies of so many bytes exceed the L2 cache four times."""
    return max(least, -(-4 * l2_bytes // num_bytes))


def repeated(rows: Tensor, times: int, device: torch.device) -> Tensor:
    """Copies of bytes one after the other, on the device: u8 [times * n], each at a multiple of 128 bytes."""
    flat = rows.reshape(-1)
    padded = torch.zeros(-(-flat.numel() // 128) * 128, dtype=torch.uint8)
    padded[: flat.numel()] = flat
    return padded.to(device).repeat(times)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch has no types for it


@dataclass(frozen=True, slots=True)
class Timed:
    """Microseconds of a launch and the bytes it must read. `share`: of the rate at which the GPU copies its memory."""

    us: float
    num_bytes: int
    gb_a_second: float
    share: float


@dataclass(frozen=True, slots=True)
class ByteClock:
    """Times operations that are bound by the bytes they read. `copy_rate`: of `clock`, in bytes a second."""

    clock: Clock
    copy_rate: float

    def timed(self, num_bytes: int, launch: Callable[[int], object], num_copies: int) -> Timed:
        """Times `launch` in a graph, with each copy's number in turn."""
        launches: Sequence[Launch] = [partial(launch, number) for number in range(num_copies)]
        if not self.clock.is_rehearsal:
            launches = list(launches) * -(-_LAUNCHES // num_copies)
        seconds = self.clock.graphed(launches)
        rate = num_bytes / seconds
        return Timed(1e6 * seconds, num_bytes, rate / 1e9, rate / self.copy_rate)
