"""The quantizer `calibrated`: an expert's weights to codes by GPTQ on the tokens that the expert saw.

Rows of gate and up are quantized column by column with the Hessian of the inputs, rows of down one after another with
that of the activations. Rows of down are first fitted to the activations of the stored gate and up, so that they make
up for errors of these. Wide formats are quantized without tokens.

Repeated neurons: a few neurons decide some of an expert's outputs. These get a second row of down, which stores the
error of the first one.

Sequential calibration: an expert behind stored layers gets other inputs than in the source. It is quantized for them,
and its rows first make up for a quarter of the difference: a fit to inputs with errors shrinks outputs, and shrinkage
adds up over layers (a whole step ruins a model, with every layer's own error halved).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_pack.calib.quantize import gptq
from moe_pack.calib.quantize.gptq import damping
from moe_pack.calib.quantize.plain import RowQuantizer
from moe_pack.calib.quantize.trellis import UnrepresentableError
from moe_pack.formats.pack import plans
from moe_pack.formats.pack.codecs import decode_part
from moe_pack.formats.parts import specs
from moe_pack.runtime import model

MAX_OWN_TOKENS = 4096  # of an expert; a profile keeps as many for one of average popularity
MAX_OTHER_TOKENS = 256  # tokens of the layer that the expert did not run for
_JUDGED_STEP, _ENOUGH_JUDGED = 8, 16  # of the tokens that judge what the others have made
BLOCK_NEURONS = 1024  # quantized together: among them, later rows of down make up for the errors of earlier ones
# Columns that share a Hessian. The factor of 4,096 columns takes 64 MiB, and 256 MiB while it is computed; those of
# each half of DeepSeek-V3's 7,168 columns 49 and 196. Few runs are better: correlations across them are lost.
_MAX_COLUMNS = 4096
_PLAIN_BITS = 8  # from so many bits on, errors are too small for GPTQ to gain anything
_PIECE_ROWS = 256  # of gate and up at once: bounds half a dozen copies of them
_FIT_DAMPING = 3.0  # of rows that are fitted: times the damping of their factor
_NEURONS_A_REPEAT = 128  # more neurons cost as many bytes as they bring, by KL divergence at 2 bits
INPUT_STEP = 0.25  # the share of what other inputs miss that rows make up for. Chosen by KL divergence at 2 and 3 bits


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTokens:
    """The n tokens that an expert is calibrated on."""

    inputs: Tensor  # float32 [n, d]
    weights: Tensor  # float32 [n]: how much a squared error of the expert's output counts at each
    num_others: int = 0  # how many of them, the last ones, the expert did not run for
    # float32 [n, d]: the inputs behind the stored layers before; None if they are not known
    stored: Tensor | None = None

    @property
    def given(self) -> Tensor:
        """The inputs that the stored expert is given, float32 [n, d]."""
        return self.inputs if self.stored is None else self.stored

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "ExpertTokens":
        """Returns the same tokens with both inputs in other coordinates."""
        stored = None if self.stored is None else function(self.stored)
        return replace(self, inputs=function(self.inputs), stored=stored)

    def divided(self) -> tuple["ExpertTokens", "ExpertTokens"]:
        """Divides the tokens into those that calibrate and those that judge: every eighth of the expert's own tokens.

        If these are fewer than 16, every eighth of the others judges too. There may be none.
        """
        judges = torch.zeros(len(self.weights), dtype=torch.bool)
        num_own = len(judges) - self.num_others
        judges[_JUDGED_STEP - 1 : num_own : _JUDGED_STEP] = True
        if int(judges.sum()) < _ENOUGH_JUDGED:
            judges[num_own + _JUDGED_STEP - 1 :: _JUDGED_STEP] = True
        num_others = int(judges[num_own:].sum())

        def those(chosen: Tensor, num_others: int) -> "ExpertTokens":
            stored = None if self.stored is None else self.stored[chosen]
            return ExpertTokens(self.inputs[chosen], self.weights[chosen], num_others, stored)

        return those(~judges, self.num_others - num_others), those(judges, num_others)


def usual_repeats(num_neurons: int) -> int:
    """Returns how many of an expert's neurons have two rows by default, if codes are calibrated: 1 of 128."""
    return num_neurons // _NEURONS_A_REPEAT


