"""Facts about this machine: its memory, its GPU, and the rates that `moe-pack doctor` measured."""

import ctypes
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from typing import Annotated, Literal

from moe_pack import formats
from moe_pack.formats.base import json_files
from moe_pack.formats.base.limits import cgroup_folders, number_in

# ---- memory ---------------------------------------------------------------------------------------------------------

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # glibc's malloc.h
_LARGE_BYTES = 4 << 20
_USUAL_SHARE, _MAPPED_SHARE = 0.75, 0.9  # of free memory; others that need memory get that of mapped files at once
_MEMINFO, _STATUS = Path("/proc/meminfo"), Path("/proc/self/status")


# A control group's files with the limit and the use of memory, and the line of memory.stat with files' pages, which do
# not count as used here: the system evicts them before a process reaches the limit.
_CGROUP_VERSIONS = (
    ("memory.max", "memory.current", "file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
)


def available_bytes() -> int | None:
    """Returns the memory that is free without swapping, within the control group's limit; None if it is not known."""
    return _least_known(_field(_MEMINFO, "MemAvailable"), _left_in_cgroup())


def usual_bytes() -> int | None:
    """Returns the memory that a run takes if no option says how much; None if the free memory is not known."""
    free = available_bytes()
    return None if free is None else int(_USUAL_SHARE * free)


def mapped_bytes() -> int | None:
    """Returns the memory that a mapped pack may take if no option says how much; None if that is not known."""
    free = available_bytes()
    return None if free is None else int(_MAPPED_SHARE * free)


def total_bytes() -> int | None:
    """Returns all memory of the machine, within the control group's limit; None if it is not known."""
    folders = cgroup_folders("memory")
    limits = (number_in(folder / limit) for folder in folders for limit, _, _ in _CGROUP_VERSIONS)
    return _least_known(_field(_MEMINFO, "MemTotal"), *limits)


def _least_known(*numbers: int | None) -> int | None:
    return min((number for number in numbers if number is not None), default=None)


def anonymous_bytes() -> int | None:
    """Returns the process's own memory, without pages of files; None if it is not known."""
    return _field(_STATUS, "RssAnon")


def give_back_freed() -> None:
    """Gives freed memory that C's allocator keeps back to the system, which pays after stages that free much.

    The allocator keeps freed memory between used memory, and large tensors that do not fit there take new memory.
    """
    _call_libc("malloc_trim", ctypes.c_size_t(0))


def give_back_large_at_once() -> None:
    """From now on, memory of 4 MiB and more goes back to the system as soon as it is freed; only glibc needs that.

    Left alone, the allocator raises its own bound to 32 MiB once such memory was freed. Then large tensors lie in its
    heaps, one for each thread, and a conversion of a few experts at once holds half as much memory again.
    """
    _call_libc("mallopt", _M_MMAP_THRESHOLD, _LARGE_BYTES)


def use_one_heap() -> None:
    """From now on, all threads allocate from one heap; only glibc has more. Call it before threads are started.

    Left alone, the allocator has up to 8 heaps for each CPU, and memory freed in one is of no use to another: the
    memory of a server with many threads grows long after its first requests.
    """
    _call_libc("mallopt", _M_ARENA_MAX, 1)


def _call_libc(name: str, *arguments: object) -> None:
    function = getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None
    if function is not None:
        function(*arguments)


def _field(path: Path, name: str) -> int | None:
    """Returns the number of a line `Name:  123 kB` in a file of the kernel, in bytes; None without such a line."""
    if not path.is_file():
        return None
    for line in path.read_text("ascii", "replace").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return None


def _left_in_cgroup() -> int | None:
    left = []
    for folder in cgroup_folders("memory"):
        for limit_file, used_file, page_cache in _CGROUP_VERSIONS:
            limit, used = number_in(folder / limit_file), number_in(folder / used_file)
            if limit is not None and used is not None:
                left.append(max(limit - used + _stat(folder / "memory.stat", page_cache), 0))
    return _least_known(*left)


def _stat(path: Path, name: str) -> int:
    lines = path.read_text("ascii", "replace").splitlines() if path.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


# ---- the GPU --------------------------------------------------------------------------------------------------------

LEAST_CAPABILITY = (8, 0)  # compute capability of the first GPUs with tensor cores for bfloat16 and tf32
_NAME_BYTES = 256
_MAJOR, _MINOR = 75, 76  # the two halves of the compute capability, in cuda.h's CUdevice_attribute


@dataclass(frozen=True, slots=True)
class GpuHere:
    """The GPU on which torch computes."""

    name: str
    memory_bytes: int
    fault: str | None = None  # why our kernels do not run on it, in words; None if they do


def num_gpus() -> int:
    """Returns how many GPUs torch finds."""
    import torch

    return torch.cuda.device_count()


def gpu_here(number: int = 0) -> GpuHere | None:
    """Returns a GPU of this machine, which torch and the driver count from 0; None if torch finds none.

    The driver says what it is. torch would make a context on the GPU, whose memory an engine has to count.
    """
    import torch  # here, because this takes a second, and most callers of this module need no GPU

    if not torch.cuda.is_available():
        return None
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return GpuHere("a GPU", 0, "the kernels need an NVIDIA GPU")
    device, memory, major, minor = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(_NAME_BYTES)
    if (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), number)
        or driver.cuDeviceGetName(name, _NAME_BYTES, device)
        or driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    ):
        return GpuHere("a GPU", 0, "the driver does not say which GPU this is")
    found = GpuHere(name.value.decode("utf-8", "replace"), memory.value)
    return replace(found, fault=gpu_fault(found.name, (major.value, minor.value)))


