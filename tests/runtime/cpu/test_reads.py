"""Reads into the caller's memory: the bytes that plain reading gives, who goes first, and what is said of faults.

Common promises are tested on both kinds, overlapping reads on the native ones.
"""

import mmap
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from numpy.typing import NDArray
from support.cases import case
from support.waiting import HANG_S

from moe_pack.formats import DISK_BLOCK_BYTES, PackError, RunError
from moe_pack.runtime.cpu import is_available
from moe_pack.runtime.cpu.reads import BlockingReads, NativeReads, ReadStats, open_reads

KINDS = (NativeReads, BlockingReads)
AnyReads = NativeReads | BlockingReads
Opener = Callable[..., AnyReads]
MEMORY_BYTES = 1 << 20
CUT = "file.bin: was truncated while it was in use; restore the file and start again"


def numbers(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def aligned(num_bytes: int = MEMORY_BYTES) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


def written(folder: Path, num_bytes: int, name: str = "file.bin") -> tuple[Path, NDArray[np.uint8]]:
    """A file of random bytes, and the bytes."""
    held = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, dtype=np.uint8)
    (folder / name).write_bytes(held.tobytes())
    return folder / name, held


@pytest.fixture
def memory() -> NDArray[np.uint8]:
    return aligned()


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def opener(request: pytest.FixtureRequest) -> Iterator[Opener]:
    """Opens reads of either kind, and closes them."""
    if request.param is NativeReads and not is_available():
        pytest.skip("native kernels were not built: no C++ compiler")
    made: list[AnyReads] = []

    def open_one(*arguments: object, **options: object) -> AnyReads:
        made.append(request.param(*arguments, **options))
        return made[-1]

    yield open_one
    for reads in made:
        reads.close()


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[tuple[NativeReads, int, int]]:
    """Native reads with two threads, a request on them that takes longer than any test, and the number of its file.

    It asks for a large file without content again and again, into the second half of memory.
    """
    if not is_available():
        pytest.skip("native kernels were not built: no C++ compiler")
    path = tmp_path / "holes.bin"
    with path.open("wb") as file:
        file.truncate(64 << 20)
    memory, half = aligned(128 << 20), 64 << 20
    reads = NativeReads(memory, direct=False, num_threads=2)
    file_idx = reads.open(path)
    times = 5_000
    ticket = reads.submit(file_idx, np.zeros(times, np.int64), np.full(times, half), np.full(times, half), False)
    yield reads, ticket, file_idx
    reads.close()


def opened_direct(opener: Opener, memory: NDArray[np.uint8], path: Path, direct: bool) -> tuple[AnyReads, int]:
    reads = opener(memory, direct)
    try:
        return reads, reads.open(path)
    except RunError as fault:
        pytest.skip(str(fault))


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("max_read_bytes", [4096, 12288, 1 << 20])
def test_pieces_in_any_order_are_what_plain_reading_gives(
    opener: Opener, tmp_path: Path, memory: NDArray[np.uint8], direct: bool, max_read_bytes: int
) -> None:
    """Random runs of pieces, some of which follow one another in the file, to places all over memory."""
    path, held = written(tmp_path, 200 * DISK_BLOCK_BYTES)
    opened_direct(opener, memory, path, direct)  # or skip
    reads = opener(memory, direct, 3, max_read_bytes)
    file, random = reads.open(path), np.random.default_rng(7)
    for _ in range(20):
        sizes = random.integers(1, 9, 25) * (DISK_BLOCK_BYTES if direct else 777)
        follows = random.random(25) < 0.6
        offsets = random.integers(0, 120, 25) * (DISK_BLOCK_BYTES if direct else 4001)
        for i in np.flatnonzero(follows[1:]) + 1:
            if offsets[i - 1] + sizes[i - 1] + sizes[i] <= len(held):
                offsets[i] = offsets[i - 1] + sizes[i - 1]
        order, places = random.permutation(25), np.zeros(25, np.int64)
        places[order[1:]] = np.cumsum(sizes[order])[:-1]
        memory[:] = 0
        reads.wait(reads.submit(file, offsets, places, sizes, bool(random.integers(2))))
        expected = np.zeros(len(memory), np.uint8)
        for offset, place, size in zip(offsets, places, sizes, strict=True):
            expected[place : place + size] = held[offset : offset + size]
        assert np.array_equal(memory, expected)


