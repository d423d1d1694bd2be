"""The bytes of a checkpoint: its config, its tensors, and small files such as those of the tokenizer.

A `CheckpointFiles` only knows the names, dtypes, shapes and bytes of tensors; `Checkpoint` gives them their roles.
`SafetensorsFiles` is a Hugging Face folder with one or many safetensors shards, of which ranges are read.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.formats.base import json_files
from moe_pack.formats.families import weight_files
from moe_pack.formats.pack import safetensors
from moe_pack.formats.pack.manifests import SourceFile

_CONFIG = "config.json"
MAX_FILE_BYTES = 64 << 20  # the largest published tokenizer.json has 33 MB


class FolderFiles:
    """The small files of a folder. It keeps nothing open and reads a file each time.

    Raises:  CheckpointError if there is no such folder.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise formats.CheckpointError(f"{folder}: no such folder")
        self.folder = folder

    def has(self, name: str) -> bool:
        """Returns whether the folder has this file."""
        return (self.folder / name).exists()

    def read_file(self, name: str, most_bytes: int = MAX_FILE_BYTES) -> NDArray[np.uint8]:
        """Reads a whole file: u8 [bytes].

        Raises:  CheckpointError if it is larger than `most_bytes`, cannot be read, or is something else in its place.
        """
        with formats.RangeReader(self.folder / name, formats.CheckpointError) as reader:
            if reader.num_bytes > most_bytes:
                raise formats.CheckpointError(f"{name}: {reader.num_bytes} bytes, at most {most_bytes}")
            raw = reader.read(0, reader.num_bytes)
        check_small_file(raw, name)
        return raw


def check_small_file(raw: NDArray[np.uint8], name: str) -> None:
    """Refuses what lies in a small file's place; a text may be empty, but JSON may not.

    Raises:  CheckpointError as `check_content`.
    """
    if len(raw) or name.endswith(".json"):
        safetensors.check_content(raw[: safetensors.CONTENT_BYTES].tobytes(), name, formats.CheckpointError)


class CheckpointFiles(ABC):
    """The files of one checkpoint, open for reading: `close` them. `folder`: where they are, for messages."""

    folder: Path

    @abstractmethod
    def has(self, name: str) -> bool:
        """Returns whether there is a small file of this name, such as `tokenizer.json`."""

    @abstractmethod
    def read_file(self, name: str, most_bytes: int = MAX_FILE_BYTES) -> NDArray[np.uint8]:
        """Reads a whole small file: u8 [bytes].

        Raises:  CheckpointError if it is larger than `most_bytes`, or cannot be read.
        """

    def config(self) -> object:
        """Returns the values of `config.json`. Raises CheckpointError if it is missing, too long or not JSON."""
        return read_json(self, _CONFIG)

    @abstractmethod
    def entries(self) -> Mapping[str, safetensors.TensorEntry]:
        """Returns what is known of each tensor, by name; an entry's offset has a meaning in its file alone."""

    @abstractmethod
    def rename(self, names: Mapping[str, str]) -> None:
        """Gives tensors other names: those of the keys become the values."""

    @abstractmethod
    def file_of(self, tensor: str) -> str:
        """Returns the name of the file with a tensor, for messages."""

    @abstractmethod
    def read(self, tensor: str, start: int, num_bytes: int) -> NDArray[np.uint8]:
        """Reads `num_bytes` of a tensor, from its byte `start` on: u8, own memory.

        Raises:  CheckpointError if the file is cut short or cannot be read.
        """

    def read_each(self, tensor: str, starts: Sequence[int], num_bytes: int) -> NDArray[np.uint8]:
        """Reads a range of `num_bytes` from each of a tensor's bytes `starts`: u8 [starts, num_bytes].

        Raises:  as `read`.
        """
        pieces = [self.read(tensor, start, num_bytes) for start in starts]
        return np.stack(pieces) if pieces else np.empty((0, num_bytes), np.uint8)

    @abstractmethod
    def account(self) -> list[SourceFile]:
        """Returns every file with tensors, sorted by name."""

    def decoded_from(self, tensor: str) -> str | None:
        """Returns the type from which a tensor's values are decoded when they are read, or None."""
        return None

    def notes(self) -> Sequence[str]:
        """Returns lines for users on how the tensors are read, if that is not as they are."""
        return ()

    @abstractmethod
    def stamp(self) -> str:
        """Returns a digest that changes when the files change, such as of sizes and modification times."""

    @abstractmethod
    def close(self) -> None:
        """Closes all files."""


