"""What storing an expert's matrices in fewer bits, or dropping its weakest neurons, does to its output.

One matrix at a time, everything else as it is: errors of different matrices and experts then add, as long as they are
small. Weights come in blocks of neurons, rows of which are quantized as conversion does it.

Weights with some of their matrices rounded as conversion would store them; everything else as it is.

What calibrated rounding does to an expert's output in every format, beside plain rounding: measured, not assumed.

Calibrated on some tokens, judged on others: error feedback fits what it was made from better than what comes. Rows of
gate and up are rounded each for itself, so few of them do; down's make up for each other's errors, column by column,
so that it is judged on as many neurons as conversion takes together, in some of their columns.
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

WIDTHS = (2, 3, 4, 8)  # below 2 errors are no longer small
GROUP = 64
_GROUPS = (16, 32, 64, 128, ROW_GROUP)
SPARSITIES = HOT_SPARSITIES
ABSMAX_FORMATS = tuple(part_format(width, ROW_GROUP) for width in (2, 4, 8))  # EdgeMoE's
COMPARED_NEURONS = 256  # of an expert, on which formats are compared: ratios of single experts scatter by more


@dataclass(frozen=True, slots=True)
class Change:
    """One way to make an expert smaller: a matrix at a width, or the neurons below a selector kind's quantile."""

    matrix_idx: int = -1
    width: int = 16
    kind_idx: int = -1
    sparsity: float = 0.0


QUANTIZED = tuple(Change(matrix_idx, width) for matrix_idx in range(len(MATRICES)) for width in WIDTHS)
SPARSE = tuple(
    Change(kind_idx=kind_idx, sparsity=sparsity) for kind_idx in range(len(KINDS)) for sparsity in SPARSITIES
)


def quantized_formats(num_cols: int) -> tuple[PartFormat, ...]:
    """Every format that rows of `num_cols` weights may be rounded to: by width, group (the row last), bits of scales.

    Byte scales save nothing where a row is one group.
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
    """All that errors are compared in: hqq's formats of such rows, then EdgeMoE's, a scale a row by absmax."""
    solved: list[tuple[Quantizer, PartFormat]] = [("hqq", part) for part in quantized_formats(num_cols)]
    return (*solved, *(("absmax", part) for part in ABSMAX_FORMATS))


class Rounding:
    """Rows of weights as a quantizer would store them, decoded again."""

    def __init__(self, quantizer: Quantizer, group: int = GROUP, scale_bits: int = 16) -> None:
        self._quantizer: Quantizer = quantizer
        self._group = group
        self._scale_bits = scale_bits

    def __call__(self, weights: Tensor, width: int) -> Tensor:
        """Float32 [rows, columns] for rows of a multiple of 64 weights, any float dtype, on their device."""
        part, num_cols = part_format(width, self._group, self._scale_bits), weights.shape[1]
        quantizer = RowQuantizer(part, num_cols, self._quantizer)
        with _one_thread() if self._quantizer == "hqq" else nullcontext():
            return decode_part(part, num_cols, quantizer.encode(weights.cpu())).to(weights.device)


@contextmanager
def _one_thread() -> Iterator[None]:
    """torch with one thread, as conversion solves: on blocks as small as its, more take three times as long and longer.

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
    """How an expert's outputs change under each of `QUANTIZED`, and of `SPARSE`.

    Args:    x: float32 [n, d], tokens of the expert.   thresholds: float32 [kinds, sparsities], None for no sparsity.
    Returns: float32 [len(QUANTIZED), n, d]; [len(SPARSE), n, d], or [0, n, d] without thresholds. A matrix the expert
             does not have changes nothing.
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
    """Adds to `output` float32 [n, d] what an expert's output changes by if a block's matrix becomes `rounded`.

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
    """The mean square of weighted changes, a value: float32 [changes, n, d] and router weights [n] give [changes]."""
    weighted = changes.square().mean(dim=2) * weights.square()  # [changes, n]
    return weighted.mean(dim=1) if changes.shape[1] else weighted.new_zeros(len(changes))


def format_ratios(expert: Expert, function: NeuronFunction, x: Tensor, weights: Tensor, rounding: Rounding) -> Tensor:
    """How the errors in every format compare with those of `rounding` at the same width: float32 [3, F].

    For gate, up and down; formats as `compared_formats` lists them. 1 where there is no error to compare. Judged on
    the expert's first 256 neurons.
    """
    blocks = first_neurons(expert, COMPARED_NEURONS)
    values = [activations(x, block, function) for block in blocks]

    def errors(held: Rounding, width: int) -> Tensor:
        changes = x.new_zeros((len(MATRICES), *x.shape))
        for block, of_block in zip(blocks, values, strict=True):
            for matrix_idx, output in enumerate(changes):
                _add_quantized(Change(matrix_idx, width), block, of_block, x, function, held, output)
        return mean_square(changes, weights)  # [3]

    rough = {width: errors(rounding, width) for width in WIDTHS}
    ratios = []
    for quantizer, part in compared_formats(x.shape[1]):
        found = errors(Rounding(quantizer, part.group, part.scale_bits), part.width)
        compared = found / rough[part.width].clamp(min=torch.finfo(torch.float32).tiny)
        ratios.append(torch.where(rough[part.width] > 0, compared, 1.0))
    return torch.stack(ratios, dim=1)


