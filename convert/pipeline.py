"""The conversion: a checkpoint and a plan become a pack, item by item, several at once, in bounded memory.

An item (an expert, or a piece of the dense part) gets its bytes in a worker thread: `made_item` reads the source,
quantizes and lays out; `EarlierPack` copies the bytes from a pack of the same checkpoint if both plans store the item
in the same way. `write_pack` writes items in one order, whatever the number of workers.

Workers are threads: reading, torch and digests release the interpreter, and a process that is killed at any moment
leaves no other process that could still write.
"""

import hashlib
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from threading import Event
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.calib import quantize
from moe_pack.calib.profile import Profile
from moe_pack.convert import matrix_bytes
from moe_pack.convert.account import PackRecord, Recipe, check_calibration, check_order, recipe_account
from moe_pack.convert.options import MEMORY_BYTES
from moe_pack.convert.plan.rotation import check_rotation, same_rotation, with_rotation
from moe_pack.convert.rounding import note_of, read_rounding
from moe_pack.convert.sequential import StoredInputs
from moe_pack.formats import Pack
from moe_pack.formats.base import commands, errors
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack import layouts, manifests, plans
from moe_pack.formats.pack.writer import PackWriter, State, Step, digests_of
from moe_pack.formats.parts import specs
from moe_pack.runtime import give_back_large_at_once
from moe_pack.runtime.model import read_vector
from moe_pack.runtime.model.matrices import TORCH_DTYPES