def gpu_fault(name: str, capability: tuple[int, int]) -> str | None:
    """Returns why our kernels do not run on a GPU of NVIDIA, in words; None if they do."""
    if capability < LEAST_CAPABILITY:
        have, need = (".".join(map(str, version)) for version in (capability, LEAST_CAPABILITY))
        return f"{name} has compute capability {have}; the kernels need {need} or later (A100, RTX 30 series and newer)"
    if importlib.util.find_spec("triton") is None:
        return "the kernels need triton, which is not installed: pip install triton"
    return None


# ---- measured rates -------------------------------------------------------------------------------------------------

ReadMode = Literal["direct", "pread", "map"]
Rate = Annotated[float, json_files.Within(1e-3, 1e18)]  # bytes a second

VERSION = 5  # of the file with the facts; a file of another version counts as missing
MAX_GAP_BYTES = 1 << 20
_MAX_FACTS_BYTES = 1 << 20
_ROW_ALIGN = 16  # of rows within a file (docs/pack.md)


@dataclass(frozen=True, slots=True)
class ReadRate:
    """The rate of scattered reads of one size, with the number of threads that is best for it."""

    mode: ReadMode
    size: json_files.Positive
    threads: json_files.Positive
    rate: Rate


@dataclass(frozen=True, slots=True)
class SizedRate:
    """The rate at one size."""

    size: json_files.Positive
    rate: Rate


@dataclass(frozen=True, slots=True)
class WidthRate:
    """The rate at which matrices of one width are multiplied, in bytes of the matrix."""

    width: json_files.Positive  # bits of a code; 16: bfloat16; of a trellis, bits of two weights
    rate: Rate


