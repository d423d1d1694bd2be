"""A checkpoint's weights, read anew whenever asked for: the original to compare a pack with, in bounded memory."""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_pack.formats import Checkpoint, ModelSpec, Selector, SourceMatrix
from moe_pack.runtime.expert import Expert, NeuronBlock
from moe_pack.runtime.matrix import Matrix
from moe_pack.runtime.operations import TORCH, row_blocks
from moe_pack.runtime.source_codes import load_matrix, read_neurons, read_rows, read_vector


class CheckpointWeights:
    """The weights of an open checkpoint, every neuron running; the checkpoint stays the caller's to close."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device | None = None) -> None:
        self.spec: ModelSpec = checkpoint.spec
        self.selector: Selector = "none"
        self.operations = TORCH
        self._checkpoint = checkpoint
        self._device = device or torch.device("cpu")

    def vector(self, role: str) -> Tensor:
        """A norm's weight or a bias, float32 [n]."""
        return read_vector(self._checkpoint, self._checkpoint.dense_source(role)).to(self._device)

    def matrix(self, role: str) -> Matrix:
        """A dense matrix by its role."""
        return _SourceMatrix(self._checkpoint, self._checkpoint.dense_source(role), self._device)

    def load(self, role: str) -> Matrix:
        """A dense matrix in memory, in the bytes it has in the source."""
        return load_matrix(self._checkpoint, self._checkpoint.dense_source(role), self._device)

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
        spec = checkpoint.spec.expert
        self._sources = {m: checkpoint.expert_source(layer_idx, expert, m) for m in spec.matrices}
        self._biases = {m: checkpoint.bias_source(layer_idx, expert, m) for m in spec.bias}

    def blocks(self) -> Iterator[NeuronBlock]:
        spec = self._checkpoint.spec
        # What lies across is read whole, in the source's dtype: a neuron has a value in every row of it.
        whole = {m: read_neurons(self._checkpoint, s) for m, s in self._sources.items() if s.neurons == "columns"}
        biases = {m: read_vector(self._checkpoint, s).to(self._device) for m, s in self._biases.items()}
        for start, stop in row_blocks(spec.expert.intermediate_size, spec.hidden_size, len(self._sources)):
            held = {
                m: (whole[m][start:stop] if m in whole else read_rows(self._checkpoint, s, start, stop)).to(
                    self._device, torch.float32
                )
                for m, s in self._sources.items()
            }
            gate_bias, up_bias = (biases[m][start:stop] if m in biases else None for m in ("gate", "up"))
            yield NeuronBlock(held.get("gate"), held["up"], held["down"], gate_bias, up_bias)

    def down_bias(self) -> Tensor | None:
        return read_vector(self._checkpoint, self._biases["down"]).to(self._device) if "down" in self._biases else None
