"""Measures what a machine can do: its drive as the engine reads it, its CPU, its link to a GPU. `machine` holds it.

A drive is measured on the expert files of a pack, or on a file without a name that is written for it and goes with
this process, however that ends.
"""

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from moe_pack.formats import (
    BF16,
    DISK_BLOCK_BYTES,
    MANIFEST_FILE,
    MATRICES,
    NO_PROGRESS,
    ROW_GROUP,
    TRELLIS_WIDTHS,
    ExpertFormat,
    ExpertSpec,
    Pack,
    PackError,
    PartFormat,
    Progress,
    RangeReader,
    RowLayout,
    RunError,
    Stage,
    expert_layout,
    part_format,
    row_layout,
    trellis_format,
)
from moe_pack.runtime.machine import (
    CpuFacts,
    DriveFacts,
    LinkFacts,
    MachineFacts,
    ReadMode,
    ReadRate,
    SizedRate,
    WidthRate,
    device_of,
)
from moe_pack.runtime.native_kernels import (
    ExpertRows,
    Kernels,
    expert_numbers,
    is_available,
    num_cpus,
    row_numbers,
    stored_numbers,
)
from moe_pack.runtime.reads import BlockingReads, Reads, open_reads

READ_SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
READ_THREADS = (1, 2, 4, 8, 16)
MOST_FILE_BYTES = 1 << 30
COPY_SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)
_LEAST_FILE_BYTES = 1 << 20
_WRITTEN_AT_ONCE = 16 << 20
_ARENA_BYTES = 64 << 20  # read into
_MOST_PIECES = 1 << 15  # asked for at once: half a second of the fastest drives
_MEMORY_BYTES = 256 << 20  # more than caches hold
WIDTHS = (1, 2, 3, 4, 8, 16)
_DENSE_WIDTHS = (4, 8, 16)
_EXPERT_ROWS, _EXPERT_COLS = 2048, 4096
_SHORT_COLS = 128
_BF16_BYTES = np.array([0x24, 0x3C], np.uint8)  # 0.01
_WEIGHT_BYTES = 160 << 20  # of experts or of a dense matrix: more than caches hold

_BETWEEN = 0.05  # seconds, to open files and to have the system forget them


