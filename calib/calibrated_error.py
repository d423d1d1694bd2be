"""What calibrated rounding does to an expert's output in every format, beside plain rounding: measured, not assumed.

Calibrated on some tokens, judged on others: error feedback fits what it was made from better than what comes. Rows of
gate and up are rounded each for itself, so few of them do; down's make up for each other's errors, column by column,
so that it is judged on as many neurons as conversion takes together, in some of their columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_pack.calib.expert_error import WIDTHS, Rounding, add_change, cut, first_neurons, mean_square
from moe_pack.calib.expert_quantizer import (
    BLOCK_NEURONS,
    MAX_OTHER_TOKENS,
    MAX_OWN_TOKENS,
    Calibration,
    ExpertQuantizer,
    ExpertTokens,
)
from moe_pack.formats import (
    MATRICES,
    ROW_GROUP,
    TRELLIS_WIDTHS,
    ExpertFormat,
    Matrix,
    ModelSpec,
    NeuronFunction,
    PartFormat,
    format_fault,
    part_format,
    trellis_format,
)
from moe_pack.formats.codecs import decode_part
from moe_pack.runtime import Activations, Expert, NeuronBlock, activations

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

    def factor(self, block: NeuronBlock) -> Tensor | None:
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
