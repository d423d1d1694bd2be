"""Which formats keep what a checkpoint's matrices are in, and the plan that keeps them where it would not be wider."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from moe_pack.calib import Losses
from moe_pack.convert.part_bytes import E5M2_SPAN, exponent_span
from moe_pack.formats import (
    BF16,
    E5M2,
    FP8,
    MATRICES,
    MXFP4,
    Checkpoint,
    ExpertFormat,
    Matrix,
    PartFormat,
    Plan,
    PlanError,
    SourceMatrix,
    dense_roles,
    format_text,
    selector_matrices,
)

Floats = NDArray[np.float64]
Bits = float | None | str  # of a weight; None: none was given; "source": what the source is in
SOURCE = "source"
_Kept = Callable[[int, int, Matrix, PartFormat], PartFormat]


def kept_format(checkpoint: Checkpoint, source: SourceMatrix) -> PartFormat | None:
    """The format in which a matrix's rows are the source's to the bit; None where there is none (F16, F32).

    Neurons that MXFP4 blocks lie across are in `e5m2`, or in `bf16` if the exponents of one are too far apart.
    """
    found = _codes_format(source)
    if found is None:
        return BF16 if checkpoint.dtype(source) == "BF16" else None
    return BF16 if found == E5M2 and exponent_span(checkpoint, source) > E5M2_SPAN else found


def keep_source(checkpoint: Checkpoint, plan: Plan, selector: Bits, record: Bits, dense: Bits) -> Plan:
    """The plan with the source's own codes in the place of formats that are not narrower.

    Meaning: `source` keeps what the source is in, whatever it is; no width keeps it where it is in FP8 or MXFP4; a
             width keeps it where it is in codes of no more bits. All else is as planned.
    Args:    selector, record, dense: what was asked for.
    Raises:  PlanError where `source` is asked for, and no format keeps it.
    """
    spec = checkpoint.spec
    selected = selector_matrices(plan.selector, spec.expert.matrices)

    def kept(layer_idx: int, expert: int, matrix: Matrix, planned: PartFormat) -> PartFormat:
        flag, bits = ("--selector-bits", selector) if matrix in selected else ("--record-bits", record)
        source = checkpoint.expert_source(layer_idx, expert, matrix)
        if bits != SOURCE and source.codec == "plain":
            return planned
        found = kept_format(checkpoint, source)
        if found is None:
            raise PlanError(
                f"{flag} source: {checkpoint.place(source)} is {checkpoint.dtype(source)}, which no format of experts "
                "keeps; give a width (16 is bfloat16)"
            )
        return found if not isinstance(bits, float | int) or found.width <= bits else planned

    experts = tuple(
        tuple(_expert(layer_idx, e, expert, kept) for e, expert in enumerate(layer))
        for layer_idx, layer in enumerate(plan.experts)
    )
    return replace(plan, experts=experts, dense=_kept_dense(checkpoint, plan.dense, dense))


def lossless_formats(checkpoint: Checkpoint) -> dict[Matrix, PartFormat]:
    """The format that keeps a matrix in all experts, of those that are in codes: gate, up and down apart."""
    spec, found = checkpoint.spec, dict[Matrix, PartFormat]()
    experts = list(product(range(len(spec.moe_layers)), range(spec.router.num_experts)))
    for matrix in spec.expert.matrices:
        sources = [checkpoint.expert_source(layer_idx, e, matrix) for layer_idx, e in experts]
        if all(source.codec != "plain" for source in sources):
            kept = {kept_format(checkpoint, source) for source in sources}
            if len(kept) == 1 and (part := kept.pop()) is not None and part.keeps_source:
                found[matrix] = part
    return found


def with_kept(losses: Losses, kept: Mapping[Matrix, PartFormat]) -> Losses:
    """The losses with these formats among them: nothing is lost by one where it keeps the source, all elsewhere."""
    added = tuple(dict.fromkeys(kept.values()))
    shape = losses.quantized.shape[:3]
    lost = [np.full(shape, np.inf) for _ in added]
    for matrix, part in kept.items():
        lost[added.index(part)][:, :, MATRICES.index(matrix)] = 0.0

    def widened(formats: tuple[PartFormat, ...], known: Floats) -> tuple[tuple[PartFormat, ...], Floats]:
        columns = (known[..., :-1], *(held[..., None] for held in lost), known[..., -1:])
        return (*formats[:-1], *added, formats[-1]), np.concatenate(columns, axis=3)  # bfloat16 stays the last

    formats, quantized = widened(losses.formats, losses.quantized)
    calibrated_formats, calibrated = widened(losses.calibrated_formats, losses.calibrated)
    return replace(
        losses,
        formats=formats,
        quantized=quantized,
        calibrated_formats=calibrated_formats,
        calibrated=calibrated,
    )


def check_kept(checkpoint: Checkpoint, plan: Plan) -> None:
    """Checks that what a plan keeps in the source's codes is in these codes there.

    Raises:  PlanError naming the first matrix that is not.
    """
    for layer_idx, layer in enumerate(plan.experts):
        for e, expert in enumerate(layer):
            for matrix in checkpoint.spec.expert.matrices:
                part = expert.of(matrix)
                if part is not None and part.keeps_source:
                    _check_kept(checkpoint, checkpoint.expert_source(layer_idx, e, matrix), part)
    for role, part in zip(dense_roles(checkpoint.spec), plan.dense, strict=True):
        if part is not None and part.keeps_source:
            _check_kept(checkpoint, checkpoint.dense_source(role.name), part)


def kept_text(plan: Plan, checkpoint: Checkpoint) -> str | None:
    """What of experts' matrices a plan keeps in the source's codes, as a line for people; None: nothing."""
    kept: Counter[tuple[Matrix, str]] = Counter()
    for layer_idx, layer in enumerate(plan.experts):
        for e, expert in enumerate(layer):
            for matrix in checkpoint.spec.expert.matrices:
                coded = checkpoint.expert_source(layer_idx, e, matrix).codec != "plain"
                part = expert.of(matrix)
                if part is not None and coded and part.codec not in ("affine", "trellis"):
                    kept[matrix, format_text(part)] += 1
    if not kept:
        return None
    texts = [f"{matrix} {codec} ({number:,} experts)" for (matrix, codec), number in sorted(kept.items())]
    return f"kept as the source has it: {', '.join(texts)}"


def _expert(layer_idx: int, e: int, expert: ExpertFormat, kept: _Kept) -> ExpertFormat:
    gate = None if expert.gate is None else kept(layer_idx, e, "gate", expert.gate)
    return ExpertFormat(gate, kept(layer_idx, e, "up", expert.up), kept(layer_idx, e, "down", expert.down))


def _codes_format(source: SourceMatrix) -> PartFormat | None:
    """The format that a matrix's codes are kept in; None where it is in none."""
    if source.codec == "mxfp4":
        return MXFP4 if source.neurons == "rows" else E5M2
    return FP8 if source.codec == "fp8" else None


def _kept_dense(
    checkpoint: Checkpoint, planned: tuple[PartFormat | None, ...], bits: Bits
) -> tuple[PartFormat | None, ...]:
    """Formats of dense tensors; None keeps what the source is in."""
    if not isinstance(bits, float | int):
        return (None,) * len(planned)
    sources = [checkpoint.dense_source(role.name) for role in dense_roles(checkpoint.spec)]
    return tuple(
        None if source.codec == "fp8" and bits >= FP8.width else part
        for source, part in zip(sources, planned, strict=True)
    )


def _check_kept(checkpoint: Checkpoint, source: SourceMatrix, part: PartFormat) -> None:
    if _codes_format(source) != part:
        raise PlanError(
            f"plan: {checkpoint.place(source)} cannot be kept as {part.codec}: it is {checkpoint.dtype(source)} there; "
            "make the plan for this checkpoint"
        )
