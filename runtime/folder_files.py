"""The small files of a checkpoint's folder (tokenizer, configs), read whole; never its weights."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import CheckpointError, RangeReader

_MAX_FILE_BYTES = 64 << 20  # the largest published tokenizer.json has 33 MB


class FolderFiles:
    """A folder's files by name, as `Text` asks for them. Holds nothing open; a file is read anew each time.

    Raises:  CheckpointError if there is no such folder.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder")
        self.folder = folder

    def has(self, name: str) -> bool:
        """Whether the folder has this file."""
        return (self.folder / name).exists()

    def read_file(self, name: str) -> NDArray[np.uint8]:
        """All bytes of a file: u8, own memory.

        Raises:  CheckpointError if it is larger than such files are, or cannot be read.
        """
        with RangeReader(self.folder / name, CheckpointError) as reader:
            if reader.num_bytes > _MAX_FILE_BYTES:
                raise CheckpointError(f"{name}: {reader.num_bytes} bytes, at most {_MAX_FILE_BYTES}")
            return reader.read(0, reader.num_bytes)
