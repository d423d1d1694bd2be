"""One item's bytes: reads what it needs of the source, quantizes, lays out. Runs in a worker thread; writes nothing."""

from collections.abc import Iterator, Mapping
from threading import Event

import numpy as np
import torch
from numpy.typing import NDArray

from moe_pack.calib import check_finite, needs_inputs
from moe_pack.convert.calibrated_rows import Bytes2D, calibrated_bytes, calibrated_rows
from moe_pack.convert.part_bytes import PartBytes, held_bytes, next_rows, read_checked
from moe_pack.convert.recipe import Recipe
from moe_pack.formats import (
    MATRICES,
    Checkpoint,
    CheckpointError,
    ExpertFormat,
    ExpertLayout,
    Item,
    Matrix,
    Plan,
    RowLayout,
    dense_quantizer,
    seal_rows,
    write_rows,
)
from moe_pack.runtime import read_vector


def item_bytes(recipe: Recipe, item: Item, stop: Event) -> NDArray[np.uint8]:
    """All bytes of an item but a header: u8 [item.num_bytes].

    Raises:  CheckpointError for a weight that is no number, or that the plan's codec cannot hold;
             StoppedError soon after `stop` is set.
    """
    if item.kind == "unused":
        return recipe.checkpoint.raw(item.role, item.start, item.num_bytes)
    return _dense_bytes(recipe, item, stop) if item.kind == "dense" else _expert_bytes(recipe, item, stop)


def job_bytes(checkpoint: Checkpoint, plan: Plan, item: Item) -> int:
    """What `item_bytes` holds at its peak: the item, what lies across of an expert, transposed, and what calibrates it.

    Blocks of what is quantized plainly are not counted.
    """
    if item.kind != "expert":
        return item.num_bytes
    formats = plan.experts[item.layer][item.expert]
    if is_calibrated(plan, formats):
        return calibrated_bytes(checkpoint, (item.layer, item.expert), formats, item.num_bytes)
    parts = [(matrix, part) for matrix in checkpoint.spec.expert.matrices if (part := formats.of(matrix))]
    sources = [(checkpoint.expert_source(item.layer, item.expert, matrix), part) for matrix, part in parts]
    return item.num_bytes + sum(held_bytes(checkpoint, source, part) for source, part in sources)


def _dense_bytes(recipe: Recipe, item: Item, stop: Event) -> NDArray[np.uint8]:
    checkpoint, layout = recipe.checkpoint, recipe.layout
    dense = next(dense for dense in layout.dense if dense.role.name == item.role)
    source, rows = checkpoint.dense_source(item.role), dense.rows
    row_bytes = dense.entry.num_bytes // source.num_rows
    out = np.empty((item.num_bytes // row_bytes, row_bytes), np.uint8)
    held = None
    if rows is not None:
        quantizer = dense_quantizer(recipe.plan.quantizer)
        held = PartBytes(checkpoint, source, rows.parts[0].format, quantizer, stop)
    for start, end in next_rows(len(out), stop):
        first, last = item.first_row + start, item.first_row + end
        if held is None or rows is None:
            weights = read_checked(checkpoint, source, first, last)
            out[start:end] = weights.view(torch.uint8).view(end - start, -1).numpy()
        else:
            write_rows(rows, {"weight": held.rows(first, last)}, out[start:end])
    return out.reshape(-1)


def _expert_bytes(recipe: Recipe, item: Item, stop: Event) -> NDArray[np.uint8]:
    """An extent, its neurons read and quantized in the source's order whatever the stored one is.

    So a neuron's bytes are the same in every order, though hqq solves some rows together, and no order costs memory.
    """
    layout = recipe.layout
    expert, spec = layout.experts[item.layer][item.expert], layout.spec.expert
    biases = {m: _bias(recipe.checkpoint, item, m) for m in spec.bias}
    extent = np.zeros(item.num_bytes, np.uint8)
    if expert.extra is not None:  # the bias of down, no neuron's: it lies behind the rows
        extra = extent[-expert.extra_bytes :].reshape(1, -1)
        extra[:, : expert.extra.crc_offset] = biases.pop("down").reshape(1, -1)
        seal_rows(expert.extra, extra)
    halves = _halves(expert, extent)
    places = _places(recipe, item)
    for first, end, made_parts in _neurons(recipe, item, biases, stop):
        sections = {
            matrix: np.concatenate((made, biases[matrix][first:end]), axis=1) if matrix in biases else made
            for matrix, made in made_parts.items()
        }
        for rows, out in halves:
            made = np.empty((end - first, rows.row_bytes), np.uint8)
            write_rows(rows, {str(matrix): held for matrix, held in sections.items()}, made)
            out[places[first:end]] = made
    return extent


def is_calibrated(plan: Plan, formats: ExpertFormat) -> bool:
    """Whether how an expert of this plan is rounded depends on its inputs."""
    parts = (formats.of(matrix) for matrix in MATRICES)
    return plan.quantizer == "calibrated" and any(part is not None and needs_inputs(part) for part in parts)


def _neurons(
    recipe: Recipe, item: Item, biases: Mapping[Matrix, Bytes2D], stop: Event
) -> Iterator[tuple[int, int, dict[Matrix, Bytes2D]]]:
    """(first, end) of consecutive neurons, and the bytes of each matrix's rows."""
    checkpoint, plan = recipe.checkpoint, recipe.plan
    formats, spec = plan.experts[item.layer][item.expert], recipe.layout.spec.expert
    if is_calibrated(plan, formats):
        assert recipe.calibration is not None, "a calibrated plan comes with a profile"
        place = (item.layer, item.expert)
        yield from calibrated_rows(checkpoint, recipe.calibration, place, formats, biases, stop)
        return
    quantizer = dense_quantizer(plan.quantizer)  # of what is not calibrated, whatever it is
    sources = {m: checkpoint.expert_source(item.layer, item.expert, m) for m in spec.matrices}
    parts = {
        m: PartBytes(checkpoint, source, part, quantizer, stop)
        for m, source in sources.items()
        if (part := formats.of(m))
    }
    for first, end in next_rows(spec.intermediate_size, stop):
        yield first, end, {matrix: part.rows(first, end) for matrix, part in parts.items()}


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


def _bias(checkpoint: Checkpoint, item: Item, matrix: Matrix) -> NDArray[np.uint8]:
    """The bias of a matrix in float32, as bytes: u8 [n, 4]."""
    source = checkpoint.bias_source(item.layer, item.expert, matrix)
    values = read_vector(checkpoint, source).unsqueeze(1)
    check_finite(values, checkpoint.place(source), CheckpointError, source.number)
    return values.view(torch.uint8).numpy()
