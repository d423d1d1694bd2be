"""Rotated coordinates for experts (`compute.rotation`): their vectors, and rows, inputs and gradients in them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack import formats
from moe_pack.calib.quantize.options import Rotate
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.manifests import RotationVectors
from moe_pack.runtime import model
from moe_pack.runtime.model.compute.rotation import Rotation, rotated_weights


def rotation_vectors(spec: formats.ModelSpec, rotate: Rotate) -> RotationVectors | None:
    """Returns the vectors of rotated coordinates, random signs drawn from a layer's number; None if none is rotated."""
    if rotate == "off":
        return None
    signs = np.stack([np.random.default_rng(layer).integers(0, 2, spec.hidden_size) for layer in spec.moe_layers])
    vectors = (2 * signs - 1).astype(np.float32)
    return RotationVectors(vectors, vectors)


_MEASURED_EXPERTS = 4  # of a layer, for the sizes of its output's channels
_PIECE_WEIGHTS = 1 << 22  # read at once
_LEAST_SHARE = 1 / 64  # of the mean size, which a channel counts as at least


def measured_rotation(checkpoint: Checkpoint) -> RotationVectors:
    """Returns vectors for all layers of a checkpoint: signs as `rotation_vectors`, and outputs scaled by channel sizes.

    Meaning: the error of channel j of a rounded row of `R (down / b)` is in proportion to `b_j`. With `s_j` the root
             mean square of column j of down, the sum of `b_j^2` times that of `(s_j / b_j)^2` is least for `b_j =
             sqrt(s_j)`. Some experts of a layer are measured, evenly spread.
    """
    vectors = rotation_vectors(checkpoint.spec, "on")
    assert vectors is not None, "all layers are rotated"
    sizes = np.stack([_channel_sizes(checkpoint, layer_idx) for layer_idx in range(len(checkpoint.spec.moe_layers))])
    scales = torch.from_numpy(np.sqrt(sizes)).to(torch.bfloat16).to(torch.float32)  # the same on every machine
    return replace(vectors, output=vectors.output * scales.numpy())


def _channel_sizes(checkpoint: Checkpoint, layer_idx: int) -> NDArray[np.float64]:
    """Returns the root mean squares of the columns of down relative to their mean, [d]; ones without numbers."""
    num_experts, d = checkpoint.spec.router.num_experts, checkpoint.spec.hidden_size
    number = min(num_experts, _MEASURED_EXPERTS)
    squares = np.zeros(d)
    for place in range(number):
        source = checkpoint.expert_source(layer_idx, place * num_experts // number, "down")
        step = max(1, _PIECE_WEIGHTS // source.num_cols)
        for start in range(0, source.num_rows, step):
            stop = min(start + step, source.num_rows)
            weights = model.read_rows(checkpoint, source, start, stop).to(torch.float64).square().numpy()
            if source.neurons == "columns":  # rows are channels
                squares[start:stop] += weights.sum(axis=1)
            else:
                squares += weights.sum(axis=0)
    sizes = np.sqrt(squares)
    mean = sizes.mean()
    return np.maximum(sizes / mean, _LEAST_SHARE) if 0 < mean < np.inf else np.ones(d)


_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class LayerRotation:
    """How the rows, biases and inputs of one layer's experts are stored: rotated, or as they are without `vectors`."""

    vectors: Rotation | None

    @classmethod
    def of(cls, vectors: RotationVectors | None, layer_idx: int, device: torch.device = _CPU) -> "LayerRotation":
        """Returns that of a MoE layer, for tensors on a device."""
        if vectors is None or not vectors.is_rotated(layer_idx):
            return cls(None)
        a, b = (torch.from_numpy(each[layer_idx]).to(device) for each in (vectors.input, vectors.output))
        return cls(Rotation(a, b))

    def rows(self, matrix: formats.Matrix, weights: Tensor) -> Tensor:
        """Returns rows [n, d] as they are stored; float32 if they are rotated. The bias of down is a row."""
        if self.vectors is None:
            return weights
        return rotated_weights(weights, self.vectors.output if matrix == "down" else self.vectors.input)

    def source_rows(self, matrix: formats.Matrix, stored: Tensor) -> Tensor:
        """Returns stored rows of a matrix float32 [n, d] in the source's coordinates: undoes `rows`."""
        return self.outputs(stored) if matrix == "down" else self.input_gradients(stored)

    def inputs(self, x: Tensor) -> Tensor:
        """Returns the layer's inputs float32 [T, d] as its stored rows get them."""
        return x if self.vectors is None else model.TORCH.rotate(x, self.vectors)

    def outputs(self, y: Tensor) -> Tensor:
        """Returns sums of stored rows float32 [T, d] in the source's coordinates."""
        return y if self.vectors is None else model.TORCH.rotate_back(y, self.vectors)

    def output_gradients(self, gradients: Tensor) -> Tensor:
        """Returns gradients with respect to `outputs(y)`, float32 [T, d], as gradients with respect to y: `R (b g)`."""
        return gradients if self.vectors is None else model.TORCH.rotate(gradients, self._swapped())

    def input_gradients(self, gradients: Tensor) -> Tensor:
        """Returns gradients with respect to `inputs(x)`, float32 [T, d], as gradients with respect to x: `a (R g)`."""
        return gradients if self.vectors is None else model.TORCH.rotate_back(gradients, self._swapped())

    def expert(self, expert: model.Expert) -> model.Expert:
        """Returns an expert as it is stored, whose blocks are rotated as they are read."""
        return expert if self.vectors is None else _RotatedExpert(expert, self)

    def block(self, block: model.NeuronBlock) -> model.NeuronBlock:
        """Returns neurons as they are stored."""
        gate = None if block.gate is None else self.rows("gate", block.gate)
        return replace(block, gate=gate, up=self.rows("up", block.up), down=self.rows("down", block.down))

    def _swapped(self) -> Rotation:
        """Returns the coordinates of gradients: R is symmetric, so a and b change places."""
        assert self.vectors is not None, "the layer is rotated"
        return Rotation(self.vectors.output, self.vectors.input)


@dataclass(frozen=True, slots=True, eq=False)
class _RotatedExpert:
    source: model.Expert
    rotation: LayerRotation

    def blocks(self) -> Iterator[model.NeuronBlock]:
        return map(self.rotation.block, self.source.blocks())

    def down_bias(self) -> Tensor | None:
        bias = self.source.down_bias()
        return None if bias is None else self.rotation.rows("down", bias[None])[0]


UNROTATED = LayerRotation(None)