@pytest.mark.parametrize("direct", [False, True])
def test_files_are_open_past_the_systems_cache_where_reads_are_direct(
    opener: Opener, tmp_path: Path, memory: NDArray[np.uint8], direct: bool
) -> None:
    path, _ = written(tmp_path, DISK_BLOCK_BYTES)
    opened_direct(opener, memory, path, direct)
    (held,) = (entry.name for entry in Path("/proc/self/fd").iterdir() if same_target(entry, path))
    (flags,) = re.findall(r"^flags:\s+(\d+)$", Path(f"/proc/self/fdinfo/{held}").read_text(), re.MULTILINE)
    assert bool(int(flags, 8) & os.O_DIRECT) == direct


@pytest.mark.parametrize("direct", [False, True])
def test_a_last_block_that_the_file_ends_in_is_read_as_far_as_it_goes(
    opener: Opener, tmp_path: Path, memory: NDArray[np.uint8], direct: bool
) -> None:
    path, held = written(tmp_path, 3 * DISK_BLOCK_BYTES + 5)
    reads, file = opened_direct(opener, memory, path, direct)
    reads.wait(reads.submit(file, numbers(DISK_BLOCK_BYTES), numbers(8192), numbers(3 * DISK_BLOCK_BYTES), True))
    assert np.array_equal(memory[8192 : 8192 + 2 * DISK_BLOCK_BYTES + 5], held[DISK_BLOCK_BYTES:])
    assert reads.stats().bytes_urgent == 2 * DISK_BLOCK_BYTES + 5


def test_several_requests_of_several_files_are_each_their_own(
    opener: Opener, tmp_path: Path, memory: NDArray[np.uint8]
) -> None:
    reads, tickets, parts = opener(memory, False), [], []
    for i in range(10):
        path, held = written(tmp_path, 50_000 + i, f"{i}.bin")
        tickets.append(reads.submit(reads.open(path), numbers(i), numbers(60_000 * i), numbers(50_000), i % 2 == 0))
        parts.append(held[i:])
    for i in reversed(range(10)):
        reads.wait(tickets[i])
        assert np.array_equal(memory[60_000 * i : 60_000 * i + 50_000], parts[i])
    assert len(set(tickets)) == 10


def test_what_was_read_is_counted_by_kind(opener: Opener, tmp_path: Path, memory: NDArray[np.uint8]) -> None:
    path, _ = written(tmp_path, 100_000)
    reads = opener(memory, False, max_read_bytes=DISK_BLOCK_BYTES)
    file = reads.open(path)
    assert reads.stats() == ReadStats(0, 0, 0, 0)
    reads.wait(reads.submit(file, numbers(0), numbers(0), numbers(3 * DISK_BLOCK_BYTES), True))
    reads.wait(reads.submit(file, numbers(0), numbers(0), numbers(DISK_BLOCK_BYTES + 1), False))
    found = reads.stats()
    assert (found.bytes_urgent, found.bytes_prefetched, found.num_reads) == (
        3 * DISK_BLOCK_BYTES,
        DISK_BLOCK_BYTES + 1,
        5,
    )
    assert found.busy_ns > 0


def test_a_request_without_pieces_is_done_at_once(opener: Opener, tmp_path: Path, memory: NDArray[np.uint8]) -> None:
    reads = opener(memory, False)
    file = reads.open(written(tmp_path, 10)[0])
    ticket = reads.submit(file, numbers(), numbers(), numbers(), False)
    assert reads.is_done(ticket)
    reads.wait(ticket)
    assert reads.cancel(reads.submit(file, numbers(), numbers(), numbers(), True))


@pytest.mark.parametrize("end", ["wait", "cancel"])
def test_a_ticket_is_good_for_one_end(opener: Opener, tmp_path: Path, memory: NDArray[np.uint8], end: str) -> None:
    reads = opener(memory, False)
    ticket = reads.submit(reads.open(written(tmp_path, 10)[0]), numbers(0), numbers(0), numbers(10), True)
    getattr(reads, end)(ticket)
    for again in (reads.wait, reads.cancel, reads.promote, reads.is_done):
        with pytest.raises(ValueError, match=r"^ticket: there is none, or it was waited for or cancelled before$"):
            again(ticket)


