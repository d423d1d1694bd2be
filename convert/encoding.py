"""The bytes of a pack's items: `made_item` reads an item from the checkpoint, quantizes it and lays it out.

Copied codes are never decoded: `fp8` and `mxfp4` stay as they are, and each row gets the scales of its blocks. MXFP4
blocks that lie across the neurons become `e5m2`. A calibrated expert is quantized with its inputs in a profile; all
three matrices of a block of neurons are in memory at once, because the inputs of down depend on gate and up.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from threading import Event

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.calib import quantize
from moe_pack.convert import account, kept
from moe_pack.formats import families
from moe_pack.formats.base import errors, json_files
from moe_pack.formats.pack import codecs, layouts, plans
from moe_pack.formats.parts import specs
from moe_pack.runtime import model
from moe_pack.runtime.model import checkpoint_weights
from moe_pack.runtime.model.compute.matrices import TORCH_DTYPES

_ROWS_AT_ONCE = 512  # rows of a matrix in memory at once, a multiple of every quantizer block and of every scale's
_MOVED_BYTES = 16 << 20  # copied at once: rows of a table, and rows that are brought into their order
_NOT_A_NUMBER = 255  # in E8M0

Bytes2D = NDArray[np.uint8]


class StoppedError(Exception):
    """The conversion ends, so that the bytes of this item are not needed any more."""


@dataclass(frozen=True, slots=True, eq=False)
class MadeItem:
    """An item with its bytes."""

    raw: NDArray[np.uint8]  # [item.num_bytes]
    loss: quantize.ExpertLoss | None = None  # of an expert; None: not measured
    repeated: tuple[int, ...] = ()  # an expert's neurons with two rows, rising

    def note(self) -> bytes:
        """Returns the journal's note of the item."""
        if self.loss is None and not self.repeated:
            return b""
        return json_files.canonical(json_files.dump(account.ExpertNote(self.loss, self.repeated)))


def made_item(recipe: account.Recipe, item: layouts.Item, stop: Event, stored: Tensor | None = None) -> MadeItem:
    """Makes an item that is not a header.

    Args:    stored: of a sequential recipe, the inputs of the expert's layer behind the stored layers, float32 [T, d].
    Raises:  CheckpointError for a weight that is not finite, or that the plan's codec cannot represent;
             StoppedError soon after `stop` is set.
    """
    if item.kind == "unused":
        return MadeItem(recipe.checkpoint.raw(item.role, item.start, item.num_bytes))
    if item.kind == "ngrams":
        return MadeItem(_table_bytes(recipe, item, stop))
    return MadeItem(_dense_bytes(recipe, item, stop)) if item.kind == "dense" else _expert(recipe, item, stop, stored)


def job_bytes(checkpoint: families.Checkpoint, plan: plans.Plan, item: layouts.Item) -> int:
    """Returns the peak memory of `made_item` without blocks of rows: item, transposed matrices, calibration data."""
    if item.kind != "expert":
        return item.num_bytes
    formats, spec, total = plan.experts[item.layer][item.expert], checkpoint.spec, item.num_bytes
    calibrated = is_calibrated(plan, formats)
    for matrix in spec.expert.matrices:
        source, part = checkpoint.expert_source(item.layer, item.expert, matrix), formats.of(matrix)
        if source.neurons == "rows":
            continue
        num_weights = source.num_rows * source.num_cols
        if part is not None and part.keeps_source:
            total += num_weights
        if calibrated or (part is not None and not part.keeps_source):
            total += num_weights * checkpoint_weights.weights_dtype(checkpoint, source).itemsize
    if calibrated:
        return quantize.calibration_bytes(spec.hidden_size, spec.expert.intermediate_size, total, plan.repeats)
    return total


def is_calibrated(plan: plans.Plan, formats: plans.ExpertFormat) -> bool:
    """Returns whether the codes of an expert of this plan depend on its inputs."""
    parts = (formats.of(matrix) for matrix in specs.MATRICES)
    return plan.quantizer == "calibrated" and any(part is not None and quantize.needs_inputs(part) for part in parts)


def _next_rows(num_rows: int, stop: Event, at_once: int = _ROWS_AT_ONCE) -> Iterator[tuple[int, int]]:
    """Yields (first, end) of consecutive runs of rows, `at_once` rows each; raises StoppedError once `stop` is set."""
    for start in range(0, num_rows, at_once):
        if stop.is_set():
            raise StoppedError
        yield start, min(start + at_once, num_rows)


