"""An expert in the bytes of a pack: decoded block by block, or used as it is by the native kernels.

A pack's weights: the dense part on the device, or read as it is used; experts' bytes brought when asked for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import ExpertLayout, ModelSpec, NeuronFunction, Pack, PackError, Selector
from moe_pack.formats import Matrix as MatrixName
from moe_pack.formats.layout import DENSE_FILE, DenseLayout
from moe_pack.runtime.cpu import MapCutError, extent_rows
from moe_pack.runtime.model.expert import Expert, NeuronBlock
from moe_pack.runtime.model.layer import ExpertRunner, PartialState
from moe_pack.runtime.model.matrix import TORCH_DTYPES, Matrix, RowMatrix, StoredMatrix
from moe_pack.runtime.model.operations import TORCH, NativeOperations, Operations, row_blocks


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


_FIRST_TOKEN = np.zeros(1, np.int64)


class PackWeights:
    """The weights of an open pack; the pack stays the caller's to close.

    The bytes of an expert are brought to the device whenever it is asked for. `bytes_read` counts them; `dense_bytes`
    are those of the dense part.
    Raises:  PackError if the dense part is damaged; later, when an expert is that is asked for.
    """

    def __init__(self, pack: Pack, device: torch.device, operations: Operations = TORCH) -> None:
        self.spec: ModelSpec = pack.spec
        self.selector = pack.manifest.selector
        self.operations = operations
        self.bytes_read = 0
        self.dense_bytes = pack.manifest.totals.dense
        self._pack = pack
        self._device = device
        self._dense: dict[str, Matrix] = {}
        self._vectors: dict[str, Tensor] = {}
        self._keep(torch.from_numpy(pack.read_file(DENSE_FILE)))

    def _keep(self, held: Tensor) -> None:
        for dense in self._pack.layout.dense:
            entry = dense.entry
            raw = held[entry.offset : entry.offset + entry.num_bytes].to(self._device)
            if len(entry.shape) == 1:
                self._vectors[dense.role.name] = _vector(dense, raw)
            else:
                self._dense[dense.role.name] = self._matrix(dense, raw)

    def _matrix(self, dense: DenseLayout, raw: Tensor) -> Matrix:
        return held_matrix(dense, raw, self.operations)

    def vector(self, role: str) -> Tensor:
        """A norm's weight or a bias, float32 [n]."""
        return self._vectors[role]

    def matrix(self, role: str) -> Matrix:
        """A dense matrix by its role."""
        return self._dense[role]

    def expert(self, layer_idx: int, expert: int) -> Expert:
        """An expert, read from the pack and checked."""
        layout = self._pack.layout.experts[layer_idx][expert]
        self.bytes_read += layout.num_bytes
        raw = torch.from_numpy(self._pack.read_extent(layer_idx, expert)).to(self._device)
        return PackedExpert(layout, raw, self.operations)

    def threshold(self, layer_idx: int, expert: int) -> float:
        """The expert's threshold on `abs(a)`."""
        return float(self._pack.thresholds[layer_idx, expert])


class MappedPackWeights(PackWeights, ExpertRunner):
    """The weights of an open pack on the CPU: native operations use experts where they lie in their mapped files.

    An expert is checked when it is first asked for.
    """

    operations: NativeOperations

    def __init__(self, pack: Pack, operations: NativeOperations) -> None:
        super().__init__(pack, torch.device("cpu"), operations)
        self._last_layer_idx = len(pack.layout.experts) - 1
        self._mapped: dict[tuple[int, int], MappedExpert] = {}

    def expert(self, layer_idx: int, expert: int) -> Expert:
        """An expert where it lies, checked when it is first asked for."""
        self.bytes_read += self._pack.layout.experts[layer_idx][expert].num_bytes
        return self._mapped_expert(layer_idx, expert)

    def _mapped_expert(self, layer_idx: int, expert: int) -> MappedExpert:
        held = self._mapped.get((layer_idx, expert))
        if held is None:
            place = self._pack.manifest.expert_files[layer_idx].name
            with named_if_cut(place):
                mapped = self._pack.map_extent(layer_idx, expert, self.operations.kernels.checksum)
            layout, threshold = self._pack.layout.experts[layer_idx][expert], self.threshold(layer_idx, expert)
            held = self._mapped[layer_idx, expert] = MappedExpert(
                layout, self.selector, self.spec.expert.function, threshold, mapped, self.operations, place
            )
        return held

    def run_experts(
        self,
        layer_idx: int,
        x: Tensor,
        experts: Tensor,
        router_weights: Tensor,
        partial_state: PartialState | None = None,
    ) -> Tensor:
        """The routed experts of a layer over tokens x float32 [T, d], weighted and added up.

        Args:    experts, router_weights: int64 and float32 [T, k].
        Raises:  PackError if an expert is damaged or its file is cut meanwhile; with the last layer, if any file is
                 shorter than it was.
        """
        works = []
        for number, tokens, weights in tokens_by_expert(experts, router_weights):
            held = self._mapped_expert(layer_idx, number)
            works.append((held.rows, tokens, weights))
            self.bytes_read += held.num_bytes
        try:
            y = self.operations.kernels.experts(x, works)
        except MapCutError as fault:
            raise cut_error(self._pack.manifest.expert_files[layer_idx].name) from fault
        if layer_idx == self._last_layer_idx:
            self._check_files()
        return y

    def _check_files(self) -> None:
        """Finds files that were cut within a page, whose rest reads as zeros: at once, which is faster than singly."""
        for layer_idx, listed in enumerate(self._pack.manifest.expert_files):
            if self._pack.is_cut(layer_idx):
                raise cut_error(listed.name)