def test_a_promoted_request_is_read_all_the_same(opener: Opener, tmp_path: Path, memory: NDArray[np.uint8]) -> None:
    path, held = written(tmp_path, 9000)
    reads = opener(memory, False)
    ticket = reads.submit(reads.open(path), numbers(0), numbers(100), numbers(9000), False)
    reads.promote(ticket)
    reads.wait(ticket)
    assert np.array_equal(memory[100:9100], held)


def test_a_file_cut_while_it_is_open_is_named(
    opener: Opener, new_folder: Callable[[], Path], memory: NDArray[np.uint8]
) -> None:
    for direct, left in product([False, True], [0, 5, DISK_BLOCK_BYTES, 2 * DISK_BLOCK_BYTES + 7]):
        with case(direct, left):
            memory[:] = 0
            path, held = written(new_folder(), 4 * DISK_BLOCK_BYTES)
            reads, file = opened_direct(opener, memory, path, direct)
            os.truncate(path, left)
            with pytest.raises(PackError) as fault:
                reads.wait(reads.submit(file, numbers(0), numbers(0), numbers(4 * DISK_BLOCK_BYTES), True))
            assert str(fault.value) == CUT
            os.truncate(path, 0)
            path.write_bytes(held.tobytes())
            reads.wait(reads.submit(file, numbers(0), numbers(0), numbers(4 * DISK_BLOCK_BYTES), True))
            assert np.array_equal(memory[: 4 * DISK_BLOCK_BYTES], held), "what follows a fault is as before"


def test_a_file_cut_behind_what_is_read_does_no_harm(opener: Opener, tmp_path: Path, memory: NDArray[np.uint8]) -> None:
    path, held = written(tmp_path, 4 * DISK_BLOCK_BYTES)
    reads = opener(memory, False)
    file = reads.open(path)
    os.truncate(path, 2 * DISK_BLOCK_BYTES)
    reads.wait(reads.submit(file, numbers(0), numbers(0), numbers(2 * DISK_BLOCK_BYTES), True))
    assert np.array_equal(memory[: 2 * DISK_BLOCK_BYTES], held[: 2 * DISK_BLOCK_BYTES])


def test_a_read_that_fails_says_where_and_why(opener: Opener, tmp_path: Path, memory: NDArray[np.uint8]) -> None:
    """A folder in the file's place, under the descriptor that the reads hold: the system itself refuses."""
    path, _ = written(tmp_path, 50_000)
    reads = opener(memory, False)
    file = reads.open(path)
    (held,) = (int(entry.name) for entry in Path("/proc/self/fd").iterdir() if same_target(entry, path))
    folder = os.open(tmp_path, os.O_RDONLY)
    os.dup2(folder, held)
    os.close(folder)
    with pytest.raises(PackError, match=r"^file\.bin: read failed at byte 4097 \(Is a directory\)$"):
        reads.wait(reads.submit(file, numbers(4097), numbers(0), numbers(10), True))


def same_target(entry: Path, path: Path) -> bool:
    try:
        return entry.readlink() == path
    except FileNotFoundError:  # the descriptor that listed the folder
        return False


OUTSIDE_MEMORY, OUTSIDE_FILE = "pieces: a piece does not lie in memory", "pieces: a piece does not lie in the file"


def test_a_piece_outside_memory_or_file_is_refused(
    opener: Opener, new_folder: Callable[[], Path], memory: NDArray[np.uint8]
) -> None:
    for offset, place, size, message in [
        (0, 0, 0, "pieces: a piece has no bytes"),
        (0, 0, -4096, "pieces: a piece has no bytes"),
        (0, -4096, 4096, OUTSIDE_MEMORY),
        (0, MEMORY_BYTES, 4096, OUTSIDE_MEMORY),
        (0, MEMORY_BYTES - 4096, 8192, OUTSIDE_MEMORY),
        (0, 2**63 - 4096, 4096, OUTSIDE_MEMORY),
        (-4096, 0, 4096, OUTSIDE_FILE),
        (12288, 0, 4096, OUTSIDE_FILE),
        (8192, 0, 8192, OUTSIDE_FILE),
        (2**63 - 4096, 0, 4096, OUTSIDE_FILE),
    ]:
        with case(offset, place, size, message):
            reads = opener(memory, False)
            file = reads.open(written(new_folder(), 10_000)[0])
            with pytest.raises(ValueError, match=f"^{message}$"):
                reads.submit(file, numbers(0, offset), numbers(0, place), numbers(1, size), True)
            reads.wait(reads.submit(file, numbers(8192), numbers(MEMORY_BYTES - 4096), numbers(4096), True))


