"""The weights of a checkpoint: the original with which packs are compared, read in bounded memory.

A checkpoint's matrix has values in 16 or 32 bit, or codes with scales: `weight = code * scale` in float32, which is
exact. Every matrix is read each time it is needed.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack import formats
from moe_pack.formats import families
from moe_pack.formats.pack import codecs
from moe_pack.runtime.model import compute
from moe_pack.runtime.model.compute import matrices, operations
from moe_pack.runtime.model.compute.expert import Expert, NeuronBlock
from moe_pack.runtime.model.compute.rotation import Rotation

_MXFP4_GROUP = 32  # values that share a scale


def read_codes(reader: families.SourceReader, source: families.SourceMatrix, start: int, stop: int) -> Tensor:
    """Returns the codes of rows of a coded matrix, one in a byte: u8 [stop - start, num_cols].

    `fp8` is E4M3, `mxfp4` E2M1, `packed` the value plus half the number of codes.
    """
    codes = torch.from_numpy(reader.rows(source, start, stop))
    if source.codec == "mxfp4" or source.num_bits == 4:  # byte j has the codes of values 2 j and 2 j + 1
        codes = torch.stack((codes & 15, codes >> 4), dim=1)
    return codes.view(stop - start, source.num_cols)


def read_scales(reader: families.SourceReader, source: families.SourceMatrix, start: int, stop: int) -> Tensor:
    """Returns the scales of rows of a coded matrix, [n, groups]: float32, or E8M0 bytes, u8, for `mxfp4`."""
    scales = torch.from_numpy(reader.scales(source, start, stop))
    if source.codec == "mxfp4":
        return scales
    blocks = scales.view(matrices.TORCH_DTYPES[reader.scale_dtype(source)]).to(torch.float32)
    if source.codec == "packed":
        return blocks
    return blocks[torch.arange(start, stop) // families.SCALE_BLOCK - start // families.SCALE_BLOCK]


def read_rows(reader: families.SourceReader, source: families.SourceMatrix, start: int, stop: int) -> Tensor:
    """Reads rows [n, columns] in the source's dtype; codes as float32, MXFP4 as bfloat16, which is exact."""
    if source.codec == "plain":
        raw = torch.from_numpy(reader.rows(source, start, stop))
        return raw.view(matrices.TORCH_DTYPES[reader.dtype(source)]).view(stop - start, source.num_cols)
    codes, scales = (read(reader, source, start, stop) for read in (read_codes, read_scales))
    return _weights(source, codes, scales)


def weights_dtype(reader: families.SourceReader, source: families.SourceMatrix) -> torch.dtype:
    """Returns the dtype of the tensors that `read_rows` returns."""
    exact = {"fp8": torch.float32, "mxfp4": torch.bfloat16, "packed": torch.float32}
    return exact.get(source.codec) or matrices.TORCH_DTYPES[reader.dtype(source)]


def read_neurons(reader: families.SourceReader, source: families.SourceMatrix) -> Tensor:
    """Reads a matrix of an expert with a row for each neuron: [f, d] in the dtype of `read_rows`, maybe transposed."""
    matrix = read_rows(reader, source, 0, source.num_rows)
    return matrix.T if source.neurons == "columns" else matrix


def read_vector(reader: families.SourceReader, source: families.SourceMatrix) -> Tensor:
    """Reads a vector of the source, float32 [n]."""
    return read_rows(reader, source, 0, source.num_rows).flatten().to(torch.float32)


def load_matrix(reader: families.SourceReader, source: families.SourceMatrix, device: torch.device) -> matrices.Matrix:
    """Reads a whole matrix into memory, in the source's bytes."""
    if source.codec == "plain":
        return matrices.StoredMatrix(read_rows(reader, source, 0, source.num_rows).to(device))
    codes, scales = (read(reader, source, 0, source.num_rows) for read in (read_codes, read_scales))
    return _CodedMatrix(source, codes.to(device), scales.to(device))


class _CodedMatrix:
    def __init__(self, source: families.SourceMatrix, codes: Tensor, scales: Tensor) -> None:
        self._source = source
        self._codes = codes
        self._scales = scales
        self.num_rows, self.num_cols = source.num_rows, source.num_cols

    def rows(self, start: int, stop: int) -> Tensor:
        return _weights(self._source, self._codes[start:stop], self._scales[start:stop]).to(torch.float32)


