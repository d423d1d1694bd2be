"""A folder changed step by step: each mkdir, open, truncate, write, fsync, rename and unlink is announced, then made.

What writes packs is built of these steps, so that tests can stop it before any of them. Which step may follow which,
so that nothing is lost in between, is for the callers to know: `writer`, `rethreshold`, `sidecar`.
"""

import errno
import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moe_pack.formats.errors import ConversionError

_READ_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Step:
    """One change to the drive, about to be made."""

    number: int
    action: str
    path: str


def pass_step(step: Step) -> None:
    """The `on_step` of those who do not ask."""


class SteppedFolder:
    """A folder under one process's lock. Owns the lock and the files opened here: `close` it.

    Args:    on_step: called before each step.
    Raises:  ConversionError, from every method, if the drive refuses a step.
    """

    def __init__(self, folder: Path, on_step: Callable[[Step], None]) -> None:
        self.folder = folder
        self._on_step = on_step
        self._num_steps = 0
        self._lock_fd = -1
        self._fds: dict[str, int] = {}

    def make(self) -> None:
        """Makes the folder if it is missing."""
        if not self.folder.exists():
            self._do("mkdir", str(self.folder), lambda: self.folder.mkdir(parents=True, exist_ok=True))
            self._do("fsync", str(self.folder.parent), lambda: _sync_folder(self.folder.parent))

    def lock(self, busy: str) -> None:
        """Takes the folder for this process alone, until `close` or the process's end.

        Raises:  ConversionError with `busy` if another one has it.
        """
        try:
            self._lock_fd = os.open(self.folder, _READ_FOLDER)
        except OSError as fault:
            raise ConversionError(f"{self.folder}: cannot be used as output folder ({fault.strerror})") from fault
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the process, however it ends
        except BlockingIOError as fault:
            os.close(self._lock_fd)
            self._lock_fd = -1
            raise ConversionError(f"{self.folder}: {busy}") from fault

    def close(self) -> None:
        """Closes all files and gives the folder up."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def free_bytes(self) -> int:
        """What the folder's drive has room for."""
        drive = os.fstatvfs(self._lock_fd)
        return drive.f_bavail * drive.f_frsize

    def open(self, name: str) -> None:
        """Opens a file for writing, made empty if it is missing."""
        path = self.folder / name
        self._open("open" if path.exists() else "create", name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)

    def num_bytes(self, name: str) -> int:
        """The size of an open file."""
        return os.fstat(self._fds[name]).st_size

    def read(self, name: str) -> bytes:
        """All bytes of an open file, a small one."""
        return os.pread(self._fds[name], self.num_bytes(name), 0)

    def write(self, name: str, view: memoryview, offset: int) -> None:
        """Writes all of `view` at a place of an open file."""

        def whole() -> None:
            done = 0
            while done < len(view):
                done += os.pwrite(self._fds[name], view[done:], offset + done)

        self._do("write", name, whole)

    def truncate(self, name: str, num_bytes: int) -> None:
        """Gives an open file another size; what is added reads as zeros."""
        self._do("truncate", name, lambda: os.ftruncate(self._fds[name], num_bytes))

    def sync(self, name: str) -> None:
        """Brings an open file's bytes to the drive."""
        self._do("fsync", name, lambda: os.fsync(self._fds[name]))

    def sync_folder(self) -> None:
        """Brings the folder's names to the drive."""
        self._do("fsync", ".", lambda: os.fsync(self._lock_fd))

    def write_file(self, name: str, raw: bytes) -> None:
        """Writes a whole small file and brings its bytes, not its name, to the drive."""
        self._open("create", name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
        try:
            self.write(name, memoryview(raw), 0)
            self.sync(name)
        finally:
            os.close(self._fds.pop(name))

    def rename(self, name: str, target: str) -> None:
        """Puts a file in the place of another, for good."""
        self._do("rename", target, lambda: (self.folder / name).rename(self.folder / target))
        self.sync_folder()

    def replace(self, name: str, raw: bytes) -> None:
        """Writes a small file beside its place, then renames it there."""
        self.write_file(f"{name}.tmp", raw)
        self.rename(f"{name}.tmp", name)

    def unlink(self, name: str) -> None:
        """Removes a file; its name may come back until the folder is synced."""
        self._do("unlink", name, (self.folder / name).unlink)

    def _open(self, action: str, name: str, flags: int) -> None:
        def opened() -> None:
            self._fds[name] = os.open(self.folder / name, flags, 0o644)

        self._do(action, name, opened)

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
    fd = os.open(folder, _READ_FOLDER)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
