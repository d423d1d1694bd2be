"""Rounding errors of an expert's weights, in every format that a plan may choose.

`rounding_squares` measures plain rounding at all widths, for every expert. `format_ratios` compares other formats with
it on some rows of one expert. `calibrated_ratios` compares calibrated ones by an expert's output: GPTQ's errors are not
independent. It judges on other tokens, a few rows of gate and up, and as many of down as conversion quantizes together,
in some columns.
"""

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from moe_pack.calib import forward, quantize
from moe_pack.calib.forward.shared import torch_threads
from moe_pack.formats.pack import plans
from moe_pack.formats.pack.codecs import decode_part
from moe_pack.formats.parts import specs
from moe_pack.runtime import model
from moe_pack.runtime.model import Matrix as DenseMatrix

WIDTHS = (2, 3, 4, 8)  # below 2 errors are no longer small
GROUP = 64
_GROUPS = (16, 32, 64, 128, plans.ROW_GROUP)
SPARSITIES = forward.HOT_SPARSITIES
ABSMAX_FORMATS = tuple(plans.part_format(width, plans.ROW_GROUP) for width in (2, 4, 8))  # EdgeMoE's
COMPARED_NEURONS = 64  # of an expert, to compare formats on: ratios differ more between experts and layers


def quantized_formats(num_cols: int) -> tuple[plans.PartFormat, ...]:
    """Returns the affine formats for rows of `num_cols` weights: by width, group (the row last), bits of scales."""
    every = (
        plans.part_format(width, group, scale_bits)
        for width in WIDTHS
        for group in _GROUPS
        for scale_bits in (16, 8)
        if (group, scale_bits) != (plans.ROW_GROUP, 8)
    )
    return tuple(part for part in every if plans.format_fault(part, num_cols) is None)


def compared_formats(num_cols: int) -> tuple[tuple[plans.Quantizer, plans.PartFormat], ...]:
    """Returns the formats in which errors are compared: hqq's, then EdgeMoE's with one absmax scale a row."""
    solved: list[tuple[plans.Quantizer, plans.PartFormat]] = [("hqq", part) for part in quantized_formats(num_cols)]
    return (*solved, *(("absmax", part) for part in ABSMAX_FORMATS))


Rounder = Callable[[Tensor, int], Tensor]  # from rows float32 [n, columns] and a width to rounded rows


class Rounding:
    """Rounds rows of weights: encodes them with a quantizer and decodes them again."""

    def __init__(self, quantizer: plans.Quantizer, group: int = GROUP, scale_bits: int = 16) -> None:
        self._quantizer: plans.Quantizer = quantizer
        self._group = group
        self._scale_bits = scale_bits

    def __call__(self, weights: Tensor, width: int) -> Tensor:
        """Returns rounded rows, float32 [rows, columns], on their device; the number of columns is a multiple of 64."""
        part, num_cols = plans.part_format(width, self._group, self._scale_bits), weights.shape[1]
        quantizer = quantize.RowQuantizer(part, num_cols, self._quantizer)
        # One thread, as in conversion. 448 rows of 128 in groups of 16, two busy cores, November 2026: 29 ms with one
        # thread, 123 to 366 with two.
        with torch_threads(1) if self._quantizer == "hqq" else nullcontext():
            return decode_part(part, num_cols, quantizer.encode(weights.cpu())).to(weights.device)


def add_change(
    matrix: specs.Matrix,
    rounded: Tensor,
    block: model.NeuronBlock,
    values: model.Activations,
    x: Tensor,
    function: specs.NeuronFunction,
    output: Tensor,
) -> None:
    """Adds to `output` float32 [n, d] the change of an expert's output if a matrix of a block becomes `rounded`."""
    if matrix == "down":
        output.addmm_(values.h, rounded - block.down)
        return
    bias = block.up_bias if matrix == "up" else block.gate_bias
    product = x @ rounded.T
    if bias is not None:
        product = product + bias
    neuron = model.neuron_of(function)
    if matrix == "up":
        h = neuron.act(product) if block.gate is None else values.gate * neuron.factor(product)
    else:
        h = neuron.act(product) * values.up
    output.addmm_(h - values.h, block.down)