def _rate_at(curve: Sequence[SizedRate], size: float) -> float:
    """Returns the rate at a size, interpolated in the logarithms of sizes and rates."""
    first, last = curve[0], curve[-1]
    if size <= first.size:
        return first.rate * size / first.size
    if size >= last.size:
        return last.rate
    above = next(i for i, point in enumerate(curve) if point.size >= size)
    low, high = curve[above - 1], curve[above]
    share = log(size / low.size) / log(high.size / low.size)
    return exp((1 - share) * log(low.rate) + share * log(high.rate))


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """A disk: rates of scattered reads from files that the system's cache did not have."""

    name: str | None  # the block device's; None if the system does not say it
    file_bytes: json_files.Count  # of all files
    mode: Literal["direct", "pread"]  # the way of reading that is best over all sizes
    threads: json_files.Positive  # likewise
    curve: tuple[SizedRate, ...]  # the rates of this way, in rising order of sizes
    alone: tuple[SizedRate, ...]  # with one read at a time
    best: tuple[ReadRate, ...]  # of each mode and size
    read_cpu_s: json_files.Amount = 0.0  # time of a processor that each read takes
    byte_cpu_s: json_files.Amount = 0.0  # and each of its bytes

    @property
    def smallest_efficient_bytes(self) -> int:
        """The smallest measured size whose rate is at least half of the best rate."""
        most = max(point.rate for point in self.curve)
        return next(point.size for point in self.curve if 2 * point.rate >= most)

    def rate(self, size: float) -> float:
        """Returns the rate of scattered reads of `size` bytes, interpolated between measured sizes (log to log).

        Below the smallest size a read takes as long as one of that size; above the largest the rate stays.
        """
        return _rate_at(self.curve, size)

    def seconds(self, num_reads: float, size: float) -> float:
        """Estimates the seconds of scattered reads, several in flight: `num_reads * size / rate(size)`."""
        return num_reads * size / self.rate(size) if num_reads and size else 0.0

    def seconds_for_few(self, num_reads: float, size: float) -> float:
        """Estimates the same for reads that may be too few to keep the disk busy: at least as for one read alone."""
        return max(self.seconds(num_reads, size), size / _rate_at(self.alone, size) if num_reads and size else 0.0)

    def cpu_seconds(self, num_reads: float, num_bytes: float) -> float:
        """Estimates the time that reads take of one processor, which may compute meanwhile."""
        return num_reads * self.read_cpu_s + num_bytes * self.byte_cpu_s

    def seconds_for_rows(self, share: float, row_bytes: int, num_rows: int) -> float:
        """Estimates the seconds of reading the running rows of `num_rows`, if each runs with probability `share`.

        One read covers two running rows if at most m rows lie between them, with the m that makes the whole fastest:
            gaps of j rows have probability share * (1 - share)^j; gaps of up to m are read too
            reads = 1 + (running - 1) * (1 - share)^(m + 1)
            bytes = (running + rows in gaps that are read) * row_bytes, and each read to whole blocks at both ends
        Source:  the cutover of CORM, Fig. 9, for a disk and with neighbours merged.
        """
        assert 0 <= share <= 1, "a share of the rows"
        running = share * num_rows
        if running <= 0:
            return 0.0
        edges = formats.DISK_BLOCK_BYTES - _ROW_ALIGN  # mean of both ends together: rows begin at any multiple of 16
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

    def cutover(self, row_bytes: int, num_rows: int, extent_bytes: int) -> float:
        """Returns CORM's cutover: the share of running rows, in whole percent, up to which reading only them pays."""
        whole = self.seconds(1, extent_bytes)
        pays = (self.seconds_for_rows(percent / 100, row_bytes, num_rows) < whole for percent in range(1, 101))
        return next((percent for percent, is_faster in enumerate(pays) if not is_faster), 100) / 100

    def gap_bytes(self) -> int:
        """Returns the largest gap between two blocks, in bytes, across which one read is faster than two."""
        block = formats.DISK_BLOCK_BYTES
        gaps, apart = range(0, MAX_GAP_BYTES + 1, block), self.seconds(2, block)
        return max(gap for gap in gaps if gap == 0 or self.seconds(1, 2 * block + gap) < apart)


def _curve(*points: tuple[int, float]) -> tuple[SizedRate, ...]:
    return tuple(SizedRate(kibibytes << 10, 1e6 * rate) for kibibytes, rate in points)


# The disk that is assumed before one was measured: 1 GB/s in reads of 256 KiB and more, by eight threads. Its shape is
# that of a virtual disk (docs/benchmarks.md, machine E), rounded; a disk of a desktop is faster in small reads.
USUAL_DISK = DiskFacts(
    name=None,
    file_bytes=0,
    mode="direct",
    threads=8,
    curve=_curve((4, 150), (16, 500), (64, 900), (256, 1000)),
    alone=_curve((4, 35), (16, 100), (64, 300), (256, 650), (1024, 1000)),
    best=(ReadRate("direct", 256 << 10, 8, 1e9),),
    read_cpu_s=8e-6,
    byte_cpu_s=8e-11,
)


