"""Times of operations that are bound by the bytes they read, beside what the card copies in that time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from gpu_clock import Clock, Launch
from gpu_results import Results

_LAUNCHES = 48  # in a graph, at least: starting one takes as long as a small kernel


@dataclass(frozen=True, slots=True)
class Timed:
    """Microseconds of a launch and the bytes it must read. `share`: of the rate at which the card copies its memory."""

    us: float
    num_bytes: int
    gb_a_second: float
    share: float


@dataclass(frozen=True, slots=True, eq=False)
class ByteBench:
    """Where rows go, what times them, and the copy rate in bytes a second."""

    results: Results
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