def _weights(source: families.SourceMatrix, codes: Tensor, scales: Tensor) -> Tensor:
    """Returns the weights of codes [n, columns] and scales [n, groups]."""
    num_cols = source.num_cols
    if source.codec == "fp8":
        weights = codes.view(torch.float8_e4m3fn).to(torch.float32)
        for group, start in enumerate(range(0, num_cols, families.SCALE_BLOCK)):
            weights[:, start : start + families.SCALE_BLOCK].mul_(scales[:, group : group + 1])
        return weights
    if source.codec == "packed":
        values = codes.to(torch.float32).sub_(2 ** (source.num_bits - 1))
        grouped = values.view(-1, num_cols // source.group_size, source.group_size)  # [n, groups, columns]
        return grouped.mul_(scales.unsqueeze(2)).view(len(codes), num_cols)
    grouped = codecs.e2m1_values(codes).view(-1, num_cols // _MXFP4_GROUP, _MXFP4_GROUP)  # [n, groups, 32]
    return grouped.mul_(codecs.powers_of_two(scales).unsqueeze(2)).view(len(codes), num_cols).to(torch.bfloat16)


class CheckpointWeights:
    """The weights of an open checkpoint, in which all neurons run; the caller closes the checkpoint."""

    def __init__(self, checkpoint: families.Checkpoint, device: torch.device | None = None) -> None:
        self.spec: formats.ModelSpec = checkpoint.spec
        self.selector: formats.Selector = "none"
        self.operations = operations.TORCH
        self._checkpoint = checkpoint
        self._offsets = {role.name: role.offset for role in formats.dense_roles(checkpoint.spec) if role.offset}
        self._device = device or torch.device("cpu")

    def vector(self, role: str) -> Tensor:
        vector = read_vector(self._checkpoint, self._checkpoint.dense_source(role)).to(self._device)
        return vector + self._offsets[role] if role in self._offsets else vector

    def matrix(self, role: str) -> matrices.Matrix:
        source = self._checkpoint.dense_source(role)

        def read(start: int, stop: int) -> Tensor:
            return read_rows(self._checkpoint, source, start, stop).to(self._device, torch.float32)

        return matrices.ReadMatrix(source.num_rows, source.num_cols, read)

    def load(self, role: str) -> matrices.Matrix:
        """Reads a dense matrix into memory, in the source's bytes."""
        return load_matrix(self._checkpoint, self._checkpoint.dense_source(role), self._device)

    def expert(self, layer_idx: int, expert: int) -> Expert:
        return _SourceExpert(self._checkpoint, layer_idx, expert, self._device)

    def threshold(self, layer_idx: int, expert: int) -> float:
        return 0.0

    def rotation(self, layer_idx: int) -> Rotation | None:
        return None

    def ngram_table(self, layer: int) -> compute.RowTable:
        dtype = matrices.TORCH_DTYPES[self._checkpoint.table_dtype(layer)]

        def read(numbers: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(self._checkpoint.table_rows_at(layer, numbers)).view(dtype).to(torch.float32)

        return lambda numbers: compute.LaterRows(lambda: read(numbers))


class _SourceExpert:
    def __init__(self, checkpoint: families.Checkpoint, layer_idx: int, expert: int, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._device = device
        spec = checkpoint.spec.expert
        self._sources = {m: checkpoint.expert_source(layer_idx, expert, m) for m in spec.matrices}
        self._biases = {m: checkpoint.bias_source(layer_idx, expert, m) for m in spec.bias}

    def blocks(self) -> Iterator[NeuronBlock]:
        spec = self._checkpoint.spec
        # A matrix with neurons in columns is read whole, in the source's dtype: every row has a value of each neuron.
        whole = {m: read_neurons(self._checkpoint, s) for m, s in self._sources.items() if s.neurons == "columns"}
        biases = {m: read_vector(self._checkpoint, s).to(self._device) for m, s in self._biases.items()}
        for start, stop in operations.row_blocks(spec.expert.intermediate_size, spec.hidden_size, len(self._sources)):
            rows = {
                m: (whole[m][start:stop] if m in whole else read_rows(self._checkpoint, s, start, stop)).to(
                    self._device, torch.float32
                )
                for m, s in self._sources.items()
            }
            gate_bias, up_bias = (biases[m][start:stop] if m in biases else None for m in ("gate", "up"))
            yield NeuronBlock(rows.get("gate"), rows["up"], rows["down"], gate_bias, up_bias)

    def down_bias(self) -> Tensor | None:
        return read_vector(self._checkpoint, self._biases["down"]).to(self._device) if "down" in self._biases else None
