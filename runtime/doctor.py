"""The measurements of `moe-pack doctor`: the disk as the engine reads it, the CPU's kernels, and the link to a GPU.

A disk is measured on the expert files of a pack, elsewhere on a file without a name, which the system removes when the
process ends.
"""

import os
import shutil
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

from moe_pack import formats
from moe_pack.formats import base
from moe_pack.formats.base.commands import Stage
from moe_pack.formats.base.limits import num_cores
from moe_pack.formats.pack import layouts
from moe_pack.formats.pack.manifests import MANIFEST_FILE
from moe_pack.formats.pack.plans import TRELLIS_WIDTHS
from moe_pack.runtime import cpu
from moe_pack.runtime.cpu.reads import NUM_THREADS, BlockingReads, Reads, open_reads
from moe_pack.runtime.engine import machine

READ_SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
READ_THREADS = (1, 2, 4, 8, 16)
WIDTHS = (1, 2, 3, 4, 8, 16)
DENSE_WIDTHS = (4, 8, 16)
COPY_SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)
MAX_FILE_BYTES = 1 << 30  # of a file that is written to be read

_BRIEF_BYTES = 1 << 20  # the largest read of `measure_disk`; larger ones have nearly the same rate
_MIN_FILE_BYTES = 1 << 20
_WRITE_BYTES = 16 << 20  # of one write
_ARENA_BYTES = 64 << 20  # into which everything is read
_MAX_READS = 1 << 15  # requested at once: half a second of the fastest disks
_MEMORY_BYTES = 256 << 20  # more than caches have
_WEIGHT_BYTES = 160 << 20  # of experts or of a dense matrix: more than caches have
_EXPERT_ROWS, _EXPERT_COLS = 2048, 4096
_SHORT_COLS = 128
_BF16_BYTES = np.array([0x24, 0x3C], np.uint8)  # 0.01
_PAUSE_S = 0.05  # between measurements: to open files and to drop them from the system's cache


def measure_machine(
    folder: Path,
    progress: formats.Progress = formats.NO_PROGRESS,
    seconds: float = 0.5,
    most_bytes: int = MAX_FILE_BYTES,
) -> machine.MachineFacts:
    """Measures the disk of a folder, the CPU and the link to the GPU.

    Args:    folder: a pack, whose expert files are read; or any other folder, in which a file of at most `most_bytes`
             and at most a quarter of the free space is written.   seconds: of each measurement.
    Raises:  RunError if there is no such folder, or it cannot be written; PackError if it is a damaged pack.
    """
    has_link = torch.cuda.is_available()
    with _files_of(folder, most_bytes, progress) as files:
        trials = _trials(files)
        cpu_steps = 3 + len(WIDTHS) + len(DENSE_WIDTHS) + len(TRELLIS_WIDTHS) if cpu.is_available() else 0
        steps = MeasurementSteps(progress, len(trials) + cpu_steps + (len(COPY_SIZES) if has_link else 0), seconds)
        disk = _measure_disk(files, trials, machine.device_of(folder)[1], steps, seconds)
    cpu_facts = measure_cpu(steps, seconds)
    link = _measure_link(steps, seconds) if has_link else None
    progress.end()
    return machine.MachineFacts(datetime.now(UTC).date().isoformat(), disk, cpu_facts, link)


def measure_disk(
    folder: Path, progress: formats.Progress = formats.NO_PROGRESS, seconds: float = 0.08
) -> machine.MachineFacts:
    """Measures the disk of a pack in about a second: direct reads where possible, by the engine's threads and one.

    Raises:  PackError if the pack is damaged.
    """
    with _files_of(folder, MAX_FILE_BYTES, progress) as files:
        mode: machine.ReadMode = "direct" if _has_direct(files[0].path) else "pread"
        threads = (1, NUM_THREADS) if cpu.is_available() else (1,)
        most = min(_BRIEF_BYTES, max(file.num_bytes for file in files))
        trials = [ReadTrial(mode, number, size) for size in READ_SIZES if size <= most for number in threads]
        steps = MeasurementSteps(progress, len(trials), seconds)
        disk = _measure_disk(files, trials, machine.device_of(folder)[1], steps, seconds)
    progress.end()
    unknown = machine.CpuFacts(num_cores(), None, None, None, (), (), None)
    return machine.MachineFacts(datetime.now(UTC).date().isoformat(), disk, unknown, None)


