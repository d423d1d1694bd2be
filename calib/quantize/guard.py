"""The guard: a calibrated expert is judged on tokens that it was not made from, against a plain rounding.

Calibration can lose on directions that were rare in its tokens. Over the judging tokens, with inputs x_t, weights s_t
and the source's activations h_t, a row of gate or up loses `sum_t s_t ((w - q) . x_t)^2`, and each row is taken from
the rounding that loses less. A block of down, D rounded to Q, loses `sum_t s_t |h_t D - g_t Q|^2`, with the activations
g_t of the stored gate and up, and is taken whole.

The plain rounding takes time and rarely wins. Its loss can be expected: the squared error of a row times the mean of
`s_t x_t^2` over columns, or times `s_t g_t^2`. It is made only where the calibrated rounding loses more than a share of
that; the share allows for the scatter of single rows.

Stored weights are judged with the inputs behind stored layers, if known. A step of gate or up towards what other inputs
miss is made only as far as it helps on the judging tokens.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_pack.calib.quantize import experts
from moe_pack.calib.quantize.gptq import square_quantizer
from moe_pack.calib.quantize.trellis import UnrepresentableError
from moe_pack.formats import ExpertFormat
from moe_pack.formats.base import json_files
from moe_pack.formats.pack.codecs import decode_part
from moe_pack.formats.parts import specs
from moe_pack.runtime import model

# The shares of its expected loss up to which a calibrated row, or block of down, is taken without a plain rounding.
_SURE_ROW, _SURE_BLOCK = 0.5, 0.9
_PIECE_ROWS = 256  # at once: bounds half a dozen copies of them


@dataclass(frozen=True, slots=True)
class ExpertLoss:
    """An expert's loss on the tokens that judge."""

    relative_error: json_files.Amount  # `sum s |y - y'|^2 / sum s |y|^2` of its outputs y, with all matrices as stored
    median_error: json_files.Amount  # the median over tokens of `|y - y'|^2 / |y|^2`
    num_tokens: json_files.Count  # that judge
    plain_gate: json_files.Count = 0  # rows taken from the plain rounding; `plain_up` too
    plain_up: json_files.Count = 0
    plain_down: json_files.Count = 0  # blocks of rows taken from it
    # The relative error of the source's weights with inputs behind stored layers; 0 if all layers are calibrated with
    # the source's inputs.
    inherited_error: json_files.Amount = 0.0

    @property
    def own_error(self) -> float:
        """The error that the expert adds to what it inherits; below 0 if it makes up for some of that."""
        return self.relative_error - self.inherited_error


