"""Experts in the coordinates in which they are stored, where rows with outliers lose far less."""

from dataclasses import replace

import torch
from torch import Tensor

from moe_pack.calib import quantize
from moe_pack.calib.forward import DerivedWeights
from moe_pack.calib.sensitivity import errors
from moe_pack.formats.pack import plans
from moe_pack.formats.pack.codecs import decode_part
from moe_pack.formats.pack.manifests import RotationVectors
from moe_pack.formats.parts import specs
from moe_pack.runtime import model
from moe_pack.runtime.model.compute.rotation import Rotation

_JUDGED_NEURONS = 128  # of an expert a layer
# How much more an expert may lose rotated: one without outliers loses about the same, and others of its layer may have
# some, from which they lose several times as much unrotated.
_MOST_EXCESS = 1.05


class RotatedExperts(DerivedWeights):
    """The weights of `source` with experts in the coordinates of these vectors, on `device`; None: in the source's."""

    def __init__(self, source: model.Weights, vectors: RotationVectors | None, device: torch.device) -> None:
        super().__init__(source)
        self._layers = [quantize.LayerRotation.of(vectors, idx, device) for idx in range(len(source.spec.moe_layers))]

    def expert(self, layer_idx: int, expert: int) -> model.Expert:
        """Returns an expert, in rotated coordinates if its layer is rotated."""
        return self._layers[layer_idx].expert(super().expert(layer_idx, expert))

    def rotation(self, layer_idx: int) -> Rotation | None:
        """Returns the coordinates of a layer; None if it is not rotated."""
        return self._layers[layer_idx].vectors


def is_rotated_better(
    expert: model.Expert,
    function: specs.NeuronFunction,
    tokens: quantize.ExpertTokens,
    rotation: quantize.LayerRotation,
) -> bool:
    """Returns whether an expert, calibrated to 2 bits on half of its tokens, loses less rotated, or at most 5% more."""
    calibrating, judging = (
        quantize.ExpertTokens(tokens.inputs[first::2], tokens.weights[first::2]) for first in range(2)
    )
    blocks = [block.mapped(Tensor.cpu) for block in errors.first_neurons(expert, _JUDGED_NEURONS)]
    own, rotated = (
        _error(blocks, function, calibrating, judging, coordinates) for coordinates in (quantize.UNROTATED, rotation)
    )
    return rotated < _MOST_EXCESS * own


def _error(
    blocks: list[model.NeuronBlock],
    function: specs.NeuronFunction,
    calibrating: quantize.ExpertTokens,
    judging: quantize.ExpertTokens,
    rotation: quantize.LayerRotation,
) -> float:
    """Returns the squared error of the outputs of quantized neurons, in the source's coordinates."""
    num_cols, x = calibrating.inputs.shape[1], judging.inputs
    calibration = quantize.Calibration(replace(calibrating, inputs=rotation.inputs(calibrating.inputs)), function)
    part = errors.calibrated_anchor(errors.calibrated_formats(num_cols))
    formats = plans.ExpertFormat(part if blocks[0].gate is not None else None, part, part)
    quantizer = quantize.ExpertQuantizer(formats, calibration, num_cols)
    error, stored_x = torch.zeros_like(x), rotation.inputs(x)
    for block in blocks:
        stored = rotation.block(block)
        matrices = [matrix for matrix in specs.MATRICES if formats.of(matrix) is not None]
        decoded = {m: decode_part(part, num_cols, quantizer.rows(m, stored)) for m in matrices}
        rounded = model.NeuronBlock(decoded.get("gate"), decoded["up"], decoded["down"], block.gate_bias, block.up_bias)
        y = model.activations(stored_x, rounded, function).h @ rounded.down
        error += rotation.outputs(y) - model.activations(x, block, function).h @ block.down
    return float((error.square().sum(dim=1) * judging.weights).sum(dtype=torch.float64))