def mean_square(changes: Tensor, weights: Tensor) -> Tensor:
    """Returns the mean square of weighted changes: float32 [changes, n, d] and router weights [n] give [changes]."""
    weighted = changes.square().mean(dim=2) * weights.square()  # [changes, n]
    return weighted.mean(dim=1) if changes.shape[1] else weighted.new_zeros(len(changes))


def rounding_squares(rows: Tensor) -> tuple[Tensor, ...]:
    """Returns the squared errors of plain rounding by width, [n, groups] each; those of 8 bits follow from 4."""
    coarse = [_group_squares(plainly_rounded(rows, width) - rows) for width in WIDTHS[:-1]]
    return (*coarse, coarse[-1] * (squared_step(WIDTHS[-1]) / squared_step(WIDTHS[-2])))


def squared_step(width: int) -> float:
    """Returns the square of the step of plain rounding, over that of one bit."""
    return float((2**width - 1) ** -2)


def plainly_rounded(rows: Tensor, width: int) -> Tensor:
    """Returns rows float32 [n, d] rounded to even steps from the least to the largest weight of each group of 64."""
    groups = rows.reshape(-1, GROUP)
    low, high = groups.aminmax(dim=1, keepdim=True)
    step = ((high - low) / (2**width - 1)).clamp(min=torch.finfo(torch.float32).tiny)
    rounded: Tensor = ((groups - low) / step).round_().mul_(step).add_(low)
    return rounded.view(rows.shape)


def _group_squares(errors: Tensor) -> Tensor:
    return errors.square().view(len(errors), -1, GROUP).sum(dim=2)


def format_ratios(
    matrices: Sequence[Tensor | None],
    moments: Sequence[Tensor | None],
    formats: Sequence[tuple[plans.Quantizer, plans.PartFormat]],
) -> Tensor:
    """Returns the losses in some formats over those of plain rounding at the same width: float32 [3, formats].

    Args:    matrices: rows of gate, up and down, float32 [n, d].   moments: the cost of a squared error of these rows,
             float32 [n, groups] (`ExpertGradients`).
    """
    ratios = torch.ones(len(specs.MATRICES), len(formats))
    for rows, costs, row in zip(matrices, moments, ratios, strict=True):
        if rows is None or costs is None:
            continue
        base = dict(zip(WIDTHS, (float((costs * squares).sum()) for squares in rounding_squares(rows)), strict=True))
        for idx, (quantizer, part) in enumerate(formats):
            errors = Rounding(quantizer, part.group, part.scale_bits)(rows, part.width) - rows
            if base[part.width] > 0:
                row[idx] = float((costs * _group_squares(errors)).sum()) / base[part.width]
    return ratios


def first_neurons(expert: model.Expert, number: int) -> list[model.NeuronBlock]:
    """Returns at most `number` of an expert's neurons, the first ones, in blocks."""
    blocks: list[model.NeuronBlock] = []
    for block in expert.blocks():
        blocks.append(block.mapped(operator.itemgetter(slice(number))))
        number -= len(block.up)
        if number <= 0:
            break
    return blocks


def ratios_of_widths(ratios: forward.Array, num_cols: int) -> forward.Array:
    """Returns, from ratios [3, F], those of groups of 64 with 16-bit scales at `WIDTHS`: [3, 4]."""
    parts = quantized_formats(num_cols)
    return ratios[:, [parts.index(plans.part_format(width, GROUP)) for width in WIDTHS]]


class RoundedDense(forward.DerivedWeights):
    """The weights of `source` with these dense matrices at `width`; rows are rounded each time they are read."""

    def __init__(self, source: model.Weights, roles: Collection[str], width: int, rounding: Rounder) -> None:
        super().__init__(source)
        self._roles = frozenset(roles)
        self._width = width
        self._rounding = rounding

    def matrix(self, role: str) -> DenseMatrix:
        """Returns a dense matrix, rounded if it is one of the roles."""
        matrix = super().matrix(role)
        return _RoundedMatrix(matrix, self._width, self._rounding) if role in self._roles else matrix


class _RoundedMatrix:
    def __init__(self, matrix: DenseMatrix, width: int, rounding: Rounder) -> None:
        self._matrix = matrix
        self._width = width
        self._rounding = rounding
        self.num_rows, self.num_cols = matrix.num_rows, matrix.num_cols

    def rows(self, start: int, stop: int) -> Tensor:
        return self._rounding(self._matrix.rows(start, stop), self._width)


