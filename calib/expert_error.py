"""What storing an expert's matrices in fewer bits, or dropping its weakest neurons, does to its output.

One matrix at a time, everything else as it is: errors of different matrices and experts then add, as long as they are
small. Weights come in blocks of neurons, rows of which are quantized as conversion does it.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_pack.calib.arrays import Array
from moe_pack.calib.expert_pass import HOT_SPARSITIES, KINDS
from moe_pack.calib.quantize import RowQuantizer
from moe_pack.formats import (
    MATRICES,
    ROW_GROUP,
    Matrix,
    NeuronFunction,
    PartFormat,
    Quantizer,
    format_fault,
    part_format,
)
from moe_pack.formats.codecs import decode_part
from moe_pack.runtime import NEURONS, Activations, Expert, NeuronBlock, activations

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
