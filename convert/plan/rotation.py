"""The coordinates in which a plan's layers are stored: what a profile decided, where the plan allows it.

`calib.quantize.rotation` has the vectors, `calib.sensitivity.rotated` the decision.
"""

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from moe_pack import formats
from moe_pack.calib import quantize
from moe_pack.calib.profile import Profile
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack import manifests


@dataclass(frozen=True, slots=True, eq=False)
class PlanRotation:
    """In which coordinates the layers of a plan are stored."""

    vectors: manifests.RotationVectors | None = None  # of the layers that may be rotated; None: of no layer
    # Whether layers whose formats gain nothing from it, or keep the checkpoint's codes, stay as they are.
    is_fitted: bool = True

    @staticmethod
    def choice(rotate: quantize.RotateChoice, is_plain: bool) -> quantize.RotateChoice:
        """Returns what `--rotate` means for a plan: `auto` is `off` for one that is plain (`Decision`)."""
        return "off" if rotate == "auto" and is_plain else rotate

    @classmethod
    def chosen(cls, rotate: quantize.RotateChoice, checkpoint: Checkpoint, profile: Profile | None) -> "PlanRotation":
        """Returns what `--rotate` says for a checkpoint and its profile."""
        if rotate == "on":
            return cls(quantize.measured_rotation(checkpoint), is_fitted=False)
        return cls(None if rotate == "off" or profile is None else profile.rotation())

    def of(self, plan: formats.Plan) -> manifests.RotationVectors | None:
        """Returns the vectors of a plan's pack; None if none of its layers is rotated."""
        if self.vectors is None or not self.is_fitted:
            return self.vectors
        fits = np.array([_may_rotate(layer) for layer in plan.experts])[:, None]
        vectors = manifests.RotationVectors(
            *(np.where(fits, v, np.float32(0)) for v in (self.vectors.input, self.vectors.output))
        )
        return vectors if vectors.input.any() else None

    def digest(self) -> str:
        """Returns a digest of the vectors and of whether they are fitted."""
        raw = b"" if self.vectors is None else manifests.rotation_bytes(self.vectors)
        return hashlib.sha256(b"fitted" * self.is_fitted + raw).hexdigest()

    def note(self, profile: Profile) -> str | None:
        """Returns a line that says that a profile measured losses in other coordinates; None if it did not."""
        measured, layers = profile.rotation(), range(len(profile.spec.moe_layers))
        numbers = [0 if v is None else sum(v.is_rotated(l) for l in layers) for v in (measured, self.vectors)]
        if all(same_rotation(measured, self.vectors, layer_idx) for layer_idx in layers):
            return None
        return (
            f"note: {numbers[1]} of {len(layers)} layers are rotated, but the profile predicts losses with "
            f"{numbers[0]} of them rotated; profile the model with --rotate {'on' if numbers[1] else 'off'} for "
            "predictions that fit"
        )


def _may_rotate(experts: tuple[formats.ExpertFormat, ...]) -> bool:
    """Returns whether some matrix of these experts has few bits, and none keeps the checkpoint's codes."""
    parts = [part for expert in experts for matrix in formats.MATRICES if (part := expert.of(matrix)) is not None]
    return any(map(quantize.needs_inputs, parts)) and not any(part.keeps_source for part in parts)


def check_rotation(vectors: manifests.RotationVectors, plan: formats.Plan, spec: formats.ModelSpec) -> None:
    """Checks that vectors fit a model, and that the experts of rotated layers are not kept in the source's codes.

    Raises:  PlanError.
    """
    shape = (len(spec.moe_layers), spec.hidden_size)
    for name, array in (("input", vectors.input), ("output", vectors.output)):
        if array.shape != shape:
            raise formats.PlanError(
                f"rotation: {name} has shape {list(array.shape)}, expected {list(shape)}: layers, values"
            )
    if fault := manifests.rotation_fault(vectors):
        raise formats.PlanError(f"rotation: {fault}")
    for layer_idx, layer in enumerate(plan.experts):
        if not vectors.is_rotated(layer_idx):
            continue
        for e, expert in enumerate(layer):
            for matrix in formats.MATRICES:
                part = expert.of(matrix)
                if part is not None and part.keeps_source:
                    raise formats.PlanError(
                        f"--rotate on: {matrix} of layer {spec.moe_layers[layer_idx]} expert {e} keeps the "
                        f"checkpoint's {part.codec} codes, which cannot be rotated; use --rotate off, or give "
                        "--selector-bits and --record-bits below the codes' bits"
                    )


def same_rotation(
    one: manifests.RotationVectors | None, other: manifests.RotationVectors | None, layer_idx: int
) -> bool:
    """Returns whether a MoE layer has the same coordinates in both."""
    rows = [
        (np.zeros(1), np.zeros(1)) if vectors is None else (vectors.input[layer_idx], vectors.output[layer_idx])
        for vectors in (one, other)
    ]
    return all(
        np.array_equal(mine, theirs) or not (mine.any() or theirs.any()) for mine, theirs in zip(*rows, strict=True)
    )


def with_rotation(layout: formats.PackLayout, vectors: manifests.RotationVectors | None) -> formats.PackLayout:
    """Returns the layout with the size of the file of these vectors."""
    return layout if vectors is None else replace(layout, rotation_bytes=len(manifests.rotation_bytes(vectors)))
