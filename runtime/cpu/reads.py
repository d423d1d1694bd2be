"""Reads of files into one piece of memory, several in flight.

`open_reads` gives the native ones (runtime/cpu/native/reader.h), by threads that never hold the interpreter's lock.
Without the extension it gives their plain twin, which reads when somebody waits, so that nothing overlaps.
"""

import errno
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.formats import base
from moe_pack.formats.pack.layouts import whole_blocks
from moe_pack.runtime.cpu.kernels import is_available

if is_available():
    import moe_pack.runtime.cpu._native as _native

NUM_THREADS = 8
MAX_READ_BYTES = 1 << 20  # of one call
_LARGEST_READ_BYTES, _MAX_THREADS = 1 << 30, 1024

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]


def cut_error(place: str) -> formats.PackError:
    """Returns the error for a file that was truncated while it was in use."""
    return formats.PackError(f"{place}: was truncated while it was in use; restore the file and start again")


@dataclass(frozen=True, slots=True)
class ReadStats:
    """The reads so far."""

    bytes_urgent: int = 0
    bytes_prefetched: int = 0
    num_reads: int = 0  # calls
    busy_ns: int = 0  # with at least one read in flight


class Reads(Protocol):
    """Reads of files into one piece of memory. `close` it: that ends its threads and closes its files.

    A request has a ticket until somebody has waited for it or cancelled it. Urgent requests come before others, each
    kind in the order of the requests; a read under way delays them by at most `max_read_bytes` for each thread.
    """

    def open(self, path: Path) -> int:
        """Opens a file and returns its number.

        Raises:  PackError if it is missing, unreadable or no regular file; RunError if its file system refuses direct
                 reads and `direct` asks for them.
        """

    def submit(self, file: int, offsets: Numbers, places: Numbers, sizes: Numbers, urgent: bool) -> int:
        """Requests pieces of a file, `sizes[i]` bytes from `offsets[i]` into `memory[places[i]:]`; returns a ticket.

        Pieces that follow one another in the file are read together, `max_read_bytes` a call. The last may reach beyond
        the end of the file, up to the next multiple of 4096; the memory there then has any content. The caller sees to
        it that pieces do not overlap in memory and that nobody uses it meanwhile.
        Args:    offsets, places, sizes: int64 [n]; multiples of 4096 for direct reads.
        Raises:  ValueError if a piece is outside of memory or file, or not of whole blocks for direct reads.
        """

    def wait(self, ticket: int) -> None:
        """Waits until all pieces are read, and forgets the ticket. A signal's exception ends it; the ticket stays.

        Raises:  PackError, which names the file, if it was truncated or cannot be read: the request's first fault.
        """

    def is_done(self, ticket: int) -> bool:
        """Returns whether `wait` would return, or raise, at once."""

    def promote(self, ticket: int) -> None:
        """Makes a request urgent: it overtakes all that are not urgent."""

    def cancel(self, ticket: int) -> bool:
        """Cancels reads that have not begun, waits for the others; returns whether all pieces were read anyway."""

    def stats(self) -> ReadStats: ...

    def close(self) -> None:
        """Cancels reads that have not begun, waits for the others, ends threads, closes files; may be called again."""


