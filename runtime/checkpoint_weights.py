"""A checkpoint's weights, read anew whenever asked for: the original to compare a pack with, in bounded memory."""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_pack.formats import Checkpoint, ModelSpec, Selector
from moe_pack.formats import Matrix as MatrixName
from moe_pack.runtime.matrix import TORCH_DTYPES, Matrix, row_blocks
from moe_pack.runtime.weights import Expert, NeuronBlock


def read_rows(checkpoint: Checkpoint, name: str, start: int, stop: int) -> Tensor:
    """Rows of a source matrix in the source's dtype, [stop - start, columns]."""
    raw = torch.from_numpy(checkpoint.rows(name, start, stop))
    return raw.view(TORCH_DTYPES[checkpoint.dtype(name)]).view(stop - start, -1)


class CheckpointWeights:
    """The weights of an open checkpoint, every neuron running; the checkpoint stays the caller's to close."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.spec: ModelSpec = checkpoint.spec
        self.selector: Selector = "none"
        self._checkpoint = checkpoint

    def vector(self, role: str) -> Tensor:
        """A norm's weight, float32 [n]."""
        name = self._checkpoint.dense_source(role)
        return read_rows(self._checkpoint, name, 0, self._checkpoint.num_rows(name)).flatten().to(torch.float32)

    def matrix(self, role: str) -> Matrix:
        """A dense matrix by its role."""
        return _SourceMatrix(self._checkpoint, self._checkpoint.dense_source(role))

    def expert(self, layer_idx: int, expert: int) -> Expert:
        """An expert, read as its blocks are asked for."""
        return _SourceExpert(self._checkpoint, layer_idx, expert)

    def threshold(self, layer_idx: int, expert: int) -> float:
        """Zero: the original drops nothing."""
        return 0.0


class _SourceMatrix:
    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint = checkpoint
        self._name = name
        self.num_rows = checkpoint.num_rows(name)
        self.num_cols = read_rows(checkpoint, name, 0, 1).shape[1]

    def rows(self, start: int, stop: int) -> Tensor:
        return read_rows(self._checkpoint, self._name, start, stop).to(torch.float32)


class _SourceExpert:
    def __init__(self, checkpoint: Checkpoint, layer_idx: int, expert: int) -> None:
        self._checkpoint = checkpoint
        self._names = {m: checkpoint.expert_source(layer_idx, expert, m) for m in checkpoint.spec.expert.matrices}

    def blocks(self) -> Iterator[NeuronBlock]:
        spec = self._checkpoint.spec
        down_name = self._names["down"]
        down = read_rows(self._checkpoint, down_name, 0, spec.hidden_size)  # [d, f], in the source's 16 or 32 bit
        for start, stop in row_blocks(spec.expert.intermediate_size, spec.hidden_size, len(self._names)):
            gate = self._neurons("gate", start, stop) if "gate" in self._names else None
            yield NeuronBlock(gate, self._neurons("up", start, stop), down[:, start:stop].T.to(torch.float32))

    def _neurons(self, matrix: MatrixName, start: int, stop: int) -> Tensor:
        return read_rows(self._checkpoint, self._names[matrix], start, stop).to(torch.float32)
