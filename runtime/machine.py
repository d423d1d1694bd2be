"""How much memory there is for this process, and how much it holds. Linux; elsewhere nothing is known.

What a machine can do: the rates that `doctor` measured once, kept in a folder, and what follows from them.

The planner and the runtime ask here; nothing is measured. Rates are bytes a second.

Measures what a machine can do: its drive as the engine reads it, its CPU, its link to a GPU. `machine` holds it.

A drive is measured on the expert files of a pack, or on a file without a name that is written for it and goes with
this process, however that ends.
"""

import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from math import exp, log
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from moe_pack.formats import (
    BF16,
    DISK_BLOCK_BYTES,
    MATRICES,
    NO_PROGRESS,
    ROW_GROUP,
    ExpertFormat,
    ExpertSpec,
    Pack,
    PackError,
    PartFormat,
    Progress,
    RangeReader,
    RowLayout,
    RunError,
    canonical,
    dump,
    load,
    parse,
    part_format,
    trellis_format,
)
from moe_pack.formats.commands import Stage
from moe_pack.formats.layout import expert_layout, row_layout
from moe_pack.formats.manifest import MANIFEST_FILE
from moe_pack.formats.plan import TRELLIS_WIDTHS
from moe_pack.runtime.cpu import (
    ExpertRows,
    Kernels,
    expert_numbers,
    is_available,
    num_cpus,
    row_numbers,
    stored_numbers,
)
from moe_pack.runtime.offload import Reads, open_reads
from moe_pack.runtime.offload.disk import BlockingReads

