"""What a machine can do: the rates that `doctor` measured once, kept in a folder, and what follows from them.

The planner and the runtime ask here; nothing is measured. Rates are bytes a second.
"""

import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from math import exp, log
from pathlib import Path
from typing import Literal

from moe_pack.formats import DISK_BLOCK_BYTES, RunError, canonical, dump, load, parse

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
class DriveFacts:
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
    drive: DriveFacts
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