class Run(NamedTuple):
    """One measurement of a drive."""

    mode: ReadMode
    threads: int
    size: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of it, in bytes a second."""

    run: Run
    rate: float


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    num_bytes: int


class _Steps:
    """Tells what is measured next, and that what was measured before is done."""

    def __init__(self, progress: Progress, total: int, seconds: float) -> None:
        self._progress, self._has_begun = progress, False
        note = f"{total} measurements, about {total * (seconds + _BETWEEN):.0f} s"
        progress.begin(Stage("measuring", total, note=note))

    def next(self, what: str) -> None:
        self._progress.advance(1 if self._has_begun else 0, what)
        self._has_begun = True


def measure_machine(
    folder: Path, progress: Progress = NO_PROGRESS, seconds: float = 0.5, most_bytes: int = MOST_FILE_BYTES
) -> MachineFacts:
    """Measures the drive of a folder, the CPU and the link to the GPU.

    Args:    folder: a pack, of which expert files are read; or another, where a file of at most `most_bytes` and at
             most a quarter of the free space is written.   seconds: that each measurement takes.
    Raises:  RunError if the folder is none, cannot be written or has no room; PackError if it is a damaged pack.
    """
    has_link = torch.cuda.is_available()
    with _files_of(folder, most_bytes, progress) as files:
        runs = _runs(files)
        num_cpu_steps = 3 + len(WIDTHS) + len(_DENSE_WIDTHS) + len(TRELLIS_WIDTHS) if is_available() else 0
        steps = _Steps(progress, len(runs) + num_cpu_steps + (len(COPY_SIZES) if has_link else 0), seconds)
        drive = _measure_drive(files, runs, device_of(folder)[1], steps, seconds)
    cpu = _measure_cpu(steps, seconds)
    link = _measure_link(steps, seconds) if has_link else None
    progress.end()
    return MachineFacts(datetime.now(UTC).date().isoformat(), drive, cpu, link)


# ---- drive ----------------------------------------------------------------------------------------------------------


@contextmanager
def _files_of(folder: Path, most_bytes: int, progress: Progress) -> Iterator[list[_File]]:
    """The files to read from: a pack's of experts, or a new one."""
    if not folder.is_dir():
        raise RunError(f"{folder}: found no such folder; give one on the drive to measure")
    if (folder / MANIFEST_FILE).exists():
        with Pack(folder) as pack:
            yield [_File(folder / listed.name, listed.bytes) for listed in pack.manifest.expert_files]
        return
    free = os.statvfs(folder)
    num_bytes = min(most_bytes, free.f_bavail * free.f_frsize // 4) // _LEAST_FILE_BYTES * _LEAST_FILE_BYTES
    if num_bytes < _LEAST_FILE_BYTES:
        raise RunError(f"{folder}: found less than 4 MiB of free space, expected more; give a folder with room")
    progress.say(f"writing {num_bytes >> 20} MiB to read")
    try:
        # Without a name from the start: nothing is left behind, whatever ends the process.
        with tempfile.TemporaryFile(dir=folder) as file:
            _write_random(file.fileno(), num_bytes)
            yield [_File(Path(f"/proc/self/fd/{file.fileno()}"), num_bytes)]
    except OSError as fault:
        raise RunError(f"{folder}: cannot be written ({fault.strerror}); give another folder of the drive") from fault


def _write_random(descriptor: int, num_bytes: int) -> None:
    """Writes bytes that no drive can compress, and waits until it has them."""
    random = np.random.default_rng()
    for start in range(0, num_bytes, _WRITTEN_AT_ONCE):
        left = memoryview(random.bytes(min(_WRITTEN_AT_ONCE, num_bytes - start)))
        while left:
            left = left[os.write(descriptor, left) :]
    os.fsync(descriptor)


def _runs(files: Sequence[_File]) -> list[Run]:
    """What to measure: every size that a file has room for."""
    sizes = [size for size in READ_SIZES if size <= max(file.num_bytes for file in files)]
    if not sizes:
        raise RunError(f"{files[0].path.name}: found no file of {READ_SIZES[0]} bytes; give a folder that is no pack")
    modes: list[ReadMode] = ["direct"] if _has_direct(files[0].path) else []
    threads = READ_THREADS if is_available() else (1,)
    runs = [Run(mode, number, size) for size in sizes for mode in (*modes, "pread") for number in threads]
    # Only the kernels bear that a mapped file is cut.
    return runs + ([Run("map", 1, size) for size in sizes] if is_available() else [])


def _has_direct(path: Path) -> bool:
    with closing(open_reads(_arena(DISK_BLOCK_BYTES), True, 1)) as reads:
        try:
            reads.open(path)
        except RunError:  # the file system refuses: there is no such mode
            return False
    return True


def _measure_drive(
    files: Sequence[_File], runs: Sequence[Run], name: str | None, steps: _Steps, seconds: float
) -> DriveFacts:
    measured, arena = [], _arena(_ARENA_BYTES)
    for run in runs:
        steps.next(f"{run.mode} {run.size >> 10} KiB, {run.threads} thread{'s' if run.threads > 1 else ''}")
        rate = _map_rate(files, run.size, seconds) if run.mode == "map" else _read_rate(files, run, arena, seconds)
        measured.append(Measured(run, rate))
    return drive_facts(measured, name, sum(file.num_bytes for file in files))


def drive_facts(measured: Sequence[Measured], name: str | None, file_bytes: int) -> DriveFacts:
    """The best of each mode and size; and the mode and number of threads nearest to the best over all sizes."""
    best: dict[tuple[ReadMode, int], Measured] = {}
    for one in measured:
        key = one.run.mode, one.run.size
        if key not in best or one.rate > best[key].rate:
            best[key] = one
    curves: dict[tuple[Literal["direct", "pread"], int], list[SizedRate]] = {}
    for one in measured:
        if one.run.mode != "map":
            curves.setdefault((one.run.mode, one.run.threads), []).append(SizedRate(one.run.size, one.rate))

    def nearness(curve: Sequence[SizedRate]) -> float:
        return sum(p.rate / max(b.rate for (mode, size), b in best.items() if size == p.size and mode != "map")
                   for p in curve)  # fmt: skip

    (mode, threads), curve = max(curves.items(), key=lambda entry: nearness(entry[1]))
    alone = tuple(curves.get((mode, 1), curve))
    rates = tuple(ReadRate(one.run.mode, one.run.size, one.run.threads, one.rate) for one in best.values())
    return DriveFacts(name, file_bytes, mode, threads, tuple(curve), alone, rates)


def _read_rate(files: Sequence[_File], run: Run, arena: NDArray[np.uint8], seconds: float) -> float:
    """Bytes a second of time in which something was read."""
    with closing(open_reads(arena, run.mode == "direct", run.threads)) as reads:
        numbers = [reads.open(file.path) for file in files]
        end = time.perf_counter() + seconds
        while True:
            _drop_cached(files)
            tickets = [
                _submit(reads, number, _scattered(file, run.size), run.size, len(arena))
                for number, file in zip(numbers, files, strict=True)
            ]
            _read_until(reads, tickets, end)
            stats = reads.stats()
            if time.perf_counter() >= end:
                return stats.bytes_urgent / (stats.busy_ns / 1e9)


def _submit(reads: Reads, file: int, offsets: NDArray[np.int64], size: int, arena_bytes: int) -> list[int]:
    """Tickets for reads of these places; pieces overwrite each other, since nobody looks at them."""
    at_once = 4 if isinstance(reads, BlockingReads) else len(offsets)  # which cannot be stopped within a request
    places = np.arange(len(offsets)) % (arena_bytes // size) * size
    sizes = np.full(len(offsets), size)
    parts = [slice(start, start + at_once) for start in range(0, len(offsets), at_once)]
    return [reads.submit(file, offsets[part], places[part], sizes[part], urgent=True) for part in parts]


def _read_until(reads: Reads, tickets: Sequence[Sequence[int]], end: float) -> None:
    """Lets requests be read until all are or time is up; the rest is dropped, and what has begun is counted."""

    def has_time() -> bool:
        # Something is read in any case: a rate needs it, and asking alone may take all the time there is.
        return time.perf_counter() < end or not reads.stats().bytes_urgent

    for ticket in (ticket for several in tickets for ticket in several):
        if not isinstance(reads, BlockingReads):
            while not reads.is_done(ticket) and has_time():
                time.sleep(0.001)
        if reads.is_done(ticket) or (isinstance(reads, BlockingReads) and has_time()):
            reads.wait(ticket)  # raises what went wrong
        else:
            reads.cancel(ticket)


def _map_rate(files: Sequence[_File], size: int, seconds: float) -> float:
    """The same for page faults of one thread in a mapped file."""
    num_bytes, taken = 0, 0.0
    with closing(Kernels(1)) as kernels:
        while taken < seconds:
            _drop_cached(files)
            for file in files:
                with RangeReader(file.path, PackError) as reader:
                    mapped = reader.map()
                began = time.perf_counter()
                for offset in _scattered(file, size).tolist():
                    kernels.read(mapped[offset : offset + size])
                    num_bytes += size
                    if taken + time.perf_counter() - began >= seconds:
                        break
                taken += time.perf_counter() - began
                del mapped  # or its pages could not be dropped
    return num_bytes / taken


def _scattered(file: _File, size: int) -> NDArray[np.int64]:
    """Places of reads all over a file, none twice."""
    return np.random.default_rng().permutation(file.num_bytes // size)[:_MOST_PIECES] * size


def _drop_cached(files: Sequence[_File]) -> None:
    """Asks the system to forget what it keeps of files; it does, unless they are mapped or not yet on the drive."""
    for file in files:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _arena(num_bytes: int) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


# ---- CPU and link ---------------------------------------------------------------------------------------------------


def _measure_cpu(steps: _Steps, seconds: float) -> CpuFacts:
    cores = num_cpus()
    if not is_available():
        return CpuFacts(cores, None, None, None, (), (), None)
    with closing(Kernels(1)) as one, closing(Kernels(cores)) as every:
        read_one, read_all = (_memory_rate(kernels, steps, seconds) for kernels in (one, every))
        experts = []
        for width in WIDTHS:
            steps.next(f"experts of {width} bit")
            experts.append(WidthRate(width, _expert_rate(every, _stored(width), _EXPERT_COLS, seconds)[0]))
        trellises = []
        for width in TRELLIS_WIDTHS:
            stored = trellis_format(width, ROW_GROUP)
            steps.next(f"experts as trellises of {stored.bits:g} bit")
            trellises.append(WidthRate(width, _expert_rate(every, stored, _EXPERT_COLS, seconds)[0]))
        dense = []
        for width in _DENSE_WIDTHS:
            steps.next(f"a dense matrix of {width} bit")
            dense.append(WidthRate(width, _dense_rate(every, width, seconds)))
        steps.next("experts with short rows")
        rate, row_bytes = _expert_rate(every, _stored(4), _SHORT_COLS, seconds)
        (usual,) = (found.rate for found in experts if found.width == 4)
        row_s = max(row_bytes / rate - row_bytes / usual, 0.0)
        return CpuFacts(
            cores, every.instruction_set, read_one, read_all, tuple(experts), tuple(dense), row_s, tuple(trellises)
        )


def _memory_rate(kernels: Kernels, steps: _Steps, seconds: float) -> float:
    steps.next(f"memory, {kernels.threads} thread{'s' if kernels.threads > 1 else ''}")
    held = np.ones(_MEMORY_BYTES, np.uint8)
    return _repeated(lambda: kernels.read(held), len(held), seconds)


def _expert_rate(kernels: Kernels, stored: PartFormat, num_cols: int, seconds: float) -> tuple[float, float]:
    """Bytes of experts a second, computed for one token, all neurons running; and the bytes of one matrix's row."""
    spec = ExpertSpec("silu", _EXPERT_ROWS, MATRICES, (), 0)
    layout = expert_layout(ExpertFormat(stored, stored, stored), "none", spec, num_cols)
    rows = _random_rows(layout.records, _EXPERT_ROWS)
    numbers = expert_numbers(layout, "none", spec.function)
    token, weight = np.zeros(1, np.int64), np.ones(1, np.float32)
    # Each in memory of its own.
    works = [(ExpertRows(numbers, None, rows.copy(), 0.0), token, weight) for _ in range(_WEIGHT_BYTES // rows.nbytes)]
    x = torch.ones(1, num_cols)
    return _repeated(lambda: kernels.experts(x, works), len(works) * rows.nbytes, seconds), rows.shape[1] / 3


def _dense_rate(kernels: Kernels, width: int, seconds: float) -> float:
    """Bytes of a dense matrix a second, multiplied by one vector."""
    stored = _stored(width)
    x = torch.ones(1, _EXPERT_COLS)
    if stored == BF16:
        numbers = stored_numbers(torch.bfloat16, _EXPERT_COLS)
        held = torch.full((_WEIGHT_BYTES // (2 * _EXPERT_COLS), _EXPERT_COLS), 0.01, dtype=torch.bfloat16)
        rows = held.view(torch.uint8).numpy()
    else:
        layout = row_layout([("weight", stored, False)], _EXPERT_COLS)
        numbers, rows = row_numbers(layout, "weight"), _random_rows(layout, _WEIGHT_BYTES // layout.row_bytes)
    return _repeated(lambda: kernels.product(x, numbers, rows), rows.nbytes, seconds)


def _stored(width: int) -> PartFormat:
    return BF16 if width == BF16.width else part_format(width, 64)


def _random_rows(layout: RowLayout, num_rows: int) -> NDArray[np.uint8]:
    """Rows of random codes and usual scales: u8 [num_rows, row_bytes]; of bfloat16 all weights alike."""
    rows = np.random.default_rng(0).integers(0, 256, (num_rows, layout.row_bytes), np.uint8)
    for part in layout.parts:
        if part.format == BF16:
            rows[:, part.offset : part.offset + part.num_bytes] = np.tile(_BF16_BYTES, layout.num_cols)
            continue
        end = part.offset + part.format.code_bytes(layout.num_cols)
        values = ((part.format.scale_bytes(layout.num_cols), 0.01), (part.format.zero_bytes(layout.num_cols), 7.5))
        for num_bytes, value in values:
            begin, end = end, end + num_bytes
            rows[:, begin:end] = np.full(num_bytes // 2, value, np.float16).view(np.uint8)
    return rows


def _measure_link(steps: _Steps, seconds: float) -> LinkFacts:
    """Copies from page-locked memory to the first GPU that torch finds."""
    host = torch.empty(COPY_SIZES[-1], dtype=torch.uint8, pin_memory=True)
    device = torch.empty(COPY_SIZES[-1], dtype=torch.uint8, device="cuda")
    copies = []
    for size in COPY_SIZES:
        steps.next(f"copies of {size >> 10} KiB to the GPU")
        times = max(1, COPY_SIZES[-1] // size)

        def copy(size: int = size, times: int = times) -> None:
            for _ in range(times):
                device[:size].copy_(host[:size], non_blocking=True)
            torch.cuda.synchronize()  # copies are only asked for until then

        copies.append(SizedRate(size, _repeated(copy, size * times, seconds)))
    found = torch.cuda.get_device_properties(0)
    return LinkFacts(found.name, found.total_memory, tuple(copies))


def _repeated(work: Callable[[], object], num_bytes: int, seconds: float) -> float:
    """Bytes a second of some work, done again and again, after once that is not counted.

    By the lower quartile of its times: other work on the machine only ever adds to them.
    """
    work()
    end, times = time.perf_counter() + seconds, list[float]()
    while time.perf_counter() < end or not times:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return num_bytes / float(np.quantile(times, 0.25))