def open_weights(pack: Pack, device: torch.device, operations: Operations = TORCH) -> PackWeights:
    """Returns a pack's weights as its experts can be used best: mapped by native operations, brought by others."""
    if isinstance(operations, NativeOperations):
        return MappedPackWeights(pack, operations)
    return PackWeights(pack, device, operations)


def tokens_by_expert(experts: Tensor, weights: Tensor) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.float32]]]:
    """Each expert that is chosen, rising, so that sums are made in one order; its tokens and their weights.

    Tokens of weight zero, which are beyond its capacity, are left out, unless it has no others.
    Args:    experts, weights: int64 and float32 [T, k].
    """
    chosen, flat, (num_tokens, k) = experts.ravel().tolist(), weights.numpy().ravel(), experts.shape
    order = sorted(range(len(chosen)), key=chosen.__getitem__)
    if num_tokens == 1:
        for place in order:
            yield chosen[place], _FIRST_TOKEN, flat[place : place + 1]
        return
    tokens, flat, start = np.array(order, np.int64) // k, flat[order], 0
    all_count = bool(flat.all())
    for number, places in groupby(order, key=chosen.__getitem__):
        stop = start + len(list(places))
        counting = slice(start, stop) if all_count else start + np.flatnonzero(flat[start:stop])
        if not len(tokens[counting]):
            counting = slice(start, stop)
        yield number, tokens[counting], flat[counting]
        start = stop


class StreamedPackWeights:
    """The weights of an open pack, every matrix read anew whenever asked for: what fits no memory can be measured.

    Raises:  PackError if the dense part is damaged; later, when an expert is that is asked for.
    """

    def __init__(self, pack: Pack, device: torch.device, operations: Operations = TORCH) -> None:
        pack.check_file(DENSE_FILE)
        self.spec: ModelSpec = pack.spec
        self.selector = pack.manifest.selector
        self._pack = pack
        self.operations = operations
        self._device = device
        self._dense = {dense.role.name: dense for dense in pack.layout.dense}

    def vector(self, role: str) -> Tensor:
        """A norm's weight or a bias, float32 [n]."""
        return _vector(self._dense[role], self._rows(role, 0, self._dense[role].entry.shape[0]))

    def matrix(self, role: str) -> Matrix:
        """A dense matrix by its role, its rows read as they are asked for."""
        return _StreamedMatrix(self, role, self._dense[role])

    def load(self, role: str) -> Matrix:
        """A dense matrix in memory, as it is stored."""
        dense = self._dense[role]
        return held_matrix(dense, self._rows(role, 0, dense.role.shape[0]), self.operations)

    def rows(self, role: str, start: int, stop: int) -> Tensor:
        """Rows of a dense matrix, float32 [stop - start, columns]."""
        return held_matrix(self._dense[role], self._rows(role, start, stop), self.operations).rows(0, stop - start)

    def expert(self, layer_idx: int, expert: int) -> Expert:
        """An expert, read from the pack and checked."""
        raw = torch.from_numpy(self._pack.read_extent(layer_idx, expert)).to(self._device)
        return PackedExpert(self._pack.layout.experts[layer_idx][expert], raw, self.operations)

    def threshold(self, layer_idx: int, expert: int) -> float:
        """The expert's threshold on `abs(a)`."""
        return float(self._pack.thresholds[layer_idx, expert])

    def _rows(self, role: str, start: int, stop: int) -> Tensor:
        return torch.from_numpy(self._pack.read_dense(self._dense[role].entry, start, stop)).to(self._device)


class _StreamedMatrix:
    def __init__(self, weights: StreamedPackWeights, role: str, dense: DenseLayout) -> None:
        self._weights = weights
        self._role = role
        self.num_rows, self.num_cols = dense.role.shape

    def rows(self, start: int, stop: int) -> Tensor:
        return self._weights.rows(self._role, start, stop)


def _vector(dense: DenseLayout, raw: Tensor) -> Tensor:
    return raw.view(TORCH_DTYPES[dense.dtype]).to(torch.float32)


def held_matrix(dense: DenseLayout, raw: Tensor, operations: Operations = TORCH) -> Matrix:
    """The matrix in the bytes of some of its rows, u8."""
    if dense.rows is not None:
        return RowMatrix(dense.rows, raw.view(-1, dense.rows.row_bytes), operations)
    return StoredMatrix(raw.view(TORCH_DTYPES[dense.dtype]).view(-1, dense.role.shape[1]), operations)
