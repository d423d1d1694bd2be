"""The checkpoint's own codes in a pack: which formats keep them, and which matrices of a plan do."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from moe_pack.calib import quantize
from moe_pack.calib.profile import Losses
from moe_pack.convert import options
from moe_pack.formats import families
from moe_pack.formats.base import errors
from moe_pack.formats.pack import plans
from moe_pack.formats.pack.manifests import RotationVectors
from moe_pack.formats.parts import specs

# E5M2 represents E2M1's largest value times 2^13, 6 * 2^13, and its smallest times 2^-15, 0.5 * 2^-15. If the exponents
# of a neuron are at most 28 apart, one power of two therefore makes all its weights exact.
E5M2_TOP, E5M2_SPAN = 13, 28

Floats = NDArray[np.float64]
_Kept = Callable[[int, int, specs.Matrix, plans.PartFormat], plans.PartFormat]


def kept_format(checkpoint: families.Checkpoint, source: families.SourceMatrix) -> plans.PartFormat | None:
    """Returns the format that keeps a matrix without loss; None if there is none (F16, F32, packed codes).

    MXFP4 blocks across the neurons are kept in `e5m2`, or in `bf16` if a neuron's exponents are too far apart.
    """
    part = _codes_format(source)
    if part is None:
        return plans.BF16 if checkpoint.dtype(source) == "BF16" else None
    return plans.BF16 if part == plans.E5M2 and exponent_span(checkpoint, source) > E5M2_SPAN else part


def plan_for(
    bits: options.PlanOptions, checkpoint: families.Checkpoint, quantizer: plans.Quantizer, repeats: int | None = None
) -> plans.Plan:
    """Returns the plan of these options for a checkpoint, whose own codes are kept if they are not wider.

    Args:    repeats: neurons of each expert with two rows; None: the usual number where codes are calibrated.
    Raises:  PlanError if these formats cannot represent its rows, or no format keeps what `source` asks for.
    """
    plan = bits.planned(checkpoint.spec, quantizer, repeats, checkpoint_repeats(checkpoint))
    return keep_source(checkpoint, plan, bits.selector_bits, bits.record_bits, bits.dense)


def keep_source(
    checkpoint: families.Checkpoint, plan: plans.Plan, selector: options.Bits, record: options.Bits, dense: options.Bits
) -> plans.Plan:
    """Returns the plan with the source's own codes in place of formats that are not narrower.

    Args:    selector, record, dense: the bits that the options say. `source` keeps the format of the source, whatever
             it is; None keeps it if it is FP8 or MXFP4; a width keeps it if it is FP8 or MXFP4 with no more bits.
    Raises:  PlanError for `source`, if no format keeps the source without loss.
    """
    spec = checkpoint.spec
    selected = specs.selector_matrices(plan.selector, spec.expert.matrices)

    def kept(layer_idx: int, expert: int, matrix: specs.Matrix, planned: plans.PartFormat) -> plans.PartFormat:
        flag, bits = ("--selector-bits", selector) if matrix in selected else ("--record-bits", record)
        source = checkpoint.expert_source(layer_idx, expert, matrix)
        if bits != options.SOURCE and not source.is_kept:
            return planned
        part = kept_format(checkpoint, source)
        if part is None:
            stored_as = checkpoint.files.decoded_from(source.tensor) or checkpoint.dtype(source)
            raise errors.PlanError(
                f"{flag} source: {checkpoint.place(source)} is {stored_as}, which no format of experts "
                "keeps without loss; give a width (16 is bfloat16)"
            )
        return part if not isinstance(bits, float | int) or part.width <= bits else planned

    experts = tuple(
        tuple(_expert(layer_idx, e, expert, kept) for e, expert in enumerate(layer))
        for layer_idx, layer in enumerate(plan.experts)
    )
    if not isinstance(dense, float | int):
        return replace(plan, experts=experts, dense=(None,) * len(plan.dense))  # the source's bytes
    keeps = dense >= plans.FP8.width
    sources = [checkpoint.dense_source(role.name) for role in specs.dense_roles(spec)]
    parts = zip(sources, plan.dense, strict=True)
    formats = tuple(None if source.codec == "fp8" and keeps else part for source, part in parts)
    return replace(plan, experts=experts, dense=formats)


def lossless_formats(checkpoint: families.Checkpoint) -> dict[specs.Matrix, plans.PartFormat]:
    """Returns the format that keeps gate, up or down of all experts without loss, if the checkpoint has it in codes."""
    spec, formats = checkpoint.spec, dict[specs.Matrix, plans.PartFormat]()
    experts = list(product(range(len(spec.moe_layers)), range(spec.router.num_experts)))
    for matrix in spec.expert.matrices:
        sources = [checkpoint.expert_source(layer_idx, e, matrix) for layer_idx, e in experts]
        if all(source.is_kept for source in sources):
            kept = {kept_format(checkpoint, source) for source in sources}
            if len(kept) == 1 and (part := kept.pop()) is not None and part.keeps_source:
                formats[matrix] = part
    return formats


def with_kept(losses: Losses, kept: Mapping[specs.Matrix, plans.PartFormat]) -> Losses:
    """Returns losses with these formats added: no loss for the matrix that one keeps, an infinite loss for others."""
    added = tuple(dict.fromkeys(kept.values()))
    shape = losses.quantized.shape[:3]
    lost = [np.full(shape, np.inf) for _ in added]
    for matrix, part in kept.items():
        lost[added.index(part)][:, :, specs.MATRICES.index(matrix)] = 0.0

    def widened(formats: tuple[plans.PartFormat, ...], known: Floats) -> tuple[tuple[plans.PartFormat, ...], Floats]:
        columns = (known[..., :-1], *(loss[..., None] for loss in lost), known[..., -1:])
        return (*formats[:-1], *added, formats[-1]), np.concatenate(columns, axis=3)  # bfloat16 stays the last

    formats, quantized = widened(losses.formats, losses.quantized)
    calibrated_formats, calibrated = widened(losses.calibrated_formats, losses.calibrated)
    return replace(
        losses, formats=formats, quantized=quantized, calibrated_formats=calibrated_formats, calibrated=calibrated
    )


def check_kept(checkpoint: families.Checkpoint, plan: plans.Plan) -> None:
    """Raises PlanError with the place of the first matrix whose codes a plan keeps and the checkpoint does not have."""
    for layer_idx, layer in enumerate(plan.experts):
        for e, expert in enumerate(layer):
            for matrix in checkpoint.spec.expert.matrices:
                part = expert.of(matrix)
                if part is not None and part.keeps_source:
                    _check_kept(checkpoint, checkpoint.expert_source(layer_idx, e, matrix), part)
    for role, part in zip(specs.dense_roles(checkpoint.spec), plan.dense, strict=True):
        if part is not None and part.keeps_source:
            _check_kept(checkpoint, checkpoint.dense_source(role.name), part)


def kept_text(plan: plans.Plan, checkpoint: families.Checkpoint, rotation: RotationVectors | None = None) -> str | None:
    """Returns a line on the experts' matrices that a plan keeps as the checkpoint has them; None if there are none."""
    kept: Counter[tuple[specs.Matrix, str]] = Counter()
    for layer_idx, layer in enumerate(plan.experts):
        if rotation is not None and rotation.is_rotated(layer_idx):
            continue  # rotated weights are rounded, in any format
        for e, expert in enumerate(layer):
            for matrix in checkpoint.spec.expert.matrices:
                is_kept = checkpoint.expert_source(layer_idx, e, matrix).is_kept
                part = expert.of(matrix)
                if part is not None and is_kept and not part.is_quantized:
                    kept[matrix, plans.format_text(part)] += 1
    if not kept:
        return None
    texts = [f"{matrix} {codec} ({number:,} experts)" for (matrix, codec), number in sorted(kept.items())]
    return f"kept without loss: {', '.join(texts)}"


