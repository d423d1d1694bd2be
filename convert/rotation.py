"""The decision in which coordinates a layer's experts are stored, and what it allows.

`runtime.model.rotation` says what rotated coordinates are. All of a layer's experts are rotated or none is, because
they share their input and the sum of their outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.calib.profile import Profile
from moe_pack.calib.quantize import Calibration, ExpertQuantizer, ExpertTokens, needs_inputs
from moe_pack.calib.sensitivity.errors import first_neurons
from moe_pack.formats import (
    MATRICES,
    NO_PROGRESS,
    ExpertFormat,
    Matrix,
    ModelSpec,
    PackLayout,
    Plan,
    PlanError,
    Progress,
    option,
)
from moe_pack.formats.codecs import decode_part
from moe_pack.formats.commands import Stage
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.manifest import RotationVectors, rotation_bytes, rotation_fault
from moe_pack.runtime.model import TORCH, CheckpointWeights, activations, read_rows
from moe_pack.runtime.model.rotation import Rotation, rotated_weights

Rotate = Literal["off", "on"]
RotateChoice = Literal["auto", "off", "on"]
_ROTATE_HELP = (
    "Whether experts are stored in rotated coordinates, which spreads single huge weights over their rows. It pays at "
    "few bits; decoding takes two short transforms more a layer."
)
ROTATE_OPTION = option("--rotate", choices=get_args(Rotate), help=_ROTATE_HELP)
ROTATE_CHOICE_OPTION = option(
    "--rotate",
    choices=get_args(RotateChoice),
    help=f"{_ROTATE_HELP} auto rotates the layers in which a calibrated expert then loses less. Experts in FP8 or "
    "MXFP4 codes of the checkpoint cannot be rotated.",
)


def rotation_vectors(spec: ModelSpec, rotate: Rotate) -> RotationVectors | None:
    """Returns the vectors in whose coordinates a model's experts are stored; None if none is rotated.

    Both vectors of a layer are the same random signs, drawn from the layer's number.
    """
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

    Meaning: a rounded row of `R (down / b)` errs alike in all coordinates, so that the error of channel j of the output
             is in proportion to `b_j`. With `s_j` the root mean square of column j of down, the sum of `b_j^2` times
             that of `(s_j / b_j)^2` is least for `b_j = sqrt(s_j)`. Some of a layer's experts are measured, evenly
             spread.
    """
    vectors = rotation_vectors(checkpoint.spec, "on")
    assert vectors is not None, "all layers are rotated"
    sizes = np.stack([_channel_sizes(checkpoint, layer_idx) for layer_idx in range(len(checkpoint.spec.moe_layers))])
    scales = torch.from_numpy(np.sqrt(sizes)).to(torch.bfloat16).to(torch.float32)  # the same on every machine
    return replace(vectors, output=vectors.output * scales.numpy())


_JUDGED_NEURONS = 256  # of an expert a layer


def better_rotated(
    checkpoint: Checkpoint,
    profile: Profile,
    formats: Callable[[int, int], ExpertFormat],
    progress: Progress = NO_PROGRESS,
) -> RotationVectors | None:
    """Returns the vectors of the layers in which rotation loses less; None if there is no such layer.

    Meaning: in each layer the expert with the most tokens is quantized both ways, on every second token; the others
             judge the outputs of its first neurons. A layer is not rotated if its formats need no inputs, or if one of
             its experts keeps the checkpoint's codes.
    Args:    profile: with inputs.   formats: of a MoE layer and expert.
    Raises:  CheckpointError for a weight that is not finite; PackError if the profile is damaged.
    """
    spec, vectors = checkpoint.spec, measured_rotation(checkpoint)
    progress.begin(Stage("rotation", len(spec.moe_layers), "layers"))
    for layer_idx, layer in enumerate(spec.moe_layers):
        with profile.inputs(layer_idx) as inputs:
            expert = int(np.bincount(inputs.experts.ravel(), minlength=spec.router.num_experts).argmax())
            tokens = inputs.of_expert(expert)
        errors = [
            _error(checkpoint, (layer_idx, expert), formats(layer_idx, expert), tokens, rotation)
            for rotation in (UNROTATED, LayerRotation.of(vectors, layer_idx))
        ]
        keeps_codes = any(_keeps_source(formats(layer_idx, e)) for e in range(spec.router.num_experts))
        if keeps_codes or not errors[1] < errors[0]:
            vectors.input[layer_idx] = vectors.output[layer_idx] = 0
        progress.advance(1, f"layer {layer}")
    progress.end()
    return vectors if vectors.input.any() else None


def _keeps_source(formats: ExpertFormat) -> bool:
    return any(part is not None and part.keeps_source for part in map(formats.of, MATRICES))


