"""The bytes of a matrix's rows in a pack: quantized weights, calibrated weights, or the codes of the checkpoint.

`EncodedRows` quantizes a matrix by its weights alone, or copies its codes (`CopiedRows`). Copied codes are never
decoded to weights: `fp8` and `mxfp4` stay as they are, and each row gets the scales of its blocks. MXFP4 blocks that
lie across the neurons become `e5m2` (`E5M2_SPAN`).

`calibrated_rows` quantizes an expert with the inputs that a profile has of it. All three matrices of a block of neurons
are in memory at once, because the inputs of down depend on gate and up.

`keep_source` changes a plan so that codes of the checkpoint are copied if they are not wider than the planned format;
`lossless_formats` and `with_kept` offer them to a planner.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from threading import Event

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.calib import quantize
from moe_pack.calib.profile import Losses, Profile
from moe_pack.convert import options
from moe_pack.formats import families
from moe_pack.formats.base import errors
from moe_pack.formats.pack import codecs, plans
from moe_pack.formats.pack.manifests import RotationVectors
from moe_pack.formats.parts import specs
from moe_pack.runtime import model
from moe_pack.runtime.model import checkpoint_weights

_ROWS_AT_ONCE = 512  # rows of a matrix in memory at once, a multiple of every quantizer block and of every scale's
_MXFP4_BLOCK = 32
# E5M2 represents E2M1's largest value times 2^13, 6 * 2^13, and its smallest times 2^-15, 0.5 * 2^-15. If the exponents
# of a neuron are at most 28 apart, one power of two therefore makes all its weights exact.
_E5M2_TOP, E5M2_SPAN = 13, 28
_NOT_A_NUMBER = 255  # in E8M0


class StoppedError(Exception):
    """The conversion ends, so that the bytes of this item are not needed any more."""


def next_rows(num_rows: int, stop: Event, at_once: int = _ROWS_AT_ONCE) -> Iterator[tuple[int, int]]:
    """Yields (first, end) of consecutive runs of rows, `at_once` rows each.

    Raises:  StoppedError once `stop` is set.
    """
    for start in range(0, num_rows, at_once):
        if stop.is_set():
            raise StoppedError
        yield start, min(start + at_once, num_rows)


class MatrixRows:
    """The weights of a matrix of the source, with a row for each output, or for each neuron of an expert.

    Args:    stop: if it is set, reading ends.   stored: returns rows [n, num_cols] in the coordinates of the pack; None
             for the source's.
    Raises:  CheckpointError as `weights`; StoppedError.
    """

    def __init__(
        self,
        checkpoint: families.Checkpoint,
        source: families.SourceMatrix,
        stop: Event,
        stored: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._stored = stored
        self._source = source
        self._across: Tensor | None = None
        self.num_cols = source.num_cols
        if source.neurons == "columns":
            self._across = _transposed(
                read_checked, checkpoint_weights.weights_dtype(checkpoint, source), checkpoint, source, stop
            )
            self.num_cols = source.num_rows

    def weights(self, first: int, end: int) -> Tensor:
        """Returns some rows in a float dtype: [end - first, num_cols].

        Raises:  CheckpointError for a weight that is not finite.
        """
        if self._across is not None:
            rows = self._across[first:end]
        else:
            rows = read_checked(self._checkpoint, self._source, first, end)
        return rows if self._stored is None else self._stored(rows)

    def unrepresentable(self, first: int, fault: quantize.UnrepresentableError) -> errors.CheckpointError:
        """Returns the error for a row, counted from `first`, that a format cannot represent."""
        row, col = _numbered(self._source, first)(fault.row, 0)
        line = f"column {col}" if self._across is not None else f"row {row}"
        return errors.CheckpointError(f"{self._checkpoint.place(self._source)}: {line} has {fault.advice}")


class EncodedRows:
    """A matrix of the source as rows of one part of a pack.

    Args:    part: the format; a format that keeps codes needs a source in these codes.   quantizer: for other formats.
             stop: if it is set, reading ends.   stored: as for `MatrixRows`; not for a format that keeps codes.
    Raises:  CheckpointError as `rows`; StoppedError.
    """

    def __init__(
        self,
        checkpoint: families.Checkpoint,
        source: families.SourceMatrix,
        part: plans.PartFormat,
        quantizer: plans.Quantizer,
        stop: Event,
        stored: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._quantized: tuple[MatrixRows, quantize.RowQuantizer] | None = None
        if part.keeps_source:
            self._copied = CopiedRows(checkpoint, source, part, stop)
        else:
            rows = MatrixRows(checkpoint, source, stop, stored)
            self._quantized = rows, quantize.RowQuantizer(part, rows.num_cols, quantizer)

    def rows(self, first: int, end: int) -> NDArray[np.uint8]:
        """Returns the bytes of some rows: u8 [end - first, part_bytes].

        Raises:  CheckpointError for a weight that is not finite, or that the format cannot represent.
        """
        if self._quantized is None:
            return self._copied.rows(first, end)
        rows, quantizer = self._quantized
        try:
            return quantizer.encode(rows.weights(first, end)).numpy()
        except quantize.UnrepresentableError as fault:
            raise rows.unrepresentable(first, fault) from fault


class CopiedRows:
    """A matrix whose codes are copied, as rows of one part of a pack.

    Raises:  CheckpointError for exponents that `e5m2` cannot represent; StoppedError.
    """

    def __init__(
        self, checkpoint: families.Checkpoint, source: families.SourceMatrix, part: plans.PartFormat, stop: Event
    ) -> None:
        self._checkpoint = checkpoint
        self._source = source
        self._part = part
        self._across: Tensor | None = None
        if source.neurons == "columns":
            self._across = _transposed(checkpoint_weights.read_codes, torch.uint8, checkpoint, source, stop)
            self._across_scales = _scales_across(checkpoint, source)
            if part.codec == "e5m2" and (span := exponent_span(checkpoint, source)) > E5M2_SPAN:
                raise errors.CheckpointError(
                    f"{checkpoint.place(source)}: found exponents of a column {span} apart, e5m2 represents at most "
                    f"{E5M2_SPAN}; store it in bf16"
                )

    def rows(self, first: int, end: int) -> NDArray[np.uint8]:
        """Returns the bytes of some rows: u8 [end - first, part_bytes].

        Raises:  CheckpointError for a weight that is not finite.
        """
        source, num_cols = self._source, self._source.num_cols
        if self._across is not None:
            num_cols = source.num_rows
            codes, scales = self._across[first:end], self._across_scales[torch.arange(first, end) // self._block]
        else:
            codes = checkpoint_weights.read_codes(self._checkpoint, source, first, end)
            scales = checkpoint_weights.read_scales(self._checkpoint, source, first, end)
        encoded = _encoded(self._part, num_cols, codes, scales)
        weights = codecs.decode_part(self._part, num_cols, encoded)
        quantize.check_finite(weights, self._checkpoint.place(source), errors.CheckpointError, _numbered(source, first))
        return encoded.numpy()

    @property
    def _block(self) -> int:
        """The number of neurons that share a scale, if neurons are columns."""
        return 128 if self._source.codec == "fp8" else _MXFP4_BLOCK


def _numbered(source: families.SourceMatrix, first: int) -> Callable[[int, int], tuple[int, int]]:
    """Returns the function from a place in the rows from `first` on to the place in the source's tensor."""
    number = source.number
    if source.neurons == "columns":
        return lambda row, col: number(col, first + row)
    return lambda row, col: number(first + row, col)


