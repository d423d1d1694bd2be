"""The quantizer `calibrated`: an expert's weights to codes by GPTQ on the tokens that the expert saw.

Rows of gate and up are quantized column by column with the Hessian of the expert's inputs, rows of down one after
another with the Hessian of its activations (`gptq` has the formulas). Wide formats are quantized without tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_pack.calib.quantize.gptq import (
    ColumnRun,
    GptqFactor,
    damping,
    gptq_columns,
    gptq_factor,
    gptq_rows,
    weighted_hessian,
)
from moe_pack.calib.quantize.plain import RowQuantizer
from moe_pack.calib.quantize.trellis import UnrepresentableError
from moe_pack.formats import MATRICES, ExpertFormat, Matrix, NeuronFunction, PartFormat
from moe_pack.runtime.model import NeuronBlock, activations

MAX_OWN_TOKENS = 2048  # of an expert; a profile keeps as many for one of average popularity
MAX_OTHER_TOKENS = 256  # tokens of the layer that the expert did not run for
BLOCK_NEURONS = 1024  # quantized together: among them, later rows of down make up for the errors of earlier ones
# Columns that share a Hessian. The factor of 4,096 columns takes 64 MiB, and 256 MiB while it is computed; those of
# each half of DeepSeek-V3's 7,168 columns 49 and 196. Few runs are better: correlations across them are lost.
_MAX_COLUMNS = 4096
_PLAIN_BITS = 8  # from so many bits on, errors are too small for GPTQ to gain anything
_PIECE_ROWS = 256  # of gate and up at once: bounds half a dozen copies of them


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTokens:
    """The n tokens that an expert is calibrated on.

    `inputs` float32 [n, d].   `weights` float32 [n]: how much a squared error of the expert's output counts at each.
    """

    inputs: Tensor
    weights: Tensor


def needs_inputs(part: PartFormat) -> bool:
    """Returns whether the codes of a format depend on an expert's inputs."""
    return not part.keeps_source and part.bits < _PLAIN_BITS


def calibration_bytes(hidden_size: int, intermediate_size: int, other_bytes: int = 0) -> int:
    """Returns the most memory that a `Calibration` and an `ExpertQuantizer` of it take, with one block of neurons.

    Args:    other_bytes: what the caller keeps in memory while rows are quantized, but not while `Calibration.runs`
             are computed.
    """
    d, num_tokens = hidden_size, MAX_OWN_TOKENS + MAX_OTHER_TOKENS
    neurons = min(intermediate_size, BLOCK_NEURONS)
    run = -(-d // -(-d // _MAX_COLUMNS))  # columns
    computing_runs = 4 * run * (d - run) + 20 * run**2  # factors of other runs; of this one the Hessian, twice float64
    factor = 4 * num_tokens * 3 * neurons + 20 * neurons**2  # of down: activations, and the same
    quantizing = 4 * d * (run + 4 * neurons + max(2 * neurons, 10 * _PIECE_ROWS))
    return 4 * num_tokens * d + max(computing_runs, quantizing + factor + other_bytes)


class Calibration:
    """The tokens of an expert and the factors computed from them, once for any number of quantizers.

    One thread at a time may use it.

    Args:    tokens: of the expert (`ExpertInputs.of_expert`).   function: of its neurons.
    """

    def __init__(self, tokens: ExpertTokens, function: NeuronFunction) -> None:
        self._tokens = tokens
        self._function = function
        self._runs: tuple[ColumnRun, ...] | None = None

    @property
    def runs(self) -> tuple[ColumnRun, ...]:
        """The columns of gate and up, computed on first use; they take 4 d^2 bytes."""
        if self._runs is None:
            self._runs = tuple(self._compute_runs())
        return self._runs

    def factor(self, block: NeuronBlock) -> Tensor:
        """Returns the factor of the rows of down in a block of n neurons, float32 [n, n]."""
        return self._gptq_factor(activations(self._tokens.inputs, block, self._function).h).factor

    def _compute_runs(self) -> Iterator[ColumnRun]:
        d = self._tokens.inputs.shape[1]
        num_runs = -(-d // _MAX_COLUMNS)
        for first in range(0, d, d // num_runs):
            run = self._gptq_factor(self._tokens.inputs[:, first : first + d // num_runs])
            yield ColumnRun(first, run.importance, run.factor)

    def _gptq_factor(self, values: Tensor) -> GptqFactor:
        weights = self._tokens.weights
        return gptq_factor(weighted_hessian(values, weights), damping(weights, values.shape[1]))


class ExpertQuantizer:
    """Turns an expert's neurons into the bytes of its parts, block by block.

    Args:    formats: of its matrices; a matrix whose format keeps the source's codes is skipped.
             calibration: of this expert.   hidden_size: weights a row.
    Raises:  PlanError if a package is missing.
    """

    def __init__(self, formats: ExpertFormat, calibration: Calibration, hidden_size: int) -> None:
        parts: list[tuple[Matrix, PartFormat | None]] = [(matrix, formats.of(matrix)) for matrix in MATRICES]
        self._parts = {matrix: part for matrix, part in parts if part is not None and not part.keeps_source}
        self._calibration = calibration
        self._plain = {
            matrix: RowQuantizer(part, hidden_size, "hqq")
            for matrix, part in self._parts.items()
            if not needs_inputs(part)
        }

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The matrices that are quantized."""
        return tuple(self._parts)

    def encode(self, block: NeuronBlock) -> dict[Matrix, Tensor]:
        """Returns the bytes of consecutive neurons, u8 [n, part_bytes] for each matrix that is quantized.

        Args:    block: `BLOCK_NEURONS` of an expert at a time, or all of a smaller one; all three matrices in float32,
                 finite, and the biases that the expert has.
        Raises:  UnrepresentableError as `rows`.
        """
        return {matrix: self.rows(matrix, block) for matrix in self._parts}

    @torch.inference_mode()
    def rows(self, matrix: Matrix, block: NeuronBlock) -> Tensor:
        """Returns the bytes of one matrix, as `encode`; they do not depend on the formats of the other matrices.

        Raises:  UnrepresentableError for a row with weights too large for float16 scales.
        """
        assert len(block.up) <= BLOCK_NEURONS, f"{len(block.up)} neurons at once"
        weights = {"gate": block.gate, "up": block.up, "down": block.down}[matrix]
        assert weights is not None, f"an expert without {matrix} has no format for it"
        if matrix in self._plain:
            return self._plain[matrix].encode(weights)
        if matrix == "down":
            return gptq_rows(self._parts[matrix], weights, self._calibration.factor(block))
        return self._columns(self._parts[matrix], weights)

    def _columns(self, part: PartFormat, weights: Tensor) -> Tensor:
        pieces = list[Tensor]()
        for first in range(0, len(weights), _PIECE_ROWS):
            try:
                pieces.append(gptq_columns(part, weights[first : first + _PIECE_ROWS], self._calibration.runs))
            except UnrepresentableError as fault:
                raise UnrepresentableError(first + fault.row, fault.advice) from fault
        return torch.cat(pieces)
