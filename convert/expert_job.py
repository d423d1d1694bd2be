"""One item's bytes: reads what it needs of the source, quantizes, lays out. Runs in a worker thread; writes nothing."""

from collections.abc import Callable, Iterator
from functools import partial
from threading import Event

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.calib import RowQuantizer, UnholdableError, check_finite
from moe_pack.convert.recipe import Recipe
from moe_pack.formats import (
    Checkpoint,
    CheckpointError,
    ExpertLayout,
    Item,
    Matrix,
    RowLayout,
    SourceMatrix,
    seal_rows,
    write_rows,
)
from moe_pack.runtime import read_rows, read_vector, weights_dtype

_ROWS_AT_ONCE = 512  # rows of a matrix in memory at once, a multiple of every quantizer block


class StoppedError(Exception):
    """The conversion is ending: whoever waits for this item no longer does."""


def item_bytes(recipe: Recipe, item: Item, stop: Event) -> NDArray[np.uint8]:
    """All bytes of a dense tensor or of an expert's extent: u8 [item.num_bytes].

    Raises:  CheckpointError for a weight that is no number, or that the plan's codec cannot hold;
             StoppedError soon after `stop` is set.
    """
    return _dense_bytes(recipe, item, stop) if item.kind == "dense" else _expert_bytes(recipe, item, stop)


def job_bytes(checkpoint: Checkpoint, item: Item) -> int:
    """What `item_bytes` holds at its peak, blocks apart: the item, and what lies across of an expert, transposed."""
    if item.kind != "expert":
        return item.num_bytes
    matrices = checkpoint.spec.expert.matrices
    sources = [checkpoint.expert_source(item.layer, item.expert, matrix) for matrix in matrices]
    across = [source for source in sources if source.neurons == "columns"]
    return item.num_bytes + sum(s.num_rows * s.num_cols * weights_dtype(checkpoint, s).itemsize for s in across)


def _next_rows(num_rows: int, stop: Event) -> Iterator[tuple[int, int]]:
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        if stop.is_set():
            raise StoppedError
        yield start, min(start + _ROWS_AT_ONCE, num_rows)


