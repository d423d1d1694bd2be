"""A GPU as the staged engine sees it: memory that is taken once, copies beside computing, and who waits for whom.

Two queues work side by side, each in the order of asking: `compute` runs what torch and the kernels launch, `copy` only
copies. A mark is a point in a queue; a queue may wait for the other's, which costs the host nothing, or the host may,
which it is to say why. `CudaDevice` is a GPU; tests put a recording one in its place.
"""

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from moe_pack.formats import RunError

Queue = Literal["compute", "copy"]
Reason = Literal["routes", "neurons", "foretold neurons", "host memory is reused", "reading", "measuring"]

_NUM_EVENTS = 4096  # a queue's marks that are told apart; older ones count as what was marked so much later


class Mark(NamedTuple):
    """A point in a queue: all that had been asked of it by then."""

    queue: Queue
    number: int


class Device(Protocol):
    """Memory, copies and waiting. `device`: where its tensors are, for torch."""

    device: torch.device

    def on_device(self, num_bytes: int) -> Tensor:
        """Memory of the device, u8 [num_bytes], its first byte at a multiple of 128; kept by whoever asks.

        Raises:  RunError if there is not so much.
        """
        ...

    def on_host(self, num_bytes: int) -> Tensor:
        """Page-locked memory of the host, u8 [num_bytes], which the device copies from and to while the host goes on.

        Raises:  RunError if there is not so much.
        """
        ...

    def copy(self, to: Tensor, source: Tensor, queue: Queue) -> None:
        """Asks a queue for a copy between host and device; both may be used again once a mark after it is reached.

        Args:    to, source: of one dtype and shape, contiguous, the host's page-locked.
        """
        ...

    def record(self, queue: Queue) -> Mark:
        """Marks the point that a queue has been asked to by now."""
        ...

    def wait(self, queue: Queue, mark: Mark) -> None:
        """Lets a queue go on only when the other's mark is reached; the host does not wait."""
        ...

    def is_done(self, mark: Mark) -> bool:
        """Whether a mark is reached."""
        ...

    def synchronize(self, mark: Mark, reason: Reason) -> None:
        """The host waits until a mark is reached."""
        ...


class CudaDevice:
    """A CUDA device: `compute` is torch's current stream, `copy` a stream of its own."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self._copy = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch's, without types
        self._events: dict[Queue, list[torch.cuda.Event]] = {"compute": [], "copy": []}
        self._numbers: dict[Queue, int] = {"compute": 0, "copy": 0}

    def on_device(self, num_bytes: int) -> Tensor:
        """Memory of the device; see `Device`."""
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as fault:
            raise RunError(f"--budget: {num_bytes:,} bytes cannot be had on the device; give less") from fault

    def on_host(self, num_bytes: int) -> Tensor:
        """Page-locked memory; see `Device`. PyTorch takes the next power of two of it."""
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as fault:  # torch has no class for it
            raise RunError(f"--ram: {num_bytes:,} bytes of page-locked memory cannot be had ({fault})") from fault

    def copy(self, to: Tensor, source: Tensor, queue: Queue) -> None:
        """Asks for a copy; see `Device`."""
        with torch.cuda.stream(self._stream(queue)):
            to.copy_(source, non_blocking=True)

    def record(self, queue: Queue) -> Mark:
        """Marks a point; see `Device`."""
        events, number = self._events[queue], self._numbers[queue]
        if len(events) < _NUM_EVENTS:
            events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]  # likewise
        events[number % _NUM_EVENTS].record(self._stream(queue))
        self._numbers[queue] = number + 1
        return Mark(queue, number)

    def wait(self, queue: Queue, mark: Mark) -> None:
        """Lets a queue wait; see `Device`."""
        self._stream(queue).wait_event(self._event(mark))

    def is_done(self, mark: Mark) -> bool:
        """Whether a mark is reached; see `Device`."""
        return bool(self._event(mark).query())  # type: ignore[no-untyped-call]  # likewise

    def synchronize(self, mark: Mark, reason: Reason) -> None:
        """Waits for a mark; see `Device`."""
        self._event(mark).synchronize()

    def _stream(self, queue: Queue) -> torch.cuda.Stream:
        return self._copy if queue == "copy" else torch.cuda.current_stream(self.device)

    def _event(self, mark: Mark) -> torch.cuda.Event:
        # Where it has been recorded anew since, that was later in the same queue: whoever waits, waits long enough.
        return self._events[mark.queue][mark.number % _NUM_EVENTS]
