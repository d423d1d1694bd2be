"""Errors of an expert's output if its matrices have fewer bits or its weakest neurons do not run.

One matrix changes at a time: errors of different matrices and experts add, as long as they are small. Weights come in
blocks of neurons, whose rows are quantized as conversion does it.

`output_changes` measures plain quantization and sparsity at all widths and levels. `format_ratios` compares all formats
on one expert, `calibrated_ratios` those of the calibrated quantizer. The latter calibrates on some tokens and judges on
others, because GPTQ fits the tokens it knows better than new ones. Rows of gate and up are independent of each other,
so it judges few of them. Rows of down make up for each other's errors, so it judges as many as conversion quantizes
together, in some of their columns.

`RoundedDense` and `RoundedExperts` are weights with some matrices rounded as conversion would store them.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_pack.calib.forward import HOT_SPARSITIES, KINDS, Array
from moe_pack.calib.quantize import (
    BLOCK_NEURONS,
    MAX_OTHER_TOKENS,
    MAX_OWN_TOKENS,
    Calibration,
    ExpertQuantizer,
    ExpertTokens,
    RowQuantizer,
)
from moe_pack.formats import (
    MATRICES,
    ROW_GROUP,
    ExpertFormat,
    Matrix,
    ModelSpec,
    NeuronFunction,
    PartFormat,
    Quantizer,
    Selector,
    dense_roles,
    part_format,
    trellis_format,
)
from moe_pack.formats.codecs import decode_part
from moe_pack.formats.plan import TRELLIS_WIDTHS, format_fault
from moe_pack.runtime.model import NEURONS, Activations, Expert, NeuronBlock, Operations, Weights, activations
from moe_pack.runtime.model import Matrix as DenseMatrix
from moe_pack.runtime.model.rotation import Rotation

WIDTHS = (2, 3, 4, 8)  # below 2 errors are no longer small
GROUP = 64
_GROUPS = (16, 32, 64, 128, ROW_GROUP)
SPARSITIES = HOT_SPARSITIES
ABSMAX_FORMATS = tuple(part_format(width, ROW_GROUP) for width in (2, 4, 8))  # EdgeMoE's
COMPARED_NEURONS = 256  # of an expert, to compare formats on: ratios differ more between experts


@dataclass(frozen=True, slots=True)
class Change:
    """One way to make an expert smaller: a matrix at a width, or no neurons below a selector kind's quantile."""

    matrix_idx: int = -1
    width: int = 16
    kind_idx: int = -1
    sparsity: float = 0.0


QUANTIZED = tuple(Change(matrix_idx, width) for matrix_idx in range(len(MATRICES)) for width in WIDTHS)
SPARSE = tuple(
    Change(kind_idx=kind_idx, sparsity=sparsity) for kind_idx in range(len(KINDS)) for sparsity in SPARSITIES
)


def quantized_formats(num_cols: int) -> tuple[PartFormat, ...]:
    """Returns the affine formats for rows of `num_cols` weights: by width, group (the whole row last), bits of scales.

    A row of one group has no formats with byte scales, which would save nothing.
    """
    every = (
        part_format(width, group, scale_bits)
        for width in WIDTHS
        for group in _GROUPS
        for scale_bits in (16, 8)
        if (group, scale_bits) != (ROW_GROUP, 8)
    )
    return tuple(part for part in every if format_fault(part, num_cols) is None)


def compared_formats(num_cols: int) -> tuple[tuple[Quantizer, PartFormat], ...]:
    """Returns the formats in which errors are compared: hqq's, then EdgeMoE's with one absmax scale a row."""
    solved: list[tuple[Quantizer, PartFormat]] = [("hqq", part) for part in quantized_formats(num_cols)]
    return (*solved, *(("absmax", part) for part in ABSMAX_FORMATS))