def _error(
    checkpoint: Checkpoint,
    place: tuple[int, int],
    formats: ExpertFormat,
    tokens: ExpertTokens,
    rotation: "LayerRotation",
) -> float:
    """Returns the squared error of an expert's outputs on every second token, if it is calibrated on the others."""
    parts = [(matrix, part) for matrix in MATRICES if (part := formats.of(matrix)) is not None]
    if _keeps_source(formats) or not any(needs_inputs(part) for _, part in parts):
        return 0.0
    spec, function = checkpoint.spec, checkpoint.spec.expert.function
    calibration = Calibration(ExpertTokens(rotation.inputs(tokens.inputs[::2]), tokens.weights[::2]), function)
    quantizer = ExpertQuantizer(formats, calibration, spec.hidden_size)
    x, weights = tokens.inputs[1::2], tokens.weights[1::2]
    error = torch.zeros_like(x)
    for block in first_neurons(CheckpointWeights(checkpoint).expert(*place), _JUDGED_NEURONS):
        stored = replace(
            block,
            gate=None if block.gate is None else rotation.rows("gate", block.gate),
            up=rotation.rows("up", block.up),
            down=rotation.rows("down", block.down),
        )
        decoded = {m: decode_part(part, spec.hidden_size, quantizer.rows(m, stored)) for m, part in parts}
        rounded = replace(stored, **decoded)
        y = activations(rotation.inputs(x), rounded, function).h @ rounded.down
        error += rotation.outputs(y) - activations(x, block, function).h @ block.down
    return float((error.square().sum(dim=1) * weights).sum(dtype=torch.float64))


def _channel_sizes(checkpoint: Checkpoint, layer_idx: int) -> NDArray[np.float64]:
    """Returns the root mean squares of the columns of down, relative to their mean: [d]; ones without numbers."""
    num_experts, d = checkpoint.spec.router.num_experts, checkpoint.spec.hidden_size
    number = min(num_experts, _MEASURED_EXPERTS)
    squares = np.zeros(d)
    for place in range(number):
        source = checkpoint.expert_source(layer_idx, place * num_experts // number, "down")
        step = max(1, _PIECE_WEIGHTS // source.num_cols)
        for start in range(0, source.num_rows, step):
            stop = min(start + step, source.num_rows)
            weights = read_rows(checkpoint, source, start, stop).to(torch.float64).square().numpy()
            if source.neurons == "columns":  # rows are channels
                squares[start:stop] += weights.sum(axis=1)
            else:
                squares += weights.sum(axis=0)
    sizes = np.sqrt(squares)
    mean = sizes.mean()
    return np.maximum(sizes / mean, _LEAST_SHARE) if 0 < mean < np.inf else np.ones(d)


def check_rotation(vectors: RotationVectors, plan: Plan, spec: ModelSpec) -> None:
    """Checks that vectors fit a model, and that the experts of rotated layers are not kept in the source's codes.

    Raises:  PlanError.
    """
    shape = (len(spec.moe_layers), spec.hidden_size)
    for name, array in (("input", vectors.input), ("output", vectors.output)):
        if array.shape != shape:
            raise PlanError(f"rotation: {name} has shape {list(array.shape)}, expected {list(shape)}: layers, values")
    if fault := rotation_fault(vectors):
        raise PlanError(f"rotation: {fault}")
    for layer_idx, layer in enumerate(plan.experts):
        if not vectors.is_rotated(layer_idx):
            continue
        for e, expert in enumerate(layer):
            for matrix in MATRICES:
                part = expert.of(matrix)
                if part is not None and part.keeps_source:
                    raise PlanError(
                        f"--rotate on: {matrix} of layer {spec.moe_layers[layer_idx]} expert {e} keeps the "
                        f"checkpoint's {part.codec} codes, which cannot be rotated; use --rotate off, or give "
                        "--selector-bits and --record-bits below the codes' bits"
                    )


def same_rotation(one: RotationVectors | None, other: RotationVectors | None, layer_idx: int) -> bool:
    """Returns whether a MoE layer has the same coordinates in both."""
    rows = [
        (np.zeros(1), np.zeros(1)) if vectors is None else (vectors.input[layer_idx], vectors.output[layer_idx])
        for vectors in (one, other)
    ]
    return all(
        np.array_equal(mine, theirs) or not (mine.any() or theirs.any()) for mine, theirs in zip(*rows, strict=True)
    )


def with_rotation(layout: PackLayout, vectors: RotationVectors | None) -> PackLayout:
    """Returns the layout with the size of the file of these vectors."""
    return layout if vectors is None else replace(layout, rotation_bytes=len(rotation_bytes(vectors)))


@dataclass(frozen=True, slots=True, eq=False)
class LayerRotation:
    """How the rows, biases and inputs of one layer's experts are stored: rotated, or as they are without `vectors`."""

    vectors: Rotation | None

    @classmethod
    def of(cls, vectors: RotationVectors | None, layer_idx: int) -> "LayerRotation":
        """Returns that of a MoE layer."""
        if vectors is None or not vectors.is_rotated(layer_idx):
            return cls(None)
        a, b = vectors.input[layer_idx], vectors.output[layer_idx]
        return cls(Rotation(torch.from_numpy(a), torch.from_numpy(b)))

    def rows(self, matrix: Matrix, weights: Tensor) -> Tensor:
        """Returns rows of a matrix [n, d] as they are stored; float32 if they are rotated.

        A row's bits do not depend on the rows around it. The bias of down [d] is a row of down.
        """
        if self.vectors is None:
            return weights
        scale = self.vectors.output if matrix == "down" else self.vectors.input
        return rotated_weights(weights, scale)

    def inputs(self, x: Tensor) -> Tensor:
        """Returns the layer's inputs float32 [T, d] as its stored rows get them."""
        return x if self.vectors is None else TORCH.rotate(x, self.vectors)

    def outputs(self, y: Tensor) -> Tensor:
        """Returns sums of stored rows float32 [T, d] in the source's coordinates."""
        return y if self.vectors is None else TORCH.rotate_back(y, self.vectors)


UNROTATED = LayerRotation(None)
