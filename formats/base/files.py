"""Files and folders on every operating system: positional reads and writes, locks of folders, flushed names.

Windows has no `fcntl`, no descriptors of folders and no positional reads, and macOS lacks some. Functions look for what
the system has, never for its name, so that a test can take functions away.
"""

import importlib
import os
import threading
from contextlib import suppress
from pathlib import Path
from types import ModuleType


def _flag(name: str) -> int:
    return int(getattr(os, name, 0))


# Without O_NONBLOCK opening a pipe would wait for a writer. Without O_BINARY and O_NOINHERIT Windows would change line
# ends, and would pass descriptors on to programs that it starts.
_FLAGS = _flag("O_CLOEXEC") | _flag("O_NOINHERIT") | _flag("O_BINARY")
READ_FLAGS = os.O_RDONLY | _flag("O_NONBLOCK") | _FLAGS
WRITE_FLAGS = os.O_CREAT | _FLAGS  # with O_RDWR or O_WRONLY
DIRECT_FLAG: int | None = getattr(os, "O_DIRECT", None)  # past the system's cache; None: the system has no such flag

_seek_lock = threading.Lock()  # of every descriptor, where reading at a place means to move there first


def read_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Reads once at byte `offset` of a file; returns the number of bytes, 0 at the file's end. Raises OSError."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], offset)
    with _seek_lock:
        os.lseek(descriptor, offset, os.SEEK_SET)
        raw = os.read(descriptor, len(view))
    view[: len(raw)] = raw
    return len(raw)


def write_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Writes once at byte `offset` of a file; returns the number of bytes. Raises OSError."""
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, view, offset)
    with _seek_lock:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, view)


def drop_cached(descriptor: int) -> bool:
    """Drops a file from the system's cache; returns False where the system has no such call."""
    if not hasattr(os, "posix_fadvise"):
        return False
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def sync_folder(folder: Path) -> None:
    """Flushes a folder's names to the disk. Raises OSError. Does nothing on Windows, which does it with each file."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FolderLock:
    """A lock on an existing folder, until `close` or the process's end.

    POSIX locks the folder itself. Elsewhere a file next to it, `.lock` behind its name, is locked, and `close` removes
    it; a shared lock only keeps the folder's place.
    Args:    is_shared: whether other processes may have such a lock too; does nothing in a folder without locks.
    Raises:  BlockingIOError if another process has locked it; OSError if it is no folder.
    """

    def __init__(self, folder: Path, is_shared: bool = False) -> None:
        self._folder, self._descriptor = folder, -1
        self._file: Path | None = None
        fcntl = _module("fcntl")
        if fcntl is not None:
            self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        else:
            self._file = None if is_shared else _lock_file(folder)
            if self._file is not None:
                self._descriptor = os.open(self._file, os.O_RDWR | WRITE_FLAGS, 0o600)
        try:
            if fcntl is not None:
                fcntl.flock(self._descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            elif self._file is not None:
                _lock_byte(self._descriptor)
        except OSError as fault:
            if is_shared and not isinstance(fault, BlockingIOError):
                return
            os.close(self._descriptor)
            raise

    def close(self) -> None:
        """Unlocks the folder; may be called again."""
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        if self._file is not None:
            with suppress(OSError):  # another process has opened it by now, and removes it
                self._file.unlink()

    def sync(self) -> None:
        """Flushes the folder's names to the disk. Raises OSError."""
        if self._file is None and self._descriptor >= 0:
            os.fsync(self._descriptor)
        else:
            sync_folder(self._folder)


def lock_file(descriptor: int) -> None:
    """Locks an open file for this process until it is closed. Does nothing in a folder without locks.

    Raises:  BlockingIOError if another process has locked it.
    """
    fcntl = _module("fcntl")
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            _lock_byte(descriptor)
    except BlockingIOError:
        raise
    except OSError:
        return


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _lock_file(folder: Path) -> Path:
    if not folder.is_dir():
        raise NotADirectoryError(None, "Not a directory", str(folder))
    path = folder.resolve()
    return path.with_name(f"{path.name}.lock")


def _lock_byte(descriptor: int) -> None:
    msvcrt = importlib.import_module("msvcrt")
    try:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    except PermissionError as fault:
        raise BlockingIOError(fault.errno, fault.strerror) from fault
