"""Which quantizers benchmarks compare: the one place where joint ones, and their steps, come from.

Quantizers that need no more than a matrix are not made here: `memory_weights.MatrixQuantizer` serves these.
"""

import torch
from memory_weights import JointQuantizer, Parts
from torch import Tensor

from moe_pack.calib import Profile
from moe_pack.calib.expert_quantizer import BLOCK_NEURONS, Calibration, ExpertQuantizer, Steps
from moe_pack.formats import MATRICES, ExpertFormat, Matrix, PartFormat, Quantizer
from moe_pack.runtime import NeuronBlock

# Of what the project does beyond HQQ, in the order in which `quantizer_steps.py` adds them.
STEPS = ("importance", "feedback", "codebook", "scales", "knapsack")
_CALIBRATED = frozenset({"importance", "feedback", "codebook"})  # steps that HQQ has not


class Calibrated:
    """Calibrated rounding on a profile's inputs; a matrix that was quantized to a format is kept."""

    def __init__(self, profile: Profile, steps: Steps) -> None:
        self._profile = profile
        self._steps = steps
        self._calibrations: dict[tuple[int, int], Calibration] = {}
        self._held: dict[tuple[int, int, Matrix, PartFormat], Tensor] = {}

    def encode(self, layer_idx: int, expert: int, weights: NeuronBlock, formats: ExpertFormat) -> Parts:
        """The bytes of gate, up and down."""
        quantizer = ExpertQuantizer(formats, self._calibration(layer_idx, expert), weights.up.shape[1])
        for matrix in MATRICES:
            part = formats.of(matrix)
            assert part is not None, "experts have three matrices"
            if (layer_idx, expert, matrix, part) not in self._held:
                blocks = [quantizer.rows(matrix, block) for block in _blocks(weights)]
                self._held[layer_idx, expert, matrix, part] = torch.cat(blocks)
        gate, up, down = (self._held[layer_idx, expert, m, part] for m in MATRICES if (part := formats.of(m)))
        return gate, up, down

    def _calibration(self, layer_idx: int, expert: int) -> Calibration:
        place = layer_idx, expert
        if place not in self._calibrations:
            with self._profile.inputs(layer_idx) as inputs:
                tokens = inputs.of_expert(expert)
            self._calibrations[place] = Calibration(tokens, self._profile.spec.expert.function, self._steps)
        return self._calibrations[place]


def _blocks(weights: NeuronBlock) -> list[NeuronBlock]:
    """All neurons, as many at once as are rounded together."""
    assert weights.gate is not None, "experts have three matrices"
    matrices = (torch.split(matrix, BLOCK_NEURONS) for matrix in (weights.gate, weights.up, weights.down))
    return [NeuronBlock(gate, up, down) for gate, up, down in zip(*matrices, strict=True)]


def joint_quantizers(profile: Profile) -> dict[Quantizer, JointQuantizer]:
    """By the name that plans give them, those that quantize an expert by what `profile` saw it do."""
    return {"calibrated": Calibrated(profile, Steps())}


def quantizer_with(profile: Profile, steps: frozenset[str]) -> tuple[Quantizer, JointQuantizer | None]:
    """The quantizer that takes these of `STEPS`: its name in plans, and itself; None if a matrix is all it needs."""
    if not steps & _CALIBRATED:
        return "hqq", None
    return "calibrated", Calibrated(profile, Steps(importance="importance" in steps, feedback="feedback" in steps))
