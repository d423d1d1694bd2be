"""A pack's weights: the dense part on the device, or read as it is used; experts' bytes brought when asked for."""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_pack.formats import DENSE_FILE, DenseLayout, ExpertLayout, ModelSpec, Pack, PackError
from moe_pack.formats import Matrix as MatrixName
from moe_pack.formats.codecs import decode_part
from moe_pack.runtime.matrix import TORCH_DTYPES, Matrix, RowMatrix, StoredMatrix, row_blocks
from moe_pack.runtime.weights import Expert, NeuronBlock


class PackWeights:
    """The weights of an open pack; the pack stays the caller's to close.

    `bytes_read` counts the bytes of experts brought to the device.
    Raises:  PackError if the dense part is damaged; later, when an expert is that is asked for.
    """

    def __init__(self, pack: Pack, device: torch.device) -> None:
        _check_known(pack)
        self.spec: ModelSpec = pack.spec
        self.selector = pack.manifest.selector
        self.bytes_read = 0
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
                self._dense[dense.role.name] = _matrix(dense, raw)

    def vector(self, role: str) -> Tensor:
        """A norm's weight or a bias, float32 [n]."""
        return self._vectors[role]

    def matrix(self, role: str) -> Matrix:
        """A dense matrix by its role."""
        return self._dense[role]

    def expert(self, layer_idx: int, expert: int) -> Expert:
        """An expert, read from the pack and checked."""
        raw = self._pack.read_extent(layer_idx, expert)
        self.bytes_read += raw.nbytes
        return PackedExpert(self._pack.layout.experts[layer_idx][expert], torch.from_numpy(raw).to(self._device))

    def threshold(self, layer_idx: int, expert: int) -> float:
        """The expert's threshold on `abs(a)`."""
        return float(self._pack.thresholds[layer_idx, expert])


class StreamedPackWeights:
    """The weights of an open pack, every matrix read anew whenever asked for: what fits no memory can be measured.

    Raises:  PackError if the dense part is damaged; later, when an expert is that is asked for.
    """

    def __init__(self, pack: Pack, device: torch.device) -> None:
        _check_known(pack)
        pack.check_file(DENSE_FILE)
        self.spec: ModelSpec = pack.spec
        self.selector = pack.manifest.selector
        self._pack = pack
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
        return _matrix(dense, self._rows(role, 0, dense.role.shape[0]))

    def rows(self, role: str, start: int, stop: int) -> Tensor:
        """Rows of a dense matrix, float32 [stop - start, columns]."""
        return _matrix(self._dense[role], self._rows(role, start, stop)).rows(0, stop - start)

    def expert(self, layer_idx: int, expert: int) -> Expert:
        """An expert, read from the pack and checked."""
        raw = torch.from_numpy(self._pack.read_extent(layer_idx, expert)).to(self._device)
        return PackedExpert(self._pack.layout.experts[layer_idx][expert], raw)

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


def _check_known(pack: Pack) -> None:
    if pack.spec.expert.extra_floats:
        raise PackError("manifest.json: model: experts have extra_floats, for which this version knows no use")


def _vector(dense: DenseLayout, raw: Tensor) -> Tensor:
    return raw.view(TORCH_DTYPES[dense.dtype]).to(torch.float32)


def _matrix(dense: DenseLayout, raw: Tensor) -> Matrix:
    """The matrix in the bytes of some of its rows."""
    if dense.rows is not None:
        return RowMatrix(dense.rows, raw.view(-1, dense.rows.row_bytes))
    return StoredMatrix(raw.view(TORCH_DTYPES[dense.dtype]).view(-1, dense.role.shape[1]))


class PackedExpert:
    """An expert's extent, u8 on any device; blocks of its neurons are dequantized as they are asked for."""

    def __init__(self, layout: ExpertLayout, extent: Tensor) -> None:
        self._layout = layout
        self._extent = extent

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

    def _part(self, matrix: MatrixName, start: int, stop: int) -> tuple[Tensor | None, Tensor | None]:
        found = self._layout.find(matrix)
        if found is None:
            return None, None
        rows, part, base = found
        held = self._extent[base + start * rows.row_bytes : base + stop * rows.row_bytes].view(-1, rows.row_bytes)
        end = part.offset + part.num_bytes
        weights = decode_part(part.format, rows.num_cols, held[:, part.offset : end])
        bias = held[:, end : end + 4].clone().view(torch.float32)[:, 0] if part.has_bias else None
        return weights, bias
