"""An expert's weights to codes, minding what they are multiplied with: the quantizer `calibrated`.

Rows of gate and up are rounded column by column (`column_rounding`), rows of down neuron by neuron
(`neuron_rounding`); what comes later makes up for the errors of what came before. Both weigh errors by second moments
over tokens of the expert (`moments`). Source: GPTQ (arXiv 2210.17323) and LDLQ of QuIP (arXiv 2307.13304) for rows that
are multiplied with inputs; for rows that are summed, and for the gain after it, ours.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_pack.calib.quantize.gptq import (
    ColumnRun,
    GptqFactor,
    damping,
    feedback,
    round_columns,
    round_neurons,
    second_moments,
)
from moe_pack.calib.quantize.plain import RowQuantizer
from moe_pack.calib.quantize.trellis import UnrepresentableError
from moe_pack.formats import MATRICES, ExpertFormat, Matrix, NeuronFunction, PartFormat
from moe_pack.runtime.model import NeuronBlock, activations

MAX_OWN_TOKENS = 2048  # of an expert, and as many as one of average popularity is kept for a profile
MAX_OTHER_TOKENS = 256  # of its layer, beside its own
BLOCK_NEURONS = 1024  # rounded together: errors of a neuron of down are made up for by later ones among them
# Columns whose moments are taken together. A factor of 4,096 takes 64 MiB, and 256 MiB while it is made; each half of
# DeepSeek-V3's 7,168 columns 49 and 196. Runs should be few: what hangs together across them is not made up for.
_MAX_COLUMNS = 4096
_PLAIN_BITS = 8  # from so many on there is next to nothing to make up for
_PIECE_ROWS = 256  # of gate and up at once, for which there are half a dozen copies


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTokens:
    """What an expert is calibrated on, n tokens. `inputs` float32 [n, d].

    `weights` float32 [n]: what a squared error of the expert's output counts at each.
    """

    inputs: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class Steps:
    """What calibrated rounding does with its tokens; all of it, but where it is measured what each is worth.

    `importance`: squared errors of columns count as their inputs' size says.   `feedback`: errors are made up for.
    """

    importance: bool = True
    feedback: bool = True


_ALL_STEPS = Steps()


def needs_inputs(part: PartFormat) -> bool:
    """Whether how rows are rounded to a format depends on inputs."""
    return not part.keeps_source and part.bits < _PLAIN_BITS


def calibration_bytes(hidden_size: int, intermediate_size: int, held: int = 0) -> int:
    """What a `Calibration` and an `ExpertQuantizer` of it hold at their peak, neurons of one block among it.

    Args:    held: what else is there when rows are rounded, but not yet when `Calibration.runs` are made.
    """
    d, num_tokens = hidden_size, MAX_OWN_TOKENS + MAX_OTHER_TOKENS
    neurons = min(intermediate_size, BLOCK_NEURONS)
    run = -(-d // -(-d // _MAX_COLUMNS))  # columns
    making = 4 * run * (d - run) + 20 * run**2  # factors of other runs, and of this one moments, twice in float64
    factor = 4 * num_tokens * 3 * neurons + 20 * neurons**2  # of down: activations, and the same
    rounding = 4 * d * (run + 4 * neurons + max(2 * neurons, 10 * _PIECE_ROWS))
    return 4 * num_tokens * d + max(making, rounding + factor + held)


class Calibration:
    """What an expert is calibrated on and what follows for its columns, found once for any number of quantizers.

    For one thread at a time.

    Args:    tokens: of the expert (`ExpertInputs.of_expert`).   function: of its neurons.
    """

    def __init__(self, tokens: ExpertTokens, function: NeuronFunction, steps: Steps = _ALL_STEPS) -> None:
        self._tokens = tokens
        self._function = function
        self._steps = steps
        self._runs: tuple[ColumnRun, ...] | None = None

    @property
    def runs(self) -> tuple[ColumnRun, ...]:
        """The columns of gate and up; found when first asked for, and kept: 4 d^2 bytes."""
        if self._runs is None:
            self._runs = tuple(self._columns())
        return self._runs

    def factor(self, block: NeuronBlock) -> Tensor | None:
        """How errors of down's rows of a block of neurons move the aims of later ones; None: not at all."""
        if not self._steps.feedback:
            return None
        return self._feedback(activations(self._tokens.inputs, block, self._function).h).factor

    def _columns(self) -> Iterator[ColumnRun]:
        d = self._tokens.inputs.shape[1]
        num_runs = -(-d // _MAX_COLUMNS)
        for first in range(0, d, d // num_runs):
            inputs = self._tokens.inputs[:, first : first + d // num_runs]
            if self._steps.feedback:
                found = self._feedback(inputs)
                importance, factor = found.importance, found.factor
            else:
                squares = torch.mv(inputs.square().T, self._tokens.weights)
                share = damping(self._tokens.weights, len(squares))
                importance, factor = squares + share * squares.mean(), None
            yield ColumnRun(first, importance if self._steps.importance else torch.ones_like(importance), factor)

    def _feedback(self, values: Tensor) -> GptqFactor:
        weights = self._tokens.weights
        return feedback(second_moments(values, weights), damping(weights, values.shape[1]))


class ExpertQuantizer:
    """Turns an expert's neurons into the bytes of its parts, block by block.

    Args:    formats: of its matrices; one that keeps what the source holds is passed over.
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
        """Those that are quantized."""
        return tuple(self._parts)

    def encode(self, block: NeuronBlock) -> dict[Matrix, Tensor]:
        """The bytes of some consecutive neurons: u8 [n, part_bytes] for each matrix that is quantized.

        Args:    block: `BLOCK_NEURONS` of an expert at a time, or all of a smaller one; all three matrices in float32,
                 finite, and biases where it has them.
        Raises:  as `rows`.
        """
        return {matrix: self.rows(matrix, block) for matrix in self._parts}

    @torch.inference_mode()
    def rows(self, matrix: Matrix, block: NeuronBlock) -> Tensor:
        """One matrix of what `encode` gives; nothing of it depends on how another one is stored.

        Raises:  UnholdableError for a row whose weights float16 scales cannot express.
        """
        assert len(block.up) <= BLOCK_NEURONS, f"{len(block.up)} neurons at once"
        weights = {"gate": block.gate, "up": block.up, "down": block.down}[matrix]
        assert weights is not None, f"an expert without {matrix} has no format for it"
        if matrix in self._plain:
            return self._plain[matrix].encode(weights)
        if matrix == "down":
            return round_neurons(self._parts[matrix], weights, self._calibration.factor(block))
        return self._columns(self._parts[matrix], weights)

    def _columns(self, part: PartFormat, weights: Tensor) -> Tensor:
        made = list[Tensor]()
        for first in range(0, len(weights), _PIECE_ROWS):
            try:
                made.append(round_columns(part, weights[first : first + _PIECE_ROWS], self._calibration.runs))
            except UnrepresentableError as fault:
                raise UnrepresentableError(first + fault.row, fault.advice) from fault
        return torch.cat(made)
