"""Several things computed at once, handed back in order: threads of Python, each with torch threads of its own.

Products of small matrices gain nothing from torch's threads, which only wait for each other; whole experts and whole
sequences side by side do. Large experts are left to torch's threads: side by side they would take too much memory.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from moe_pack.formats import ModelSpec

Item = TypeVar("Item")
Result = TypeVar("Result")

_SIDE_BY_SIDE_BYTES = 64 << 20  # of experts in float32 at once


def num_workers(spec: ModelSpec) -> int:
    """How many experts of a model are computed side by side: as torch has threads, while they fit the bound."""
    expert_bytes = 4 * len(spec.expert.matrices) * spec.hidden_size * spec.expert.intermediate_size
    return max(1, min(torch.get_num_threads(), _SIDE_BY_SIDE_BYTES // expert_bytes))


def in_order(work: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """`work` of each item, in their order, `workers` of them at once and one done that waits.

    In inference mode, as the caller is. With one worker nothing but a loop.
    """
    if workers == 1:
        yield from map(work, items)
        return

    def job(item: Item) -> Result:
        with torch.inference_mode():
            return work(item)

    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // workers))
    try:
        with ThreadPoolExecutor(workers, "calib") as pool:
            left = iter(items)
            started: deque[Future[Result]] = deque(
                pool.submit(job, item) for item in itertools.islice(left, workers + 1)
            )
            while started:
                result = started.popleft().result()
                started.extend(pool.submit(job, item) for item in itertools.islice(left, 1))
                yield result
                del result
    finally:
        torch.set_num_threads(threads)
