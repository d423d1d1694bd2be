"""A device without a GPU: plain memory, copies that come as late as they may, and a log of all that was asked.

A wait that was left out shows as wrong data: what has not been waited for has not been copied, or, where time has run
on (`is_done` lets it), only as far as that.
"""

import random
from collections import Counter, deque
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moe_pack.runtime.gpu.device import Queue, Reason, StreamMark

What = Literal["device memory", "host memory", "copy", "wait", "synchronize"]


@dataclass(frozen=True, slots=True)
class Asked:
    """Something that was asked of the device: memory or a copy with its bytes, a wait with the waiting queue.

    `begin`: where in which memory a copy to the device goes, as an address; 0 for all else.   `reason`: of a
    synchronize.   `mark`: what is waited for.
    """

    what: What
    num_bytes: int = 0
    queue: Queue | None = None
    begin: int = 0
    reason: Reason | None = None
    mark: StreamMark | None = None


class RecordingDevice:
    """Plain memory as a device's; computing is done at once, by torch or under Triton's interpreter.

    Copies of the copy queue, and copies to the host, are made when they are waited for; asking `is_done` lets some of
    the former through, at random.   `log`: all that was asked, in order.
    """

    def __init__(self, seed: int = 0) -> None:
        self.device = torch.device("cpu")
        self.log: list[Asked] = []
        self._random = random.Random(seed)
        self._host: set[int] = set()
        self._late: dict[Queue, deque[tuple[int, Tensor, Tensor]]] = {"compute": deque(), "copy": deque()}
        self._asked: dict[Queue, int] = {"compute": 0, "copy": 0}  # copies

    def counts(self) -> Counter[str]:
        """How often what was asked; synchronizes by their reasons."""
        return Counter(asked.reason or asked.what for asked in self.log)

    def allocate(self, num_bytes: int) -> Tensor:
        """Memory full of NaN; see `Device`."""
        self.log.append(Asked("device memory", num_bytes))
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)

    def allocate_host(self, num_bytes: int) -> Tensor:
        """Memory full of NaN; see `Device`."""
        self.log.append(Asked("host memory", num_bytes))
        held = torch.full((num_bytes,), 0xFF, dtype=torch.uint8)
        self._host.add(held.untyped_storage().data_ptr())
        return held

    def copy(self, to: Tensor, source: Tensor, queue: Queue) -> None:
        """Asks for a copy; see `Device`."""
        assert to.shape == source.shape and to.dtype == source.dtype, "a copy converts nothing"
        assert to.is_contiguous() and source.is_contiguous(), "pieces are copied whole"
        is_to_host = to.untyped_storage().data_ptr() in self._host
        self.log.append(Asked("copy", to.nbytes, queue, 0 if is_to_host else to.data_ptr()))
        self._asked[queue] += 1
        if queue == "copy":
            self._late[queue].append((self._asked[queue], to, source))
        elif is_to_host:  # read in its turn, seen when it is waited for
            self._late[queue].append((self._asked[queue], to, source.clone()))
        else:
            to.copy_(source)

    def record(self, queue: Queue) -> StreamMark:
        """Marks a point; see `Device`."""
        return StreamMark(queue, self._asked[queue])

    def wait(self, queue: Queue, mark: StreamMark) -> None:
        """Lets a queue wait; see `Device`."""
        self.log.append(Asked("wait", queue=queue, mark=mark))
        if mark.queue == "copy":
            self._copy_to(mark)

    def is_done(self, mark: StreamMark) -> bool:
        """Whether a mark is reached; see `Device`."""
        late = self._late[mark.queue]
        if late and self._random.random() < 0.5:
            self._copy_to(StreamMark(mark.queue, late[0][0]))
        return not late or late[0][0] > mark.number

    def synchronize(self, mark: StreamMark, reason: Reason) -> None:
        """Waits for a mark; see `Device`."""
        self.log.append(Asked("synchronize", reason=reason, mark=mark))
        self._copy_to(mark)

    def _copy_to(self, mark: StreamMark) -> None:
        late = self._late[mark.queue]
        while late and late[0][0] <= mark.number:
            _, to, source = late.popleft()
            to.copy_(source)