class GuardedQuantizer:
    """An `ExpertQuantizer` whose matrices lose no more than plainly rounded ones on tokens that it was not made from.

    Args:    formats: of the expert.   tokens: of the expert, which are divided here (`ExpertTokens.divided`), or their
             moments. Without judging tokens nothing is compared.   function: of its neurons.
    Raises:  PlanError if a package is missing.
    """

    def __init__(
        self,
        formats: ExpertFormat,
        tokens: experts.ExpertTokens | experts.ExpertMoments,
        function: specs.NeuronFunction,
    ) -> None:
        if isinstance(tokens, experts.ExpertMoments):
            self._judging = experts.ExpertTokens(torch.zeros((0, len(tokens.inputs))), torch.zeros(0))
            self.calibration: experts.Calibration = experts.MomentCalibration(tokens, function)
        else:
            calibrating, self._judging = tokens.divided()
            self.calibration = experts.Calibration(calibrating, function)
        self._formats = formats
        self._function = function
        self._d = self._judging.inputs.shape[1]
        self._quantizer = experts.ExpertQuantizer(formats, self.calibration, self._d)
        self.matrices = self._quantizer.matrices
        self._is_judged = bool(self._judging.weights.sum(dtype=torch.float64) > 0)
        self._plain = dict.fromkeys(specs.MATRICES, 0)
        self._stored = dict[specs.Matrix, Tensor]()  # gate and up of the block, as a reader finds them
        self._outputs = torch.zeros_like(self._judging.inputs)
        self._stored_outputs = torch.zeros_like(self._judging.inputs)
        self._inherited_outputs = None if self._judging.stored is None else torch.zeros_like(self._judging.inputs)

    @property
    def repeated(self) -> list[int]:
        """The neurons of the last block of down that have a second row, rising."""
        return self._quantizer.repeated

    @torch.inference_mode()
    def rows(self, matrix: specs.Matrix, block: model.NeuronBlock, repeats: int = 0) -> Tensor:
        """Returns the bytes of one matrix of a block: of gate, of up, then of down; `repeats` as in `ExpertQuantizer`.

        Raises:  UnrepresentableError as that does.
        """
        part = self._formats.of(matrix)
        assert part is not None, f"{matrix} has no format"
        if matrix == "down":
            stored = replace(block, **self._stored)
            is_fitted = bool(self._stored) or self._judging.stored is not None
            rows = self._quantizer.rows(matrix, block, stored if is_fitted else None, repeats)
            self._stored.clear()
            return self._better_block(block, stored, rows) if self._is_judged and experts.needs_inputs(part) else rows
        weights = block.gate if matrix == "gate" else block.up
        assert weights is not None, f"an expert without {matrix} has no format for it"
        if experts.needs_inputs(part):
            weights = self._moved(weights)
            block = replace(block, gate=weights) if matrix == "gate" else replace(block, up=weights)
        rows = self._quantizer.rows(matrix, block)
        if self._is_judged and experts.needs_inputs(part):
            rows = self._better_rows(matrix, weights, rows)
        self._stored[matrix] = decode_part(part, self._d, rows)
        return rows

    def _moved(self, weights: Tensor) -> Tensor:
        """Returns rows of gate or up, moved a step towards the source's outputs if the inputs are others."""
        addition, judging = self.calibration.addition(weights), self._judging
        if addition is None or judging.stored is None or not self._is_judged:
            return weights
        missing, given = (judging.inputs - judging.stored) @ weights.T, judging.stored @ addition.T
        best = float(judging.weights @ (missing * given).sum(dim=1))  # of step times `all`: the minimum of the error
        all_of_it = float(judging.weights @ given.square().sum(dim=1))
        step = min(max(best / all_of_it, 0.0), experts.INPUT_STEP) if all_of_it > 0 else 0.0
        return weights + step * addition

    def _better_rows(self, matrix: specs.Matrix, weights: Tensor, rows: Tensor) -> Tensor:
        part, x = self._formats.of(matrix), self._judging.given
        assert part is not None
        quantizer = square_quantizer(part, self._d)
        energy = float((x.square().mean(dim=1) * self._judging.weights).sum())

        def row_losses(errors: Tensor) -> Tensor:
            return (errors @ x.T).square_() @ self._judging.weights

        for piece in _pieces(len(weights)):
            exact = weights[piece]
            losses = row_losses(exact - decode_part(part, self._d, rows[piece]))
            try:
                scales = quantizer.scales(exact)
            except UnrepresentableError:
                continue  # plain rounding cannot represent one of these rows
            unsure = (losses > _SURE_ROW * energy * quantizer.expected_errors(exact, scales)).nonzero()[:, 0]
            if not len(unsure):
                continue
            plain, rounded = quantizer.encode(exact[unsure], scales[unsure])
            better = row_losses(exact[unsure] - rounded) < losses[unsure]
            rows[piece.start + unsure[better]] = plain[better]
            self._plain[matrix] += int(better.sum())
        return rows

    def _better_block(self, block: model.NeuronBlock, stored: model.NeuronBlock, rows: Tensor) -> Tensor:
        part, weights, repeated = self._formats.down, self._judging.weights, self.repeated
        exact = model.activations(self._judging.inputs, block, self._function).h @ block.down
        h = model.activations(self._judging.given, stored, self._function).h
        squares = weights @ h.square()  # [n]
        squares[repeated] = 0  # rows that are stored twice lose next to nothing
        quantizer = square_quantizer(part, self._d)
        pieces = list(_pieces(len(block.down)))
        lost, kept = exact, float(weights @ (exact - h @ block.down).square().sum(dim=1))  # with down as it is
        expected = 0.0
        try:
            scales = [quantizer.scales(block.down[piece]) for piece in pieces]
        except UnrepresentableError:
            return rows
        for piece, of_piece in zip(pieces, scales, strict=True):
            lost = lost - h[:, piece] @ decode_part(part, self._d, rows[piece])
            expected += float(squares[piece] @ quantizer.expected_errors(block.down[piece], of_piece))
        if repeated:
            lost = lost - h[:, repeated] @ decode_part(part, self._d, rows[len(block.down) :])
        loss = float(weights @ lost.square().sum(dim=1))
        if loss <= kept + _SURE_BLOCK * expected:
            return rows
        lost, plain, missing = exact, list[Tensor](), block.down[repeated].clone()
        for piece, of_piece in zip(pieces, scales, strict=True):
            encoded, rounded = quantizer.encode(block.down[piece], of_piece)
            plain.append(encoded)
            lost = lost - h[:, piece] @ rounded
            for place, neuron in enumerate(repeated):
                if piece.start <= neuron < piece.stop:
                    missing[place] -= rounded[neuron - piece.start]
        if repeated:
            encoded, rounded = quantizer.encode(missing, quantizer.scales(missing))
            plain.append(encoded)
            lost = lost - h[:, repeated] @ rounded
        if float(weights @ lost.square().sum(dim=1)) >= loss:
            return rows
        self._plain["down"] += 1
        return torch.cat(plain)

    @torch.inference_mode()
    def judge(self, block: model.NeuronBlock, encoded: Mapping[specs.Matrix, Tensor]) -> None:
        """Adds the outputs of a block, with the `encoded` bytes of all its matrices, to those that `loss` compares."""
        if not self._is_judged:
            return
        x, given, repeated = self._judging.inputs, self._judging.given, self.repeated
        gate_part, up_part, down_part = (self._formats.of(matrix) for matrix in specs.MATRICES)
        assert up_part is not None and down_part is not None
        second = decode_part(down_part, self._d, encoded["down"][len(block.up) :]) if repeated else None
        for piece in _pieces(len(block.up)):
            exact = block.mapped(operator.itemgetter(piece))
            down = decode_part(down_part, self._d, encoded["down"][piece])
            for place, neuron in enumerate(repeated):
                if second is not None and piece.start <= neuron < piece.stop:
                    down[neuron - piece.start] += second[place]
            stored = model.NeuronBlock(
                None if gate_part is None else decode_part(gate_part, self._d, encoded["gate"][piece]),
                decode_part(up_part, self._d, encoded["up"][piece]),
                down,
                exact.gate_bias,
                exact.up_bias,
            )
            self._outputs += model.activations(x, exact, self._function).h @ exact.down
            self._stored_outputs += model.activations(given, stored, self._function).h @ stored.down
            if self._inherited_outputs is not None:
                self._inherited_outputs += model.activations(given, exact, self._function).h @ exact.down

    def loss(self, in_source: Callable[[Tensor], Tensor] = lambda outputs: outputs) -> ExpertLoss | None:
        """Returns the expert's loss by the judged blocks; None if no token judges or outputs are zero.

        Args:    in_source: returns outputs float32 [T, d] in the source's coordinates.
        """
        if not self._is_judged:
            return None
        weights = self._judging.weights.to(torch.float64)
        outputs = in_source(self._outputs).to(torch.float64)
        squares = outputs.square().sum(dim=1)
        total = float(weights @ squares)
        if not total > 0:
            return None
        lost = (in_source(self._stored_outputs).to(torch.float64) - outputs).square().sum(dim=1)
        inherited = 0.0
        if self._inherited_outputs is not None:
            given = in_source(self._inherited_outputs).to(torch.float64)
            inherited = float(weights @ (given - outputs).square().sum(dim=1)) / total
        shares = torch.where(squares > 0, lost / squares, torch.zeros_like(lost))
        # Four digits: more would differ from machine to machine.
        error, median, inherited = (
            float(f"{value:.4g}") for value in (float(weights @ lost) / total, float(shares.median()), inherited)
        )
        gate, up, down = self._plain.values()
        return ExpertLoss(error, median, len(weights), gate, up, down, inherited)


def _pieces(num_rows: int) -> Iterator[slice]:
    for first in range(0, num_rows, _PIECE_ROWS):
        yield slice(first, min(first + _PIECE_ROWS, num_rows))
