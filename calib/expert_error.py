"""What storing an expert's matrices in fewer bits, or dropping its weakest neurons, does to its output.

One matrix at a time, everything else as it is: errors of different matrices and experts then add, as long as they are
small. Weights come in blocks of neurons, rows of which are quantized as conversion does it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_pack.calib.expert_pass import HOT_SPARSITIES, KINDS
from moe_pack.calib.quantize import RowQuantizer
from moe_pack.formats import MATRICES, Matrix, Quantizer, part_format
from moe_pack.formats.codecs import decode_part
from moe_pack.runtime import ACTIVATIONS, Activations, Expert, NeuronBlock, activations

WIDTHS = (2, 3, 4, 8)  # below 2 errors are no longer small
GROUP = 64
SPARSITIES = HOT_SPARSITIES
_RATIO_BLOCKS = 8  # roundings are compared on one block of neurons of this many


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


class Rounding:
    """Rows of weights as a quantizer would store them, decoded again."""

    def __init__(self, quantizer: Quantizer, group: int = GROUP) -> None:
        self._quantizer: Quantizer = quantizer
        self._group = group

    def __call__(self, weights: Tensor, width: int) -> Tensor:
        """Float32 [rows, columns] for rows of a multiple of 64 weights, any float dtype, on their device."""
        part, num_cols = part_format(width, self._group), weights.shape[1]
        stored = RowQuantizer(part, num_cols, self._quantizer).encode(weights.cpu())
        return decode_part(part, num_cols, stored).to(weights.device)


def output_changes(
    expert: Expert,
    function: str,
    x: Tensor,
    rounding: Rounding,
    thresholds: Tensor | None,
    every: int = 1,
) -> tuple[Tensor, Tensor]:
    """How an expert's outputs change under each of `QUANTIZED`, and of `SPARSE`.

    Args:    x: float32 [n, d], tokens of the expert.   thresholds: float32 [kinds, sparsities], None for no sparsity.
             every: takes every so-manieth block of neurons only, for comparing roundings.
    Returns: float32 [len(QUANTIZED), n, d]; [len(SPARSE), n, d], or [0, n, d] without thresholds. A matrix the expert
             does not have changes nothing.
    """
    quantized = x.new_zeros((len(QUANTIZED), *x.shape))
    sparse = x.new_zeros((len(SPARSE) if thresholds is not None else 0, *x.shape))
    for number, block in enumerate(expert.blocks()):
        if number % every:
            continue
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
    function: str,
    rounding: Rounding,
    output: Tensor,
) -> None:
    matrix: Matrix = MATRICES[change.matrix_idx]
    if matrix == "down":
        output.addmm_(values.h, rounding(block.down, change.width) - block.down)
        return
    weights, bias = (block.up, block.up_bias) if matrix == "up" else (block.gate, block.gate_bias)
    if weights is None:
        return
    product = x @ rounding(weights, change.width).T
    if bias is not None:
        product = product + bias
    if block.gate is None:
        h = ACTIVATIONS[function](product)
    elif matrix == "up":
        h = values.gate * product
    else:
        h = ACTIVATIONS[function](product) * values.up
    output.addmm_(h - values.h, block.down)


def mean_square(changes: Tensor, weights: Tensor) -> Tensor:
    """The mean square of weighted changes, a value: float32 [changes, n, d] and router weights [n] give [changes]."""
    weighted = changes.square().mean(dim=2) * weights.square()  # [changes, n]
    return weighted.mean(dim=1) if changes.shape[1] else weighted.new_zeros(len(changes))


def error_ratio(expert: Expert, function: str, x: Tensor, weights: Tensor, solved: Rounding, plain: Rounding) -> Tensor:
    """How much smaller the errors of one rounding are than another's, on the same expert: float32 [len(QUANTIZED)].

    1 where there is no error to compare. Judged on every eighth block of neurons, the first among them.
    """
    found = mean_square(output_changes(expert, function, x, solved, None, every=_RATIO_BLOCKS)[0], weights)
    rough = mean_square(output_changes(expert, function, x, plain, None, every=_RATIO_BLOCKS)[0], weights)
    return torch.where(rough > 0, found / rough.clamp(min=torch.finfo(torch.float32).tiny), 1.0)