def disk_cutover(layout: "formats.PackLayout", disk: DiskFacts) -> float:
    """Returns the share of running neurons below which reading only their rows is faster, for all experts of a pack."""
    kinds = {(e.records.row_bytes, e.num_rows, e.records_bytes) for layer in layout.experts for e in layer}
    return min(disk.cutover(*kind) for kind in kinds)


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """A CPU; without native kernels only the number of cores is known."""

    cores: json_files.Positive
    instruction_set: str | None
    read_one: Rate | None  # at which one thread reads memory
    read_all: Rate | None  # at which all threads do
    experts: tuple[WidthRate, ...]  # computed for one token by all threads, in rising order of widths
    dense: tuple[WidthRate, ...]  # likewise, of dense matrices
    row_s: json_files.Amount | None  # that a row of an expert takes besides its bytes; matters if rows are short
    trellises: tuple[WidthRate, ...] = ()  # as `experts`, stored as trellises


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """A GPU and the link to it: rates of copies from page-locked memory, in rising order of sizes."""

    name: str
    memory_bytes: json_files.Count
    copies: tuple[SizedRate, ...]


@dataclass(frozen=True, slots=True)
class FixedCosts:
    """Seconds of decoding that do not depend on sizes."""

    token_s: json_files.Amount
    layer_s: json_files.Amount
    expert_s: json_files.Amount  # for each routed expert
    miss_s: json_files.Amount  # for each missing expert that is read whole, besides its read
    rows_s: json_files.Amount  # for each expert of which single rows are read, as often as some are missing


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Everything that was measured."""

    date: str  # ISO 8601
    drive: DiskFacts
    cpu: CpuFacts
    link: LinkFacts | None  # None if torch finds no GPU
    fixed: FixedCosts | None = None  # of the CPU; None if they were not measured


@dataclass(frozen=True, slots=True)
class _FactsFile:
    version: int
    facts: MachineFacts


def facts_file(cache_folder: Path, path: Path) -> Path:
    """Returns the file in `cache_folder` for the facts about the file system of `path`.

    Raises:  RunError if there is no such path.
    """
    device, name = device_of(path)
    label = f"{os.major(device)}-{os.minor(device)}" + (f"-{name}" if name else "")
    return cache_folder / f"doctor-{label}.json"


def device_of(path: Path) -> tuple[int, str | None]:
    """Returns the number of the device that a path is on, and its name if it is a block device.

    Raises:  RunError if there is no such path.
    """
    try:
        device = path.stat().st_dev
    except OSError as fault:
        raise formats.RunError(f"{path}: cannot be found ({fault.strerror})") from fault
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    return device, block.resolve().name if block.exists() else None


def save_facts(facts: MachineFacts, cache_folder: Path, path: Path) -> Path:
    """Writes the facts about the file system of `path`, in place of older facts, and returns their file.

    Raises:  RunError if the folder cannot be written.
    """
    file = facts_file(cache_folder, path)
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        cache_folder.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(formats.canonical(formats.dump(_FactsFile(VERSION, facts))))
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as fault:
        raise formats.RunError(f"{file}: cannot be written ({fault.strerror})") from fault
    return file


def load_facts(cache_folder: Path, path: Path) -> MachineFacts | None:
    """Reads the facts about the file system of `path`; None if there are none of this version.

    Raises:  RunError if the facts are damaged, or there is no such path.
    """
    from moe_pack.formats.pack.safetensors import read_small

    file = facts_file(cache_folder, path)
    if not file.exists():
        return None
    try:
        raw = read_small(file, _MAX_FACTS_BYTES, formats.RunError).tobytes()
        values = formats.parse(raw, file.name, formats.RunError)
        if isinstance(values, dict) and values.get("version") != VERSION:
            return None
        facts = formats.load(_FactsFile, values, file.name, formats.RunError).facts
        for name, curve in (("curve", facts.drive.curve), ("alone", facts.drive.alone)):
            sizes = [point.size for point in curve]
            if not curve or sizes != sorted(set(sizes)):  # `DiskFacts.rate` cannot use it
                expected = "expected positive sizes in rising order"
                raise formats.RunError(f"{file.name}: drive: {name}: sizes are {sizes}, {expected}")
    except formats.RunError as fault:
        raise formats.RunError(f"{fault}; remove {file}, or run moe-pack doctor again") from fault
    return facts
