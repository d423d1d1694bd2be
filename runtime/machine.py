"""What a machine can do: the rates that `doctor` measured once, kept in a folder, and what follows from them.

The planner and the runtime ask here; nothing is measured. Rates are bytes a second.
"""

import os
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import Literal

from moe_pack.formats import RunError, canonical, dump, load, parse
from moe_pack.runtime.reads import READ_UNIT

ReadMode = Literal["direct", "pread", "map"]

_ROW_ALIGN = 16  # of rows within a file (docs/format.md)
VERSION = 1  # of the file; what another wrote is as good as missing


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
class DriveFacts:
    """A drive, as it was measured on files of `file_bytes`: scattered reads, nothing in the system's cache.

    `best`: by mode and size.   `mode` and `threads`: what comes nearest to the best over all sizes; `curve`, rising in
    size, has its rates.   `name`: the device's, where the system says it.
    """

    name: str | None
    file_bytes: int
    mode: Literal["direct", "pread"]
    threads: int
    curve: tuple[SizedRate, ...]
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
        first, last = self.curve[0], self.curve[-1]
        if size <= first.size:
            return first.rate * size / first.size
        if size >= last.size:
            return last.rate
        above = next(i for i, point in enumerate(self.curve) if point.size >= size)
        low, high = self.curve[above - 1], self.curve[above]
        share = log(size / low.size) / log(high.size / low.size)
        return exp((1 - share) * log(low.rate) + share * log(high.rate))

    def seconds(self, num_reads: float, size: float) -> float:
        """How long scattered reads of so many bytes each take, several in flight: `num_reads * size / rate(size)`."""
        return num_reads * size / self.rate(size) if num_reads and size else 0.0

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
        edges = READ_UNIT - _ROW_ALIGN  # mean of both ends together: rows may begin at any multiple
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


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """The CPU; without the native kernels, only how many cores it has.

    `read_one`, `read_all`: memory read by one thread, by all.   `experts`: 4-bit experts computed for one token by all
    threads, bytes of theirs a second.
    """

    cores: int
    instruction_set: str | None
    read_one: float | None
    read_all: float | None
    experts: float | None


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """A GPU and the link to it: copies from page-locked memory, by size rising."""

    name: str
    memory_bytes: int
    copies: tuple[SizedRate, ...]


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What was measured, and on which day (ISO 8601). `link` is None where torch finds no GPU."""

    date: str
    drive: DriveFacts
    cpu: CpuFacts
    link: LinkFacts | None


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


def _check(facts: MachineFacts, place: str) -> None:
    """Refuses what no measurement gives, and what `rate` could not be taken from."""
    curve = facts.drive.curve
    sizes = [point.size for point in curve]
    if not curve or sizes != sorted(set(sizes)) or sizes[0] < 1:
        raise RunError(f"{place}: drive: curve: found sizes {sizes}, expected positive ones, rising")
    cpu, link = facts.cpu, facts.link
    rates = [point.rate for point in (*curve, *(link.copies if link else ()))]
    rates += [one.rate for one in facts.drive.best] + [
        rate for rate in (cpu.read_one, cpu.read_all, cpu.experts) if rate is not None
    ]
    if min(rates) <= 0 or facts.drive.threads < 1:
        raise RunError(f"{place}: found rates or threads of zero or less, expected positive ones")