class ShardFiles(CheckpointFiles):
    """A checkpoint with `model.safetensors`, or with shards and their index."""

    def __init__(self) -> None:
        self._entries: dict[str, safetensors.TensorEntry] = {}
        self._shards: dict[str, str] = {}  # of each tensor
        self._notes: tuple[str, ...] = ()

    @abstractmethod
    def names(self) -> Collection[str]:
        """Returns the names of all files, and of those in folders as `folder/name`."""

    @abstractmethod
    def _open(self, weights: weight_files.WeightFiles) -> weight_files.JoinedShards:
        """Opens the shards and returns what their headers say."""

    def config(self) -> object:
        """Returns the values of `config.json`. Raises CheckpointError if it is missing, too long or not JSON."""
        if not self.has(_CONFIG):
            weight_files.refuse_adapters(str(self.folder), self.names())  # which has none: its base has
        return super().config()

    def entries(self) -> Mapping[str, safetensors.TensorEntry]:
        """Returns what the shards' headers say of each tensor, by name."""
        if not self._entries:
            weights = self.weights()
            joined = self._open(weights)
            self._entries, self._shards = joined.entries, joined.shards
            self._notes = (*weights.notes, *joined.notes)
        return self._entries

    def weights(self) -> weight_files.WeightFiles:
        """Returns which of the files have the weights. Raises CheckpointError as `find_weights`."""
        return weight_files.find_weights(str(self.folder), self.names(), lambda: read_json(self, weight_files.INDEX))

    def rename(self, names: Mapping[str, str]) -> None:
        """Gives tensors other names: those of the keys become the values."""
        self._shards = {names.get(old, old): shard for old, shard in self._shards.items()}
        renamed = ((names.get(old, old), entry) for old, entry in self._entries.items())
        self._entries = {new: replace(entry, name=new) for new, entry in renamed}

    def file_of(self, tensor: str) -> str:
        """Returns the name of the shard with a tensor."""
        return self._shards[tensor]

    def notes(self) -> Sequence[str]:
        """Returns lines on the files and tensors that are not read."""
        return self._notes


class SafetensorsFiles(FolderFiles, ShardFiles):
    """A folder with safetensors. Owns the shards' descriptors.

    The shards are opened by `entries`, so that a config that is wrong is found first.
    Raises:  CheckpointError if there is no such folder; from `entries`, if files are missing or damaged, or the index
             does not fit the shards.
    """

    def __init__(self, folder: Path) -> None:
        FolderFiles.__init__(self, folder)
        ShardFiles.__init__(self)
        self._readers: dict[str, formats.RangeReader] = {}

    def names(self) -> Collection[str]:
        """Returns the names of the files in the folder and in its folders."""
        return weight_files.file_names(self.folder)

    def read(self, tensor: str, start: int, num_bytes: int) -> NDArray[np.uint8]:
        """Reads a range of a tensor: u8, own memory.

        Raises:  CheckpointError if the shard is cut short or cannot be read.
        """
        entry = self._entries[tensor]
        assert 0 <= start <= start + num_bytes <= entry.num_bytes, (tensor, start, num_bytes)
        return self._readers[self._shards[tensor]].read(entry.offset + start, num_bytes)

    def read_each(self, tensor: str, starts: Sequence[int], num_bytes: int) -> NDArray[np.uint8]:
        """Reads several ranges of a tensor: u8 [starts, num_bytes]. Raises as `read`."""
        offset = self._entries[tensor].offset
        return self._readers[self._shards[tensor]].read_each([offset + start for start in starts], num_bytes)

    def account(self) -> list[SourceFile]:
        """Returns every shard, sorted by name."""
        files = []
        for shard, reader in sorted(self._readers.items()):
            length = int.from_bytes(reader.read(0, 8).tobytes(), "little")
            header = reader.read(0, 8 + length)
            files.append(SourceFile(shard, reader.num_bytes, hashlib.sha256(header.data).hexdigest()))
        return files

    def stamp(self) -> str:
        """Returns a digest of the shards' sizes and modification times."""
        paths = sorted(self.folder / shard for shard in self._readers)
        facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def close(self) -> None:
        """Closes all shards."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _open(self, weights: weight_files.WeightFiles) -> weight_files.JoinedShards:
        paths = {shard: self.folder / shard for shard in weights.shards}
        joined = weight_files.join_shards(
            weights, {shard: safetensors.read_header(path, formats.CheckpointError) for shard, path in paths.items()}
        )
        self._readers = {shard: formats.RangeReader(path, formats.CheckpointError) for shard, path in paths.items()}
        return joined


def read_json(files: FolderFiles | CheckpointFiles, name: str) -> object:
    """Reads a JSON file of a checkpoint. Raises CheckpointError if it is missing, too long or not JSON."""
    if not files.has(name):
        raise formats.CheckpointError(f"{files.folder}: {name} is missing; a checkpoint folder has one")
    return json_files.parse(files.read_file(name).tobytes(), name, formats.CheckpointError, is_foreign=True)