class NativeReads:
    """Reads by threads of the extension.

    Args:    memory: u8 [n], writable, in one piece, kept until `close`; aligned to 4096 bytes for direct reads.
             direct: past the system's cache (O_DIRECT).   max_read_bytes: the most bytes of one call.
    Raises:  ValueError if memory or numbers are not like that.
    """

    def __init__(
        self, memory: Bytes, direct: bool, num_threads: int = NUM_THREADS, max_read_bytes: int = MAX_READ_BYTES
    ) -> None:
        self._direct = direct
        self._names: list[str] = []
        self._reader: object | None = _native.open_reader(memory, num_threads, direct, max_read_bytes)

    def open(self, path: Path) -> int:
        descriptor = _opened(path, self._direct)
        try:
            number, _ = _native.add_file(self._opened_reader(), descriptor)  # duplicates the descriptor
        finally:
            os.close(descriptor)
        self._names.append(path.name)
        return number

    def submit(self, file: int, offsets: Numbers, places: Numbers, sizes: Numbers, urgent: bool) -> int:
        return _native.submit_reads(self._opened_reader(), file, offsets, places, sizes, urgent)

    def wait(self, ticket: int) -> None:
        fault = _native.wait_reads(self._opened_reader(), ticket)
        if fault is not None:
            file, at, error = fault
            raise _fault(self._names[file], at, error)

    def is_done(self, ticket: int) -> bool:
        return _native.are_read(self._opened_reader(), ticket)

    def promote(self, ticket: int) -> None:
        _native.promote_reads(self._opened_reader(), ticket)

    def cancel(self, ticket: int) -> bool:
        return _native.cancel_reads(self._opened_reader(), ticket)

    def stats(self) -> ReadStats:
        return ReadStats(*_native.read_stats(self._opened_reader()))

    def close(self) -> None:
        if self._reader is not None:
            _native.close_reader(self._reader)
            self._reader = None

    def _opened_reader(self) -> object:
        assert self._reader is not None, "reads are open"
        return self._reader


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    descriptor: int
    num_bytes: int  # at opening


@dataclass(slots=True)
class _Request:
    file: _File
    pieces: list[tuple[int, int, int]]  # offset, place, size
    urgent: bool


class BlockingReads:
    """The plain twin in Python: `wait` reads the request in the caller's thread. Arguments as for `NativeReads`."""

    def __init__(
        self, memory: Bytes, direct: bool, num_threads: int = NUM_THREADS, max_read_bytes: int = MAX_READ_BYTES
    ) -> None:
        if not 1 <= num_threads <= _MAX_THREADS:
            raise ValueError("threads: expected 1 to 1024")
        if (
            not formats.DISK_BLOCK_BYTES <= max_read_bytes <= _LARGEST_READ_BYTES
            or max_read_bytes % formats.DISK_BLOCK_BYTES
        ):
            raise ValueError("max_read_bytes: expected a multiple of 4096, at most 2^30")
        if direct and memory.ctypes.data % formats.DISK_BLOCK_BYTES:
            raise ValueError("memory: direct reads need it aligned to 4096 bytes")
        self._memory = memory.data.cast("B")
        self._direct = direct
        self._max_read_bytes = max_read_bytes
        self._files: list[_File] = []
        self._requests: dict[int, _Request] = {}
        self._next_ticket = 1
        self._stats = ReadStats(0, 0, 0, 0)
        self._is_open = True

    def open(self, path: Path) -> int:
        assert self._is_open, "reads are open"
        descriptor = _opened(path, self._direct)
        self._files.append(_File(path.name, descriptor, os.fstat(descriptor).st_size))
        return len(self._files) - 1

    def submit(self, file: int, offsets: Numbers, places: Numbers, sizes: Numbers, urgent: bool) -> int:
        assert self._is_open, "reads are open"
        if not 0 <= file < len(self._files):
            raise ValueError("pieces: no such file")
        for name, values in (("places", places), ("sizes", sizes)):
            if len(values) != len(offsets):
                raise ValueError(f"{name}: {len(values)} values, expected {len(offsets)}")
        pieces = list(zip(offsets.tolist(), places.tolist(), sizes.tolist(), strict=True))
        for piece in pieces:
            if fault := self._fault_of(*piece, self._files[file].num_bytes):
                raise ValueError(f"pieces: {fault}")
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        self._requests[ticket] = _Request(self._files[file], pieces, urgent)
        return ticket

    def wait(self, ticket: int) -> None:
        request = self._known(ticket)
        began = time.perf_counter_ns()
        num_bytes = num_reads = 0
        try:
            for offset, place, size in request.pieces:
                for start in range(0, size, self._max_read_bytes):
                    part = min(self._max_read_bytes, size - start)
                    got, calls = self._read(request.file, offset + start, place + start, part)
                    num_bytes, num_reads = num_bytes + got, num_reads + calls
        except formats.PackError:
            del self._requests[ticket]
            raise
        finally:
            self._count(request.urgent, num_bytes, num_reads, time.perf_counter_ns() - began)
        del self._requests[ticket]

    def is_done(self, ticket: int) -> bool:
        return not self._known(ticket).pieces

    def promote(self, ticket: int) -> None:
        self._known(ticket).urgent = True

    def cancel(self, ticket: int) -> bool:
        done = self.is_done(ticket)
        del self._requests[ticket]
        return done

    def stats(self) -> ReadStats:
        return self._stats

    def close(self) -> None:
        for file in self._files:
            os.close(file.descriptor)
        self._files.clear()
        self._requests.clear()
        self._is_open = False

    def _known(self, ticket: int) -> _Request:
        assert self._is_open, "reads are open"
        if ticket not in self._requests:
            raise ValueError("ticket: there is none, or it was waited for or cancelled before")
        return self._requests[ticket]

    def _fault_of(self, offset: int, place: int, size: int, num_bytes: int) -> str | None:
        if size < 1:
            return "a piece has no bytes"
        if place < 0 or place + size > len(self._memory):
            return "a piece does not lie in memory"
        if not 0 <= offset < num_bytes or offset + size > whole_blocks(num_bytes):
            return "a piece does not lie in the file"
        if self._direct and any(number % formats.DISK_BLOCK_BYTES for number in (offset, place, size)):
            return "direct reads are of whole blocks of 4096 bytes, in the file and in memory"
        return None

    def _read(self, file: _File, offset: int, place: int, size: int) -> tuple[int, int]:
        """Reads one part of a piece; returns its bytes within the file, and the number of calls."""
        expected, done, num_reads = min(size, file.num_bytes - offset), 0, 0
        while done < expected:
            try:
                got = base.read_at(file.descriptor, self._memory[place + done : place + size], offset + done)
            except OSError as fault:
                raise _fault(file.name, offset + done, fault.errno or errno.EIO) from fault
            done, num_reads = done + got, num_reads + 1
            # A direct read ends within a block only at the end of the file, and none can begin there.
            if not got or (self._direct and done % formats.DISK_BLOCK_BYTES and done < expected):
                raise _fault(file.name, offset + done, 0)
        return max(expected, 0), num_reads

    def _count(self, urgent: bool, num_bytes: int, num_reads: int, busy_ns: int) -> None:
        before = self._stats
        self._stats = ReadStats(
            before.bytes_urgent + (num_bytes if urgent else 0),
            before.bytes_prefetched + (0 if urgent else num_bytes),
            before.num_reads + num_reads,
            before.busy_ns + busy_ns,
        )


