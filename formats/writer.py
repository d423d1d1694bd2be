"""Writes a pack so that it can be killed at any moment: a machine of named states and numbered steps.

    CLOSED --open--> WRITING --seal--> SEALED
                 \\-> SEALED    (the folder already holds this very pack)

Every mkdir, truncate, write, fsync, rename and unlink is a step, announced to `on_step` before it is done. An item is
journaled after its bytes are on the drive; the manifest comes last: without one the folder is no pack, and the same
conversion started again goes on from the journal. Specified in docs/format.md.
"""

import errno
import fcntl
import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import strict_json
from moe_pack.formats.errors import ConversionError, PackError
from moe_pack.formats.index import Digests
from moe_pack.formats.journal import decode_lines, encode_line
from moe_pack.formats.layout import DENSE_FILE, Item, PackLayout
from moe_pack.formats.manifest import MANIFEST_FILE, ContentFile, read_manifest
from moe_pack.formats.ranges import RangeReader
from moe_pack.formats.tensor_file import split_bytes

JOURNAL_FILE = "conversion.journal"
CONVERSION_FILE = "conversion.json"
_CHUNK_BYTES = 8 << 20


class State(Enum):
    """Where the writer stands."""

    CLOSED = "closed"
    WRITING = "writing"
    SEALED = "sealed"


@dataclass(frozen=True, slots=True)
class Step:
    """One change to the drive, about to be made."""

    number: int
    action: str
    path: str


def digests_of(extent: NDArray[np.uint8]) -> Digests:
    """CRC-32 and SHA-256 of an item's bytes."""
    return Digests(zlib.crc32(extent.data), hashlib.sha256(extent.data).digest())


