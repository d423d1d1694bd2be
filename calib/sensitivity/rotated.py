"""Experts in the coordinates in which they are stored: the decision, and weights in which errors are measured.

A plan's losses are those of stored rows. Where a layer is rotated, the sensitivity stage takes its rows, inputs and
gradients in rotated coordinates, in which a row with an outlier loses far less. Activations are the same in both
coordinates up to rounding, and so are thresholds and sparsity.
"""

from dataclasses import dataclass, replace

import torch

from moe_pack.calib import quantize
from moe_pack.calib.forward import DerivedWeights
from moe_pack.calib.sensitivity.errors import calibrated_anchor, calibrated_formats, first_neurons, on_cpu
from moe_pack.formats.pack import plans
from moe_pack.formats.pack.codecs import decode_part
from moe_pack.formats.pack.manifests import RotationVectors
from moe_pack.formats.parts import specs
from moe_pack.runtime import model
from moe_pack.runtime.model.rotation import Rotation

_JUDGED_NEURONS = 128  # of an expert a layer
# How much more an expert may lose rotated: one without outliers loses about the same, and others of its layer may have
# some, from which they lose several times as much unrotated.
_MOST_EXCESS = 1.05


class RotatedExperts(DerivedWeights):
    """The weights of `source` with experts in the coordinates of these vectors; None: in the source's.

    Args:    device: of the weights.
    """

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
    """Returns whether a calibrated expert loses less in rotated coordinates than in its own, or at most 5% more.

    Meaning: the first neurons are quantized both ways to a trellis of 2 bits on every second token; the others judge.
    """
    judged = _JudgedExpert.of(expert, function, tokens)
    errors = [judged.error(coordinates) for coordinates in (quantize.UNROTATED, rotation)]
    return errors[1] < _MOST_EXCESS * errors[0]


@dataclass(frozen=True, slots=True, eq=False)
class _JudgedExpert:
    """Neurons of an expert, the tokens that calibrate them, and those that judge them, in the source's coordinates."""

    blocks: list[model.NeuronBlock]
    function: specs.NeuronFunction
    calibrating: quantize.ExpertTokens
    judging: quantize.ExpertTokens
    part: plans.PartFormat

    @classmethod
    def of(cls, expert: model.Expert, function: specs.NeuronFunction, tokens: quantize.ExpertTokens) -> "_JudgedExpert":
        calibrating, judging = (
            quantize.ExpertTokens(tokens.inputs[first::2], tokens.weights[first::2]) for first in range(2)
        )
        part = calibrated_anchor(calibrated_formats(tokens.inputs.shape[1]))
        blocks = [on_cpu(block) for block in first_neurons(expert, _JUDGED_NEURONS)]
        return cls(blocks, function, calibrating, judging, part)

    def error(self, rotation: quantize.LayerRotation) -> float:
        """Returns the squared error of the outputs of quantized neurons, in the source's coordinates."""
        num_cols, x = self.calibrating.inputs.shape[1], self.judging.inputs
        calibration = quantize.Calibration(
            replace(self.calibrating, inputs=rotation.inputs(self.calibrating.inputs)), self.function
        )
        part, has_gate = self.part, self.blocks[0].gate is not None
        formats = plans.ExpertFormat(part if has_gate else None, part, part)
        quantizer = quantize.ExpertQuantizer(formats, calibration, num_cols)
        error, stored_x = torch.zeros_like(x), rotation.inputs(x)
        for block in self.blocks:
            stored = rotation.block(block)
            matrices = [matrix for matrix in specs.MATRICES if formats.of(matrix) is not None]
            decoded = {m: decode_part(part, num_cols, quantizer.rows(m, stored)) for m in matrices}
            rounded = model.NeuronBlock(
                decoded.get("gate"), decoded["up"], decoded["down"], block.gate_bias, block.up_bias
            )
            y = model.activations(stored_x, rounded, self.function).h @ rounded.down
            error += rotation.outputs(y) - model.activations(x, block, self.function).h @ block.down
        return float((error.square().sum(dim=1) * self.judging.weights).sum(dtype=torch.float64))