class RoundedExperts(forward.DerivedWeights):
    """The weights of `source` with all routed experts at `width`; blocks are rounded each time they are read."""

    def __init__(self, source: model.Weights, width: int, rounding: Rounder) -> None:
        super().__init__(source)
        self._width = width
        self._rounding = rounding

    def expert(self, layer_idx: int, expert: int) -> model.Expert:
        """Returns an expert with its matrices rounded."""
        return _RoundedExpert(super().expert(layer_idx, expert), self._width, self._rounding)


class _RoundedExpert:
    def __init__(self, expert: model.Expert, width: int, rounding: Rounder) -> None:
        self._expert = expert
        self._width = width
        self._rounding = rounding

    def blocks(self) -> Iterator[model.NeuronBlock]:
        for block in self._expert.blocks():
            gate = None if block.gate is None else self._rounding(block.gate, self._width)
            up, down = (self._rounding(rows, self._width) for rows in (block.up, block.down))
            yield replace(block, gate=gate, up=up, down=down)

    def down_bias(self) -> Tensor | None:
        return self._expert.down_bias()


def roundable_roles(spec: specs.ModelSpec, layer: int | None) -> tuple[str, ...]:
    """Returns the dense matrices of a layer, or of no layer for None, that a plan may quantize in groups of 64."""
    prefix = "" if layer is None else f"layers.{layer}."
    return tuple(
        role.name
        for role in specs.dense_roles(spec)
        if role.quantizable and role.shape[1] % 64 == 0
        if (role.name.startswith(prefix) if layer is not None else not role.name.startswith("layers."))
    )


# Groups with bits of scales: short groups have many scales, of one byte. They help affine codes more than a trellis.
_TRELLIS_GROUPS = ((plans.ROW_GROUP, 16), (128, 8), (32, 8))
_AFFINE_GROUPS = ((plans.ROW_GROUP, 16), (64, 8), (32, 8))
_JUDGED_WEIGHTS = 1 << 16  # of a matrix, to judge formats on
_LEAST_ROWS, _MOST_ROWS, _LEAST_COLUMNS = 32, 128, 128
_ANCHOR_BITS = 2
_CODECS = ("affine", "trellis")
_LEAST_ERROR = 1e-30
_COLUMN_STEP = 128  # the longest group


def calibrated_formats(num_cols: int) -> tuple[plans.PartFormat, ...]:
    """Returns the formats in which the calibrated quantizer is measured, for such rows: trellises, then affine."""
    every = (
        *(plans.trellis_format(width, *group) for width in plans.TRELLIS_WIDTHS for group in _TRELLIS_GROUPS),
        *(plans.part_format(width, *group) for width in WIDTHS for group in _AFFINE_GROUPS),
    )
    return tuple(part for part in every if part.group < num_cols and plans.format_fault(part, num_cols) is None)


def base_width(part: plans.PartFormat) -> int:
    """Returns the width of the plain rounding that a calibrated format is compared with: the least with its bits."""
    return min(width for width in WIDTHS if width >= part.bits)


