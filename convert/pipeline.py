"""The conversion: a checkpoint and a plan become a pack, item by item, several at once, in bounded memory.

Workers are threads: what they run (reading, torch, digests) releases the interpreter, and a process killed at any
moment leaves nobody behind who could still write. Items are written in one order whatever the number of workers.
"""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import numpy as np
import torch
from numpy.typing import NDArray

from moe_pack.calib import Profile
from moe_pack.convert.account import Account, recipe_account
from moe_pack.convert.expert_job import item_bytes, job_bytes
from moe_pack.convert.recipe import Recipe, check_calibration, check_order
from moe_pack.convert.reuse import Earlier
from moe_pack.convert.source_formats import check_kept
from moe_pack.formats import (
    NO_PROGRESS,
    Checkpoint,
    Digests,
    Item,
    PackLayout,
    PackWriter,
    Plan,
    Progress,
    Stage,
    State,
    Step,
    dense_roles,
    digests_of,
    pack_layout,
    size_text,
)

MEMORY_BYTES = 1 << 30  # that items at work at once hold between them, if nothing else is asked for


@dataclass(frozen=True, slots=True)
class Work:
    """How items get their bytes: `make`, in a worker thread, soon ends once its event is set.

    `held_bytes`: what `make` holds of an item at its peak.
    """

    make: Callable[[Item, Event], NDArray[np.uint8]]
    held_bytes: Callable[[Item], int]


_Finished = tuple[Item, NDArray[np.uint8], Digests]


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a finished conversion did: `resumed_bytes` were there before, `written` is False if the whole pack was."""

    layout: PackLayout
    resumed_bytes: int
    written: bool


def layout_for(checkpoint: Checkpoint, plan: Plan) -> PackLayout:
    """The layout of the pack that `plan` makes of `checkpoint`: every size, before anything is written."""
    dtypes = [checkpoint.dtype(checkpoint.dense_source(role.name)) for role in dense_roles(checkpoint.spec)]
    return pack_layout(checkpoint.spec, plan, dtypes, checkpoint.unused())


def convert(
    checkpoint: Checkpoint,
    plan: Plan,
    folder: Path,
    workers: int,
    progress: Progress = NO_PROGRESS,
    on_step: Callable[[Step], None] = lambda step: None,
    order: NDArray[np.uint32] | None = None,
    earlier: Path | None = None,
    calibration: Profile | None = None,
    memory_bytes: int = MEMORY_BYTES,
) -> Conversion:
    """Writes the pack that `plan` makes of `checkpoint` into `folder`, going on where a killed run stopped.

    Args:    workers: threads, one torch thread each (torch's own are set to one for the whole process).
             on_step: called before each change to the drive.
             order: u32 [L, E, f], `order[l, e, j]` is the source's neuron that row `j` will hold; the source's order
             without one.   earlier: a pack of the same checkpoint, and calibrated by the same profile if at all; what
             it stores alike is copied from it.   calibration: the profile whose inputs a calibrated plan rounds by;
             other plans need none.   memory_bytes: about what items at work at once hold between them; one is always
             let through, however large.
    Raises:  CheckpointError, ConversionError, PlanError; PackError if `earlier` is damaged; the folder then keeps what
             was done.
    """
    if order is not None:
        check_order(order, checkpoint.spec)
    check_kept(checkpoint, plan)
    check_calibration(checkpoint, plan, calibration)
    layout = layout_for(checkpoint, plan)
    recipe = Recipe(checkpoint, plan, layout, order, calibration if plan.quantizer == "calibrated" else None)
    account = recipe_account(recipe)
    writer = PackWriter(folder, layout, account.conversion, checkpoint.stamp(), on_step)
    with ExitStack() as stack:
        held = None if earlier is None else stack.enter_context(Earlier(earlier, recipe))

        def make(item: Item, stop: Event) -> NDArray[np.uint8]:
            return held.item_bytes(item) if held is not None and held.holds(item) else item_bytes(recipe, item, stop)

        work = Work(make, lambda item: job_bytes(checkpoint, plan, item))
        return write_pack(writer, layout, account, work, workers, progress, memory_bytes)


def memory_line(checkpoint: Checkpoint, plan: Plan, layout: PackLayout, workers: int, memory_bytes: int) -> str | None:
    """That some workers will wait for memory, and how much would do; None if none will.

    Of experts: dense tensors are few.
    """
    largest = max(job_bytes(checkpoint, plan, item) for item in layout.items() if item.kind == "expert")
    at_once = max(memory_bytes // largest, 1)
    if at_once >= workers:
        return None
    needed = -(-workers * largest >> 30)
    return (
        f"{at_once} of {workers} workers at once, for an expert holds up to {size_text(largest)}; "
        f"--memory {needed}G has room for all"
    )


def write_pack(
    writer: PackWriter,
    layout: PackLayout,
    account: Account,
    work: Work,
    workers: int,
    progress: Progress = NO_PROGRESS,
    memory_bytes: int = MEMORY_BYTES,
) -> Conversion:
    """Writes a whole pack, going on where a killed run stopped, and closes the writer.

    Args:    workers, progress, memory_bytes: as `convert` takes them.
    Raises:  ConversionError, and what `work` raises.
    """
    total = sum(item.num_bytes for item in layout.items())
    torch.set_num_threads(1)
    try:
        writer.open()
        if writer.state is State.SEALED:
            return Conversion(layout, writer.resumed_bytes, written=False)
        pending = writer.pending()
        done = total - sum(item.num_bytes for item in pending)
        progress.begin(Stage("packing", total, "B", done))
        with closing(_in_order(work, pending, workers, memory_bytes)) as finished:
            for item, raw, digests in finished:
                writer.write(item, raw, digests)
                del raw  # or it would stay until the next item is there
                progress.advance(item.num_bytes, _name(item))
        progress.end()
        writer.seal(account.tables(writer), account.manifest)
        return Conversion(layout, writer.resumed_bytes, written=True)
    finally:
        writer.close()


def _in_order(work: Work, pending: list[Item], workers: int, memory_bytes: int) -> Generator[_Finished, None, None]:
    """Each pending item with its bytes, in order; `workers` of them in the making, and one that waits its turn."""
    stop = Event()

    def job(item: Item) -> _Finished:
        raw = work.make(item, stop)
        return item, raw, digests_of(raw)

    started: deque[tuple[int, Future[_Finished]]] = deque()
    held_bytes, next_idx = 0, 0
    with ThreadPoolExecutor(workers, "convert") as pool:
        try:
            while started or next_idx < len(pending):
                while next_idx < len(pending) and len(started) <= workers:
                    num_bytes = work.held_bytes(pending[next_idx])
                    if started and held_bytes + num_bytes > memory_bytes:
                        break
                    started.append((num_bytes, pool.submit(job, pending[next_idx])))
                    held_bytes += num_bytes
                    next_idx += 1
                num_bytes, future = started.popleft()
                finished = future.result()
                del future  # it holds the bytes too
                yield finished
                del finished
                held_bytes -= num_bytes
        finally:
            stop.set()
            for _, future in started:
                future.cancel()


def _name(item: Item) -> str:
    return item.role if item.kind in ("dense", "unused") else f"layer {item.layer} expert {item.expert}"