def _expert(layer_idx: int, e: int, expert: plans.ExpertFormat, kept: _Kept) -> plans.ExpertFormat:
    gate = None if expert.gate is None else kept(layer_idx, e, "gate", expert.gate)
    return plans.ExpertFormat(gate, kept(layer_idx, e, "up", expert.up), kept(layer_idx, e, "down", expert.down))


def _codes_format(source: families.SourceMatrix) -> plans.PartFormat | None:
    if source.codec == "mxfp4":
        return plans.MXFP4 if source.neurons == "rows" else plans.E5M2
    return plans.FP8 if source.codec == "fp8" else None


def _check_kept(checkpoint: families.Checkpoint, source: families.SourceMatrix, part: plans.PartFormat) -> None:
    if _codes_format(source) != part:
        raise errors.PlanError(
            f"plan: {checkpoint.place(source)} is {checkpoint.dtype(source)} and cannot be kept as {part.codec}; make "
            "a plan for this checkpoint"
        )


def exponent_span(checkpoint: families.Checkpoint, source: families.SourceMatrix) -> int:
    """Returns the largest distance of two exponents in one neuron, for MXFP4 blocks that lie across the neurons."""
    scales = checkpoint.scales(source, 0, source.num_rows)  # [d, f / 32]
    return int((scales.max(axis=0).astype(np.int64) - scales.min(axis=0)).max())


def checkpoint_repeats(checkpoint: families.Checkpoint) -> int:
    """Returns the usual number of neurons with two rows; 0 if the checkpoint has codes: a plan may keep them."""
    is_coded = any(source.is_kept for source in checkpoint.claims.experts.values())
    return 0 if is_coded else quantize.usual_repeats(checkpoint.spec.expert.source_size)