class PackWriter:
    """The one writer of an output folder, from `open` to `close`; a second one is refused while it lives.

    Args:    folder: made if missing.   layout: what will be written.   conversion: hex digest of source, plan and
             versions.   stamp: tells a source that changed since.   on_step: called before each step.
    """

    def __init__(
        self,
        folder: Path,
        layout: PackLayout,
        conversion: str,
        stamp: str,
        on_step: Callable[[Step], None] = lambda step: None,
    ) -> None:
        self.folder = folder
        self.state = State.CLOSED
        self._layout = layout
        self._items = list(layout.items())
        self._numbers = {item: number for number, item in enumerate(self._items)}
        self._conversion = strict_json.canonical({"conversion": conversion, "source_stamp": stamp})
        self._identity = conversion
        self._on_step = on_step
        self._num_steps = 0
        self._lock_fd = -1
        self._fds: dict[str, int] = {}
        self._done: dict[int, Digests] = {}
        self.resumed_bytes = 0  # in items that an earlier run has written

    def open(self) -> None:
        """Locks the folder and starts or resumes the conversion; headers are written here.

        Raises:  ConversionError if the folder holds something else, is in use, or its drive is too full.
        """
        assert self.state is State.CLOSED, self.state
        self._lock()
        try:
            if self._is_complete():
                self._clean()
                self.state = State.SEALED
                self.resumed_bytes = sum(item.num_bytes for item in self._items)
                return
            self._claim_folder()
            self._open_journal()
            self._check_space()
            self._open_files()
        except (ConversionError, PackError):
            self.close()
            raise
        self.state = State.WRITING
        self.resumed_bytes = sum(self._items[number].num_bytes for number in self._done)
        headers = {name: file.header for name, file in self._layout.files()}
        for item in self.pending():
            if item.kind == "header":
                raw = np.frombuffer(headers[item.file], np.uint8)
                self.write(item, raw, digests_of(raw))

    def pending(self) -> list[Item]:
        """The items not yet written, in order."""
        return [item for item in self._items if self._numbers[item] not in self._done]

    def write(self, item: Item, extent: NDArray[np.uint8], digests: Digests) -> None:
        """Writes an item's bytes to the drive, then journals it.

        Args:    extent: u8 [item.num_bytes].   digests: of these bytes.
        """
        assert self.state is State.WRITING and len(extent) == item.num_bytes, (self.state, item, len(extent))
        fd, view = self._fds[item.file], extent.data
        for offset, size in split_bytes(0, item.num_bytes, _CHUNK_BYTES):
            self._write(item.file, fd, view[offset : offset + size], item.offset + offset)
        self._do("fsync", item.file, lambda: os.fsync(fd))
        number = self._numbers[item]
        journal = self._fds[JOURNAL_FILE]
        self._write(JOURNAL_FILE, journal, memoryview(encode_line(number, digests)), os.fstat(journal).st_size)
        self._do("fsync", JOURNAL_FILE, lambda: os.fsync(journal))
        self._done[number] = digests

    def expert_digests(self) -> Mapping[tuple[int, int], Digests]:
        """The digests of all extents, by MoE layer index and expert."""
        assert not self.pending(), "every item is written"
        return {
            (item.layer, item.expert): self._done[self._numbers[item]] for item in self._items if item.kind == "expert"
        }

    def seal(self, tables: Iterable[tuple[str, bytes]], manifest: Callable[[tuple[ContentFile, ...]], bytes]) -> None:
        """Writes the small files and, last, the manifest; then the folder is a pack.

        Args:    tables: names and bytes.   manifest: makes its bytes from the account of all other files but experts.
        """
        assert self.state is State.WRITING and not self.pending(), (self.state, "every item is written")
        files = []
        for name, raw in tables:
            self._replace(name, raw)
            files.append(ContentFile(name, len(raw), hashlib.sha256(raw).hexdigest()))
        with RangeReader(self.folder / DENSE_FILE, ConversionError) as dense:
            files.append(ContentFile(DENSE_FILE, dense.num_bytes, dense.sha256()))
        self._replace(MANIFEST_FILE, manifest(tuple(sorted(files, key=lambda file: file.name))))
        self.state = State.SEALED
        self._clean()

    def close(self) -> None:
        """Releases the folder; what is journaled stays for the next run."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
        if self.state is State.WRITING:
            self.state = State.CLOSED

    def _lock(self) -> None:
        if not self.folder.exists():
            self._do("mkdir", str(self.folder), lambda: self.folder.mkdir(parents=True, exist_ok=True))
            self._do("fsync", str(self.folder.parent), lambda: _sync_folder(self.folder.parent))
        try:
            self._lock_fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as fault:
            raise ConversionError(f"{self.folder}: cannot be used as output folder ({fault.strerror})") from fault
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the process, however it ends
        except BlockingIOError as fault:
            os.close(self._lock_fd)
            self._lock_fd = -1
            raise ConversionError(
                f"{self.folder}: another conversion is writing here; wait for it, or stop it"
            ) from fault

    def _is_complete(self) -> bool:
        path = self.folder / MANIFEST_FILE
        if not path.exists():
            return False
        with RangeReader(path, PackError) as reader:
            found = read_manifest(reader.read(0, min(reader.num_bytes, 2_000_000)).tobytes())
        if found.conversion != self._identity:
            raise ConversionError(f"{self.folder}: holds another pack; give another output folder, or remove this one")
        return True

    def _claim_folder(self) -> None:
        path = self.folder / CONVERSION_FILE
        if path.exists():
            if path.read_bytes() != self._conversion:
                raise ConversionError(
                    f"{self.folder}: holds an unfinished conversion of another source or with other options; "
                    "repeat that command, or remove the folder"
                )
            return
        for held in sorted(self.folder.iterdir()):
            if held.name != f"{CONVERSION_FILE}.tmp":
                raise ConversionError(
                    f"{self.folder}: holds {held.name!r}, which is no conversion; give a new or empty folder"
                )
        self._replace(CONVERSION_FILE, self._conversion)

    def _open_journal(self) -> None:
        fd = self._open_file(JOURNAL_FILE)
        size = os.fstat(fd).st_size
        lines, whole = decode_lines(os.pread(fd, size, 0))
        self._done = {number: digests for number, digests in lines.items() if number < len(self._items)}
        if whole != size:
            self._do("truncate", JOURNAL_FILE, lambda: os.ftruncate(fd, whole))

    def _check_space(self) -> None:
        """Refuses to start what cannot end: better now than after hours."""
        needed = sum(item.num_bytes for item in self.pending())
        drive = os.fstatvfs(self._lock_fd)
        free = drive.f_bavail * drive.f_frsize
        if free < needed:
            raise ConversionError(
                f"{self.folder}: needs {needed:,} more bytes, the drive has {free:,} free; "
                "free some space, then run the same command again"
            )

    def _open_files(self) -> None:
        done_files = {self._items[number].file for number in self._done}
        for name, file in self._layout.files():
            if name in done_files and not (self.folder / name).exists():
                raise ConversionError(
                    f"{self.folder}: {name} was removed from an unfinished conversion; remove the folder"
                )
            fd = self._open_file(name)
            if os.fstat(fd).st_size != file.num_bytes:
                if name in done_files:
                    raise ConversionError(f"{self.folder}: {name} has changed its size; remove the folder")
                # Sets all padding to zero without writing it: what is never written reads as zeros.
                self._do("truncate", name, lambda fd=fd, size=file.num_bytes: os.ftruncate(fd, size))  # type: ignore[misc]  # bound early
                self._do("fsync", name, lambda fd=fd: os.fsync(fd))  # type: ignore[misc]  # bound early
        self._do("fsync", ".", lambda: os.fsync(self._lock_fd))

    def _open_file(self, name: str) -> int:
        path = self.folder / name
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC

        def opened() -> None:
            self._fds[name] = os.open(path, flags, 0o644)

        self._do("open" if path.exists() else "create", name, opened)
        return self._fds[name]

    def _replace(self, name: str, raw: bytes) -> None:
        """Writes a small file beside its place, then renames it there."""
        beside = self.folder / f"{name}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        opened: list[int] = []
        self._do("create", beside.name, lambda: opened.append(os.open(beside, flags, 0o644)))
        try:
            self._write(beside.name, opened[0], memoryview(raw), 0)
            self._do("fsync", beside.name, lambda: os.fsync(opened[0]))
        finally:
            os.close(opened[0])
        self._do("rename", name, lambda: beside.rename(self.folder / name))
        self._do("fsync", ".", lambda: os.fsync(self._lock_fd))

    def _clean(self) -> None:
        for name in (JOURNAL_FILE, CONVERSION_FILE):
            if (self.folder / name).exists():
                self._do("unlink", name, (self.folder / name).unlink)
        self._do("fsync", ".", lambda: os.fsync(self._lock_fd))

    def _write(self, path: str, fd: int, view: memoryview, offset: int) -> None:
        def whole() -> None:
            done = 0
            while done < len(view):
                done += os.pwrite(fd, view[done:], offset + done)

        self._do("write", path, whole)

    def _do(self, action: str, path: str, change: Callable[[], object]) -> None:
        self._num_steps += 1
        self._on_step(Step(self._num_steps, action, path))
        try:
            change()
        except OSError as fault:
            advice = "give another output folder" if action == "mkdir" else "mend that, then run the same command again"
            if fault.errno == errno.ENOSPC:
                advice = "free some space, then run the same command again"
            raise ConversionError(f"{self.folder}: {action} {path} failed ({fault.strerror}); {advice}") from fault


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