def open_reads(
    memory: Bytes, direct: bool, num_threads: int = NUM_THREADS, max_read_bytes: int = MAX_READ_BYTES
) -> NativeReads | BlockingReads:
    """Returns reads into this memory, native if the extension was built; arguments as for `NativeReads`."""
    kind = NativeReads if is_available() else BlockingReads
    return kind(memory, direct, num_threads, max_read_bytes)


def reads_directly(path: Path) -> bool:
    """Returns whether the file system of a file supports direct reads."""
    try:
        os.close(_opened(path, direct=True))
    except formats.RunError:
        return False
    return True


def _opened(path: Path, direct: bool) -> int:
    if direct and base.DIRECT_FLAG is None:
        raise formats.RunError(f"{path.name}: this system has no direct reads; take --read pread")
    flags = base.READ_FLAGS | (base.DIRECT_FLAG if direct and base.DIRECT_FLAG is not None else 0)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError as fault:
        raise formats.PackError(f"{path.name}: file is missing") from fault
    except OSError as fault:
        if direct and fault.errno == errno.EINVAL:
            raise formats.RunError(
                f"{path.name}: its file system does not support direct reads; take --read pread"
            ) from fault
        raise formats.PackError(f"{path.name}: cannot be opened ({fault.strerror})") from fault
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise formats.PackError(f"{path.name}: is no regular file")
    return descriptor


def _fault(name: str, at: int, error: int) -> formats.PackError:
    """Returns the error of a read that failed at a byte; with error 0, the file ended there."""
    return formats.PackError(f"{name}: read failed at byte {at} ({os.strerror(error)})") if error else cut_error(name)
