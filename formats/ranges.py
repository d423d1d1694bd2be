"""Reading ranges of files by `pread`, whole or not at all; and mapping them, for who can bear that they are cut."""

import hashlib
import mmap
import os
import stat
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats.errors import MoePackError

_HASH_CHUNK_BYTES = 8 << 20


class RangeReader:
    """One file, open for reading. Owns its descriptor: `close` it, or use it in a `with`.

    Args:    path: the file.   error: what to raise.
    Raises:  `error` if the file cannot be opened.
    """

    def __init__(self, path: Path, error: type[MoePackError]) -> None:
        self._place = path.name
        self._error = error
        try:
            # Not blocking: a pipe in a file's place would otherwise be waited for.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError as fault:
            raise error(f"{self._place}: file is missing") from fault
        except OSError as fault:
            raise error(f"{self._place}: cannot be opened ({fault.strerror})") from fault
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            raise error(f"{self._place}: is no regular file")

    @property
    def num_bytes(self) -> int:
        """The file's size now."""
        return os.fstat(self._fd).st_size

    def read(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """A range of the file, in memory of its own: u8 [num_bytes].

        Raises:  the reader's error if the file ends before the range does, or the drive fails.
        """
        out = np.empty(num_bytes, np.uint8)
        view, done = out.data, 0
        while done < num_bytes:
            try:
                got = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as fault:
                raise self._error(f"{self._place}: read failed at byte {offset + done} ({fault.strerror})") from fault
            if not got:
                raise self._error(f"{self._place}: ends at byte {offset + done}, expected {offset + num_bytes}")
            done += got
        return out

    def map(self) -> NDArray[np.uint8]:
        """The whole file, mapped for reading: u8 [num_bytes]; valid as long as it is referred to.

        Where the file is cut meanwhile, reading what it no longer has is a SIGBUS: leave that to who guards against it.
        Raises:  the reader's error if the file is empty or cannot be mapped.
        """
        try:
            return np.frombuffer(mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ), np.uint8)
        except (OSError, ValueError) as fault:
            raise self._error(f"{self._place}: cannot be mapped ({fault})") from fault

    def sha256(self) -> str:
        """SHA-256 of the whole file, in hexadecimal."""
        digest, offset, size = hashlib.sha256(), 0, self.num_bytes
        while offset < size:
            chunk = self.read(offset, min(_HASH_CHUNK_BYTES, size - offset))
            digest.update(chunk.data)
            offset += len(chunk)
        return digest.hexdigest()

    def close(self) -> None:
        """Closes the file; reading afterwards is an error of the caller's."""
        os.close(self._fd)

    def __enter__(self) -> "RangeReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
