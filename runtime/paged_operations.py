"""What computes with experts in pages: plain torch with a copy of each; native kernels where they lie, by rows too."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import NeuronFunction, Selector
from moe_pack.runtime.expert import run_expert
from moe_pack.runtime.native_kernels import Kernels, Selected
from moe_pack.runtime.native_operations import NativeOperations
from moe_pack.runtime.operations import Operations
from moe_pack.runtime.paged_expert import PagedExpert


@dataclass(frozen=True, slots=True)
class PagedWork:
    """An expert to run: its tokens int64 [n], their weights float32 [n], and the rows int64 [n] of its outputs."""

    expert: PagedExpert
    tokens: NDArray[np.int64]
    weights: NDArray[np.float32]
    places: NDArray[np.int64]


class PagedOperations:
    """Experts are used whole, and copied into one piece for that."""

    def __init__(self, function: NeuronFunction, selector: Selector) -> None:
        self._function: NeuronFunction = function
        self._selector: Selector = selector

    def stitch(self, expert: PagedExpert) -> None:
        """Makes rows whole that cross from page to page, after each arrival."""

    def checksum(self, expert: PagedExpert) -> int:
        """Returns the CRC-32 of an expert that is there whole."""
        return zlib.crc32(expert.extent().numpy().data)

    def run(self, x: Tensor, works: Sequence[PagedWork], outputs: NDArray[np.float32]) -> None:
        """Runs experts that are there whole over x float32 [T, d]; each fills its rows of `outputs`, weighted."""
        for work in works:
            some, threshold = x[torch.from_numpy(work.tokens)], work.expert.rows.threshold
            y = run_expert(some, work.expert, self._function, self._selector, threshold)
            outputs[work.places] = work.weights[:, None] * y.numpy()


class NativePagedOperations(PagedOperations):
    """Experts are used where they lie; of one with a selector the rows of running neurons are enough."""

    def __init__(self, function: NeuronFunction, selector: Selector, kernels: Kernels) -> None:
        super().__init__(function, selector)
        self._kernels = kernels

    def stitch(self, expert: PagedExpert) -> None:
        """Makes rows whole in the memory that each page has before it."""
        expert.stitch(self._kernels)

    def checksum(self, expert: PagedExpert) -> int:
        """Returns the CRC-32 of an expert, read page by page."""
        return self._kernels.checksum_pages(expert.records, expert.layout.num_bytes)

    def run(self, x: Tensor, works: Sequence[PagedWork], outputs: NDArray[np.float32]) -> None:
        """Runs experts that are there whole, all of them in one call."""
        given = [(work.expert.rows, work.tokens, work.weights, work.places) for work in works]
        self._kernels.experts_apart(x, given, outputs)

    def check_selector(self, expert: PagedExpert, number: int) -> None:
        """Checks every selector row. Raises PackError naming the first that is damaged."""
        expert.check_selector(self._kernels, number)

    def check_rows(self, expert: PagedExpert, neurons: NDArray[np.int32], number: int) -> None:
        """Checks the records of some neurons. Raises PackError naming the first that is damaged."""
        expert.check_rows(self._kernels, neurons, number)

    def select(self, x: Tensor, expert: PagedExpert) -> Selected:
        """Returns which neurons of an expert run for tokens float32 [T, d], by its selector."""
        return self._kernels.select(x, expert.rows)

    def run_rows(self, x: Tensor, expert: PagedExpert, selected: Selected) -> Tensor:
        """Returns the output float32 [T, d] of an expert of which the selected neurons' records are there."""
        h = self._kernels.neurons(x, expert.rows, selected)
        return self._kernels.accumulate(h, expert.rows, selected.neurons)


def paged_operations(operations: Operations, function: NeuronFunction, selector: Selector) -> PagedOperations:
    """Returns what computes with experts in pages where these operations compute the rest."""
    if isinstance(operations, NativeOperations):
        return NativePagedOperations(function, selector, operations.kernels)
    return PagedOperations(function, selector)