def test_direct_reads_of_parts_of_blocks_are_refused(
    opener: Opener, new_folder: Callable[[], Path], memory: NDArray[np.uint8]
) -> None:
    for offset, place, size in [(512, 0, 4096), (0, 512, 4096), (0, 0, 512)]:
        with case(offset, place, size):
            reads, file = opened_direct(opener, memory, written(new_folder(), 20_000)[0], True)
            with pytest.raises(
                ValueError, match=r"^pieces: direct reads are of whole blocks of 4096 bytes, in the file and in"
            ):
                reads.submit(file, numbers(offset), numbers(place), numbers(size), True)


def test_lists_of_different_lengths_and_unknown_files_are_refused(
    opener: Opener, tmp_path: Path, memory: NDArray[np.uint8]
) -> None:
    reads = opener(memory, False)
    file = reads.open(written(tmp_path, 10_000)[0])
    with pytest.raises(ValueError, match=r"^places: 1 values, expected 2$"):
        reads.submit(file, numbers(0, 1), numbers(0), numbers(1, 1), True)
    with pytest.raises(ValueError, match=r"^sizes: 3 values, expected 2$"):
        reads.submit(file, numbers(0, 1), numbers(0, 1), numbers(1, 1, 1), True)
    for unknown in (-1, 1):
        with pytest.raises(ValueError, match=r"^pieces: no such file$"):
            reads.submit(unknown, numbers(0), numbers(0), numbers(1), True)


def test_numbers_out_of_range_are_refused(opener: Opener, memory: NDArray[np.uint8]) -> None:
    for options, message in [
        ({"num_threads": 0}, "threads: expected 1 to 1024"),
        ({"num_threads": 1025}, "threads: expected 1 to 1024"),
        ({"max_read_bytes": 0}, "max_read_bytes: expected a multiple of 4096, at most 2\\^30"),
        ({"max_read_bytes": 5000}, "max_read_bytes: expected a multiple of 4096, at most 2\\^30"),
        ({"max_read_bytes": (1 << 30) + 4096}, "max_read_bytes: expected a multiple of 4096, at most 2\\^30"),
    ]:
        with case(options, message), pytest.raises(ValueError, match=f"^{message}$"):
            opener(memory, False, **options)


def test_direct_reads_need_aligned_memory(opener: Opener, memory: NDArray[np.uint8]) -> None:
    with pytest.raises(ValueError, match=r"^memory: direct reads need it aligned to 4096 bytes$"):
        opener(memory[512:], True)


def test_files_that_are_none_are_refused(opener: Opener, tmp_path: Path, memory: NDArray[np.uint8]) -> None:
    reads = opener(memory, False)
    with pytest.raises(PackError, match=r"^missing\.bin: file is missing$"):
        reads.open(tmp_path / "missing.bin")
    os.mkfifo(tmp_path / "pipe")
    for other in ("pipe", "."):
        with pytest.raises(PackError, match=r": is no regular file$"):
            reads.open(tmp_path / other)


def test_files_are_closed_with_the_reads(opener: Opener, tmp_path: Path, memory: NDArray[np.uint8]) -> None:
    path, _ = written(tmp_path, 10)
    reads = opener(memory, False)
    reads.open(path)
    reads.close()
    reads.close()
    assert not [entry for entry in Path("/proc/self/fd").iterdir() if same_target(entry, path)]


def test_an_urgent_request_overtakes_what_was_asked_for_before(endless: tuple[NativeReads, int, int]) -> None:
    reads, ticket, file = endless
    reads.wait(reads.submit(file, numbers(0), numbers(0), numbers(10 << 20), True))
    assert not reads.is_done(ticket)
    assert reads.stats().bytes_urgent == 10 << 20


def test_a_promoted_request_overtakes_what_was_asked_for_before(endless: tuple[NativeReads, int, int]) -> None:
    reads, ticket, file = endless
    later = reads.submit(file, numbers(0), numbers(0), numbers(10 << 20), False)
    assert not reads.is_done(later)
    reads.promote(later)
    reads.wait(later)
    assert not reads.is_done(ticket)
    assert reads.stats().bytes_urgent == 10 << 20