def judged_rows(num_cols: int, num_neurons: int) -> int:
    """Returns on how many neurons gate and up are judged."""
    return min(max(_JUDGED_WEIGHTS // num_cols, _LEAST_ROWS), _MOST_ROWS, num_neurons)


def judged_columns(num_cols: int, num_neurons: int) -> int:
    """Returns on how many columns of `BLOCK_NEURONS` neurons down is judged."""
    columns = _JUDGED_WEIGHTS // min(num_neurons, quantize.BLOCK_NEURONS) // _COLUMN_STEP * _COLUMN_STEP
    return min(max(columns, _LEAST_COLUMNS), num_cols)


def calibrated_anchor(formats: Sequence[plans.PartFormat]) -> plans.PartFormat:
    """Returns the calibrated format by which a layer's others may be scaled: the first of those nearest to 2 bits."""
    return min(filter(quantize.needs_inputs, formats), key=lambda part: abs(part.bits - _ANCHOR_BITS))


def measured_formats(formats: Sequence[plans.PartFormat]) -> tuple[plans.PartFormat, ...]:
    """Returns the calibrated formats whose errors are measured; those of the others lie between them.

    Meaning: of each codec the fewest and the most bits, and the anchor's; of a trellis shorter groups only with the
             anchor's bits; all formats that need no inputs.
    """
    anchor = calibrated_anchor(formats)
    bits = {codec: [p.bits for p in formats if p.codec == codec and quantize.needs_inputs(p)] for codec in _CODECS}

    def is_measured(part: plans.PartFormat) -> bool:
        if not quantize.needs_inputs(part) or part.bits == anchor.bits:
            return True
        return part.bits in (min(bits[part.codec]), max(bits[part.codec])) and (
            part.codec == "affine" or part.group == plans.ROW_GROUP
        )

    return tuple(filter(is_measured, formats))


def calibrated_ratios(
    expert: model.Expert,
    function: specs.NeuronFunction,
    x: Tensor,
    weights: Tensor,
    tokens: quantize.ExpertTokens,
    formats: Sequence[plans.PartFormat],
) -> Tensor:
    """Returns the errors [3, formats] of the calibrated quantizer over those of plain rounding at the `base_width`.

    Plain rounding's are the geometric mean of those at 2, 3 and 4 bits in proportion to the squared step: at one width
    alone a few weights may decide them. If a format needs inputs, the plain rows of down that it repeats are exact.
    Between `measured_formats` the logarithm of an error changes evenly with its bits.
    Args:    x, weights: tokens of the expert to judge on, and their router weights.   tokens: others, to calibrate on.
    """
    judged = _Judged.of(expert, function, x)
    calibration = _BlockCalibration(tokens, function)
    base = {
        repeats: _step_error([judged.errors(judged.plain(width, repeats, calibration), weights) for width in _STEPS])
        for repeats in {quantize.needs_inputs(part) for part in formats}
    }
    with torch_threads(1):
        found = {part: judged.errors(judged.rounded(part, calibration), weights) for part in measured_formats(formats)}
    measured = torch.stack([_between(part, found) for part in formats], dim=1)
    plain = torch.stack([base[quantize.needs_inputs(part)] * squared_step(base_width(part)) for part in formats], dim=1)
    return torch.where(plain > 0, measured / plain.clamp(min=torch.finfo(torch.float32).tiny), 1.0)


_STEPS = WIDTHS[:-1]  # of which a mean is taken: errors of 8 bits are small next to float32's


def _step_error(errors: Sequence[Tensor]) -> Tensor:
    """Returns the error of a step of one bit [3] from those at `_STEPS`; 0 where one is 0."""
    scaled = [each / squared_step(width) for each, width in zip(errors, _STEPS, strict=True)]
    return torch.stack(scaled).log().mean(dim=0).exp()


def _between(part: plans.PartFormat, found: dict[plans.PartFormat, Tensor]) -> Tensor:
    """Returns the errors [3] of a format from the measured ones."""
    if part in found:
        return found[part]

    def interpolated(points: list[tuple[float, Tensor]]) -> Tensor:
        bits, logarithms = zip(*sorted(points, key=lambda point: point[0]), strict=True)
        columns = torch.stack(logarithms, dim=1).tolist()  # [3, points]
        return torch.tensor([np.interp(part.bits, bits, column) for column in columns], dtype=torch.float32)

    logarithms = {p: e.cpu().clamp(min=_LEAST_ERROR).log() for p, e in found.items() if p.codec == part.codec}
    rows = {
        p.width: (p.bits, e) for p, e in logarithms.items() if p.group == plans.ROW_GROUP and quantize.needs_inputs(p)
    }
    result = interpolated(list(rows.values()))
    if part.group != plans.ROW_GROUP:
        alike = {p.width: e for p, e in logarithms.items() if (p.group, p.scale_bits) == (part.group, part.scale_bits)}
        gains = [(bits, alike[width] - error) for width, (bits, error) in rows.items() if width in alike]
        result = result + interpolated(gains)
    return result.exp().to(next(iter(found.values())).device)


class _BlockCalibration(quantize.Calibration):
    def down(self, block: model.NeuronBlock, stored: model.NeuronBlock | None = None) -> quantize.DownRows:
        assert stored is None, "errors of down do not depend on the formats of gate and up"
        if not hasattr(self, "_down"):
            self._down = super().down(block)
        return self._down


@dataclass(frozen=True, slots=True, eq=False)
class _Judged:
    """The part of an expert that formats are judged on, with its activations on tokens x float32 [n, d]."""

    x: Tensor
    function: specs.NeuronFunction
    few: model.NeuronBlock  # some neurons, for gate and up
    few_values: model.Activations
    narrow: model.NeuronBlock  # all neurons that are quantized together, with some columns of down
    narrow_values: model.Activations

    @classmethod
    def of(cls, expert: model.Expert, function: specs.NeuronFunction, x: Tensor) -> "_Judged":
        whole = joined(first_neurons(expert, quantize.BLOCK_NEURONS))
        num_neurons, num_cols = whole.up.shape
        few = whole.mapped(operator.itemgetter(slice(judged_rows(num_cols, num_neurons))))
        narrow = replace(whole, down=whole.down[:, : judged_columns(num_cols, num_neurons)].contiguous())
        few_values, narrow_values = (model.activations(x, block, function) for block in (few, narrow))
        return cls(x, function, few, few_values, narrow, narrow_values)

    def matrices(self) -> dict[specs.Matrix, Tensor]:
        rows: dict[specs.Matrix, Tensor] = {"up": self.few.up, "down": self.narrow.down}
        return rows if self.few.gate is None else {"gate": self.few.gate, **rows}

    def plain(self, width: int, repeats: bool, calibration: quantize.Calibration) -> dict[specs.Matrix, Tensor]:
        """Returns the rows plainly rounded; those of down that conversion repeats are exact if `repeats`."""
        rounded = {matrix: plainly_rounded(rows, width) for matrix, rows in self.matrices().items()}
        if repeats:
            down = self.narrow.down
            exact = calibration.down(self.narrow.mapped(Tensor.cpu)).repeated(quantize.usual_repeats(len(down)))
            rounded["down"][exact] = down[exact]
        return rounded

    def rounded(self, part: plans.PartFormat, calibration: quantize.Calibration) -> dict[specs.Matrix, Tensor]:
        formats = plans.ExpertFormat(None if self.few.gate is None else part, part, part)
        decoded = dict[specs.Matrix, Tensor]()
        for matrix, weights in self.matrices().items():
            block, num_cols = self.narrow if matrix == "down" else self.few, weights.shape[1]
            quantizer = quantize.ExpertQuantizer(formats, calibration, num_cols)
            repeats = quantize.usual_repeats(len(weights)) if matrix == "down" and quantize.needs_inputs(part) else 0
            rows = decode_part(part, num_cols, quantizer.rows(matrix, block.mapped(Tensor.cpu), repeats=repeats))
            if repeats:
                second = rows[len(weights) :]
                rows = rows[: len(weights)].index_add(0, torch.tensor(quantizer.repeated), second)
            decoded[matrix] = rows.to(self.x.device)
        return decoded

    def errors(self, rounded: dict[specs.Matrix, Tensor], weights: Tensor) -> Tensor:
        """Returns the mean squared change of the output by each matrix alone, float32 [3]; 0 for a missing matrix."""
        squares = self.x.new_zeros(len(specs.MATRICES))
        for idx, matrix in enumerate(specs.MATRICES):
            if matrix in rounded:
                few = matrix != "down"
                block, values = (self.few, self.few_values) if few else (self.narrow, self.narrow_values)
                change = self.x.new_zeros((len(self.x), block.down.shape[1]))
                add_change(matrix, rounded[matrix], block, values, self.x, self.function, change)
                squares[idx] = mean_square(change[None], weights)[0]
        return squares


def joined(blocks: list[model.NeuronBlock]) -> model.NeuronBlock:
    """Returns consecutive blocks as one."""

    def joined(parts: list[Tensor | None]) -> Tensor | None:
        tensors = [part for part in parts if part is not None]
        return torch.cat(tensors) if tensors else None

    up, down = torch.cat([block.up for block in blocks]), torch.cat([block.down for block in blocks])
    gate, gate_bias = joined([block.gate for block in blocks]), joined([block.gate_bias for block in blocks])
    return model.NeuronBlock(gate, up, down, gate_bias, joined([block.up_bias for block in blocks]))