def transposed_bytes(checkpoint: families.Checkpoint, source: families.SourceMatrix, part: plans.PartFormat) -> int:
    """Returns the memory of a matrix in `EncodedRows`, without blocks of rows: that of its transpose, if it has one."""
    if source.neurons == "rows":
        return 0
    value_bytes = 1 if part.keeps_source else checkpoint_weights.weights_dtype(checkpoint, source).itemsize
    return source.num_rows * source.num_cols * value_bytes


def read_checked(checkpoint: families.Checkpoint, source: families.SourceMatrix, start: int, stop: int) -> Tensor:
    """Returns rows of the source's tensor.

    Raises:  CheckpointError with the place of the first weight that is not finite.
    """
    weights = model.read_rows(checkpoint, source, start, stop)
    quantize.check_finite(
        weights, checkpoint.place(source), errors.CheckpointError, lambda row, col: source.number(start + row, col)
    )
    return weights


def exponent_span(checkpoint: families.Checkpoint, source: families.SourceMatrix) -> int:
    """Returns the largest distance of two exponents in one neuron, for MXFP4 blocks that lie across the neurons."""
    scales = checkpoint.scales(source, 0, source.num_rows)  # [d, f / 32]
    return int((scales.max(axis=0).astype(np.int64) - scales.min(axis=0)).max())