def _dense_bytes(recipe: account.Recipe, item: layouts.Item, stop: Event) -> NDArray[np.uint8]:
    checkpoint, layout = recipe.checkpoint, recipe.layout
    dense = next(dense for dense in layout.dense if dense.role.name == item.role)
    source, rows = checkpoint.dense_source(item.role), dense.rows
    row_bytes = dense.entry.num_bytes // source.num_rows
    out = np.empty((item.num_bytes // row_bytes, row_bytes), np.uint8)
    encoded = None
    if rows is not None:
        quantizer = plans.dense_quantizer(recipe.plan.quantizer)
        encoded = encoded_rows(checkpoint, source, rows.parts[0].format, quantizer, stop)
    for start, end in _next_rows(len(out), stop):
        first, last = item.first_row + start, item.first_row + end
        if encoded is None or rows is None:
            weights = _read_checked(checkpoint, source, first, last)
            out[start:end] = weights.view(torch.uint8).view(end - start, -1).numpy()
        else:
            layouts.write_rows(rows, {"weight": encoded(first, last)}, out[start:end])
    return out.reshape(-1)


def _table_bytes(recipe: account.Recipe, item: layouts.Item, stop: Event) -> NDArray[np.uint8]:
    checkpoint, table = recipe.checkpoint, recipe.layout.ngrams[item.layer]
    row_bytes, value_bytes = table.rows.row_bytes, table.rows.crc_offset
    out = np.zeros((item.num_bytes // row_bytes, row_bytes), np.uint8)
    for start, end in _next_rows(len(out), stop, max(_MOVED_BYTES // row_bytes, 1)):
        first = item.first_row + start
        raw = checkpoint.table_rows(table.layer, first, first + end - start)
        quantize.check_finite(
            torch.from_numpy(raw).view(TORCH_DTYPES[table.dtype]),
            f"n-gram table of layer {table.layer}",
            errors.CheckpointError,
            lambda row, col, first=first: (first + row, col),  # type: ignore[misc]  # bound early
        )
        out[start:end, :value_bytes] = raw
    layouts.seal_rows(table.rows, out)
    return out.reshape(-1)


def _expert(recipe: account.Recipe, item: layouts.Item, stop: Event, stored: Tensor | None) -> MadeItem:
    """Makes an extent. Neurons are read and quantized in the source's order, whatever the stored order is.

    Therefore a neuron has the same bytes in every order, although hqq solves some rows together, and no order takes
    more memory. (Sums of the layers before have other last bits in another order, which sequential calibration sees.)
    """
    expert, spec = recipe.layout.experts[item.layer][item.expert], recipe.layout.spec.expert
    rotation = quantize.LayerRotation.of(recipe.rotation, item.layer)
    biases = {m: _bias(recipe.checkpoint, item, m, rotation) for m in spec.bias}
    extent = np.zeros(item.num_bytes, np.uint8)
    if expert.extra is not None:  # the bias of down belongs to no neuron: it is behind the rows
        extra = extent[-expert.extra_bytes :].reshape(1, -1)
        extra[:, : expert.extra.crc_offset] = biases.pop("down").reshape(1, -1)
        layouts.seal_rows(expert.extra, extra)
    quantizer = _calibrated_quantizer(recipe, item, rotation, stored)
    if quantizer is None:
        made_rows = _plain_rows(recipe, item, stop, rotation)
    else:
        made_rows = _calibrated_rows(recipe, item, stop, rotation, quantizer, biases)
    records = extent[expert.selector_bytes : expert.selector_bytes + expert.records_bytes]
    halves, end = [(expert.records, records.reshape(expert.num_rows, -1))], 0
    if expert.selector is not None:
        halves.append((expert.selector, extent[: expert.selector_bytes].reshape(expert.num_rows, -1)))
    neurons = np.empty(expert.num_rows, np.intp)  # of each row, as rows are made
    for some, matrices in made_rows:
        first, end = end, end + len(some)
        neurons[first:end] = some
        sections = {
            str(m): np.concatenate((part, biases[m][some]), axis=1) if m in biases else part
            for m, part in matrices.items()
        }
        for rows, out in halves:
            layouts.write_rows(rows, sections, out[first:end])
    repeated = _place_rows(halves, neurons, None if recipe.order is None else recipe.order[item.layer, item.expert])
    loss = None if quantizer is None else quantizer.loss(rotation.outputs)
    return MadeItem(extent, loss, repeated)


def _place_rows(
    halves: list[tuple[layouts.RowLayout, NDArray[np.uint8]]],
    neurons: NDArray[np.intp],
    order: NDArray[np.uint32] | None,
) -> tuple[int, ...]:
    """Brings rows into the order of an expert, the second row of a neuron behind its first; returns the repeated ones.

    Args:    halves: the rows as they were made, in the extent.   neurons: [rows], of each row.   order: [f], of the
             neurons; None: the source's.
    """
    counts = np.bincount(neurons)
    wanted = np.arange(len(counts)) if order is None else order.astype(np.intp)
    by_neuron = neurons.argsort(kind="stable")  # first rows before second ones
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    places = np.concatenate([by_neuron[starts[n] : starts[n] + counts[n]] for n in wanted.tolist()])
    if not np.array_equal(places, np.arange(len(places))):
        for _, rows in halves:
            step = max(_MOVED_BYTES // len(rows), 1)
            for first in range(0, rows.shape[1], step):
                rows[:, first : first + step] = rows[places, first : first + step]
    return tuple(np.flatnonzero(counts > 1).tolist())


def _bias(
    checkpoint: families.Checkpoint, item: layouts.Item, matrix: specs.Matrix, rotation: quantize.LayerRotation
) -> NDArray[np.uint8]:
    """Returns the bias of a matrix in float32, as bytes: u8 [n, 4]; that of down is in the coordinates of its rows."""
    source = checkpoint.bias_source(item.layer, item.expert, matrix)
    values = model.read_vector(checkpoint, source).unsqueeze(1)
    quantize.check_finite(values, checkpoint.place(source), errors.CheckpointError, source.number)
    if matrix == "down":
        values = rotation.rows(matrix, values.view(1, -1)).view(-1, 1)
    return values.view(torch.uint8).numpy()


# The neuron of each row, [n + r], and the rows of each matrix, u8 [n + r, part_bytes]: of n consecutive neurons of the
# source, then of the r of them that have a second row.
_NeuronRows = tuple[NDArray[np.intp], dict[specs.Matrix, Bytes2D]]


def _plain_rows(
    recipe: account.Recipe, item: layouts.Item, stop: Event, rotation: quantize.LayerRotation
) -> Iterator[_NeuronRows]:
    """Yields all rows of an expert that is quantized by its weights alone, like dense matrices, or copied."""
    checkpoint, plan = recipe.checkpoint, recipe.plan
    formats, spec = plan.experts[item.layer][item.expert], checkpoint.spec.expert
    quantizer = plans.dense_quantizer(plan.quantizer)
    sources = {m: checkpoint.expert_source(item.layer, item.expert, m) for m in spec.matrices}
    parts = {
        m: encoded_rows(checkpoint, source, part, quantizer, stop, partial(rotation.rows, m))
        for m, source in sources.items()
        if (part := formats.of(m))
    }
    for first, end in _next_rows(spec.intermediate_size, stop):
        # Wide formats lose next to nothing, whichever neurons are repeated: any will do, with second rows of zeros.
        repeats = quantize.repeats_between(plan.repeats, spec.intermediate_size, first, end)
        of_row = np.array([*range(end - first), *range(repeats)], np.intp)
        encoded = {matrix: rows(first, end)[of_row] for matrix, rows in parts.items()}
        if repeats:
            zeros = torch.zeros((repeats, checkpoint.spec.hidden_size))
            encoded["down"][end - first :] = (
                quantize.RowQuantizer(formats.down, zeros.shape[1], quantizer).encode(zeros).numpy()
            )
        yield first + of_row, encoded


def _calibrated_quantizer(
    recipe: account.Recipe, item: layouts.Item, rotation: quantize.LayerRotation, stored: Tensor | None
) -> quantize.GuardedQuantizer | None:
    """Returns the quantizer of an expert whose codes depend on its inputs, else None."""
    formats = recipe.plan.experts[item.layer][item.expert]
    if not is_calibrated(recipe.plan, formats):
        return None
    profile, function = recipe.calibration, recipe.layout.spec.expert_function(item.layer)
    assert profile is not None, "a calibrated plan comes with a profile"
    if not profile.has_inputs:
        return quantize.GuardedQuantizer(formats, profile.moments(item.layer).of_expert(item.expert), function)
    with profile.inputs(item.layer) as inputs:
        tokens = inputs.of_expert(item.expert, stored=stored)
    return quantize.GuardedQuantizer(formats, tokens.mapped(rotation.inputs), function)


def _calibrated_rows(
    recipe: account.Recipe,
    item: layouts.Item,
    stop: Event,
    rotation: quantize.LayerRotation,
    quantizer: quantize.GuardedQuantizer,
    biases: Mapping[specs.Matrix, Bytes2D],
) -> Iterator[_NeuronRows]:
    """Yields all rows of an expert, those of consecutive neurons at once; in the end `quantizer` has judged them.

    Args:    biases: of gate and up, float32 as bytes, u8 [f, 4].
    """
    checkpoint, f = recipe.checkpoint, recipe.checkpoint.spec.expert.intermediate_size
    formats = recipe.plan.experts[item.layer][item.expert]
    sources = {m: checkpoint.expert_source(item.layer, item.expert, m) for m in checkpoint.spec.expert.matrices}
    if any(matrix != "down" for matrix in quantizer.matrices):
        _ = quantizer.calibration.runs  # before matrices are in memory, because computing them takes the most memory
    rows = {m: MatrixRows(checkpoint, source, stop, partial(rotation.rows, m)) for m, source in sources.items()}
    copied = {
        m: CopiedRows(checkpoint, source, part, stop)
        for m, source in sources.items()
        if (part := formats.of(m)) is not None and part.keeps_source
    }
    for first, end in _next_rows(f, stop, quantize.BLOCK_NEURONS):
        weights = {m: source.weights(first, end).to(torch.float32) for m, source in rows.items()}
        gate, up = (
            torch.from_numpy(biases[m][first:end].view(np.float32)[:, 0]) if m in biases else None
            for m in ("gate", "up")
        )
        block = model.NeuronBlock(weights.get("gate"), weights["up"], weights["down"], gate, up)
        encoded = {matrix: part_rows.rows(first, end) for matrix, part_rows in copied.items()}
        for matrix in quantizer.matrices:
            if stop.is_set():
                raise StoppedError
            number = quantize.repeats_between(recipe.plan.repeats, f, first, end) if matrix == "down" else 0
            try:
                encoded[matrix] = quantizer.rows(matrix, block, number).numpy()
            except quantize.UnrepresentableError as fault:
                raise rows[matrix].unrepresentable(first, fault) from fault
        quantizer.judge(block, {matrix: torch.from_numpy(part_rows) for matrix, part_rows in encoded.items()})
        of_row = np.array([*range(end - first), *quantizer.repeated], np.intp)
        yield first + of_row, {m: b if m == "down" else b[of_row] for m, b in encoded.items()}


class MatrixRows:
    """The weights of a matrix of the source, with a row for each output, or for each neuron of an expert.

    Args:    stop: if it is set, reading raises StoppedError.   stored: returns rows [n, num_cols] in the coordinates of
             the pack; None for the source's.
    """

    def __init__(
        self,
        checkpoint: families.Checkpoint,
        source: families.SourceMatrix,
        stop: Event,
        stored: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._stored = stored
        self._source = source
        self._across: Tensor | None = None
        self.num_cols = source.num_cols
        if source.neurons == "columns":
            dtype = checkpoint_weights.weights_dtype(checkpoint, source)
            self._across = _transposed(_read_checked, dtype, checkpoint, source, stop)
            self.num_cols = source.num_rows

    def weights(self, first: int, end: int) -> Tensor:
        """Returns some rows in a float dtype, [end - first, num_cols]; CheckpointError for one that is not finite."""
        if self._across is not None:
            rows = self._across[first:end]
        else:
            rows = _read_checked(self._checkpoint, self._source, first, end)
        return rows if self._stored is None else self._stored(rows)

    def unrepresentable(self, first: int, fault: quantize.UnrepresentableError) -> errors.CheckpointError:
        """Returns the error for a row, counted from `first`, that a format cannot represent."""
        row, col = _numbered(self._source, first)(fault.row, 0)
        line = f"column {col}" if self._across is not None else f"row {row}"
        return errors.CheckpointError(f"{self._checkpoint.place(self._source)}: {line} has {fault.advice}")


def encoded_rows(
    checkpoint: families.Checkpoint,
    source: families.SourceMatrix,
    part: plans.PartFormat,
    quantizer: plans.Quantizer,
    stop: Event,
    stored: Callable[[Tensor], Tensor] | None = None,
) -> Callable[[int, int], Bytes2D]:
    """Returns the function (first, end) that makes rows of one part of a pack: u8 [end - first, part_bytes].

    Args:    part: the format; a format that keeps codes needs a source in these codes.   quantizer: for other formats.
             stop, stored: as for `MatrixRows`; a format that keeps codes does not use `stored`.
    Raises:  (the function) CheckpointError for a weight that is not finite, or that the format cannot represent.
    """
    if part.keeps_source:
        return CopiedRows(checkpoint, source, part, stop).rows
    matrix = MatrixRows(checkpoint, source, stop, stored)
    codec = quantize.RowQuantizer(part, matrix.num_cols, quantizer)

    def rows(first: int, end: int) -> Bytes2D:
        try:
            return codec.encode(matrix.weights(first, end)).numpy()
        except quantize.UnrepresentableError as fault:
            raise matrix.unrepresentable(first, fault) from fault

    return rows


class CopiedRows:
    """A matrix whose codes are copied, as rows of one part of a pack.

    Raises:  CheckpointError for exponents that `e5m2` cannot represent; StoppedError.
    """

    def __init__(
        self, checkpoint: families.Checkpoint, source: families.SourceMatrix, part: plans.PartFormat, stop: Event
    ) -> None:
        self._checkpoint = checkpoint
        self._source = source
        self._part = part
        self._across: Tensor | None = None
        if source.neurons == "columns":
            is_fp8 = source.codec == "fp8"
            scales = checkpoint_weights.read_scales(checkpoint, source, 0, source.num_rows)
            self._across = _transposed(checkpoint_weights.read_codes, torch.uint8, checkpoint, source, stop)
            self._across_scales = (scales[::128] if is_fp8 else scales).T.contiguous()  # a row for each block
            self._block = 128 if is_fp8 else 32  # the number of neurons that share a scale
            if part.codec == "e5m2" and (span := kept.exponent_span(checkpoint, source)) > kept.E5M2_SPAN:
                raise errors.CheckpointError(
                    f"{checkpoint.place(source)}: found exponents of a column {span} apart, e5m2 represents at most "
                    f"{kept.E5M2_SPAN}; store it in bf16"
                )

    def rows(self, first: int, end: int) -> NDArray[np.uint8]:
        """Returns the bytes of some rows, u8 [end - first, part_bytes]; CheckpointError for one that is not finite."""
        source, num_cols = self._source, self._source.num_cols
        if self._across is not None:
            num_cols = source.num_rows
            codes, scales = self._across[first:end], self._across_scales[torch.arange(first, end) // self._block]
        else:
            codes = checkpoint_weights.read_codes(self._checkpoint, source, first, end)
            scales = checkpoint_weights.read_scales(self._checkpoint, source, first, end)
        part = self._part
        if part.codec == "e5m2":
            encoded = codecs.E5m2(part, num_cols).encode(*_e5m2(codes, scales))
        else:
            encoded = (codecs.Fp8 if part.codec == "fp8" else codecs.Mxfp4)(part, num_cols).encode(codes, scales)
        weights = codecs.decode_part(part, num_cols, encoded)
        quantize.check_finite(weights, self._checkpoint.place(source), errors.CheckpointError, _numbered(source, first))
        return encoded.numpy()


def _numbered(source: families.SourceMatrix, first: int) -> Callable[[int, int], tuple[int, int]]:
    """Returns the function from a place in the rows from `first` on to the place in the source's tensor."""
    number = source.number
    if source.neurons == "columns":
        return lambda row, col: number(col, first + row)
    return lambda row, col: number(first + row, col)


def _read_checked(checkpoint: families.Checkpoint, source: families.SourceMatrix, start: int, stop: int) -> Tensor:
    weights = model.read_rows(checkpoint, source, start, stop)
    quantize.check_finite(
        weights, checkpoint.place(source), errors.CheckpointError, lambda row, col: source.number(start + row, col)
    )
    return weights


def _transposed(
    read: Callable[[families.Checkpoint, families.SourceMatrix, int, int], Tensor],
    dtype: torch.dtype,
    checkpoint: families.Checkpoint,
    source: families.SourceMatrix,
    stop: Event,
) -> Tensor:
    """Returns a matrix whose neurons are columns, `[d, f]`, as `[f, d]`; reads some rows at a time."""
    out = torch.empty((source.num_cols, source.num_rows), dtype=dtype)
    for first, end in _next_rows(source.num_rows, stop):
        out[:, first:end] = read(checkpoint, source, first, end).T
    return out


def _e5m2(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Converts E2M1 codes with a scale each, u8 [n, d], to E5M2 codes with one scale a row."""
    exponents = scales.to(torch.int64)
    row = (exponents.amax(dim=1, keepdim=True) - kept.E5M2_TOP).clamp_(min=0)
    values = codecs.e2m1_values(codes).mul_(torch.pow(2.0, (exponents - row).to(torch.float32)))
    values.masked_fill_(exponents == _NOT_A_NUMBER, torch.nan)
    return values.to(torch.float8_e5m2).view(torch.uint8), row.to(torch.uint8)