def _dense_bytes(recipe: Recipe, item: Item, stop: Event) -> NDArray[np.uint8]:
    checkpoint, layout = recipe.checkpoint, recipe.layout
    dense = next(dense for dense in layout.dense if dense.role.name == item.role)
    source = checkpoint.dense_source(item.role)
    num_rows = source.num_rows
    out = np.empty((num_rows, item.num_bytes // num_rows), np.uint8)
    rows, quantizer = dense.rows, None
    if rows is not None:
        quantizer = RowQuantizer(rows.parts[0].format, rows.num_cols, recipe.plan.quantizer)
    for first, end in _next_rows(num_rows, stop):
        weights = _checked(checkpoint, source, first, end)
        if quantizer is None or rows is None:
            out[first:end] = weights.view(torch.uint8).view(end - first, -1).numpy()
        else:
            section = _encode(quantizer, weights, partial(_neuron_place, checkpoint, source, first))
            write_rows(rows, {"weight": section}, out[first:end])
    return out.reshape(-1)


def _expert_bytes(recipe: Recipe, item: Item, stop: Event) -> NDArray[np.uint8]:
    """An extent, its neurons read and quantized in the source's order whatever the stored one is.

    So a neuron's bytes are the same in every order, though hqq solves some rows together, and no order costs memory.
    """
    checkpoint, layout = recipe.checkpoint, recipe.layout
    expert = layout.experts[item.layer][item.expert]
    formats = recipe.plan.experts[item.layer][item.expert]
    d, f = layout.spec.hidden_size, layout.spec.expert.intermediate_size
    sources = {m: checkpoint.expert_source(item.layer, item.expert, m) for m in layout.spec.expert.matrices}
    quantizers = {m: RowQuantizer(part, d, recipe.plan.quantizer) for m in sources if (part := formats.of(m))}
    across = {m: _transposed(checkpoint, s, stop) for m, s in sources.items() if s.neurons == "columns"}
    biases = {m: _bias(checkpoint, item, m) for m in layout.spec.expert.bias}
    extent = np.zeros(item.num_bytes, np.uint8)
    if expert.extra is not None:  # the bias of down, no neuron's: it lies behind the rows
        extra = extent[-expert.extra_bytes :].reshape(1, -1)
        extra[:, : expert.extra.crc_offset] = biases.pop("down").reshape(1, -1)
        seal_rows(expert.extra, extra)
    halves = _halves(expert, extent)
    places = _places(recipe, item)
    for first, end in _next_rows(f, stop):
        sections = {
            str(matrix): _encode(
                quantizers[matrix],
                across[matrix][first:end] if matrix in across else _checked(checkpoint, source, first, end),
                partial(_neuron_place, checkpoint, source, first),
            )
            for matrix, source in sources.items()
        }
        for matrix, bias in biases.items():
            sections[matrix] = np.concatenate((sections[matrix], bias[first:end]), axis=1)
        for rows, out in halves:
            made = np.empty((end - first, rows.row_bytes), np.uint8)
            write_rows(rows, sections, made)
            out[places[first:end]] = made
    return extent


def _halves(expert: ExpertLayout, extent: NDArray[np.uint8]) -> list[tuple[RowLayout, NDArray[np.uint8]]]:
    """Selector, where there is one, and records: their layout and their rows in the extent, u8 [f, row_bytes]."""
    records = extent[expert.selector_bytes : expert.selector_bytes + expert.records_bytes]
    halves = [(expert.records, records.reshape(expert.num_rows, -1))]
    if expert.selector is not None:
        halves.append((expert.selector, extent[: expert.selector_bytes].reshape(expert.num_rows, -1)))
    return halves


def _places(recipe: Recipe, item: Item) -> NDArray[np.intp]:
    """The row in which each of the source's neurons will lie: [f]."""
    f = recipe.layout.spec.expert.intermediate_size
    places = np.arange(f)
    if recipe.order is not None:
        places[recipe.order[item.layer, item.expert]] = np.arange(f)
    return places


def _transposed(checkpoint: Checkpoint, source: SourceMatrix, stop: Event) -> Tensor:
    """A matrix whose neurons are columns, `[d, f]`, as `[f, d]`: made some rows at a time."""
    out = torch.empty((source.num_cols, source.num_rows), dtype=weights_dtype(checkpoint, source))
    for first, end in _next_rows(source.num_rows, stop):
        out[:, first:end] = _checked(checkpoint, source, first, end).T
    return out


def _checked(checkpoint: Checkpoint, source: SourceMatrix, start: int, stop: int) -> Tensor:
    weights = read_rows(checkpoint, source, start, stop)
    check_finite(weights, checkpoint.place(source), CheckpointError, lambda row, col: source.number(start + row, col))
    return weights


def _bias(checkpoint: Checkpoint, item: Item, matrix: Matrix) -> NDArray[np.uint8]:
    """The bias of a matrix in float32, as bytes: u8 [n, 4]."""
    source = checkpoint.bias_source(item.layer, item.expert, matrix)
    values = read_vector(checkpoint, source).unsqueeze(1)
    check_finite(values, checkpoint.place(source), CheckpointError, source.number)
    return values.view(torch.uint8).numpy()


def _neuron_place(checkpoint: Checkpoint, source: SourceMatrix, first: int, neuron: int) -> str:
    """Where row `neuron`, counted from `first`, of what was encoded lies in the source."""
    across = source.neurons == "columns"
    row, col = source.number(0, first + neuron) if across else source.number(first + neuron, 0)
    return f"{checkpoint.place(source)}: {f'column {col}' if across else f'row {row}'}"


def _encode(quantizer: RowQuantizer, weights: Tensor, place: Callable[[int], str]) -> NDArray[np.uint8]:
    """The bytes of rows; `place` names the tensor and a row of these in it."""
    try:
        return quantizer.encode(weights).numpy()
    except UnholdableError as fault:
        raise CheckpointError(f"{place(fault.row)} has {fault.advice}") from fault
