"""The folder a profile is written to, file by file, so that a killed run goes on with the files it has.

A file is written beside its place and renamed; the small JSON file that makes the folder a profile comes last. One
process at a time: the folder is locked from `open` to `close`.
"""

import fcntl
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from moe_pack.calib.arrays import Array, write_arrays
from moe_pack.formats import ConversionError, canonical

PROFILE_FILE = "profile.json"
WORK_FOLDER = "work"
_IDENTITY_FILE = "profile.unfinished.json"


def tidy(folder: Path) -> None:
    """Removes what only a run under way needs; the caller has the folder to itself, or it is done."""
    shutil.rmtree(folder / WORK_FOLDER, ignore_errors=True)
    (folder / _IDENTITY_FILE).unlink(missing_ok=True)  # last: it says whose the rest is


class ProfileStore:
    """The one writer of a profile folder. Owns the folder's lock; `close` it.

    Args:    folder: made if missing.   identity: digest of all that decides the profile.
             starts_anew: what was begun there for another identity is removed, not refused.
    Raises:  ConversionError if the folder holds something else, or another process is writing there.
    """

    def __init__(self, folder: Path, identity: str, starts_anew: bool = False) -> None:
        self.folder = folder
        self.work = folder / WORK_FOLDER
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as fault:
            raise ConversionError(f"{folder}: cannot be used as output folder ({fault.strerror})") from fault
        try:
            self._lock()
            if starts_anew:
                self._remove_other(canonical({"identity": identity}))
            self._claim(canonical({"identity": identity}))
            self.work.mkdir(exist_ok=True)
        except ConversionError:
            self.close()
            raise

    def has(self, name: str) -> bool:
        """Whether a file is there already."""
        return (self.folder / name).exists()

    def write(self, name: str, arrays: Mapping[str, Array]) -> None:
        """Writes a safetensors file of these arrays."""
        self.replace(name, (write_arrays(arrays),))

    def replace(self, name: str, pieces: Iterable[bytes]) -> None:
        """Writes a file of these pieces beside its place, then renames it there."""
        beside = self.folder / f"{name}.tmp"
        try:
            with beside.open("wb") as file:
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
            beside.rename(self.folder / name)
            os.fsync(self._lock_fd)
        except OSError as fault:
            raise ConversionError(
                f"{self.folder}: writing {name} failed ({fault.strerror}); mend that, then run the same command again"
            ) from fault

    def seal(self, raw: bytes) -> None:
        """Writes the file that makes the folder a profile, and removes what only a run under way needs."""
        self.replace(PROFILE_FILE, (raw,))
        tidy(self.folder)

    def close(self) -> None:
        """Releases the folder."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _lock(self) -> None:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the process, however it ends
        except BlockingIOError as fault:
            raise ConversionError(
                f"{self.folder}: another profile is being written here; wait for it, or stop it"
            ) from fault

    def _remove_other(self, identity: bytes) -> None:
        """Removes what was begun here for something else; a folder that was never ours is left to be refused."""
        path = self.folder / _IDENTITY_FILE
        if not path.exists() or path.read_bytes() == identity:
            return
        shutil.rmtree(self.work, ignore_errors=True)
        for held in self.folder.iterdir():
            if held != path:
                held.unlink()
        path.unlink()

    def _claim(self, identity: bytes) -> None:
        path = self.folder / _IDENTITY_FILE
        if path.exists():
            if path.read_bytes() != identity:
                raise ConversionError(
                    f"{self.folder}: holds an unfinished profile of another model, text or options; "
                    "repeat that command, or remove the folder"
                )
            return
        held = sorted(entry.name for entry in self.folder.iterdir() if entry.name != f"{_IDENTITY_FILE}.tmp")
        if held:
            raise ConversionError(f"{self.folder}: holds {held[0]!r}; give a new or empty folder for the profile")
        self.replace(_IDENTITY_FILE, (identity,))