class Rounding:
    """Rounds rows of weights: encodes them with a quantizer and decodes them again."""

    def __init__(self, quantizer: Quantizer, group: int = GROUP, scale_bits: int = 16) -> None:
        self._quantizer: Quantizer = quantizer
        self._group = group
        self._scale_bits = scale_bits

    def __call__(self, weights: Tensor, width: int) -> Tensor:
        """Returns rounded rows, float32 [rows, columns], on their device; the number of columns is a multiple of 64."""
        part, num_cols = part_format(width, self._group, self._scale_bits), weights.shape[1]
        quantizer = RowQuantizer(part, num_cols, self._quantizer)
        with _one_thread() if self._quantizer == "hqq" else nullcontext():
            return decode_part(part, num_cols, quantizer.encode(weights.cpu())).to(weights.device)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Gives torch one thread, as conversion does: on blocks this small, more threads take three times as long.

    448 rows of 128 in groups of 16, two busy cores, November 2026: 29 ms with one thread, 123 to 366 with two.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def output_changes(
    expert: Expert,
    function: NeuronFunction,
    x: Tensor,
    rounding: Rounding,
    thresholds: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns how an expert's outputs change under each of `QUANTIZED` and of `SPARSE`.

    Args:    x: float32 [n, d], tokens of the expert.   thresholds: float32 [kinds, sparsities], None for no sparsity.
    Returns: float32 [len(QUANTIZED), n, d]; [len(SPARSE), n, d], or [0, n, d] without thresholds. Zeros for a matrix
             that the expert does not have.
    """
    quantized = x.new_zeros((len(QUANTIZED), *x.shape))
    sparse = x.new_zeros((len(SPARSE) if thresholds is not None else 0, *x.shape))
    for block in expert.blocks():
        values = activations(x, block, function)
        for change, output in zip(QUANTIZED, quantized, strict=True):
            _add_quantized(change, block, values, x, function, rounding, output)
        for change, output in zip(SPARSE if thresholds is not None else (), sparse, strict=True):
            assert thresholds is not None, "there are as many outputs as sparse changes"
            a = values.of(KINDS[change.kind_idx])
            dropped = a.abs() < thresholds[change.kind_idx, SPARSITIES.index(change.sparsity)]
            output.addmm_(torch.where(dropped, values.h, 0.0), block.down, alpha=-1)
    return quantized, sparse


def _add_quantized(
    change: Change,
    block: NeuronBlock,
    values: Activations,
    x: Tensor,
    function: NeuronFunction,
    rounding: Rounding,
    output: Tensor,
) -> None:
    weights = (block.gate, block.up, block.down)[change.matrix_idx]
    if weights is not None:
        add_change(MATRICES[change.matrix_idx], rounding(weights, change.width), block, values, x, function, output)


def add_change(
    matrix: Matrix,
    rounded: Tensor,
    block: NeuronBlock,
    values: Activations,
    x: Tensor,
    function: NeuronFunction,
    output: Tensor,
) -> None:
    """Adds to `output` float32 [n, d] the change of an expert's output if a matrix of a block becomes `rounded`.

    Args:    values: of the block, for `x`.
    """
    if matrix == "down":
        output.addmm_(values.h, rounded - block.down)
        return
    bias = block.up_bias if matrix == "up" else block.gate_bias
    product = x @ rounded.T
    if bias is not None:
        product = product + bias
    neuron = NEURONS[function]
    if matrix == "up":
        h = neuron.act(product) if block.gate is None else values.gate * neuron.factor(product)
    else:
        h = neuron.act(product) * values.up
    output.addmm_(h - values.h, block.down)


def mean_square(changes: Tensor, weights: Tensor) -> Tensor:
    """Returns the mean square of weighted changes: float32 [changes, n, d] and router weights [n] give [changes]."""
    weighted = changes.square().mean(dim=2) * weights.square()  # [changes, n]
    return weighted.mean(dim=1) if changes.shape[1] else weighted.new_zeros(len(changes))


def format_ratios(expert: Expert, function: NeuronFunction, x: Tensor, weights: Tensor, rounding: Rounding) -> Tensor:
    """Returns the errors in every format over those of `rounding` at the same width: float32 [3, F].

    The rows are gate, up and down, the columns those of `compared_formats`; 1 if there is no error to compare. Judged
    on the expert's first 256 neurons.
    """
    blocks = first_neurons(expert, COMPARED_NEURONS)
    values = [activations(x, block, function) for block in blocks]

    def errors(rounding: Rounding, width: int) -> Tensor:
        changes = x.new_zeros((len(MATRICES), *x.shape))
        for block, of_block in zip(blocks, values, strict=True):
            for matrix_idx, output in enumerate(changes):
                _add_quantized(Change(matrix_idx, width), block, of_block, x, function, rounding, output)
        return mean_square(changes, weights)  # [3]

    base = {width: errors(rounding, width) for width in WIDTHS}
    ratios = [
        _ratio(errors(Rounding(quantizer, part.group, part.scale_bits), part.width), base[part.width])
        for quantizer, part in compared_formats(x.shape[1])
    ]
    return torch.stack(ratios, dim=1)


def _ratio(errors: Tensor, base: Tensor) -> Tensor:
    """Returns `errors / base`, 1 where `base` is 0."""
    return torch.where(base > 0, errors / base.clamp(min=torch.finfo(torch.float32).tiny), 1.0)


def first_neurons(expert: Expert, number: int) -> list[NeuronBlock]:
    """Returns at most `number` of an expert's neurons, the first ones, in blocks."""
    blocks: list[NeuronBlock] = []
    for block in expert.blocks():
        blocks.append(cut(block, number))
        number -= len(block.up)
        if number <= 0:
            break
    return blocks


def cut(block: NeuronBlock, number: int) -> NeuronBlock:
    """Returns at most `number` of a block's neurons, the first ones."""
    gate, gate_bias, up_bias = (
        None if values is None else values[:number] for values in (block.gate, block.gate_bias, block.up_bias)
    )
    return NeuronBlock(gate, block.up[:number], block.down[:number], gate_bias, up_bias)


def ratios_of_widths(ratios: Array, num_cols: int) -> Array:
    """Returns, from ratios [3, F], those of groups of 64 with 16-bit scales at `WIDTHS`: [3, 4]."""
    parts = quantized_formats(num_cols)
    return ratios[:, [parts.index(part_format(width, GROUP)) for width in WIDTHS]]


class RoundedDense:
    """The weights of `source` with these dense matrices at `width`; rows are rounded each time they are read."""

    def __init__(self, source: Weights, roles: Collection[str], width: int, rounding: Rounding) -> None:
        self.spec: ModelSpec = source.spec
        self.selector: Selector = source.selector
        self.operations: Operations = source.operations
        self._source = source
        self._roles = frozenset(roles)
        self._width = width
        self._rounding = rounding

    def vector(self, role: str) -> Tensor:
        """Returns a norm's weight or a bias, float32 [n]."""
        return self._source.vector(role)

    def matrix(self, role: str) -> DenseMatrix:
        """Returns a dense matrix by its role, rounded if it is one of the roles."""
        matrix = self._source.matrix(role)
        return _RoundedMatrix(matrix, self._width, self._rounding) if role in self._roles else matrix

    def expert(self, layer_idx: int, expert: int) -> Expert:
        """Returns an expert of `source`."""
        return self._source.expert(layer_idx, expert)

    def threshold(self, layer_idx: int, expert: int) -> float:
        """Returns the expert's threshold on `abs(a)`."""
        return self._source.threshold(layer_idx, expert)

    def rotation(self, layer_idx: int) -> Rotation | None:
        """Returns the rotated coordinates of a MoE layer's experts; None if it is not rotated."""
        return self._source.rotation(layer_idx)


class _RoundedMatrix:
    def __init__(self, matrix: DenseMatrix, width: int, rounding: Rounding) -> None:
        self._matrix = matrix
        self._width = width
        self._rounding = rounding
        self.num_rows, self.num_cols = matrix.num_rows, matrix.num_cols

    def rows(self, start: int, stop: int) -> Tensor:
        return self._rounding(self._matrix.rows(start, stop), self._width)


class RoundedExperts:
    """The weights of `source` with all routed experts at `width`; blocks are rounded each time they are read."""

    def __init__(self, source: Weights, width: int, rounding: Rounding) -> None:
        self.spec: ModelSpec = source.spec
        self.selector: Selector = source.selector
        self.operations: Operations = source.operations
        self._source = source
        self._width = width
        self._rounding = rounding

    def vector(self, role: str) -> Tensor:
        """Returns a norm's weight or a bias, float32 [n]."""
        return self._source.vector(role)

    def matrix(self, role: str) -> DenseMatrix:
        """Returns a dense matrix of `source`."""
        return self._source.matrix(role)

    def expert(self, layer_idx: int, expert: int) -> Expert:
        """Returns an expert with its matrices rounded."""
        return _RoundedExpert(self._source.expert(layer_idx, expert), self._width, self._rounding)

    def threshold(self, layer_idx: int, expert: int) -> float:
        """Returns the expert's threshold on `abs(a)`."""
        return self._source.threshold(layer_idx, expert)

    def rotation(self, layer_idx: int) -> Rotation | None:
        """Returns the rotated coordinates of a MoE layer's experts; None if it is not rotated."""
        return self._source.rotation(layer_idx)


class _RoundedExpert:
    def __init__(self, expert: Expert, width: int, rounding: Rounding) -> None:
        self._expert = expert
        self._width = width
        self._rounding = rounding

    def blocks(self) -> Iterator[NeuronBlock]:
        for block in self._expert.blocks():
            gate, up, down = (
                None if weights is None else self._rounding(weights, self._width)
                for weights in (block.gate, block.up, block.down)
            )
            assert up is not None and down is not None, "every expert has up and down"
            yield NeuronBlock(gate, up, down, block.gate_bias, block.up_bias)

    def down_bias(self) -> Tensor | None:
        return self._expert.down_bias()


def roundable_roles(spec: ModelSpec, layer: int | None) -> tuple[str, ...]:
    """Returns the dense matrices of a layer, or of no layer for None, that a plan may quantize in groups of 64."""
    prefix = "" if layer is None else f"layers.{layer}."
    return tuple(
        role.name
        for role in dense_roles(spec)
        if role.quantizable and role.shape[1] % 64 == 0
        if (role.name.startswith(prefix) if layer is not None else not role.name.startswith("layers."))
    )


# Groups with bits of scales: short groups have many scales, of one byte. They help affine codes more than a trellis.
_TRELLIS_GROUPS = ((ROW_GROUP, 16), (128, 8), (32, 8))
_AFFINE_GROUPS = ((ROW_GROUP, 16), (64, 8), (32, 8))
_JUDGED_WEIGHTS = 1 << 18  # of a matrix, to judge formats on
_LEAST_ROWS, _MOST_ROWS, _LEAST_COLUMNS = 64, 256, 256
_COLUMN_STEP = 128  # the longest group


def calibrated_formats(num_cols: int) -> tuple[PartFormat, ...]:
    """Returns the formats in which the calibrated quantizer is measured, for such rows: trellises, then affine."""
    every = (
        *(trellis_format(width, *group) for width in TRELLIS_WIDTHS for group in _TRELLIS_GROUPS),
        *(part_format(width, *group) for width in WIDTHS for group in _AFFINE_GROUPS),
    )
    return tuple(part for part in every if part.group < num_cols and format_fault(part, num_cols) is None)


def base_width(part: PartFormat) -> int:
    """Returns the width of the plain rounding that a calibrated format is compared with: the least with its bits."""
    return min(width for width in WIDTHS if width >= part.bits)


def judged_rows(num_cols: int, num_neurons: int) -> int:
    """Returns on how many neurons gate and up are judged."""
    return min(max(_JUDGED_WEIGHTS // num_cols, _LEAST_ROWS), _MOST_ROWS, num_neurons)


def judged_columns(num_cols: int, num_neurons: int) -> int:
    """Returns on how many columns of `BLOCK_NEURONS` neurons down is judged."""
    columns = _JUDGED_WEIGHTS // min(num_neurons, BLOCK_NEURONS) // _COLUMN_STEP * _COLUMN_STEP
    return min(max(columns, _LEAST_COLUMNS), num_cols)


def calibrated_ratios(
    expert: Expert, function: NeuronFunction, x: Tensor, weights: Tensor, rounding: Rounding, tokens: ExpertTokens
) -> Tensor:
    """Returns the errors of the calibrated quantizer over those of `rounding` at the `base_width`: float32 [3, C].

    The rows are gate, up and down, the columns those of `calibrated_formats`; 1 if there is no error to compare.

    Args:    x, weights: tokens of the expert to judge on, and their router weights.   tokens: other tokens, to
             calibrate on.
    """
    judged = _Judged.of(expert, function, x)
    base = {
        width: judged.errors({matrix: rounding(rows, width) for matrix, rows in judged.matrices().items()}, weights)
        for width in WIDTHS
    }
    calibration = _BlockCalibration(tokens, function)
    ratios = [
        _ratio(judged.errors(judged.rounded(part, calibration), weights), base[base_width(part)])
        for part in calibrated_formats(x.shape[1])
    ]
    return torch.stack(ratios, dim=1)


def calibrated_multiplications(spec: ModelSpec, num_tokens: int) -> int:
    """Returns the multiplications of judging all formats on some tokens and of the Hessians, without the search."""
    d, f, num_gates = spec.hidden_size, spec.expert.intermediate_size, len(spec.expert.matrices) - 1
    num_judged, neurons = len(calibrated_formats(d)) + len(WIDTHS), min(f, BLOCK_NEURONS)
    one = 2 * num_gates * judged_rows(d, f) * d + neurons * judged_columns(d, f)
    hessians = d * d + num_gates * neurons * d + neurons * neurons
    return num_judged * num_tokens * one + (MAX_OWN_TOKENS + MAX_OTHER_TOKENS) * hessians


class _BlockCalibration(Calibration):
    """The calibration of a single block of neurons, whose factor is computed once for all formats."""

    def factor(self, block: NeuronBlock) -> Tensor:
        """Returns the factor of the first block that it was called with."""
        if not hasattr(self, "_factor"):
            self._factor = super().factor(block)
        return self._factor


@dataclass(frozen=True, slots=True, eq=False)
class _Judged:
    """The part of an expert that formats are judged on, with its activations on tokens x float32 [n, d].

    `few`: some neurons, for gate and up.   `narrow`: all neurons that are quantized together, with some columns of
    down.
    """

    x: Tensor
    function: NeuronFunction
    few: NeuronBlock
    few_values: Activations
    narrow: NeuronBlock
    narrow_values: Activations

    @classmethod
    def of(cls, expert: Expert, function: NeuronFunction, x: Tensor) -> "_Judged":
        whole = _joined(first_neurons(expert, BLOCK_NEURONS))
        num_neurons, num_cols = whole.up.shape
        few = cut(whole, judged_rows(num_cols, num_neurons))
        columns = judged_columns(num_cols, num_neurons)
        narrow = NeuronBlock(whole.gate, whole.up, whole.down[:, :columns].contiguous(), whole.gate_bias, whole.up_bias)
        return cls(x, function, few, activations(x, few, function), narrow, activations(x, narrow, function))

    def matrices(self) -> dict[Matrix, Tensor]:
        """Returns the rows to round, by matrix."""
        rows: dict[Matrix, Tensor] = {"up": self.few.up, "down": self.narrow.down}
        return rows if self.few.gate is None else {"gate": self.few.gate, **rows}

    def rounded(self, part: PartFormat, calibration: Calibration) -> dict[Matrix, Tensor]:
        """Returns the same rows, encoded in a format and decoded again."""
        formats = ExpertFormat(None if self.few.gate is None else part, part, part)
        decoded = dict[Matrix, Tensor]()
        for matrix, weights in self.matrices().items():
            block, num_cols = self.narrow if matrix == "down" else self.few, weights.shape[1]
            rows = ExpertQuantizer(formats, calibration, num_cols).rows(matrix, _on_cpu(block))
            decoded[matrix] = decode_part(part, num_cols, rows).to(self.x.device)
        return decoded

    def errors(self, rounded: dict[Matrix, Tensor], weights: Tensor) -> Tensor:
        """Returns the mean squared change of the output by each matrix alone, float32 [3]; 0 for a missing matrix."""
        squares = self.x.new_zeros(len(MATRICES))
        for idx, matrix in enumerate(MATRICES):
            if matrix in rounded:
                few = matrix != "down"
                block, values = (self.few, self.few_values) if few else (self.narrow, self.narrow_values)
                change = self.x.new_zeros((len(self.x), block.down.shape[1]))
                add_change(matrix, rounded[matrix], block, values, self.x, self.function, change)
                squares[idx] = mean_square(change[None], weights)[0]
        return squares


def _on_cpu(block: NeuronBlock) -> NeuronBlock:
    """Returns the block in host memory, where calibration tokens and quantizers are."""
    gate, gate_bias, up_bias = (
        None if one is None else one.cpu() for one in (block.gate, block.gate_bias, block.up_bias)
    )
    return NeuronBlock(gate, block.up.cpu(), block.down.cpu(), gate_bias, up_bias)


def _joined(blocks: list[NeuronBlock]) -> NeuronBlock:
    """Returns consecutive blocks as one."""

    def joined(parts: list[Tensor | None]) -> Tensor | None:
        tensors = [part for part in parts if part is not None]
        return torch.cat(tensors) if tensors else None

    up, down = torch.cat([block.up for block in blocks]), torch.cat([block.down for block in blocks])
    gate, gate_bias = joined([block.gate for block in blocks]), joined([block.gate_bias for block in blocks])
    return NeuronBlock(gate, up, down, gate_bias, joined([block.up_bias for block in blocks]))