class MeasurementSteps:
    """Progress in measurements: names the next one; the one before is done."""

    def __init__(self, progress: formats.Progress, total: int, seconds: float) -> None:
        self._progress, self._has_begun = progress, False
        note = f"{total} measurements, about {total * (seconds + _PAUSE_S):.0f} s"
        progress.begin(Stage("measuring", total, note=note))

    def next(self, what: str) -> None:
        """Says what is measured now, and counts the measurement before it."""
        self._progress.advance(1 if self._has_begun else 0, what)
        self._has_begun = True


def _repeated(work: Callable[[], object], num_bytes: int, seconds: float) -> float:
    """Returns the bytes a second of work on `num_bytes`, repeated for some seconds after a first time.

    The rate is that of the lower quartile of the times, because other work on the machine only makes them longer.
    """
    work()
    end, times = time.perf_counter() + seconds, list[float]()
    while time.perf_counter() < end or not times:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return num_bytes / float(np.quantile(times, 0.25))


def _threads_text(num_threads: int) -> str:
    return f"{num_threads} thread{'s' if num_threads > 1 else ''}"


# ---- disk -----------------------------------------------------------------------------------------------------------


class ReadTrial(NamedTuple):
    """A way to read from a disk, which is measured."""

    mode: machine.ReadMode
    threads: int
    size: int


@dataclass(frozen=True, slots=True)
class ReadMeasurement:
    """The result of a trial."""

    trial: ReadTrial
    rate: float  # bytes a second
    cpu_s: float = 0.0  # processor time of a read


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    num_bytes: int