def first_neurons(expert: Expert, number: int) -> list[NeuronBlock]:
    """An expert's first neurons, so many at most, in blocks."""
    held: list[NeuronBlock] = []
    left = number
    for block in expert.blocks():
        held.append(cut(block, left))
        left -= len(block.up)
        if left <= 0:
            break
    return held


def cut(block: NeuronBlock, number: int) -> NeuronBlock:
    """A block's first neurons, so many at most."""
    gate, gate_bias, up_bias = (
        None if one is None else one[:number] for one in (block.gate, block.gate_bias, block.up_bias)
    )
    return NeuronBlock(gate, block.up[:number], block.down[:number], gate_bias, up_bias)


def ratios_of_widths(ratios: Array, num_cols: int) -> Array:
    """Of ratios [3, F] those that errors are measured and kept for, of groups of 64 with 16-bit scales: [3, 4]."""
    parts = quantized_formats(num_cols)
    return ratios[:, [parts.index(part_format(width, GROUP)) for width in WIDTHS]]


class RoundedDense:
    """The weights of `source` with these dense matrices at `width`, rounded whenever their rows are asked for."""

    def __init__(self, source: Weights, roles: Collection[str], width: int, rounding: Rounding) -> None:
        self.spec: ModelSpec = source.spec
        self.selector: Selector = source.selector
        self.operations: Operations = source.operations
        self._source = source
        self._roles = frozenset(roles)
        self._width = width
        self._rounding = rounding

    def vector(self, role: str) -> Tensor:
        """A norm's weight or a bias, float32 [n]."""
        return self._source.vector(role)

    def matrix(self, role: str) -> DenseMatrix:
        """A dense matrix by its role."""
        matrix = self._source.matrix(role)
        return _RoundedMatrix(matrix, self._width, self._rounding) if role in self._roles else matrix

    def expert(self, layer_idx: int, expert: int) -> Expert:
        """An expert, as it is."""
        return self._source.expert(layer_idx, expert)

    def threshold(self, layer_idx: int, expert: int) -> float:
        """The expert's threshold on `abs(a)`."""
        return self._source.threshold(layer_idx, expert)


class _RoundedMatrix:
    def __init__(self, matrix: DenseMatrix, width: int, rounding: Rounding) -> None:
        self._matrix = matrix
        self._width = width
        self._rounding = rounding
        self.num_rows, self.num_cols = matrix.num_rows, matrix.num_cols

    def rows(self, start: int, stop: int) -> Tensor:
        return self._rounding(self._matrix.rows(start, stop), self._width)


class RoundedExperts:
    """The weights of `source` with all routed experts at `width`, rounded whenever their blocks are asked for."""

    def __init__(self, source: Weights, width: int, rounding: Rounding) -> None:
        self.spec: ModelSpec = source.spec
        self.selector: Selector = source.selector
        self.operations: Operations = source.operations
        self._source = source
        self._width = width
        self._rounding = rounding

    def vector(self, role: str) -> Tensor:
        """A norm's weight or a bias, float32 [n]."""
        return self._source.vector(role)

    def matrix(self, role: str) -> DenseMatrix:
        """A dense matrix, as it is."""
        return self._source.matrix(role)

    def expert(self, layer_idx: int, expert: int) -> Expert:
        """An expert, its three matrices rounded."""
        return _RoundedExpert(self._source.expert(layer_idx, expert), self._width, self._rounding)

    def threshold(self, layer_idx: int, expert: int) -> float:
        """The expert's threshold on `abs(a)`."""
        return self._source.threshold(layer_idx, expert)


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
    """The dense matrices of a decoder layer (None: of none) that a plan may quantize and rows of 64 can hold."""
    prefix = "" if layer is None else f"layers.{layer}."
    return tuple(
        role.name
        for role in dense_roles(spec)
        if role.quantizable and role.shape[1] % 64 == 0
        if (role.name.startswith(prefix) if layer is not None else not role.name.startswith("layers."))
    )


# With bits of scales: a byte does where there are many. Shorter groups help affine codes more than a trellis.
_TRELLIS_GROUPS = ((ROW_GROUP, 16), (128, 8), (32, 8))
_AFFINE_GROUPS = ((ROW_GROUP, 16), (64, 8), (32, 8))
_JUDGED_WEIGHTS = 1 << 18  # of a matrix
_LEAST_ROWS, _MOST_ROWS, _LEAST_COLUMNS = 64, 256, 256
_COLUMN_STEP = 128  # the longest group


def calibrated_formats(num_cols: int) -> tuple[PartFormat, ...]:
    """Every format that calibrated rounding is measured in, for rows of so many weights: trellises, then affine."""
    every = (
        *(trellis_format(width, *group) for width in TRELLIS_WIDTHS for group in _TRELLIS_GROUPS),
        *(part_format(width, *group) for width in WIDTHS for group in _AFFINE_GROUPS),
    )
    return tuple(part for part in every if part.group < num_cols and format_fault(part, num_cols) is None)