def repeats_between(repeats: int, num_neurons: int, first: int, end: int) -> int:
    """Returns how many of an expert's repeated neurons are among its neurons from `first` to `end`: an equal share."""
    return repeats * end // num_neurons - repeats * first // num_neurons


def needs_inputs(part: plans.PartFormat) -> bool:
    """Returns whether the codes of a format depend on an expert's inputs."""
    return not part.keeps_source and part.bits < _PLAIN_BITS


def calibration_bytes(hidden_size: int, intermediate_size: int, other_bytes: int = 0, repeats: int = 0) -> int:
    """Returns the most memory that a `Calibration` and an `ExpertQuantizer` of it take, with one block of neurons.

    Args:    other_bytes: the caller's own, while rows are quantized but not while `Calibration.runs` are computed.
             repeats: of an expert.
    """
    d, num_tokens = hidden_size, MAX_OWN_TOKENS + MAX_OTHER_TOKENS
    neurons = min(intermediate_size, BLOCK_NEURONS)
    neurons += -(-neurons * repeats // intermediate_size)
    run = -(-d // -(-d // _MAX_COLUMNS))  # columns
    computing_runs = 4 * run * (d - run) + 20 * run**2  # factors of other runs; of this one the Hessian, twice float64
    factor = 4 * num_tokens * 4 * neurons + 44 * neurons**2  # of down: activations, moments, and what they solve
    fit = 4 * num_tokens * d + 24 * min(num_tokens, d) ** 2  # of gate and up: weighted inputs, and what they solve
    fitting, kept = fit + 8 * num_tokens * d, fit if num_tokens < d else 4 * d**2
    quantizing = 4 * d * (run + 6 * neurons + max(2 * neurons, 10 * _PIECE_ROWS))
    judged = num_tokens // _JUDGED_STEP
    judging = 4 * judged * (3 * d + neurons + 8 * _PIECE_ROWS)  # inputs and outputs, activations
    both_inputs = 8 * num_tokens * d
    return both_inputs + judging + max(computing_runs + fitting, kept + quantizing + factor + other_bytes)


def column_runs(num_columns: int) -> Iterator[slice]:
    """Yields the columns that share a Hessian, in `column_order`."""
    step = num_columns // -(-num_columns // _MAX_COLUMNS)
    for first in range(0, num_columns, step):
        yield slice(first, min(first + step, num_columns))


class Calibration:
    """The tokens of an expert and the factors computed from them, for any number of quantizers. Not thread-safe."""

    def __init__(self, tokens: ExpertTokens, function: specs.NeuronFunction) -> None:
        self._tokens = tokens
        self._function = function
        self._runs: tuple[gptq.ColumnRun, ...] | None = None
        self._fit: gptq.DampedFit | None = None
        self._moves: Tensor | None = None

    @property
    def runs(self) -> tuple[gptq.ColumnRun, ...]:
        """The columns of gate and up, computed on first use; they take 4 d^2 bytes."""
        if self._runs is None:
            self._runs = tuple(self._compute_runs())
        return self._runs

    def addition(self, rows: Tensor) -> Tensor | None:
        """Returns what makes up, in rows of gate or up float32 [n, d], for stored layers before; None without any."""
        tokens = self._tokens
        if tokens.stored is None:
            return None
        num_tokens, d = tokens.inputs.shape
        if num_tokens < d:
            if self._fit is None:
                self._fit = self._input_fit()
            return self._fit.addition((tokens.inputs - tokens.stored) @ rows.T).T
        if self._moves is None:  # the addition is linear in the rows: once for all of them
            self._moves = self._input_fit().addition(tokens.inputs - tokens.stored).T
        return rows @ self._moves

    def _input_fit(self) -> gptq.DampedFit:
        tokens = self._tokens
        return gptq.DampedFit(
            tokens.given, tokens.weights, _FIT_DAMPING * damping(tokens.weights, tokens.given.shape[1])
        )

    def down(self, block: model.NeuronBlock, stored: model.NeuronBlock | None = None) -> "DownRows":
        """Returns the rows of down to round in a block of n neurons.

        Meaning: fitted (`DampedFit`) to the activations of the stored gate and up, and to a share of what the inputs
                 miss.
        Args:    block: the source's.   stored: gate and up as a reader finds them; None: the source's.
        """
        tokens, function = self._tokens, self._function
        share = damping(tokens.weights, len(block.down))
        # At most four arrays [T, n] are in memory at once, three of them inside of `activations`.
        missing = None if tokens.stored is None else model.activations(tokens.inputs, block, function).h
        h = model.activations(tokens.given, block, function).h
        if stored is None:
            return DownRows(block.down, gptq.weighted_hessian(h, tokens.weights), share)
        missing = h if missing is None else missing.sub_(h).mul_(INPUT_STEP).add_(h)
        del h
        g = model.activations(tokens.given, stored, function).h
        missing.sub_(g)
        fitted = block.down + gptq.DampedFit(g, tokens.weights, _FIT_DAMPING * share).addition(missing) @ block.down
        return DownRows(fitted, gptq.weighted_hessian(g, tokens.weights), share)

    def _compute_runs(self) -> Iterator[gptq.ColumnRun]:
        d = self._tokens.given.shape[1]
        order = gptq.column_order(d)
        for columns in column_runs(d):
            hessian = gptq.weighted_hessian(self._tokens.given[:, order[columns]], self._tokens.weights)
            run = gptq.gptq_factor(hessian, damping(self._tokens.weights, len(hessian)))
            yield gptq.ColumnRun(columns, run.importance, run.factor)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMoments:
    """The mean squares of an expert's inputs float32 [d] and of its activations h float32 [f], over `num_tokens`."""

    inputs: Tensor
    hidden: Tensor
    num_tokens: float


class MomentCalibration(Calibration):
    """The calibration of an expert by the diagonals of its Hessians.

    Columns of gate and up, and rows of down, weigh by their mean squares; errors are not made up for. Blocks of down
    come in their order, each once.
    """

    def __init__(self, moments: ExpertMoments, function: specs.NeuronFunction) -> None:
        num_columns = len(moments.inputs)
        super().__init__(ExpertTokens(torch.zeros((0, num_columns)), torch.zeros(0)), function)
        self._moments = moments
        self._block: model.NeuronBlock | None = None
        self._end = 0  # of the last block of down

    def down(self, block: model.NeuronBlock, stored: model.NeuronBlock | None = None) -> "DownRows":
        """Returns the rows of the next block of down, or of the last one again, as they are."""
        if block is not self._block:
            self._block, self._end = block, self._end + len(block.down)
        squares = self._moments.hidden[self._end - len(block.down) : self._end]
        return DownRows(block.down, squares.diag(), gptq.damping_of(self._moments.num_tokens, len(squares)))

    def _compute_runs(self) -> Iterator[gptq.ColumnRun]:
        squares = self._moments.inputs[gptq.column_order(len(self._moments.inputs))]
        for columns in column_runs(len(squares)):
            own = squares[columns]
            mean, share = float(own.mean()), gptq.damping_of(self._moments.num_tokens, len(own))
            yield gptq.ColumnRun(columns, own + (share * mean if mean > 0 else 1.0), torch.eye(len(own)))


@dataclass(frozen=True, slots=True, eq=False)
class DownRows:
    """The rows of down to round in a block of n neurons."""

    weights: Tensor  # float32 [n, d]
    hessian: Tensor  # float32 [n, n], of their activations
    damping: float  # its share, for `gptq_factor`

    def repeated(self, number: int) -> list[int]:
        """Returns the neurons whose rounded rows would lose most, rising: errors are in proportion to rows."""
        squares = self.hessian.diagonal()
        lost = (squares if bool(squares.any()) else torch.ones_like(squares)) * self.weights.square().sum(dim=1)
        return sorted(lost.argsort(descending=True, stable=True)[:number].tolist())


class ExpertQuantizer:
    """Turns an expert's neurons into the bytes of its parts, block by block.

    `repeated`: the neurons of the last block of down that have a second row, rising.
    Args:    formats: of its matrices; a format that keeps the source's codes is skipped.
    Raises:  PlanError if a package is missing.
    """

    def __init__(self, formats: plans.ExpertFormat, calibration: Calibration, hidden_size: int) -> None:
        parts = {matrix: formats.of(matrix) for matrix in specs.MATRICES}
        self._parts = {matrix: part for matrix, part in parts.items() if part is not None and not part.keeps_source}
        self.matrices = tuple(self._parts)  # that are quantized
        self._calibration = calibration
        self._d = hidden_size
        self.repeated: list[int] = []
        self._plain = {
            matrix: RowQuantizer(part, hidden_size, "hqq")
            for matrix, part in self._parts.items()
            if not needs_inputs(part)
        }

    def encode(self, block: model.NeuronBlock) -> dict[specs.Matrix, Tensor]:
        """Returns the bytes of consecutive neurons, u8 [n, part_bytes] for each matrix that is quantized.

        Args:    block: `BLOCK_NEURONS` of an expert at a time, or all of a smaller one, in float32, finite, with
                 biases.
        Raises:  UnrepresentableError as `rows`.
        """
        return {matrix: self.rows(matrix, block) for matrix in self._parts}

    @torch.inference_mode()
    def rows(
        self, matrix: specs.Matrix, block: model.NeuronBlock, stored: model.NeuronBlock | None = None, repeats: int = 0
    ) -> Tensor:
        """Returns the bytes of one matrix, as `encode`.

        Args:    stored: gate and up as a reader finds them, for which down makes up; None: for the source's.   repeats:
                 of down, the number of neurons with a second row; these rows come last, for the neurons `repeated`.
        Raises:  UnrepresentableError for a row with weights too large for float16 scales.
        """
        assert len(block.up) <= BLOCK_NEURONS, f"{len(block.up)} neurons at once"
        weights = {"gate": block.gate, "up": block.up, "down": block.down}[matrix]
        assert weights is not None, f"an expert without {matrix} has no format for it"
        if matrix == "down":
            return self._down(block, stored, repeats)
        if matrix in self._plain:
            return self._plain[matrix].encode(weights)
        return self._columns(self._parts[matrix], weights)

    def _down(self, block: model.NeuronBlock, stored: model.NeuronBlock | None, repeats: int) -> Tensor:
        part = self._parts["down"]
        if "down" in self._plain:
            quantizer = self._plain["down"]
            largest = block.down.square().sum(dim=1).argsort(descending=True, stable=True)
            self.repeated = sorted(largest[:repeats].tolist())
            rows = quantizer.encode(block.down)
            lost = block.down[self.repeated] - decode_part(part, self._d, rows[self.repeated])
            return torch.cat((rows, quantizer.encode(lost))) if repeats else rows
        try:
            return self._gptq_down(part, self._calibration.down(block, stored), repeats)
        except UnrepresentableError:
            if stored is None:
                raise
        # A weight too large for its row was spread over others. Names its own row, or rounds the rows as they are.
        return self._gptq_down(part, self._calibration.down(block), repeats)

    def _gptq_down(self, part: plans.PartFormat, rows: DownRows, repeats: int) -> Tensor:
        self.repeated = rows.repeated(repeats)
        return gptq.gptq_rows(part, rows.weights, rows.hessian, rows.damping, self.repeated)

    def _columns(self, part: plans.PartFormat, weights: Tensor) -> Tensor:
        pieces = list[Tensor]()
        for first in range(0, len(weights), _PIECE_ROWS):
            try:
                pieces.append(gptq.gptq_columns(part, weights[first : first + _PIECE_ROWS], self._calibration.runs))
            except UnrepresentableError as fault:
                raise UnrepresentableError(first + fault.row, fault.advice) from fault
        return torch.cat(pieces)