_MEMINFO, _STATUS = Path("/proc/meminfo"), Path("/proc/self/status")
# Of the control groups of versions 2 and 1: the limit, what counts against it, and what of that is files', in
# memory.stat: pages of theirs give way.
_CGROUPS = (
    ("memory.max", "memory.current", "file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
)


def available_bytes() -> int | None:
    """What can be had without swapping, the process's control group regarded; None where it cannot be told."""
    free = _field(_MEMINFO, "MemAvailable")
    left = _left_in_cgroup()
    known = [number for number in (free, left) if number is not None]
    return min(known) if known else None


def total_bytes() -> int | None:
    """All memory that this process may ever have, its control group regarded; None where it cannot be told."""
    known = [number for number in (_field(_MEMINFO, "MemTotal"), *_limits()) if number is not None]
    return min(known) if known else None


def anonymous_bytes() -> int | None:
    """The process's own memory that is no file's; None where it cannot be told."""
    return _field(_STATUS, "RssAnon")


def give_back_freed() -> None:
    """Gives memory back to the system that was freed and that C's allocator keeps, wherever it lies; glibc alone does.

    What was freed between things still in use stays with the process otherwise, and large tensors that no longer fit
    there take new memory: after stages that make and free much.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _field(path: Path, name: str) -> int | None:
    """A line `Name:  123 kB` of a file of the kernel's, in bytes."""
    if not path.is_file():
        return None
    for line in path.read_text("ascii", "replace").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return None


def _left_in_cgroup() -> int | None:
    for folder in _cgroup_folders():
        for limit_name, used_name, files_name in _CGROUPS:
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and used is not None:
                return max(limit - used + _stat(folder / "memory.stat", files_name), 0)
    return None


def _limits() -> list[int | None]:
    return [_number(folder / limit_name) for folder in _cgroup_folders() for limit_name, _, _ in _CGROUPS]


def _stat(path: Path, name: str) -> int:
    lines = path.read_text("ascii", "replace").splitlines() if path.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def _cgroup_folders() -> list[Path]:
    """The folders that may hold this process's limits: version 2's, then version 1's controller of memory."""
    listed = Path("/proc/self/cgroup")
    folders = []
    for line in listed.read_text("utf-8").splitlines() if listed.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = Path("/sys/fs/cgroup") / controllers
            folders += [root / path.lstrip("/"), root]
    return folders


def _number(path: Path) -> int | None:
    if not path.is_file():
        return None
    text = path.read_text("ascii", "replace").strip()
    return int(text) if text.isdigit() else None


ReadMode = Literal["direct", "pread", "map"]

_ROW_ALIGN = 16  # of rows within a file (docs/format.md)
VERSION = 3  # of the file; what another wrote is as good as missing


@dataclass(frozen=True, slots=True)
class ReadRate:
    """How fast scattered reads of one size are, with the best number of threads."""

    mode: ReadMode
    size: int
    threads: int
    rate: float


@dataclass(frozen=True, slots=True)
class SizedRate:
    """The rate at one size."""

    size: int
    rate: float


@dataclass(frozen=True, slots=True)
class WidthRate:
    """The rate at which matrices stored at one width (16: bfloat16; of a trellis, of two weights) are multiplied.

    In bytes of theirs.
    """

    width: int
    rate: float


MAX_GAP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """A drive, as it was measured on files of `file_bytes`: scattered reads, nothing in the system's cache.

    `best`: by mode and size.   `mode` and `threads`: what comes nearest to the best over all sizes; `curve`, rising in
    size, has its rates; `alone` those of one read at a time.   `name`: the device's, where the system says it.
    """

    name: str | None
    file_bytes: int
    mode: Literal["direct", "pread"]
    threads: int
    curve: tuple[SizedRate, ...]
    alone: tuple[SizedRate, ...]
    best: tuple[ReadRate, ...]

    @property
    def smallest_efficient_bytes(self) -> int:
        """The smallest size measured whose rate is at least half of the best."""
        most = max(point.rate for point in self.curve)
        return next(point.size for point in self.curve if 2 * point.rate >= most)

    def rate(self, size: float) -> float:
        """The rate of scattered reads of so many bytes: between those measured, straight in both logarithms.

        Below the smallest size a read takes as long as one of that size; above the largest the rate stays.
        """
        return _rate_at(self.curve, size)

    def seconds(self, num_reads: float, size: float) -> float:
        """How long scattered reads of so many bytes each take, several in flight: `num_reads * size / rate(size)`."""
        return num_reads * size / self.rate(size) if num_reads and size else 0.0

    def seconds_for_few(self, num_reads: float, size: float) -> float:
        """The same where they may be too few to keep the drive busy: no less than one of them takes alone."""
        return max(self.seconds(num_reads, size), size / _rate_at(self.alone, size) if num_reads and size else 0.0)

    def seconds_for_rows(self, share: float, row_bytes: int, num_rows: int) -> float:
        """How long reading the running ones of `num_rows` rows takes, each of which runs with probability `share`.

        Neighbours are read together where at most so many rows lie between them as makes the whole the fastest:
            gaps of j rows have probability share * (1 - share)^j; those of up to m are read over
            reads = 1 + (running - 1) * (1 - share)^(m + 1)
            bytes = (running + rows read over) * row_bytes, and each read to whole blocks at both ends
        Source:  the cutover of CORM, Fig. 9, for a drive and with neighbours merged.
        """
        assert 0 <= share <= 1, "a share of the rows"
        running = share * num_rows
        if running <= 0:
            return 0.0
        edges = DISK_BLOCK_BYTES - _ROW_ALIGN  # mean of both ends together: rows may begin at any multiple
        most_gaps, merged = max(running - 1, 0.0), 0
        fastest = float("inf")
        while True:
            left = (1 - share) ** (merged + 1)
            num_reads = min(running, 1.0) + most_gaps * left
            # The sum of j * share * (1 - share)^j for j up to m.
            over = (1 - share) * (1 - left / (1 - share) * (1 + merged * share)) / share if share < 1 else 0.0
            num_bytes = min((running + most_gaps * over) * row_bytes, num_rows * row_bytes)
            fastest = min(fastest, self.seconds(num_reads, num_bytes / num_reads + edges))
            if merged >= num_rows:
                return fastest
            merged = 2 * merged + 1

    def rows_pay(self, share: float, row_bytes: int, num_rows: int, extent_bytes: int) -> bool:
        """Whether reading the running rows alone takes less time than reading an expert's extent whole."""
        return self.seconds_for_rows(share, row_bytes, num_rows) < self.seconds(1, extent_bytes)

    def cutover(self, row_bytes: int, num_rows: int, extent_bytes: int) -> float:
        """The share of running rows, in whole hundredths, up to which reading them alone pays: CORM's cutover."""
        pays = (self.rows_pay(share / 100, row_bytes, num_rows, extent_bytes) for share in range(1, 101))
        return next((share for share, one in enumerate(pays) if not one), 100) / 100

    def gap_bytes(self) -> int:
        """The most whole blocks that are read over between two single blocks faster than these are read apart."""
        gaps = range(0, MAX_GAP_BYTES + 1, DISK_BLOCK_BYTES)
        apart = self.seconds(2, DISK_BLOCK_BYTES)
        return max(gap for gap in gaps if gap == 0 or self.seconds(1, 2 * DISK_BLOCK_BYTES + gap) < apart)


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """The CPU; without the native kernels, only how many cores it has.

    `read_one`, `read_all`: memory read by one thread, by all.   `experts`, `dense`: experts and dense matrices computed
    for one token by all threads, by width, rising.   `row_s`: seconds that each row of an expert takes beside its
    bytes; it shows where rows are short.   `trellises`: experts stored as trellises.
    """

    cores: int
    instruction_set: str | None
    read_one: float | None
    read_all: float | None
    experts: tuple[WidthRate, ...]
    dense: tuple[WidthRate, ...]
    row_s: float | None
    trellises: tuple[WidthRate, ...] = ()


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """A GPU and the link to it: copies from page-locked memory, by size rising."""

    name: str
    memory_bytes: int
    copies: tuple[SizedRate, ...]


@dataclass(frozen=True, slots=True)
class FixedCosts:
    """Seconds of decoding that no size explains: of a token, of each layer, of each routed expert.

    `miss_s`: of each expert that is brought in, beside what reading it takes.
    """

    token_s: float
    layer_s: float
    expert_s: float
    miss_s: float


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What was measured, and on which day (ISO 8601). `link` is None where torch finds no GPU.

    `fixed`: of the CPU; None where it was not measured.
    """

    date: str
    drive: DiskFacts
    cpu: CpuFacts
    link: LinkFacts | None
    fixed: FixedCosts | None = None


@dataclass(frozen=True, slots=True)
class _Frame:
    version: int
    facts: MachineFacts


def facts_file(cache_folder: Path, path: Path) -> Path:
    """Where the facts for the file system that holds a path are kept.

    Raises:  RunError if there is no such path.
    """
    device, name = device_of(path)
    label = f"{os.major(device)}-{os.minor(device)}" + (f"-{name}" if name else "")
    return cache_folder / f"doctor-{label}.json"


def device_of(path: Path) -> tuple[int, str | None]:
    """The device a path lies on: its number, and its name where it is a block device.

    Raises:  RunError if there is no such path.
    """
    try:
        device = path.stat().st_dev
    except OSError as fault:
        raise RunError(f"{path}: found no such folder or file ({fault.strerror})") from fault
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    return device, block.resolve().name if block.exists() else None


def save_facts(facts: MachineFacts, cache_folder: Path, path: Path) -> Path:
    """Keeps facts for the file system that holds a path, in the place of older ones; the file.

    Raises:  RunError if the folder cannot be written.
    """
    file = facts_file(cache_folder, path)
    beside = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        cache_folder.mkdir(parents=True, exist_ok=True)
        try:
            beside.write_bytes(canonical(dump(_Frame(VERSION, facts))))
            beside.replace(file)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as fault:
        raise RunError(f"{file}: cannot be written ({fault.strerror})") from fault
    return file


def load_facts(cache_folder: Path, path: Path) -> MachineFacts | None:
    """The facts for the file system that holds a path; None where none of this version are kept.

    Raises:  RunError if they are damaged, or there is no such path.
    """
    file = facts_file(cache_folder, path)
    try:
        raw = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as fault:
        raise RunError(f"{file}: cannot be read ({fault.strerror})") from fault
    try:
        values = parse(raw, file.name, RunError)
        if isinstance(values, dict) and values.get("version") != VERSION:
            return None
        facts = load(_Frame, values, file.name, RunError).facts
        _check(facts, file.name)
    except RunError as fault:
        raise RunError(f"{fault}; remove {file}, or run moe-pack doctor again") from fault
    return facts


def _rate_at(curve: Sequence[SizedRate], size: float) -> float:
    first, last = curve[0], curve[-1]
    if size <= first.size:
        return first.rate * size / first.size
    if size >= last.size:
        return last.rate
    above = next(i for i, point in enumerate(curve) if point.size >= size)
    low, high = curve[above - 1], curve[above]
    share = log(size / low.size) / log(high.size / low.size)
    return exp((1 - share) * log(low.rate) + share * log(high.rate))


def _check(facts: MachineFacts, place: str) -> None:
    """Refuses what no measurement gives, and what `rate` could not be taken from."""
    drive, cpu, link, fixed = facts.drive, facts.cpu, facts.link, facts.fixed
    for name, curve in (("curve", drive.curve), ("alone", drive.alone)):
        sizes = [point.size for point in curve]
        if not curve or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise RunError(f"{place}: drive: {name}: found sizes {sizes}, expected positive ones, rising")
    rates = [point.rate for point in (*drive.curve, *drive.alone, *(link.copies if link else ()))]
    rates += [one.rate for one in drive.best] + [one.rate for one in (*cpu.experts, *cpu.dense)]
    rates += [rate for rate in (cpu.read_one, cpu.read_all) if rate is not None]
    seconds = [cpu.row_s or 0.0, *(() if fixed is None else astuple(fixed))]
    if min(seconds) < 0:
        raise RunError(f"{place}: found seconds of less than zero")
    if min(rates) <= 0 or facts.drive.threads < 1:
        raise RunError(f"{place}: found rates or threads of zero or less, expected positive ones")


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


class ReadTrial(NamedTuple):
    """One measurement of a drive."""

    mode: ReadMode
    threads: int
    size: int


@dataclass(frozen=True, slots=True)
class ReadMeasurement:
    """What came of it, in bytes a second."""

    run: ReadTrial
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


def _runs(files: Sequence[_File]) -> list[ReadTrial]:
    """What to measure: every size that a file has room for."""
    sizes = [size for size in READ_SIZES if size <= max(file.num_bytes for file in files)]
    if not sizes:
        raise RunError(f"{files[0].path.name}: found no file of {READ_SIZES[0]} bytes; give a folder that is no pack")
    modes: list[ReadMode] = ["direct"] if _has_direct(files[0].path) else []
    threads = READ_THREADS if is_available() else (1,)
    runs = [ReadTrial(mode, number, size) for size in sizes for mode in (*modes, "pread") for number in threads]
    # Only the kernels bear that a mapped file is cut.
    return runs + ([ReadTrial("map", 1, size) for size in sizes] if is_available() else [])


def _has_direct(path: Path) -> bool:
    with closing(open_reads(_arena(DISK_BLOCK_BYTES), True, 1)) as reads:
        try:
            reads.open(path)
        except RunError:  # the file system refuses: there is no such mode
            return False
    return True


def _measure_drive(
    files: Sequence[_File], runs: Sequence[ReadTrial], name: str | None, steps: _Steps, seconds: float
) -> DiskFacts:
    measured, arena = [], _arena(_ARENA_BYTES)
    for run in runs:
        steps.next(f"{run.mode} {run.size >> 10} KiB, {run.threads} thread{'s' if run.threads > 1 else ''}")
        rate = _map_rate(files, run.size, seconds) if run.mode == "map" else _read_rate(files, run, arena, seconds)
        measured.append(ReadMeasurement(run, rate))
    return drive_facts(measured, name, sum(file.num_bytes for file in files))


def drive_facts(measured: Sequence[ReadMeasurement], name: str | None, file_bytes: int) -> DiskFacts:
    """The best of each mode and size; and the mode and number of threads nearest to the best over all sizes."""
    best: dict[tuple[ReadMode, int], ReadMeasurement] = {}
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
    return DiskFacts(name, file_bytes, mode, threads, tuple(curve), alone, rates)


def _read_rate(files: Sequence[_File], run: ReadTrial, arena: NDArray[np.uint8], seconds: float) -> float:
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
