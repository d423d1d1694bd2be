"""A checkpoint's weights, read anew whenever asked for: the original to compare a pack with, in bounded memory."""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_pack.formats import Checkpoint, ModelSpec, Selector, SourceMatrix
from moe_pack.formats import Matrix as MatrixName
from moe_pack.runtime.matrix import TORCH_DTYPES, Matrix, StoredMatrix, row_blocks
from moe_pack.runtime.native_kernels import Kernels
from moe_pack.runtime.weights import Expert, NeuronBlock


def read_rows(checkpoint: Checkpoint, source: SourceMatrix, start: int, stop: int) -> Tensor:
    """Rows of a source matrix in the source's dtype, [stop - start, columns]; of a vector, one column."""
    raw = torch.from_numpy(checkpoint.rows(source, start, stop))
    return raw.view(TORCH_DTYPES[checkpoint.dtype(source)]).view(stop - start, source.num_cols)


class CheckpointWeights:
    """The weights of an open checkpoint, every neuron running; the checkpoint stays the caller's to close."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device | None = None) -> None:
        self.spec: ModelSpec = checkpoint.spec
        self.selector: Selector = "none"
        self.kernels: Kernels | None = None
        self._checkpoint = checkpoint
        self._device = device or torch.device("cpu")

    def vector(self, role: str) -> Tensor:
        """A norm's weight or a bias, float32 [n]."""
        source = self._checkpoint.dense_source(role)
        return read_rows(self._checkpoint, source, 0, source.num_rows).flatten().to(self._device, torch.float32)

    def matrix(self, role: str) -> Matrix:
        """A dense matrix by its role."""
        return _SourceMatrix(self._checkpoint, self._checkpoint.dense_source(role), self._device)

    def load(self, role: str) -> Matrix:
        """A dense matrix in memory, in the source's dtype."""
        source = self._checkpoint.dense_source(role)
        return StoredMatrix(read_rows(self._checkpoint, source, 0, source.num_rows).to(self._device))

    def expert(self, layer_idx: int, expert: int) -> Expert:
        """An expert, read as its blocks are asked for."""
        return _SourceExpert(self._checkpoint, layer_idx, expert, self._device)

    def threshold(self, layer_idx: int, expert: int) -> float:
        """Zero: the original drops nothing."""
        return 0.0


class _SourceMatrix:
    def __init__(self, checkpoint: Checkpoint, source: SourceMatrix, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._source = source
        self._device = device
        self.num_rows, self.num_cols = source.num_rows, source.num_cols

    def rows(self, start: int, stop: int) -> Tensor:
        return read_rows(self._checkpoint, self._source, start, stop).to(self._device, torch.float32)


class _SourceExpert:
    def __init__(self, checkpoint: Checkpoint, layer_idx: int, expert: int, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._sources = {m: checkpoint.expert_source(layer_idx, expert, m) for m in checkpoint.spec.expert.matrices}

    def blocks(self) -> Iterator[NeuronBlock]:
        spec = self._checkpoint.spec
        down = read_rows(self._checkpoint, self._sources["down"], 0, spec.hidden_size)  # [d, f], as the source has it
        for start, stop in row_blocks(spec.expert.intermediate_size, spec.hidden_size, len(self._sources)):
            gate = self._neurons("gate", start, stop) if "gate" in self._sources else None
            rows = down[:, start:stop].T.to(self._device, torch.float32)
            yield NeuronBlock(gate, self._neurons("up", start, stop), rows)

    def down_bias(self) -> Tensor | None:
        return None

    def _neurons(self, matrix: MatrixName, start: int, stop: int) -> Tensor:
        return read_rows(self._checkpoint, self._sources[matrix], start, stop).to(self._device, torch.float32)
