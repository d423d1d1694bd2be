"""Queues of a device without a GPU, whose copies beside the computation come as late as they may."""

import random
from collections import deque
from collections.abc import Callable, Sequence

import torch

from moe_pack.runtime.gpu.devices import Mark, Queues


class LateMark(Mark):
    """The end of some work beside the computation."""

    __slots__ = ("_queues",)

    def __init__(self, queues: "LateQueues") -> None:
        super().__init__(None)
        object.__setattr__(self, "_queues", queues)

    def is_reached(self) -> bool:
        """Lets time run on, at random."""
        if self._queues.random.random() < 0.5:  # type: ignore[attr-defined]  # set above
            self._queues.run_until(self)  # type: ignore[attr-defined]  # likewise
        return not self._queues.has(self)  # type: ignore[attr-defined]  # likewise


class LateQueues(Queues):
    """Work beside the computation is done when the computation waits for it, or when it is asked whether it is done."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        super().__init__(device)
        self.random = random.Random(seed)
        self._late = deque[tuple[LateMark, Callable[[], object]]]()

    def beside(self, work: Callable[[], object], after: Sequence[Mark]) -> Mark:
        for mark in after:
            self.wait_for(mark)
        mark = LateMark(self)
        self._late.append((mark, work))
        return mark

    def wait_for(self, mark: Mark) -> None:
        if isinstance(mark, LateMark):
            self.run_until(mark)

    def has(self, mark: LateMark) -> bool:
        return any(mark is other for other, _ in self._late)

    def run_until(self, mark: LateMark) -> None:
        while self.has(mark):
            self._late.popleft()[1]()


class CarelessQueues(LateQueues):
    """Queues of which the computation waits for nothing."""

    def wait_for(self, mark: Mark) -> None:
        """Ignores a mark."""
