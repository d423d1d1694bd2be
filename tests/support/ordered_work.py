"""The order of a GPU's work, seen on a CPU, where everything runs in the order of the calls.

`Order` knows on which stream each piece of work is launched, and what comes before it: earlier work of its stream, all
that the host waited for before the launch, and what the stream waits for. A clock says how many pieces of each stream's
work come before a moment. `Order` keeps for all memory who last read and wrote it on each stream. Two accesses to the
same memory, one of which is a write, need an order; without one, `OrderError` names both.

A kernel may start before the end of the one before it (`kernels.grids`): directly after another kernel of its
graph's stream, if it loads nothing before its wait that its graph has written.

`Stream` and `Event` stand for those of `torch.cuda`, so that `devices.Queues` runs as on a GPU.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moe_pack.runtime.gpu import devices

UNIT_BYTES = 4  # of memory, that are looked at together
Clock: TypeAlias = dict[int, int]  # by stream, how many pieces of its work come before
Units: TypeAlias = slice | NDArray[np.int64]  # of a region, from its beginning
_RUNTIME = str(Path(devices.__file__).parents[1])
_KERNELS = str(Path(devices.__file__).parent / "kernels")
_HOST = 0


class OrderError(AssertionError):
    """Two pieces of work use the same memory, and nothing says which comes first; or a graph cannot hold an order."""


@dataclass(slots=True, eq=False)
class Region:
    """A piece of memory, and who last used each unit of it: by stream, the number of a piece of work, 0 for none."""

    name: str
    kind: Literal["device", "locked"]
    begin: int  # address
    num_bytes: int
    stream: int  # on which it was allocated
    device: int  # the current stream of its device
    reads: dict[int, NDArray[np.int32]] = field(default_factory=dict)
    writes: dict[int, NDArray[np.int32]] = field(default_factory=dict)
    last: Clock = field(default_factory=dict)  # the last work that used any of it

    def units(self, begin: int, num_bytes: int) -> slice:
        """Returns the units that some bytes lie in, from an address on."""
        base = self.begin // UNIT_BYTES
        return slice(begin // UNIT_BYTES - base, (begin + num_bytes - 1) // UNIT_BYTES - base + 1)

    def last_of(self, accesses: dict[int, NDArray[np.int32]], stream: int) -> NDArray[np.int32]:
        if stream not in accesses:
            accesses[stream] = np.zeros(self.units(self.begin, self.num_bytes).stop, np.int32)
        return accesses[stream]


Access: TypeAlias = tuple[Region, Units]


class Stream:
    """A stream of a recorded order."""

    def __init__(self, order: "Order", name: str) -> None:
        self.order, self.name, self.number = order, name, len(order.streams)
        self.device = self  # the current stream of its device
        self.clock: Clock = {}
        self.works: list[str] = []
        self.ends_with_kernel = False  # and nothing was forked from it or joined since
        order.streams.append(self)

    def wait_stream(self, other: "Stream") -> None:
        self.ends_with_kernel = other.ends_with_kernel = False
        _merge(self.clock, other.clock)

    def wait_event(self, event: "Event") -> None:
        event.check_graph()
        self.ends_with_kernel = False
        _merge(self.clock, event.clock)


class Event:
    """A point in a stream of a recorded order."""

    def __init__(self, order: "Order") -> None:
        self._order = order
        self.clock: Clock = {}
        self.graph: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.clock, self.graph = dict((stream or self._order.current).clock), self._order.graph

    def query(self) -> bool:
        """Whether it is reached: it always is, unless the order is late, and then it may be from the next time on."""
        self.check_graph()
        if self._order.is_late:
            self._order.is_late = False
            return False
        _merge(self._order.host.clock, self.clock)
        return True

    def synchronize(self) -> None:
        self.check_graph()
        _merge(self._order.host.clock, self.clock)

    def check_graph(self) -> None:
        """A graph knows nothing of events outside of it, and what is outside nothing of those within it."""
        if self.graph != self._order.graph:
            raise OrderError(f"{_site()}: an event is waited for that lies in another graph, or in none")


class Order:
    """What comes before what, and who uses which memory.

    `is_late`: whether the next event that is asked for is not reached yet.
    """

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.host, self.main = Stream(self, "host"), Stream(self, "current stream")
        assert self.host.number == _HOST
        self.current = self.main
        self.graph: int | None = None
        self._graph_stream = self.main
        self._before_graph: list[int] = []  # by stream, how much work there was
        self.is_late = False

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Stands for `torch.cuda.stream`."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def launch(
        self, name: str, reads: Sequence[Access], writes: Sequence[Access], early: Sequence[Access] | None = None
    ) -> None:
        """Records work on the current stream; raises OrderError if its accesses have no order with earlier ones.

        Args:    early: what a kernel that may start early reads before it waits; None for all other work.
        """
        stream, work = self.current, f"{name} ({_site()})"
        _merge(stream.clock, self.host.clock)
        if self.graph is not None and stream.clock.get(self._graph_stream.number, 0) < self.graph:
            raise OrderError(f"{work} on the stream {stream.name}: it is not forked from the graph's stream")
        if early is not None:
            self._check_early(work, stream, early)
        stream.ends_with_kernel = False
        stream.works.append(work)
        number = stream.clock[stream.number] = len(stream.works)
        self._check(work, stream, reads, writes)
        for accesses, is_write in ((reads, False), (writes, True)):
            for region, units in accesses:
                region.last_of(region.writes if is_write else region.reads, stream.number)[units] = number
                region.last[stream.number] = number

    def use_on_host(self, name: str, reads: Sequence[Access], writes: Sequence[Access]) -> None:
        """Checks what the host reads and writes. Later launches come after it by themselves."""
        self._check(f"{name} ({_site()})", self.host, reads, writes)

    def host_waits(self) -> None:
        """The host waits for the current stream, which nothing in a graph may do."""
        if self.graph is not None:
            raise OrderError("the host waits for the device while a graph is captured")
        _merge(self.host.clock, self.current.clock)

    def synchronize(self) -> None:
        """The host waits for all streams."""
        for stream in self.streams:
            _merge(self.host.clock, stream.clock)

    def check_freed(self, region: Region) -> None:
        """Checks that freed memory may be given to the current stream of its device, as PyTorch's allocator does."""
        is_here = self.current.device.number == region.device
        clock = (self.current if is_here else self.streams[region.device]).clock
        for number, last in region.last.items():
            known = max(clock.get(number, 0), self.host.clock.get(number, 0))
            if number != region.stream and known < last:
                user = self.streams[number]
                raise OrderError(
                    f"{region.name} is freed, and {user.works[last - 1]} on the stream {user.name} may still use it"
                )

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Launches what a graph of the current stream may repeat: all that is forked in it has to be joined in it."""
        self._graph_stream = self.current
        before = self._before_graph = [len(stream.works) for stream in self.streams]
        self.launch("the token's beginning", (), ())
        self.graph = len(self._graph_stream.works)
        try:
            yield
        finally:
            self.graph = None
        for stream, num_before in zip(self.streams, before, strict=True):
            if max(num_before, self._graph_stream.clock.get(stream.number, 0)) < len(stream.works):
                raise OrderError(f"{stream.works[-1]} on the stream {stream.name} is not joined in its graph")

    def _check_early(self, work: str, stream: Stream, early: Sequence[Access]) -> None:
        if self.graph is None or stream is not self._graph_stream or not stream.ends_with_kernel:
            raise OrderError(f"{work} on the stream {stream.name} starts early, and not directly after a kernel")
        for region, units in early:
            for number, last in region.writes.items():
                if (last[units] > self._before_graph[number]).any():
                    raise OrderError(f"{work} reads {region.name} before it waits, and its graph writes it")

    def _check(self, work: str, stream: Stream, reads: Sequence[Access], writes: Sequence[Access]) -> None:
        for region, units in reads:
            self._check_one(work, stream, region, units, "reads", region.writes, "writes")
        for region, units in writes:
            self._check_one(work, stream, region, units, "writes", region.writes, "writes")
            self._check_one(work, stream, region, units, "writes", region.reads, "reads")

    def _check_one(
        self,
        work: str,
        stream: Stream,
        region: Region,
        units: Units,
        uses: str,
        accesses: dict[int, NDArray[np.int32]],
        others_use: str,
    ) -> None:
        for number, last in accesses.items():
            known, other = stream.clock.get(number, 0), self.streams[number]
            if number == stream.number or known == len(other.works):
                continue
            found = last[units]
            is_late = found > known
            if is_late.any():
                first = int(np.flatnonzero(is_late)[0])
                unit = units.start + first if isinstance(units, slice) else int(units[first])
                raise OrderError(
                    f"{work} on the stream {stream.name} {uses} {region.name} at byte {unit * UNIT_BYTES}, which "
                    f"{other.works[int(found[first]) - 1]} on the stream {other.name} {others_use}: no order"
                )


def _merge(clock: Clock, other: Clock) -> None:
    for number, count in other.items():
        if count > clock.get(number, 0):
            clock[number] = count


def _site() -> str:
    """Returns the line of the runtime, outside of its kernels, that is running."""
    frame = sys._getframe(1)
    while frame is not None:  # the outermost has none before it
        name = frame.f_code.co_filename
        if name.startswith(_RUNTIME) and not name.startswith(_KERNELS):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]  # likewise
    return "a test"
