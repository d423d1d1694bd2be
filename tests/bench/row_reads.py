"""How fast rows of an n-gram table come from the disk and from the system's cache, by several ways to read them.

    python tests/bench/row_reads.py

The table is a file of random bytes, larger than the memory of the cgroup in which all is read. Each round draws new
rows, and reads them by every way, in an order of its own: first after the file was dropped from the cache, then again
from the cache. Times are medians over rounds; the ratios are to the first way, of medians.
"""

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import click
import numpy as np
from benchlib import finish, folder_option, json_option, table
from benchlib.confined import MemoryCgroup, NoCgroupError
from numpy.typing import NDArray
from tqdm import tqdm

from moe_pack.formats.base.commands import read_size
from moe_pack.runtime.cpu import Kernels
from moe_pack.runtime.cpu.reads import NUM_THREADS, NativeReads

ROW_BYTES = 272  # 256 values in FP8, scales, and a CRC-32, in whole words
COUNTS = (32, 8192)  # rows of a token and of a prompt
_BLOCK = 4096
_THREADS = (NUM_THREADS, 1, 32)  # the engine's first

Rows = NDArray[np.int64]
Read = Callable[[Rows], object]


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--table-size", default="8G", show_default=True, help="Of the table.")
@click.option("--limit", default="1G", show_default=True, help="Memory of the cgroup, its page cache included.")
@click.option("--rounds", default=40, show_default=True, help="Of which each reads by every way.")
@folder_option
@click.option("--here", is_flag=True, hidden=True, help="Measure in this process.")
@json_option
def main(table_size: str, limit: str, rounds: int, folder: Path, here: bool, as_json: bool) -> None:
    path = _written(folder / "rows.bin", read_size(table_size))
    if here:
        found = measured(path, rounds)
        finish({"milliseconds": found}, text_of(found), as_json)
    command = [sys.executable, *sys.argv, "--here"]
    try:
        with MemoryCgroup(read_size(limit)) as group:
            code = subprocess.run(group.inside(command), check=False).returncode
    except NoCgroupError as fault:
        raise click.ClickException(str(fault)) from fault
    if code < 0:
        raise click.ClickException(f"the process in the cgroup ended by signal {-code}; give a larger --limit")
    sys.exit(code)


def _written(path: Path, num_bytes: int) -> Path:
    """Writes random bytes, unless the file has so many."""
    if path.exists() and path.stat().st_size == num_bytes:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    with path.open("wb") as file:
        for at in tqdm(range(0, num_bytes, 1 << 26), desc="table", unit="64 MiB"):
            file.write(draw.bytes(min(1 << 26, num_bytes - at)))
        os.fsync(file.fileno())
    return path


def measured(path: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Returns the median milliseconds of each way, for each number of rows, from the disk and from the cache."""
    num_rows, draw = path.stat().st_size // ROW_BYTES, np.random.default_rng()
    seconds: dict[tuple[str, int, str], list[float]] = {}
    with ExitStack() as stack, path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped.madvise(mmap.MADV_RANDOM)
        ways = _ways(path, mapped, num_rows, stack)
        for _ in tqdm(range(rounds), unit="round"):
            for number in draw.permutation(len(ways)):
                name, read = list(ways.items())[number]
                for count in COUNTS:
                    rows = np.unique(draw.integers(0, num_rows, count))
                    mapped.madvise(mmap.MADV_DONTNEED)
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    for place in ("disk", "cache"):
                        began = time.perf_counter()
                        read(rows)
                        seconds.setdefault((name, count, place), []).append(time.perf_counter() - began)
    medians: dict[str, dict[str, float]] = {}
    for (name, count, place), times in seconds.items():
        medians.setdefault(name, {})[f"{count} rows, {place}"] = 1e3 * median(times)
    return {name: medians[name] for name in ways}


def _ways(path: Path, mapped: mmap.mmap, num_rows: int, stack: ExitStack) -> dict[str, Read]:
    ways: dict[str, Read] = {}
    for threads in _THREADS:
        ways[f"`pread`, {threads} thread{'s' * (threads > 1)}"] = _preads(path, threads, stack)
    ways[f"direct blocks of 4 KiB, {NUM_THREADS} threads"] = _direct(path, stack)
    records = np.frombuffer(mapped, np.uint8)[: num_rows * ROW_BYTES].reshape(num_rows, ROW_BYTES)
    for threads in _THREADS:
        ways[f"map (`MADV_RANDOM`), {threads} thread{'s' * (threads > 1)}"] = _gathers(records, threads, stack)
    return ways


def _gathers(records: NDArray[np.uint8], threads: int, stack: ExitStack) -> Read:
    kernels = Kernels(threads)
    stack.callback(kernels.close)
    return lambda rows: kernels.gather(records, rows.astype(np.int32))


def _preads(path: Path, threads: int, stack: ExitStack) -> Read:
    reads = NativeReads(np.empty(max(COUNTS) * ROW_BYTES, np.uint8), False, threads)
    stack.callback(reads.close)
    file = reads.open(path)

    def read(rows: Rows) -> None:
        places = np.arange(len(rows)) * ROW_BYTES
        reads.wait(reads.submit(file, rows * ROW_BYTES, places, np.full(len(rows), ROW_BYTES), True))

    return read


def _direct(path: Path, stack: ExitStack) -> Read:
    """Reads the one or two blocks that have a row, past the system's cache."""
    memory = np.frombuffer(mmap.mmap(-1, max(COUNTS) * 2 * _BLOCK), np.uint8)
    reads = NativeReads(memory, True, NUM_THREADS)
    stack.callback(reads.close)
    file = reads.open(path)

    def read(rows: Rows) -> None:
        begins = rows * ROW_BYTES // _BLOCK * _BLOCK
        sizes = -(-(rows + 1) * ROW_BYTES // _BLOCK) * _BLOCK - begins
        reads.wait(reads.submit(file, begins, np.cumsum(sizes) - sizes, sizes, True))

    return read


def text_of(found: dict[str, dict[str, float]]) -> str:
    """Returns the table, with ratios to the engine's own way, which is the first."""
    first = next(iter(found.values()))
    rows = [
        [name, *(f"{value:.2f} ms ({value / first[kind]:.2f})" for kind, value in times.items())]
        for name, times in found.items()
    ]
    return table(["how rows are read", *first], rows)


if __name__ == "__main__":
    main()