@contextmanager
def _files_of(folder: Path, most_bytes: int, progress: formats.Progress) -> Iterator[list[_File]]:
    if not folder.is_dir():
        raise formats.RunError(f"{folder}: no such folder; give a folder on the disk to measure")
    if (folder / MANIFEST_FILE).exists():
        with formats.Pack(folder) as pack:
            yield [_File(folder / listed.name, listed.bytes) for listed in pack.manifest.expert_files]
        return
    num_bytes = min(most_bytes, shutil.disk_usage(folder).free // 4) // _MIN_FILE_BYTES * _MIN_FILE_BYTES
    if num_bytes < _MIN_FILE_BYTES:
        raise formats.RunError(f"{folder}: less than 4 MiB are free; give a folder with more free space")
    progress.say(f"writing {num_bytes >> 20} MiB to read")
    try:
        # Linux: without a name from the start, so that nothing is left behind, whatever ends the process.
        unnamed = Path("/proc/self/fd").is_dir()
        with tempfile.TemporaryFile(dir=folder) if unnamed else tempfile.NamedTemporaryFile(dir=folder) as file:
            _write_random(file.fileno(), num_bytes)
            yield [_File(Path(f"/proc/self/fd/{file.fileno()}" if unnamed else file.name), num_bytes)]
    except OSError as fault:
        message = f"{folder}: cannot be written ({fault.strerror}); give another folder on the disk"
        raise formats.RunError(message) from fault


def _write_random(descriptor: int, num_bytes: int) -> None:
    """Writes bytes that no disk can compress, and waits until they are on the disk."""
    random = np.random.default_rng()
    for start in range(0, num_bytes, _WRITE_BYTES):
        left = memoryview(random.bytes(min(_WRITE_BYTES, num_bytes - start)))
        while left:
            left = left[os.write(descriptor, left) :]
    os.fsync(descriptor)


def _trials(files: Sequence[_File]) -> list[ReadTrial]:
    sizes = [size for size in READ_SIZES if size <= max(file.num_bytes for file in files)]
    if not sizes:
        name, least = files[0].path.name, READ_SIZES[0]
        raise formats.RunError(f"{name}: has less than {least} bytes; give a folder that is not a pack")
    modes: list[machine.ReadMode] = ["direct"] if _has_direct(files[0].path) else []
    threads = READ_THREADS if cpu.is_available() else (1,)
    trials = [ReadTrial(mode, number, size) for size in sizes for mode in (*modes, "pread") for number in threads]
    # Maps are read by native kernels only: they survive it if a mapped file is cut.
    return trials + ([ReadTrial("map", 1, size) for size in sizes] if cpu.is_available() else [])


def _has_direct(path: Path) -> bool:
    with closing(open_reads(_arena(formats.DISK_BLOCK_BYTES), True, 1)) as reads:
        try:
            reads.open(path)
        except formats.RunError:  # the file system refuses direct reads
            return False
    return True


def _measure_disk(
    files: Sequence[_File], trials: Sequence[ReadTrial], name: str | None, steps: MeasurementSteps, seconds: float
) -> machine.DiskFacts:
    measurements, arena = [], _arena(_ARENA_BYTES)
    for trial in trials:
        steps.next(f"{trial.mode} {trial.size >> 10} KiB, {_threads_text(trial.threads)}")
        if trial.mode == "map":
            measurements.append(ReadMeasurement(trial, _map_rate(files, trial.size, seconds)))
        else:
            measurements.append(_measure_reads(files, trial, arena, seconds))
    return disk_facts(measurements, name, sum(file.num_bytes for file in files))


def disk_facts(measurements: Sequence[ReadMeasurement], name: str | None, file_bytes: int) -> machine.DiskFacts:
    """Returns the best rate of each mode and size, and the mode and threads with the largest sum of relative rates."""
    best: dict[tuple[machine.ReadMode, int], ReadMeasurement] = {}
    curves: dict[tuple[Literal["direct", "pread"], int], list[machine.SizedRate]] = {}
    cpu_s: dict[tuple[machine.ReadMode, int], list[float]] = {}
    for each in measurements:
        mode, threads, size = each.trial
        if (mode, size) not in best or each.rate > best[mode, size].rate:
            best[mode, size] = each
        if mode != "map":
            curves.setdefault((mode, threads), []).append(machine.SizedRate(size, each.rate))
            cpu_s.setdefault((mode, threads), []).append(each.cpu_s)
    most: dict[int, float] = {}
    for each in best.values():
        if each.trial.mode != "map":
            most[each.trial.size] = max(each.rate, most.get(each.trial.size, 0.0))

    closeness = {way: sum(point.rate / most[point.size] for point in curve) for way, curve in curves.items()}
    best_mode, best_threads = max(closeness, key=lambda way: closeness[way])
    curve = curves[best_mode, best_threads]
    alone = tuple(curves.get((best_mode, 1), curve))
    rates = tuple(machine.ReadRate(b.trial.mode, b.trial.size, b.trial.threads, b.rate) for b in best.values())
    sizes, taken = [point.size for point in curve], cpu_s[best_mode, best_threads]
    byte_cpu_s = max((taken[-1] - taken[0]) / (sizes[-1] - sizes[0]), 0.0) if len(sizes) > 1 else 0.0
    read_cpu_s = max(taken[0] - sizes[0] * byte_cpu_s, 0.0)
    usual = (name, file_bytes, best_mode, best_threads, tuple(curve), alone, rates)
    return machine.DiskFacts(*usual, read_cpu_s, byte_cpu_s)


def _measure_reads(
    files: Sequence[_File], trial: ReadTrial, arena: NDArray[np.uint8], seconds: float
) -> ReadMeasurement:
    """Measures scattered reads: their rate over the time in which at least one was in progress."""
    cpu_s = 0.0
    with closing(open_reads(arena, trial.mode == "direct", trial.threads)) as reads:
        numbers = [reads.open(file.path) for file in files]
        end = time.perf_counter() + seconds
        while True:
            _drop_cached(files)
            tickets = [
                _submit(reads, number, _scattered(file, trial.size), trial.size, len(arena))
                for number, file in zip(numbers, files, strict=True)
            ]
            before = time.process_time()
            _read_until(reads, [ticket for several in tickets for ticket in several], end)
            cpu_s += time.process_time() - before
            stats = reads.stats()
            if time.perf_counter() >= end:
                rate = stats.bytes_urgent / (stats.busy_ns / 1e9)
                return ReadMeasurement(trial, rate, cpu_s / max(stats.num_reads, 1))


def _submit(reads: Reads, file: int, offsets: NDArray[np.int64], size: int, arena_bytes: int) -> list[int]:
    """Requests reads at these offsets and returns their tickets; no one uses the bytes, so reads may overlap."""
    at_once = 4 if isinstance(reads, BlockingReads) else len(offsets)  # a blocking request cannot be stopped
    places = np.arange(len(offsets)) % (arena_bytes // size) * size
    sizes = np.full(len(offsets), size)
    parts = [slice(start, start + at_once) for start in range(0, len(offsets), at_once)]
    return [reads.submit(file, offsets[part], places[part], sizes[part], urgent=True) for part in parts]


def _read_until(reads: Reads, tickets: Sequence[int], end: float) -> None:
    """Waits until all requests are read or time is up, and cancels the rest; begun reads are counted."""

    def has_time() -> bool:
        # Something is read in any case: a rate needs it, and the requests alone may take all the time.
        return time.perf_counter() < end or not reads.stats().bytes_urgent

    for ticket in tickets:
        if not isinstance(reads, BlockingReads):
            while not reads.is_done(ticket) and has_time():
                time.sleep(0.001)
        if reads.is_done(ticket) or (isinstance(reads, BlockingReads) and has_time()):
            reads.wait(ticket)  # raises what went wrong
        else:
            reads.cancel(ticket)


def _map_rate(files: Sequence[_File], size: int, seconds: float) -> float:
    """Returns the bytes a second that page faults of one thread bring from a mapped file."""
    num_bytes, taken = 0, 0.0
    with closing(cpu.Kernels(1)) as kernels:
        while taken < seconds:
            _drop_cached(files)
            for file in files:
                with formats.RangeReader(file.path, formats.PackError) as reader:
                    mapped = reader.map()
                began = time.perf_counter()
                for offset in _scattered(file, size).tolist():
                    kernels.read(mapped[offset : offset + size])
                    num_bytes += size
                    if taken + time.perf_counter() - began >= seconds:
                        break
                taken += time.perf_counter() - began
                del mapped  # the system keeps the pages of a mapped file
    return num_bytes / taken


def _scattered(file: _File, size: int) -> NDArray[np.int64]:
    return np.random.default_rng().permutation(file.num_bytes // size)[:_MAX_READS] * size


def _drop_cached(files: Sequence[_File]) -> None:
    """Drops files from the system's cache; pages that are mapped, or not yet on the disk, stay there."""
    for file in files:
        descriptor = os.open(file.path, base.READ_FLAGS)
        try:
            base.drop_cached(descriptor)
        finally:
            os.close(descriptor)


def _arena(num_bytes: int) -> NDArray[np.uint8]:
    return np.frombuffer(base.anonymous_memory(num_bytes), np.uint8)


# ---- CPU ------------------------------------------------------------------------------------------------------------


class _ExpertSpeed(NamedTuple):
    rate: float  # bytes of experts a second
    row_bytes: float  # of one row of one matrix


def measure_cpu(steps: MeasurementSteps, seconds: float) -> machine.CpuFacts:
    """Measures reading of memory, experts and dense matrices; without native kernels only cores are known."""
    cores = num_cores()
    if not cpu.is_available():
        return machine.CpuFacts(cores, None, None, None, (), (), None)
    with closing(cpu.Kernels(1)) as one, closing(cpu.Kernels(cores)) as every:
        read_one, read_all = (_memory_rate(kernels, steps, seconds) for kernels in (one, every))
        experts = []
        for width in WIDTHS:
            steps.next(f"experts of {width} bit")
            experts.append(machine.WidthRate(width, _expert_speed(every, _stored(width), _EXPERT_COLS, seconds).rate))
        trellises = []
        for width in TRELLIS_WIDTHS:
            stored = formats.trellis_format(width, formats.ROW_GROUP)
            steps.next(f"experts as trellises of {stored.bits:g} bit")
            trellises.append(machine.WidthRate(width, _expert_speed(every, stored, _EXPERT_COLS, seconds).rate))
        dense = []
        for width in DENSE_WIDTHS:
            steps.next(f"a dense matrix of {width} bit")
            dense.append(machine.WidthRate(width, _dense_rate(every, width, seconds)))
        steps.next("experts with short rows")
        short = _expert_speed(every, _stored(4), _SHORT_COLS, seconds)
        (usual_rate,) = (each.rate for each in experts if each.width == 4)
        row_s = max(short.row_bytes / short.rate - short.row_bytes / usual_rate, 0.0)
        return machine.CpuFacts(
            cores, every.instruction_set, read_one, read_all, tuple(experts), tuple(dense), row_s, tuple(trellises)
        )


def _memory_rate(kernels: cpu.Kernels, steps: MeasurementSteps, seconds: float) -> float:
    steps.next(f"memory, {_threads_text(kernels.threads)}")
    memory = np.ones(_MEMORY_BYTES, np.uint8)
    return _repeated(lambda: kernels.read(memory), len(memory), seconds)


def _expert_speed(kernels: cpu.Kernels, stored: formats.PartFormat, num_cols: int, seconds: float) -> _ExpertSpeed:
    """Measures experts that are computed for one token, with all neurons running."""
    spec = formats.ExpertSpec("silu", _EXPERT_ROWS, formats.MATRICES, (), 0)
    layout = layouts.expert_layout(formats.ExpertFormat(stored, stored, stored), "none", spec, num_cols)
    rows = _random_rows(layout.records, _EXPERT_ROWS)
    numbers = cpu.expert_numbers(layout, "none", spec.function)
    token, weight = np.zeros(1, np.int64), np.ones(1, np.float32)
    num_experts = _WEIGHT_BYTES // rows.nbytes
    # Each expert is a copy, so that together they are more than caches have.
    works = [(cpu.ExpertRows(numbers, None, rows.copy(), 0.0), token, weight) for _ in range(num_experts)]
    x = torch.ones(1, num_cols)
    rate = _repeated(lambda: kernels.experts(x, works), num_experts * rows.nbytes, seconds)
    return _ExpertSpeed(rate, rows.shape[1] / len(formats.MATRICES))


def _dense_rate(kernels: cpu.Kernels, width: int, seconds: float) -> float:
    stored = _stored(width)
    x = torch.ones(1, _EXPERT_COLS)
    if stored == formats.BF16:
        numbers = cpu.stored_numbers(torch.bfloat16, _EXPERT_COLS)
        matrix = torch.full((_WEIGHT_BYTES // (2 * _EXPERT_COLS), _EXPERT_COLS), 0.01, dtype=torch.bfloat16)
        rows = matrix.view(torch.uint8).numpy()
    else:
        layout = layouts.row_layout([("weight", stored, False)], _EXPERT_COLS)
        numbers, rows = cpu.row_numbers(layout, "weight"), _random_rows(layout, _WEIGHT_BYTES // layout.row_bytes)
    return _repeated(lambda: kernels.product(x, numbers, rows), rows.nbytes, seconds)


def _stored(width: int) -> formats.PartFormat:
    return formats.BF16 if width == formats.BF16.width else formats.part_format(width, 64)


def _random_rows(layout: formats.RowLayout, num_rows: int) -> NDArray[np.uint8]:
    """Returns rows u8 [num_rows, row_bytes] of random codes with usual scales; in bfloat16 all weights are equal."""
    rows = np.random.default_rng(0).integers(0, 256, (num_rows, layout.row_bytes), np.uint8)
    for part in layout.parts:
        if part.format == formats.BF16:
            rows[:, part.offset : part.offset + part.num_bytes] = np.tile(_BF16_BYTES, layout.num_cols)
            continue
        end = part.scales_offset
        values = ((part.format.scale_bytes(layout.num_cols), 0.01), (part.format.zero_bytes(layout.num_cols), 7.5))
        for num_bytes, value in values:
            begin, end = end, end + num_bytes
            rows[:, begin:end] = np.full(num_bytes // 2, value, np.float16).view(np.uint8)
    return rows


# ---- link -----------------------------------------------------------------------------------------------------------


def _measure_link(steps: MeasurementSteps, seconds: float) -> machine.LinkFacts:
    host = torch.empty(COPY_SIZES[-1], dtype=torch.uint8, pin_memory=True)
    device = torch.empty(COPY_SIZES[-1], dtype=torch.uint8, device="cuda")
    copies = []
    for size in COPY_SIZES:
        steps.next(f"copies of {size >> 10} KiB to the GPU")
        times = max(1, COPY_SIZES[-1] // size)

        def copy(size: int = size, times: int = times) -> None:
            for _ in range(times):
                device[:size].copy_(host[:size], non_blocking=True)
            torch.cuda.synchronize()  # until then copies are only requested

        copies.append(machine.SizedRate(size, _repeated(copy, size * times, seconds)))
    gpu = torch.cuda.get_device_properties(0)
    return machine.LinkFacts(gpu.name, gpu.total_memory, tuple(copies))