def test_what_is_cancelled_is_not_all_read_and_frees_the_threads(endless: tuple[NativeReads, int, int]) -> None:
    reads, ticket, file = endless
    assert not reads.cancel(ticket)
    later = reads.submit(file, numbers(0), numbers(0), numbers(10 << 20), False)
    reads.wait(later)
    before = reads.stats()
    assert reads.cancel(reads.submit(file, numbers(), numbers(), numbers(), False))
    assert reads.stats() == before, "nothing is read any more"


def test_what_was_read_before_it_is_cancelled_is_there(tmp_path: Path, memory: NDArray[np.uint8]) -> None:
    reads = open_reads(memory, False)
    if isinstance(reads, BlockingReads):
        pytest.skip("nothing is read before it is waited for")
    path, held = written(tmp_path, 100_000)
    ticket = reads.submit(reads.open(path), numbers(0), numbers(0), numbers(100_000), False)
    while not reads.is_done(ticket):
        pass
    assert reads.cancel(ticket)
    assert np.array_equal(memory[:100_000], held)
    reads.close()


class AlarmError(Exception):
    pass


def test_a_signal_ends_waiting_and_leaves_the_request(endless: tuple[NativeReads, int, int]) -> None:
    def on_alarm(number: int, frame: FrameType | None) -> None:
        raise AlarmError

    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(AlarmError):
            endless[0].wait(endless[1])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not endless[0].is_done(endless[1])
    assert not endless[0].cancel(endless[1])


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_who_waits_hears_that_the_request_was_dropped(endless: tuple[NativeReads, int, int], end: str) -> None:
    reads, ticket, _ = endless
    heard: list[str] = []

    def wait() -> None:
        try:
            reads.wait(ticket)
        except ValueError as fault:
            heard.append(str(fault))

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not reads.stats().bytes_prefetched:
        pass
    if end == "cancel":
        assert not reads.cancel(ticket)
    else:
        reads.close()
    waiting.join()
    # Which of the two came first to the lock is open: waiting had begun, or the ticket was gone already.
    assert len(heard) == 1 and heard[0].startswith("ticket: ")


def test_threads_at_once_get_the_bytes_they_asked_for(tmp_path: Path, memory: NDArray[np.uint8]) -> None:
    path, held = written(tmp_path, 1 << 20)
    reads = open_reads(memory, False, 4, DISK_BLOCK_BYTES)
    file, wrong = reads.open(path), []

    def ask(caller: int) -> None:
        random, base = np.random.default_rng(caller), caller * 100_000
        for _ in range(100):
            offset, size = int(random.integers(0, 900_000)), int(random.integers(1, 100_000))
            ticket = reads.submit(file, numbers(offset), numbers(base), numbers(size), bool(random.integers(2)))
            if random.random() < 0.3:
                reads.cancel(ticket)
                continue
            reads.wait(ticket)
            if not np.array_equal(memory[base : base + size], held[offset : offset + size]):
                wrong.append((caller, offset, size))

    callers = [threading.Thread(target=ask, args=(caller,)) for caller in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    reads.close()
    assert wrong == []


# In a process of its own: what a test forks has none of the threads of the others.
FORKED = """
import mmap, os, sys
from pathlib import Path
import numpy as np
from moe_pack.runtime.cpu.reads import NativeReads

memory = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
reads = NativeReads(memory, direct=False)
file = reads.open(Path(sys.argv[1]))
zero, size = np.zeros(1, np.int64), np.full(1, 1 << 20)
ticket = reads.submit(file, zero, zero, size, False)
child = os.fork()
if child == 0:
    try:
        reads.wait(ticket)
    except RuntimeError as fault:
        print(fault, flush=True)
    del reads  # and what belongs to it, without its threads
    own = NativeReads(memory, direct=False)
    own.wait(own.submit(own.open(Path(sys.argv[1])), zero, zero, size, False))
    own.close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
reads.wait(ticket)
reads.close()
"""


@pytest.mark.slow
def test_a_forked_child_is_told_whose_reads_they_are_and_opens_its_own(tmp_path: Path) -> None:
    if not is_available():
        pytest.skip("native kernels were not built: no C++ compiler")
    path, _ = written(tmp_path, 1 << 20)
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert (run.stdout, run.stderr) == ("reader: opened by the process that this one was forked from\n", "")
    assert run.returncode == 0