def _transposed(
    read: Callable[[families.Checkpoint, families.SourceMatrix, int, int], Tensor],
    dtype: torch.dtype,
    checkpoint: families.Checkpoint,
    source: families.SourceMatrix,
    stop: Event,
) -> Tensor:
    """Returns a matrix whose neurons are columns, `[d, f]`, as `[f, d]`; reads some rows at a time."""
    out = torch.empty((source.num_cols, source.num_rows), dtype=dtype)
    for first, end in next_rows(source.num_rows, stop):
        out[:, first:end] = read(checkpoint, source, first, end).T
    return out


def _scales_across(checkpoint: families.Checkpoint, source: families.SourceMatrix) -> Tensor:
    """Returns the scales of codes whose neurons are columns, a row for each block of neurons (FP8: 128 rows)."""
    scales = checkpoint_weights.read_scales(checkpoint, source, 0, source.num_rows)
    return (scales[::128] if source.codec == "fp8" else scales).T.contiguous()


def _e5m2(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Converts E2M1 codes with a scale each, u8 [n, d], to E5M2 codes with one scale a row."""
    exponents = scales.to(torch.int64)
    row = (exponents.amax(dim=1, keepdim=True) - _E5M2_TOP).clamp_(min=0)
    values = codecs.e2m1_values(codes).mul_(torch.pow(2.0, (exponents - row).to(torch.float32)))
    values.masked_fill_(exponents == _NOT_A_NUMBER, torch.nan)
    return values.to(torch.float8_e5m2).view(torch.uint8), row.to(torch.uint8)


def _encoded(part: plans.PartFormat, num_cols: int, codes: Tensor, scales: Tensor) -> Tensor:
    """Returns a part's bytes of codes, u8 [n, num_cols], and scales as the source has them."""
    if part.codec == "fp8":
        return codecs.Fp8(part, num_cols).encode(codes, scales)
    if part.codec == "mxfp4":
        return codecs.Mxfp4(part, num_cols).encode(codes, scales)
    return codecs.E5m2(part, num_cols).encode(*_e5m2(codes, scales))


Bytes2D = NDArray[np.uint8]


def checkpoint_repeats(checkpoint: families.Checkpoint) -> int:
    """Returns how many neurons of an expert have two rows by default, if codes are calibrated.

    None if the checkpoint is quantized itself, because a plan may keep its codes.
    """
    is_coded = any(source.is_kept for source in checkpoint.claims.experts.values())
    return 0 if is_coded else quantize.usual_repeats(checkpoint.spec.expert.source_size)


@dataclass(frozen=True, slots=True, eq=False)
class NeuronRows:
    """The bytes of some neurons' rows by matrix, u8 [n + r, part_bytes].

    `neurons`: of the source, in the order of the rows: consecutive ones, then the r that have a second row.
    """

    neurons: NDArray[np.intp]
    matrices: dict[specs.Matrix, Bytes2D]


def guarded_quantizer(
    profile: Profile,
    place: tuple[int, int],
    formats: plans.ExpertFormat,
    function: specs.NeuronFunction,
    rotation: quantize.LayerRotation = quantize.UNROTATED,
    stored: Tensor | None = None,
) -> quantize.GuardedQuantizer:
    """Returns the quantizer of an expert, with its tokens in a profile, or its moments from an importance file.

    Args:    place: MoE layer and expert.   function: of its neurons.   rotation: of the layer, for the inputs.
             stored: the layer's inputs behind the stored layers, float32 [T, d]; None for the source's.
    Raises:  PackError if the profile is damaged.
    """
    if not profile.has_inputs:
        return quantize.GuardedQuantizer(formats, profile.moments(place[0]).of_expert(place[1]), function)
    with profile.inputs(place[0]) as inputs:
        tokens = inputs.of_expert(place[1], stored=stored)
    return quantize.GuardedQuantizer(formats, tokens.mapped(rotation.inputs), function)


def calibrated_rows(
    checkpoint: families.Checkpoint,
    quantizer: quantize.GuardedQuantizer,
    place: tuple[int, int],
    formats: plans.ExpertFormat,
    biases: Mapping[specs.Matrix, Bytes2D],
    stop: Event,
    rotation: quantize.LayerRotation = quantize.UNROTATED,
    repeats: int = 0,
) -> Iterator[NeuronRows]:
    """Yields all rows of an expert, those of consecutive neurons at once.

    Args:    quantizer: of this expert; in the end it has judged all neurons.   place: MoE layer and expert.   biases:
             of gate and up, float32 as bytes, u8 [f, 4].   rotation: of the layer, for the rows.   repeats: how many
             neurons have two rows.
    Raises:  CheckpointError for a weight that is not finite, or that a format cannot represent; StoppedError.
    """
    spec = checkpoint.spec
    sources = {matrix: checkpoint.expert_source(*place, matrix) for matrix in spec.expert.matrices}
    if any(matrix != "down" for matrix in quantizer.matrices):
        _ = quantizer.calibration.runs  # before matrices are in memory, because computing them takes the most memory
    rows = {
        matrix: MatrixRows(checkpoint, source, stop, partial(rotation.rows, matrix))
        for matrix, source in sources.items()
    }
    copied = {
        matrix: CopiedRows(checkpoint, source, part, stop)
        for matrix, source in sources.items()
        if (part := formats.of(matrix)) is not None and part.keeps_source
    }
    f = spec.expert.intermediate_size
    for first, end in next_rows(f, stop, quantize.BLOCK_NEURONS):
        block = _block(rows, biases, first, end)
        encoded = {matrix: part_rows.rows(first, end) for matrix, part_rows in copied.items()}
        for matrix in quantizer.matrices:
            if stop.is_set():
                raise StoppedError
            number = quantize.repeats_between(repeats, f, first, end) if matrix == "down" else 0
            try:
                encoded[matrix] = quantizer.rows(matrix, block, number).numpy()
            except quantize.UnrepresentableError as fault:
                raise rows[matrix].unrepresentable(first, fault) from fault
        quantizer.judge(block, {matrix: torch.from_numpy(part_rows) for matrix, part_rows in encoded.items()})
        of_row = np.array([*range(end - first), *quantizer.repeated], np.intp)
        yield NeuronRows(first + of_row, {m: b if m == "down" else b[of_row] for m, b in encoded.items()})


def calibrated_bytes(
    checkpoint: families.Checkpoint,
    place: tuple[int, int],
    formats: plans.ExpertFormat,
    num_bytes: int,
    repeats: int = 0,
) -> int:
    """Returns the peak memory of `calibrated_rows` for an expert, with the `num_bytes` that its extent takes."""
    spec, total = checkpoint.spec, num_bytes
    for matrix in spec.expert.matrices:
        source, part = checkpoint.expert_source(*place, matrix), formats.of(matrix)
        total += transposed_bytes(checkpoint, source, plans.BF16)
        if part is not None and part.keeps_source:
            total += transposed_bytes(checkpoint, source, part)
    return quantize.calibration_bytes(spec.hidden_size, spec.expert.intermediate_size, total, repeats)


def _block(
    rows: Mapping[specs.Matrix, MatrixRows], biases: Mapping[specs.Matrix, Bytes2D], first: int, end: int
) -> model.NeuronBlock:
    weights = {matrix: source.weights(first, end).to(torch.float32) for matrix, source in rows.items()}
    offsets = {matrix: torch.from_numpy(bias[first:end].view(np.float32)[:, 0]) for matrix, bias in biases.items()}
    return model.NeuronBlock(
        weights.get("gate"), weights["up"], weights["down"], offsets.get("gate"), offsets.get("up")
    )


Floats = NDArray[np.float64]
_Kept = Callable[[int, int, specs.Matrix, plans.PartFormat], plans.PartFormat]


def kept_format(checkpoint: families.Checkpoint, source: families.SourceMatrix) -> plans.PartFormat | None:
    """Returns the format that keeps a matrix without loss; None if there is none (F16, F32, packed codes).

    MXFP4 blocks that lie across the neurons are kept in `e5m2`, or in `bf16` if the exponents of a neuron are too far
    apart.
    """
    part = _codes_format(source)
    if part is None:
        return plans.BF16 if checkpoint.dtype(source) == "BF16" else None
    return plans.BF16 if part == plans.E5M2 and exponent_span(checkpoint, source) > E5M2_SPAN else part


def keep_source(
    checkpoint: families.Checkpoint, plan: plans.Plan, selector: options.Bits, record: options.Bits, dense: options.Bits
) -> plans.Plan:
    """Returns the plan with the source's own codes in place of formats that are not narrower.

    Meaning: `source` keeps the format of the source, whatever it is; None keeps it if it is FP8 or MXFP4; a width keeps
             it if it is FP8 or MXFP4 with no more bits. Everything else stays as planned.
    Args:    selector, record, dense: the bits that the options say.
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
    return replace(plan, experts=experts, dense=_kept_dense(checkpoint, plan.dense, dense))


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
        losses,
        formats=formats,
        quantized=quantized,
        calibrated_formats=calibrated_formats,
        calibrated=calibrated,
    )


def check_kept(checkpoint: families.Checkpoint, plan: plans.Plan) -> None:
    """Checks that the checkpoint has the codes that a plan keeps.

    Raises:  PlanError with the place of the first matrix that is in other codes.
    """
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
    """Returns the format that keeps a matrix's codes; None if it is not in codes."""
    if source.codec == "mxfp4":
        return plans.MXFP4 if source.neurons == "rows" else plans.E5M2
    return plans.FP8 if source.codec == "fp8" else None


def _kept_dense(
    checkpoint: families.Checkpoint, planned: tuple[plans.PartFormat | None, ...], bits: options.Bits
) -> tuple[plans.PartFormat | None, ...]:
    """Returns the formats of dense tensors; None keeps the source's bytes."""
    if not isinstance(bits, float | int):
        return (None,) * len(planned)
    sources = [checkpoint.dense_source(role.name) for role in specs.dense_roles(checkpoint.spec)]
    return tuple(
        None if source.codec == "fp8" and bits >= plans.FP8.width else part
        for source, part in zip(sources, planned, strict=True)
    )


def _check_kept(checkpoint: families.Checkpoint, source: families.SourceMatrix, part: plans.PartFormat) -> None:
    if _codes_format(source) != part:
        raise errors.PlanError(
            f"plan: {checkpoint.place(source)} is {checkpoint.dtype(source)} and cannot be kept as "
            f"{part.codec}; make a "
            "plan for this checkpoint"
        )
