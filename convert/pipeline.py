"""The conversion: a checkpoint and a plan become a pack, item by item, several at once, in bounded memory.

An item (an expert, or a piece of the dense part) gets its bytes in a worker thread: `encoding` makes them from the
source, or `EarlierPack` copies them from a pack of the same checkpoint. `write_pack` writes items in one order,
whatever the number of workers. Workers are threads: reading, torch and digests release the interpreter, and a killed
process leaves no other process that could still write.
"""

import hashlib
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from threading import Event

import numpy as np
import torch

from moe_pack.calib.profile import profiles
from moe_pack.convert import account, encoding, kept
from moe_pack.convert.options import MEMORY_BYTES
from moe_pack.convert.plan.rotation import check_rotation, same_rotation, with_rotation
from moe_pack.convert.sequential import StoredInputs
from moe_pack.formats import Pack
from moe_pack.formats.base import commands, errors
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack import layouts, manifests, plans
from moe_pack.formats.pack.writer import PackWriter, State, Step, digests_of
from moe_pack.formats.parts import specs
from moe_pack.runtime import give_back_large_at_once


class EarlierPack:
    """An earlier pack of the same checkpoint, and the items of a recipe that it contains. Owns the open pack.

    It contains an expert if selector kind, quantizer, all formats, the neuron order and the layer's rotation are the
    same, and a dense tensor if format and quantizer are the same. If the recipe is sequential, the layers before and
    all dense tensors must be the same too. It contains nothing if the account of the source or a package version
    differs. The caller knows that the source's weights and the calibration are the same: this is not checked.
    Raises:  PackError if the folder is not a valid pack.
    """

    def __init__(self, folder: Path, recipe: account.Recipe) -> None:
        self._pack = Pack(folder)
        self._recipe = recipe
        manifest, origin = self._pack.manifest, account.recipe_account(recipe).origin
        has_same_source = (
            self._pack.read_file(manifests.SOURCE_FILE).tobytes() == origin.source
            and manifest.model == recipe.layout.spec
        )
        made_alike = (manifest.made_with, manifest.quantizer) == (origin.made_with, recipe.plan.quantizer)
        self._is_usable = has_same_source and made_alike
        self._order = self._pack.read_order() if self._is_usable else None
        self._dense = {dense.role.name: dense for dense in self._pack.layout.dense}
        self._checked: set[str] = set()
        rounding = account.read_rounding(self._pack)
        self._losses = None if rounding is None else rounding.experts
        self._same_layers = self._count_same_layers() if self._is_usable and recipe.is_sequential else None

    def __enter__(self) -> "EarlierPack":
        return self

    def __exit__(self, *_: object) -> None:
        self._pack.close()

    def contains(self, item: layouts.Item) -> bool:
        """Returns whether the item's bytes are in the pack."""
        if not self._is_usable:
            return False
        if item.kind in ("unused", "ngrams"):
            return True
        if item.kind == "dense":
            return self._contains_dense(item.role)
        has_same_inputs = self._same_layers is None or item.layer <= self._same_layers
        return has_same_inputs and self._stores_alike((item.layer, item.expert))

    def made_item(self, item: layouts.Item) -> encoding.MadeItem:
        """Returns an item of the pack in its own memory, checked against its digest; PackError if it is damaged."""
        assert self.contains(item), item
        pack = self._pack
        if item.kind == "unused":
            self._check(layouts.UNUSED_FILE)
            return encoding.MadeItem(pack.read_unused(item.offset, item.num_bytes))
        if item.kind == "ngrams":
            table, first = pack.layout.ngrams[item.layer], item.first_row
            rows = pack.read_ngrams(table, first, first + item.num_bytes // table.rows.row_bytes)
            layouts.check_rows(table.rows, rows, f"{pack.folder}: {layouts.ngrams_file(table.layer)}", first)
            return encoding.MadeItem(rows.reshape(-1))
        if item.kind == "dense":
            self._check(layouts.DENSE_FILE)
            entry = self._dense[item.role].entry
            num_rows = item.num_bytes * entry.shape[0] // entry.num_bytes
            return encoding.MadeItem(pack.read_dense(entry, item.first_row, item.first_row + num_rows))
        raw = pack.read_extent(item.layer, item.expert)
        if hashlib.sha256(raw.data).digest() != pack.index.sha256[item.layer, item.expert].tobytes():
            raise errors.PackError(
                f"{pack.folder}: {item.file}: expert {item.expert}: SHA-256 does not match its bytes"
            )
        loss = None if self._losses is None else self._losses[item.layer][item.expert]
        assert self._order is not None, "the earlier pack is usable"
        order = self._order[item.layer, item.expert]
        return encoding.MadeItem(raw, loss, tuple(np.sort(order[1:][order[1:] == order[:-1]]).tolist()))

    def _count_same_layers(self) -> int:
        """Returns how many of the first MoE layers are as the recipe stores them; 0 if a dense tensor is not."""
        if not all(self._contains_dense(dense.role.name) for dense in self._recipe.layout.dense):
            return 0
        num_experts = self._recipe.layout.spec.router.num_experts
        layers = range(len(self._recipe.layout.spec.moe_layers))
        same = (all(self._stores_alike((layer_idx, e)) for e in range(num_experts)) for layer_idx in layers)
        return sum(1 for _ in takewhile(bool, same))

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

    def _check(self, file: str) -> None:
        if file not in self._checked:
            self._pack.check_file(file)
            self._checked.add(file)


_COPIED = ("copied", 1.0)
# The time of a weight, compared with that of a copied byte, which is read, digested and written.
_WEIGHT_COSTS: dict[plans.Quantizer, float] = {"nearest": 2.5, "absmax": 2.5, "hqq": 40.0, "calibrated": 40.0}
_TRELLIS_COST = 10.0  # times as long as other codes


def kind_of_work(recipe: account.Recipe, earlier: EarlierPack | None, item: layouts.Item) -> tuple[str, float]:
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


@dataclass(frozen=True, slots=True)
class ItemWork:
    """The functions that make items: `convert` and `synthesize` have different ones."""

    # Makes an item; it runs in a worker thread and ends soon after its event is set.
    make: Callable[[layouts.Item, Event], encoding.MadeItem]
    peak_bytes: Callable[[layouts.Item], int]  # returns the memory that `make` takes for an item at most
    # Called with the index of a MoE layer before its first expert is made and after all items before are on disk; None:
    # experts of several layers are made at once.
    enter_layer: Callable[[int], None] | None = None
    end: Callable[[], None] = lambda: None  # called when all items are on disk
    end_all: Callable[[], None] = lambda: None  # called when the pack is sealed: no other part needs its files
    # Returns the name of an item's kind of work, and the time of a byte of that kind, compared with others; the items
    # of a kind take equally long for a byte.
    kind: Callable[[layouts.Item], tuple[str, float]] = lambda item: ("", 1.0)


_Finished = tuple[layouts.Item, encoding.MadeItem, manifests.Digests]


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """The result of a conversion."""

    resumed_bytes: int  # that an earlier run has written
    written: bool  # False if the pack was complete before, or if another part has sealed it


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


def large_bytes(layout: layouts.PackLayout) -> int:
    """Returns the bytes of a pack's large files, without padding."""
    return sum(item.num_bytes for item in layout.items())


def check_prepared(checkpoint: Checkpoint, plan: plans.Plan, prepared: account.Preparation) -> None:
    """Checks that a plan and its preparation fit the checkpoint; a calibrated plan needs a profile of it.

    Raises:  PlanError if not, or if layers are rotated with the moments of an importance file, which belong to the
             source's coordinates.
    """
    spec, profile, order = checkpoint.spec, prepared.calibration, prepared.order
    if order is not None:
        assert order.dtype == np.uint32, order.dtype
        shape = (len(spec.moe_layers), spec.router.num_experts, spec.expert.intermediate_size)
        if order.shape != shape:
            raise errors.PlanError(
                f"order: shape {list(order.shape)}, expected {list(shape)}: layers, experts and neurons"
            )
        if fault := manifests.order_fault(order, shape[2]):
            raise errors.PlanError(f"order: {fault}")
    kept.check_kept(checkpoint, plan)
    if plan.quantizer == "calibrated":
        if profile is None:
            raise errors.PlanError(
                "--quantizer calibrated needs a profile; give --profile, or make one with moe-pack profile"
            )
        if not profile.calibrates:
            raise errors.PlanError(
                f"--profile {profile.folder}: has no inputs of experts, which --quantizer calibrated needs; profile "
                "the model again, without --no-inputs"
            )
        if prepared.rotation is not None and not profile.has_inputs:
            raise errors.PlanError(
                f"--profile {profile.folder}: was made from an importance file, whose figures are not those of rotated "
                "experts; give --rotate off, or profile the model on text"
            )
        profiles.check_same_source(profile, checkpoint)
    if prepared.rotation is not None:
        check_rotation(prepared.rotation, plan, spec)


def convert(
    checkpoint: Checkpoint,
    plan: plans.Plan,
    folder: Path,
    workers: int,
    progress: commands.Progress = commands.NO_PROGRESS,
    on_step: Callable[[Step], None] = lambda step: None,
    prepared: account.Preparation = account.UNPREPARED,
    earlier: Path | None = None,
    memory_bytes: int = MEMORY_BYTES,
    part: commands.Part | None = None,
) -> ConversionResult:
    """Writes the pack that `plan` makes of `checkpoint` into `folder`; continues where a killed run stopped.

    Args:    workers: threads, each with one torch thread (torch's own are set to one for the whole process).
             on_step: called before each change of the disk.   earlier: as for `EarlierPack`.   memory_bytes: an
             approximate limit for all items that are worked on at once; one item is always allowed.   part: of several
             processes with this folder. It makes its own items, then those that others have not made.
    Raises:  CheckpointError, ConversionError, PlanError; PackError if `earlier` is damaged. The folder then keeps the
             finished items.
    """
    check_prepared(checkpoint, plan, prepared)
    inputs = prepared.calibration if plan.quantizer == "calibrated" else None
    is_sequential = prepared.sequential and inputs is not None and inputs.has_inputs
    layout = layout_for(checkpoint, plan, prepared.rotation)
    recipe = account.Recipe(checkpoint, plan, layout, prepared.order, inputs, prepared.rotation, is_sequential)
    record = account.recipe_account(recipe)
    writer = PackWriter(folder, layout, record.conversion, checkpoint.stamp(), on_step, part)
    with ExitStack() as stack:
        source_pack = None if earlier is None else stack.enter_context(EarlierPack(earlier, recipe))
        stored = StoredInputs(recipe, folder, workers, part) if recipe.is_sequential else None

        def make(item: layouts.Item, stop: Event) -> encoding.MadeItem:
            if source_pack is not None and source_pack.contains(item):
                return source_pack.made_item(item)
            if stored is None or item.kind != "expert":
                return encoding.made_item(recipe, item, stop)
            return encoding.made_item(recipe, item, stop, stored.of_layer(item.layer))

        kind = partial(kind_of_work, recipe, source_pack)
        work = ItemWork(make, partial(encoding.job_bytes, checkpoint, plan), kind=kind)
        if stored is not None:
            work = replace(work, enter_layer=stored.enter_layer, end=stored.remove, end_all=stored.remove_all)
        return write_pack(writer, layout, record, work, workers, progress, memory_bytes)


def memory_line(
    checkpoint: Checkpoint, plan: plans.Plan, layout: layouts.PackLayout, workers: int, memory_bytes: int
) -> str | None:
    """Returns a line that says that workers will wait for memory, and how much is enough; None if none will wait."""
    largest = max(encoding.job_bytes(checkpoint, plan, item) for item in layout.items() if item.kind == "expert")
    at_once = max(memory_bytes // largest, 1)
    if at_once >= workers:
        return None
    needed = -(-workers * largest >> 30)
    return (
        f"{at_once} of {workers} workers run at once, because an expert takes up to {commands.size_text(largest)}; "
        f"--memory {needed}G is enough for all"
    )


def write_pack(
    writer: PackWriter,
    layout: layouts.PackLayout,
    record: account.PackRecord,
    work: ItemWork,
    workers: int,
    progress: commands.Progress = commands.NO_PROGRESS,
    memory_bytes: int = MEMORY_BYTES,
) -> ConversionResult:
    """Writes a whole pack, continues where a killed run stopped, and closes the writer.

    Args:    workers, progress, memory_bytes: as for `convert`.
    Raises:  ConversionError, and the errors of `work`.
    """
    torch.set_num_threads(1)
    give_back_large_at_once()
    try:
        writer.open()
        if writer.state is State.SEALED:
            return ConversionResult(writer.resumed_bytes, written=False)
        reports = _PackingReports(writer, layout, work, progress)
        for item in _written(writer, layout, reports.work, workers, memory_bytes):
            reports.advance(_item_text(item))
        progress.end()
        work.end()
        with commands.stage_of(progress, "sealing"):
            if not writer.begins_sealing() and _sealed_by_another(writer, layout):
                return ConversionResult(writer.resumed_bytes, written=False)
            writer.seal(record.tables(writer), record.manifest, lambda raw: record.sidecars(raw, writer))
        work.end_all()
        return ConversionResult(writer.resumed_bytes, written=True)
    except (errors.ConversionError, OSError):
        if writer.part is None or writer.state is not State.WRITING or not writer.is_sealed():
            raise
        work.end()  # the other parts have made all that this part still wanted to make, and removed their files
        return ConversionResult(writer.resumed_bytes, written=False)
    finally:
        writer.close()


class _PackingReports:
    """Reports by kinds of work what is on the disk, whichever part has made it; `work` also reports entered layers."""

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

    def is_there() -> bool:
        writer.refresh()
        return writer.is_written(item)

    return _awaited(is_there, patience_s)


def _sealed_by_another(writer: PackWriter, layout: layouts.PackLayout) -> bool:
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
