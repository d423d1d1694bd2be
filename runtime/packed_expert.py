"""An expert in the bytes of a pack: decoded block by block, or used as it is by the native kernels."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import ExpertLayout, NeuronFunction, PackError, Selector
from moe_pack.formats import Matrix as MatrixName
from moe_pack.runtime.expert import NeuronBlock
from moe_pack.runtime.native_kernels import MapCutError, extent_rows
from moe_pack.runtime.native_operations import NativeOperations
from moe_pack.runtime.operations import TORCH, Operations, row_blocks


@contextmanager
def named_if_cut(place: str) -> Iterator[None]:
    """Names the file whose map was cut while it was read.

    Raises:  PackError for MapCutError.
    """
    try:
        yield
    except MapCutError as fault:
        raise cut_error(place) from fault


def cut_error(place: str) -> PackError:
    """What is said of a file that was cut while it was in use."""
    return PackError(f"{place}: was cut while it was in use; bring the file back and start again")


class PackedExpert:
    """An expert's extent, u8 on any device; blocks of its neurons are dequantized as they are asked for."""

    def __init__(self, layout: ExpertLayout, extent: Tensor, operations: Operations = TORCH) -> None:
        self._layout = layout
        self._extent = extent
        self._operations = operations

    def blocks(self) -> Iterator[NeuronBlock]:
        """All neurons once, in stored order."""
        layout = self._layout
        num_parts = len(layout.records.parts) + (len(layout.selector.parts) if layout.selector else 0)
        for start, stop in row_blocks(layout.num_rows, layout.records.num_cols, num_parts):
            gate, gate_bias = self._part("gate", start, stop)
            up, up_bias = self._part("up", start, stop)
            down, _ = self._part("down", start, stop)
            assert up is not None and down is not None, "every expert has up and down"
            yield NeuronBlock(gate, up, down, gate_bias, up_bias)

    def down_bias(self) -> Tensor | None:
        """What is added to the output of a token that comes here, float32 [d]; None where the family has none."""
        extra = self._layout.extra
        if extra is None:
            return None
        start = len(self._extent) - extra.row_bytes
        return self._extent[start : start + extra.crc_offset].clone().view(torch.float32)

    def _part(self, matrix: MatrixName, start: int, stop: int) -> tuple[Tensor | None, Tensor | None]:
        found = self._layout.find(matrix)
        if found is None:
            return None, None
        rows, part, base = found
        held = self._extent[base + start * rows.row_bytes : base + stop * rows.row_bytes].view(-1, rows.row_bytes)
        weights = self._operations.decode(rows, part, held)
        end = part.offset + part.num_bytes
        bias = held[:, end : end + 4].clone().view(torch.float32)[:, 0] if part.has_bias else None
        return weights, bias


class MappedExpert:
    """An expert's extent where it lies in a mapped file, u8; native operations alone read it: they bear a cut.

    `rows` is the expert as the kernels see it.   `place`: its file.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        selector: Selector,
        function: NeuronFunction,
        threshold: float,
        mapped: NDArray[np.uint8],
        operations: NativeOperations,
        place: str,
    ) -> None:
        self._layout = layout
        self._place = place
        self._mapped = mapped
        self._operations = operations
        self.num_bytes = layout.num_bytes
        self.rows = extent_rows(layout, selector, function, threshold, mapped)

    def blocks(self) -> Iterator[NeuronBlock]:
        """All neurons once, in stored order; biases are copied by the kernels too."""
        with named_if_cut(self._place):
            copied = self._operations.kernels.gather(self._mapped.reshape(1, -1), np.zeros(1, np.int32)).reshape(-1)
        yield from PackedExpert(self._layout, torch.from_numpy(copied), self._operations).blocks()

    def down_bias(self) -> Tensor | None:
        """What is added to the output of a token that comes here, float32 [d]; None where the family has none."""
        if self._layout.extra is None:
            return None
        extra = self._mapped[-self._layout.extra_bytes :].reshape(1, -1)
        with named_if_cut(self._place):
            copied = self._operations.kernels.gather(extra, np.zeros(1, np.int32))[0]
        return torch.from_numpy(copied[: self._layout.extra.crc_offset]).view(torch.float32)