class EarlierPack:
    """An earlier pack of the same checkpoint, and the items of a recipe that it contains. Owns the open pack.

    It contains an expert if selector kind, quantizer, all formats, the neuron order and the layer's rotation are the
    same, and a dense tensor if format and quantizer are the same. Of a sequential recipe, the layers before must be the
    same too, and all dense tensors. It contains nothing if the account of the source or a package version differs. It
    does not check that the source's weights are the same, nor that it was calibrated likewise: the caller made it.
    Raises:  PackError if the folder is not a valid pack.
    """

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self._pack = Pack(folder)
        self._recipe = recipe
        manifest, origin = self._pack.manifest, recipe_account(recipe).origin
        has_same_source = (
            self._pack.read_file(manifests.SOURCE_FILE).tobytes() == origin.source
            and manifest.model == recipe.layout.spec
        )
        made_alike = (manifest.made_with, manifest.quantizer) == (origin.made_with, recipe.plan.quantizer)
        self._is_usable = has_same_source and made_alike
        self._order = self._pack.read_order() if self._is_usable else None
        self._dense = {dense.role.name: dense for dense in self._pack.layout.dense}
        self._checked: set[str] = set()
        rounding = read_rounding(self._pack)
        self._losses = None if rounding is None else rounding.experts
        self._same_layers = self._count_same_layers() if self._is_usable and recipe.is_sequential else None

    def __enter__(self) -> "EarlierPack":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the earlier pack."""
        self._pack.close()

    def contains(self, item: layouts.Item) -> bool:
        """Returns whether the item's bytes are in the pack."""
        if not self._is_usable:
            return False
        if item.kind in ("unused", "ngrams"):
            return True
        return self._contains_dense(item.role) if item.kind == "dense" else self._contains_expert(item)

    def made_item(self, item: layouts.Item) -> "MadeItem":
        """Returns an item of the pack with its bytes, in their own memory, checked against their digest.

        Raises:  PackError if they are damaged.
        """
        assert self.contains(item), item
        if item.kind == "unused":
            return MadeItem(self._unused_bytes(item))
        if item.kind == "ngrams":
            return MadeItem(self._table_bytes(item))
        if item.kind == "dense":
            return MadeItem(self._dense_bytes(item))
        loss = None if self._losses is None else self._losses[item.layer][item.expert]
        assert self._order is not None, "the earlier pack is usable"
        order = self._order[item.layer, item.expert]
        return MadeItem(self._expert_bytes(item), loss, tuple(np.sort(order[1:][order[1:] == order[:-1]]).tolist()))

    def _expert_bytes(self, item: layouts.Item) -> NDArray[np.uint8]:
        raw = self._pack.read_extent(item.layer, item.expert)
        if hashlib.sha256(raw.data).digest() != self._pack.index.sha256[item.layer, item.expert].tobytes():
            raise errors.PackError(
                f"{self._pack.folder}: {item.file}: expert {item.expert}: SHA-256 does not match its bytes"
            )
        return raw

    def _count_same_layers(self) -> int:
        """Returns how many of the first MoE layers are as the recipe stores them; 0 if a dense tensor is not."""
        if not all(self._contains_dense(dense.role.name) for dense in self._recipe.layout.dense):
            return 0
        num_experts = self._recipe.layout.spec.router.num_experts
        layers = range(len(self._recipe.layout.spec.moe_layers))
        same = (all(self._stores_alike((layer_idx, e)) for e in range(num_experts)) for layer_idx in layers)
        return sum(1 for _ in takewhile(bool, same))

    def _contains_expert(self, item: layouts.Item) -> bool:
        has_same_inputs = self._same_layers is None or item.layer <= self._same_layers
        return has_same_inputs and self._stores_alike((item.layer, item.expert))

    def _stores_alike(self, place: tuple[int, int]) -> bool:
        recipe = self._recipe
        assert self._order is not None, "the earlier pack is usable"
        order = self._order[place]
        order = order[np.append(True, order[1:] != order[:-1])]  # without second rows
        expected = np.arange(len(order), dtype=np.uint32) if recipe.order is None else recipe.order[place]
        formats = self._pack.index.experts[place[0]][place[1]]
        same_kind = self._pack.manifest.selector == recipe.plan.selector
        same_kind = same_kind and same_rotation(self._pack.rotation, recipe.rotation, place[0])
        return same_kind and formats == recipe.plan.experts[place[0]][place[1]] and np.array_equal(order, expected)

    def _contains_dense(self, role: str) -> bool:
        expected = next(dense for dense in self._recipe.layout.dense if dense.role.name == role)
        dense = self._dense[role]
        return (dense.dtype, dense.rows) == (expected.dtype, expected.rows)

    def _dense_bytes(self, item: layouts.Item) -> NDArray[np.uint8]:
        self._check(layouts.DENSE_FILE)
        entry = self._dense[item.role].entry
        num_rows = item.num_bytes * entry.shape[0] // entry.num_bytes
        return self._pack.read_dense(entry, item.first_row, item.first_row + num_rows)

    def _unused_bytes(self, item: layouts.Item) -> NDArray[np.uint8]:
        self._check(layouts.UNUSED_FILE)
        return self._pack.read_unused(item.offset, item.num_bytes)

    def _table_bytes(self, item: layouts.Item) -> NDArray[np.uint8]:
        table = self._pack.layout.ngrams[item.layer]
        rows = self._pack.read_ngrams(table, item.first_row, item.first_row + item.num_bytes // table.rows.row_bytes)
        layouts.check_rows(table.rows, rows, f"{self._pack.folder}: {layouts.ngrams_file(table.layer)}", item.first_row)
        return rows.reshape(-1)

    def _check(self, file: str) -> None:
        """Checks the digest of a whole file, the first time."""
        if file not in self._checked:
            self._pack.check_file(file)
            self._checked.add(file)


@dataclass(frozen=True, slots=True, eq=False)
class MadeItem:
    """An item's bytes, u8 [item.num_bytes].

    `loss`: of an expert; None if it was not measured.   `repeated`: an expert's neurons with two rows, rising.
    """

    raw: NDArray[np.uint8]
    loss: quantize.ExpertLoss | None = None
    repeated: tuple[int, ...] = ()

    def note(self) -> bytes:
        """Returns what the journal notes of the item, which is not in its bytes."""
        return b"" if self.loss is None and not self.repeated else note_of(self.loss, self.repeated)


def made_item(recipe: Recipe, item: layouts.Item, stop: Event, stored: Tensor | None = None) -> MadeItem:
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


def job_bytes(checkpoint: Checkpoint, plan: plans.Plan, item: layouts.Item) -> int:
    """Returns the peak memory of `made_item`: the item, transposed matrices, and the data that calibrate an expert.

    Blocks of rows are not counted.
    """
    if item.kind != "expert":
        return item.num_bytes
    formats = plan.experts[item.layer][item.expert]
    if is_calibrated(plan, formats):
        place = item.layer, item.expert
        return matrix_bytes.calibrated_bytes(checkpoint, place, formats, item.num_bytes, plan.repeats)
    parts = [(matrix, part) for matrix in checkpoint.spec.expert.matrices if (part := formats.of(matrix))]
    sources = [(checkpoint.expert_source(item.layer, item.expert, matrix), part) for matrix, part in parts]
    return item.num_bytes + sum(matrix_bytes.transposed_bytes(checkpoint, source, part) for source, part in sources)


_COPIED = ("copied", 1.0)
# The time of a weight, compared with that of a copied byte, which is read, digested and written.
_WEIGHT_COSTS: dict[plans.Quantizer, float] = {"nearest": 2.5, "absmax": 2.5, "hqq": 40.0, "calibrated": 40.0}
_TRELLIS_COST = 10.0  # times as long as other codes


def kind_of_work(recipe: Recipe, earlier: EarlierPack | None, item: layouts.Item) -> tuple[str, float]:
    """Returns the name of an item's kind of work, and the time of a byte of that kind, compared with other kinds.

    A weight takes about equally long in all widths, so that experts of different sizes are different kinds.
    """
    if earlier is not None and earlier.contains(item):
        return _COPIED
    spec = recipe.layout.spec
    if item.kind == "expert":
        formats = recipe.plan.experts[item.layer][item.expert]
        parts = [part for matrix in spec.expert.matrices if (part := formats.of(matrix))]
        costs = sum(_weight_cost(recipe.plan.quantizer, part) for part in parts)
        cost = costs * spec.expert.source_size * spec.hidden_size / item.num_bytes
        return f"experts of {item.num_bytes} bytes, {costs:g}", 1 + cost
    dense = next((dense for dense in recipe.layout.dense if dense.role.name == item.role), None)
    if item.kind != "dense" or dense is None or dense.rows is None:
        return _COPIED
    part = dense.rows.parts[0].format
    return f"dense {plans.format_text(part)}", 1 + _weight_cost(
        plans.dense_quantizer(recipe.plan.quantizer), part
    ) * 8 / part.bits


def _weight_cost(quantizer: plans.Quantizer, part: plans.PartFormat) -> float:
    if not part.is_quantized:
        return 0.0  # the source's codes are kept
    return _WEIGHT_COSTS[quantizer] * (_TRELLIS_COST if part.codec == "trellis" else 1.0)


def _dense_bytes(recipe: Recipe, item: layouts.Item, stop: Event) -> NDArray[np.uint8]:
    checkpoint, layout = recipe.checkpoint, recipe.layout
    dense = next(dense for dense in layout.dense if dense.role.name == item.role)
    source, rows = checkpoint.dense_source(item.role), dense.rows
    row_bytes = dense.entry.num_bytes // source.num_rows
    out = np.empty((item.num_bytes // row_bytes, row_bytes), np.uint8)
    encoded = None
    if rows is not None:
        quantizer = plans.dense_quantizer(recipe.plan.quantizer)
        encoded = matrix_bytes.EncodedRows(checkpoint, source, rows.parts[0].format, quantizer, stop)
    for start, end in matrix_bytes.next_rows(len(out), stop):
        first, last = item.first_row + start, item.first_row + end
        if encoded is None or rows is None:
            weights = matrix_bytes.read_checked(checkpoint, source, first, last)
            out[start:end] = weights.view(torch.uint8).view(end - start, -1).numpy()
        else:
            layouts.write_rows(rows, {"weight": encoded.rows(first, last)}, out[start:end])
    return out.reshape(-1)


def _table_bytes(recipe: Recipe, item: layouts.Item, stop: Event) -> NDArray[np.uint8]:
    """Returns rows of an n-gram table with their CRCs; some are read at a time."""
    checkpoint, table = recipe.checkpoint, recipe.layout.ngrams[item.layer]
    row_bytes, value_bytes = table.rows.row_bytes, table.rows.crc_offset
    out = np.zeros((item.num_bytes // row_bytes, row_bytes), np.uint8)
    for start, end in matrix_bytes.next_rows(len(out), stop, max(_MOVED_BYTES // row_bytes, 1)):
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


def _expert(recipe: Recipe, item: layouts.Item, stop: Event, stored: Tensor | None) -> MadeItem:
    """Makes an extent. Neurons are read and quantized in the source's order, whatever the stored order is.

    Therefore a neuron has the same bytes in every order, although hqq solves some rows together, and no order takes
    more memory. (Sums of the layers before have other last bits in another order, which sequential calibration sees.)
    """
    layout = recipe.layout
    expert, spec = layout.experts[item.layer][item.expert], layout.spec.expert
    rotation = quantize.LayerRotation.of(recipe.rotation, item.layer)
    biases = {m: _bias(recipe.checkpoint, item, m, rotation) for m in spec.bias}
    extent = np.zeros(item.num_bytes, np.uint8)
    if expert.extra is not None:  # the bias of down belongs to no neuron: it is behind the rows
        extra = extent[-expert.extra_bytes :].reshape(1, -1)
        extra[:, : expert.extra.crc_offset] = biases.pop("down").reshape(1, -1)
        layouts.seal_rows(expert.extra, extra)
    quantizer = _calibrated_quantizer(recipe, item, rotation, stored)
    halves, end = _halves(expert, extent), 0
    neurons = np.empty(expert.num_rows, np.intp)  # of each row, as rows are made
    for made in _neurons(recipe, item, biases, stop, quantizer):
        first, end = end, end + len(made.neurons)
        neurons[first:end] = made.neurons
        sections = {
            str(m): np.concatenate((part, biases[m][made.neurons]), axis=1) if m in biases else part
            for m, part in made.matrices.items()
        }
        for rows, out in halves:
            layouts.write_rows(rows, sections, out[first:end])
    repeated = _place_rows(halves, neurons, None if recipe.order is None else recipe.order[item.layer, item.expert])
    loss = None if quantizer is None else quantizer.loss(rotation.outputs)
    return MadeItem(extent, loss, repeated)


def is_calibrated(plan: plans.Plan, formats: plans.ExpertFormat) -> bool:
    """Returns whether the codes of an expert of this plan depend on its inputs."""
    parts = (formats.of(matrix) for matrix in specs.MATRICES)
    return plan.quantizer == "calibrated" and any(part is not None and quantize.needs_inputs(part) for part in parts)


def _calibrated_quantizer(
    recipe: Recipe, item: layouts.Item, rotation: quantize.LayerRotation, stored: Tensor | None
) -> quantize.GuardedQuantizer | None:
    """Returns the quantizer of an expert whose codes depend on its inputs, else None."""
    formats = recipe.plan.experts[item.layer][item.expert]
    if not is_calibrated(recipe.plan, formats):
        return None
    assert recipe.calibration is not None, "a calibrated plan comes with a profile"
    function = recipe.layout.spec.expert_function(item.layer)
    return matrix_bytes.guarded_quantizer(
        recipe.calibration, (item.layer, item.expert), formats, function, rotation, stored
    )


def _neurons(
    recipe: Recipe,
    item: layouts.Item,
    biases: Mapping[specs.Matrix, matrix_bytes.Bytes2D],
    stop: Event,
    calibrated: quantize.GuardedQuantizer | None,
) -> Iterator[matrix_bytes.NeuronRows]:
    """Yields the rows of consecutive neurons."""
    checkpoint, plan = recipe.checkpoint, recipe.plan
    formats, spec = plan.experts[item.layer][item.expert], checkpoint.spec.expert
    rotation = quantize.LayerRotation.of(recipe.rotation, item.layer)
    if calibrated is not None:
        place = item.layer, item.expert
        yield from matrix_bytes.calibrated_rows(
            checkpoint, calibrated, place, formats, biases, stop, rotation, plan.repeats
        )
        return
    quantizer = plans.dense_quantizer(plan.quantizer)  # matrices without calibration: how dense ones are quantized
    sources = {m: checkpoint.expert_source(item.layer, item.expert, m) for m in spec.matrices}
    parts = {
        m: matrix_bytes.EncodedRows(checkpoint, source, part, quantizer, stop, partial(rotation.rows, m))
        for m, source in sources.items()
        if (part := formats.of(m))
    }
    for first, end in matrix_bytes.next_rows(spec.intermediate_size, stop):
        # Wide formats lose next to nothing, whichever neurons are repeated: any will do, with second rows of zeros.
        repeats = quantize.repeats_between(plan.repeats, spec.intermediate_size, first, end)
        of_row = np.array([*range(end - first), *range(repeats)], np.intp)
        encoded = {matrix: part.rows(first, end)[of_row] for matrix, part in parts.items()}
        if repeats:
            zeros = torch.zeros((repeats, checkpoint.spec.hidden_size))
            encoded["down"][end - first :] = (
                quantize.RowQuantizer(formats.down, zeros.shape[1], quantizer).encode(zeros).numpy()
            )
        yield matrix_bytes.NeuronRows(first + of_row, encoded)


def _halves(
    expert: layouts.ExpertLayout, extent: NDArray[np.uint8]
) -> list[tuple[layouts.RowLayout, NDArray[np.uint8]]]:
    """Returns records and, if there is one, selector: the layout and the rows in the extent, u8 [f, row_bytes]."""
    records = extent[expert.selector_bytes : expert.selector_bytes + expert.records_bytes]
    halves = [(expert.records, records.reshape(expert.num_rows, -1))]
    if expert.selector is not None:
        halves.append((expert.selector, extent[: expert.selector_bytes].reshape(expert.num_rows, -1)))
    return halves


_MOVED_BYTES = 16 << 20  # copied at once while rows are brought into their order


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
    checkpoint: Checkpoint, item: layouts.Item, matrix: specs.Matrix, rotation: quantize.LayerRotation
) -> NDArray[np.uint8]:
    """Returns the bias of a matrix in float32, as bytes: u8 [n, 4]; that of down is in the coordinates of its rows."""
    source = checkpoint.bias_source(item.layer, item.expert, matrix)
    values = read_vector(checkpoint, source).unsqueeze(1)
    quantize.check_finite(values, checkpoint.place(source), errors.CheckpointError, source.number)
    if matrix == "down":
        values = rotation.rows(matrix, values.view(1, -1)).view(-1, 1)
    return values.view(torch.uint8).numpy()


@dataclass(frozen=True, slots=True)
class ItemWork:
    """The functions that make items: `convert` and `synthesize` have different ones.

    `make`: makes an item; it runs in a worker thread and ends soon after its event is set.
    `peak_bytes`: returns the memory that `make` takes for an item at most.
    `enter_layer`: called with the index of a MoE layer before its first expert is made and after all items before are
    on disk; None: experts of several layers are made at once.   `end`: called when all items are on disk.   `end_all`:
    called when the pack is sealed: no other part needs its files.   `kind`: returns the name of an item's kind of work,
    and the time of a byte of that kind, compared with others; the items of a kind take equally long for a byte.
    """

    make: Callable[[layouts.Item, Event], MadeItem]
    peak_bytes: Callable[[layouts.Item], int]
    enter_layer: Callable[[int], None] | None = None
    end: Callable[[], None] = lambda: None
    end_all: Callable[[], None] = lambda: None
    kind: Callable[[layouts.Item], tuple[str, float]] = lambda item: ("", 1.0)


_Finished = tuple[layouts.Item, MadeItem, manifests.Digests]


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """The result of a conversion.

    `resumed_bytes`: that an earlier run has written.   `written`: False if the pack was complete before, or if another
    part has sealed it.
    """

    layout: layouts.PackLayout
    resumed_bytes: int
    written: bool


def dense_dtypes(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Returns the dtype of each dense tensor in a checkpoint, in the order of `dense_roles`; F32 for packed codes."""
    sources = [checkpoint.dense_source(role.name) for role in specs.dense_roles(checkpoint.spec)]
    return tuple("F32" if source.codec == "packed" else checkpoint.dtype(source) for source in sources)


def layout_for(
    checkpoint: Checkpoint, plan: plans.Plan, rotation: manifests.RotationVectors | None = None
) -> layouts.PackLayout:
    """Returns the layout of the pack that `plan` makes of `checkpoint`: every size, before anything is written."""
    layers = () if checkpoint.spec.ngrams is None else checkpoint.spec.ngrams.layers
    table_dtypes = tuple(map(checkpoint.table_dtype, layers))
    layout = layouts.pack_layout(checkpoint.spec, plan, dense_dtypes(checkpoint), checkpoint.unused(), table_dtypes)
    return with_rotation(layout, rotation)


def convert(
    checkpoint: Checkpoint,
    plan: plans.Plan,
    folder: Path,
    workers: int,
    progress: commands.Progress = commands.NO_PROGRESS,
    on_step: Callable[[Step], None] = lambda step: None,
    order: NDArray[np.uint32] | None = None,
    earlier: Path | None = None,
    calibration: Profile | None = None,
    memory_bytes: int = MEMORY_BYTES,
    rotation: manifests.RotationVectors | None = None,
    sequential: bool = True,
    part: commands.Part | None = None,
) -> ConversionResult:
    """Writes the pack that `plan` makes of `checkpoint` into `folder`; continues where a killed run stopped.

    Args:    workers: threads, each with one torch thread (torch's own are set to one for the whole process).
             on_step: called before each change of the disk.
             order: u32 [L, E, f], `order[l, e, j]` is the source's neuron in row `j`; None: the source's order.
             earlier: a pack of the same checkpoint and, if it is calibrated, of the same profile and as sequentially;
             items that both plans store in the same way are copied from it.   calibration: the profile with whose
             inputs a calibrated plan is quantized; other plans need none.   memory_bytes: an approximate limit for all
             items that are worked on at once; one item is always allowed, however large.   rotation: the coordinates
             in which layers store their experts; None: the source's.   sequential: whether a layer of a calibrated plan
             is quantized for the inputs that it has behind the stored layers before it; never with a profile of an
             importance file, which has no inputs.   part: of several processes that call this function for the same
             folder. It makes its own items, then those that others have not made.
    Raises:  CheckpointError, ConversionError, PlanError; PackError if `earlier` is damaged. The folder then keeps the
             finished items.
    """
    if order is not None:
        check_order(order, checkpoint.spec)
    matrix_bytes.check_kept(checkpoint, plan)
    check_calibration(checkpoint, plan, calibration, rotation)
    if rotation is not None:
        check_rotation(rotation, plan, checkpoint.spec)
    layout = layout_for(checkpoint, plan, rotation)
    inputs = calibration if plan.quantizer == "calibrated" else None
    is_sequential = sequential and inputs is not None and inputs.has_inputs
    recipe = Recipe(checkpoint, plan, layout, order, inputs, rotation, is_sequential)
    account = recipe_account(recipe)
    writer = PackWriter(folder, layout, account.conversion, checkpoint.stamp(), on_step, part)
    with ExitStack() as stack:
        source_pack = None if earlier is None else stack.enter_context(EarlierPack(earlier, recipe))
        stored = StoredInputs(recipe, folder, workers, part) if recipe.is_sequential else None

        def make(item: layouts.Item, stop: Event) -> MadeItem:
            if source_pack is not None and source_pack.contains(item):
                return source_pack.made_item(item)
            if stored is None or item.kind != "expert":
                return made_item(recipe, item, stop)
            return made_item(recipe, item, stop, stored.of_layer(item.layer))

        kind = partial(kind_of_work, recipe, source_pack)
        work = ItemWork(make, lambda item: job_bytes(checkpoint, plan, item), kind=kind)
        if stored is not None:
            work = replace(work, enter_layer=stored.enter_layer, end=stored.remove, end_all=stored.remove_all)
        return write_pack(writer, layout, account, work, workers, progress, memory_bytes)


def memory_line(
    checkpoint: Checkpoint, plan: plans.Plan, layout: layouts.PackLayout, workers: int, memory_bytes: int
) -> str | None:
    """Returns a line that says that workers will wait for memory, and how much is enough; None if none will wait.

    It considers experts only, because dense tensors are few.
    """
    largest = max(job_bytes(checkpoint, plan, item) for item in layout.items() if item.kind == "expert")
    at_once = max(memory_bytes // largest, 1)
    if at_once >= workers:
        return None
    needed = -(-workers * largest >> 30)
    return (
        f"{at_once} of {workers} workers run at once, because an expert takes up to "
        f"{commands.size_text(largest)}; --memory "
        f"{needed}G is enough for all"
    )


def write_pack(
    writer: PackWriter,
    layout: layouts.PackLayout,
    account: PackRecord,
    work: ItemWork,
    workers: int,
    progress: commands.Progress = commands.NO_PROGRESS,
    memory_bytes: int = MEMORY_BYTES,
) -> ConversionResult:
    """Writes a whole pack, continues where a killed run stopped, and closes the writer.

    Args:    workers, progress, memory_bytes: as for `convert`.
    Raises:  ConversionError, and what `work` raises.
    """
    torch.set_num_threads(1)
    give_back_large_at_once()
    try:
        writer.open()
        if writer.state is State.SEALED:
            return ConversionResult(layout, writer.resumed_bytes, written=False)
        reports = _PackingReports(writer, layout, work, progress)
        for item in _written(writer, layout, reports.work, workers, memory_bytes):
            reports.advance(_item_text(item))
        progress.end()
        work.end()
        with commands.stage_of(progress, "sealing"):
            if not writer.begins_sealing() and _sealed_by_another(writer, layout):
                return ConversionResult(layout, writer.resumed_bytes, written=False)
            writer.seal(account.tables(writer), account.manifest, lambda raw: account.sidecars(raw, writer))
        work.end_all()
        return ConversionResult(layout, writer.resumed_bytes, written=True)
    except (errors.ConversionError, OSError):
        if writer.part is None or writer.state is not State.WRITING or not writer.is_sealed():
            raise
        work.end()  # the other parts have made all that this part still wanted to make, and removed their files
        return ConversionResult(layout, writer.resumed_bytes, written=False)
    finally:
        writer.close()


class _PackingReports:
    """Reports what is on the disk, whichever part has made it, by kinds of work; `work` also reports entered layers."""

    _LAYERS = "inputs of a layer"
    _LAYER_COST = 1e9  # bytes that are copied in the time that a layer takes

    def __init__(
        self, writer: PackWriter, layout: layouts.PackLayout, work: ItemWork, progress: commands.Progress
    ) -> None:
        self._writer, self._progress = writer, progress
        self._kinds = {item: work.kind(item) for item in layout.items()}
        self._number = 0  # of items that were reported, those of earlier runs too
        total, done = Counter[tuple[str, float]](), self._new()
        for item, kind in self._kinds.items():
            total[kind] += item.num_bytes
        kinds = [commands.Kind(kind[0], num_bytes, done[kind], kind[1]) for kind, num_bytes in total.items()]
        self.work = work
        if (enter := work.enter_layer) is not None:
            missing = {item.layer for item in writer.pending() if item.kind == "expert"}
            num_layers = len(layout.experts)
            kinds.append(commands.Kind(self._LAYERS, num_layers, num_layers - len(missing), self._LAYER_COST))
            self.work = replace(work, enter_layer=lambda layer_idx: self._enter(enter, layer_idx))
        resumed = (
            f", {commands.size_text(writer.resumed_bytes)} of it by an earlier run" if writer.resumed_bytes else ""
        )
        note = f"{commands.size_text(total.total())}{resumed}"
        progress.begin(commands.Stage.of_kinds("packing", kinds, note))

    def advance(self, what: str) -> None:
        """Reports the items that were written since the last report."""
        for (kind, _), num_bytes in self._new().items():
            self._progress.advance(num_bytes, what, kind)

    def _new(self) -> Counter[tuple[str, float]]:
        new = Counter[tuple[str, float]]()
        for item in self._writer.written(self._number):
            new[self._kinds[item]] += item.num_bytes
            self._number += 1
        return new

    def _enter(self, enter: Callable[[int], None], layer_idx: int) -> None:
        enter(layer_idx)
        self._progress.advance(1, f"inputs of MoE layer {layer_idx}", self._LAYERS)


def _written(
    writer: PackWriter, layout: layouts.PackLayout, work: ItemWork, workers: int, memory_bytes: int
) -> Generator[layouts.Item, None, None]:
    """Writes all items that are missing, and yields each; waits for those that other parts write."""

    def finish(items: Iterator[layouts.Item]) -> Iterator[layouts.Item]:
        with closing(_in_order(work, items, workers, memory_bytes)) as finished:
            for item, made, digests in finished:
                writer.write(item, made.raw, digests, made.note())
                del made  # otherwise it stays in memory until the next item is finished
                yield item

    for layer_idx, group in _groups(layout.items(), work):
        if all(map(writer.is_written, group)):
            continue
        if layer_idx is not None and work.enter_layer is not None:
            work.enter_layer(layer_idx)
        start, num_made = time.monotonic(), 0
        for item in finish(_left(writer, filter(writer.owns, group))):
            yield item
            num_made += 1
        # What another part works on now is written after about the time that an item takes.
        patience = (time.monotonic() - start) * workers / num_made if num_made else _FIRST_PATIENCE_S
        while missing := list(_left(writer, iter(group))):
            if _comes_from_another(writer, missing[0], patience):
                continue
            patience = 0.0  # another part is slow or gone: do not wait for its next items either
            assert writer.part is not None, "a process without other parts owns all items"
            yield from finish(_left(writer, iter(writer.part.apart(missing)[:workers])))


def _groups(items: Iterator[layouts.Item], work: ItemWork) -> Iterator[tuple[int | None, list[layouts.Item]]]:
    """Yields items that may be made at once, and the MoE layer that has to be entered before; None for others."""
    if work.enter_layer is None:
        yield None, list(items)
        return
    for layer_idx, group in itertools.groupby(items, lambda item: item.layer if item.kind == "expert" else None):
        yield layer_idx, list(group)


def _left(writer: PackWriter, items: Iterator[layouts.Item]) -> Iterator[layouts.Item]:
    """Yields the items that are still missing when they are asked for."""
    for item in items:
        writer.refresh()
        if not writer.is_written(item):
            yield item


_FIRST_PATIENCE_S = 1.0  # for an item of a part, where this part had none to make
_LEAST_WAIT_S, _MOST_WAIT_S = 0.005, 0.5  # between two looks into the journals
_SEALING_PATIENCE_S, _HASHED_BYTES_A_S = 10.0, 100e6  # sealing reads all but the experts once


def _comes_from_another(writer: PackWriter, item: layouts.Item, patience_s: float) -> bool:
    """Waits until another part has written an item; returns whether it did."""

    def is_there() -> bool:
        writer.refresh()
        return writer.is_written(item)

    return _awaited(is_there, patience_s)


def _sealed_by_another(writer: PackWriter, layout: layouts.PackLayout) -> bool:
    """Waits until the part that has begun to seal the pack is done; returns whether it was."""
    hashed = sum(item.num_bytes for item in layout.items() if item.kind != "expert")
    return _awaited(writer.is_sealed, _SEALING_PATIENCE_S + hashed / _HASHED_BYTES_A_S)


def _awaited(is_there: Callable[[], bool], patience_s: float) -> bool:
    end, wait = time.monotonic() + patience_s, _LEAST_WAIT_S
    while not is_there():
        if time.monotonic() > end:
            return False
        time.sleep(wait)
        wait = min(2 * wait, _MOST_WAIT_S)
    return True


def _in_order(
    work: ItemWork, items: Iterator[layouts.Item], workers: int, memory_bytes: int
) -> Generator[_Finished, None, None]:
    """Yields items with their bytes, in order; `workers` items are worked on, and one waits to be yielded."""
    stop = Event()

    def job(item: layouts.Item) -> _Finished:
        made = work.make(item, stop)
        return item, made, digests_of(made.raw)

    started: deque[tuple[int, Future[_Finished]]] = deque()
    total_bytes, item = 0, next(items, None)
    with ThreadPoolExecutor(workers, "convert") as pool:
        try:
            while started or item is not None:
                while item is not None and len(started) <= workers:
                    num_bytes = work.peak_bytes(item)
                    if started and total_bytes + num_bytes > memory_bytes:
                        break
                    started.append((num_bytes, pool.submit(job, item)))
                    total_bytes += num_bytes
                    item = next(items, None)
                num_bytes, future = started.popleft()
                finished = future.result()
                del future  # it refers to the bytes too
                yield finished
                del finished
                total_bytes -= num_bytes
        finally:
            stop.set()
            for _, future in started:
                future.cancel()


def _item_text(item: layouts.Item) -> str:
    if item.kind == "ngrams":
        return item.file
    return item.role if item.kind in ("dense", "unused") else f"layer {item.layer} expert {item.expert}"