def base_width(part: PartFormat) -> int:
    """The width that a calibrated format is compared with plain rounding at: the least that has its bits."""
    return min(width for width in WIDTHS if width >= part.bits)


def judged_rows(num_cols: int, num_neurons: int) -> int:
    """Of how many neurons gate and up are judged on."""
    return min(max(_JUDGED_WEIGHTS // num_cols, _LEAST_ROWS), _MOST_ROWS, num_neurons)


def judged_columns(num_cols: int, num_neurons: int) -> int:
    """How many columns down is judged on, of `BLOCK_NEURONS` neurons."""
    room = _JUDGED_WEIGHTS // min(num_neurons, BLOCK_NEURONS) // _COLUMN_STEP * _COLUMN_STEP
    return min(max(room, _LEAST_COLUMNS), num_cols)


def calibrated_ratios(
    expert: Expert, function: NeuronFunction, x: Tensor, weights: Tensor, rounding: Rounding, tokens: ExpertTokens
) -> Tensor:
    """How the errors of calibrated rounding compare with those of `rounding` at its `base_width`: float32 [3, C].

    For gate, up and down; formats as `calibrated_formats` lists them. 1 where there is no error to compare.

    Args:    x, weights: tokens of the expert to judge on, and their router weights.   tokens: to calibrate on, others.
    """
    judged = _Judged.of(expert, function, x)
    rough = {
        width: judged.errors({m: rounding(one, width) for m, one in judged.matrices().items()}, weights)
        for width in WIDTHS
    }
    calibration, ratios = _OfOneBlock(tokens, function), []
    for part in calibrated_formats(x.shape[1]):
        stored = judged.rounded(part, calibration)
        found, base = judged.errors(stored, weights), rough[base_width(part)]
        ratios.append(torch.where(base > 0, found / base.clamp(min=torch.finfo(torch.float32).tiny), 1.0))
    return torch.stack(ratios, dim=1)


def calibrated_multiplications(spec: ModelSpec, num_tokens: int) -> int:
    """Multiplications of judging all formats on this many tokens, and of the moments; the search is not counted."""
    d, f, num_gates = spec.hidden_size, spec.expert.intermediate_size, len(spec.expert.matrices) - 1
    num_judged, neurons = len(calibrated_formats(d)) + len(WIDTHS), min(f, BLOCK_NEURONS)
    one = 2 * num_gates * judged_rows(d, f) * d + neurons * judged_columns(d, f)
    moments = d * d + num_gates * neurons * d + neurons * neurons
    return num_judged * num_tokens * one + (MAX_OWN_TOKENS + MAX_OTHER_TOKENS) * moments


class _OfOneBlock(Calibration):
    """What follows for one block's neurons is found once, too: formats are many, the block is one."""

    def factor(self, block: NeuronBlock) -> Tensor:
        """As of any block, of the first that was asked for."""
        if not hasattr(self, "_factor"):
            self._factor = super().factor(block)
        return self._factor


@dataclass(frozen=True, slots=True, eq=False)
class _Judged:
    """The part of an expert that formats are judged on, and tokens x float32 [n, d].

    `few`: some neurons, for gate and up; `narrow`: as many as are rounded together, their down rows cut short. With
    the activations of each for x.
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
        """What is rounded, by matrix."""
        held: dict[Matrix, Tensor] = {"up": self.few.up, "down": self.narrow.down}
        return held if self.few.gate is None else {"gate": self.few.gate, **held}

    def rounded(self, part: PartFormat, calibration: Calibration) -> dict[Matrix, Tensor]:
        """The same, stored in a format and read again."""
        formats, held = ExpertFormat(None if self.few.gate is None else part, part, part), dict[Matrix, Tensor]()
        for matrix, weights in self.matrices().items():
            block, num_cols = self.narrow if matrix == "down" else self.few, weights.shape[1]
            rows = ExpertQuantizer(formats, calibration, num_cols).rows(matrix, block)
            held[matrix] = decode_part(part, num_cols, rows).to(self.x.device)
        return held

    def errors(self, rounded: dict[Matrix, Tensor], weights: Tensor) -> Tensor:
        """Mean squared changes of the output by each matrix alone, float32 [3]; 0 for one the expert does not have."""
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
    gate, gate_bias, up_bias = (
        None if one is None else one.cpu() for one in (block.gate, block.gate_bias, block.up_bias)
    )
    return NeuronBlock(gate, block.up.cpu(), block.down.cpu(), gate_bias, up_bias)


def _joined(blocks: list[NeuronBlock]) -> NeuronBlock:
    """Consecutive blocks as one."""

    def joined(parts: list[Tensor | None]) -> Tensor | None:
        held = [part for part in parts if part is not None]
        return torch.cat(held) if held else None

    up, down = torch.cat([block.up for block in blocks]), torch.cat([block.down for block in blocks])
    gate, gate_bias = joined([block.gate for block in blocks]), joined([block.gate_bias for block in blocks])
    return NeuronBlock(gate, up, down, gate_bias, joined([block.up_bias for block in blocks]))
